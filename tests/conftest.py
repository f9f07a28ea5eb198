"""What every test gets: a fixed torch seed, one thread, and no record of a call."""

import collections
import gc
import importlib
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from remat._offload import offload as _offload
from remat._partial import decide as _decide
from remat._partial.decide import CACHES


# The search for doctests would import its modules a second time, by other names, and
# with them transformers and diffusers.
collect_ignore = ["support"]

# On Intel's processors MKL adds up a transposed product in another order. What these
# tests compare bit for bit are operations, not how a library computes one.
# MKL reads it at the first product.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Two workers share two cores; and with more threads plain code is not always equal to
# itself bit for bit. The variable is for the programs that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Tensors made while test modules are imported, the same in each worker.
torch.manual_seed(0)

# Wall-clock limits per example only measure how busy the machine is.
hypothesis.settings.register_profile(
    "remat", deadline=None, print_blob=True, derandomize=True
)
hypothesis.settings.load_profile("remat")


# What only one marker selects. To import other packages, or to make torch's database,
# takes each worker ten seconds.
APART = {"clients": "**/whole/clients", "opinfo": "**/test_opinfo*.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what no test is selected from."""
    selected = config.option.markexpr
    is_simple = " or " not in selected and "(" not in selected
    left_out = re.findall(r"\bnot (\w+)", selected) if is_simple else ()
    is_apart = any(collection_path.match(APART.get(m, "-")) for m in left_out)
    return True if is_apart else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no tests of slow rows where none is selected: there are 50,000 of them."""
    if "not slow" not in metafunc.config.option.markexpr:
        return
    own = metafunc.definition.own_markers
    own[:] = [_without_slow_rows(m) if m.name == "parametrize" else m for m in own]


def _without_slow_rows(mark: pytest.Mark) -> pytest.Mark:
    names, rows, *rest = mark.args
    rows = [*rows]
    others = [row for row in rows if not _is_slow(row)]
    if "ids" in mark.kwargs or not others:  # each id is of one row; a test has a row
        return mark
    return pytest.mark.parametrize(names, others, *rest, **mark.kwargs).mark


def _is_slow(row: object) -> bool:
    return any(mark.name == "slow" for mark in getattr(row, "marks", ()))


def pytest_configure(config: pytest.Config) -> None:
    """Count the rows of each test that has the marker `one_in`."""
    config.stash[_ROWS] = collections.Counter()


_ROWS = pytest.StashKey[collections.Counter[str]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark rows as slow, but one in so many of those that are not slow anyway.

    These have numbers whose digits, to the base of `n`, add up to a multiple of `n`: so
    all values of each table are among the rows of a product.
    """
    marker = item.get_closest_marker("one_in")
    if marker is None or item.get_closest_marker("slow"):
        return
    rows, test = item.config.stash[_ROWS], item.nodeid.partition("[")[0]
    (n,), k, digits = marker.args, rows[test], 0
    rows[test] += 1
    while k:
        k, digit = divmod(k, n)
        digits += digit
    if digits % n:
        item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds no CUDA device")


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_is_no_garbage() -> None:
    # What measures memory calls the collector, which would look at torch, at all tests
    # and at what earlier modules imported: half a second each time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    # pytest-randomly seeds random and NumPy; torch needs its own.
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _first_calls() -> None:
    # What a call does depends on those of its signature before it, and what it says on
    # what was said in this process.
    CACHES.clear()
    _decide._WARNED.clear()


@pytest.fixture(autouse=True)
def _no_modes_left() -> Iterator[None]:
    # A mode that stays, such as a default device, fails other tests much later.
    yield
    assert not torch._C._len_torch_function_stack()
    assert not torch._C._len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tables are written in full, however narrow the terminal is.
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Leave all to reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the files of offloading, which has to be empty in the end."""
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path))
    yield tmp_path
    assert os.listdir(tmp_path) == []


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each file of offloading at the time it is mapped."""
    found: list[int] = []
    mapped = _offload._mapped

    def noting(file, nbytes):
        found.append(os.fstat(file.fileno()).st_size)
        return mapped(file, nbytes)

    monkeypatch.setattr(_offload, "_mapped", noting)
    return found


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
    """Imports a file of benchmarks/."""
    pytest.importorskip("rich", reason="needs the extra `viz`")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module


@pytest.fixture
def pyplot() -> Iterator[types.ModuleType]:
    """matplotlib's, drawing to memory; all figures are closed afterwards."""
    pytest.importorskip("matplotlib").use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")
