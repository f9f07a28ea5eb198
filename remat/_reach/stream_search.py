"""Finds random streams, also in what is not made again, and what code does.

Streams may be held by classes, by globals of methods, by Python modules, iterators and
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
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch

from remat._ambient.streams import Stream, stream_of
from remat._base.code import (
    STATES,
    KnownCode,
    is_library,
    is_library_class,
    is_named,
    known_code,
)
from remat._base.types import ATOMS, INERT, TENSORS
from remat._reach.holders import (
    MISSING,
    PARTS,
    container_kind,
    contents_of,
    kinds_of,
    refers_to,
)
from remat._reach.objects import by_class, defines, dict_of, is_rematerialized
from remat._torch.process import device_generators
from remat._torch.tracing import is_compiled


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
        if type(method) is types.FunctionType
        and not _STATE.isdisjoint(map(type, contents_of(method.__closure__ or ())))
    )


_STATE = {list, dict}  # not a set: `dataclass` has one around `__repr__`
_PLAIN_BASES = {object, torch.nn.Module}


class CodeFacts:
    """What the code that is reached does, and the random streams that are.

    Attributes:
        asks: the names by which code tells an object from another one like it.
        compiled: whether there is code that torch.compile or TorchScript made.
        has_iterators: whether there are iterators: they don't tell how far they were
            read.
        is_lazy: whether a module has no parameters yet.
        streams: the random streams, but for the global ones.
        uses_stream_states: whether code reads or sets the state of a stream itself.
        writes: whether code may change a tensor in place.
    """

    # Nothing is set for most calls, and nothing costs them anything.
    asks: frozenset[str] = frozenset()
    compiled = has_iterators = is_lazy = uses_stream_states = writes = False
    streams: Sequence[Stream] = ()

    @property
    def are_any(self) -> bool:
        """Whether there is something to note."""
        return any(vars(self).values())

    def add(self, other: "CodeFacts") -> None:
        """Add what other code does."""
        self.asks |= other.asks
        self.compiled |= other.compiled
        self.has_iterators |= other.has_iterators
        self.is_lazy |= other.is_lazy
        self.uses_stream_states |= other.uses_stream_states
        self.writes |= other.writes
        known = {stream.of for stream in self.streams}
        self.streams = (*self.streams, *(s for s in other.streams if s.of not in known))

    def add_stream(self, value: Any) -> None:
        """Add a random stream."""
        # `Ambient` notes the global ones in any case.
        ambient = torch.default_generator, *device_generators()
        if all(value is not g for g in ambient):
            stream = stream_of(value)
            if stream is not None and all(s.of != stream.of for s in self.streams):
                self.streams = (*self.streams, stream)

    def add_function(self, fn: types.FunctionType, known: KnownCode) -> None:
        """Add what the code of a function does."""
        if known.uses_stream_states or fn.__name__ in STATES:
            self.uses_stream_states = True
        self.asks |= known.asks
        self.writes = self.writes or known.names.writes
        self.compiled = self.compiled or is_compiled(fn.__dict__)


NO_FACTS = CodeFacts()  # of most roots


def held_by_function(fn: types.FunctionType) -> list[Any]:
    """Return what a function holds besides its globals."""
    held = [*fn.__dict__.values(), fn.__defaults__, fn.__kwdefaults__]
    return held + contents_of(fn.__closure__ or ())


class StreamSearch:
    """A search of what is used as it is, for streams and for what code does."""

    __slots__ = "_facts", "_left", "_seen"

    def __init__(self, facts: CodeFacts) -> None:
        self._facts = facts
        # What was walked is held, so that its identity is not used again.
        self._seen: dict[int, Any] = {}
        self._left = _LIMIT

    def walk(self, value: Any) -> None:
        """Walk a value and what it holds, by a list: a chain may be long."""
        todo = [value]
        while todo:
            value = todo.pop()
            kind = type(value)
            if kind in _NOT_WALKED or value is MISSING:
                continue
            if is_stream(kind):
                self._facts.add_stream(value)
            elif id(value) not in self._seen and self._left:
                self._seen[id(value)] = value
                # Of functions and classes there are many around each value.
                self._left -= kind is not types.FunctionType
                parts = self._parts(kind, value)
                # A long list of numbers or words is looked at in one go.
                if not _NOT_WALKED.issuperset(map(type, parts)):
                    todo += parts[:_LIMIT]

    def _parts(self, kind: type, value: Any) -> Sequence[Any]:
        if kind is types.ModuleType:
            held = () if is_library(value.__dict__) else value.__dict__.values()
            return [v for v in held if is_stream(type(v))]
        if kind is types.FunctionType:
            known, scope = known_code(value), value.__globals__
            self._facts.add_function(value, known)
            return [*held_by_function(value), *map(scope.get, known.open)]
        if issubclass(kind, type):
            bases = map(value.__mro__.__getitem__, user_bases(value))
            return [part for base in bases for part in vars(base).values()]
        if issubclass(kind, PARTS) or kind is ContextVar:
            return [v for how in kinds_of(value, kind) for v in how.items(value)]
        if is_rematerialized(kind):
            return (value.__wrapped__,)
        if defines(kind, "__self__"):  # a method of an extension class
            return (value.__self__,)
        if kind is _CACHE:
            self._facts.asks |= {"hash"}
        self._facts.compiled |= is_compiled(dict_of(value) or {}) or is_scripted(kind)
        root = str(kind.__module__).partition(".")[0]
        is_closed = root in sys.stdlib_module_names and root not in _OPENED
        return () if is_closed else (kind, *gc.get_referents(value))


def is_made_and_held(cls: type) -> bool:
    """Say whether a call made a class, which then a call that reaches it may hold.

    Not if its attributes and methods lead to what may hold a tensor, as a list does:
    that may be of the graph which holds the call.
    """
    return not is_named(cls) and not _leads_to_containers(cls)


@by_class
def _leads_to_containers(cls: type) -> bool:
    todo: list[Any] = [cls]
    seen: dict[int, Any] = {}
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, type):
            each = vars(value).items() if not is_named(value) else ()
            # The others say how the class was made.
            todo += [v for k, v in each if type(v) in _METHODS or not k.startswith("_")]
        elif kind is types.FunctionType:
            if not is_library(value.__globals__):
                held = value.__defaults__, *(value.__kwdefaults__ or {}).values()
                todo += [*contents_of(value.__closure__ or ()), *held]
        elif kind is tuple or issubclass(kind, PARTS):
            todo += value if kind is tuple else refers_to(value)
        elif container_kind(kind) is not None or user_bases(kind) or kind in TENSORS:
            return True
    return False


_METHODS = {types.FunctionType, property, staticmethod, classmethod}
