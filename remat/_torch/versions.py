"""Whether torch is as remat knows it: each name is there, and another one works alike.

With a torch that the tests never ran with, a few things that all calls rely on are
tried at import, in some milliseconds. What fails is one warning. The tests try every
shim (`tests/torch`).

Invariant: with a torch that was run, nothing is tried at import.
Rejected: to check a shim where it is first used. That is mostly in a backward, and what
is raised there says nothing of versions.
"""

import importlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from typing_extensions import override


# Every torch that all tests ran with; pyproject.toml and docs/limits.md name them too.
RUN = ("2.13.0", "2.14.1")

try:
    from remat._torch import autograd, levels

    for _file in ("graphs", "nodes", "noted", "operators", "process"):
        importlib.import_module(f"remat._torch.{_file}")
except (AttributeError, ImportError, KeyError) as missing:
    raise ImportError(
        f"remat: torch {torch.__version__} lacks private API that remat needs: "
        f"{missing}. remat was run with torch {RUN[0]} to {RUN[-1]}. Install one of "
        "these."
    ) from missing


def was_run(version: str) -> bool:
    """Return whether the tests ran with a version.

    What a build adds after a plus is no other version, and what is after a point is.

    Example:
        >>> was_run("2.14.1+cu130"), was_run("2.14.1.dev20260805")
        (True, False)
    """
    return version.partition("+")[0] in RUN


def examine() -> None:
    """Warn of a torch that is none of those that were run, and differs."""
    if not was_run(torch.__version__) and (found := differences()):
        names = torch.__version__, " and ".join(RUN), ", ".join(found)
        warnings.warn(_DIFFERS.format(*names), stacklevel=2)


_DIFFERS = (
    "remat: it was run with torch {1} and never with {0}, which differs in: {2}. "
    "Install one of those torches, or another remat."
)


def differences() -> list[str]:
    """Return what of torch is not as expected, and the error that says so, if any."""
    found: list[str] = []

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for what, holds in CHECKS.items():
                try:
                    found.extend(() if holds() else (what,))
                except Exception as error:  # noqa: BLE001 - whatever another torch raises
                    text = str(error).partition("\n")[0]
                    found.append(f"{what} ({type(error).__name__}: {text})")

    # In a thread no mode and no level of the caller's is there.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


# --- What is tried ---


def _suspends_hooks() -> bool:
    with graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        hooks = autograd.suspend_hooks()
        gone = autograd.top_hooks(True) is None
        autograd.resume_hooks(hooks)
        back = autograd.hooks_here() == hooks == [(_as_it_is, _as_it_is)]
    return gone and back


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Same(levels.SingleLevelFunction):
    @staticmethod
    @override
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:  # pyrefly: ignore
        below = levels.unwrap_for_grad(x, layer.level())
        out = levels.call_below(layer, levels.GRAD, torch.clone, below)
        return levels.wrap_for_grad(out, layer.level())

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, cotangents[0]


def _makes_a_node_at_one_level() -> bool:
    x = torch.ones(2)
    with levels.grad_level() as level:
        t = levels.leaf_at(level, x, requires_grad=True)
        out = levels.apply_at_level(_Same.apply, levels.current_layer(), t)
        below = levels.base_tensor(out)
        has_node = out.grad_fn is not None and below.grad_fn is None
    return has_node and torch.equal(below, x)


CHECKS: dict[str, Callable[[], bool]] = {
    "hooks for saved tensors": _suspends_hooks,
    "levels of torch.func": _makes_a_node_at_one_level,
}

examine()
