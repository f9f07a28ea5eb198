"""Finds random streams, also in what is not made again around other tensors.

They may be held by classes, by globals of methods, by Python modules, iterators and
objects of extension modules. A recompute sets such a stream back, in that object.

Invariant: what is walked in a call is bounded, and the insides of installed packages
are not walked.
Rejected: watching every draw for its generator, at ten times the cost.
"""

import functools
import gc
import random
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import islice
from typing import Any

import torch

from remat._ambient.streams import Stream, stream_of
from remat._base.code import (
    STATES,
    KnownCode,
    is_library,
    is_library_class,
    known_code,
)
from remat._base.types import INERT, TENSORS
from remat._reach.holders import (
    MISSING,
    PARTS,
    HolderKind,
    container_kind,
    contents_of,
    refers_to,
    variable_value,
)
from remat._reach.objects import (
    attributes,
    by_class,
    defines,
    is_rematerialized,
)
from remat._torch import device_generators, is_compiled


_LIMIT = 300  # values walked in a call
_CACHE = type(functools.lru_cache(len))
_NOT_WALKED = TENSORS | INERT
# Kinds of the standard library that may hold a stream and cannot be rebuilt.
_OPENED = {
    *("argparse", "builtins", "collections", "contextlib", "functools", "itertools"),
    *("queue", "types", "weakref"),
}


@by_class
def is_stream(kind: type) -> bool:
    """Say whether instances of a class are random streams."""
    if issubclass(kind, (torch.Generator, random.Random)):
        return True
    return str(kind.__module__).startswith("numpy.random")


@by_class
def is_scripted(kind: type) -> bool:
    """Say whether instances of a class are TorchScript's functions or modules."""
    return issubclass(kind, (torch.jit.ScriptFunction, torch.jit.ScriptModule))


@by_class
def user_bases(cls: type) -> tuple[int, ...]:
    """Return which classes, by position among the bases, are not of a package."""
    return tuple(i for i, base in enumerate(cls.__mro__) if not is_library_class(base))


def has_user_code(cls: type) -> bool:
    """Say whether some of a class's code is the user's."""
    return bool(user_bases(cls))


@by_class
def methods_with_state(cls: type) -> tuple[tuple[int, str], ...]:
    """Return the methods of packages' classes that hold a list, say, in a variable.

    By the position of the class among the bases, and by name.
    """
    users = user_bases(cls)
    return tuple(
        (i, name)
        for i, base in enumerate(cls.__mro__)
        if i not in users and base not in _PLAIN_BASES
        for name, method in vars(base).items()
        if type(method) is types.FunctionType and _has_state(method.__closure__)
    )


def _has_state(cells: tuple[types.CellType, ...] | None) -> bool:
    return not _STATE.isdisjoint(map(type, contents_of(cells or ())))


_STATE = {list, dict}  # not a set: `dataclass` has one around `__repr__`
_PLAIN_BASES = {object, torch.nn.Module}


