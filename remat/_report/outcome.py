"""What a call does with its operations and inputs, for `explain`.

Called by `explain`, with what `examine` found.

Invariant: nothing is decided here: `_partial/decide.py` is asked, as by a call.
Rejected: to ask the lowerings. They decide while they hold the tensors to be saved,
once, and for one policy.
"""

import dataclasses
from collections.abc import Container, Sequence
from dataclasses import dataclass

from remat._partial.budgeted import Spent, moves
from remat._partial.cache import residual_of_handle
from remat._partial.candidates import decisions_of
from remat._partial.decide import inputs_to_drop, planned, why_no_record
from remat._partial.options import Options
from remat._partial.plan import Fate, Plan, Record, plan
from remat._report.examine import Examined
from remat.policies import Decision


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call does under its options.

    Attributes:
        plan: what becomes of each operation.
        unread: the leaves that no recompute has to read.
        dropped: those of them that are not kept. The graph may save the others itself.
        offloaded: the operations whose results are offloaded.
        unpruned: why nothing is left out; "" if it may be.
        spent: what the budget of the policy keeps; None if it has none.
    """

    plan: Plan
    unread: frozenset[int]
    dropped: frozenset[int]
    offloaded: frozenset[int]
    unpruned: str
    spent: Spent | None = None


def outcome_of(found: Examined, options: Options) -> Outcome:
    """Return what a call does under its options."""
    policy, prune, record = options.policy, options.prune, found.record
    is_saved = not options.higher_order
    cache = found.kind.cache(policy, prune)
    given_up = (cache.reason or found.situation.given_up) if is_saved else ""
    call = dataclasses.replace(found.situation, is_saved=is_saved, given_up=given_up)
    why = why_no_record(policy, prune, call)
    if why:
        return _without_plan(record, options, found, why)
    decisions = decisions_of(policy, record, found.exposed)
    roots = found.exposed.union(cache.plans.extra_roots if cache.plans else ())
    verdict = planned(record, decisions, policy, prune, roots)
    made = verdict.plan
    if made is None:
        return _without_plan(record, options, found, verdict.why_none)
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
    dropped = frozenset(unread)
    offloaded = frozenset(_offloaded(record, decisions))
    unpruned, budget = verdict.why_unpruned, verdict.spent
    outcome = Outcome(made, dropped, dropped, offloaded, unpruned, budget)
    return _stopped(outcome, options, found, residual_of_handle(record, made))


def _without_plan(
    record: Record, options: Options, found: Examined, why: str
) -> Outcome:
    none = frozenset[int]()
    outcome = Outcome(plan(record, prune=False), none, none, none, why)
    return _stopped(outcome, options, found, ())


def _offloaded(record: Record, decisions: Sequence[Decision]) -> list[int]:
    """Return the operations whose results move: those in host memory stay in it."""
    pairs = enumerate(zip(record.steps, decisions, strict=True))
    return [i for i, (step, d) in pairs if moves(d, step.op.outputs)]


def _stopped(
    outcome: Outcome, options: Options, found: Examined, filled: Container[int]
) -> Outcome:
    """Have a recompute stop when the last handle is filled.

    If there is none to fill, it does not start, and reads no input.

    Args:
        outcome: of a recompute that runs to its end.
        options: of the call.
        found: what the call did.
        filled: the handles that have a residual.
    """
    if options.higher_order:
        return outcome
    record = found.record
    wanted = [
        pack.after
        for place, (pack, roots) in enumerate(
            zip(record.packs, record.roots, strict=True)
        )
        if pack is not None and roots and place not in filled
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
