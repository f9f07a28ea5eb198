"""Holders: what holds other values and can be changed; how each kind is read.

A `HolderKind` reads many holders at once, at the speed of C: a call reads all that it
reaches before and after its forward. It writes one holder at a time, in place.

Invariant: a container is read and written by the methods of its base class, whatever a
subclass overrides. No property and no setter of the user's runs.
Rejected: one record for each holder. A block of a model reaches hundreds of them. A set
in the order that it had, which none but CPython's own tables tell.
"""

import contextlib
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter, is_
from typing import Any, TypeAlias

from remat._base.errors import RecomputeError
from remat._base.interpreter import mapping_of
from remat._reach.objects import by_class, dict_of, members_of, slots_of


flatten = itertools.chain.from_iterable
# In place of what is not there: an empty variable, a name that a namespace lacks.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing"})()


class MovedError(Exception):
    """Something is not where it was found before."""


Write: TypeAlias = Callable[[Any, Sequence[Any], Sequence[Any]], Any]


def _no_write(_: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Leave what can never be changed."""


@dataclass(eq=False)
class HolderKind:
    """How holders of one kind are read and written.

    Attributes:
        items: returns what one holder holds.
        keys_of: returns its keys; None where there are none.
        write: has a holder hold keys and values and nothing else, in place.
        put_back: has it hold what it held just before a run.
        new: returns a holder like one that is gone, from its class, from what it held
            where that cannot be written later, and from how long it may get.
        frozen: whether a holder can never be changed, only what it holds.
        adds: whether what it reads may be only a part of what a value holds.
        fixed: how many values each holder holds; 0 if that differs.
    """

    items: Callable[[Any], Iterable[Any]]
    write: Write = _no_write
    new: Callable[[Any, Any, Any], Any] = _no_write
    _: KW_ONLY
    length: Callable[[Any], int] = len
    keys_of: Callable[[Any], Iterable[Any]] | None = None
    put_back: Write = _no_write
    adds: bool = False
    fixed: int = 0

    def __post_init__(self) -> None:
        if self.put_back is _no_write:
            self.put_back = self.write
        self.frozen, self.keyed = self.write is _no_write, self.keys_of is not None

    def read(self, holders: Sequence[Any], to: Any) -> None:
        """Add what all of these holders hold to `LiveValues`."""
        items, keys_of, values, keys = self.items, self.keys_of, to.values, to.keys
        if self.fixed:
            values += flatten(map(items, holders))
            return
        lengths = [*map(self.length, holders)]
        ends = len(values) + len(keys) + sum(lengths) * (1 if keys_of is None else 2)
        to.lengths += lengths
        if keys_of is None:
            values += flatten(map(items, holders))
        else:
            for holder in itertools.compress(holders, lengths):  # most are empty
                values += items(holder)
                keys += keys_of(holder)
        if len(values) + len(keys) != ends:  # threads change it meanwhile
            raise MovedError

    def held(self, holder: Any) -> tuple[list[Any], list[Any]]:
        """Return the keys and the values of one holder."""
        keys = [] if self.keys_of is None else [*self.keys_of(holder)]
        return keys, [*self.items(holder)]


# --- Variables ---


def contents_of(cells: Iterable[types.CellType]) -> list[Any]:
    """Return what variables of outer functions hold, or `MISSING`."""
    try:
        return [cell.cell_contents for cell in cells]
    except ValueError:  # one is empty
        return [part for cell in cells for part in _content_of(cell)]


def _content_of(cell: types.CellType) -> Sequence[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return (MISSING,)


def _write_cell(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    (value,) = values
    if value is MISSING:
        del holder.cell_contents
    else:
        holder.cell_contents = value


CELLS = HolderKind(_content_of, _write_cell, lambda *_: types.CellType(), fixed=1)


def _globals_of(pair: Any) -> list[Any]:
    scope, names = pair
    return [scope.get(name, MISSING) for name in names]


def _write_globals(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    scope, names = holder
    for name, value in zip(names, values, strict=True):
        if value is MISSING:
            scope.pop(name, None)
        elif scope.get(name, MISSING) is not value:
            scope[name] = value


# Pairs of a namespace and the names that code refers to.
SCOPES = HolderKind(_globals_of, _write_globals, length=lambda pair: len(pair[1]))


def variable_value(variable: ContextVar[Any]) -> Any:
    """Return the value of a context variable, or its default."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _set_variable(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """Set a variable; return what takes that back, as `exchange` does."""
    (value,) = values
    if value is not MISSING:
        return holder.set(value)
    if variable_value(holder) is not MISSING:
        raise RecomputeError(_VARIABLE.format(name=holder.name))
    return None


VARIABLES = HolderKind(
    lambda variable: (variable_value(variable),),
    _set_variable,
    # Where there was none, `exchange` takes the value away.
    put_back=lambda holder, _, held: held[0] is MISSING or holder.set(held[0]),
    fixed=1,
)


# --- Functions, classes, slots ---


# The code is first: `before` reads it there.
_DEFAULTS = ("__code__", "__defaults__", "__kwdefaults__")


def _write_function(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    for name, value in zip(_DEFAULTS, values, strict=True):
        if getattr(holder, name) is not value:
            setattr(holder, name, value)


FUNCTIONS = HolderKind(attrgetter(*_DEFAULTS), _write_function, fixed=3)


def _write_class(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    now = {**holder.__dict__}
    for key, value in zip(keys, values, strict=True):
        if now.pop(key, MISSING) is not value:
            type.__setattr__(holder, key, value)
    for key in now:
        type.__delattr__(holder, key)


CLASSES = HolderKind(
    lambda cls: cls.__dict__.values(),
    _write_class,
    length=lambda cls: len(cls.__dict__),
    keys_of=attrgetter("__dict__"),
)


def without_contents(kind: Any, *_: Any) -> Any:
    """Return an instance of a class, without attributes."""
    if issubclass(kind, types.SimpleNamespace):
        return types.SimpleNamespace.__new__(kind)
    try:
        return object.__new__(kind)
    except TypeError:
        raise RecomputeError(GONE.format(name=f"A {kind.__qualname__}")) from None


def names_of(kind: type) -> list[str]:
    """Return the names of a class's slots, in the order in which they are read."""
    return [member.__name__ for member in members_of(kind)]


def _slot_of(value: Any, member: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return MISSING


def _write_slots(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    for member, value in zip(members_of(type(holder)), values, strict=True):
        if value is not MISSING:
            member.__set__(holder, value)
        elif _slot_of(holder, member) is not MISSING:
            member.__delete__(holder)


SLOTS = HolderKind(
    lambda value: [_slot_of(value, member) for member in members_of(type(value))],
    _write_slots,
    without_contents,
    length=lambda value: len(members_of(type(value))),
    adds=True,
)
# Modules of TorchScript, of which only the parameters are known.
SCRIPTED = HolderKind(
    lambda module: module.parameters(),
    length=lambda module: len([*module.parameters()]),
)


# --- What can be called or read through, and never changes: partials, methods ---


def refers_to(value: Any) -> tuple[Any, ...]:
    """Return what a value of `PARTS` refers to."""
    kind = type(value)
    for cls, read in _READERS.items():
        if issubclass(kind, cls):
            return read(value)
    raise TypeError(kind)


def _parts_of_builtin(value: Any) -> tuple[Any, ...]:
    return (sys.intern(value.__name__), value.__self__)  # a new string each time


def _behind(proxy: Any) -> tuple[Any, ...]:
    """Return what a weak proxy stands for; None if that is gone."""
    with contextlib.suppress(ReferenceError):
        return (proxy.__reduce_ex__.__self__,)
    return (None,)


_READERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    functools.partial: attrgetter("func", "args", "keywords", "__dict__"),
    types.MethodType: attrgetter("__func__", "__self__"),
    slice: attrgetter("start", "stop", "step"),
    types.BuiltinFunctionType: _parts_of_builtin,
    types.MethodWrapperType: _parts_of_builtin,
    property: attrgetter("fget", "fset", "fdel"),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    types.MappingProxyType: lambda value: (mapping_of(value),),
    weakref.KeyedRef: lambda ref: (ref(), ref.__callback__, ref.key),
    weakref.WeakMethod: lambda ref: (weakref.ref.__call__(ref), ref._func_ref()),
    weakref.ref: lambda ref: (ref(), ref.__callback__),
    weakref.ProxyType: _behind,
    weakref.CallableProxyType: _behind,
}
PARTS = (*_READERS,)
_SET_PARTIAL: Any = vars(functools.partial)["__setstate__"]


def _made_of(kind: Any, values: Sequence[Any], _: int | None = None) -> Any:
    """Return a value of `PARTS` from what it refers to."""
    if issubclass(kind, functools.partial):
        # Around these very dicts, which may be filled later.
        made = functools.partial.__new__(kind, is_)
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


PART = HolderKind(refers_to, new=_made_of, length=lambda value: len(refers_to(value)))


# --- Containers, and the dicts of objects ---


def _write_dict(
    base: Any, holder: Any, keys: Sequence[Any], values: Sequence[Any]
) -> None:
    now = [*base.__iter__(holder)]
    if len(now) > len(keys) or not all(map(is_, now, keys)):
        wanted = {*map(id, keys)}
        if all(map(is_, [key for key in now if id(key) in wanted], keys)):
            for key in now:
                if id(key) not in wanted:
                    base.__delitem__(holder, key)
        else:  # it is emptied only if the order differs
            base.clear(holder)
    if base is dict:
        dict.update(holder, zip(keys, values, strict=True))
        return
    for key, value in zip(keys, values, strict=True):
        base.__setitem__(holder, key, value)


def _dicts(base: Any) -> HolderKind:
    # An OrderedDict has an order of its own.
    return HolderKind(
        base.values,
        functools.partial(_write_dict, base),
        lambda kind, *_: base.__new__(kind),
        length=dict.__len__,
        keys_of=base.keys,
    )


def _write_set(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    # The rest stays, and mostly its order.
    set.difference_update(holder, set.difference(holder, values))
    set.update(holder, values)


def _write_deque(holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    deque.clear(holder)
    deque.extend(holder, values)


def _items(base: Any, write: Write = _no_write) -> HolderKind:
    def new(kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        if hasattr(kind, "n_sequence_fields"):
            return kind(values)
        if write is _no_write:
            return base.__new__(kind, values)
        made = base.__new__(kind)
        if limit is not None:
            deque.__init__(made, (), limit)
        return made

    return HolderKind(base.__iter__, write, new, length=base.__len__)


# By the base class, the more special one first.
CONTAINERS: dict[type, HolderKind] = {
    OrderedDict: _dicts(OrderedDict),
    dict: _dicts(dict),
    list: _items(list, lambda v, _, new: list.__setitem__(v, slice(None), new)),
    tuple: _items(tuple),
    set: _items(set, _write_set),
    frozenset: _items(frozenset),
    deque: _items(deque, _write_deque),
}


@by_class
def container_kind(kind: type) -> HolderKind | None:
    """Return how instances of a class are read; None if it is no container's."""
    return next(
        (how for base, how in CONTAINERS.items() if issubclass(kind, base)), None
    )


# The dicts of objects and functions, which threads read meanwhile.
ATTRIBUTES = _dicts(dict)
# The same of values that have no weak references, as instances of a tuple's subclass.
OWNED = HolderKind(
    lambda holder: dict.values(dict_of(holder) or {}),
    lambda holder, keys, values: _write_dict(dict, dict_of(holder), keys, values),
    without_contents,
    length=lambda holder: len(dict_of(holder) or ()),
    keys_of=lambda holder: dict_of(holder) or (),
    adds=True,
)
# What makes the missing values of a defaultdict.
FACTORIES = HolderKind(
    lambda holder: (holder.default_factory,),
    lambda holder, _, values: setattr(holder, "default_factory", values[0]),
    adds=True,
    fixed=1,
)

# --- What a value holds ---


# By the exact class: there is nothing besides.
_ALONE = {kind: (how,) for kind, how in CONTAINERS.items()}
_ALONE |= {types.CellType: (CELLS,), ContextVar: (VARIABLES,)}


def kinds_of(value: Any, kind: type) -> Sequence[HolderKind]:
    """Return how all that a value holds is read: what it is made of, then the rest."""
    if (alone := _ALONE.get(kind)) is not None:
        return alone
    how = container_kind(kind) or (PART if issubclass(kind, PARTS) else None)
    kinds = [] if how is None else [how]
    is_partial = issubclass(kind, functools.partial)  # which refers to its own dict
    if not is_partial and dict_of(value) is not None:
        kinds.append(OWNED)
    if slots_of(kind) and (is_partial or how is not PART):
        kinds.append(SLOTS)
    if issubclass(kind, defaultdict):
        kinds.append(FACTORIES)
    return kinds


GONE = (
    "remat: {name} that the function reached at the call is gone, and cannot be made "
    "again for the recompute. Keep it alive until the backward, or pass what is needed "
    "of it as an argument."
)
_VARIABLE = (
    "remat: the context variable `{name}` had no value at the call and has one now. "
    "Python cannot take it away again for the recompute. Set it before the call, or "
    "give it a default."
)
