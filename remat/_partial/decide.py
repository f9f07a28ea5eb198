"""What a call does: be recorded, follow plans, or run as it is; and what calls share.

Calls and reports ask the same functions, so that a report says what a call does. Calls
of one signature share plans, and what the replays of these have shown.

Invariant: each answer is a function of data. What is remembered is bounded, and holds
no tensor, module or function of the user's.
Rejected: to decide in each lowering. The lowerings would differ, and reports would be
wrong. To plan in each backward: most have the same targets. To prove before its use
that a record fits: signatures are compared, but the function may read anything else.
"""

import functools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import Tensor, nn

from remat._base.absent import Trouble
from remat._base.calls import module_names, root_of
from remat._base.code import is_installed
from remat._base.interpreter import nested
from remat._base.types import TENSORS
from remat._base.warned import warn
from remat._partial.effects import reason_against, traits_of
from remat._partial.names import PolicyKeys
from remat._partial.options import Prune, reference
from remat._partial.plan import Record
from remat._partial.recorder import Recorder
from remat._partial.runnable import Plans
from remat._torch.modes import dispatch_mode_count
from remat._torch.process import has_hooks_on_all_modules
from remat.policies import Decision, Policy


# --- What calls share ---

_MISFITS = 3  # records that did not fit, after which no more is made
_MODULES = 128  # of one signature, that have caches of their own
_EXTRA_ROOTS = 16  # after which calls of this kind are not followed any more


def owner_of(fn: Any, args: Sequence[Any]) -> Any:
    """Return whose call it is: a method's object, a module, or the one passed first.

    The `forward` of a view, and of a module in place, is passed its module.
    """
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        return owner
    is_passed = args and isinstance(args[0], nn.Module)
    return args[0] if is_passed and not isinstance(fn, nn.Module) else fn


class CallCache:
    """What calls of one signature share."""

    def __init__(self) -> None:
        self.plans: Plans | None = None  # then the next call is to be recorded
        self.reason = ""  # why no call is recorded any more
        # The targets of all backwards: handles or outputs, by index.
        self.targets: frozenset[int] = frozenset()
        self.proven: set[int] = set()  # those for which a replay has succeeded
        self.keys: PolicyKeys | None = None  # of the policy, until the user is told
        self.misfits = 0  # records that did not fit the calls after them
        self.asked = ""  # by the user, what; "" if remat chooses
        # By identity: a module need not hash.
        self._parts: dict[int, tuple[weakref.ref[Any], CallCache]] = {}

    def for_owner(self, owner: Any) -> "CallCache":
        """Return the cache of one module, once modules of this signature differ.

        They may differ in what is not an argument: in a shift, or a dilation.
        """
        if not self.misfits or not isinstance(owner, nn.Module):
            return self
        parts = self._parts
        if id(owner) in parts and parts[id(owner)][0]() is owner:
            return parts[id(owner)][1]
        if len(parts) >= _MODULES:
            return self
        part = CallCache()
        parts[id(owner)] = weakref.ref(owner), part
        return part

    def is_proven(self) -> bool:
        """Say whether replays have succeeded for all that a backward may read."""
        return bool(self.proven) and self.proven >= self.targets

    def note_success(self, plans: Plans, *shown: Iterable[int]) -> None:
        """Note that a replay has succeeded for some handles or outputs."""
        if self.plans is plans:
            self.proven.update(*shown)
        if self.keys is not None:
            self.keys.tell()
            self.keys = None

    def note_misfit(self, plans: Plans, trouble: Trouble) -> None:
        """Plan again with what a replay read and the plan lacks, or drop the record."""
        if trouble.differs or not trouble.missed:
            self.drop_record()
            return
        extra_roots = plans.extra_roots.union(trouble.missed)
        if len(extra_roots) > _EXTRA_ROOTS:
            self._give_up("the function reads too many values outside of operations")
        if self.plans is not None:
            self.proven = set()
            self.plans = plans.planned_again(extra_roots=extra_roots)

    def drop_record(self) -> None:
        """Give up a record that did not fit a call after it."""
        self.plans, self.proven = None, set()
        self.misfits += 1
        if self.misfits > _MISFITS and len(self._parts) in (0, _MODULES):
            self._give_up(f"{_MISFITS} records did not fit the calls after them")

    def refuse(self, reason: str) -> None:
        """Record no call any more, and follow no plan; the caller warns."""
        self.plans, self.proven, self.reason = None, set(), reason

    def _give_up(self, reason: str) -> None:
        if self.asked and not self.reason:
            warn(_GIVEN_UP.format(asked=self.asked, reason=reason))
        self.reason = self.reason or reason


