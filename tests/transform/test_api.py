"""The public surface: exactly these names, and a quiet import.

`tests/whole/test_api_reference.py` checks that they are documented.
"""

import importlib
import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.public import entries

import remat


ROOT = Path(__file__).parents[2]
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))

FUNCTIONS = {
    *("remat", "checkpoint", "register", "scope"),
    *("saved_residuals", "print_saved_residuals", "SavedResidual"),
    *("checkpoint_name", "explain", "compare", "is_recomputing"),
    *("Explanation", "ExplainedOp", "ExplainedInput", "Comparison", "ComparedPolicy"),
    *("Peak", "Holder", "HeldValues", "fit", "Plan", "FitSegment", "Followed"),
    *("custom_vjp", "keep"),
}
ERRORS = {
    *("RematError", "RecomputeError", "MutationError", "CaptureError"),
    *("RandomnessError", "KeyReuseError", "OffloadError", "BudgetError"),
}
NAMESPACES = {"chain", "compat", "nn", "policies", "random", "testing"}


def test_importing_gives_these_names_warns_of_nothing_and_needs_nothing_optional():
    """In a process of its own: here, any test may have imported a submodule."""
    optional = ["matplotlib", "rich", "scipy", "torch_remat", "torch._dynamo"]
    code = (
        f"import torch, sys; before = set(sys.modules)\n"
        f"import remat, remat.testing\n"
        f"print(*dir(remat))\n"
        f"print([m for m in {optional} if m in set(sys.modules) - before])"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )
    assert (result.returncode, result.stderr) == (0, "")
    names, found = result.stdout.splitlines()  # importing printed nothing
    names = {n for n in names.split() if not n.startswith("_")}
    assert names == FUNCTIONS | ERRORS | NAMESPACES
    assert found == "[]"


def test_checkpoint_is_remat_under_the_name_jax_users_look_for():
    assert remat.checkpoint is remat.remat


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_is_a_remat_error_and_a_runtime_error(name):
    assert issubclass(getattr(remat, name), remat.RematError)
    assert issubclass(getattr(remat, name), RuntimeError)


def test_the_api_pages_name_nothing_that_does_not_exist():
    importlib.import_module("remat.testing")  # which `import remat` leaves out
    for page in API_PAGES:
        for name in entries(page.read_text()):
            found = remat
            for part in name.split(".")[1:]:
                found = getattr(found, part)


@pytest.mark.skipif(
    not [*importlib.metadata.distributions(name="remat")], reason="a bare checkout"
)
def test_the_version_is_that_of_the_installed_package():
    assert remat.__version__ == importlib.metadata.version("remat")


@pytest.mark.slow
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
