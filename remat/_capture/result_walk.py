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
    Container,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
)
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from remat._base.pytree import REGISTERED, registration_of
from remat._base.types import INERT
from remat._capture.nodes import Node, ObjectNode, TensorNode
from remat._capture.objects import (
    by_class,
    can_be_made_anew,
    defines,
    is_buffer,
    is_left_alone,
    is_spent_by_use,
)
from remat._capture.paths import Path, written
from remat._capture.search import CallSearch, visit_container, visit_registered
from remat._capture.stream_search import is_stream
from remat._capture.walk import Visit
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


class OwnNode(Node):
    """A value of the user's, of which the run had a replica."""

    __slots__ = ("_node", "_value")

    def __init__(self, value: Any, node: Node | None) -> None:
        self._value, self._node = value, node

    @override
    def build(self, run: Any) -> Any:
        return self._value if self._node is None else self._node.build(run)


class ResultWalk(CallSearch):
    """A walk over one result."""

    __slots__ = ("_in_holders", "_later", "_own", "hidden", "left", "places", "tensors")

    def __init__(self, own: Own) -> None:
        super().__init__()
        self.tensors, self._own = self.found.tensors, own
        self.places: dict[Path, int] = {}
        self.hidden: list[Hidden] = []
        self._later: list[tuple[Any, Path]] = []
        self._in_holders = False
        self.left: set[Path] = set()  # places of what was left in holders

    def visit_left(self, values: Sequence[Any], number: int) -> dict[int, Node]:
        """Walk what was left in a holder; return the nodes of what leads to tensors."""
        self._in_holders = True
        found: dict[int, Node] = {}
        for n, value in enumerate(values):
            before = len(self.left)
            node = self.visit(value, ((_IN_HOLDERS, number, None), n, None))
            if node is not None and len(self.left) > before:
                found[n] = node
        return found

    def look_into_functions(self) -> None:
        """Note functions and modules that hold tensors, once the rest is walked."""
        for value, path in self._later:
            if self._leads_to_others(value):
                self.hide(value, path, _CLOSED)

    @override
    def visit(self, value: Any, path: Path) -> Node | None:
        kind = type(value)
        if kind in INERT or (self._in_holders and self._is_others(value)):
            return None
        if issubclass(kind, Tensor):
            index = self.found.index_of(value, path)
            while path in self.places:  # two keys of a dict may be alike
                path = path, "'"
            self.places[path] = index
            if self._in_holders:
                self.left.add(path)
            return None if id(value) in self._own.tensors else TensorNode.of(index)
        original = self._own.originals.get(id(value))
        if original is not None:
            return OwnNode(original, super().visit(original, path))
        return super().visit(value, path)

    @staticmethod
    @override
    @by_class
    def visit_of(kind: type, /) -> Visit:
        if kind in (types.FunctionType, types.BuiltinFunctionType):
            return visit_later
        if issubclass(kind, nn.Module) or defines(kind, "__remat_options__"):
            return visit_later
        if issubclass(kind, (Generator, Coroutine, AsyncGenerator)):
            return visit_lazy
        if issubclass(kind, (set, frozenset)):
            return visit_set
        if issubclass(kind, _AS_THEY_ARE) or is_stream(kind) or is_buffer(kind):
            return visit_nothing
        if _gives_parts(kind):
            return visit_iterated
        visit = CallSearch.visit_of(kind)
        return visit_instance if visit.__name__ == "visit_object" else visit

    def _is_others(self, value: Any) -> bool:
        """Say whether a value in a holder is no part of the result, nor leads there."""
        if not issubclass(type(value), Tensor):
            return id(value) in self._own.known  # it is a holder itself
        if id(value) in self._own.tensors:
            return True
        return not (value.requires_grad or is_of_torch_func(value))

    def later(self, value: Any, path: Path) -> None:
        """Look at a value once the rest of the result is known."""
        if self._in_holders:
            return  # a leak is found by its graph
        if id(value) not in self._own.known and not _is_of_module(value):
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
            for part in _parts_of(pending.pop()):
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
        search = CallSearch()
        for known, node in self.walked():
            if node is not None and is_changed(node, known):
                search.remember(known, None)
        search.visit(value, None)
        own = self._own
        if any(id(known) in own.originals for known, _ in search.walked()):
            return True  # to a replica, in place of the user's own object
        return any(id(t) not in own.tensors for t in search.found.tensors)


def _is_of_module(value: Any) -> bool:
    """Say whether a value is a function that refers to a Python module alone."""
    if type(value) is not types.FunctionType or value.__closure__ or value.__dict__:
        return False
    module = sys.modules.get(value.__module__)
    return module is not None and module.__dict__ is value.__globals__


def is_changed(node: Node, value: Any) -> bool:
    """Say whether a value stays the same value, and its tensors are exchanged."""
    return isinstance(node, ObjectNode) or issubclass(type(value), _CHANGED)


# --- What is done at a value ---


def visit_nothing(walk: Any, value: Any, path: Path) -> None:
    """Leave a value as it is."""


def visit_later(walk: Any, value: Any, path: Path) -> None:
    """Look at a function or a module later."""
    walk.remember(value, None)
    walk.later(value, path)


def visit_lazy(walk: Any, value: Any, path: Path) -> None:
    """Refuse what computes when it is read."""
    walk.hide(value, path, _LAZY)


def visit_set(walk: Any, value: Any, path: Path) -> Node | None:
    """Walk a set, which must not have several tensors: their order is by chance."""
    before = len(walk.tensors)
    node = visit_container(walk, value, path)
    if len(walk.tensors) > before + 1:
        walk.hide(value, path, _SET)
    return node


def visit_hidden(walk: Any, value: Any, path: Path) -> None:
    """Leave what nobody can see into as it is, unless it holds a tensor."""
    walk.remember(value, None)
    walk.hide(value, path, _HOLDS if _tensors_behind(value, []) else "")


def visit_iterated(walk: Any, value: Any, path: Path) -> None:
    """Leave an iterator or a view as it is, unless it may give tensors."""
    walk.remember(value, None)
    walk.hide(value, path, _GIVES if walk.may_give_tensors(value) else "")


def visit_instance(walk: Any, value: Any, path: Path) -> Node | None:
    """Walk what an object holds."""
    kind = type(value)
    if kind not in REGISTERED and is_left_alone(kind):
        return visit_hidden(walk, value, path)
    how = registration_of(kind)
    is_plain = can_be_made_anew(kind)
    if how is not None and (kind in REGISTERED or not is_plain):
        return visit_registered(walk, value, how, path)
    node = ObjectNode(value)
    if not is_plain and _tensors_behind(value, node.entries.values()):
        walk.hide(value, path, _HOLDS)
    elif not (is_plain or node.entries):
        walk.hide(value, path)
    return walk.walk_parts(value, node, path)


def _gives_parts(kind: type) -> bool:
    """Say whether instances of a class are iterators or views that are not walked."""
    if issubclass(kind, MappingView):
        return is_left_alone(kind)
    if not issubclass(kind, Iterator):
        return False
    return is_spent_by_use(kind) or not can_be_made_anew(kind)


def _parts_of(value: Any) -> list[Any]:
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


_AS_THEY_ARE = (types.ModuleType, type, enum.Enum, weakref.ref)
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