_GIVEN_UP = (
    "remat: {asked} is not followed any more: {reason}. The function depends on more "
    "than its arguments, its code and the modes of modules, or it reads values other "
    "than by operations. Pass what changes as an argument."
)


class _Caches:
    """Caches by signature. The least recently used is forgotten first."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._caches: OrderedDict[Hashable, CallCache] = OrderedDict()

    def __getitem__(self, key: Hashable) -> CallCache:
        if has_hooks_on_all_modules():
            # Those of a FLOP counter run operations of their own. What is recorded
            # under them fits no other call.
            key = key, "hooks on all modules"
        with self._lock:
            cache = self._caches.get(key)
            if cache is None:
                cache = self._caches[key] = CallCache()
                if len(self._caches) > self._size:
                    self._caches.popitem(last=False)
            else:
                self._caches.move_to_end(key)
            return cache

    def __len__(self) -> int:
        return len(self._caches)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._caches.clear()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Have calls in the body share nothing with those outside of it."""
        with self._lock:
            before, self._caches = self._caches, OrderedDict()
        try:
            yield
        finally:
            with self._lock:
                self._caches = before


CACHES = _Caches(512)
_meta = operator.attrgetter("shape", "dtype", "device")


def metas_of(inputs: Sequence[Tensor]) -> Hashable:
    """Return the metadata of inputs."""
    metas: list[Any] = [*map(_meta, inputs)]
    try:
        if not all(map(Tensor.is_contiguous, inputs)):
            metas += map(Tensor.stride, inputs)
    except RuntimeError:  # of sparse tensors
        metas += [(t.layout, type(t)) for t in inputs]
    if not TENSORS.issuperset(map(type, inputs)):
        metas += [weakref.ref(type(t)) for t in inputs]
    return tuple(metas)


@dataclass(frozen=True, slots=True)
class CallKind:
    """What tells calls apart, but for their policy and `prune`."""

    signature: tuple[Any, ...]
    metas: Hashable

    def cache(self, policy: Policy | None, prune: Any, owner: Any) -> CallCache:
        """Return what calls of this kind share that have this policy and `prune`.

        If the policy asks for paths, modules whose parts have other names share none.
        """
        asks = policy is not None and policy.asks_modules
        names = module_names(root_of(owner)) if asks else ()
        key = self.signature, reference(policy), prune, names
        return CACHES[key, self.metas].for_owner(owner)


# --- What a call does ---


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


def cache_of(
    call: Situation,
    kind: Callable[[], CallKind],
    policy: Policy | None,
    prune: Prune,
    owner: Any,
    label: str,
) -> CallCache | None:
    """Return what a call that is recorded, or follows a record, shares with others.

    None if it runs as it is. If that is not what the user asked for, a warning says so.
    """
    why = why_no_record(policy, prune, call)
    warn_if_asked(policy, prune, call, label, why)
    if why:
        return None
    known = kind()
    cache = known.cache(policy, prune, owner)
    if not (cache.plans or cache.reason) and _asks_for_modes(known.signature):
        cache.refuse(_ASKS)
        warn_if_asked(policy, prune, None, label, _ASKS)
        return None
    return cache


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
