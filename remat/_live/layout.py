"""A layout: which holders one root reaches, and where each one is found.

A root is a function, a module or another object that a call is given. Owners are what
weak references can be made of: objects, functions, classes. They are listed, wherever
they are. Other holders, as lists are, have positions among the values that were read
before them: what owners hold is read first, then what containers in that hold, and so
on, level by level.

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
        below: kinds of holders that are no owners, and the positions of these.
        levels: for each level but the first, where its first kind is in `below`.
        linked: weak references to modules reached, which have layouts of their own.
        special: the positions of iterators, of buffers of numbers and of large
            containers, and how they are written.
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
        *("_closed", "_dicted", "_hooked", "_hooks", "_names", "_rest", "_scopes"),
        *("_spaces", "_vacant", "_variables", "below", "births", "cells", "classes"),
        *("compiled", "functions", "handles_states", "is_lazy", "is_module", "last"),
        *("levels", "linked", "objects", "odd", "owners", "scripted", "signature"),
        *("slotted", "special", "streams"),
    )

    def __init__(self, walk: Walk) -> None:
        self._list_owners(walk)
        self._variables = walk.variables
        self.linked = [*map(weakref.ref, walk.linked)]
        self._vacant, self._hooks = walk.vacant, hooks_so_far()
        self.streams = [*map(_reference, walk.streams.streams.values())]
        self.handles_states = walk.streams.handles_states
        self.compiled, self.is_lazy = walk.streams.compiled, walk.is_lazy
        self.is_module, self._hooked = walk.is_module, walk.hooked
        self.special: dict[int, str] = {}
        kinds = enumerate(map(type, walk.objects))
        self.odd = [i for i, kind in kinds if not can_be_revived(kind)]
        code = [fn.__code__ for fn in walk.functions]
        types_of = map(type, (*walk.objects, *walk.slotted))
        held = (*map(weakref.ref, code), *map(weakref.ref, types_of))
        self.signature = (*held, *map(static_of, walk.builtins))
        self.below: list[tuple[Kind, list[int]]] = []
        self.levels: list[int] = []
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
        self._spaces = sections[4] if spaces else None
        self.scripted, self._dicted = sections[5], self.functions.stop
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
        """Return what owners hold by, but for kinds of which there are none.

        Raises:
            AttributeError: an owner is gone.
        """
        get, found = owners.__getitem__, list[Group]()
        if self._dicted:
            found.append((ATTRIBUTES, _dicts_of(owners[: self._dicted])))
        if self._closed:
            found.append((CELLS, [*flatten(map(_closure_of, map(get, self._closed)))]))
        if self._names:
            spaces = [*map(_globals_of, map(get, self._scopes))]
            if self._spaces is not None:
                spaces += map(_dict_of, owners[self._spaces])
            found.append((SCOPES, [*zip(spaces, self._names, strict=True)]))
        found += [(kind, owners[at]) for kind, at in self._rest]
        if self._variables:
            found.append((VARIABLES, self._variables))
        return found

    def modules(self) -> list[Any]:
        """Return the dicts of the modules that the root reaches."""
        modules = (self.owners[i]() for i, _ in self._vacant)
        return [vars(module) for module in modules if module is not None]

    def hooks(self) -> list[Any]:
        """Return the hooks of the modules that the root reaches."""
        pairs = ((self.owners[i](), names) for i, names in self._hooked)
        dicts = [vars(m)[name] for m, names in pairs if m is not None for name in names]
        return [hook for hooks in dicts for hook in hooks.values()]

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
    """What holders hold at one moment.

    Args:
        owners: the owners.
        groups: the holders, by kind; at first those that owners are or have.

    Attributes:
        owners: see above.
        groups: see above; all of them.
        values: what they hold, one after the other.
        keys: the keys of these.
        lengths: how many values each holder has, of those for which that is not fixed.
        marks: what differs if something differs: identities, and the lengths.
    """

    __slots__ = ("groups", "keys", "lengths", "marks", "owners", "values")

    def __init__(self, owners: list[Any], groups: list[Group]) -> None:
        self.owners, self.groups = owners, groups
        self.values: list[Any] = []
        self.keys: list[Any] = []
        self.lengths: list[int] = []
        self.marks: tuple[bytes, list[int]] = b"", self.lengths
        for kind, holders in groups:
            kind.read(holders, self.values, self.keys, self.lengths)

    def add(self, below: Iterable[tuple[Kind, list[int]]]) -> None:
        """Read the holders that were found at positions.

        Args:
            below: kinds of holders, and their positions among the values so far.

        Raises:
            MovedError: another thread changed something meanwhile.
        """
        values, keys, lengths = self.values, self.keys, self.lengths
        for kind, places in below:
            holders = [*map(values.__getitem__, places)]
            self.groups.append((kind, holders))
            kind.read(holders, values, keys, lengths)

    def mark(self) -> None:
        """Note which objects were read, with the classes of the owners."""
        held = *self.values, *self.keys, *map(type, self.owners)
        self.marks = identities(held), self.lengths


def take(layout: Layout) -> Taken:
    """Return what the holders of a layout hold now.

    Raises:
        MovedError: something is not where it was.
    """
    try:
        owners = [*map(_call, layout.owners)]
        taken = Taken(owners, layout.groups(owners))
        layout.check_hooks(owners)
        taken.add(layout.below)
    except (AttributeError, TypeError, IndexError, KeyError, RuntimeError):
        raise MovedError from None
    taken.mark()
    return taken


def take_again(then: Taken) -> Taken:
    """Return what the same holders hold now, wherever they are by now."""
    now = Taken(then.owners, then.groups)
    now.mark()
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
    first = 0
    while True:
        places: dict[Kind, list[int]] = {}
        for p, value in enumerate(taken.values[first:], first):
            key = id(value)
            if type(value) in INERT or type(value) in TENSORS:
                continue
            if key in walk.special:
                layout.special[p] = _written(layout, taken, p)
            elif key not in done:
                done.add(key)
                for kind in walk.kinds.get(key, ()):
                    places.setdefault(kind, []).append(p)
        if not places:
            taken.mark()
            return layout, taken
        first = len(taken.values)
        layout.levels.append(len(layout.below))
        layout.below += places.items()
        taken.add(places.items())


def _written(layout: Layout, taken: Taken, p: int) -> str:
    """Return how the function's author would write what is at a position."""
    start = key = 0
    lengths = iter(taken.lengths)
    first = len(taken.groups) - len(layout.below)
    for g, (kind, holders) in enumerate(taken.groups):
        for n, holder in enumerate(holders):
            length = kind.fixed or next(lengths)
            if p < start + length:
                name = _entry(kind, holder, taken.keys, key, p - start)
                if g < first:
                    return _variable(layout, taken, p) if kind is CELLS else str(name)
                above = layout.below[g - first][1][n]
                return f"{_written(layout, taken, above)}[{name!r}]"
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
    """Return the name of a variable of an outer function, by its position."""
    functions = taken.owners[layout.functions]
    names = [name for fn in functions for name in fn.__code__.co_freevars]
    return names[p - sum(len(d) for d in taken.groups[0][1])]
