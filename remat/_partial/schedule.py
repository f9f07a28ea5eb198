"""A plan laid out for running, and the mode that follows it through a function.

`plans` makes schedules; `collect`, `replay` and `check` follow them.

Invariant: what is looked up for each operation is a list index or one look in a dict.
Rejected: to read the record and the plan in each call, which the modes would do for
every operation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from remat._base.absent import MismatchError
from remat._base.op import Op
from remat._partial.match import Expected, described
from remat._partial.plan import Fate, Plan, Record
from remat._torch import LeanDispatchMode, call_kernel, kernel_of


class Schedule:
    """A plan laid out for running, one entry for each operation.

    Args:
        record: of a forward.
        plan: of a recompute, made of the record.
        order: all residuals of the call, if the plan uses only some of them.

    Attributes:
        record: the record.
        plan: the plan.
        funcs: the operations, and None after the last.
        kernels: what each calls.
        runs: what each calls in a recompute; None for those that are not recomputed.
        fates: what becomes of each.
        expected: what is compared of those left out.
        unneeded: the inputs whose values are not needed.
        written: the storages that are changed in place.
        residual_storages: of the residuals that it uses, the index and the storage.
        residual_index: of the operations whose results are saved, which residual each
            output is.
        known: the storages of inputs, and those that operations made. Another one may
            be that of a constant that is gone by now.
    """

    __slots__ = (
        *("expected", "fates", "funcs", "kernels", "known", "plan", "record"),
        *("residual_index", "residual_storages", "runs", "unneeded", "written"),
    )

    def __init__(
        self, record: Record, plan: Plan, order: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.record, self.plan = record, plan
        funcs = [step.op.func for step in record.steps]
        self.funcs = [*funcs, None]
        self.kernels = [_kernel_of(step.op) for step in record.steps]
        self.fates = [*plan.fates]
        self.runs = [
            kernel if fate is Fate.RECOMPUTED else None
            for kernel, fate in zip(self.kernels, self.fates, strict=True)
        ]
        self.unneeded = sorted({*range(len(record.inputs))} - plan.needed)
        self.written = {s for step in record.steps for s in step.writes}
        made = (s for step in record.steps for s in {*step.makes} - {*step.reads})
        self.known = {*record.inputs, *made}
        self.expected = {
            i: Expected(record.steps[i].op)
            for i, fate in enumerate(plan.fates)
            if fate is Fate.DEAD
        }
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
    """Follows a schedule from operation to operation."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule
        self._funcs, self._kernels = schedule.funcs, schedule.kernels
        self._next = 0

    def note_saved(self, outs: Sequence[Any]) -> None:
        """Do nothing: the record says what the graph saves."""

    def end(self) -> None:
        """Check that every recorded operation has run.

        Raises:
            MismatchError: one has not.
        """
        if self._funcs[self._next] is not None:
            raise self._differs(None)

    @override
    def note_unseen(self) -> None:
        """Let nothing fit: the record has no operations that a mode does not see."""
        self._differs(None)

    def _differs(self, func: Any) -> Exception:
        """Return the error that another operation ran than was recorded."""
        error = MismatchError(described(self.schedule.record.steps, self._next, func))
        self._give_up()
        return error

    def _give_up(self) -> None:
        """Let nothing fit from now on: the function may catch the error and go on."""
        self._next = len(self._funcs) - 1
