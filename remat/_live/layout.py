"""A layout: which holders one root reaches, and where each one is found.

A root is a function, a module or another object that a call is given. Owners are what
weak references can be made of: objects, functions, classes. They are listed, wherever
they are. Other holders, as lists are, have places among the values of the level before:
level 0 holds what the owners hold, level 1 what the containers in level 0 hold.

The walk over a root is a queue, and runs once for each structure. A later call only
collects what the holders hold (`contents`).

Invariant: no layout keeps anything alive but code and names. It is dropped with its
root.
Rejected: a search in each call. What a call reaches is mostly what it does not use.
"""

import enum
import itertools
import operator
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from remat._base.code import known_code
from remat._base.types import INERT, TENSORS
from remat._capture.kinds import (
    COPIED_ITERATORS,
    can_be_made_anew,
    is_buffer,
    is_left_alone,
    is_rematerialized,
    is_sharded,
    is_spent_by_use,
    is_view,
)
from remat._capture.modules import HOOKS, REGISTRIES, TEMPLATE
from remat._capture.objects import identities, slots_of
from remat._capture.stream_search import StreamSearch, is_scripted, is_stream, user_bases
from remat._live.holders import (
    ATTRIBUTES,
    CELLS,
    CLASSES,
    CONTAINERS,
    FACTORIES,
    FUNCTIONS,
    MISSING,
    OWNED,
    PART,
    PARTS,
    SCOPES,
    SLOTS,
    VARIABLES,
    Kind,
    container_kind,
    dict_of,
    is_variable,
    names_of,
    parts_of,
)
from remat._torch import is_compiled


Group = tuple[Kind, list[Any]]
_LARGE = 1000  # entries or bytes, above which numbers are not copied in each call
# Attributes of classes that say how these were made.
_MAKING = {
    *("__abstractmethods__", "__annotations__", "__dataclass_fields__"),
    *("__dataclass_params__", "__dict__", "__doc__", "__match_args__", "__module__"),
    *("__slots__", "__weakref__", "_abc_impl"),
}
_closure_of = operator.attrgetter("__closure__")
_dict_of = operator.attrgetter("__dict__")
_globals_of = operator.attrgetter("__globals__")


class UnsupportedError(Exception):
    """A root reaches what can only be rebuilt."""


class MovedError(Exception):
    """What a layout says is not where a holder was."""


class Owners:
    """The owners of a layout, at one moment; None for one that is gone."""

    __slots__ = ("classes", "functions", "objects", "slotted")

    def __init__(self, layout: "Layout") -> None:
        self.objects = [ref() for ref in layout.objects]
        self.functions = [ref() for ref in layout.functions]
        self.classes = [ref() for ref in layout.classes]
        self.slotted = [ref() for ref in layout.slotted]

    def kinds(self) -> Iterable[type]:
        """Return the classes of objects, and those of objects with slots."""
        return map(type, (*self.objects, *self.slotted))


