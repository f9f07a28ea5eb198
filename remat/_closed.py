"""Classes whose code provably reaches no random stream, for as long as it is the same.

`Sources` looks in the code of a class for the globals that it refers to. The code of
most modules refers to packages, builtins and classes like them, in each call again.

Invariant: what is remembered is used only while all code and all globals that were
looked at are the same objects. It keeps none of the user's alive: what may die is known
by weak references, and what is remembered goes with it.
Rejected: looking once per class. A function or a global may be bound anew.
"""

import gc
import operator
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from remat._code import CONSTANT, STATES, known_code
from remat._objects import identities
from remat._sources import has_defaults, is_closed, own_bases


_dict_of = operator.attrgetter("__dict__")
_scope_of = operator.attrgetter("__globals__")
_parts_of = operator.attrgetter(
    "__name__", "__code__", "__defaults__", "__kwdefaults__"
)
_HELD = frozenset({*CONSTANT, types.CodeType})
# They live as long as their class.
_DESCRIPTORS = frozenset({types.GetSetDescriptorType, types.MemberDescriptorType})


class ClosedCode:
    """The code of some classes."""

    __slots__ = (
        "_alive",
        "_classes",
        "_functions",
        "_held",
        "_identities",
        "_scopes",
    )

    @classmethod
    def of(cls, classes: Sequence[type]) -> "ClosedCode | None":
        """Return what is to be remembered of some classes, if they reach no stream."""
        found: dict[int, Any] = {}
        return cls([*found.values()]) if _is_closed(classes, found) else None

    def __init__(self, found: Sequence[Any]) -> None:
        classes = [value for value in found if isinstance(value, type)]
        functions = [value for value in found if not isinstance(value, type)]
        names: dict[int, tuple[int, dict[str, Any]]] = {}
        for k, fn in enumerate(functions):
            names.setdefault(id(_scope_of(fn)), (k, {}))[1].update(_names_of(fn))
        self._scopes = [(k, [*here]) for k, here in names.values()]
        self._alive = alive = [True]

        def forget(_: object) -> None:
            alive.clear()

        self._classes = [weakref.ref(cls, forget) for cls in classes]
        self._functions = [weakref.ref(fn, forget) for fn in functions]
        values = self._values()
        self._identities = identities(values)
        kept = [v for v in values if type(v) not in _DESCRIPTORS]
        self._held = [v if _is_held(v) else weakref.ref(v, forget) for v in kept]

    def is_as_it_was(self) -> bool:
        """Say whether a walk would find no stream now either."""
        return bool(self._alive) and identities(self._values()) == self._identities

    def _values(self) -> list[Any]:
        """Return what the classes hold, their functions and the globals of those."""
        functions = [ref() for ref in self._functions]
        if any(map(_dict_of, functions)):
            return []
        proxies = [_dict_of(ref()) for ref in self._classes]
        values = gc.get_referents(*gc.get_referents(*proxies))
        values += chain.from_iterable(map(_parts_of, functions))
        for k, names in self._scopes:
            values += map(_scope_of(functions[k]).get, names)
        return values


def _is_closed(values: Iterable[Any], found: dict[int, Any]) -> bool:
    """Say whether classes and functions reach no stream; add those looked at."""
    todo = [*values]
    while todo:
        value = todo.pop()
        if id(value) in found or _is_held(value) or type(value) in _DESCRIPTORS:
            continue
        if isinstance(value, type):
            bases = [value.__mro__[i] for i in own_bases(value)]
            found |= {id(base): base for base in bases}
            todo += chain.from_iterable(base.__dict__.values() for base in bases)
        elif type(value) is types.FunctionType and _is_plain(value):
            found[id(value)] = value
            todo += map(_scope_of(value).get, known_code(value).open)
        else:
            return False
    return True


def _is_plain(fn: types.FunctionType) -> bool:
    handles_states = known_code(fn).names.handles_states or fn.__name__ in STATES
    plain = not (fn.__dict__ or is_closed(fn) or has_defaults(fn) or handles_states)
    return plain and (fn.__defaults__ is None or _is_held(fn.__defaults__))


def _names_of(fn: types.FunctionType) -> Iterator[tuple[str, None]]:
    known = known_code(fn)
    for name in chain(known.open, known.settled):
        yield name, None


def _is_held(value: Any) -> bool:
    """Say whether a value may be kept alive: a constant, or a tuple of those."""
    kind = type(value)
    return kind in _HELD or (kind is tuple and _HELD.issuperset(map(type, value)))
