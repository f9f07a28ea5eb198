"""A plan laid out for running, and how operations are compared with those of a record.

Invariant: what is looked up for each operation is a list index or one look in a dict.
An operation that is left out returns the metadata that it returned then. That depends
on the metadata of its tensor arguments and on its *static* ones, the others, so these
are compared.
Rejected: to compare static arguments of pointwise operations, such as a factor that is
annealed: they change no metadata.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, is_storage
from torch.utils.checkpoint import SAC_IGNORED_OPS

from remat._base.absent import (
    IGNORED,
    are_tensors,
    tensors_of,
)
from remat._base.op import Op, Value
from remat._partial.plan import CallPlan, Fate, Record
from remat._torch import SHARED_COPY, call_kernel, is_view_op, kernel_of


# No record has these. A nested call makes shared copies of what it may update (see
# `_transform.state`), and how it does so depends on who differentiates it. Autograd
# asks subclasses for sizes and strides, and how often depends on that, too.
UNRECORDED = IGNORED | {*SAC_IGNORED_OPS, SHARED_COPY}
CLONE = torch.ops.aten.clone.default
# Autocast runs it on weights, unless its cache has the result from another call.
CAST = torch.ops.aten._to_copy.default


Kernel: TypeAlias = Callable[..., Any]


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


class RunnablePlan:
    """A plan laid out for running, one entry for each operation.

    `order` is that of the residuals, of which the plan uses some; () for its own.
    """

    def __init__(
        self, record: Record, plan: CallPlan, order: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.record, self.plan = record, plan
        self.funcs = [*[step.op.func for step in record.steps], None]
        # What each operation calls, and what it calls in a recompute; None where more
        # is done, or something else.
        self.kernels = [_kernel_of(step.op) for step in record.steps]
        self.fates = [*plan.fates]
        pairs = zip(self.kernels, self.fates, strict=True)
        self.runs = [k if fate is Fate.RECOMPUTED else None for k, fate in pairs]
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

    @functools.cached_property
    def collecting(self) -> list[Kernel | None]:
        """What each operation calls where results are collected."""
        pairs = zip(self.kernels, self.plan.fates, strict=True)
        return [kernel if fate is not Fate.SAVED else None for kernel, fate in pairs]

    @functools.cached_property
    def may_be_missing(self) -> list[bool]:
        """Which operations a recompute in full may leave out, and False at the end.

        Those are optional, or depend on no input and no draw.
        """
        constant: set[int] = set()
        found: list[bool] = []
        for step in self.record.steps:
            is_constant = not step.draws and constant.issuperset(step.reads)
            optional = is_optional(step.op.func)
            found.append(optional or (is_constant and bool(step.makes)))
            if is_constant:
                constant.update(step.makes)
            else:
                constant.difference_update(step.writes)
        return [*found, False]


def is_optional(func: Any) -> bool:
    """Say whether a recompute may run an operation more or less often."""
    return func in (CLONE, CAST) or func in UNRECORDED or is_view_op(func)


def _kernel_of(op: Op) -> Kernel:
    """Return what an operation calls from a dispatch mode."""
    kernel = kernel_of(op.func)
    if any(value.dtype.is_complex for value in (*op.inputs, *op.outputs)):
        return functools.partial(call_kernel, kernel)
    return kernel
