"""Torch is as remat expects where it uses private API, or its version is named."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torchgen
from torch.utils import _python_dispatch

from remat import _torch
from remat._torch import (
    autograd,
    bodies,
    distributed,
    fakes,
    graphs,
    levels,
    modes,
    nodes,
    noted,
    operators,
    process,
    pytrees,
    renorms,
    seeds,
    selftest,
    storages,
    surroundings,
    tensors,
    tracing,
    twisters,
)


ROOT = Path(__file__).parents[2]
FILES = (
    *(autograd, bodies, distributed, fakes, graphs, levels, modes, nodes, noted),
    *(operators, process, pytrees, renorms, seeds, storages, surroundings, tensors),
    *(tracing, twisters),
)
SHIMS = sorted(
    name
    for name, value in vars(_torch).items()
    if not name.startswith("_") and not isinstance(value, ModuleType)
)
CHECKS = selftest.checks()


@pytest.mark.parametrize("name", SHIMS)
def test_torch_is_as_the_shim_expects(name):
    CHECKS[name]()


def test_every_check_is_of_a_shim():
    assert sorted(CHECKS) == SHIMS


def test_a_flag_that_threads_left_set_is_not_taken_for_a_change_of_torch(monkeypatch):
    flags = [k for k, v in vars(_python_dispatch).items() if type(v) is bool]
    assert flags
    for name in flags:
        monkeypatch.setattr(_python_dispatch, name, True)
    CHECKS["LeanDispatchMode"]()
    assert all(getattr(_python_dispatch, name) for name in flags)


class Wrong:
    """Can be used as a function, context, class or value, and does nothing."""

    def __call__(self, *_, **__):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


# By a class of torch itself, of which the shim is only the name.
NAMES_ALONE = {"no_torch_function": torch.Tensor.__torch_function__}


@pytest.mark.parametrize("name", SHIMS)
def test_the_check_of_a_shim_fails_if_it_does_something_else(name, monkeypatch):
    modules = [file for file in FILES if hasattr(file, name)]
    assert modules
    for module in modules:
        monkeypatch.setattr(module, name, NAMES_ALONE.get(name, Wrong()))
    assert fails(CHECKS[name])


def fails(check):
    try:
        check()
    except Exception:  # noqa: BLE001
        return True
    return False


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
NO_LEVELS = "torch.autograd.function._SingleLevelFunction = torch.autograd.Function"


@pytest.mark.skipif(torch.__version__ < "2.14", reason="the same as Function before")
def test_a_function_that_asks_for_setup_context_is_named_at_import():
    assert_named(imported(NO_LEVELS), "SingleLevelFunction")


def test_a_newer_torch_that_differs_is_one_warning_at_import():
    assert_named(imported(SWITCHED_OFF), "without_hooks")


def assert_named(result, shim):
    count, first, *more = result.stdout.splitlines()
    assert (count, result.returncode) == ("1", 0), result.stderr
    newest = selftest.RUN[-1]
    assert first.startswith(f"remat: torch 99.1.0 is newer than {newest}, ")
    assert [line for line in more if re.match(rf"\s+(\w+, )*{shim}\b.*\(\w+: ", line)]


def test_a_newer_torch_that_does_not_differ_is_no_warning_whatever_is_around():
    dtype = "torch.set_default_dtype(torch.float64)"
    device = "torch.set_default_device('meta')"
    result = imported(f"{dtype}; {device}; torch.set_grad_enabled(False)")
    assert (result.stdout, result.stderr) == ("0\n", "")


def test_nothing_is_examined_with_the_newest_torch_that_was_run():
    result = imported(SWITCHED_OFF, selftest.RUN[-1])
    assert (result.stdout, result.stderr) == ("0\n", "")


def test_a_torch_without_a_name_that_remat_needs_is_named():
    result = imported("del torch._C._functorch.get_unwrapped")
    assert "ImportError: remat: torch 99.1.0 lacks private API that" in result.stderr
    assert "get_unwrapped" in result.stderr.splitlines()[-1]


SLOW = """
import remat._torch.selftest as selftest, sys
before = {*sys.modules}
assert not selftest.failures()
print([m for m in {*sys.modules} - before if "_torch" not in m])
"""


def test_the_checks_import_nothing():
    run = [sys.executable, "-c", SLOW]
    result = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.stdout, result.stderr) == ("[]\n", "")


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
    assert selftest.release(torch.__version__) in map(selftest.release, selftest.RUN)


def test_the_oldest_torch_that_was_run_is_the_oldest_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(selftest.RUN[0].split(".")[:2])
    assert f"torch>={oldest}" in project["dependencies"]


@pytest.mark.parametrize("version", selftest.RUN)
def test_the_docs_name_every_torch_that_was_run(version):
    assert version in (ROOT / "docs/limits.md").read_text()


def test_make_runs_every_torch():
    (others,) = re.findall(
        r"^TORCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    pins = (ROOT / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^torch==(.*)$", pins, re.MULTILINE)
    assert sorted([pinned, *others.split()]) == sorted(selftest.RUN)
