"""Torch is one that remat was run with, or what differs is named at import."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torchgen
from torch.utils import _python_dispatch

from remat._torch import autograd, versions


ROOT = Path(__file__).parents[2]
FILES = {path.stem for path in (ROOT / "remat/_torch").glob("*.py")}


def shims(path):
    """Yield what a file of another room names of the room of torch."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(OURS):
            yield from {each.name for each in node.names} - FILES


OURS = "remat._torch."


def test_every_shim_has_a_test():
    tested = []
    for file in Path(__file__).parent.glob("test_*_shims.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "expects":
                tested += [n.value for n in ast.walk(node) if type(n) is ast.Constant]
    assert len(tested) == len({*tested})
    for path in (ROOT / "remat").rglob("*.py"):
        if path.parent.name != "_torch":
            assert {*tested}.issuperset(shims(path)), path


# --- What is tried at import ---


def test_torch_is_as_expected():
    assert versions.differences() == []


def test_flags_that_threads_left_set_are_no_difference(monkeypatch):
    flags = [k for k, v in vars(_python_dispatch).items() if type(v) is bool]
    assert flags
    for name in flags:
        monkeypatch.setattr(_python_dispatch, name, True)
    assert versions.differences() == []
    assert all(getattr(_python_dispatch, name) for name in flags)


@pytest.mark.parametrize(
    ("what", "module", "name"),
    [
        ("hooks for saved tensors", autograd, "top_hooks"),
        ("hooks for saved tensors", autograd, "push_hooks"),
        ("levels of torch.func", versions.levels, "call_below"),
        ("levels of torch.func", versions.levels, "apply_at_level"),
    ],
)
def test_what_differs_is_named(monkeypatch, what, module, name):
    monkeypatch.setattr(module, name, lambda *_: None)
    (found,) = versions.differences()
    assert found == what or found.startswith(f"{what} (")


def imported(before, torch_version="99.1.0"):
    """Import remat with a torch of that version, changed by the code `before`."""
    code = f"""
import warnings, torch
torch.__version__ = type(torch.__version__)({torch_version!r})
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import remat
print(len(caught), *(w.message for w in caught), sep="\\n")
"""
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)


SWITCHED_OFF = "torch._C._autograd._top_saved_tensors_default_hooks = lambda _: None"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("version", ["2.13.1", "99.1.0"])
def test_a_torch_that_was_not_run_and_differs_is_one_warning_at_import(version):
    result = imported(SWITCHED_OFF, version)
    count, warning = result.stdout.splitlines()
    assert (count, result.returncode) == ("1", 0), result.stderr
    run = " and ".join(versions.RUN)
    assert warning.startswith(f"remat: it was run with torch {run} and never with ")
    assert f"never with {version}, which" in warning
    assert "differs in: hooks for saved tensors. Install" in warning


NO_LEVELS = "torch.autograd.function._SingleLevelFunction = torch.autograd.Function"


@pytest.mark.skipif(torch.__version__ < "2.14", reason="the same as Function before")
def test_a_function_that_asks_for_setup_context_is_named_at_import():
    assert "differs in: levels of torch.func (" in imported(NO_LEVELS).stdout


@pytest.mark.slow
def test_another_torch_that_does_not_differ_is_no_warning_whatever_is_around():
    dtype = "torch.set_default_dtype(torch.float64)"
    device = "torch.set_default_device('meta')"
    result = imported(f"{dtype}; {device}; torch.set_grad_enabled(False)")
    assert (result.stdout, result.stderr) == ("0\n", "")


@pytest.mark.slow
def test_nothing_is_tried_with_the_newest_torch_that_was_run():
    result = imported(SWITCHED_OFF, versions.RUN[-1])
    assert (result.stdout, result.stderr) == ("0\n", "")


def test_a_torch_without_a_name_that_remat_needs_is_named():
    result = imported("del torch._C._functorch.get_unwrapped")
    assert "ImportError: remat: torch 99.1.0 lacks private API that" in result.stderr
    assert "get_unwrapped" in result.stderr.splitlines()[-1]


# --- What no program would show ---

# Found by torch's operator database, `vmap(grad)` of each, in test_opinfo.py.
ASKING_IN_CPP = {
    *("CumprodBackward0", "LinalgDetBackward0", "LinalgSlogdetBackward0"),
    *("LinalgHouseholderProductBackward0", "LinalgSolveExBackward0"),
    "OrmqrBackward0",
}


def test_every_formula_that_asks_for_grad_mode_is_known():
    path = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
    asking = set()
    for entry in re.split(r"^- name: ", path.read_text(), flags=re.MULTILINE):
        if "GradMode::is_enabled()" in entry:
            words = entry.partition("(")[0].split("_")
            asking.add("".join(map(str.capitalize, words)) + "Backward0")
    assert asking | ASKING_IN_CPP == autograd.NODES_ASKING_GRAD_MODE


# --- The versions that were run ---


def test_this_torch_is_one_that_is_run():
    assert versions.was_run(torch.__version__)


def test_the_oldest_torch_that_was_run_is_the_oldest_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(versions.RUN[0].split(".")[:2])
    assert f"torch>={oldest}" in project["dependencies"]


def test_make_runs_every_torch():
    makefile = (ROOT / "Makefile").read_text()
    (others,) = re.findall(r"^TORCHES := (.*)$", makefile, re.MULTILINE)
    pins = (ROOT / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^torch==(.*)$", pins, re.MULTILINE)
    assert sorted([pinned, *others.split()]) == sorted(versions.RUN)
