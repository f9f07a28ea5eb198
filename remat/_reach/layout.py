"""A layout: which holders one root reaches, and where each one is found.

Owners are what weak references can be made of: objects, functions, classes. They are
listed. Other holders, as lists, have positions among the values that were read before
them, depth by depth. The walk runs once for each structure; a later call only collects
what the holders hold.

Invariant: no layout keeps anything alive but code, names, and what has no weak
references. It is dropped with its root.
Rejected: a search in each call. What a call reaches is mostly what it does not use.
"""

import contextlib
import enum
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import call, itemgetter
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from remat._base.code import MADE, static_of
from remat._base.interpreter import identities, nested
from remat._base.types import ATOMS, TENSORS
from remat._reach.holders import (
    ATTRIBUTES,
    CELLS,
    CLASSES,
    FUNCTIONS,
    MISSING,
    SCOPES,
    SCRIPTED,
    SLOTS,
    VARIABLES,
    HolderKind,
    MovedError,
    contents_of,
    flatten,
    names_of,
)
from remat._reach.objects import dict_of, is_rematerialized
from remat._reach.stream_search import NO_FACTS, is_made_and_held
from remat._reach.walk import Walk, can_be_revived
from remat._reach.watched import HELD, UNNAMED


Group = tuple[HolderKind, list[Any]]
# Holders that are no owners: how they are read, where they are, and whether as keys.
HoldersBelow = tuple[HolderKind, list[int], bool]
_MANY, _LONG = 16, 8  # dicts, and entries of one that is read sooner by itself
_ATTEMPTS = 10  # at a walk while other threads change what it reaches


class Layout:
    """The holders that one root reaches.

    Attributes:
        owners: weak references to the owners: in turn to objects that have a dict, to
            functions, to classes of the user's, to objects with slots, to modules of
            TorchScript, and to the user's Python modules.
        objects: where the first of these are among the owners. So `functions`,
            `classes` and `slotted`.
        births: the identities of the owners.
        class_names: of the user's classes, for errors.
        cells: the identities of the variables of each function.
        below: kinds of holders that are no owners, with the positions of these among
            the values, or among the keys: depth by depth.
        linked: weak references to modules reached, which have layouts of their own.
        special: the positions of iterators, of buffers of numbers and of large
            containers, how they are written, and up to how many bytes are put back.
        odd: which objects and classes cannot be made again, and are held, by index.
        facts: what the code that the root reaches does.
        is_contained: whether there is nothing but functions without variables: then
            nothing of a graph can be there.
        is_module: whether the root is a module.
        local: the owners whose classes are held, by index.
        variables: context variables.
        signature: the code of functions, functions in C, and the classes of objects.
        last: what the holders held at the last call.
        spans: of holders, and where these begin, for the last lengths of all.
        hooks_known: the number of the next hook anywhere, when no module had one that
            the walk did not see. A recompute hides those that were set since its call.
    """

    def __init__(self, walk: Walk) -> None:
        # Functions with variables come first, and are read by one slice.
        closed = [fn for fn in walk.functions if fn.__closure__]
        functions = closed + [fn for fn in walk.functions if not fn.__closure__]
        each = walk.objects, functions, walk.classes, walk.slotted, walk.scripted
        each = *each, walk.spaces
        owners = [*flatten(each)]
        self.owners, self.births = [*map(weakref.ref, owners)], [*map(id, owners)]
        self.class_names = [kind.__qualname__ for kind in walk.classes]
        ends = [*itertools.accumulate(map(len, each))]
        sections = [*map(slice, (0, *ends), ends)]
        self.objects, self.functions, self.classes, self.slotted = sections[:4]
        self._scripted, self._dicted = sections[4], self.functions.stop
        self.variables = walk.variables
        self._has_others = bool(walk.slotted or walk.scripted or walk.variables)
        first = self.functions.start
        self.cells = [[*map(id, fn.__closure__ or ())] for fn in functions]
        self._closed = slice(first, first + len(closed))
        numbers = {key: i for i, key in enumerate(self.births)}
        self._scopes = [  # whose attribute is the namespace, and names in it
            (numbers[id(owner)], _namespace_of(owner), (*names,))
            for owner, names in walk.scopes.values()
        ]
        self.linked = [*map(weakref.ref, walk.linked)]
        self._vacant = walk.vacant
        self.hooks_known = RemovableHandle.next_id
        walk.facts.writes |= walk.facts.compiled  # whose code is not read
        self.facts = walk.facts if walk.facts.are_any else NO_FACTS
        self.is_module = isinstance(walk.root, nn.Module)
        others = len(owners) > len(functions) or walk.kinds or walk.special
        self.is_contained = not (others or closed or walk.variables)
        self.special: dict[int, tuple[str, float]] = {}
        kinds = enumerate(map(type, walk.objects))
        self.odd = [i for i, kind in kinds if not can_be_revived(kind)]
        # Classes that a call made are gone with all their instances.
        kinds = enumerate(walk.classes, self.classes.start)
        self.odd += [i for i, kind in kinds if is_made_and_held(kind)]
        self.odd += range(ends[3], ends[4])  # of TorchScript
        kinds = enumerate(map(type, owners))
        self.local = [
            i for i, kind in kinds if MADE in vars(kind) or is_made_and_held(kind)
        ]
        code = [fn.__code__ for fn in walk.functions]
        types_of = map(type, (*walk.objects, *walk.slotted))
        held = (*map(weakref.ref, code), *map(weakref.ref, types_of))
        # What tells an object from others of its class.
        enums = [o for o in walk.objects if issubclass(type(o), enum.Enum)]
        marks: list[Any] = [o.name for o in enums]
        made = [o for o in walk.objects if is_rematerialized(type(o))]
        marks += [o.__remat_options__[-1].key for o in made]
        self.signature = (*held, *marks, *map(static_of, walk.builtins))
        self.below: list[HoldersBelow] = []
        self.last: Any = None
        self.spans: Any = None

    def holders(self, owners: list[Any]) -> list[Group]:
        """Return the holders that owners are or have, by kind.

        First the dicts of objects and functions, then the variables of functions.
        """
        try:
            tables = [owner.__dict__ for owner in owners[: self._dicted]]
        except Exception:  # noqa: BLE001 - whatever a proxy raises
            tables = [*map(dict_of, owners[: self._dicted])]
        cells: list[Any] = []
        for fn in owners[self._closed]:
            cells += fn.__closure__
        scopes = [(getattr(owners[i], at), names) for i, at, names in self._scopes]
        groups: list[Group] = [
            (ATTRIBUTES, tables),
            (CELLS, cells),
            (SCOPES, scopes),
            (FUNCTIONS, owners[self.functions]),
            (CLASSES, owners[self.classes]),
        ]
        if self._has_others:
            groups.append((SLOTS, owners[self.slotted]))
            groups.append((SCRIPTED, owners[self._scripted]))
            groups.append((VARIABLES, self.variables))
        return groups

    def modules(self) -> list[Any]:
        """Return the dicts of the modules that the root reaches."""
        modules = (self.owners[i]() for i, _ in self._vacant)
        return [vars(module) for module in modules if module is not None]

    def check_hooks(self, owners: Sequence[Any]) -> None:
        """Check that no module has hooks of a kind that it had none of at the walk."""
        for i, names in self._vacant:
            held = vars(owners[i])
            if any(held[name] for name in names):
                raise MovedError


