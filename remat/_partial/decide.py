"""Decides what a call does: be recorded, follow plans, or run as it is; and why.

Calls and reports ask the same functions, so that a report says what a call does.

Invariant: each answer is a function of data. Rejected: to decide in each lowering. The
lowerings would differ, and reports would be wrong.
"""

import functools
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from remat._base.code import is_installed
from remat._base.interpreter import nested
from remat._base.warned import warn
from remat._partial.cache import CallCache
from remat._partial.effects import reason_against, traits_of
from remat._partial.names import PolicyKeys
from remat._partial.options import Prune
from remat._partial.plan import Record
from remat._partial.recorder import Recorder
from remat._partial.runnable import Plans
from remat._torch.modes import dispatch_mode_count
from remat.policies import Decision, Policy


@dataclass(frozen=True, slots=True)
class Situation:
    """What there is to know of a call before it runs."""

    is_saved: bool  # its graph is plain's own, with handles
    is_compiled: bool = False  # it reaches code of torch.compile or TorchScript
    is_traced: bool = False  # a graph is made, whose maker drops what nobody reads
    is_split: bool = False  # forward mode differentiates its backward
    kind: str = ""  # the class of an input that sees the operations done with it
    elements: int = 0  # of all inputs
    asks_for_views: bool = False  # and no tensor of the user's is kept to answer
    given_up: str = ""  # why it is not recorded, or calls like it are not any more
    modes: int = field(default_factory=dispatch_mode_count)  # that are entered


# Before a forward is recorded: that is done under a mode for torch functions.
_ASKING = "has_torch_function", "is_torch_function"
_ASKS = "it asks whether there is a torch function (has_torch_function)"
# Reasons that are known after a forward only.
ACCUMULATES = "it changes gradients inside, as by .backward()"

SMALL = 2**15  # elements, below which "auto" has too little to leave out


def has_no_reason(policy: Policy | None, prune: Prune, elements: int) -> bool:
    """Say whether nothing would be gained by a record, whatever the call is."""
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
    if call.asks_for_views:
        return "it asks whether a tensor is a view (_is_view)"
    # Each operation passes all modes, and Python allows no more frames.
    return call.given_up or (_DEEP if call.modes >= _DEPTH else "")


_DEPTH = 16
_DEEP = f"it is inside of {_DEPTH} calls that are"


def is_refused(
    cache: CallCache,
    signature: tuple[Any, ...],
    policy: Policy | None,
    prune: Prune,
    label: str,
) -> bool:
    """Say whether a call that is to be recorded cannot be, by the code it reaches."""
    if cache.plans is not None or cache.reason or not _asks_for_modes(signature):
        return False
    cache.refuse(_ASKS)
    warn_if_asked(policy, prune, None, label, _ASKS)
    return True


@functools.lru_cache(512)  # calls of one signature have records for many shapes
def _asks_for_modes(signature: tuple[Any, ...]) -> bool:
    for part in signature:
        code = part() if type(part) is weakref.ref else part
        if isinstance(code, tuple) and _asks_for_modes(code):
            return True
        if type(code) is CodeType and not is_installed(code.co_filename):
            names = (name for inner in nested(code) for name in inner.co_names)
            if any(name.lstrip("_").startswith(_ASKING) for name in names):
                return True
    return False


def plans_of(
    record: Record,
    decisions: Sequence[Decision],
    policy: Policy | None,
    prune: Prune,
    extra_roots: Collection[int],
) -> tuple[Plans, str]:
    """Return the plans of a record, and why no call follows them; "" if calls do."""
    unpruned, args = _why_unpruned(prune, record), (record, decisions, policy)
    plans = Plans(*args, unpruned=unpruned, extra_roots=extra_roots)
    is_choice = policy is None and prune == "auto"
    return plans, reason_against(record, plans.full.plan) if is_choice else ""


def _why_unpruned(prune: Prune, record: Record) -> str:
    """Say why nothing is left out of the recompute of a record; "" if something may."""
    if prune is False:
        return "prune=False"
    hidden = [step.op.source for step in record.steps if step.hides_aliases]
    return _HIDDEN.format(where=hidden[0]) if hidden else ""


def plan_recorded(
    cache: CallCache,
    recorder: Recorder,
    record: Record,
    targets: Iterable[int],
    policy: Policy | None,
    prune: Prune,
    label: str,
) -> Plans | None:
    """Plan a record, for this call and those after it; return the plans for this one.

    None if a replay is not worth it. A backward may read the handles or
    outputs that are `targets`.
    """
    if recorder.begins_anew:
        return None
    if recorder.why_void:
        cache.refuse(recorder.why_void)
        warn_if_asked(policy, prune, None, label, recorder.why_void)
        return None
    candidates, exposed = recorder.candidates, recorder.exposed
    decisions = candidates.decisions(record, exposed)
    plans, why = plans_of(record, decisions, policy, prune, exposed)
    if plans.unpruned and prune is True:
        warn_once(_NOT_PRUNED.format(label=label, why=plans.unpruned))
    if why:
        cache.reason = why
        return None
    spent = plans.spent
    if spent is not None and spent.overdrawn:
        nbytes, most = spent.overdrawn, spent.policy.budget.nbytes
        warn_once(_OVERDRAWN.format(label=label, nbytes=nbytes, most=most))
    if not (policy and policy.has_decisions and _decides(record)):
        # Else the next call may do something else: it is recorded, too.
        cache.plans, cache.proven, cache.targets = plans, set(), frozenset(targets)
    if policy is not None and policy.keys:
        ops = [step.op for step in record.steps]
        cache.keys = PolicyKeys(policy, ops, label, recorder.paths)
    asked = asked_for(policy, prune)
    cache.asked = asked and f"{asked} of {label}"
    if candidates.has(plans.storages):
        return plans
    # A result that got its name after it was freed is saved by later calls only.
    return plans.planned_again(
        [
            decision if candidates.has(step.makes) else Decision.RECOMPUTE
            for step, decision in zip(record.steps, plans.decisions, strict=True)
        ]
    )


def _decides(record: Record) -> bool:
    """Say whether Python reads a result, or a shape that depends on values."""
    return any(traits_of(step.op.func).is_read_by_python for step in record.steps)


# --- Warnings ---


def asked_for(policy: Policy | None, prune: Prune) -> str:
    """Say what the user asked for; "" if remat chooses."""
    if policy is not None:
        return "the policy"
    return "prune=True" if prune is True else ""


def warn_if_asked(
    policy: Policy | None, prune: Prune, call: Situation | None, label: str, why: str
) -> None:
    """Warn, once for each function, that a policy or `prune=True` is not followed."""
    asked = asked_for(policy, prune)
    if why and asked and not (call and (call.is_split or call.is_traced)):
        warn_once(_NOT_FOLLOWED.format(asked=asked, label=label, why=why))


def warn_once(message: str) -> None:
    """Warn, unless this was said before."""
    if message not in _WARNED:
        _WARNED.add(message)
        warn(message)


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
