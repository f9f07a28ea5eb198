"""A layout: which holders one root reaches, and where each one is found.

A root is a function, a module or another object that a call is given. Owners are what
weak references can be made of: objects, functions, classes. They are listed, wherever
they are. Other holders, as lists are, have places among the values of the level before:
level 0 holds what the owners hold, level 1 what the containers in level 0 hold.

The walk over a root is a queue, and runs once for each structure. A later call only
collects what the holders hold (`contents`).

Invariant: no layout keeps anything alive but code, names, and what has no weak
references. It is dropped with its root.
Rejected: a search in each call. What a call reaches is mostly what it does not use.
"""

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from remat._base.code import static_of
from remat._base.types import INERT, TENSORS
from remat._capture.objects import identities
from remat._live.containers import ATTRIBUTES
from remat._live.holders import (
    CELLS,
    CLASSES,
    FUNCTIONS,
    SCOPES,
    SCRIPTED,
    SLOTS,
    VARIABLES,
    Kind,
    MovedError,
    dict_of,
    flatten,
    names_of,
)
from remat._live.kinds import can_be_revived
from remat._live.walk import Walk


Group = tuple[Kind, list[Any]]
_closure_of = operator.attrgetter("__closure__")
_call = operator.call
_dict_of = operator.attrgetter("__dict__")
_globals_of = operator.attrgetter("__globals__")
_ATTEMPTS = 10  # at a walk while other threads change what it reaches