def _namespace_of(owner: Any) -> str:
    """Return which attribute of a function or a Python module is the namespace."""
    return "__globals__" if type(owner) is types.FunctionType else "__dict__"


class LiveValues:
    """What holders hold at one moment.

    Attributes:
        owners: the owners.
        groups: the holders by kind, in the order of reading: those that the owners are
            or have, and the others, depth by depth.
        first_below: which group is the first of others.
        marks: what differs if something differs: identities, and the lengths.
    """

    __slots__ = "first_below", "groups", "keys", "lengths", "marks", "owners", "values"

    def __init__(self, owners: list[Any], groups: list[Group]) -> None:
        self.values: list[Any] = []
        self.keys: list[Any] = []
        self.lengths: list[int] = []
        self.owners, self.groups, self.first_below = owners, groups, len(groups)
        self.marks: tuple[bytes, list[int]] = b"", self.lengths
        values, keys, lengths = self.values, self.keys, self.lengths
        (_, tables), (_, cells), (_, scopes), (_, functions), *others = groups
        # These are read here at once, as most calls reach few of each kind.
        left = _read_small(tables, self) if len(tables) > _MANY else tables
        for table in left:
            length = len(table)
            lengths.append(length)
            if length:  # most are empty
                values += table.values()
                keys += table
        if len(keys) != len(values) or len(keys) != sum(lengths):
            raise MovedError
        if cells:
            values += contents_of(cells)
        for scope, names in scopes:
            lengths.append(len(names))
            for name in names:
                values.append(scope.get(name, MISSING))
        for fn in functions:
            values += (fn.__code__, fn.__defaults__, fn.__kwdefaults__)
        for kind, found in others:
            if found:
                kind.read(found, self)

    def add(self, below: Iterable[HoldersBelow]) -> None:
        """Read the holders that were found at positions among what was read so far."""
        for kind, places, as_keys in below:
            held = self.keys if as_keys else self.values
            found = [held[p] for p in places]
            self.groups.append((kind, found))
            kind.read(found, self)

    def holder(self, index: tuple[int, int]) -> Any:
        """Return a holder, by its group and its number in that."""
        group, number = index
        return self.groups[group][1][number]

    def mark(self) -> None:
        """Note which objects were read, with the classes of the owners."""
        held = *self.values, *self.keys, *map(type, self.owners)
        self.marks = identities(held), self.lengths

    def again(self) -> "LiveValues":
        """Return what the same holders hold now, wherever they are by now."""
        now = LiveValues(self.owners, self.groups)
        now.first_below = self.first_below
        now.mark()
        return now


