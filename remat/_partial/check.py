"""The mode of a recompute in full, which is compared with the record of its forward.

Invariant: operations run as without it. One that differs is an error, also where the
user's code catches it.
Rejected: comparing views, copies and casts. Who differentiates decides about these.
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._partial.plan import Step
from remat._partial.runnable import (
    CAST,
    CLONE,
    UNRECORDED,
    Follow,
    RunnablePlan,
    described,
)
from remat._torch import call_kernel, eager_only, is_view_op


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
            if then is not func:
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