class StreamSearch:
    """The streams that one call can reach."""

    __slots__ = (
        *("_is_walking", "_left", "_seen", "_todo"),
        *("asks", "compiled", "uses_stream_states", "streams", "writes"),
    )

    def __init__(self) -> None:
        self.compiled = False
        self.streams: dict[int, Stream] = {}
        self.uses_stream_states = False
        self.writes = False  # whether code may change a tensor in place
        # The names by which code tells an object from another one like it.
        self.asks: frozenset[str] = frozenset()
        # What was walked is held, so that its identity is not used again.
        self._seen: dict[int, Any] = {}
        self._left = _LIMIT
        self._todo: list[Any] = []
        self._is_walking = False

    def add(self, value: Any) -> None:
        """Add one stream."""
        known = id(value) in self.streams
        # `Ambient` notes the global ones in any case.
        ambient = torch.default_generator, *device_generators()
        if not known and all(value is not g for g in ambient):
            stream = stream_of(value)
            if stream is not None:
                self.streams[id(value)] = stream

    def look_deeply(self, fn: types.FunctionType) -> None:
        """Look at a function, and walk its variables, defaults and globals."""
        known = known_code(fn)
        self.look_at_function(fn, known)
        if known.open or is_closed(fn) or has_defaults(fn):
            self.walk_all(_parts_of_function(fn, known.open))

    def look_at_function(self, fn: types.FunctionType, known: KnownCode) -> None:
        """Look at the code of a function, and walk its attributes."""
        if known.uses_stream_states or fn.__name__ in STATES:
            self.uses_stream_states = True
        self.asks |= known.asks
        self.writes = self.writes or known.names.writes
        if fn.__dict__:
            self.compiled = self.compiled or is_compiled(fn.__dict__)
            self.walk_all(fn.__dict__.values())

    def look_at_class(self, cls: type) -> None:
        """Walk what a class holds and what the code of its methods refers to."""
        if id(cls) in self._seen:
            return
        self._seen[id(cls)] = cls
        for i in user_bases(cls):
            for value in cls.__mro__[i].__dict__.values():
                kind = type(value)
                if kind is types.FunctionType:
                    if id(value) not in self._seen:
                        self._seen[id(value)] = value
                        self.look_deeply(value)
                elif kind not in _NOT_WALKED:
                    self.walk(value)

    def walk(self, value: Any) -> None:
        """Walk a value and what it holds."""
        self.walk_all((value,))

    def walk_all(self, values: Iterable[Any]) -> None:
        """Walk values and what they hold, by a list: a chain of them may be long."""
        self._todo += values
        if self._is_walking:
            return
        self._is_walking = True
        try:
            while self._todo:
                self._walk_one(self._todo.pop())
        finally:
            self._is_walking = False

    def _walk_one(self, value: Any) -> None:
        kind = type(value)
        if kind in _NOT_WALKED or value is MISSING:
            return
        if is_stream(kind):
            self.add(value)
        elif id(value) not in self._seen and self._left:
            self._left -= 1
            if issubclass(kind, type):
                self.look_at_class(value)  # which leaves alone what is marked as seen
                return
            self._seen[id(value)] = value
            self._todo += islice(self._parts(kind, value), _LIMIT)

    def _parts(self, kind: type, value: Any) -> Iterable[Any]:
        if kind is types.ModuleType:
            scope = value.__dict__
            streams = () if is_library(scope) else scope.values()
            return [v for v in streams if is_stream(type(v))]
        if kind is types.FunctionType:
            self.look_deeply(value)
            return ()
        if issubclass(kind, PARTS):
            return (*refers_to(value), *attributes(value).values())
        how = container_kind(kind)
        if how is not None:
            return _parts_of_container(value, how)
        if is_rematerialized(kind):
            return (value.__wrapped__,)
        return self._parts_of_object(kind, value)

    def _parts_of_object(self, kind: type, value: Any) -> Iterable[Any]:
        if kind is ContextVar:
            return (variable_value(value),)
        if defines(kind, "__self__"):  # a method of an extension class
            return (value.__self__,)
        if kind is _CACHE:
            self.asks |= {"hash"}
        root = str(kind.__module__).partition(".")[0]
        if root in sys.stdlib_module_names:
            if root not in _OPENED:
                return ()
        else:
            self.look_at_class(kind)
            held = attributes(value)
            self.compiled = self.compiled or is_compiled(held) or is_scripted(kind)
            if held:
                return held.values()
        return gc.get_referents(value)


def is_closed(fn: types.FunctionType) -> bool:
    """Say whether a function has variables of an outer one."""
    if fn.__closure__ is None:
        return False
    # `__class__` stands in every method that calls super().
    return fn.__code__.co_freevars != ("__class__",)


def has_defaults(fn: types.FunctionType) -> bool:
    """Say whether a function has defaults that can change, or hold a tensor."""
    defaults = fn.__defaults__
    if defaults is not None and not INERT.issuperset(map(type, defaults)):
        return True
    return fn.__kwdefaults__ is not None


def _parts_of_function(fn: types.FunctionType, names: Iterable[str]) -> list[Any]:
    cells, scope = contents_of(fn.__closure__ or ()), fn.__globals__
    return [*cells, fn.__defaults__, fn.__kwdefaults__, *map(scope.get, names)]


def _parts_of_container(value: Any, how: HolderKind) -> Iterable[Any]:
    items = [*how.items(value)]
    held = [*attributes(value).values()]
    if isinstance(value, defaultdict):  # of another, a user's `__getattr__` would run
        held.append(value.default_factory)
    # A long list of numbers or words is looked at in one go.
    return held if _NOT_WALKED.issuperset(map(type, items)) else [*items, *held]
