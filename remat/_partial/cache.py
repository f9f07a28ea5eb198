"""What calls of one signature share: a record, the plans made of it, what is learned.

Invariant: what is remembered is bounded, and holds no tensor, module or function of the
user's. Rejected: to prove that a record fits before it is used. The signature is
compared, but whatever else a function reads may differ.
"""

import operator
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from remat._base.types import TENSORS
from remat._partial.naming import names_given
from remat._partial.options import reference
from remat._partial.plan import Record, plan
from remat._partial.schedule import Schedule
from remat.policies import Decision, Policy


_STRIKES = 3  # records that did not fit, before no more is made
_MODULES = 128  # of one signature, that have caches of their own
_LESSONS = 16  # values read that no operation reads, before they are given up


class Plans:
    """The plans of one record.

    Args:
        record: of a forward.
        decisions: what the policy says of each operation.
        prune: whether to leave out what is not needed.
        learned: storages that are needed besides.

    Attributes:
        full: the plan for all outputs, laid out.
        places: where each of its residuals is kept.
        saved_at: of the handles that stand for what is kept, the residual that each is.
        feeding: the residuals that a recompute reads.
        are_saved: whether there is such a handle for each residual.
    """

    __slots__ = (
        *("_narrowed", "are_saved", "decisions", "feeding", "full", "learned"),
        *("places", "prune", "record", "saved_at"),
    )
    full: Schedule

    def __init__(
        self,
        record: Record,
        decisions: Sequence[Decision],
        *,
        prune: bool,
        learned: Iterable[int] = (),
    ) -> None:
        self.record, self.decisions, self.prune = record, decisions, prune
        self.learned = frozenset(learned)
        saveable = [i for i, decision in enumerate(decisions) if decision]
        made = plan(record, saveable, learned=self.learned, prune=prune)
        self.full = Schedule(record, made)
        self.places = [decisions[i] for i, _ in made.residuals]
        self._narrowed: dict[tuple[int, ...], Schedule] = {}
        steps, packs = record.steps, record.packs
        numbers = [steps[i].makes[k] for i, k in made.residuals]
        number = {s: k for k, s in enumerate(numbers)}
        kept = {
            s: steps[i].op.outputs[k]
            for s, (i, k) in zip(numbers, made.residuals, strict=True)
        }
        self.saved_at = {
            j: number[p.storage]
            for j, p in enumerate(packs)
            if p is not None and p.storage in kept and p.is_of(kept[p.storage])
        }
        self.are_saved = {*self.saved_at.values()} == {*range(len(numbers))}
        read = {
            s
            for step, fate in zip(steps, made.fates, strict=True)
            if fate.is_run
            for s in step.reads
        }
        read |= self.learned
        self.feeding = frozenset(k for k, s in enumerate(numbers) if s in read)

    def held(self, recorder: Any) -> list[Tensor]:
        """Return the residuals of the call that was recorded."""
        steps = self.record.steps
        return [
            recorder.residual(steps[i].op.outputs[k], steps[i].makes[k])
            for i, k in self.full.plan.residuals
        ]

    def of(self, given: Sequence[int]) -> Schedule:
        """Return the schedule for the outputs that have cotangents."""
        if not self.prune or len(given) == len(self.record.roots):
            return self.full
        key = tuple(given)
        schedule = self._narrowed.get(key)
        if schedule is None:
            kept = self.full.plan.kept
            made = plan(self.record, kept, given, learned=self.learned)
            schedule = Schedule(self.record, made, self.full.plan.residuals)
            self._narrowed[key] = schedule
        return schedule


