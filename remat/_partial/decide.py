"""Decides what a call does: be recorded, follow plans, or run as it is; and why.

Calls and reports ask the same functions, so that a report says what a call does:

    why_no_record     before a forward: why it runs as it is
    planned           after a recorded forward: the plan, or why there is none
    inputs_to_drop    which inputs a call need not keep

Invariant: each answer is a function of data. Rejected: to decide in each lowering. The
lowerings would differ, and reports would be wrong.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from remat._partial.budgeted import Spent, spent
from remat._partial.cache import full_plan
from remat._partial.cost import reason_against
from remat._partial.options import Prune
from remat._partial.plan import Plan, Record
from remat.policies import Decision, Policy


@dataclass(frozen=True, slots=True)
class Situation:
    """What there is to know of a call before it runs.

    Attributes:
        is_saved: whether its graph is plain's own, with handles.
        is_compiled: whether it reaches code of torch.compile or TorchScript.
        is_traced: whether a graph is made, whose maker drops what nobody reads.
        is_split: whether forward mode differentiates its backward.
        kind: the class of an input that sees the operations done with it; "" if there
            is none.
        elements: how many its inputs have in all.
        given_up: why it is not recorded, or calls like it are not any more; "" if they
            are.
    """

    is_saved: bool
    is_compiled: bool = False
    is_traced: bool = False
    is_split: bool = False
    kind: str = ""
    elements: int = 0
    given_up: str = ""


# A reason that is known after a forward only.
ACCUMULATES = "it changes gradients inside, as by .backward()"
ASSIGNS = "it assigns to the .data of an input"
UNSEEN = "torch compiles a part of it, such as a branch of torch.cond"

SMALL = 2**15  # elements, below which "auto" has too little to leave out
WORTH_DROPPING = 2**16  # bytes, below which "auto" keeps inputs that nothing reads


def has_no_reason(policy: Policy | None, prune: Prune, elements: int) -> bool:
    """Say whether nothing would be gained by a record, whatever the call is.

    Args:
        policy: the policy.
        prune: the option of that name.
        elements: how many the inputs have in all.
    """
    return policy is None and (prune is False or (prune == "auto" and elements < SMALL))


def why_no_record(policy: Policy | None, prune: Prune, call: Situation) -> str:
    """Say why a call is neither recorded nor follows a record; "" if it does."""
    if call.is_traced:
        return "it is part of a graph"
    if policy is None and prune is False:
        return "prune=False"
    if policy is None and prune == "auto":
        if call.is_saved:
            return "the graph itself tells what its backward reads"
        if call.elements < SMALL:
            return f"its inputs have only {call.elements:,} elements in all"
    if call.is_compiled:
        return "it calls compiled code, whose operations cannot be left out"
    if call.is_split:
        return "forward mode differentiates its backward"
    if call.kind:
        return f"an input is a {call.kind}, which sees what is done with it"
    return call.given_up


@dataclass(frozen=True, slots=True)
class Planned:
    """What the calls after a recorded one do.

    Attributes:
        plan: the plan that they follow; None if they run as they are.
        why_none: why they do; "" if there is a plan.
        why_unpruned: why the plan leaves nothing out; "" if it may.
        spent: what the budget of the policy keeps; None if it has none.
    """

    plan: Plan | None
    why_none: str
    why_unpruned: str
    spent: Spent | None = None


def planned(
    record: Record,
    decisions: Sequence[Decision],
    policy: Policy | None,
    prune: Prune,
    extra_roots: Collection[int],
) -> Planned:
    """Return what the calls after a recorded one do.

    Args:
        record: of a forward.
        decisions: what the policy says of each operation.
        policy: the policy.
        prune: the option of that name.
        extra_roots: storages that are needed, and that the graph did not save.
    """
    unpruned = _why_unpruned(prune, record)
    pruned = not unpruned
    budget = spent(policy, record, decisions, extra_roots, prune=pruned)
    kept = decisions if budget is None else budget.decisions
    made = full_plan(record, kept, prune=pruned, extra_roots=extra_roots)
    if policy is None and prune == "auto":
        why = reason_against(record, made)
        if why:
            return Planned(None, why, unpruned)
    return Planned(made, "", unpruned, budget)


def _why_unpruned(prune: Prune, record: Record) -> str:
    """Say why nothing is left out of the recompute of a record; "" if something may."""
    if prune is False:
        return "prune=False"
    hidden = [step.op.source for step in record.steps if step.hides_aliases]
    return _HIDDEN.format(where=hidden[0]) if hidden else ""


def inputs_to_drop(
    made: Plan,
    prune: Prune,
    droppable: Sequence[int],
    nbytes: Callable[[int], int],
    *,
    is_differentiated: Callable[[int], bool] | None,
) -> Sequence[int]:
    """Return the inputs that a call need not keep, if dropping them is worth it.

    Args:
        made: the plan for all roots.
        prune: the option of that name.
        droppable: the inputs that the plan does not need, and whose kind of tensor may
            be dropped.
        nbytes: the bytes of an input, given its index.
        is_differentiated: whether it requires grad; None if the graph is plain's own.
            Else what is saved is differentiated again through what it depends on.
    """
    found = droppable
    if is_differentiated is not None:
        sources = made.residual_sources
        found = [i for i in found if not (i in sources and is_differentiated(i))]
    if prune is True or not found:
        return found
    return found if sum(map(nbytes, found)) >= WORTH_DROPPING else []


# --- Warnings ---


def asked_for(policy: Policy | None, prune: Prune) -> str:
    """Say what the user asked for; "" if remat chooses."""
    if policy is not None:
        return "the policy"
    return "prune=True" if prune is True else ""


def warn_if_asked(
    policy: Policy | None, prune: Prune, call: Situation, label: str, why: str
) -> None:
    """Warn, once for each function, that a policy or `prune=True` is not followed."""
    if why and not (call.is_split or call.is_traced):
        warn_if_not_followed(asked_for(policy, prune), label, why)


def warn_if_not_followed(asked: str, label: str, why: str) -> None:
    """Warn, once for each function, that what was asked for, if anything, is not done.

    Args:
        asked: the policy or `prune=True`, in words; "" if there is none.
        label: what the function is called.
        why: the reason.
    """
    if asked:
        warn_once(_NOT_FOLLOWED.format(asked=asked, label=label, why=why))


def warn_if_unpruned(prune: Prune, label: str, why: str) -> None:
    """Warn, once for each function, that `prune=True` does not prune."""
    if why and prune is True:
        warn_once(_NOT_PRUNED.format(label=label, why=why))


def warn_if_overdrawn(budget: Spent | None, label: str) -> None:
    """Warn, once for each function, that what must be kept exceeds the budget."""
    if budget is not None and budget.overdrawn:
        nbytes, most = budget.overdrawn, budget.budget.nbytes
        warn_once(_OVERDRAWN.format(label=label, nbytes=nbytes, most=most))


def warn_once(message: str) -> None:
    """Warn, unless this was said before."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=3)


_WARNED: set[str] = set()
_NOT_FOLLOWED = (
    "remat: {asked} of {label} is not followed, and all is recomputed: {why}."
)
_NOT_PRUNED = "remat: the recompute of {label} is not pruned: {why}."
_OVERDRAWN = (
    "remat: what the policy of {label} has to keep takes {nbytes:,} bytes, more than "
    "its budget of {most:,}. It is kept, and nothing else."
)
_HIDDEN = "at {where}, a tensor is of a class that does not tell what shares its memory"
