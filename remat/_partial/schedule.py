"""A plan laid out for running, and the mode that follows it through a function.

Invariant: what is looked up for each operation is a list index or one look in a dict.
Rejected: to read it off the record and the plan each time, which the modes do for every
operation of every call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from remat._base.absent import MismatchError
from remat._base.op import Op
from remat._partial.match import Expected, described
from remat._partial.plan import Fate, Plan, Record
from remat._torch import LeanDispatchMode, call_kernel, kernel_of


class Schedule:
    """A plan laid out for running, one entry for each operation.

    Args:
        record: of a forward.
        plan: made of it.
        order: of the residuals that there are, if there are more than the plan keeps.

    Attributes:
        funcs: the operations, and None after the last.
        kernels: what each calls.
        runs: what each calls that runs again, None for the others.
        fates: what becomes of each.
        expected: of those left out, what is compared.
        unneeded: the inputs whose values are not needed.
        written: the storages that are changed in place.
        kept: the residuals that it uses, and the storage of each.
        known: those of inputs, and those that operations made. A constant that nobody
            saw being made may be where another was that is gone.
        places: of those kept, which residual stands for which output.
    """

    __slots__ = (
        "expected",
        "fates",
        "funcs",
        "kept",
        "kernels",
        "known",
        "places",
        "plan",
        "record",
        "runs",
        "unneeded",
        "written",
    )

    def __init__(
        self, record: Record, plan: Plan, order: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.record, self.plan = record, plan
        funcs = [step.op.func for step in record.steps]
        self.funcs = [*funcs, None]
        self.kernels = [_kernel_of(step.op) for step in record.steps]
        self.fates = [*plan.fates]
        pairs = zip(self.kernels, self.fates, strict=True)
        self.runs = [kernel if fate is Fate.RUN else None for kernel, fate in pairs]
        self.unneeded = sorted({*range(len(record.inputs))} - plan.needed)
        self.written = {s for step in record.steps for s in step.writes}
        made = (s for step in record.steps for s in {*step.makes} - {*step.reads})
        self.known = {*record.inputs, *made}
        self.expected = {
            i: Expected(record.steps[i].op)
            for i, fate in enumerate(plan.fates)
            if fate is Fate.DEAD
        }
        self.kept: list[tuple[int, int]] = []
        self.places: dict[int, dict[int, int]] = {}
        needed = {*plan.residuals}
        for place, (i, k) in enumerate(order or plan.residuals):
            if (i, k) in needed:
                self.places.setdefault(i, {})[k] = place
                self.kept.append((place, record.steps[i].makes[k]))


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

    def ask(self, outs: Sequence[Any]) -> None:
        """Do nothing: what the graph saved is known."""

    def end(self) -> None:
        """Check that every operation recorded has come by.

        Raises:
            MismatchError: it has not.
        """
        if self._funcs[self._next] is not None:
            raise self._differs(None)

    def _differs(self, func: Any) -> Exception:
        """Return the error that another operation came by than was recorded."""
        error = MismatchError(described(self.schedule.record.steps, self._next, func))
        self._give_up()
        return error

    def _give_up(self) -> None:
        """Have nothing fit any more: the function may catch the error and go on."""
        self._next = len(self._funcs) - 1
