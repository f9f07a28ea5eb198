"""Whether a call is recorded and follows its record, and if not, why.

Invariant: calls and reports ask this one function, so that a report says what a call
does. Rejected: to decide in each lowering. They would differ, and a report with them.
"""

import warnings
from dataclasses import dataclass

from remat._partial.options import Prune
from remat._partial.plan import Record
from remat.policies import Policy


@dataclass(frozen=True, slots=True)
class Situation:
    """What a call is, as far as it decides about records.

    Attributes:
        is_saved: whether its graph is plain's own, with handles.
        is_compiled: whether it reaches code of torch.compile or TorchScript.
        in_forward_mode: whether forward mode differentiates it.
        kind: the class of an input that sees what is done with it, "" if there is none.
        elements: how many its inputs have in all.
        given_up: why calls like it are not recorded any more, "" if they are.
    """

    is_saved: bool
    is_compiled: bool = False
    in_forward_mode: bool = False
    kind: str = ""
    elements: int = 0
    given_up: str = ""


SMALL = 2**15  # elements, below which "auto" has too little to leave out


def why_as_it_is(policy: Policy | None, prune: Prune, call: Situation) -> str:
    """Say why a call is neither recorded nor follows a record; "" if it does."""
    if policy is None and prune is False:
        return "prune=False"
    if policy is None and prune == "auto":
        if call.is_saved:
            return "the graph itself tells what its backward reads"
        if call.elements < SMALL:
            return f"its inputs have only {call.elements:,} elements in all"
    if call.is_compiled:
        return "it calls compiled code, whose operations cannot be left out"
    if call.in_forward_mode:
        return "forward mode differentiates it"
    if call.kind:
        return f"an input is a {call.kind}, which sees what is done with it"
    return call.given_up


def why_unpruned(prune: Prune, record: Record) -> str:
    """Say why nothing is left out of the recompute of a record; "" if something may."""
    if prune is False:
        return "prune=False"
    unseen = [step.op.source for step in record.steps if step.opaque]
    return _UNSEEN.format(where=unseen[0]) if unseen else ""


def asked_for(policy: Policy | None, prune: Prune) -> str:
    """Say what a user asked for; "" if it is for remat to choose."""
    if policy is not None:
        return "the policy"
    return "prune=True" if prune is True else ""


def warn_if_asked(
    policy: Policy | None, prune: Prune, call: Situation, label: str, why: str
) -> None:
    """Warn, once for each function, that a policy or `prune=True` is not followed."""
    asked = asked_for(policy, prune)
    if why and asked and not call.in_forward_mode:
        _warn(_NOT_FOLLOWED.format(asked=asked, label=label, why=why))


def warn_if_unpruned(prune: Prune, label: str, why: str) -> None:
    """Warn, once for each function, that `prune=True` does not prune."""
    if why and prune is True:
        _warn(_NOT_PRUNED.format(label=label, why=why))


def _warn(message: str) -> None:
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=3)


_WARNED: set[str] = set()
_NOT_FOLLOWED = (
    "remat: {asked} of {label} is not followed, and all is recomputed: {why}."
)
_NOT_PRUNED = "remat: the recompute of {label} is not pruned: {why}."
_UNSEEN = "at {where}, a tensor is of a class that does not tell what shares its memory"