class Layout:
    """The holders that one root reaches.

    Attributes:
        objects: weak references to the objects that have a dict.
        functions: those to functions.
        classes: those to classes of the user's.
        slotted: those to objects with slots.
        variables: context variables.
        scopes: functions, by index, and names of globals that code refers to.
        levels: for each level but the first, kinds of holders and the places of these.
        linked: weak references to modules reached, which have layouts of their own.
        special: the places, by level and position, of iterators, of buffers of numbers
            and of large containers, and how they are written.
        odd: which objects cannot be made again, by index.
        streams: random streams.
        handles_states: whether code reads or sets the state of a stream.
        compiled: whether there is compiled code.
        is_lazy: whether a module has no parameters yet.
        births: the identities of objects, of functions, of classes and of objects with
            slots.
        cells: the identities of the variables of each function.
        last: what the holders held at the last call.
    """

    __slots__ = (
        *("_cells", "births", "cells", "_hooks", "_vacant", "classes", "compiled", "functions"),
        *("handles_states", "is_lazy", "last", "levels", "linked", "objects", "odd"),
        *("scopes", "slotted", "special", "streams", "variables"),
    )

    def __init__(self, walk: "_Walk") -> None:
        try:
            self.objects = [*map(weakref.ref, walk.objects)]
            self.functions = [*map(weakref.ref, walk.functions)]
            self.classes = [*map(weakref.ref, walk.classes)]
            self.slotted = [*map(weakref.ref, walk.slotted)]
            self.linked = [*map(weakref.ref, walk.linked)]
        except TypeError as error:
            raise UnsupportedError(str(error)) from error
        owners = walk.objects, walk.functions, walk.classes, walk.slotted
        self.births = [[*map(id, values)] for values in owners]
        self.cells = [[*map(id, fn.__closure__ or ())] for fn in walk.functions]
        self.variables, self.scopes = walk.variables, walk.scopes
        self._cells = [i for i, fn in enumerate(walk.functions) if fn.__closure__]
        self._vacant, self._hooks = walk.vacant, hooks_so_far()
        self.streams = [*walk.streams.streams.values()]
        self.handles_states = walk.streams.handles_states
        self.compiled, self.is_lazy = walk.streams.compiled, walk.is_lazy
        self.special: dict[tuple[int, int], str] = {}
        kinds = enumerate(map(type, walk.objects))
        self.odd = [i for i, kind in kinds if not can_be_revived(kind)]
        self.levels: list[list[tuple[Kind, list[int]]]] = []
        self.last: Any = None

    def groups(self, owners: Owners) -> list[Group]:
        """Return the holders of level 0.

        Raises:
            MovedError: an owner is gone.
        """
        functions = owners.functions
        try:
            closures = map(_closure_of, map(functions.__getitem__, self._cells))
            found: list[Group] = [
                (ATTRIBUTES, [*map(_dict_of, (*owners.objects, *functions))]),
                (CELLS, [*itertools.chain.from_iterable(closures)]),
                (SCOPES, [(functions[i].__globals__, names) for i, names in self.scopes]),
                (FUNCTIONS, functions),
                (CLASSES, owners.classes),
                (SLOTS, owners.slotted),
                (VARIABLES, self.variables),
            ]
        except (AttributeError, TypeError):
            raise MovedError from None
        if None in owners.classes or None in owners.slotted:
            raise MovedError
        return found

    def below(self, k: int, values: Sequence[Any]) -> list[Group]:
        """Return the holders of a level but the first, among what is held above it."""
        get = values.__getitem__
        return [(kind, [*map(get, places)]) for kind, places in self.levels[k]]

    def modules(self, owners: Owners) -> list[Any]:
        """Return the dicts of the modules that the root reaches."""
        return [vars(owners.objects[i]) for i, _ in self._vacant]

    def check_hooks(self, owners: Owners) -> None:
        """Check that no module has hooks of a kind that it had none of at the walk.

        Raises:
            MovedError: one has.
        """
        now = hooks_so_far()
        if now == self._hooks:
            return
        self._hooks = now
        for i, names in self._vacant:
            held = vars(owners.objects[i])
            if any(held[name] for name in names):
                raise MovedError


def hooks_so_far() -> int:
    """Return how many hooks were set anywhere: the number of the next one."""
    return RemovableHandle.next_id


class Taken:
    """What holders hold at one moment, for each level.

    Attributes:
        groups: the holders, by kind.
        values: what they hold, one after the other.
        keys: the keys of these.
        lengths: how many values each holder has.
        marks: what differs if something differs: identities, and lengths.
        owners: the owners; None if it was not read through them.
        kinds: the identities of the classes of objects.
    """

    __slots__ = ("groups", "keys", "kinds", "lengths", "marks", "owners", "values")

    def __init__(self, owners: Owners | None = None) -> None:
        self.owners = owners
        self.kinds = b"" if owners is None else identities(owners.kinds())
        self.groups: list[list[Group]] = []
        self.values: list[list[Any]] = []
        self.keys: list[list[Any]] = []
        self.lengths: list[list[int]] = []
        self.marks: list[Any] = []

    def add(self, groups: list[Group]) -> None:
        """Read the holders of one more level."""
        values: list[Any] = []
        keys: list[Any] = []
        lengths: list[int] = []
        for kind, holders in groups:
            if holders:
                values += kind.values(holders)
                keys += kind.keys(holders)
                lengths += kind.lengths(holders)
        self.groups.append(groups)
        self.values.append(values)
        self.keys.append(keys)
        self.lengths.append(lengths)
        self.marks.append((identities(values), identities(keys), lengths))


def take(layout: Layout) -> Taken:
    """Return what the holders of a layout hold now.

    Raises:
        MovedError: something is not where it was.
    """
    owners = Owners(layout)
    taken = Taken(owners)
    try:
        taken.add(layout.groups(owners))
        layout.check_hooks(owners)
        for k in range(len(layout.levels)):
            taken.add(layout.below(k, taken.values[-1]))
    except (AttributeError, TypeError, IndexError, KeyError):
        raise MovedError from None
    return taken


def take_again(then: Taken) -> Taken:
    """Return what the same holders hold now, wherever they are by now."""
    now = Taken()
    for groups in then.groups:
        now.add(groups)
    return now


