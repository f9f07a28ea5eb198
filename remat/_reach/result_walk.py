"""The walk over what a function returned: finds its tensors, and what holds them.

Invariant: whatever holds a tensor of the run is walked or refused. A value that is
walked stays that very value: see `results`.
Rejected: pytrees. They know few classes, take no cycle, and say nothing of identity.
"""

import enum
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Container,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
)
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from remat._base.code import has_marks
from remat._base.pytree import REGISTERED, registration_of
from remat._base.types import INERT
from remat._reach.holders import MISSING, PART, PARTS, HolderKind, container_kind
from remat._reach.names import (
    NamedSearch,
    Path,
    RegisteredKind,
    held_with_paths,
    kinds_of,
    kinds_of_object,
    written,
)
from remat._reach.objects import (
    by_class,
    can_be_made_anew,
    defines,
    is_left_alone,
    is_spent_by_use,
)
from remat._reach.stream_search import is_stream
from remat._reach.watched import is_bare_buffer
from remat._torch import is_of_torch_func


class Own(NamedTuple):
    """What the user had before the run.

    Attributes:
        originals: the user's own value for each replica, by the replica's identity.
        tensors: for each input, its slot, by the identity of the user's own tensor.
        known: the identities of what the function could reach.
    """

    originals: Mapping[int, Any]
    tensors: Mapping[int, int]
    known: Container[int]


NOTHING = Own({}, {}, ())


class Hidden(NamedTuple):
    """A value in a result, in which remat cannot see."""

    kind: type
    where: str
    why: str

    def told(self, message: str, label: str) -> str:
        """Return a message that names the value, and what to do instead."""
        kind, where, remedy = self.kind.__qualname__, self.where, "Return a list"
        if self.kind.__module__ not in _UNREGISTERED:
            remedy = (
                f"Register the class: `remat.register({kind}, lambda value: "
                f"([value.tensor, ...], None), lambda rest, tensors: {kind}(*tensors))`"
            )
        why = self.why.format(remedy=remedy)
        return message.format(
            label=label, kind=kind, where=where, why=why, remedy=remedy
        )


class Part:
    """A value of a result that holds others.

    Attributes:
        value: it itself.
        frozen: whether it is made again around other tensors, and not changed.
        held: how each of what it holds is read, the keys, and the values.
    """

    __slots__ = ("frozen", "held", "value")

    def __init__(self, value: Any, kinds: Sequence[HolderKind]) -> None:
        self.value, self.frozen = value, kinds[0].frozen
        self.held = [(kind, *kind.held(value)) for kind in kinds]

    def parts(self) -> list[Any]:
        """Return all that it holds."""
        return [part for _, keys, items in self.held for part in (*items, *keys)]


