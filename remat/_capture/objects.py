"""Reads and sets what objects hold, and makes instances like them.

Called by nodes, by runs that set objects back, and by the search for random streams.

Invariant: no property, setter or constructor of the user's runs, nor a metaclass.
Rejected: `copy.copy` for all objects, which runs `__reduce__` and `__setstate__`.
"""

import contextlib
import copy
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from remat._base.code import class_without_us
from remat._base.errors import RecomputeError


T = TypeVar("T")


def by_class(fn: Callable[[type], T]) -> Callable[[type], T]:
    """Remember what `fn` says of a class, for as long as the class lives."""
    known: dict[int, T] = {}
    classes: dict[int, weakref.ref[type]] = {}

    def remembered(kind: type) -> T:
        key = id(kind)
        try:
            return known[key]
        except KeyError:
            pass

        def forget(_: object) -> None:
            known.pop(key, None)
            classes.pop(key, None)

        classes[key] = weakref.ref(kind, forget)
        value = known[key] = fn(kind)
        return value

    return remembered


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds, in its `__dict__` and its slots."""
    held: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # it has none, or pretends not to
        held = object.__getattribute__(value, "__dict__").copy()
    return held | slots_in(value) if slots_of(type(value)) else held


def slots_in(value: Any) -> dict[str, Any]:
    """Return what an object holds in its slots."""
    held: dict[str, Any] = {}
    for member in members_of(type(value)):
        with contextlib.suppress(AttributeError):  # it is empty
            held[member.__name__] = member.__get__(value)
    return held


def slots_of(kind: type) -> frozenset[str]:
    """Return the names of a class's slots, as attributes."""
    return _slots_of(kind)[0]


def members_of(kind: type) -> list[Any]:
    """Return what reads and writes the slots of instances, past their properties.

    In the order of their names, then from the bases up.
    """
    return [kind.__mro__[i].__dict__[name] for name, i in _slots_of(kind)[1]]


@by_class
def _slots_of(kind: type) -> tuple[frozenset[str], list[tuple[str, int]]]:
    """Return the names of slots, and by which class of the bases each is."""
    found = [
        (name, i)
        for i, cls in enumerate(kind.__mro__)
        if "__slots__" in cls.__dict__
        for name, value in cls.__dict__.items()
        if type(value) is types.MemberDescriptorType
    ]
    # The last of a name is that of the instance's own class.
    found.sort(key=lambda place: (place[0], -place[1]))
    return frozenset(name for name, _ in found), found


def defines(kind: type, name: str) -> bool:
    """Say whether a class has an attribute, without asking its metaclass."""
    return any(name in cls.__dict__ for cls in kind.__mro__)


def set_attributes(value: Any, entries: Mapping[str, Any]) -> None:
    """Give an object what `attributes` returned, past its properties and setters."""
    members = {member.__name__: member for member in members_of(type(value))}
    if not members:
        value.__dict__.update(entries)
        return
    for name, entry in entries.items():
        if name in members:
            members[name].__set__(value, entry)
        else:
            value.__dict__[name] = entry


def exchange_attributes(value: Any, entries: dict[str, Any]) -> dict[str, Any]:
    """Have an object hold `entries` and nothing else, for a while; return what it held.

    Where its dict can be exchanged, other threads see it hold either of the two.
    """
    if not slots_of(type(value)):
        with contextlib.suppress(Exception):  # it has none, or pretends not to
            return exchange_dict(value, entries)
    # Some have a dict that cannot be exchanged, only its contents.
    return assign_attributes(value, entries)


def exchange_dict(value: Any, entries: dict[str, Any]) -> dict[str, Any]:
    """Have an object use this very dict for its attributes; return the one it had."""
    before = object.__getattribute__(value, "__dict__")
    object.__setattr__(value, "__dict__", entries)
    return before


def assign_attributes(value: Any, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Have an object hold `entries` and nothing else, for good; return what it held.

    It keeps its dict, which a view of a module has, too.
    """
    members = {member.__name__: member for member in members_of(type(value))}
    before = attributes(value)
    if entries:
        set_attributes(value, entries)
    for name in before.keys() - entries.keys():
        if name in members:
            members[name].__delete__(value)
        else:
            del value.__dict__[name]
    return before


def replica_of(kind: Any, value: Any) -> Any:
    """Return an instance of a class without attributes, of a value that is there."""
    try:
        return object.__new__(kind)
    except TypeError:  # a subclass of str, say, which holds more than attributes
        return copy.copy(value)


def differing(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `now` that are others than `before`."""
    same = len(now) == len(before)
    # Most often nothing changed, which this tells without a loop in Python.
    if same and all(map(operator.is_, now.values(), before.values())):
        return {} if [*now] == [*before] else now
    return {k: v for k, v in now.items() if k not in before or before[k] is not v}


def check_class(then: type | None, now: type) -> None:
    """Refuse an object whose class was changed, other than by remat."""
    if then is None or now is then:
        return
    if class_without_us(now) is not class_without_us(then):
        names = {"then": then.__qualname__, "now": now.__qualname__}
        raise RecomputeError(_CLASS.format(**names))


_CLASS = (
    "remat: an object that was a {then} at the call is a {now} now: a recompute "
    "would run other code. Change its class after the backward."
)