def lay_out(root: Any) -> tuple[Layout, Taken]:
    """Walk what a root reaches; return its layout, and what is held there now.

    Raises:
        UnsupportedError: it reaches what can only be rebuilt.
    """
    walk = _Walk(root)
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
    lengths = iter(taken.lengths[k])
    for g, (kind, holders) in enumerate(taken.groups[k]):
        for n, holder in enumerate(holders):
            length = next(lengths)
            if p < start + length:
                name = _entry(kind, holder, taken.keys[k], key, p - start)
                if k == 0:
                    return _variable(layout, taken, p) if kind is CELLS else str(name)
                return f"{_written(layout, taken, k - 1, layout.levels[k - 1][g][1][n])}[{name!r}]"
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
    functions = () if taken.owners is None else taken.owners.functions
    names = [name for fn in functions for name in fn.__code__.co_freevars]
    return names[p - sum(len(d) for d in taken.groups[0][0][1])]


# --- The walk ---


class _Walk:
    """A walk over what a root reaches, each value once."""

    def __init__(self, root: Any) -> None:
        self.objects: list[Any] = []
        self.functions: list[Any] = []
        self.classes: list[type] = []
        self.slotted: list[Any] = []
        self.linked: list[Any] = []
        self.variables: list[Any] = []
        self.vacant: list[tuple[int, tuple[str, ...]]] = []
        self.names: dict[int, tuple[int, dict[str, None]]] = {}
        # Held, so that no other value gets the identity of one.
        self.seen: dict[int, Any] = {}
        self.kinds: dict[int, tuple[Kind, ...]] = {}  # of holders that no owner is
        self.special: set[int] = set()
        self.is_lazy = False
        self.streams = StreamSearch()
        self._todo: deque[Any] = deque()
        self._is_module = isinstance(root, nn.Module)
        self._reach(root, is_own=True)
        while self._todo:
            self._reach(self._todo.popleft())

    @property
    def scopes(self) -> list[tuple[int, tuple[str, ...]]]:
        """For each namespace a function, by its index, and the names of variables."""
        return [(i, tuple(names)) for i, names in self.names.values()]

    def _reach(self, value: Any, *, is_own: bool = False) -> None:
        kind = type(value)
        if kind in INERT or kind in TENSORS or value is MISSING or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if issubclass(kind, Tensor):
            return
        if kind is types.FunctionType:
            self._reach_function(value)
        elif issubclass(kind, nn.Module):
            if is_own:
                self._reach_module(value)
            else:
                self.linked.append(value)
        elif issubclass(kind, type):
            self._reach_class(value)
        elif is_stream(kind):
            self.streams.add(value)
        elif is_variable(value):
            self.variables.append(value)
            self._todo.append(value.get(MISSING))
        else:
            self._reach_other(value, kind)

    def _reach_other(self, value: Any, kind: type) -> None:
        how = container_kind(kind)
        if how is not None:
            self._reach_container(value, how)
        elif issubclass(kind, PARTS):
            if not is_of_library(value):
                self._hold(value, PART)
                self._todo += parts_of(value)
        elif is_spent_by_use(kind) or kind in COPIED_ITERATORS:
            self._reach_iterator(value)
        elif is_buffer(kind):
            if size_of(value) <= _LARGE:
                self.special.add(id(value))
        elif kind is types.CellType:
            self._hold(value, CELLS)
            self._todo += CELLS.values([value])
        elif is_used_as_it_is(value, kind):
            self.streams.walk(value)
        else:
            self._reach_object(value, kind)

    def _reach_iterator(self, value: Any) -> None:
        search = StreamSearch()
        search.walk(value)
        self.streams.walk(value)
        # What gives streams gives the same one again, most often, and that is put back.
        if not search.streams or type(value) is itertools.cycle:
            self.special.add(id(value))

    def _reach_container(self, value: Any, how: Kind) -> None:
        if len(value) > _LARGE and _is_plain(how.values([value])):
            self.special.add(id(value))
            return
        self._hold(value, how)
        if issubclass(type(value), defaultdict):
            self._hold(value, FACTORIES)
            self._todo.append(value.default_factory)
        self._todo += how.values([value])
        self._todo += how.keys([value])
        if dict_of(value) is not None or slots_of(type(value)):
            self._reach_object(value, type(value))

    def _reach_function(self, fn: types.FunctionType) -> None:
        known = known_code(fn)
        self.streams.look_at_function(fn, known)
        self.functions.append(fn)
        self._todo += fn.__dict__.values()
        self._todo += fn.__defaults__ or ()
        self._todo.append(fn.__defaults__)
        self._todo.append(fn.__kwdefaults__)
        self._todo += CELLS.values(fn.__closure__ or ())
        if is_compiled(fn.__dict__):
            return
        scope, own = fn.__globals__, (*known.open, *known.names.stored)
        # What is settled leads nowhere, but its name may be given to something else.
        names = dict.fromkeys((*own, *(n for n in known.settled if n in scope)))
        if names:
            first = len(self.functions) - 1
            self.names.setdefault(id(scope), (first, {}))[1].update(names)
            self._todo += (scope.get(name, MISSING) for name in own)

    def _reach_class(self, cls: type) -> None:
        for i in user_bases(cls):
            base = cls.__mro__[i]
            if issubclass(base, enum.Enum) or base in self.classes:
                continue
            self.seen[id(base)] = base
            self.classes.append(base)
            held = base.__dict__
            self._todo += (held[name] for name in held if name not in _MAKING)

    def _reach_object(self, value: Any, kind: type) -> None:
        self._reach_class(kind)
        if is_scripted(kind):
            raise UnsupportedError("TorchScript")
        held, is_owner = dict_of(value), bool(kind.__weakrefoffset__)
        if held is not None:
            self._todo += held.values()
            if is_owner:
                self.objects.append(value)
            else:
                self._hold(value, OWNED)
        if slots_of(kind):
            self._todo += SLOTS.values([value])
            if is_owner:
                self.slotted.append(value)
            else:
                self._hold(value, SLOTS)

    def _reach_module(self, root: nn.Module) -> None:
        """Walk a module and those that are registered in it."""
        todo: deque[tuple[Any, bool]] = deque([(root, False)])
        while todo:
            module, sharded = todo.popleft()
            self.seen[id(module)] = module
            kind = type(module)
            sharded = sharded or is_sharded(kind)
            if issubclass(kind, torch.jit.ScriptModule):
                raise UnsupportedError("TorchScript")
            self._reach_class(kind)
            if slots_of(kind):
                self.slotted.append(module)
            if is_view(kind):
                todo.append((module._remat_module, sharded))
                continue
            self._reach_registered(module, sharded)
            below = (m for m in module._modules.values() if m is not None)
            todo += ((m, sharded) for m in below if id(m) not in self.seen)

    def _reach_registered(self, module: Any, sharded: bool) -> None:
        held = vars(module)
        self.objects.append(module)
        self._todo += (v for name, v in held.items() if name not in TEMPLATE)
        for name in REGISTRIES:
            if not (name == "_parameters" and sharded):
                self._hold_registry(held[name])
        tensors = (*held["_parameters"].values(), *held["_buffers"].values())
        self.is_lazy = self.is_lazy or any(
            t is not None and type(t) is not nn.Parameter and is_lazy(t) for t in tensors
        )
        for name in HOOKS:
            if held.get(name):
                self._hold_registry(held[name])
        vacant = tuple(name for name in HOOKS if name in held and not held[name])
        self.vacant.append((len(self.objects) - 1, vacant))

    def _hold(self, value: Any, *kinds: Kind) -> None:
        """List a value that is no owner as a holder."""
        self.seen[id(value)] = value
        self.kinds[id(value)] = (*self.kinds.get(id(value), ()), *kinds)

    def _hold_registry(self, registry: Any) -> None:
        base = OrderedDict if isinstance(registry, OrderedDict) else dict
        self._hold(registry, CONTAINERS[base])


