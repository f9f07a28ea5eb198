"""What a call does under its options, by the plan of its record.

Invariant: it is decided by the functions that calls ask (`decide`, `plan`); the tests
hold the two together, by counting operations and bytes. Rejected: to ask the lowerings.
They decide while they hold the tensors to be kept, once, and for one policy.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from remat._base.op import Value
from remat._partial.cost import reason_against
from remat._partial.decide import why_as_it_is, why_unpruned
from remat._partial.forward_plan import WORTH_DROPPING
from remat._partial.options import Options, Prune
from remat._partial.plan import Fate, Plan, Step, plan
from remat._report.examine import Examined
from remat.policies import Decision, Policy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy makes of a record.

    Attributes:
        plan: what becomes of each operation.
        last: how many operations a recompute comes to, at most.
        let_go: the leaves that a recompute does without.
        dropped: those of them that are not kept: the graph may save them itself.
        offloaded: the operations whose results are kept elsewhere.
        unpruned: why nothing is left out, "" if it is.
    """

    plan: Plan
    last: int
    let_go: frozenset[int]
    dropped: frozenset[int]
    offloaded: frozenset[int]
    unpruned: str


def outcome_of(found: Examined, options: Options) -> Outcome:
    """Return what a call does under its options."""
    policy, prune = options.policy, options.prune
    record, steps = found.record, found.record.steps
    is_saved = not options.higher_order
    cache = found.kind.cache(policy, prune)
    learned = found.taken.union(cache.plans.learned if cache.plans else ())
    given_up = cache.reason if is_saved else ""
    call = dataclasses.replace(found.situation, is_saved=is_saved, given_up=given_up)
    unpruned = why_as_it_is(policy, prune, call)
    if unpruned:
        return _as_it_is(found, options, unpruned)
    decisions = [_decision(step, policy, found.taken) for step in steps]
    saveable = [i for i, decision in enumerate(decisions) if decision]
    why = why_unpruned(prune, record)
    made = plan(record, saveable, learned=learned, prune=not why)
    if policy is None and prune == "auto":
        unpruned = reason_against(record, made)
        if unpruned:
            return _as_it_is(found, options, unpruned)
    away = [i for i in saveable if _moves(decisions[i], steps[i].op.outputs)]
    let_go = frozenset(_let_go(found, made, prune, is_saved))
    outcome = Outcome(made, 0, let_go, let_go, frozenset(away), why)
    return _stopped(found, options, outcome)


def _as_it_is(found: Examined, options: Options, why: str) -> Outcome:
    made = plan(found.record, prune=False)
    none = frozenset[int]()
    return _stopped(found, options, Outcome(made, 0, none, none, none, why))


def _stopped(found: Examined, options: Options, outcome: Outcome) -> Outcome:
    """Have a recompute stop where all that it is for is there.

    Where it is for nothing, it does not start, and nothing is kept for it.
    """
    record, made = found.record, outcome.plan
    if options.higher_order:
        return dataclasses.replace(outcome, last=len(record.steps))
    steps, residuals = record.steps, made.residuals
    kept = {steps[i].makes[k]: steps[i].op.outputs[k] for i, k in residuals}
    roots = zip(record.packs, record.roots, strict=True)
    wanted = [
        p
        for p, root in roots
        if p is not None
        and root
        and not (p.storage in kept and p.is_of(kept[p.storage]))
    ]
    last = max((p.after for p in wanted), default=0)
    fates = [
        fate if i < last or fate is Fate.KEEP else Fate.DEAD
        for i, fate in enumerate(made.fates)
    ]
    made = dataclasses.replace(made, fates=tuple(fates))
    let_go = outcome.let_go if wanted else frozenset(range(len(record.inputs)))
    dropped = frozenset(i for i in let_go if record.inputs[i] not in found.itself)
    return dataclasses.replace(
        outcome, plan=made, last=last, let_go=let_go, dropped=dropped
    )


def _decision(step: Step, policy: Policy | None, taken: Collection[int]) -> Decision:
    if policy is None or not {*step.makes}.isdisjoint(taken):
        return Decision.RECOMPUTE
    return policy(step.op)


def _moves(decision: Decision, outputs: Sequence[Value]) -> bool:
    """Say whether to keep them so is to move them: the host's stay on the host."""
    away = any(value.device.type != "cpu" for value in outputs)
    return decision is Decision.OFFLOAD_TO_DISK or (decision.offloads and away)


def _let_go(found: Examined, made: Plan, prune: Prune, is_saved: bool) -> list[int]:
    """Return the leaves that a recompute does without, if they are worth it."""
    leaves = found.leaves
    free = [i for i in range(len(leaves)) if i not in made.needed]
    if not is_saved:
        free = [i for i in free if not (i in made.linked and leaves[i].needs)]
    free = [i for i in free if not leaves[i].stays]
    nbytes = sum(leaves[i].nbytes for i in free)
    return free if prune is True or nbytes >= WORTH_DROPPING else []
