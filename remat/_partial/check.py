"""Compares a recompute that follows no plan with the operations of its forward.

Called by `following` and `recomputation`, where a replay was given up.

Invariant: nothing is left out, and what differs is an error that shows both lists of
operations. Rejected: to compare values, which would have to be kept.
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from remat._base.absent import (
    IGNORED,
)
from remat._base.errors import RecomputeError
from remat._partial.match import (
    CAST,
    CLONE,
    described,
    is_reflection,
)
from remat._partial.plan import Step
from remat._partial.schedule import Follow, Schedule
from remat._torch import (
    call_kernel,
    eager_only,
    is_view_op,
)


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
