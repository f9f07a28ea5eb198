"""What a function under torch.func leaves in holders: tensors that it computed.

In come the holders that a forward changed. Out come their new values, which are a part
of the result (`result_walk`): each level wraps their tensors, and the node of the call
has them among its outputs. Until the levels are done, the holders hold what is
`Pending`. A recompute finds the same values in the same places.

Invariant: a call keeps places, and neither holders nor tensors.
Rejected: to refuse these, as JAX does. Plain code and torch's checkpoint are right.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from remat._reach.before import At
from remat._reach.exchange import LOCK
from remat._reach.holders import HolderKind
from remat._reach.parts import make_all


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


# --- What holds tensors in a result ---


class Part:
    """A value of a result that holds others.

    Attributes:
        value: it itself; None once its tensors are out, if it still has them.
        frozen: whether it is made again around other tensors, and not changed.
        held: how each of what it holds is read, the keys, and the values.
    """

    __slots__ = ("_kind", "frozen", "held", "value")

    def __init__(self, value: Any, kinds: Sequence[HolderKind]) -> None:
        self.value, self.frozen, self._kind = value, kinds[0].frozen, type(value)
        self.held = [(kind, kind.held(value)) for kind in kinds]

    def parts(self) -> list[Any]:
        """Return all that it holds."""
        return [part for _, (keys, items) in self.held for part in (*items, *keys)]

    def empty(self, put_aside: Callable[[Any], Any]) -> None:
        """Put all aside that it holds, and take it out."""
        self.held = [
            (how, ([*map(put_aside, keys)], [*map(put_aside, items)]))
            for how, (keys, items) in self.held
        ]
        if self.frozen:
            self.value = None
        else:
            self._write(lambda kept: None if type(kept) in (At, Part) else kept)

    def emptied(self) -> "list[Part]":
        """Return what it holds that was emptied, too."""
        return [part for part in self.parts() if type(part) is Part]

    def fill(self, find: Callable[[Any], Any]) -> bool:
        """Fill it, or make it again; say whether all that it takes is there."""
        if any(part.value is None for part in self.emptied()):
            return False
        if self.frozen:
            how, (_, items) = self.held[0]
            self.value = how.new(self._kind, [*map(find, items)], None)
        self._write(find)
        return True

    def _write(self, find: Callable[[Any], Any]) -> None:
        for how, (keys, items) in self.held:
            if not how.frozen:
                # Past methods of the user's, which may do more than set an item.
                how.write(self.value, [*map(find, keys)], [*map(find, items)])


def is_exchanged(kept: Any) -> bool:
    """Say whether a value in a holder is a tensor, or is made again around some."""
    return type(kept) is At or (type(kept) is Part and kept.frozen)


def filled(
    kept: Any,
    parts: Sequence[Part],
    left: Sequence[tuple[Left, Sequence[Any]]],
    attributes: Mapping[int, dict[str, Any]],
    tensors: Sequence[Any],
) -> Any:
    """Put tensors in what was emptied, and in holders, and return the result."""

    def find(kept: Any) -> Any:
        if type(kept) is At:
            return tensors[kept.number]
        return kept.value if type(kept) is Part else kept

    make_all(parts, Part.emptied, lambda part: part.fill(find))
    for index, held in attributes.items():
        vars(tensors[index]).update(held)
    for one, values in left:
        one.put([*map(find, values)])
    return find(kept)
