"""What calls of one signature share: plans, and what their replays have shown.

Invariant: what is remembered is bounded, and holds no tensor, module or function of the
user's. Rejected: to plan in each backward. Most have the same targets. To prove before
its use that a record fits. Signatures are compared, but the function may read anything
else.
"""

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from remat._base.absent import Trouble
from remat._base.calls import module_names, root_of
from remat._base.types import TENSORS
from remat._base.warned import warn
from remat._partial.options import reference
from remat._partial.runnable import Plans
from remat._torch.process import has_hooks_on_all_modules
from remat.policies import Policy


if TYPE_CHECKING:
    from remat._partial.names import PolicyKeys


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