class ResultWalk:
    """A walk over one result, in the order in which a reader meets what it holds.

    Attributes:
        tensors: each once.
        places: where each is, with its index: one may be in several places.
        parts: what holds others, by identity.
        hidden: values that cannot be seen into.
        left: the places in what was left in holders, which is walked last.
        attributes: what was set on tensors that the run computed, by their indices.
    """

    __slots__ = (
        *("_in_holders", "_index", "_later", "_own", "_seen", "attributes", "hidden"),
        *("left", "parts", "places", "tensors"),
    )

    def __init__(
        self, value: Any, own: Own, left: Sequence[Sequence[Any]] = ()
    ) -> None:
        self._own, self._in_holders = own, False
        self.tensors: list[Tensor] = []
        self.places: dict[Path, int] = {}
        self.parts: dict[int, Part] = {}
        self.hidden: list[Hidden] = []
        self._index: dict[int, int] = {}
        self._later: list[tuple[Any, Path]] = []
        self._seen: dict[int, Any] = {}
        self.left: set[Path] = set()
        self.attributes: dict[int, dict[str, Any]] = {}
        self._walk(value, None)
        self._in_holders = True
        for number, values in enumerate(left):
            for n, held in enumerate(values):
                self._walk(held, ((_IN_HOLDERS, number, None), n, None))
        self._in_holders = False

    def _walk(self, value: Any, path: Path) -> None:
        todo: list[tuple[Any, Path]] = [(value, path)]
        while todo:
            value, path = todo.pop()
            if type(value) in INERT or value is MISSING:
                continue
            if self._in_holders and self._is_others(value):
                continue
            if issubclass(type(value), Tensor):
                is_new = self._note(value, path)
                if is_new and value.__dict__ and has_marks(type(value)):
                    todo += self._attributes_of(value, path)
                continue
            value = self._own.originals.get(id(value), value)
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                todo += [*self._visited(value, path)][::-1]

    def _is_others(self, value: Any) -> bool:
        """Say whether a value in a holder is no part of the result, nor leads there."""
        if not issubclass(type(value), Tensor):
            return id(value) in self._own.known  # it is a holder itself
        if id(value) in self._own.tensors:
            return True
        return not (value.requires_grad or is_of_torch_func(value))

    def _attributes_of(self, tensor: Tensor, path: Path) -> list[tuple[Any, Path]]:
        """Return what was set on a tensor: it will be on the tensor of its level."""
        if id(tensor) in self._own.tensors:
            return []
        attributes = self.attributes[self._index[id(tensor)]] = vars(tensor)
        return [(attributes, (path, ".__dict__"))]

    def _note(self, tensor: Tensor, path: Path) -> bool:
        """Note a tensor; say whether it was not met before."""
        index = self._index.setdefault(id(tensor), len(self.tensors))
        is_new = index == len(self.tensors)
        if is_new:
            self.tensors.append(tensor)
        while path in self.places:  # two keys of a dict may be alike
            path = path, "'"
        self.places[path] = index
        if self._in_holders:
            self.left.add(path)
        return is_new

    def _visited(self, value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
        """Do what is done at a value; yield what it holds, with paths."""
        kinds = kinds_in_result(type(value))(self, value, path)
        if not kinds:
            return
        part = self.parts[id(value)] = Part(value, kinds)
        for how, keys, items in part.held:
            yield from held_with_paths(how, type(value), keys, items, path)

    def has_met(self, tensor: Tensor) -> bool:
        """Say whether a tensor is one of those found so far."""
        return id(tensor) in self._index

    def index_in(self, value: Any) -> int | None:
        """Return the index of a tensor of the run; None of what is the user's."""
        return None if id(value) in self._own.tensors else self._index.get(id(value))

    def original(self, value: Any) -> Any:
        """Return what is the user's of a value that stands in for it."""
        return self._own.originals.get(id(value), value)

    def live(self) -> set[int]:
        """Return the identities of what leads to what is exchanged."""
        above: dict[int, list[int]] = {}
        found: set[int] = set()
        for key, part in self.parts.items():
            for held in part.parts():
                if self.index_in(held) is not None or self.original(held) is not held:
                    found.add(key)
                above.setdefault(id(held), []).append(key)
        todo = [*found]
        while todo:
            # Only what is made again is another value to what holds it.
            key = todo.pop()
            if self.parts[key].frozen:
                new = {*above.get(key, ())} - found
                found |= new
                todo += new
        return found

    # --- What it cannot see into ---

    def look_into_functions(self) -> None:
        """Note functions and modules that hold tensors, once the rest is walked."""
        for value, path in self._later:
            if self._leads_to_others(_apart_from_module(value)):
                self.hide(value, path, _CLOSED)

    def later(self, value: Any, path: Path) -> None:
        """Look at a value once the rest of the result is known."""
        if self._in_holders:
            return  # a leak is found by its graph
        if id(value) not in self._own.known:
            self._later.append((value, path))

    def hide(self, value: Any, path: Path, why: str = "") -> None:
        """Note a value in which it cannot see."""
        if self._in_holders or id(value) in self._own.known:
            why = ""
        self.hidden.append(Hidden(type(value), written(path)[1], why))

    def may_give_tensors(self, value: Any) -> bool:
        """Say whether an iterator or view leads to a tensor, or to a replica."""
        seen, pending = {id(value): value}, [value]
        while pending:
            for part in _referents(pending.pop()):
                kind = type(part)
                if issubclass(kind, Tensor) or len(seen) > _MANY:
                    return True
                if kind in INERT or issubclass(kind, _TYPES) or id(part) in seen:
                    continue
                if id(part) in self._own.originals and not issubclass(kind, _CHANGED):
                    return True
                seen[id(part)] = part  # which keeps its identity
                pending.append(part)
        return False

    def _leads_to_others(self, value: Any) -> bool:
        """Say whether a function or module leads to tensors besides the user's own.

        What the result holds anyway, and stays that very value, is not looked at again.
        """
        search, own = NamedSearch(), self._own
        for key, part in self.parts.items():
            if not part.frozen:
                search.seen[key] = part.value
        search.walk(value)
        if not own.originals.keys().isdisjoint(search.seen):
            return True  # to a replica, in place of the user's own object
        return any(id(t) not in own.tensors for t in search.tensors)


def _apart_from_module(value: Any) -> Any:
    """Return what to look at: of a function of a Python module, its defaults alone."""
    if type(value) is not types.FunctionType or value.__closure__ or value.__dict__:
        return value
    module = sys.modules.get(value.__module__)
    if module is None or module.__dict__ is not value.__globals__:
        return value
    return value.__defaults__, value.__kwdefaults__


# --- What is done at a value: how what it holds is read, if it is walked ---

Visit: TypeAlias = Callable[[ResultWalk, Any, Path], Sequence[HolderKind]]


def visit_nothing(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Leave a value as it is."""
    return ()


def visit_later(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Look at a function or a module later."""
    walk.later(value, path)
    return ()


def visit_lazy(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Refuse what computes when it is read."""
    walk.hide(value, path, _LAZY)
    return ()


def visit_walked(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Walk a container, a partial or a method."""
    return kinds_of(value, type(value))


def visit_weak(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Make a reference again to what the result holds, as one in a weak dictionary."""
    there: Any = weakref.ref.__call__(value)
    is_exchanged = issubclass(type(there), Tensor) and walk.has_met(there)
    return [PART] if is_exchanged else ()


def visit_set(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Walk a set, which must not have several tensors: their order is by chance."""
    search = NamedSearch()
    for one in value:
        search.walk(one)
    if len([t for t in search.tensors if not walk.has_met(t)]) > 1:
        walk.hide(value, path, _SET)
    return kinds_of(value, type(value))


def visit_hidden(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Leave what nobody can see into as it is, unless it holds a tensor."""
    walk.hide(value, path, _HOLDS if _tensors_behind(value, []) else "")
    return ()


def visit_iterated(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Leave an iterator or a view as it is, unless it may give tensors."""
    walk.hide(value, path, _GIVES if walk.may_give_tensors(value) else "")
    return ()


def visit_instance(walk: ResultWalk, value: Any, path: Path) -> Sequence[HolderKind]:
    """Walk what an object holds."""
    kind = type(value)
    if kind not in REGISTERED and is_left_alone(kind):
        return visit_hidden(walk, value, path)
    how = registration_of(kind)
    is_plain = can_be_made_anew(kind)
    if how is not None and (kind in REGISTERED or not is_plain):
        return [RegisteredKind(how)]
    kinds = kinds_of_object(value, kind)
    entries = [v for how in kinds for v in how.items(value)]
    if not is_plain and _tensors_behind(value, entries):
        walk.hide(value, path, _HOLDS)
    elif not (is_plain or entries):
        walk.hide(value, path)
    return kinds


@by_class
def kinds_in_result(kind: type, /) -> Visit:
    """Return what to do at the instances of a class."""
    if kind in (types.FunctionType, types.BuiltinFunctionType):
        return visit_later
    if issubclass(kind, nn.Module) or defines(kind, "__remat_options__"):
        return visit_later
    if issubclass(kind, (Generator, Coroutine, AsyncGenerator)):
        return visit_lazy
    if issubclass(kind, (set, frozenset)):
        return visit_set
    if issubclass(kind, weakref.ref) and not issubclass(kind, weakref.WeakMethod):
        return visit_weak
    if issubclass(kind, _AS_THEY_ARE) or is_stream(kind) or is_bare_buffer(kind):
        return visit_nothing
    if _gives_parts(kind):
        return visit_iterated
    is_walked = container_kind(kind) is not None or issubclass(kind, PARTS)
    return visit_walked if is_walked and kind not in REGISTERED else visit_instance


def _gives_parts(kind: type) -> bool:
    """Say whether instances of a class are iterators or views that are not walked."""
    if issubclass(kind, MappingView):
        return is_left_alone(kind)
    if not issubclass(kind, Iterator):
        return False
    return is_spent_by_use(kind) or not can_be_made_anew(kind)


def _referents(value: Any) -> list[Any]:
    """Return what a value refers to, but for the globals of a function."""
    parts = gc.get_referents(value)
    if type(value) is types.FunctionType:
        return [part for part in parts if part is not value.__globals__]
    return parts


def _tensors_behind(value: Any, seen: Any) -> bool:
    """Say whether an object leads to a tensor that is not among those seen."""
    ids = {*map(id, seen)}
    behind = [r for r in gc.get_referents(value) if not issubclass(type(r), _TYPES)]
    nearest = [*behind]
    for one in behind:
        if type(one) is dict:
            nearest += one.values()
        elif type(one) in (list, tuple):
            nearest += one
    return any(issubclass(type(r), Tensor) and id(r) not in ids for r in nearest)


_AS_THEY_ARE = (types.ModuleType, type, enum.Enum, weakref.ref, *weakref.ProxyTypes)
_IN_HOLDERS = (None, " left in a holder")
_MANY = 10_000  # objects: what leads to more is taken to lead to a tensor
_TYPES = (type, types.ModuleType)
_CHANGED = (list, dict, set, deque)
_CLOSED = (
    "leads to a tensor that the function computed. Return that tensor, and make the "
    "rest outside"
)
_LAZY = "computes when it is read. Return a list"
_GIVES = "holds a tensor, or computes one when it is read. Return a list"
_SET = "has several tensors in an order that is by chance. Return a list"
_HOLDS = "holds a tensor where remat cannot see it. {remedy}"
# The modules of classes that nobody can make from tensors.
_UNREGISTERED = ("builtins", "itertools")
