"""Holders: what holds other values and can be changed; how each kind is read.

A `HolderKind` reads many holders at once, at the speed of C: a call reads all that it
reaches before and after its forward. It writes one holder at a time, in place.

Invariant: a container is read and written by the methods of its base class, whatever a
subclass overrides. No property and no setter of the user's runs.
Rejected: one record for each holder. A block of a model reaches hundreds of them.
"""

import contextlib
import functools
import itertools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn
from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._base.interpreter import mapping_of
from remat._reach.objects import members_of


flatten = itertools.chain.from_iterable
# What `nn.Module` sets itself: by hand, a new name would be missed.
TEMPLATE = vars(nn.Module())
REGISTRIES = ("_parameters", "_buffers", "_modules")
# Hooks that run in a forward, or that change its graph.
HOOKS = tuple(
    name
    for name in TEMPLATE
    if name.startswith(("_forward_", "_backward_")) and "hook" in name
)
# In place of what is not there: an empty variable, a name that a namespace lacks.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()


class MovedError(Exception):
    """Something is not where it was found before."""


class Holdings:
    """What holders hold."""

    __slots__ = "keys", "lengths", "values"
    values: list[Any]
    keys: list[Any]
    lengths: list[int]


class HolderKind:
    """How holders of one kind are read and written.

    Attributes:
        keyed: whether a holder has a key for each value.
        frozen: whether a holder can never be changed, only what it holds.
        adds: whether what it reads may be only a part of what a value holds.
        fixed: how many values each holder holds; 0 if that differs.
    """

    keyed = frozen = adds = False
    fixed = 0

    def read(self, holders: Sequence[Any], to: Holdings) -> None:
        """Add what all of these holders hold."""
        values, keys = len(to.values), len(to.keys)
        to.values += self.values(holders)
        if self.fixed:
            return
        lengths = [*self.lengths(holders)]
        count = sum(lengths)
        if self.keyed:
            to.keys += self.keys(holders)
            keys += count
        if len(to.values) != values + count or len(to.keys) != keys:
            raise MovedError
        to.lengths += lengths

    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        """Return what all of these holders hold, one after the other."""
        raise NotImplementedError

    def lengths(self, holders: Sequence[Any]) -> Iterable[int]:
        """Return how many values each of them holds, where that is not fixed."""
        raise NotImplementedError

    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        """Return the keys of all values."""
        del holders
        return ()

    def held(self, holder: Any) -> tuple[list[Any], list[Any]]:
        """Return the keys and the values of one holder."""
        return [*self.keys([holder])], [*self.values([holder])]

    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        """Have a holder hold this and nothing else, in place."""
        raise NotImplementedError

    def put_back(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Have a holder hold what it held just before a run."""
        self.write(holder, keys, values)

    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        """Return a holder like one that is gone; what can be written is written later.

        Args:
            kind: its class.
            values: what it held, where that cannot be written later.
            limit: how long it may get, where that is limited.
        """
        raise NotImplementedError


class Cells(HolderKind):
    """Variables of outer functions."""

    fixed = 1

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        try:
            return [cell.cell_contents for cell in holders]
        except ValueError:  # one is empty
            return [*map(content_of, holders)]

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        (value,) = values
        if value is MISSING:
            del holder.cell_contents
        else:
            holder.cell_contents = value

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return types.CellType()


def content_of(cell: types.CellType) -> Any:
    """Return what a variable holds, or `MISSING`."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


class Scopes(HolderKind):
    """Global variables: pairs of a namespace and the names that code refers to."""

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return [scope.get(name, MISSING) for scope, names in holders for name in names]

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        scope, names = holder
        for name, value in zip(names, values, strict=True):
            if value is MISSING:
                scope.pop(name, None)
            elif scope.get(name, MISSING) is not value:
                scope[name] = value


# The code is first: `before` reads it there.
_DEFAULTS = ("__code__", "__defaults__", "__kwdefaults__")
_DEFAULTS_OF = operator.attrgetter(*_DEFAULTS)


class Functions(HolderKind):
    """What a function has besides its variables: its code and its defaults."""

    fixed = 3

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(_DEFAULTS_OF, holders))

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        for name, value in zip(_DEFAULTS, values, strict=True):
            if getattr(holder, name) is not value:
                setattr(holder, name, value)


class Classes(HolderKind):
    """Classes of the user's, with their attributes and methods."""

    keyed = True

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(cls.__dict__.values() for cls in holders)

    @override
    def lengths(self, holders: Sequence[Any]) -> Iterable[int]:
        return map(len, map(_table_of, holders))

    @override
    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(_table_of, holders))

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        now = {**holder.__dict__}
        for key, value in zip(keys, values, strict=True):
            if now.pop(key, MISSING) is not value:
                type.__setattr__(holder, key, value)
        for key in now:
            type.__delattr__(holder, key)


_table_of = operator.attrgetter("__dict__")


class Slots(HolderKind):
    """Objects with slots."""

    adds = True

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        pairs = ((m, v) for v in holders for m in members_of(type(v)))
        return [_slot_of(value, member) for member, value in pairs]

    @override
    def lengths(self, holders: Sequence[Any]) -> Iterable[int]:
        return [len(members_of(type(value))) for value in holders]

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        for member, value in zip(members_of(type(holder)), values, strict=True):
            if value is not MISSING:
                member.__set__(holder, value)
            elif _slot_of(holder, member) is not MISSING:
                member.__delete__(holder)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return without_contents(kind)


