"""Measures how long operations take, for a budget with `costs="measured"`.

`recorder` has the operations of the first call timed. `budgeted` asks for the costs.

Invariant: an operation is timed once in a process, on the tensors that it was first
called with. So calls that record the same have the same costs.
Rejected: to repeat an operation until its time is steady. Each of them would run
several times in the user's forward.
"""

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from remat._base.op import Op
from remat._partial.cost import work
from remat._partial.plan import Step


_SECONDS: dict[Hashable, float] = {}
_MOST = 2**16  # operations that are remembered


class Timing:
    """Calls operations, and notes how long they take.

    Args:
        call: calls an operation.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self._last = call, 0.0

    def __call__(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operation, and wait until it is done."""
        _wait()
        start = time.perf_counter()
        result = self._call(func, *args, **kwargs)
        _wait()
        self._last = time.perf_counter() - start
        return result

    def note(self, op: Op) -> None:
        """Note what the last operation was, unless it was timed before."""
        if len(_SECONDS) < _MOST and not any(
            v.device.type == "meta" for v in op.outputs
        ):
            _SECONDS.setdefault(_key(op), self._last)


def _wait() -> None:
    # What was asked of an accelerator before must not count.
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _key(op: Op) -> Hashable:
    return op.func, op.args, op.kwargs


def measured_work(step: Step) -> float:
    """Return what it costs to run an operation again, in seconds.

    Where it was not timed, that is an estimate.
    """
    if step.is_view:
        return 0.0
    seconds = _SECONDS.get(_key(step.op))
    return work(step) if seconds is None else seconds
