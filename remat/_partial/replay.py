"""The modes of a recompute: along a plan, or in full and compared with the record.

In a `Replay` residuals are handed in, and dead work is left out: such an operation
returns absent tensors (`_base/absent.py`), which raise an error when they are read.

Invariant: each value of a replay was computed by it, or saved by this very call. A plan
that does not fit the call shows as another operation, or as a read of an absent tensor.
Rejected: running the recorded operations without the function. Hooks, custom Functions
and the control flow of this call are in no record.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.absent import (
    Absent,
    Shared,
    Trouble,
    absent,
    inputs_of,
    like,
    present,
    tensors_of,
)
from remat._base.errors import RecomputeError
from remat._base.op import Value
from remat._base.operators import named
from remat._base.types import TENSORS
from remat._partial.cache import CallCache, Plans
from remat._partial.plan import Fate, Slot, Step, filled
from remat._partial.runnable import (
    CAST,
    CLONE,
    UNRECORDED,
    Follow,
    RunnablePlan,
    described,
    fits_metadata,
    is_reflection,
    statics_of,
)
from remat._torch import (
    base_tensor,
    call_kernel,
    eager_only,
    is_fake,
    is_lazy,
    is_view_op,
    storage_id,
)


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
        runnable = plans.runnable_for(targets)
        super().__init__(runnable)
        self._cache: CallCache = call.cache
        self._plans, self._targets = plans, targets
        self._statics, self._dropped = call.statics, call.dropped
        self._runs, self._fates = runnable.runs, runnable.fates
        self._residuals, self._take = residuals, take
        self._absent: dict[int, Shared] = {}
        self._known: dict[int, int] = {}  # storages of inputs and residuals, by key
        self._written = False  # whether an absent tensor was
        self.trouble = Trouble()  # what did not fit the plan

    # --- Before and after the run ---

    def stand_ins(
        self,
        tensors: Sequence[Tensor],
        may_stand_in: Callable[[Tensor], bool] | None = None,
    ) -> list[Tensor]:
        """Return what to run on: absent tensors in place of inputs that nobody needs.

        `may_stand_in` says whether one may stand for an input; None for `is_droppable`.
        """
        runnable, stand_ins = self.runnable, [*tensors]
        inputs, residuals = runnable.record.inputs, self._residuals
        if residuals:  # then arguments are compared by their storages
            used = [(residuals[index], s) for index, s in runnable.residual_storages]
            used = [(t, s) for t, s in used if t is not None]
            numbers = (*inputs, *[s for _, s in used])
            self._known = _by_storage((*tensors, *[t for t, _ in used]), numbers)
        # Once replays have shown that inputs are not read, only those that are written
        # to are replaced, and those that were dropped: this replay notices who reads.
        # Another record may have replaced the plans.
        proven = self._cache.is_proven() and self._cache.plans is self._plans
        is_allowed = may_stand_in or is_droppable
        for i in runnable.unneeded:
            t = tensors[i]
            replaced = not proven or inputs[i] in runnable.written
            if type(t) is Absent or (replaced and is_allowed(t)):
                new = stand_ins[i] = like(t, self._shared(inputs[i]))
                if may_stand_in is None:  # the function runs on it as it is
                    new.requires_grad_(t.requires_grad)
        return stand_ins

    def escaped(self) -> bool:
        """Say whether something did not fit, or an absent tensor outlives the replay.

        Somebody may yet read that one.
        """
        for shared in self._absent.values():
            if sys.getrefcount(shared) > _UNHELD:
                self.trouble.missed.append(shared.number)
        return bool(self.trouble)

    def succeeded(self, *, proves: bool = True) -> None:
        """Note that the plan was right for its targets, if the replay proves it."""
        # Handles of residuals need no replay.
        shown = (self._targets, self._plans.residual_of_handle) if proves else ()
        self._cache.note_success(self._plans, *shown)

    def failed(self, error: Exception | None, *, is_ours: bool = False) -> None:
        """Correct the plans after a replay that did not fit; raise a user's error.

        `is_ours` says that the error itself tells of that: a hook raised it. Where
        inputs were dropped, the function cannot run as it is: a RecomputeError.
        """
        trouble = self.trouble
        if error is not None and not (trouble or is_ours or _is_of_memory(error)):
            raise error
        self._cache.note_misfit(self._plans, trouble)
        if self._dropped:
            what = trouble.differs or _READ.format(error=error)
            raise RecomputeError(_DROPPED.format(what=what)) from error

    # --- Operations ---

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        if self._written and self._is_made_again(i, func, args, kwargs):
            return self._made_again(func, args, kwargs)
        if self._funcs[i] is not func:
            return self._unexpected(i, func, args, kwargs)
        self._next = i + 1
        kernel = self._runs[i]
        if kernel is not None:
            return kernel(*args, **kwargs) if kwargs else kernel(*args)
        return self._not_run(i, func, args, kwargs)

    def _not_run(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        step, fate = self.runnable.record.steps[i], self._fates[i]
        turned = is_reflection(func, of=func) and type(args[0]) is Absent
        if turned and args[0].storage_of.number == step.reads[1]:
            args = args[::-1]
        if fate is Fate.SAVED:
            self._check_wiring(i, step, args, kwargs)
            indices = self.runnable.residual_index.get(i, {})
            inputs = inputs_of(args, kwargs)
            return self._result(step, inputs, indices)
        if fate is Fate.METADATA_ONLY:
            return self._on_arbitrary_values(step, args, kwargs or {})
        return self._left_out(i, step, args, kwargs)

    def _unexpected(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that the record does not have next."""
        if func is named:
            return None  # the record has the name
        if func in UNRECORDED:
            return func(*args, **(kwargs or {}))
        if is_reflection(func, of=self._funcs[i]):
            return self.__torch_dispatch__(self._funcs[i], (), args[::-1])
        if args and type(args[0]) is Absent:
            if is_view_op(func):
                return self._made_again(func, args, kwargs)
            if func is CLONE:
                return like(args[0])
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
        if not (args and type(args[0]) is Absent and is_view_op(func)):
            return False
        if self._funcs[i] is not func:
            return True
        step, expected = self.runnable.record.steps[i], self.runnable.expected.get(i)
        same = step.reads[0] == args[0].storage_of.number and expected is not None
        return not (
            same and fits_metadata(expected, args, kwargs, inputs_of(args, None))
        )

    def _made_again(self, func: Any, args: Any, kwargs: Any) -> Any:
        base = args[0]
        layout = base.shape, base.stride()
        meta = torch.empty_strided(*layout, dtype=base.dtype, device="meta")
        made = func(meta, *args[1:], **(kwargs or {}))
        views = [
            absent(Value(v.shape, v.dtype, base.device, v.stride()), base.storage_of)
            for v in tensors_of(made)
        ]
        return views[0] if isinstance(made, Tensor) else views

    def _on_arbitrary_values(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Run an operation for what does not depend on values, such as a draw."""
        result = step.op.func(*present(args), **present(kwargs))
        outputs = tensors_of(result)
        for k, s in enumerate(step.makes):
            if k not in step.metadata_only or s in step.reads:
                outputs[k] = absent(step.op.outputs[k], self._shared(s))
        inputs = inputs_of(args, kwargs)
        return filled(step.result, outputs, inputs)

    def _left_out(self, i: int, step: Step, args: Any, kwargs: Any) -> Any:
        """Return absent tensors in place of the result of an operation."""
        inputs = inputs_of(args, kwargs)
        if not fits_metadata(self.runnable.expected[i], args, kwargs, inputs):
            raise self._differs(step.op.func)
        if step.writes:
            numbers = zip(step.reads, inputs, strict=True)
            written = [t for s, t in numbers if s in step.writes]
            # A fake tensor has no value that would be missing.
            if not all(type(t) is Absent or is_fake(t) for t in written):
                raise self._differs(step.op.func)
            self._written = True
        return self._result(step, inputs, {})

    def _result(
        self, step: Step, inputs: Sequence[Tensor], indices: dict[int, int]
    ) -> Any:
        if step.result.__class__ is Slot and not indices:  # the usual case
            return absent(step.op.outputs[0], self._shared(step.makes[0]))
        outputs: list[Tensor] = []
        for k, s in enumerate(step.makes):
            residual = self._take(indices[k]) if k in indices else None
            outputs.append(
                absent(step.op.outputs[k], self._shared(s))
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
            now = s
            if type(t) is Absent:
                if t.storage_of.trouble is self.trouble:
                    now = t.storage_of.number
            elif known and _has_storage(t):
                now = known.get(storage_id(t), s)
            if now != s:
                raise self._differs(step.op.func)

    @override
    def _differs(self, func: Any) -> Exception:
        error = super()._differs(func)
        self.trouble.differs = str(error)
        return error

    def _shared(self, number: int) -> Shared:
        shared = self._absent.get(number)
        if shared is None:
            shared = self._absent[number] = Shared(number, self.trouble)
        return shared


def is_droppable(tensor: Tensor) -> bool:
    """Say whether an input that no recompute reads need not be kept.

    The graph keeps those that gradients are accumulated in, a module its parameters.
    """
    if type(tensor) is not Tensor or (tensor.requires_grad and tensor.is_leaf):
        return False
    return tensor.layout is torch.strided and not is_lazy(tensor)


def _is_of_memory(error: Exception) -> bool:
    """Say whether torch refused to read an absent tensor, or found no memory there."""
    return any(words in str(error) for words in _REFUSALS)


_REFUSALS = (
    "Absent",
    "data is not allocated yet",
    "data pointer",
    "tensor subclass",
    "non-wrapper subclass",
)
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


def _references() -> int:
    """Return the reference count that `escaped` sees if no tensor holds it.

    How many references a loop variable counts depends on the version of Python.
    """
    count = 0
    for shared in {-1: Shared(-1, Trouble())}.values():
        count = sys.getrefcount(shared)
    return count


_UNHELD = _references()


class Check(Follow):
    """Follows a function that runs again in full, and must do what its forward did.

    Views, copies and casts are not compared. Module hooks may make views, as those of
    torch's FLOP counter do; autograd may copy what is changed in place; and autocast
    may find a cast in its cache. An operation that depends on no input may be missing:
    the function may have cached its result, a table of positions for instance.
    """

    def __init__(self, runnable: RunnablePlan) -> None:
        super().__init__(runnable)
        self._error: Exception | None = None
        steps = runnable.record.steps
        constant = zip(steps, _are_constant(steps), strict=True)
        pairs = [(s, c) for s, c in constant if not _may_differ(s.op.func)]
        self._steps = [step for step, _ in pairs]
        self._is_constant = [is_constant for _, is_constant in pairs]
        self._funcs = [*[step.op.func for step in self._steps], None]

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not _may_differ(func):
            then = self._funcs[self._next]
            while then not in (func, None) and self._is_constant[self._next]:
                self._next += 1
                then = self._funcs[self._next]
            if then is not func and not is_reflection(func, of=then):
                raise self._differs(func)
            self._next += 1
        return call_kernel(func, *args, **(kwargs or {}))

    @override
    def _differs(self, func: Any) -> Exception:
        error = RecomputeError(_DIFFERENT + described(self._steps, self._next, func))
        self._give_up()
        self._error = self._error or error
        return error

    @override
    def end(self) -> None:
        """Check that every operation has run; raise what the function has caught."""
        super().end()
        if self._error is not None:
            raise self._error


def _may_differ(func: Any) -> bool:
    """Say whether a recompute may run an operation more or less often."""
    return func in (CLONE, CAST) or func in UNRECORDED or is_view_op(func)


def _are_constant(steps: Sequence[Step]) -> list[bool]:
    """Return which steps depend on no input and no draw."""
    constant: set[int] = set()
    found = []
    for step in steps:
        is_constant = not step.draws and constant.issuperset(step.reads)
        found.append(is_constant and bool(step.makes))
        if is_constant:
            constant.update(step.makes)
        else:
            constant.difference_update(step.writes)
    return found


_DIFFERENT = (
    "remat: the recompute ran other operations than the forward did. The function "
    "must compute the same thing twice: if it depends on outside state that changed, "
    "pass that state as an argument.\n"
)
