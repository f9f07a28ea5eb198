"""What a function under torch.func leaves in holders: tensors that it computed.

In come the holders that a forward changed. Out come their new values, which are a part
of the result (`result_walk`): each level wraps their tensors, and the node of the call
has them among its outputs. Until the levels are done, the holders hold what is
`Pending`. A recompute finds the same values in the same places.

Invariant: a call keeps places, and neither holders nor tensors.
Rejected: to refuse these, as JAX does. Plain code and torch's checkpoint are right.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from remat._reach.before import At
from remat._reach.exchange import Refilled
from remat._reach.holders import HolderKind
from remat._reach.parts import LOCK, Box


# The number of a root and the index of a holder of it; or, of what was passed, None and
# the identity of the value; or, of the attributes of an input, this and its number.
LeftPlace = tuple[int | None, Any]
ON_INPUT = -1


class LeftAt(NamedTuple):
    """Where a forward left values: the holder, and which of its values and keys."""

    where: LeftPlace
    kind: HolderKind
    at: Sequence[int]


class Left:
    """Values that a run left in one holder, and where."""

    __slots__ = "_holder", "_pending", "where"

    def __init__(self, where: LeftAt, holder: Any) -> None:
        self.where, self._holder = where, holder
        self._pending: dict[int, tuple[Any, Pending]] = {}

    def values(self) -> list[Any]:
        """Return them; None for one that is not there."""
        keys, values = self.where.kind.held(self._holder)
        held = [*values, *keys]
        return [held[i] if i < len(held) else None for i in self.where.at]

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
            held = self.where.kind.held(self._holder)
            keys, values = ([instead.get(id(v), v) for v in each] for each in held)
            self.where.kind.write(self._holder, keys, values)


class Pending:
    """In place of what a call computed, until it returns, or after an error."""

    __slots__ = ("__weakref__",)

    @override
    def __repr__(self) -> str:
        return "<remat: a call that raised an error was to leave a tensor here>"


# --- What holds tensors in a result ---


def is_exchanged(kept: Any) -> bool:
    """Say whether a value in a holder is a tensor, or is made again around some."""
    return type(kept) is At or (type(kept) is Box and kept.is_frozen)


def filled(
    kept: Any,
    boxes: Sequence[Box],
    left: Sequence[tuple[Left, Sequence[Any]]],
    attributes: Mapping[int, dict[str, Any]],
    tensors: Sequence[Any],
) -> Any:
    """Put tensors in what was emptied, and in holders, and return the result."""
    refilled = Refilled(tensors)
    for box in boxes:
        refilled.found(box)
    for index, held in attributes.items():
        vars(tensors[index]).update(held)
    for one, values in left:
        one.put(refilled.values(values))
    return refilled.values((kept,))[0]
