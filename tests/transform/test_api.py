"""The public surface: exactly these names, documented, and a quiet import."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import remat
import remat.chain.schedules
import remat.testing


ROOT = Path(__file__).parents[2]
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))

FUNCTIONS = {
    *("remat", "checkpoint", "register", "scope"),
    *("saved_residuals", "print_saved_residuals", "Residual"),
    *("checkpoint_name", "explain", "compare", "is_recomputing"),
    *("Explanation", "ExplainedOp", "ExplainedInput", "Comparison", "ComparedPolicy"),
    *("Peak", "Holder", "HeldValues", "fit", "FitPlan"),
    *("FitBlock", "FitCandidate"),
}
ERRORS = {
    *("RematError", "RecomputeError", "MutationError", "CaptureError"),
    *("RandomnessError", "KeyReuseError", "OffloadError", "BudgetError"),
}
NAMESPACES = {"chain", "compat", "nn", "policies", "random", "testing"}


def documented(page_text):
    """The full names that a page documents with a directive of their own."""
    directive = r"^\.\. (?:auto|py:)\w+:: (remat[\w.]*)"
    return set(re.findall(directive, page_text, re.MULTILINE))


def test_the_package_has_exactly_these_public_names():
    """In a process of its own: here, any test may have imported a submodule."""
    result = run_python("import remat, remat.testing; print(*vars(remat))")
    assert result.returncode == 0, result.stderr
    names = {n for n in result.stdout.split() if not n.startswith("_")}
    assert names == FUNCTIONS | ERRORS | NAMESPACES


def test_checkpoint_is_remat_under_the_name_jax_users_look_for():
    assert remat.checkpoint is remat.remat


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_is_a_remat_error_and_a_runtime_error(name):
    assert issubclass(getattr(remat, name), remat.RematError)
    assert issubclass(getattr(remat, name), RuntimeError)


def test_every_public_name_is_in_the_api_pages():
    names = set().union(*(documented(page.read_text()) for page in API_PAGES))
    expected = {f"remat.{name}" for name in FUNCTIONS | ERRORS | NAMESPACES}
    assert expected <= names


def public(module):
    """The names that a module offers, which it imports as themselves."""
    tree = ast.parse(Path(module.__file__).read_text())
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return {a.asname for node in imports for a in node.names if a.asname == a.name}


@pytest.mark.parametrize("module", [remat.chain, remat.chain.schedules])
def test_every_name_of_chains_is_in_the_api_pages(module):
    names = set().union(*(documented(page.read_text()) for page in API_PAGES))
    found = public(module)
    assert len(found) > 4
    assert {f"{module.__name__}.{name}" for name in found} <= names


def test_the_api_pages_name_nothing_that_does_not_exist():
    for page in API_PAGES:
        for name in documented(page.read_text()):
            found = remat
            for part in name.split(".")[1:]:
                found = getattr(found, part)


def own(module):
    """What a module defines itself, by public name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    }


def test_every_public_function_has_a_docstring():
    values = {name: getattr(remat, name) for name in FUNCTIONS | ERRORS}
    for name, value in (values | own(remat.testing)).items():
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.skipif(
    not [*importlib.metadata.distributions(name="remat")], reason="a bare checkout"
)
def test_the_version_is_that_of_the_installed_package():
    assert remat.__version__ == importlib.metadata.version("remat")


def test_a_checkout_that_is_not_installed_is_imported(tmp_path):
    # An environment that has all packages of this one but remat.
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if "remat" not in entry.name:
                (tmp_path / entry.name).symlink_to(entry)
    code = f"""
import sys, importlib.metadata
sys.path += [{str(tmp_path)!r}]
assert not [*importlib.metadata.distributions(name="remat")]
import remat, torch
print(remat.__version__, remat.__file__)
x = torch.ones(3)
assert torch.equal(torch.func.grad(remat.remat(lambda x: x.sin().sum()))(x), x.cos())
"""
    run = [sys.executable, "-S", "-c", code]  # without the packages installed here
    result = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stdout.split() == [remat.__version__, remat.__file__], result.stderr


def test_the_package_is_typed():
    assert (Path(remat.__file__).parent / "py.typed").is_file()


def run_python(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )


def test_importing_prints_nothing_and_warns_of_nothing():
    result = run_python("import remat, remat.testing")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_importing_needs_no_optional_dependency():
    optional = ["matplotlib", "rich", "hypothesis", "torch_remat", "torch._dynamo"]
    code = (
        f"import torch, sys; before = set(sys.modules)\n"
        f"import remat, remat.testing\n"
        f"print([m for m in {optional} if m in set(sys.modules) - before])"
    )
    result = run_python(code)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
