"""How containers and the dicts of objects are read and written.

Invariant: as of `holders`. An instance of a subclass is read by its base class.
"""

import contextlib
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._capture.objects import by_class
from remat._live.holders import (
    Kind,
    MovedError,
    dict_of,
    flatten,
    without_contents,
)
from remat._live.sets import new_frozenset, write_set


class Dicts(Kind):
    """Dicts, and the dicts of objects."""

    keyed = True

    def __init__(self, base: Any) -> None:
        self._base = base
        # An OrderedDict has an order of its own.
        self._by = base.values, base.keys, dict.__len__

    @override
    def read(
        self,
        holders: Sequence[Any],
        values: list[Any],
        keys: list[Any],
        lengths: list[int],
    ) -> None:
        values_of, keys_of, length_of = self._by
        found = [*map(length_of, holders)]
        count, ends = sum(found), len(values) + len(keys)
        lengths += found
        for table in compress(holders, found):  # most are empty
            values += values_of(table)
            keys += keys_of(table)
        if len(values) + len(keys) != ends + 2 * count:
            raise MovedError

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._by[0], holders))

    @override
    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._by[1], holders))

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        base = self._base
        now = [*base.__iter__(holder)]
        if len(now) != len(keys) or not all(map(operator.is_, now, keys)):
            base.clear(holder)
        for key, value in zip(keys, values, strict=True):
            base.__setitem__(holder, key, value)

    @override
    def held(self, holder: Any) -> tuple[list[Any], list[Any]]:
        values_of, keys_of, _ = self._by
        return [*keys_of(holder)], [*values_of(holder)]

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return self._base.__new__(kind)

    @override
    def filled(
        self, kind: Any, keys: Sequence[Any], values: Sequence[Any], limit: int | None
    ) -> Any:
        if kind is self._base:
            return kind(zip(keys, values, strict=True))
        return super().filled(kind, keys, values, limit)


class Attributes(Dicts):
    """The dicts of objects and functions, which threads read meanwhile.

    They are never empty for a moment.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        now = [*holder]
        same = len(now) >= len(keys) and all(map(operator.is_, now, keys))
        if not same:  # the order differs, or some are gone
            super().write(holder, keys, values)
            return
        for key, value in zip(keys, values, strict=True):
            if holder[key] is not value:
                holder[key] = value
        for key in now[len(keys) :]:
            del holder[key]


class Owned(Attributes):
    """The dicts of values that have no weak references, as instances of a tuple's."""

    adds = True

    @override
    def read(
        self,
        holders: Sequence[Any],
        values: list[Any],
        keys: list[Any],
        lengths: list[int],
    ) -> None:
        super().read([*map(dict_of, holders)], values, keys, lengths)

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return super().values([*map(dict_of, holders)])

    @override
    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        return super().keys([*map(dict_of, holders)])

    @override
    def held(self, holder: Any) -> tuple[list[Any], list[Any]]:
        return super().held(dict_of(holder))

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        super().write(dict_of(holder), keys, values)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return without_contents(kind)


class Items(Kind):
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
    def held(self, holder: Any) -> tuple[list[Any], list[Any]]:
        return [], [*self._base.__iter__(holder)]

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        if self._base is list:
            list.__setitem__(holder, slice(None), values)
        elif self._base is set:
            write_set(holder, values)
        else:
            deque.clear(holder)
            deque.extend(holder, values)

    @override
    def put_back(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        with contextlib.suppress(RecomputeError):  # no recompute reads it
            self.write(holder, keys, values)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        if hasattr(kind, "n_sequence_fields"):
            return kind(values)
        if self._base is frozenset:
            return new_frozenset(kind, values)
        if self.frozen:
            return self._base.__new__(kind, values)
        new = self._base.__new__(kind)
        if limit is not None:
            deque.__init__(new, (), limit)
        return new


class Factories(Kind):
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


ATTRIBUTES, OWNED, FACTORIES = Attributes(), Owned(), Factories()
# By the base class, the more special one first.
CONTAINERS: dict[type, Kind] = {
    OrderedDict: Dicts(OrderedDict),
    dict: Dicts(dict),
    **{base: Items(base) for base in (list, tuple, set, frozenset, deque)},
}


@by_class
def container_kind(kind: type) -> Kind | None:
    """Return how instances of a class are read; None if it is no container's."""
    return next(
        (how for base, how in CONTAINERS.items() if issubclass(kind, base)), None
    )
