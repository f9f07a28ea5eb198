"""Iterators and large containers: not copied like other values.

To copy a container would cost what it holds, and most iterators cannot be copied.

Invariant: a recompute that would read one in another state gets an error.
Rejected: to copy the iterators that can be, but for counts. Which ones these are nobody
remembers. To compare how far one was read: most cannot tell.
"""

import ast
import itertools
import operator
import types
from collections.abc import Sequence
from operator import length_hint
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._base.tensors import versions_of
from remat._reach.container_kinds import container_kind
from remat._reach.objects import by_class


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
