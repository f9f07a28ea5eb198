"""Says what operations cost: FLOPs, bytes moved, time at nominal rates or measured.

Invariant: metadata alone is read, so that two processes decide alike. Only a budget
with `costs="measured"` has the operations of the first call timed: each once in a
process, on the tensors that it was first called with.
Rejected: to time all operations. That waits for the device, and decides by the noise of
the machine. To repeat an operation until its time is steady: it would run several times
in the user's forward.
"""

import time
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from remat._base.op import Op, Value
from remat._partial.plan import CallPlan, Fate, Record, Step, filled
from remat._torch import call_kernel
from remat.policies._functions import family
from remat.policies._operations import COSTS


# FLOPs and bytes per second of one CPU core and of an accelerator, to an order of
# magnitude.
_RATES = {"cpu": (2e10, 1e10)}
_ACCELERATOR = (5e13, 1e12)
_MODE = 8e-6  # seconds that a dispatch mode spends on each operation
_START = 2e-6  # seconds that it takes to start an operation, however small it is


def flops(step: Step) -> int:
    """Return the FLOPs of an operation, if torch's `FlopCounterMode` counts them; or 0.

    Example:
        >>> shapes = (2, 3), (3, 4), (2, 4)
        >>> a, b, c = (Value(s, torch.float32, torch.device("cpu")) for s in shapes)
        >>> flops(Step(Op(torch.ops.aten.mm.default, (a, b), outputs=(c,))))
        48
    """
    op = step.op
    own = COSTS.get(family(op.func)) if COSTS else None
    if own is not None:
        return int(own(op))
    count: Any = flop_registry.get(op.packet)
    if count is None:
        return 0
    # The form keeps a None that was returned, as the gradient of an input may be.
    result = filled(step.result, [*map(_shape, op.outputs)], [*map(_shape, op.inputs)])
    kwargs = {name: _shape(v) for name, v in op.kwargs}
    return int(count(*map(_shape, op.args), **kwargs, out_val=result))


def _shape(arg: Any) -> Any:
    if isinstance(arg, Value):
        return torch.Size(arg.shape)
    return [*map(_shape, arg)] if isinstance(arg, tuple) else arg


def bytes_moved(op: Op) -> int:
    """Return the bytes that an operation reads and writes."""
    return op.nbytes + sum(value.nbytes for value in op.inputs)


def seconds(step: Step) -> float:
    """Return about how long an operation takes."""
    op = step.op
    kinds = {value.device.type for value in op.outputs}
    rates = [_RATES.get(kind, _ACCELERATOR) for kind in kinds] or [_ACCELERATOR]
    flops_per_second, bytes_per_second = map(min, zip(*rates, strict=True))
    return max(flops(step) / flops_per_second, bytes_moved(op) / bytes_per_second)


def work(step: Step) -> float:
    """Return what it costs to run an operation again, in seconds at nominal rates."""
    return 0.0 if step.is_view else _START + seconds(step)


def reason_against(record: Record, plan: CallPlan) -> str:
    """Say why a plan is not worth a dispatch mode; "" if it is."""
    pairs = zip(record.steps, plan.fates, strict=True)
    dead = [step for step, fate in pairs if fate is Fate.DEAD and not step.is_view]
    saved, cost = sum(map(seconds, dead)), len(record.steps) * _MODE
    if saved > cost:
        return ""
    return (
        f"it would save about {saved * 1e6:.0f} us of work, and cost "
        f"{cost * 1e6:.0f} us of bookkeeping"
    )


_SECONDS: dict[Hashable, float] = {}
_MOST = 2**16  # operations that are remembered


class Timing:
    """Calls operations, and notes how long they take."""

    _last = 0.0

    def __call__(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operation, and wait until it is done."""
        _wait()
        start = time.perf_counter()
        result = call_kernel(func, *args, **kwargs)
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
    """Return what it costs to run an operation again, as timed or else estimated."""
    if step.is_view:
        return 0.0
    seconds = _SECONDS.get(_key(step.op))
    return work(step) if seconds is None else seconds
