"""Find random streams in what cannot be rebuilt around another.

That is classes and the globals of their methods, Python modules, iterators and objects
of extension modules. Such a stream is not replaced for a recomputation but set back, on
that same object.

Invariant: what is walked is bounded, and the insides of installed packages are not.
Rejected: watching every draw for its generator, which takes a mode around every
forward, at ten times the cost.
"""

import contextlib
import functools
import gc
import random
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from remat._code import global_names, is_library
from remat._objects import attributes
from remat._streams import Stream, stream_of


_LIMIT = 1000  # values walked in a call
_Names: TypeAlias = tuple[dict[str, Any], tuple[str, ...]]
_PLAIN = frozenset(
    {
        *(bool, bytes, complex, float, int, str, range, slice, type(None), type(...)),
        *(Tensor, torch.nn.Parameter, torch.Size, torch.device, torch.dtype),
        *(types.CodeType, property),
    }
)
# Kinds of the standard library that may hold a stream and cannot be rebuilt.
_OPENED = {"builtins", "collections", "contextvars", "functools", "itertools", "queue"}


@functools.lru_cache(maxsize=4096)
def is_stream(kind: type) -> bool:
    """Say whether instances of a class are random streams."""
    if issubclass(kind, (torch.Generator, random.Random)):
        return True
    return str(kind.__module__).startswith("numpy.random")


class Sources:
    """The streams that one call can reach, other than those rebuilt."""

    __slots__ = ("_left", "_seen", "streams")

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        # What was walked is held, so that its identity is not used again.
        self._seen: dict[int, Any] = {}
        self._left = _LIMIT

    def add(self, value: Any) -> None:
        """Add one stream."""
        if id(value) not in self.streams:
            stream = stream_of(value)
            if stream is not None:
                self.streams[id(value)] = stream

    def of_class(self, cls: type) -> None:
        """Walk what a class holds and what the code of its methods refers to."""
        scopes = _scopes_of(cls)
        if not scopes or id(cls) in self._seen:
            return
        self._seen[id(cls)] = cls
        for scope, names in scopes:
            for name in names:
                self.walk(scope.get(name))

    def walk(self, value: Any) -> None:
        """Walk a value and what it holds."""
        kind = type(value)
        if kind in _PLAIN:
            return
        if is_stream(kind):
            self.add(value)
        elif id(value) not in self._seen and self._left:
            self._left -= 1
            self._seen[id(value)] = value
            for part in self._parts(kind, value):
                self.walk(part)

    def _parts(self, kind: type, value: Any) -> Iterable[Any]:
        if kind is types.ModuleType:
            scope = value.__dict__
            streams = () if is_library(scope) else scope.values()
            return [v for v in streams if is_stream(type(v))]
        if isinstance(value, type):
            self.of_class(value)
            return ()
        if kind is types.FunctionType:
            return _parts_of_function(value)
        if kind is types.MethodType:
            return value.__func__, value.__self__
        if kind is dict:
            return value.values()
        if kind in (list, tuple, set, frozenset):
            return value
        return self._parts_of_object(kind, value)

    def _parts_of_object(self, kind: type, value: Any) -> Iterable[Any]:
        if kind is weakref.ref:
            return (value(),)
        if hasattr(kind, "__self__"):  # a method of an extension class
            return (value.__self__,)
        root = str(kind.__module__).partition(".")[0]
        if root in sys.stdlib_module_names:
            if root not in _OPENED:
                return ()
        else:
            self.of_class(kind)
            held = attributes(value)
            if held:
                return held.values()
        return gc.get_referents(value)


def _parts_of_function(fn: types.FunctionType) -> Iterable[Any]:
    cells = []
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            cells.append(cell.cell_contents)
    scope = fn.__globals__
    names = () if is_library(scope) else global_names(fn.__code__).loaded
    return [*cells, fn.__defaults__, fn.__kwdefaults__, *map(scope.get, names)]


@functools.lru_cache(maxsize=4096)
def _scopes_of(cls: type) -> list[_Names]:
    """Return the names to look up, in a class and in the globals of its methods."""
    return [*_find_scopes(cls)]


def _find_scopes(cls: type) -> Iterable[_Names]:
    for base in cls.__mro__:
        module: Any = sys.modules.get(base.__module__)
        if base is object or module is None or is_library(module.__dict__):
            continue
        held: Any = base.__dict__
        values = [*held.items()]
        functions = [(n, _function_of(v)) for n, v in values]
        yield held, tuple(n for n, f in functions if f is None and n[:2] != "__")
        for _, fn in functions:
            if fn is not None:
                names = global_names(fn.__code__).loaded
                # The builtins among them, and what belongs to packages, stay so.
                yield fn.__globals__, names


def _function_of(value: Any) -> types.FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # of a static or class method
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, types.FunctionType) else None
