"""What a call does under its options, by the plan of its record.

Invariant: it is decided as in `_recipe`, which plans the calls themselves; the tests
hold the two together, by counting operations and bytes. Rejected: to ask `_recipe`. It
decides while it holds the tensors to be kept, once, and for one policy.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from remat._cost import reason_against
from remat._examine import Examined, Leaf
from remat._op import Value
from remat._options import Prune
from remat._plan import Plan, Record, Step, plan
from remat._tracing import WORTH_DROPPING
from remat.policies import Decision, Policy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy makes of a record.

    Attributes:
        plan: what becomes of each operation.
        dropped: the leaves that are not kept.
        offloaded: the operations whose results are kept elsewhere.
        unpruned: why nothing is left out, "" if it is.
    """

    plan: Plan
    dropped: frozenset[int]
    offloaded: frozenset[int]
    unpruned: str


def outcome_of(found: Examined, policy: Policy | None, prune: Prune) -> Outcome:
    """Return what a call does, as `_recipe` decides it."""
    record, steps = found.record, found.record.steps
    unpruned = _why_as_it_is(found, policy, prune)
    if unpruned:
        return _as_it_is(record, unpruned)
    decisions = [_decision(step, policy, found.taken) for step in steps]
    saveable = [i for i, decision in enumerate(decisions) if decision]
    pruned = prune is not False
    made = plan(record, saveable, learned=found.learned, prune=pruned)
    if policy is None and prune == "auto":
        unpruned = reason_against(record, made)
        if unpruned:
            return _as_it_is(record, unpruned)
    away = [i for i in saveable if _moves(decisions[i], steps[i].op.outputs)]
    dropped = frozenset(_dropped(found.leaves, made, prune))
    return Outcome(made, dropped, frozenset(away), "" if pruned else "prune=False")


def _as_it_is(record: Record, why: str) -> Outcome:
    return Outcome(plan(record, prune=False), frozenset(), frozenset(), why)


def _why_as_it_is(found: Examined, policy: Policy | None, prune: Prune) -> str:
    """Say why the function is run again as it is, before any plan; "" if it is not."""
    if found.compiled:
        return "it calls compiled code, whose operations cannot be left out"
    if policy is None and prune is False:
        return "prune=False"
    if policy is None and prune == "auto" and found.small:
        return f"its inputs have only {found.elements:,} elements in all"
    return found.given_up


def _decision(step: Step, policy: Policy | None, taken: Collection[int]) -> Decision:
    if policy is None or not {*step.makes}.isdisjoint(taken):
        return Decision.RECOMPUTE
    return policy(step.op)


def _moves(decision: Decision, outputs: Sequence[Value]) -> bool:
    """Say whether to keep them so is to move them: the host's stay on the host."""
    away = any(value.device.type != "cpu" for value in outputs)
    return decision is Decision.OFFLOAD_TO_DISK or (decision.offloads and away)


def _dropped(leaves: Sequence[Leaf], made: Plan, prune: Prune) -> list[int]:
    """Return the leaves that are dropped, if they are worth it."""
    unneeded = (i for i in range(len(leaves)) if i not in made.needed)
    free = (i for i in unneeded if not (i in made.linked and leaves[i].needs))
    found = [i for i in free if not leaves[i].stays]
    nbytes = sum(leaves[i].nbytes for i in found)
    return found if prune is True or nbytes >= WORTH_DROPPING else []
