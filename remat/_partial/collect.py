"""Collects, while a forward runs, what a plan keeps.

Called by `forward_plan`, for calls whose plan is known.

Invariant: the forward is never changed. A plan that is not of this forward is given up,
and nothing is kept. Rejected: to keep what the graph saves alone. It saves no result
whose value only a recompute reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.absent import (
    IGNORED,
    inputs_of,
    tensors_of,
)
from remat._partial.match import (
    constants_of,
    fits_metadata,
    has_same_constants,
    is_reflection,
)
from remat._partial.plan import Fate, Step
from remat._partial.schedule import Follow, Schedule
from remat._torch import (
    eager_only,
)


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
