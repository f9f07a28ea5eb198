"""How containers and the dicts of objects are read and written, and which are not.

Iterators and large containers are watched: to copy one would cost what it holds, and
most iterators cannot be copied.

Invariant: as of `holders`. An instance of a subclass is read by its base class. A
recompute that would read an iterator in another state gets an error.
Rejected: a set in the order that it had. That depends on its history, and none but
CPython's own tables tell it. A set that differs is filled again, in Python's order. To
copy the iterators that can be, but for counts. Which ones these are nobody remembers.
"""

import ast
import itertools
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from operator import length_hint
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._base.tensors import versions_of
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


class Iterated:
    """An iterator that a call reached."""

    __slots__ = "_count", "_instead"

    def __init__(self, value: Any, name: str) -> None:
        self._count = _next_and_step(value) if type(value) is itertools.count else ()
        # These give the same each time, or nothing.
        is_endless = type(value) is itertools.repeat and length_hint(value, -1) < 0
        is_at_end = type(value) is types.GeneratorType and value.gi_frame is None
        self._instead = value if is_endless or is_at_end else _UsedUp(value, name)

    def again(self) -> Any:
        """Return what a recompute finds in its place."""
        return itertools.count(*self._count) if self._count else self._instead


def _next_and_step(value: Any) -> Sequence[Any]:
    """Return what a count gives next, and its step if that is not 1; () if unknown.

    Objects get their numbers from it. Python 3.14 cannot copy it.
    """
    try:
        found = ast.literal_eval(repr(value).removeprefix("count"))
    except (SyntaxError, ValueError):
        return ()
    return found if isinstance(found, tuple) else (found,)


class _UsedUp:
    """In place of an iterator: an error where that is read, and else like it.

    A cursor of a database, or a reader of a file, has other methods, too. Such a one is
    held. Any other may hold a graph.
    """

    __slots__ = ("_kind", "_name", "_value")

    def __init__(self, value: Any, name: str) -> None:
        self._kind, self._name = type(value), name
        self._value = value if _has_methods(self._kind) else None

    @property
    @override
    def __class__(self) -> Any:  # pyrefly: ignore[bad-override]
        return self._kind

    def __iter__(self) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __next__(self) -> Any:
        text = _SPENT.format(kind=self._kind.__name__, name=self._name)
        raise RecomputeError(text)

    def send(self, _: Any) -> Any:
        return next(self)

    def throw(self, *_: Any) -> Any:
        return next(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


@by_class
def _has_methods(kind: type) -> bool:
    """Say whether a class has attributes that iterators and generators do not have."""
    names = {name for cls in kind.__mro__ for name in cls.__dict__}
    return any(not name.startswith("_") for name in names - _OF_GENERATORS)


_OF_GENERATORS = {*dir(types.GeneratorType)}


class Large:
    """A container of many numbers, words and tensors: not copied, only compared."""

    __slots__ = ("_name", "_versions", "keys", "kind", "value", "values")

    def __init__(self, value: Any, name: str) -> None:
        kind = container_kind(type(value))
        assert kind is not None
        self.value, self.kind, self._name = value, kind, name
        self.keys, self.values = tuple(kind.keys([value])), tuple(kind.values([value]))
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int | None]:
        return versions_of([v for v in self.values if isinstance(v, Tensor)])

    def now(self) -> tuple[str, list[Any], list[Any]]:
        """Return its name, its keys and its values."""
        return f"`{self._name}`", *self.kind.held(self.value)

    def has_grown(self) -> bool:
        """Say whether something was added to its end since."""
        keys, values = self.kind.keys([self.value]), [*self.kind.values([self.value])]
        added = len(values) - len(self.values)
        is_same = added >= 0 and all(map(operator.is_, values, self.values))
        is_same = is_same and all(map(operator.is_, keys, self.keys))
        is_set = isinstance(self.value, (set, frozenset))
        if not is_same or (added and is_set) or self._versions_now() != self._versions:
            count = f"{len(values):,}"
            raise RecomputeError(_LARGE.format(name=self._name, count=count))
        return added > 0


_SPENT = (
    "remat: a recompute reads the {kind} `{name}`, which the forward may have read "
    "already. Use a list or a tuple, pass what was read as an argument, or make the "
    "iterator inside the function."
)
_LARGE = (
    "remat: `{name}` changed since the call. It has {count} entries, too many to be "
    "copied in each call, and a recompute would read it as it is now. Pass what is "
    "needed of it as an argument, or change it after the backward; if the function "
    "changes it, outside of the function."
)