def _read_small(tables: Sequence[Any], to: LiveValues) -> Sequence[Any]:
    """Read many dicts together, and return none, if most are small; else all."""
    lengths = [*map(len, tables)]
    if sum(lengths) > _LONG * len(lengths):
        return tables
    try:
        to.values += [*flatten(map(dict.values, tables))]
    except TypeError:  # a class has a `__dict__` of its own
        return tables
    to.keys += flatten(tables)
    to.lengths += lengths
    return ()


def live_in(layout: Layout) -> LiveValues:
    """Return what the holders of a layout hold now, where they were found, or raise."""
    try:
        owners = [*map(call, layout.owners)]
        live = LiveValues(owners, layout.holders(owners))
        if RemovableHandle.next_id != layout.hooks_known:
            layout.check_hooks(owners)
        if layout.below:
            live.add(layout.below)
    except (AttributeError, TypeError, IndexError, KeyError, RuntimeError):
        raise MovedError from None
    live.mark()
    return live


def taking(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes the items in some places, at the speed of C."""
    if len(places) > 1:
        return itemgetter(*places)
    first = places[0] if places else 0
    return itemgetter(slice(first, first + len(places)))


def lay_out(root: Any) -> tuple[Layout, LiveValues]:
    """Walk what a root reaches; return its layout, and what is held there now."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(MovedError, RuntimeError):  # other threads change it
            return _lay_out(root)
    return _lay_out(root)


def _lay_out(root: Any) -> tuple[Layout, LiveValues]:
    walk = Walk(root)
    layout = Layout(walk)
    live = live_in(layout)
    done: set[int] = set()
    first = first_key = 0
    while True:
        for p, value in enumerate(live.values[first:], first):
            if id(value) in walk.special:
                name = written(layout, live, p)
                is_named = _is_named_in(walk.functions, name)
                layout.special[p] = name, HELD if is_named else UNNAMED
        values, keys = live.values[first:], live.keys[first_key:]
        below = [
            *_found(walk, values, first, done, as_keys=False),
            *_found(walk, keys, first_key, done, as_keys=True),
        ]
        if not below:
            live.mark()
            return layout, live
        first, first_key = len(live.values), len(live.keys)
        layout.below += below
        live.add(below)


def _is_named_in(functions: Iterable[types.FunctionType], name: str) -> bool:
    """Say whether code of functions may read what it would write like this."""
    words = {name.partition("[")[0], *_LOOKING_UP}
    called = [fn.__code__ for fn in functions if fn.__name__ != "__init__"]
    each = (code for outer in called for code in nested(outer))
    return any(not words.isdisjoint((*c.co_names, *c.co_freevars)) for c in each)


_LOOKING_UP = "getattr", "vars", "__dict__", "globals"  # by a name that is a value


def _found(
    walk: Walk, held: Sequence[Any], first: int, done: set[int], *, as_keys: bool
) -> list[HoldersBelow]:
    """Return the holders among values, or among keys, that were not yet found."""
    places: dict[HolderKind, list[int]] = {}
    for p, value in enumerate(held, first):
        key = id(value)
        if type(value) in ATOMS or type(value) in TENSORS or key in done:
            continue
        if as_keys and issubclass(type(value), weakref.ref):
            continue  # of a weak dictionary: it goes with its entry
        if key in walk.kinds:
            done.add(key)
            for kind in walk.kinds[key]:
                places.setdefault(kind, []).append(p)
    return [(kind, found, as_keys) for kind, found in places.items()]


def written(layout: Layout, live: LiveValues, p: int) -> str:
    """Return how the function's author would write what is at a position."""
    start = key = 0
    lengths = iter(live.lengths)
    first = live.first_below
    for g, (kind, holders) in enumerate(live.groups):
        for n, holder in enumerate(holders):
            length = kind.fixed or next(lengths)
            if p < start + length:
                i = p - start
                name: Any = live.keys[key + i] if kind.keyed else i
                if kind is SCOPES:
                    name = holder[1][i]
                elif kind is SLOTS:
                    name = names_of(type(holder))[i]
                if kind is CELLS and g < first:
                    return _variable(layout, live, p)
                if g < first:
                    return str(name)
                above = layout.below[g - first][1][n]
                return f"{written(layout, live, above)}[{name!r}]"
            start, key = start + length, key + length * kind.keyed
    return ""


def _variable(layout: Layout, live: LiveValues, p: int) -> str:
    """Return the name of a variable of an outer function, by its position."""
    functions = live.owners[layout.functions]
    names = [name for fn in functions for name in fn.__code__.co_freevars]
    return names[p - sum(map(len, live.groups[0][1]))]