class CallCache:
    """What calls of one signature share.

    Attributes:
        plans: the plans; None if there is to be a new record.
        reason: why there are none, and will not be.
        outputs: those that can be differentiated.
        proven: those that a replay has succeeded for.
        names: those that the policy mentions.
        asked: what is followed on request, "" if it is for remat to choose.
    """

    __slots__ = (
        "_parts",
        "asked",
        "names",
        "outputs",
        "plans",
        "proven",
        "reason",
        "strikes",
    )

    def __init__(self) -> None:
        self.plans: Plans | None = None
        self.reason = ""
        self.outputs: frozenset[int] = frozenset()
        self.proven: set[int] = set()
        self.names: frozenset[str] = frozenset()
        self.strikes = 0
        self.asked = ""
        # By identity: a module need not hash.
        self._parts: dict[int, tuple[weakref.ref[Any], CallCache]] = {}

    def of(self, owner: Any) -> "CallCache":
        """Return the cache of one module, once modules of this signature differ.

        In a constant, say, that is no argument: a shift, or a dilation.
        """
        if not self.strikes or not isinstance(owner, nn.Module):
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
        """Say whether nothing is read but what was recorded, whatever is given."""
        return bool(self.proven) and self.proven >= self.outputs

    def strike(self) -> None:
        """Give a record up that did not fit."""
        self.plans, self.proven = None, set()
        self.strikes += 1
        if self.strikes > _STRIKES and len(self._parts) in (0, _MODULES):
            self._give_up(f"{_STRIKES} records did not fit the calls after them")

    def _give_up(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        if self.asked:
            message = _GIVEN_UP.format(asked=self.asked, reason=reason)
            warnings.warn(message, stacklevel=3)

    def learn(self, plans: Plans, numbers: Iterable[int]) -> None:
        """Plan again, for something read storages that were thought not needed."""
        learned = plans.learned.union(numbers)
        if len(learned) > _LESSONS:
            self._give_up("the function reads too much other than by operations")
        if self.plans is not None:
            self.proven = set()
            self.plans = Plans(
                plans.record, plans.decisions, prune=plans.prune, learned=learned
            )

    def warn_of_names(self) -> None:
        """Warn, once, of names that the policy mentions and nothing was ever given."""
        if not self.names:
            return
        unknown, self.names = self.names - names_given(), frozenset()
        if unknown:
            names = ", ".join(map(repr, sorted(unknown)))
            warnings.warn(_UNKNOWN.format(names=names), stacklevel=2)


_GIVEN_UP = (
    "remat: {asked} is not followed any more: {reason}. The function depends on more "
    "than its arguments, its code and the modes of modules, or it reads values other "
    "than by operations. Pass what changes as an argument."
)
_UNKNOWN = (
    "remat: the policy names {names}, but no checkpoint_name in this program has given "
    "such a name to a value. Nothing is saved for it."
)


class _Caches:
    """The caches by signature; the least recently used go first."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._caches: OrderedDict[Hashable, CallCache] = OrderedDict()

    def __getitem__(self, key: Hashable) -> CallCache:
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


CACHES = _Caches(512)
_meta = operator.attrgetter("shape", "dtype", "device")


def cache_of(signature: Hashable, leaves: Sequence[Tensor]) -> CallCache:
    """Return what is shared by the calls of a signature, on such leaves."""
    return CACHES[signature, metas_of(leaves)]


def metas_of(leaves: Sequence[Tensor]) -> Hashable:
    """Return how leaves look."""
    metas: list[Any] = [*map(_meta, leaves)]
    try:
        if not all(map(Tensor.is_contiguous, leaves)):
            metas += map(Tensor.stride, leaves)
    except RuntimeError:  # of sparse tensors
        metas += [(t.layout, type(t)) for t in leaves]
    if not TENSORS.issuperset(map(type, leaves)):
        metas += [weakref.ref(type(t)) for t in leaves]
    return tuple(metas)


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells calls under base autograd apart, but for what is asked of them."""

    signature: Hashable
    metas: Hashable

    def cache(self, policy: Policy | None, prune: Any) -> CallCache:
        """Return what calls of this kind share that are asked for the same."""
        return CACHES[(self.signature, reference(policy), prune), self.metas]
