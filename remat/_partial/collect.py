"""Collects, while a forward runs, the residuals that a plan saves.

Called by `planned_call`, for calls whose plan is known.

Invariant: the forward is never changed. A plan that does not fit it is given up, and
nothing is saved. Rejected: to save only what the graph saves. A residual that only a
recompute reads is not among that.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.absent import inputs_of, tensors_of
from remat._partial.match import (
    UNRECORDED,
    fits_metadata,
    has_same_statics,
    is_reflection,
    statics_of,
)
from remat._partial.plan import Fate, Step
from remat._partial.schedule import Follow, Schedule
from remat._partial.storages import key_of
from remat._torch import eager_only


class Collect(Follow):
    """Collects, in a forward, the residuals that a plan saves.

    Args:
        schedule: to follow.
        on_residual: is called with each residual as it is made.

    Attributes:
        fits: whether the plan fits this forward so far.
        statics: of the operations whose results are saved.
    """

    def __init__(
        self, schedule: Schedule, on_residual: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__(schedule)
        self._on_residual = on_residual
        self._residual_index = schedule.residual_index
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
            if is_reflection(func, of=self._funcs[i]):
                return self.__torch_dispatch__(self._funcs[i], types, args[::-1])
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
        step = self.schedule.record.steps[i]
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

    def __init__(self, schedule: Schedule, leaves: Sequence[Tensor]) -> None:
        super().__init__(schedule)
        numbers = schedule.record.inputs
        self._numbers = {key_of(t): s for t, s in zip(leaves, numbers, strict=True)}

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.fits and self._next > i:
            step = self.schedule.record.steps[i]
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
        numbers, known = self._numbers, self.schedule.known
        reads = zip(inputs, step.reads, strict=True)
        if not all(numbers.get(key_of(t), s) == s for t, s in reads if s in known):
            return False
        if self.schedule.fates[i] is not Fate.DEAD:
            return True
        return fits_metadata(self.schedule.expected[i], args, kwargs, inputs)