def without_contents(kind: Any) -> Any:
    """Return an instance of a class, without attributes."""
    if issubclass(kind, types.SimpleNamespace):
        return types.SimpleNamespace.__new__(kind)
    try:
        return object.__new__(kind)
    except TypeError:
        raise RecomputeError(GONE.format(name=f"A {kind.__qualname__}")) from None


GONE = (
    "remat: {name} that the function reached at the call is gone, and cannot be made "
    "again for the recompute. Keep it alive until the backward, or pass what is needed "
    "of it as an argument."
)


def names_of(kind: type) -> list[str]:
    """Return the names of a class's slots, in the order in which they are read."""
    return [member.__name__ for member in members_of(kind)]


def _slot_of(value: Any, member: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return MISSING


class Variables(HolderKind):
    """Context variables."""

    fixed = 1

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return [*map(variable_value, holders)]

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        """Set a variable; return what takes that back, as `exchange` does."""
        (value,) = values
        if value is MISSING:
            if variable_value(holder) is MISSING:
                return None
            raise RecomputeError(_VARIABLE.format(name=holder.name))
        return holder.set(value)

    @override
    def put_back(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        if values[0] is not MISSING:  # else `exchange` takes the value away
            holder.set(values[0])


def variable_value(variable: ContextVar[Any]) -> Any:
    """Return the value of a context variable, or its default."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


_VARIABLE = (
    "remat: the context variable `{name}` had no value at the call and has one now. "
    "Python cannot take it away again for the recompute. Set it before the call, or "
    "give it a default."
)


class Scripted(HolderKind):
    """Modules of TorchScript, of which only the parameters are known."""

    frozen = True

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(module.parameters() for module in holders)

    @override
    def lengths(self, holders: Sequence[Any]) -> Iterable[int]:
        return [len([*module.parameters()]) for module in holders]


class Parts(HolderKind):
    """What can be called or read through, and never changes: partials, methods."""

    frozen = True

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(refers_to, holders))

    @override
    def lengths(self, holders: Sequence[Any]) -> Iterable[int]:
        return [len(refers_to(value)) for value in holders]

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return made_of(kind, values)


def refers_to(value: Any) -> tuple[Any, ...]:
    """Return what a value of `PARTS` refers to."""
    kind = type(value)
    for cls, read in _READERS.items():
        if issubclass(kind, cls):
            return read(value)
    raise TypeError(kind)


def _parts_of_builtin(value: Any) -> tuple[Any, ...]:
    return (sys.intern(value.__name__), value.__self__)  # a new string each time


_READERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    functools.partial: operator.attrgetter("func", "args", "keywords", "__dict__"),
    types.MethodType: operator.attrgetter("__func__", "__self__"),
    slice: operator.attrgetter("start", "stop", "step"),
    types.BuiltinFunctionType: _parts_of_builtin,
    types.MethodWrapperType: _parts_of_builtin,
    property: operator.attrgetter("fget", "fset", "fdel"),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    types.MappingProxyType: lambda value: (mapping_of(value),),
    weakref.KeyedRef: lambda ref: (ref(), ref.__callback__, ref.key),
    weakref.WeakMethod: lambda ref: (weakref.ref.__call__(ref), ref._func_ref()),
    weakref.ref: lambda ref: (ref(), ref.__callback__),
    weakref.ProxyType: lambda proxy: (_behind(proxy),),
    weakref.CallableProxyType: lambda proxy: (_behind(proxy),),
}
PARTS = (*_READERS,)
_SET_PARTIAL: Any = vars(functools.partial)["__setstate__"]


def _behind(proxy: Any) -> Any:
    """Return what a weak proxy stands for; None if that is gone."""
    with contextlib.suppress(ReferenceError):
        return proxy.__reduce_ex__.__self__
    return None


def made_of(kind: Any, values: Sequence[Any]) -> Any:
    """Return a value of `PARTS` from what it refers to."""
    if issubclass(kind, functools.partial):
        # Around these very dicts, which may be filled later.
        made = functools.partial.__new__(kind, operator.is_)
        _SET_PARTIAL(made, (*values,))
        return made
    if issubclass(kind, (types.BuiltinFunctionType, types.MethodWrapperType)):
        name, owner = values
        return getattr(owner, name)
    is_proxy = issubclass(kind, weakref.ProxyTypes)
    if is_proxy or (issubclass(kind, weakref.ref) and values[0] is None):
        there = type("Gone", (), {})() if values[0] is None else values[0]
        return (weakref.proxy if is_proxy else weakref.ref)(there)
    if issubclass(kind, types.MappingProxyType) and isinstance(values[0], type):
        return vars(values[0])
    if issubclass(kind, weakref.WeakMethod):
        owner, fn = values
        return kind(types.MethodType(fn, owner))
    return kind(*values)


CELLS, SCOPES, FUNCTIONS = Cells(), Scopes(), Functions()
CLASSES, SLOTS, VARIABLES = Classes(), Slots(), Variables()
PART, SCRIPTED = Parts(), Scripted()


def dict_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object; None if it has none, or pretends not to."""
    if issubclass(type(value), threading.local):
        return value.__dict__  # of this thread
    with contextlib.suppress(Exception):
        return object.__getattribute__(value, "__dict__")
    return None
