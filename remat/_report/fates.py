"""What a call does with its operations and inputs, and why.

Invariant: nothing is decided here: `_partial/decide.py` is asked, as by a call. Of
several reasons, the one nearest to the backward is given: a backward that reads the
value comes before a recomputed operation.
Rejected: reasons noted while planning. The planner's walk may meet a value by another
way first.
"""

import dataclasses
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from remat._base.op import Op
from remat._base.source import short
from remat._base.unit import unit
from remat._partial.budget import Spent
from remat._partial.cache import residual_of_handle
from remat._partial.candidates import decisions_of, moves
from remat._partial.decide import inputs_to_drop, verdict_of, why_no_record
from remat._partial.options import Options, Prune
from remat._partial.plan import Fate, Plan, Step, plan
from remat._report.examine import Examined


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call does under its options."""

    plan: Plan
    unread: frozenset[int]  # the leaves that no recompute has to read
    dropped: frozenset[int]  # those that are not kept; the graph may save the others
    offloaded: frozenset[int]  # the operations whose results are offloaded
    unpruned: str  # why nothing is left out; "" if it may be
    spent: Spent | None = None  # what the budget of the policy keeps


def outcome_of(found: Examined, options: Options) -> Outcome:
    """Return what a call does under its options."""
    policy, prune, record = options.policy, options.prune, found.record
    is_saved = not options.higher_order
    cache = found.kind.cache(policy, prune).for_owner(found.owner, policy)
    given_up = (cache.reason or found.situation.given_up) if is_saved else ""
    call = dataclasses.replace(found.situation, is_saved=is_saved, given_up=given_up)

    def unplanned(why: str) -> Outcome:
        none = frozenset[int]()
        outcome = Outcome(plan(record, prune=False), none, none, none, why)
        return outcome if options.higher_order else _stopped(outcome, found, ())

    why = why_no_record(policy, prune, call)
    if why:
        return unplanned(why)
    decisions = decisions_of(policy, record, found.exposed)
    roots = found.exposed.union(cache.plans.extra_roots if cache.plans else ())
    verdict = verdict_of(record, decisions, policy, prune, roots)
    made = verdict.plan
    if made is None:
        return unplanned(verdict.why_none)
    pairs = enumerate(zip(record.steps, decisions, strict=True))
    # What is in host memory stays in it.
    away = frozenset(i for i, (step, d) in pairs if moves(d, step.op.outputs))
    dropped = _dropped(found, made, prune, is_saved=is_saved)
    unpruned, budget = verdict.why_unpruned, verdict.spent
    outcome = Outcome(made, dropped, dropped, away, unpruned, budget)
    if options.higher_order:
        return outcome
    return _stopped(outcome, found, residual_of_handle(record, made))


def _dropped(
    found: Examined, made: Plan, prune: Prune, *, is_saved: bool
) -> frozenset[int]:
    """Return the leaves that a call under a plan does not keep."""
    leaves = found.leaves
    droppable = [
        i for i, t in enumerate(leaves) if i not in made.needed and not t.stays
    ]
    unread = inputs_to_drop(
        made,
        prune,
        droppable,
        lambda i: leaves[i].nbytes,
        is_differentiated=None if is_saved else lambda i: leaves[i].needs,
    )
    return frozenset(unread)


def _stopped(outcome: Outcome, found: Examined, filled: Container[int]) -> Outcome:
    """Have a recompute stop when the last handle is filled, of those not `filled`.

    If there is none to fill, it does not start, and reads no input.
    """
    record = found.record
    positions = enumerate(zip(record.packs, record.roots, strict=True))
    wanted = [
        pack.after
        for position, (pack, roots) in positions
        if pack is not None and roots and position not in filled
    ]
    last = max(wanted, default=0)
    fates = tuple(
        fate if i < last or fate is Fate.SAVED else Fate.DEAD
        for i, fate in enumerate(outcome.plan.fates)
    )
    unread = outcome.unread if wanted else frozenset(range(len(record.inputs)))
    return dataclasses.replace(
        outcome,
        plan=dataclasses.replace(outcome.plan, fates=fates),
        unread=unread,
        dropped=frozenset(i for i in unread if record.inputs[i] not in found.itself),
    )


# --- Why ---


_SHOWN = 2  # at most so many readers are named
_UNTOLD = "perhaps read by the backward of a change to a view, or of a function in C++"


def name(op: Op) -> str:
    """Return the name of an operation, `mm`, or of a function with rules."""
    if op.func is unit:
        return str(op.args[-1]).partition(" (")[0].strip("`")
    return getattr(op.packet, "__name__", str(op.packet))


def _reads(step: Step) -> bool:
    """Say whether an operation reads values, and not only metadata."""
    return not step.is_view and len(step.metadata_only) < max(1, len(step.makes))


class Reasons:
    """The reasons for what one outcome does."""

    def __init__(self, found: Examined, outcome: Outcome) -> None:
        self._found, self._record, self._plan = found, found.record, outcome.plan
        self._unpruned = outcome.unpruned
        self._roots = found.itself.union(*found.record.roots)
        self._users: dict[int, list[int]] = {}
        for i, step in enumerate(found.record.steps):
            for s in {*step.reads}:
                self._users.setdefault(s, []).append(i)

    def of_operation(self, i: int) -> str:
        """Say why an operation is saved, recomputed or left out."""
        step, fate = self._record.steps[i], self._plan.fates[i]
        touched = {*step.makes, *step.writes}
        if fate is Fate.SAVED:
            return f"the policy saves it, {self._use(touched, i)}"
        if fate is Fate.DEAD:
            return self._unused(touched, i)
        use = self._use(touched, i) or (_forced(step) if step.always_runs else "")
        if use or self._unpruned:
            return use or f"nothing is left out: {self._unpruned}"
        return self._drawn(i)

    def of_input(self, s: int) -> str:
        """Say why an input of that storage is needed; "" if it is not."""
        return self._use({s}, -1)

    def _use(self, touched: set[int], after: int) -> str:
        """Say what reads any of the storages; "" if nothing does."""
        if not touched.isdisjoint(self._roots):
            each = (self._found.readers.get(s, ()) for s in sorted(touched))
            names = dict.fromkeys(chain.from_iterable(each))
            return f"read by the backward of {_listed(names)}" if names else _UNTOLD
        if not touched.isdisjoint(self._found.exposed):
            return "its value is read outside of operations"
        fates = self._plan.fates
        users = [i for i in self._users_of(touched) if i > after]
        running = [i for i in users if fates[i].is_run]
        return f"read by {self._steps(running)}" if running else ""

    def _unused(self, touched: set[int], i: int) -> str:
        users = [j for j in self._users_of(touched) if j > i]
        if users:
            readers = self._steps(users)
            return f"read only by operations that are not recomputed: {readers}"
        if touched.isdisjoint(s for s in self._record.outputs if s is not None):
            return "nothing reads it"
        return "a result that the backward does not read"

    def _users_of(self, storages: Iterable[int]) -> list[int]:
        """Return the operations that read values in any of the storages."""
        users = chain(*(self._users.get(s, ()) for s in storages))
        return [i for i in sorted({*users}) if _reads(self._record.steps[i])]

    def _steps(self, indices: Sequence[int]) -> str:
        ops = [self._record.steps[i].op for i in indices]
        return _listed(
            dict.fromkeys(
                f"{name(op)} ({short(op.source, with_module=False)})" for op in ops
            )
        )

    def _drawn(self, i: int) -> str:
        """Say why an operation that draws runs although its result is not needed."""
        for j, later in enumerate(self._record.steps):
            if j > i and later.draws and self._use({*later.makes}, j):
                return (
                    f"draws random numbers before {self._steps([j])}, which is needed"
                )
        return "draws random numbers, which advances a stream"


def _listed(names: Iterable[str]) -> str:
    names = [*names]
    rest = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {rest} more" if rest > 0 else shown


def _forced(step: Step) -> str:
    """Say why an operation runs in every recompute."""
    tags = {tag.name for tag in getattr(step.op.func, "tags", ())}
    if tags & {"data_dependent_output", "dynamic_output_shape"}:
        return "Python reads its result"
    if not (step.makes or step.writes):
        return "it returns no tensor, so it runs for its side effects"
    return "remat cannot see what it reads and writes"