class Layout:
    """The holders that one root reaches.

    Attributes:
        owners: weak references to the owners: in turn to objects that have a dict, to
            functions, to classes of the user's, to objects with slots, to the user's
            Python modules, and to modules of TorchScript.
        objects: where the first of these are among the owners.
        functions: where functions are.
        classes: where classes are.
        slotted: where objects with slots are.
        scripted: where modules of TorchScript are.
        births: the identities of the owners.
        cells: the identities of the variables of each function.
        levels: for each level but the first, kinds of holders and the places of these.
        linked: weak references to modules reached, which have layouts of their own.
        special: the places, by level and position, of iterators, of buffers of numbers
            and of large containers, and how they are written.
        odd: which objects cannot be made again, by index.
        streams: return the random streams, or None.
        handles_states: whether code reads or sets the state of a stream.
        compiled: whether there is compiled code.
        is_lazy: whether a module has no parameters yet.
        is_module: whether the root is a module.
        signature: the code of functions, functions in C, and the classes of objects.
        last: what the holders held at the last call.
    """

    __slots__ = (
        *("_closed", "_hooks", "_names", "_rest", "_scopes", "_spaces", "_vacant"),
        *("_variables", "births", "cells", "classes", "compiled", "functions"),
        *("handles_states", "is_lazy", "is_module", "last", "levels", "linked"),
        *("objects", "odd", "owners", "scripted", "signature", "slotted", "special"),
        "streams",
    )

    def __init__(self, walk: Walk) -> None:
        self._list_owners(walk)
        self._variables = walk.variables
        self.linked = [*map(weakref.ref, walk.linked)]
        self._vacant, self._hooks = walk.vacant, hooks_so_far()
        self.streams = [*map(_reference, walk.streams.streams.values())]
        self.handles_states = walk.streams.handles_states
        self.compiled, self.is_lazy = walk.streams.compiled, walk.is_lazy
        self.is_module = walk.is_module
        self.special: dict[tuple[int, int], str] = {}
        kinds = enumerate(map(type, walk.objects))
        self.odd = [i for i, kind in kinds if not can_be_revived(kind)]
        code = [fn.__code__ for fn in walk.functions]
        types_of = map(type, (*walk.objects, *walk.slotted))
        held = (*map(weakref.ref, code), *map(weakref.ref, types_of))
        self.signature = (*held, *map(static_of, walk.builtins))
        self.levels: list[list[tuple[Kind, list[int]]]] = []
        self.last: Any = None

    def _list_owners(self, walk: Walk) -> None:
        functions, spaces = walk.functions, [module for module, _ in walk.spaces]
        each = walk.objects, functions, walk.classes, walk.slotted, spaces
        each = *each, walk.scripted
        owners = [*flatten(each)]
        self.owners, self.births = [*map(weakref.ref, owners)], [*map(id, owners)]
        ends = [*itertools.accumulate(map(len, each))]
        sections = [*map(slice, (0, *ends), ends)]
        self.objects, self.functions, self.classes, self.slotted = sections[:4]
        self._spaces, self.scripted = sections[4:]
        kinds = FUNCTIONS, CLASSES, SLOTS, SCRIPTED
        rest = self.functions, self.classes, self.slotted, self.scripted
        pairs = zip(kinds, rest, strict=True)
        self._rest = [(kind, at) for kind, at in pairs if at.start < at.stop]
        first = self.functions.start
        self.cells = [[*map(id, fn.__closure__ or ())] for fn in functions]
        self._closed = [i for i, fn in enumerate(functions, first) if fn.__closure__]
        self._scopes = [first + i for i, _ in walk.names.values()]
        names = (*walk.names.values(), *walk.spaces)
        self._names = [tuple(each) for _, each in names]

    def groups(self, owners: list[Any]) -> list[Group]:
        """Return the holders of level 0, but for kinds of which there are none.

        Raises:
            AttributeError: an owner is gone.
        """
        get, found = owners.__getitem__, list[Group]()
        if self.functions.stop:
            found.append((ATTRIBUTES, _dicts_of(owners[: self.functions.stop])))
        if self._closed:
            found.append((CELLS, [*flatten(map(_closure_of, map(get, self._closed)))]))
        if self._names:
            spaces = map(_globals_of, map(get, self._scopes))
            if self._spaces.start < self._spaces.stop:
                spaces = (*spaces, *map(_dict_of, owners[self._spaces]))
            found.append((SCOPES, [*zip(spaces, self._names, strict=True)]))
        for kind, at in self._rest:
            found.append((kind, owners[at]))
        if self._variables:
            found.append((VARIABLES, self._variables))
        return found

    def below(self, k: int, values: Sequence[Any]) -> list[Group]:
        """Return the holders of a level but the first, among what is held above it."""
        get = values.__getitem__
        return [(kind, [*map(get, places)]) for kind, places in self.levels[k]]

    def modules(self) -> list[Any]:
        """Return the dicts of the modules that the root reaches."""
        modules = (self.owners[i]() for i, _ in self._vacant)
        return [vars(module) for module in modules if module is not None]

    def check_hooks(self, owners: Sequence[Any]) -> None:
        """Check that no module has hooks of a kind that it had none of at the walk.

        Raises:
            MovedError: one has.
        """
        now = hooks_so_far()
        if now == self._hooks:
            return
        for i, names in self._vacant:
            held = vars(owners[i])
            if any(held[name] for name in names):
                raise MovedError

    def hooks_are_known(self) -> None:
        """Note that no module has hooks that the walk did not see.

        Not while a recompute runs, which hides those that were set since its call.
        """
        self._hooks = hooks_so_far()


def _dicts_of(values: Sequence[Any]) -> list[Any]:
    """Return the dicts of objects, also of those that do not show them."""
    try:
        return [*map(_dict_of, values)]
    except Exception:  # noqa: BLE001 - whatever a proxy raises
        return [*map(dict_of, values)]


def hooks_so_far() -> int:
    """Return how many hooks were set anywhere: the number of the next one."""
    return RemovableHandle.next_id


def _reference(value: Any) -> Callable[[], Any]:
    """Return what gives a value, weakly if that can be."""
    if type(value).__weakrefoffset__:
        return weakref.ref(value)
    return lambda: value


