"""What a function under torch.func leaves in holders: tensors that it computed.

In come the holders that a forward changed. Out come their new values, which are a part
of the result (`results`): each level wraps their tensors, and the node of
the call has them among its outputs. Until the levels are done, the holders hold what
is `Pending`. A recompute finds the same values in the same places.

Invariant: a call keeps places, and neither holders nor tensors.
Rejected: to refuse these, as JAX does. Plain code and torch's checkpoint are right.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from remat._reach.exchange import LOCK
from remat._reach.holders import HolderKind


# The number of a root and the index of a holder of it; or, of what was passed, None and
# the identity of the value; or, of the attributes of an input, this and its number.
LeftPlace = tuple[int | None, Any]
ON_INPUT = -1


class LeftAt:
    """Where a forward left values: the holder, and which of its values and keys."""

    __slots__ = "at", "kind", "where"

    def __init__(self, where: LeftPlace, kind: HolderKind, at: Sequence[int]) -> None:
        self.where, self.kind, self.at = where, kind, at


class Left:
    """Values that a run left in one holder."""

    __slots__ = "_at", "_holder", "_pending"

    def __init__(self, at: LeftAt, holder: Any) -> None:
        self._at, self._holder = at, holder
        self._pending: dict[int, tuple[Any, Pending]] = {}

    def values(self) -> list[Any]:
        """Return them; None for one that is not there."""
        keys, values = self._at.kind.held(self._holder)
        held = [*values, *keys]
        return [held[i] if i < len(held) else None for i in self._at.at]

    def take_out(self, numbers: Sequence[int]) -> None:
        """Have the holder hold what is pending in place of some of them."""
        held = self.values()
        for n in numbers:
            pending: Any = Pending()
            # Weak dictionaries have weak references, and only these.
            is_weak = issubclass(type(held[n]), weakref.ref)
            there = weakref.ref(pending) if is_weak else pending
            self._pending[n] = there, pending
        self._write({id(held[n]): there for n, (there, _) in self._pending.items()})

    def put(self, new: Sequence[Any]) -> None:
        """Have it hold these, where what was pending still is."""
        self._write({id(there): new[n] for n, (there, _) in self._pending.items()})

    def _write(self, instead: Mapping[int, Any]) -> None:
        """Write some values in place of others, by the identities of these."""
        with LOCK:  # what another thread put there may be taken away meanwhile
            held = self._at.kind.held(self._holder)
            keys, values = ([instead.get(id(v), v) for v in each] for each in held)
            self._at.kind.write(self._holder, keys, values)


class Pending:
    """In place of what a call computed, until it returns, or after an error."""

    __slots__ = ("__weakref__",)

    @override
    def __repr__(self) -> str:
        return "<remat: a call that raised an error was to leave a tensor here>"
