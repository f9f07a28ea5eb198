"""The plans of a record, laid out to be run, and how operations are compared with it.

Invariant: what is looked up for each operation is a list index or one look in a dict.
What is left out returns the metadata that it returned then. That depends on metadata
and on its *static* arguments, those that are no tensors, so these are compared.
Rejected: to compare static arguments of pointwise operations, such as a factor that is
annealed: they change no metadata. To plan in each backward: most read the same.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, is_storage
from torch.utils.checkpoint import SAC_IGNORED_OPS

from remat._base.absent import are_tensors, tensors_of
from remat._base.op import Op, Value
from remat._base.operators import IGNORED
from remat._partial.budget import spent_by
from remat._partial.plan import CallPlan, Fate, Record, plan
from remat._torch.modes import call_kernel
from remat._torch.operators import is_view_op, kernel_of
from remat._torch.tensors import SHARED_COPY
from remat.policies import Decision, Policy


# No record has these. A nested call makes shared copies of what it may update (see
# `_transform.state`), and how it does so depends on who differentiates it. Autograd
# asks subclasses for sizes and strides, and how often depends on that, too.
UNRECORDED = IGNORED | {*SAC_IGNORED_OPS, SHARED_COPY}
CLONE = torch.ops.aten.clone.default
# Autocast runs it on weights, unless its cache has the result from another call.
CAST = torch.ops.aten._to_copy.default


Kernel: TypeAlias = Callable[..., Any]


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

    __slots__ = ("_has_statics", "_metadata", "_op", "_same", "_strides")

    def __init__(self, op: Op) -> None:
        self._op, inputs = op, op.inputs
        self._metadata = [*map(_metadata, inputs)]
        # () for a tensor without strides: then they are not compared.
        self._strides = [value.stride for value in inputs]
        alone = all(isinstance(arg, Value) for arg in op.args)
        self._has_statics = bool(op.kwargs) or not alone
        pointwise = torch.Tag.pointwise in op.func.tags
        self._same = _same_type if pointwise else _same

    def fits(self, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> bool:
        """Say, by its arguments, whether an operation returns metadata as recorded."""
        if [*map(_metadata, inputs)] != self._metadata:
            return False
        pairs = zip(inputs, self._strides, strict=True)
        if not all(not then or t.stride() == then for t, then in pairs):
            return False
        if self._has_statics:
            return has_same_statics(self._op, args, kwargs, self._same)
        # An argument that was left to its default then may be passed now.
        return not kwargs and len(args) == len(inputs)


_metadata = operator.attrgetter("shape", "dtype", "device")


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


class Plans:
    """The plans of one record: `full` for all handles or outputs, and others for some.

    `decisions` are the policy's. A budget allows these, and keeps some: `spent`.

    Attributes:
        unpruned: why nothing is left out; "" if something may be.
        destinations: of the residuals.
        ops: the operations whose results they are, `values` and `storages` the results.
        residual_of_handle: the residual that a handle is a view of, for those that are.
        for_recompute: the residuals that a recompute reads, by index.
    """

    def __init__(
        self,
        record: Record,
        decisions: Sequence[Decision],
        policy: Policy | None,
        *,
        unpruned: str = "",
        extra_roots: Iterable[int] = (),
    ) -> None:
        self.record, self.decisions, self.unpruned = record, decisions, unpruned
        self.extra_roots = frozenset(extra_roots)
        self._how: Any = {"extra_roots": self.extra_roots, "prune": not unpruned}
        roots, prune = self.extra_roots, not unpruned
        self.spent = spent_by(policy, record, decisions, roots, prune=prune)
        kept = decisions if self.spent is None else self.spent.decisions
        saveable = [i for i, decision in enumerate(kept) if decision]
        made = plan(record, saveable, **self._how)
        self.full = RunnablePlan(record, made)
        self._narrowed: dict[tuple[int, ...], RunnablePlan] = {}
        steps = [record.steps[i] for i, _ in made.residuals]
        which = [k for _, k in made.residuals]
        self.destinations = [decisions[i] for i, _ in made.residuals]
        self.ops = [step.op for step in steps]
        self.values = [op.outputs[k] for op, k in zip(self.ops, which, strict=True)]
        self.storages = [s.makes[k] for s, k in zip(steps, which, strict=True)]
        index = {s: n for n, s in enumerate(self.storages)}
        self.residual_of_handle = {
            position: index[pack.storage]
            for position, pack in enumerate(record.packs)
            if pack is not None
            and pack.storage in index
            and pack.is_of(self.values[index[pack.storage]])
        }
        found = {*self.residual_of_handle.values()}
        self.each_has_handle = len(found) == len(steps)
        pairs = zip(record.steps, made.fates, strict=True)
        read = {s for step, fate in pairs if fate.is_run for s in step.reads} | roots
        self.for_recompute = frozenset(
            n
            for n, (s, step) in enumerate(zip(self.storages, steps, strict=True))
            # No absent tensor can stand for one of a subclass.
            if s in read or step.hides_aliases
        )

    def planned_again(
        self,
        decisions: Sequence[Decision] | None = None,
        extra_roots: Collection[int] | None = None,
    ) -> "Plans":
        """Return the plans of the same record for other decisions or more roots."""
        return Plans(
            self.record,
            self.decisions if decisions is None else decisions,
            None if self.spent is None else self.spent.policy,
            unpruned=self.unpruned,
            extra_roots=self.extra_roots if extra_roots is None else extra_roots,
        )

    def runnable_for(
        self, targets: Sequence[int], *, saves: bool = True
    ) -> RunnablePlan:
        """Return the plan for some handles or outputs, laid out to be run.

        Unless it `saves`, it is that of a call without residuals.
        """
        if saves and (self.unpruned or len(targets) == len(self.record.roots)):
            return self.full
        key = *targets, saves
        runnable = self._narrowed.get(key)
        if runnable is None:
            full = self.full.plan
            made = plan(self.record, full.saved if saves else (), targets, **self._how)
            order = full.residuals if saves else ()
            runnable = self._narrowed[key] = RunnablePlan(self.record, made, order)
        return runnable
