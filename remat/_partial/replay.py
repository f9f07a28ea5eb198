"""The mode of a recompute along a plan.

In a `Replay` residuals are handed in, and dead work is left out: such an operation
returns absent tensors (`_base/absent.py`), which raise an error when they are read.

Invariant: each value of a replay was computed by it, or saved by this very call. A plan
that does not fit the call shows as another operation, or as a read of an absent tensor.
Rejected: running the recorded operations without the function. Hooks, custom Functions
and the control flow of this call are in no record.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.absent import (
    LIKE,
    Absent,
    MissingError,
    Trouble,
    absent,
    inputs_of,
    like,
    present,
    tensors_of,
)
from remat._base.errors import RecomputeError
from remat._base.op import Value
from remat._base.operators import DETACH, named
from remat._base.types import TENSORS
from remat._partial.follow import Follow
from remat._partial.plan import Fate, Slot, Step, filled
from remat._partial.runnable import CAST, CLONE, UNRECORDED, Plans, statics_of
from remat._torch.autograd import tells_of
from remat._torch.levels import base_tensor
from remat._torch.operators import is_view_op
from remat._torch.tensors import is_fake, is_lazy, storage_id


class _Mark(weakref.ref[Tensor]):
    """Refers to an absent tensor, and says for which storage it stands."""

    __slots__ = ("number",)

    number: int


class Replay(Follow):
    """Runs a call again along a plan, for some handles or outputs: its `targets`.

    `residuals` are what was saved, or what stands for it while it is offloaded; `take`
    returns one, given its index, or None if it was freed. What the replay shows
    corrects the plans in the cache of the call.
    """

    def __init__(
        self,
        call: Any,
        plans: Plans,
        targets: Sequence[int],
        residuals: Sequence[Tensor | None],
        take: Callable[[int], Tensor | None],
    ) -> None:
        runnable = plans.runnable_for(targets, saves=not call.is_late)
        super().__init__(runnable, runnable.runs)
        self._cache = call.cache
        self._plans, self._targets = plans, targets
        self._statics, self._dropped = call.statics, call.dropped
        self._may_drop: bool = call.may_drop and not call.is_late
        self._fates = runnable.fates
        self._residuals, self._take = residuals, take
        self._marks: dict[int, _Mark] = {}  # of absent tensors, by their identity
        self._known: dict[int, int] = {}  # storages of inputs and residuals, by key
        self._unread: list[Tensor] = []  # the user's own, which nobody needs
        self._written = False  # whether an absent tensor was
        self.trouble = Trouble()  # what did not fit the plan

    # --- Before and after the run ---

    def stand_ins(
        self,
        tensors: Sequence[Tensor],
        may_stand_in: Callable[[Tensor], bool] | None = None,
        is_users: Callable[[int, Tensor], bool] | None = None,
    ) -> list[Tensor]:
        """Return what to run on: absent tensors in place of inputs that nobody needs.

        `may_stand_in` says which inputs may be replaced; None for `is_droppable`. Those
        that `is_users` names are never replaced: the function may hold them itself.
        """
        runnable, stand_ins = self.runnable, [*tensors]
        inputs, residuals = runnable.record.inputs, self._residuals
        if residuals:  # then arguments are compared by their storages
            used = [(residuals[index], s) for index, s in runnable.residual_storages]
            used = [(t, s) for t, s in used if t is not None]
            numbers = (*inputs, *[s for _, s in used])
            self._known = _by_storage((*tensors, *[t for t, _ in used]), numbers)
        # Before inputs are dropped replays show that nothing reads them. Else those
        # alone are replaced that are written to, and those that were dropped.
        # Another record may have replaced the plans.
        proven = self._cache.is_proven() and self._cache.plans is self._plans
        proves = self._may_drop and not proven
        is_allowed = may_stand_in or is_droppable
        for i in runnable.unneeded:
            t = tensors[i]
            replaced = proves or inputs[i] in runnable.written
            if not (type(t) is Absent or (replaced and is_allowed(t))):
                continue
            if is_users is not None and is_users(i, t):
                self._unread.append(t)
            else:
                new = stand_ins[i] = like(t).belong(inputs[i], self.trouble)
                new.__dict__.update(t.__dict__)
                if may_stand_in is None:  # the function runs on it as it is
                    new.requires_grad_(t.requires_grad)
        return stand_ins

    def escaped(self) -> bool:
        """Say whether something did not fit, or an absent tensor outlives the replay.

        Somebody may yet read that one.
        """
        trouble = self.trouble
        left = [mark.number for mark in self._marks.values() if mark() is not None]
        # Of one that is left, others were made since, without its graph.
        since = (ref() for ref in trouble.absent)
        trouble.missed += [*left, *[t.remat_number for t in since if t is not None]]
        return bool(trouble)

    def succeeded(self, *, proves: bool = True) -> None:
        """Note that the plan was right for its targets, if the replay proves it."""
        # Handles of residuals need no replay.
        proves = proves and self._may_drop
        shown = (self._targets, self._plans.residual_of_handle) if proves else ()
        self._cache.note_success(self._plans, *shown)

    def failed(self, error: Exception | None, *, is_ours: bool = False) -> None:
        """Correct the plans after a replay that did not fit; raise a user's error.

        `is_ours` says that the error itself tells of that: a hook raised it. Where
        inputs were dropped, the function cannot run as it is: a RecomputeError.
        """
        trouble = self.trouble
        fits = not (trouble or is_ours)
        if error and fits and not tells_of("a tensor without memory", error):
            raise error
        self._cache.note_misfit(self._plans, trouble)
        if self._dropped:
            what = trouble.differs or _READ.format(error=error)
            raise RecomputeError(_DROPPED.format(what=what)) from error

    # --- Operations ---

    @override
    def __enter__(self) -> Any:
        for ref in self.trouble.absent:
            tensor = ref()
            if tensor is not None:
                number = tensor.remat_number
                del tensor.remat_number, tensor.remat_trouble
                self._marked(tensor, number)
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for mark in self._marks.values():
            tensor: Any = mark()
            if tensor is not None:  # somebody may read it yet
                tensor.__class__ = Absent
                tensor.remat_number, tensor.remat_trouble = mark.number, self.trouble

    @override
    def refused(self, error: Exception, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation does that torch refuses on absent tensors."""
        numbers = map(self._number_of, inputs_of(args, kwargs))
        missed = [number for number in numbers if number is not None]
        if not missed:
            raise error
        if func.overloadpacket.__name__ in LIKE:
            return func(*present(args), **present(kwargs or {}))
        self.trouble.missed += missed
        raise MissingError(func) from error

    @override
    def at(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        step, fate = self.runnable.record.steps[i], self._fates[i]
        if self._written and self._is_made_again(i, func, args, kwargs):
            self._next = i
            return self.unexpected(i, func, args, kwargs)
        if fate is Fate.RECOMPUTED:  # asked only once something absent was written to
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                return self.refused(error, func, args, kwargs)
        if fate is Fate.SAVED:
            self._check_wiring(i, step, args, kwargs)
            indices = self.runnable.residual_index.get(i, {})
            inputs = inputs_of(args, kwargs)
            return self._result(step, inputs, indices)
        if fate is Fate.METADATA_ONLY:
            return self._on_arbitrary_values(step, args, kwargs or {})
        return self._left_out(i, step, args, kwargs)

    @override
    def unexpected(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that the record does not have next."""
        if func is named:
            return None  # the record has the name
        number = self._number_of(args[0]) if args else None
        if number is not None:
            if func is DETACH or func is CLONE:
                return self._marked(like(args[0]), number)
            if is_view_op(func):
                return self._made_again(func, args, kwargs, number)
        if func in UNRECORDED:
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                return self.refused(error, func, args, kwargs)
        if func is CLONE or func is CAST:
            return func(*args, **(kwargs or {}))
        if self._funcs[i : i + 1] in ([CLONE], [CAST]):
            # Autograd made a copy in the forward and made none here: that depends on
            # what is differentiated. Or autocast has the cast in its cache by now.
            self._next = i + 1
            return self.__torch_dispatch__(func, (), args, kwargs)
        raise self._differs(func)

    def _is_made_again(self, i: int, func: Any, args: Any, kwargs: Any) -> bool:
        """Say whether autograd makes a view, and not the function.

        After a view was changed in place, autograd makes it again from its base. For a
        subclass it calls the operation that made the view, which is seen here.
        """
        number = self._number_of(args[0]) if args else None
        if number is None or not is_view_op(func):
            return False
        step, expected = self.runnable.record.steps[i], self.runnable.expected.get(i)
        if step.reads[0] != number or expected is None:
            return True
        return not expected.fits(args, kwargs, inputs_of(args, None))

    def _made_again(self, func: Any, args: Any, kwargs: Any, number: int) -> Any:
        base = args[0]
        layout = base.shape, base.stride()
        meta = torch.empty_strided(*layout, dtype=base.dtype, device="meta")
        made = func(meta, *args[1:], **(kwargs or {}))
        views = [
            self._absent(Value(v.shape, v.dtype, base.device, v.stride()), number)
            for v in tensors_of(made)
        ]
        return views[0] if isinstance(made, Tensor) else views

    def _on_arbitrary_values(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Run an operation for what does not depend on values, such as a draw."""
        result = step.op.func(*present(args), **present(kwargs))
        outputs = tensors_of(result)
        for k, s in enumerate(step.makes):
            if k not in step.metadata_only or s in step.reads:
                outputs[k] = self._absent(step.op.outputs[k], s)
        inputs = inputs_of(args, kwargs)
        return filled(step.result, outputs, inputs)

    def _left_out(self, i: int, step: Step, args: Any, kwargs: Any) -> Any:
        """Return absent tensors in place of the result of an operation."""
        inputs = inputs_of(args, kwargs)
        if not self.runnable.expected[i].fits(args, kwargs, inputs):
            raise self._differs(step.op.func)
        if step.writes:
            numbers = zip(step.reads, inputs, strict=True)
            written = [t for s, t in numbers if s in step.writes]
            if not all(map(self._is_unread, written)):
                raise self._differs(step.op.func)
            self._written, self._kernels = True, [None] * len(self._fates)
        elif step.is_view and not any(map(self._is_unread, inputs)):
            # What is there may be changed through the view, which has to be seen.
            return step.op.func(*args, **(kwargs or {}))
        return self._result(step, inputs, {})

    def _result(
        self, step: Step, inputs: Sequence[Tensor], indices: dict[int, int]
    ) -> Any:
        if step.result.__class__ is Slot and not indices:  # the usual case
            return self._absent(step.op.outputs[0], step.makes[0])
        outputs: list[Tensor] = []
        for k, s in enumerate(step.makes):
            residual = self._take(indices[k]) if k in indices else None
            outputs.append(
                self._absent(step.op.outputs[k], s)
                if residual is None
                else residual.detach()
            )
        return filled(step.result, outputs, inputs)

    def _check_wiring(self, i: int, step: Step, args: Any, kwargs: Any) -> None:
        """Check that a saved operation has the arguments that it had, where known."""
        if self._statics.get(i) not in (None, statics_of(args, kwargs)):
            raise self._differs(step.op.func)
        known = self._known
        for t, s in zip(inputs_of(args, kwargs), step.reads, strict=False):
            now = self._number_of(t)
            if now is None and known and _has_storage(t):
                now = known.get(storage_id(t))
            if now not in (None, s):
                raise self._differs(step.op.func)

    @override
    def _differs(self, func: Any) -> Exception:
        error = super()._differs(func)
        self.trouble.differs = str(error)
        return error

    def _absent(self, value: Value, number: int) -> Tensor:
        return self._marked(absent(value), number)

    def _marked(self, tensor: Tensor, number: int) -> Tensor:
        """Have a tensor stand for a storage, and be plain to the function."""
        tensor.__class__ = Tensor
        mark = self._marks[id(tensor)] = _Mark(tensor)
        mark.number = number
        return tensor

    def _number_of(self, tensor: Any) -> int | None:
        """Return the storage for which a tensor stands, if it is absent here."""
        mark = self._marks.get(id(tensor))
        return mark.number if mark is not None and mark() is tensor else None

    def _is_unread(self, tensor: Tensor) -> bool:
        """Say whether nobody needs what a tensor holds."""
        if is_fake(tensor) or self._number_of(tensor) is not None:
            return True  # a fake tensor has no value that would be missing
        return any(tensor is unread for unread in self._unread)


def may_stand_in(may_any: bool, recorded: bool, tensor: Tensor) -> bool:
    """Say whether an absent tensor may stand for an input, under a graph or not."""
    reaches = recorded and tensor.requires_grad  # the graph has to reach it
    return may_any and type(tensor) is Tensor and not (reaches or is_lazy(tensor))


def is_droppable(tensor: Tensor) -> bool:
    """Say whether an input that no recompute reads need not be kept.

    The graph keeps those that gradients are accumulated in, a module its parameters.
    """
    if type(tensor) is not Tensor or (tensor.requires_grad and tensor.is_leaf):
        return False
    return tensor.layout is torch.strided and not is_lazy(tensor)


_READ = "  something read a value that was left out. {error}"
_DROPPED = (
    "remat: the recompute did something else than earlier ones, and it needs inputs "
    "that were dropped. Pass prune=False if the function depends on more than its "
    "inputs.\n{what}"
)


def _by_storage(tensors: Sequence[Tensor], numbers: Sequence[int]) -> dict[int, int]:
    if TENSORS.issuperset(map(type, tensors)):
        # Most often all have a storage, and asking each costs as much as an operation.
        with contextlib.suppress(RuntimeError):
            return dict(zip(map(storage_id, tensors), numbers, strict=True))
    each = zip(map(base_tensor, tensors), numbers, strict=True)
    return {storage_id(t): s for t, s in each if _has_storage(t)}


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in TENSORS and tensor.layout is torch.strided