def _is_plain(items: Iterable[Any]) -> bool:
    """Say whether all items are numbers, words, and tensors without gradients."""
    items = [*items]
    kinds = {*map(type, items)} - INERT
    return kinds <= TENSORS and not any(
        type(v) in TENSORS and v.requires_grad for v in items
    )


def size_of(buffer: Any) -> int:
    """Return how many numbers a buffer holds."""
    return buffer.size if hasattr(buffer, "size") else len(buffer)


def can_be_revived(kind: type) -> bool:
    """Say whether an instance can be made again from what it holds."""
    if hasattr(kind, "__del__"):  # which would run once more
        return True  # and is refused, once it is gone
    return container_kind(kind) is not None or can_be_made_anew(kind)


def is_of_library(value: Any) -> bool:
    """Say whether a value is a function in C, and no method of a value."""
    if type(value) not in (types.BuiltinFunctionType, types.MethodWrapperType):
        return False
    owner = value.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return True
    return not hasattr(type(owner), value.__name__)  # a function that pybind11 made


def is_opaque(value: Any, kind: type) -> bool:
    """Say whether a value is held as it is: a stream, an array, what is not walked."""
    if is_stream(kind) or is_buffer(kind):
        return True
    if issubclass(kind, (*_WALKED, *PARTS)) or container_kind(kind) is not None:
        return issubclass(kind, PARTS) and is_of_library(value)
    is_iterator = is_spent_by_use(kind) or kind in COPIED_ITERATORS
    return not is_iterator and is_used_as_it_is(value, kind)


_WALKED = types.FunctionType, types.CellType, nn.Module, type, ContextVar


def is_used_as_it_is(value: Any, kind: type) -> bool:
    """Say whether a value is neither read nor put back."""
    if is_rematerialized(kind):
        return False
    if issubclass(kind, (types.ModuleType, weakref.ref, enum.Enum)):
        return True
    if is_left_alone(kind) and not issubclass(kind, _WEAK):
        return True
    return dict_of(value) is None and not slots_of(kind)


_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
