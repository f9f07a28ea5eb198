"""How containers and the dicts of objects are read and written.

Invariant: as of `holders`. An instance of a subclass is read by its base class.
Rejected: a set in the order that it had. That depends on its history, and none but
CPython's own tables tell it. A set that differs is filled again, in Python's order.
"""

import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from remat._reach.holders import (
    HolderKind,
    Holdings,
    MovedError,
    dict_of,
    flatten,
    without_contents,
)
from remat._reach.objects import by_class


class Dicts(HolderKind):
    """Dicts, and the dicts of objects and functions, which threads read meanwhile."""

    keyed = True

    def __init__(self, base: Any) -> None:
        self._base = base
        # An OrderedDict has an order of its own.
        self._values, self._keys = base.values, base.keys

    @override
    def read(self, holders: Sequence[Any], to: Holdings) -> None:
        values, keys, lengths = to.values, to.keys, [*map(dict.__len__, holders)]
        ends = len(values) + len(keys) + 2 * sum(lengths)
        to.lengths += lengths
        for table in itertools.compress(holders, lengths):  # most are empty
            values += self._values(table)
            keys += self._keys(table)
        if len(values) + len(keys) != ends:
            raise MovedError

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._values, holders))

    @override
    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._keys, holders))

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        base = self._base
        now = [*base.__iter__(holder)]
        if not _begin(now, keys):
            # It is emptied only if the order differs.
            wanted = {*map(id, keys)}
            gone = [key for key in now if id(key) not in wanted]
            if _begin([key for key in now if id(key) in wanted], keys):
                for key in gone:
                    base.__delitem__(holder, key)
            else:
                base.clear(holder)
        if base is dict:
            dict.update(holder, zip(keys, values, strict=True))
            return
        for key, value in zip(keys, values, strict=True):
            base.__setitem__(holder, key, value)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return self._base.__new__(kind)


def _begin(now: Sequence[Any], keys: Sequence[Any]) -> bool:
    """Say whether some keys are the first ones of others."""
    return len(now) <= len(keys) and all(map(operator.is_, now, keys))


class Owned(Dicts):
    """The dicts of values that have no weak references, as instances of a tuple's."""

    adds = True

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return super().values([*map(dict_of, holders)])

    @override
    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        return super().keys([*map(dict_of, holders)])

    @override
    def read(self, holders: Sequence[Any], to: Holdings) -> None:
        super().read([*map(dict_of, holders)], to)

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        super().write(dict_of(holder), keys, values)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return without_contents(kind)


class Items(HolderKind):
    """Lists, deques and sets; tuples and frozensets, which are never written."""

    def __init__(self, base: Any) -> None:
        self._base, self.frozen = base, base in (tuple, frozenset)

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._base.__iter__, holders))

    @override
    def lengths(self, holders: Sequence[Any]) -> Iterable[int]:
        return map(self._base.__len__, holders)

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        if self._base is list:
            list.__setitem__(holder, slice(None), values)
        elif self._base is set:
            # The rest stays, and mostly its order.
            set.difference_update(holder, set.difference(holder, values))
            set.update(holder, values)
        else:
            deque.clear(holder)
            deque.extend(holder, values)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        if hasattr(kind, "n_sequence_fields"):
            return kind(values)
        if self.frozen:
            return self._base.__new__(kind, values)
        new = self._base.__new__(kind)
        if limit is not None:
            deque.__init__(new, (), limit)
        return new


class Factories(HolderKind):
    """What makes the missing values of a defaultdict."""

    adds = True
    fixed = 1

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return map(_factory_of, holders)

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        (holder.default_factory,) = values


_factory_of = operator.attrgetter("default_factory")


ATTRIBUTES, OWNED, FACTORIES = Dicts(dict), Owned(dict), Factories()
# By the base class, the more special one first.
CONTAINERS: dict[type, HolderKind] = {
    OrderedDict: Dicts(OrderedDict),
    dict: Dicts(dict),
    **{base: Items(base) for base in (list, tuple, set, frozenset, deque)},
}


@by_class
def container_kind(kind: type) -> HolderKind | None:
    """Return how instances of a class are read; None if it is no container's."""
    return next(
        (how for base, how in CONTAINERS.items() if issubclass(kind, base)), None
    )
