"""Runs a function again under a plan: what is kept is handed in, what is dead left out.

`Keep` runs in the forward and collects what the plan keeps, `Replay` in the backward.
An operation that is dead returns what is absent (`absent`), which nobody can read.

Invariant: what a replay gives was computed, or kept by this very call. A plan that does
not fit the call at hand shows: as another operation, or as a read of what is absent.
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
    IGNORED,
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
from remat._base.types import TENSORS
from remat._partial.match import (
    constants_of,
    described,
    fits_metadata,
    has_same_constants,
    is_reflection,
)
from remat._partial.plan import Fate, Slot, Step, filled
from remat._partial.schedule import Follow, Schedule
from remat._torch import (
    base_tensor,
    call_kernel,
    eager_only,
    is_view_op,
    storage_id,
)


CLONE = torch.ops.aten.clone.default
# Autocast makes them of weights, unless it has one from another call in its cache.
CAST = torch.ops.aten._to_copy.default


class Keep(Follow):
    """Collects, in a forward, the results that a plan keeps.

    Args:
        schedule: to follow.
        tell: is given each of them as it is made.

    Attributes:
        fits: whether the plan is of this forward.
        constants: of the operations whose results are kept.
    """

    def __init__(
        self, schedule: Schedule, tell: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__(schedule)
        self._tell = tell
        self._places = schedule.places
        self._kept: list[tuple[Tensor, int]] = []
        self.constants: dict[int, Any] = {}
        self.fits = True

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        if self._funcs[i] is not func:
            if is_reflection(func, of=self._funcs[i]):
                return self.__torch_dispatch__(self._funcs[i], types, args[::-1])
            if func not in IGNORED:
                self._give_up()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._next = i + 1
        kernel = self._kernels[i]
        result = kernel(*args, **kwargs) if kwargs else kernel(*args)
        if i in self._places:
            self._keep(i, args, kwargs, tensors_of(result))
        return result

    def _keep(self, i: int, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        step = self.schedule.record.steps[i]
        if step.may_draw and not has_same_constants(step.op, args, kwargs):
            self._give_up()
        self.constants[i] = constants_of(args, kwargs)
        for k in self._places[i]:
            # Not detached: below autograd what is detached has a version counter of
            # its own, by which changes would go unnoticed.
            self._kept.append((outputs[k], outputs[k]._version))
            if self._tell is not None:
                self._tell(outputs[k])

    @override
    def _give_up(self) -> None:
        super()._give_up()
        self.fits = False

    @override
    def end(self) -> None:
        """Do nothing: the forward may be another, see `residuals`."""

    def residuals(self) -> list[Tensor] | None:
        """Return what was kept; None if the plan is not of this forward."""
        unchanged = all(t._version == version for t, version in self._kept)
        complete = self._funcs[self._next] is None
        if not (self.fits and complete and unchanged):
            return None
        return [t.detach() for t, _ in self._kept]


class Verify(Keep):
    """Checks besides that what goes into each operation comes from where it did.

    Before inputs are dropped: afterwards nothing else could be computed.
    """

    def __init__(self, schedule: Schedule, leaves: Sequence[Tensor], key: Any) -> None:
        super().__init__(schedule)
        self._key = key
        numbers = schedule.record.inputs
        self._numbers = {key(t): s for t, s in zip(leaves, numbers, strict=True)}

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.fits and self._next > i:
            step, numbers, key = self.schedule.record.steps[i], self._numbers, self._key
            inputs, outputs = inputs_of(args, kwargs), tensors_of(result)
            if not self._is_wired(i, step, args, kwargs, inputs, outputs):
                self._give_up()
                return result
            numbers.update(zip(map(key, outputs), step.makes, strict=True))
        return result

    def _is_wired(
        self, i: int, step: Step, args: Any, kwargs: Any, inputs: Any, outputs: Any
    ) -> bool:
        if (len(inputs), len(outputs)) != (len(step.reads), len(step.makes)):
            return False
        numbers, key, known = self._numbers, self._key, self.schedule.known
        reads = zip(inputs, step.reads, strict=True)
        if not all(numbers.get(key(t), s) == s for t, s in reads if s in known):
            return False
        if self.schedule.fates[i] is not Fate.DEAD:
            return True
        return fits_metadata(self.schedule.expected[i], args, kwargs, inputs)


class Replay(Follow):
    """Runs a function again, without what is dead and with what was kept.

    Args:
        schedule: to follow.
        residuals: what was kept, or stands for it elsewhere.
        take: gives one of them back, by its place; None if it is not there any more.
        constants: that the operations had whose results were kept.
    """

    def __init__(
        self, schedule: Schedule, residuals: Sequence[Tensor], take: Any, constants: Any
    ) -> None:
        super().__init__(schedule)
        self._constants = constants
        self._runs, self._fates = schedule.runs, schedule.fates
        self._residuals, self._take = residuals, take
        self._absent: dict[int, Shared] = {}
        self._known: dict[int, int] = {}
        self._written = False  # something that is absent
        self.trouble = Trouble()

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
        step, fate = self.schedule.record.steps[i], self._fates[i]
        if is_reflection(func, of=func) and _number(args[0]) == step.reads[1]:
            args = args[::-1]
        if fate is Fate.KEEP:
            self._check_wiring(i, step, args, kwargs)
            return self._result(step, step.result, (), self.schedule.places[i])
        if fate is Fate.METADATA_ONLY:
            return self._on_no_values(step, args, kwargs or {})
        return self._left_out(i, step, args, kwargs)

    def _unexpected(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that is none of the function's."""
        if func in IGNORED:
            return func(*args)
        if is_reflection(func, of=self._funcs[i]):
            return self.__torch_dispatch__(self._funcs[i], (), args[::-1])
        if args and type(args[0]) is Absent:
            if is_view_op(func):
                return self._made_again(func, args, kwargs)
            if func is CLONE:
                return like(args[0])
        if func is CLONE or func is CAST:
            return func(*args, **(kwargs or {}))
        if self._funcs[i : i + 1] == [CLONE]:
            # A copy that autograd made in the forward. Whether it makes one depends on
            # what is differentiated, and here it did not.
            self._next = i + 1
            return self.__torch_dispatch__(func, (), args, kwargs)
        raise self._differs(func)

    def _is_made_again(self, i: int, func: Any, args: Any, kwargs: Any) -> bool:
        """Say whether a view is made by autograd, and not by the function.

        After a view was changed in place, autograd makes it again of its base: of a
        subclass by the operation that made it, of others by one that is not seen.
        """
        if not (args and type(args[0]) is Absent and is_view_op(func)):
            return False
        if self._funcs[i] is not func:
            return True
        step, expected = self.schedule.record.steps[i], self.schedule.expected.get(i)
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

    def _on_no_values(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Run an operation for what does not depend on values, a draw say."""
        result = step.op.func(*present(args), **present(kwargs))
        outputs = tensors_of(result)
        for k, s in enumerate(step.makes):
            if k not in step.metadata_only or s in step.reads:
                outputs[k] = absent(step.op.outputs[k], self._shared(s))
        inputs = inputs_of(args, kwargs)
        return filled(step.result, outputs, inputs)

    def _left_out(self, i: int, step: Step, args: Any, kwargs: Any) -> Any:
        """Return what stands for the result of an operation that does not run."""
        inputs = inputs_of(args, kwargs)
        if not fits_metadata(self.schedule.expected[i], args, kwargs, inputs):
            raise self._differs(step.op.func)
        if step.writes:
            numbers = zip(step.reads, inputs, strict=True)
            targets = [t for s, t in numbers if s in step.writes]
            if not all(type(t) is Absent for t in targets):
                raise self._differs(step.op.func)
            self._written = True
        return self._result(step, step.result, inputs, {})

    def _result(
        self, step: Step, form: Any, inputs: Sequence[Tensor], places: dict[int, int]
    ) -> Any:
        if form.__class__ is Slot and not places:  # most of them
            return absent(step.op.outputs[0], self._shared(step.makes[0]))
        outputs: list[Tensor] = []
        for k, s in enumerate(step.makes):
            kept = self._take(places[k]) if k in places else None
            if kept is None:
                outputs.append(absent(step.op.outputs[k], self._shared(s)))
            else:
                outputs.append(kept.detach())
        return filled(form, outputs, inputs)

    def _check_wiring(self, i: int, step: Step, args: Any, kwargs: Any) -> None:
        """Check that what goes into an operation is what did.

        As far as that is known: constants, leaves, and what was kept or is absent.
        """
        if self._constants.get(i) not in (None, constants_of(args, kwargs)):
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

    def start(self, leaves: Sequence[Tensor]) -> None:
        """Note which tensors are there from the start."""
        if not self._residuals:
            return
        residuals = self._residuals
        kept = [(residuals[place], number) for place, number in self.schedule.kept]
        kept = [(t, number) for t, number in kept if t is not None]
        tensors = (*leaves, *[t for t, _ in kept])
        numbers = (*self.schedule.record.inputs, *[number for _, number in kept])
        self._known = _by_storage(tensors, numbers)

    def _shared(self, number: int) -> Shared:
        shared = self._absent.get(number)
        if shared is None:
            shared = self._absent[number] = Shared(number, self.trouble)
        return shared

    def note_escaped(self) -> None:
        """Note what is absent and outlives the replay: somebody may yet read it."""
        for shared in self._absent.values():
            if sys.getrefcount(shared) > _UNHELD:
                self.trouble.missed.append(shared.number)

    def absent_leaf(self, i: int, leaf: Tensor) -> Absent:
        """Return what stands for a leaf whose value is not needed."""
        return like(leaf, self._shared(self.schedule.record.inputs[i]))


def _number(tensor: Tensor) -> int | None:
    """Return the number of the storage of what is absent."""
    return tensor.storage_of.number if type(tensor) is Absent else None


def _by_storage(tensors: Sequence[Tensor], numbers: Sequence[int]) -> dict[int, int]:
    if TENSORS.issuperset(map(type, tensors)):
        # Most often all have one, and looking at each costs as much as an operation.
        with contextlib.suppress(RuntimeError):
            return dict(zip(map(storage_id, tensors), numbers, strict=True))
    each = zip(map(base_tensor, tensors), numbers, strict=True)
    return {storage_id(t): s for t, s in each if _has_storage(t)}


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in TENSORS and tensor.layout is torch.strided


def _references() -> int:
    """Return how many `note_escaped` counts of what no tensor holds.

    Of its own variables the interpreter counts more or fewer, by its version.
    """
    count = 0
    for shared in {-1: Shared(-1, Trouble())}.values():
        count = sys.getrefcount(shared)
    return count


_UNHELD = _references()


def _is_by_the_way(func: Any) -> bool:
    return func in (CLONE, CAST) or func in IGNORED or is_view_op(func)


class Check(Follow):
    """Runs a function again as it is, which must do what it did in the forward.

    Views, copies and casts are not compared. Hooks on modules make views, as torch's
    FLOP counter does, autograd copies what is changed in place and differentiated, and
    autocast has some casts in its cache. What depends on no input may be missing: it
    may be in a cache of the function's, a table of positions say.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._error: Exception | None = None
        steps = schedule.record.steps
        constant = zip(steps, _of_constants(steps), strict=True)
        pairs = [(s, c) for s, c in constant if not _is_by_the_way(s.op.func)]
        self._steps = [step for step, _ in pairs]
        self._is_constant = [is_constant for _, is_constant in pairs]
        self._funcs = [*[step.op.func for step in self._steps], None]

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not _is_by_the_way(func):
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
        """Raise what the function may have caught."""
        super().end()
        if self._error is not None:
            raise self._error


def _of_constants(steps: Sequence[Step]) -> list[bool]:
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
    "remat: the recomputation ran other operations than the forward did. The function "
    "must compute the same thing twice: if it depends on outside state that changed, "
    "pass that state as an argument.\n"
)
