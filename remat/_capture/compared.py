"""Iterators and large containers: compared, and not copied like other values.

To copy them in each call would cost what they hold.

Invariant: a recompute that would read one in another state gets an error.
Rejected: to compare how far an iterator was read. Most cannot tell.
"""

import ast
import copy
import itertools
import operator
import types
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._base.interpreter import repeated_by
from remat._base.tensors import versions_of
from remat._base.types import INERT
from remat._capture.container_kinds import container_kind
from remat._capture.holders import MISSING
from remat._capture.objects import COPIED_ITERATORS, by_class
from remat._capture.stream_search import StreamSearch


class Iterated:
    """An iterator, as far as it was read at a call."""

    __slots__ = ("_copy", "_name", "_spent", "_stays")

    def __init__(self, value: Any, name: str) -> None:
        self._name = f"the {type(value).__name__} `{name}`"
        # One that is read to its end gives nothing again.
        is_spent = type(value) is types.GeneratorType and value.gi_frame is None
        self._stays = is_spent or _gives_streams(value)
        self._copy = value if self._stays else _copy_of(value)
        self._spent = _UsedUp(value, self._name)

    def again(self) -> Any:
        """Return an iterator that was read as far, or one that must not be read."""
        if self._stays:
            return self._copy
        if self._copy is MISSING:
            return self._spent
        return _copy_of(self._copy)


def _gives_streams(value: Any) -> bool:
    """Say whether an iterator gives streams: the same one again, most often.

    That is put back, so the iterator may stay as it is.
    """
    search = StreamSearch()
    search.walk(value)
    return bool(search.streams) and type(value) is not itertools.cycle


def _copy_of(value: Any) -> Any:
    """Return an iterator that gives what this one gives; MISSING if that cannot be."""
    kind = type(value)
    if kind in COPIED_ITERATORS:
        return copy.copy(value)
    if kind is itertools.count:
        # Python 3.14 cannot copy it.
        try:
            start = ast.literal_eval(repr(value).removeprefix("count"))
        except (SyntaxError, ValueError):
            return MISSING
        return itertools.count(*start if isinstance(start, tuple) else (start,))
    if kind is itertools.repeat:
        left = operator.length_hint(value, -1)
        if left < 0:
            return value
        item = repeated_by(value)
        if type(item) in INERT:
            return itertools.repeat(item, left)
    return MISSING


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
        raise RecomputeError(_SPENT.format(name=self._name))

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
    "remat: a recompute reads {name}, which the forward may have read already. Pass "
    "what was read as an argument, or make the iterator inside the function."
)
_LARGE = (
    "remat: `{name}` changed since the call. It has {count} entries, too many to be "
    "copied in each call, and a recompute would read it as it is now. Pass what is "
    "needed of it as an argument, or change it after the backward; if the function "
    "changes it, outside of the function."
)
