"""The plans of one record: one for all roots, and one for each set that was asked for.

`planned_call` makes them after a recorded forward; `cache` shares them among calls of
one signature.

Invariant: plans hold no tensor, so that they outlive the call that was recorded.
Rejected: to plan in each backward. Most ask for the same roots.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from remat._partial.budgeted import Spent, spend
from remat._partial.candidates import Candidates
from remat._partial.plan import Plan, Record, plan
from remat._partial.schedule import Schedule
from remat.policies import Decision


class Plans:
    """The plans of one record.

    Args:
        record: of a forward.
        decisions: what the policy says of each operation.
        made: the plan for all roots.
        prune: whether to leave out what is not needed.
        extra_roots: more storages that are needed.
        spent: what the budget of the policy keeps; None if it has none.

    Attributes:
        record: the record.
        decisions: what the policy says of each operation. A budget allows it, and
            keeps some of it.
        prune: whether to leave out what is not needed.
        extra_roots: more storages that are needed.
        full: the plan for all roots, laid out.
        destinations: where each of its residuals goes.
        residual_of_handle: for each handle of a residual, the index of the residual.
        each_has_handle: whether there is such a handle for each residual.
        for_recompute: the residuals that a recompute reads, by index.
        spent: what the budget of the policy keeps; None if it has none.
    """

    __slots__ = (
        *("_narrowed", "decisions", "destinations", "each_has_handle", "extra_roots"),
        *("for_recompute", "full", "prune", "record", "residual_of_handle", "spent"),
    )
    full: Schedule

    def __init__(
        self,
        record: Record,
        decisions: Sequence[Decision],
        made: Plan,
        *,
        prune: bool,
        extra_roots: Iterable[int] = (),
        spent: Spent | None = None,
    ) -> None:
        self.spent = spent
        self.record, self.decisions, self.prune = record, decisions, prune
        self.extra_roots = frozenset(extra_roots)
        self.full = Schedule(record, made)
        self.destinations = [decisions[i] for i, _ in made.residuals]
        self._narrowed: dict[tuple[int, ...], Schedule] = {}
        self.residual_of_handle = residual_of_handle(record, made)
        count = range(len(made.residuals))
        self.each_has_handle = {*self.residual_of_handle.values()} == {*count}
        read = _read_in_recompute(record, made) | self.extra_roots
        numbers = enumerate(_storages_of_residuals(record, made))
        self.for_recompute = frozenset(
            index
            for index, s in numbers
            # No absent tensor can stand for one of a subclass.
            if s in read or record.steps[made.residuals[index][0]].hides_aliases
        )

    def planned_again(
        self, decisions: Sequence[Decision], extra_roots: frozenset[int]
    ) -> "Plans":
        """Return the plans of the same record for other decisions or more roots."""
        record, prune, before = self.record, self.prune, self.spent
        args, spent = (record, decisions, extra_roots), None
        if before is not None:
            spent = spend(before.budget, before.must, *args, prune=prune)
        kept = decisions if spent is None else spent.decisions
        made = full_plan(record, kept, prune=prune, extra_roots=extra_roots)
        options = {"prune": prune, "extra_roots": extra_roots, "spent": spent}
        return Plans(record, decisions, made, **options)

    def residuals_of(self, candidates: Candidates) -> list[Tensor]:
        """Return the residuals of the call that was recorded."""
        steps = self.record.steps
        return [
            candidates.residual(steps[i].op.outputs[k], steps[i].makes[k])
            for i, k in self.full.plan.residuals
        ]

    def schedule_for(self, roots: Sequence[int]) -> Schedule:
        """Return the schedule for some roots: outputs or handles, by index."""
        if not self.prune or len(roots) == len(self.record.roots):
            return self.full
        key = tuple(roots)
        schedule = self._narrowed.get(key)
        if schedule is None:
            full = self.full.plan
            made = plan(self.record, full.saved, roots, extra_roots=self.extra_roots)
            schedule = Schedule(self.record, made, full.residuals)
            self._narrowed[key] = schedule
        return schedule


def full_plan(
    record: Record,
    decisions: Sequence[Decision],
    *,
    prune: bool,
    extra_roots: Iterable[int],
) -> Plan:
    """Return the plan for all roots, given what the policy says of each operation."""
    saveable = [i for i, decision in enumerate(decisions) if decision]
    return plan(record, saveable, extra_roots=extra_roots, prune=prune)


def _storages_of_residuals(record: Record, made: Plan) -> list[int]:
    return [record.steps[i].makes[k] for i, k in made.residuals]


def residual_of_handle(record: Record, made: Plan) -> dict[int, int]:
    """Return the residual that each handle is a view of, for those that are."""
    index = {s: n for n, s in enumerate(_storages_of_residuals(record, made))}
    values = [record.steps[i].op.outputs[k] for i, k in made.residuals]
    return {
        place: index[pack.storage]
        for place, pack in enumerate(record.packs)
        if pack is not None
        and pack.storage in index
        and pack.is_of(values[index[pack.storage]])
    }


def _read_in_recompute(record: Record, made: Plan) -> set[int]:
    """Return the storages that the operations read which run again."""
    pairs = zip(record.steps, made.fates, strict=True)
    return {s for step, fate in pairs if fate.is_run for s in step.reads}
