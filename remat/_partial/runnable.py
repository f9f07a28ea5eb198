"""A plan laid out for running, and the modes that follow it through a forward.

Invariant: what is looked up for each operation is a list index or one look in a dict.
An operation that is left out returns the metadata that it returned then. That depends
on the metadata of its tensor arguments and on its *static* ones, the others, so these
are compared.
Rejected: comparing the static arguments of pointwise operations, such as a factor that
is annealed. They change no metadata.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_storage
from torch.utils.checkpoint import SAC_IGNORED_OPS
from typing_extensions import override

from remat._base.absent import (
    IGNORED,
    MismatchError,
    are_tensors,
    inputs_of,
    tensors_of,
)
from remat._base.op import Op, Value
from remat._base.source import user_line
from remat._partial.plan import CallPlan, Fate, Record, Step
from remat._partial.values import key_of
from remat._torch import (
    SHARED_COPY,
    LeanDispatchMode,
    call_kernel,
    eager_only,
    kernel_of,
)


# No record has these. A nested call makes shared copies of what it may update (see
# `_transform.state`), and how it does so depends on who differentiates it. Autograd
# asks subclasses for sizes and strides, and how often depends on that, too.
UNRECORDED = IGNORED | {*SAC_IGNORED_OPS, SHARED_COPY}
CLONE = torch.ops.aten.clone.default
# Autocast runs it on weights, unless its cache has the result from another call.
CAST = torch.ops.aten._to_copy.default


def fits_metadata(
    step: "Expected", args: Any, kwargs: Any, inputs: Sequence[Tensor]
) -> bool:
    """Say, by its arguments, whether an operation returns metadata as recorded."""
    if [*map(_metadata, inputs)] != step.metadata:
        return False
    pairs = zip(inputs, step.strides, strict=True)
    if not all(not then or t.stride() == then for t, then in pairs):
        return False
    if step.has_statics:
        return has_same_statics(step.op, args, kwargs, step.same)
    # An argument that was left to its default then may be passed now.
    return not kwargs and len(args) == len(inputs)


_metadata = operator.attrgetter("shape", "dtype", "device")


def statics_of(args: Any, kwargs: Any) -> list[str]:
    """Write the static arguments, with their names if they have one."""
    if are_tensors(args, kwargs):
        return []
    given = (*args, *(kwargs or {}).items())
    return [_text(arg) for arg in given if not tensors_of(arg)]


def _text(value: Any) -> str:
    """Write a static argument: of a storage its size, as its text is all it holds."""
    return str(value.nbytes()) if is_storage(value) else repr(value)


class Expected:
    """What is compared of an operation that is left out."""

    __slots__ = ("has_statics", "metadata", "op", "same", "strides")

    def __init__(self, op: Op) -> None:
        self.op, inputs = op, op.inputs
        self.metadata = [*map(_metadata, inputs)]
        # () for a tensor without strides: then they are not compared.
        self.strides = [value.stride for value in inputs]
        alone = all(isinstance(arg, Value) for arg in op.args)
        self.has_statics = bool(op.kwargs) or not alone
        pointwise = torch.Tag.pointwise in op.func.tags
        self.same = _same_type if pointwise else _same


def _same_type(now: Any, then: Any) -> bool:
    """Compare arguments of a pointwise operation, such as a factor."""
    return type(now) is type(then) or _same(now, then)


def _same(now: Any, then: Any) -> bool:
    if isinstance(then, Value):
        return isinstance(now, Tensor)
    if isinstance(then, tuple) and isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(map(_same, now, then))
    if isinstance(then, type):
        return type(now) is then
    return type(now) is type(then) and (now == then or (now != now and then != then))


def has_same_statics(
    op: Op, args: Sequence[Any], kwargs: Any, same: Callable[[Any, Any], bool] = _same
) -> bool:
    """Say whether the static arguments are as recorded."""
    if len(args) != len(op.args) or len(kwargs or ()) != len(op.kwargs):
        return False
    pairs = zip(args, op.args, strict=True)
    if not all(same(now, then) for now, then in pairs):
        return False
    if not kwargs:
        return True
    return all(name in kwargs and same(kwargs[name], v) for name, v in op.kwargs)


def described(steps: Sequence[Step], i: int, func: Any) -> str:
    """Describe the first operation that is not as recorded, with those before."""
    before = [_line(step.op) for step in steps[max(0, i - 2) : i]]
    then = [_line(step.op) for step in steps[i : i + 3]] or ["nothing more"]
    now = f"{func}  # {user_line()}" if func is not None else "nothing more"
    return "\n".join(
        [
            "  forward:",
            *(f"    {line}" for line in (*before, *then)),
            "  recompute:",
            *(f"    {line}" for line in (*before, now)),
        ]
    )


def _line(op: Op) -> str:
    return f"{op.func}" + (f"  # {op.source}" if op.source else "")


class RunnablePlan:
    """A plan laid out for running, one entry for each operation.

    `order` is that of the residuals, of which the plan uses some; () for its own.
    """

    def __init__(
        self, record: Record, plan: CallPlan, order: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.record, self.plan = record, plan
        self.funcs = [*[step.op.func for step in record.steps], None]
        # What each operation calls, and what it calls in a recompute, if anything.
        self.kernels = [_kernel_of(step.op) for step in record.steps]
        self.fates = [*plan.fates]
        self.runs = [
            kernel if fate is Fate.RECOMPUTED else None
            for kernel, fate in zip(self.kernels, self.fates, strict=True)
        ]
        self.unneeded = sorted({*range(len(record.inputs))} - plan.needed)
        self.written = {s for step in record.steps for s in step.writes}
        # Another storage may be that of a constant that is gone by now.
        made = (s for step in record.steps for s in {*step.makes} - {*step.reads})
        self.known = {*record.inputs, *made}
        self.expected = {  # of what is left out
            i: Expected(record.steps[i].op)
            for i, fate in enumerate(plan.fates)
            if fate is Fate.DEAD
        }
        # The index and the storage of each residual that it uses; and of the operations
        # whose results are saved, which residual each output is.
        self.residual_storages: list[tuple[int, int]] = []
        self.residual_index: dict[int, dict[int, int]] = {}
        used = {*plan.residuals}
        for index, (i, k) in enumerate(order or plan.residuals):
            if (i, k) in used:
                self.residual_index.setdefault(i, {})[k] = index
                self.residual_storages.append((index, record.steps[i].makes[k]))


def _kernel_of(op: Op) -> Callable[..., Any]:
    """Return what an operation calls from a dispatch mode."""
    kernel = kernel_of(op.func)
    if any(value.dtype.is_complex for value in (*op.inputs, *op.outputs)):
        return functools.partial(call_kernel, kernel)
    return kernel


class Follow(LeanDispatchMode):
    """Follows a plan from operation to operation."""

    def __init__(self, runnable: RunnablePlan) -> None:
        super().__init__()
        self.runnable = runnable
        self._funcs, self._kernels = runnable.funcs, runnable.kernels
        self._next = 0

    def note_saved(self, outs: Sequence[Any]) -> None:
        """Do nothing: the record says what the graph saves."""

    def end(self) -> None:
        """Check that every recorded operation has run, or raise a MismatchError."""
        if self._funcs[self._next] is not None:
            raise self._differs(None)

    @override
    def note_unseen(self) -> None:
        """Let nothing fit: the record has no operations that a mode does not see."""
        self._differs(None)

    def _differs(self, func: Any) -> Exception:
        """Return the error that another operation ran than was recorded."""
        error = MismatchError(described(self.runnable.record.steps, self._next, func))
        self._give_up()
        return error

    def _give_up(self) -> None:
        """Let nothing fit from now on: the function may catch the error and go on."""
        self._next = len(self._funcs) - 1


# --- Modes of a forward whose plan is known ---


class Collect(Follow):
    """Collects, in a forward, the residuals that a plan saves.

    `on_residual` is called with each as it is made. `fits` says whether the plan fits
    this forward so far.
    """

    def __init__(
        self,
        runnable: RunnablePlan,
        on_residual: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(runnable)
        self._on_residual = on_residual
        self._residual_index = runnable.residual_index
        self._collected: list[tuple[Tensor, int]] = []  # with their versions
        self.statics: dict[int, Any] = {}
        self.fits = True

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        if self._funcs[i] is not func:
            if func not in UNRECORDED:
                self._give_up()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._next = i + 1
        kernel = self._kernels[i]
        result = kernel(*args, **kwargs) if kwargs else kernel(*args)
        if i in self._residual_index:
            self._collect(i, args, kwargs, tensors_of(result))
        return result

    def _collect(
        self, i: int, args: Any, kwargs: Any, outputs: Sequence[Tensor]
    ) -> None:
        step = self.runnable.record.steps[i]
        if step.may_draw and not has_same_statics(step.op, args, kwargs):
            self._give_up()
        self.statics[i] = statics_of(args, kwargs)
        for k in self._residual_index[i]:
            # Not detached: below autograd a detached tensor has a version counter of
            # its own, so changes would go unnoticed.
            self._collected.append((outputs[k], outputs[k]._version))
            if self._on_residual is not None:
                self._on_residual(outputs[k])

    @override
    def _give_up(self) -> None:
        super()._give_up()
        self.fits = False

    @override
    def end(self) -> None:
        """Do nothing: `residuals` says whether the plan fits."""

    def residuals(self) -> list[Tensor] | None:
        """Return what was collected; None if the plan does not fit this forward."""
        unchanged = all(t._version == version for t, version in self._collected)
        complete = self._funcs[self._next] is None
        if not (self.fits and complete and unchanged):
            return None
        return [t.detach() for t, _ in self._collected]


class Verify(Collect):
    """Also checks that each operation reads what it read when it was recorded.

    For a forward whose inputs are to be dropped: once they are, nothing can be
    recomputed but by the plan.
    """

    def __init__(self, runnable: RunnablePlan, inputs: Sequence[Tensor]) -> None:
        super().__init__(runnable)
        numbers = runnable.record.inputs
        self._numbers = {key_of(t): s for t, s in zip(inputs, numbers, strict=True)}

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.fits and self._next > i:
            step = self.runnable.record.steps[i]
            inputs, outputs = inputs_of(args, kwargs), tensors_of(result)
            if not self._is_wired(i, step, args, kwargs, inputs, outputs):
                self._give_up()
                return result
            self._numbers.update(zip(map(key_of, outputs), step.makes, strict=True))
        return result

    def _is_wired(
        self, i: int, step: Step, args: Any, kwargs: Any, inputs: Any, outputs: Any
    ) -> bool:
        """Say whether an operation reads the storages that it read."""
        if (len(inputs), len(outputs)) != (len(step.reads), len(step.makes)):
            return False
        numbers, known = self._numbers, self.runnable.known
        reads = zip(inputs, step.reads, strict=True)
        if not all(numbers.get(key_of(t), s) == s for t, s in reads if s in known):
            return False
        if self.runnable.fates[i] is not Fate.DEAD:
            return True
        return fits_metadata(self.runnable.expected[i], args, kwargs, inputs)
