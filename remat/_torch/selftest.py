"""Whether torch is as the shims of this package expect: one small check for each.

With a torch newer than every one that the tests ran with, the checks run at import, and
what fails is one warning. With the others nothing runs at import: the tests run them.

Invariant: every name that this package exports has a check.
Rejected: to check a shim where it is first used. That is mostly in a backward, and what
is raised there says nothing of versions.
"""

import importlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor


# Every torch that all tests ran with; pyproject.toml and docs/limits.md name them too.
RUN = ("2.13.0", "2.14.1")

_MODULES = (
    *("autograd", "bodies", "distributed", "fakes", "graphs", "levels", "modes"),
    *("nodes", "operators", "process", "pytrees", "storages", "surroundings"),
    *("tensors", "tracing"),
)
_CHECKS = (
    *("expected_autograd", "expected_distributed", "expected_fakes"),
    *("expected_graphs", "expected_levels", "expected_modes"),
    *("expected_operators", "expected_surroundings", "expected_tracing"),
)

Check: TypeAlias = Callable[[], None]
_found: dict[str, Check] = {}
_slow: set[Check] = set()


def expects(*shims: str, at_import: bool = True) -> Callable[[Check], Check]:
    """Register a check of what these names of the package expect of torch.

    Args:
        *shims: the names.
        at_import: whether it runs at import. What imports for seconds does not.
    """

    def register(check: Check) -> Check:
        _found.update(dict.fromkeys(shims, check))
        if not at_import:
            _slow.add(check)
        return check

    return register


def checks() -> dict[str, Check]:
    """Return the check of each shim, by name."""
    for module in _CHECKS:  # here, as most imports of remat need none
        importlib.import_module(f"remat._torch.{module}")
    return _found


def failures() -> list[str]:
    """Run the checks of an import; return which shims are not as expected, and why.

    They run in a thread of their own, where there is no mode, no level of torch.func
    and no inference mode, whatever surrounds the import.
    """
    by_check: dict[Check, list[str]] = {}
    for name, check in checks().items():
        if check not in _slow:
            by_check.setdefault(check, []).append(name)
    found: list[str] = []
    thread = threading.Thread(target=_run, args=(by_check, found))
    thread.start()
    thread.join()
    return found


def _run(by_check: dict[Check, list[str]], found: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for check, names in by_check.items():
            try:
                check()
            except Exception as error:  # noqa: BLE001
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                found.append(f"{', '.join(names)} ({why})")


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version.

    Example:
        >>> release("2.14.1+cu130"), release("2.15.0.dev20260805")
        ((2, 14, 1), (2, 15, 0))
    """
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def examine() -> None:
    """Say which torch this is, if it is not as expected.

    Raises:
        ImportError: it lacks a private name that cannot be done without.
    """
    try:
        for module in _MODULES:
            importlib.import_module(f"remat._torch.{module}")
    except (AttributeError, ImportError, KeyError) as error:
        raise ImportError(_LACKS.format(torch.__version__, error, *RUN)) from error
    if release(torch.__version__) <= release(RUN[-1]):
        return
    found = failures()
    if found:
        shims = "\n  ".join(found)
        warnings.warn(_DIFFERS.format(torch.__version__, RUN[-1], shims), stacklevel=2)


_LACKS = (
    "remat: torch {} lacks private API that remat needs: {}. remat was run with torch "
    "{} to {}. Install one of these."
)
_DIFFERS = (
    "remat: torch {} is newer than {}, the newest that remat was run with, and its "
    "private API differs. What uses the following may fail or be wrong. Install an "
    "older torch, or a newer remat.\n  {}"
)


# --- What the checks share --------------------------------------------------------


def leaf() -> Tensor:
    """Return a tensor to differentiate by."""
    return torch.tensor([1.0, 2.0], requires_grad=True)


def same(a: Any, b: Tensor) -> bool:
    """Say whether `a` is a tensor equal to `b`."""
    return isinstance(a, Tensor) and torch.equal(a, b)


@contextmanager
def replaced(scope: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Run the body with another value under a name."""
    missing = object()
    before = scope.get(name, missing)
    scope[name] = value
    try:
        yield
    finally:
        if before is missing:
            del scope[name]
        else:
            scope[name] = before


examine()