class Taken:
    """What holders hold at one moment, for each level.

    Attributes:
        owners: the owners.
        groups: the holders, by kind.
        values: what they hold, one after the other.
        keys: the keys of these.
        marks: what differs if something differs: identities, and how many values each
            holder has, of those for which that is not fixed.
    """

    __slots__ = ("groups", "keys", "marks", "owners", "values")

    def __init__(self, owners: list[Any], groups: list[Group]) -> None:
        self.owners = owners
        self.groups: list[list[Group]] = []
        self.values: list[list[Any]] = []
        self.keys: list[list[Any]] = []
        self.marks: list[tuple[bytes, list[int]]] = []
        self.add(groups, map(type, owners))

    def add(self, groups: list[Group], kinds: Iterable[type] = ()) -> None:
        """Read the holders of one more level.

        Args:
            groups: the holders, by kind.
            kinds: the classes of the owners, which may be changed, too.

        Raises:
            MovedError: another thread changed something meanwhile.
        """
        values: list[Any] = []
        keys: list[Any] = []
        lengths: list[int] = []
        for kind, holders in groups:
            kind.read(holders, values, keys, lengths)
        self.groups.append(groups)
        self.values.append(values)
        self.keys.append(keys)
        self.marks.append((identities((*values, *keys, *kinds)), lengths))


def take(layout: Layout) -> Taken:
    """Return what the holders of a layout hold now.

    Raises:
        MovedError: something is not where it was.
    """
    try:
        owners = [*map(_call, layout.owners)]
        taken = Taken(owners, layout.groups(owners))
        layout.check_hooks(owners)
        for k in range(len(layout.levels)):
            taken.add(layout.below(k, taken.values[-1]))
    except (AttributeError, TypeError, IndexError, KeyError, RuntimeError):
        raise MovedError from None
    return taken


def take_again(then: Taken) -> Taken:
    """Return what the same holders hold now, wherever they are by now."""
    first, *below = then.groups
    now = Taken(then.owners, first)
    for groups in below:
        now.add(groups)
    return now


def lay_out(root: Any) -> tuple[Layout, Taken]:
    """Walk what a root reaches; return its layout, and what is held there now."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(MovedError, RuntimeError):  # other threads change it
            return _lay_out(root)
    return _lay_out(root)


def _lay_out(root: Any) -> tuple[Layout, Taken]:
    walk = Walk(root)
    layout = Layout(walk)
    taken = take(layout)
    done: set[int] = set()
    while True:
        k, values = len(layout.levels), taken.values[-1]
        places: dict[Kind, list[int]] = {}
        for p, value in enumerate(values):
            key = id(value)
            if type(value) in INERT or type(value) in TENSORS:
                continue
            if key in walk.special:
                layout.special[k, p] = _written(layout, taken, k, p)
            elif key not in done:
                done.add(key)
                for kind in walk.kinds.get(key, ()):
                    places.setdefault(kind, []).append(p)
        if not places:
            return layout, taken
        layout.levels.append([*places.items()])
        taken.add(layout.below(k, values))


def _written(layout: Layout, taken: Taken, k: int, p: int) -> str:
    """Return how the function's author would write what is at a place."""
    start = key = 0
    lengths = iter(taken.marks[k][1])
    for g, (kind, holders) in enumerate(taken.groups[k]):
        for n, holder in enumerate(holders):
            length = kind.fixed or next(lengths)
            if p < start + length:
                name = _entry(kind, holder, taken.keys[k], key, p - start)
                if k == 0:
                    return _variable(layout, taken, p) if kind is CELLS else str(name)
                above = layout.levels[k - 1][g][1][n]
                return f"{_written(layout, taken, k - 1, above)}[{name!r}]"
            start, key = start + length, key + length * kind.keyed
    return ""


def _entry(kind: Kind, holder: Any, keys: Sequence[Any], key: int, i: int) -> Any:
    """Return the name or the number of what a holder holds."""
    if kind.keyed:
        return keys[key + i]
    if kind is SCOPES:
        return holder[1][i]
    return names_of(type(holder))[i] if kind is SLOTS else i


def _variable(layout: Layout, taken: Taken, p: int) -> str:
    """Return the name of a variable of an outer function, by its place."""
    functions = taken.owners[layout.functions]
    names = [name for fn in functions for name in fn.__code__.co_freevars]
    return names[p - sum(len(d) for d in taken.groups[0][0][1])]
