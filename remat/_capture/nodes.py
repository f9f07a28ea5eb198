"""Nodes: what a search found, as data. Each is a value as it was, and makes it again.

A node holds the parts of its value. `build` makes the value around the tensors of a
run. The run decides which objects are made anew and which are set back (`runs`).

Invariant: no node holds a tensor, nor a module, object, container or closure of the
user's. A graph holds its calls where Python's garbage collector does not look: if a
call led back to what it computed, neither would ever be freed. Three nodes hold what
nothing else would find again: a large container, an iterator, and an object that cannot
be made anew.
Rejected: `copy.deepcopy`. It runs the user's code, and copies what nobody changes. To
assign to the variables of the user's functions, and back: other threads read them.
"""

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

from typing_extensions import override

from remat._base.types import INERT
from remat._capture.holders import MISSING, content_of
from remat._capture.objects import attributes, can_be_made_anew


class Rebuilding(Protocol):
    """What a node asks of a run."""

    tensors: Any
    built: dict[int, Any]  # by identity of what each stands for

    def make(self, node: "Composite") -> Any:
        """Return the value of a node that was not built yet."""

    def make_object(self, node: "ObjectNode") -> Any:
        """Return an object that holds what it held."""

    def make_view(self, node: Any) -> Any:
        """Return a view of a module."""


class Node:
    """How to make one value.

    Attributes:
        live: whether it leads to a tensor.
    """

    __slots__ = ()
    live = True

    def build(self, run: Rebuilding) -> Any:
        """Return the value around the run's tensors."""
        raise NotImplementedError


class TensorNode(Node):
    """A tensor, by its index among those found."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    @staticmethod
    def of(index: int) -> "TensorNode":
        """Return the node of a tensor; there is one for each index."""
        while index >= len(_TENSOR_NODES):
            _TENSOR_NODES.append(TensorNode(len(_TENSOR_NODES)))
        return _TENSOR_NODES[index]

    @override
    def build(self, run: Rebuilding) -> Any:
        """Return the run's tensor."""
        return run.tensors[self.index]


_TENSOR_NODES: list[TensorNode] = []
NodePart = tuple[Any, Any, str]  # key, value, and how it is written


class Composite(Node):
    """A value made of others, which may refer to itself: built once a run.

    Attributes:
        identity: of the value. Two nodes may be of one value: of two modules, say, that
            hold the same list.
        children: how to make those parts that are not plain, by key.
        live: as of `Node`; True until the search of the value has ended.
    """

    __slots__ = ("children", "identity", "live")

    def __init__(self) -> None:
        self.identity = 0
        self.children: dict[Any, Node] = {}
        self.live = True

    def parts(self) -> Iterator[NodePart]:
        """Yield what the value holds that may be more than plain."""
        raise NotImplementedError

    def hold(self, key: Any, node: Node) -> None:
        """Hold a node in place of a part."""
        self.children[key] = node

    def settle(self) -> None:
        """End the search of this value."""
        self.live = any(child.live for child in self.children.values())

    @override
    def build(self, run: Rebuilding) -> Any:
        """Return the value, the same one each time in a run."""
        built = run.built.get(self.identity)
        return run.make(self) if built is None else built

    def new(self, run: Rebuilding) -> Any:
        """Make the value anew."""
        raise NotImplementedError


class MadeNode(Composite):
    """A value that a function makes of its parts: a partial, a method, a view."""

    __slots__ = ("_make", "_parts", "_texts")

    def __init__(
        self, make: Callable[[list[Any]], Any], parts: list[Any], texts: Sequence[str]
    ) -> None:
        super().__init__()
        self._make, self._parts, self._texts = make, parts, texts

    @override
    def parts(self) -> Iterator[NodePart]:
        yield from zip(itertools.count(), self._parts, self._texts, strict=False)

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self._parts[key] = None

    @override
    def new(self, run: Rebuilding) -> Any:
        parts = self._parts.copy()
        for i, child in self.children.items():
            parts[i] = child.build(run)
        new = run.built[self.identity] = self._make(parts)
        return new


def named(entries: dict[str, Any]) -> Iterator[NodePart]:
    """Yield attributes as parts."""
    for name, value in entries.items():
        yield name, value, f".{name}"


def filled(
    entries: dict[str, Any], children: dict[Any, Node], run: Rebuilding
) -> dict[str, Any]:
    """Return attributes around a run's tensors."""
    contents = entries.copy()
    for name, child in children.items():
        if name in contents:
            contents[name] = child.build(run)
    return contents


class ObjectNode(Composite):
    """An object, its children keyed by attribute."""

    __slots__ = ("entries", "kind", "ref")

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.kind = type(value)
        self.ref = _reference_to(value)
        self.entries = attributes(value)

    @override
    def parts(self) -> Iterator[NodePart]:
        return named(self.entries)

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self.entries[key] = None

    @override
    def new(self, run: Rebuilding) -> Any:
        return run.make_object(self)

    def contents(self, run: Rebuilding, value: Any) -> dict[str, Any]:
        """Return what it held, around the run's tensors."""
        del value
        contents = self.entries.copy()
        for name, child in self.children.items():
            contents[name] = child.build(run)
        return contents


def _reference_to(value: Any) -> Callable[[], Any]:
    """Return what gives an object, or None if it is gone or cannot be watched."""
    if not can_be_made_anew(type(value)):
        return lambda: value
    try:
        return weakref.ref(value)
    except TypeError:  # of a class with slots
        return lambda: None


# --- Functions and their variables ---


class CellNode(Composite):
    """A variable of an outer function, which several functions may share.

    Attributes:
        may_hold_itself: whether it may hold a function that it belongs to.
    """

    __slots__ = ("_content", "may_hold_itself")

    def __init__(self, cell: types.CellType) -> None:
        super().__init__()
        self.may_hold_itself = False
        self._content = content_of(cell)

    @override
    def parts(self) -> Iterator[NodePart]:
        if self._content is not MISSING:
            yield "content", self._content, ""

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self._content = None

    @override
    def new(self, run: Rebuilding) -> Any:
        """Make an empty cell. What it holds may be the function that it belongs to."""
        new = run.built[self.identity] = types.CellType()
        return new

    def fill(self, run: Rebuilding) -> None:
        """Put in what the variable held."""
        content = self._content
        for child in self.children.values():
            content = child.build(run)
        if content is not MISSING:
            run.built[self.identity].cell_contents = content


class FunctionNode(Composite):
    """A Python function, with its variables and those globals that may change.

    Children are keyed by position for variables, by `(where, name)` for the rest.
    """

    __slots__ = (
        *("_cells", "_entries", "_name"),
        *("code", "scope", "stores", "variables"),
    )

    def __init__(
        self, fn: types.FunctionType, names: Sequence[str], stores: Sequence[str]
    ) -> None:
        super().__init__()
        self.code, self.scope, self.stores = fn.__code__, fn.__globals__, stores
        scope = self.scope
        self.variables = {n: scope[n] for n in names if n in scope}
        self._cells: Any = fn.__closure__ or ()
        self._name = fn.__name__
        self._entries = {
            "__defaults__": fn.__defaults__,
            "__kwdefaults__": fn.__kwdefaults__,
            "__qualname__": fn.__qualname__,
            "__module__": fn.__module__,
            **fn.__dict__,
        }

    @override
    def parts(self) -> Iterator[NodePart]:
        for i, cell in enumerate(self._cells):
            yield i, cell, self.code.co_freevars[i]
        for name, value in self.variables.items():
            yield ("global", name), value, name
        for name, value in self._entries.items():
            if type(value) not in INERT:  # of most functions, all are
                yield ("entry", name), value, f"{self._name}.{name}"

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        if isinstance(key, tuple):
            where, name = key
            (self.variables if where == "global" else self._entries)[name] = None

    @override
    def settle(self) -> None:
        super().settle()
        self._cells = [self.children.pop(i) for i in range(len(self._cells))]

    @property
    def is_settled(self) -> bool:
        """Whether it does the same as long as nobody changes the function itself."""
        return not (self.children or self.variables or self._cells)

    @override
    def new(self, run: Rebuilding) -> Any:
        fresh = [cell for cell in self._cells if cell.identity not in run.built]
        cells = tuple([cell.build(run) for cell in self._cells])
        scope = self._scope_of_run()
        new = types.FunctionType(self.code, scope, self._name, closure=cells)
        run.built[self.identity] = new  # what it refers to may be this very function
        entries = self._entries.copy()
        for (where, name), child in self.children.items():
            (scope if where == "global" else entries)[name] = child.build(run)
        for name in _SPECIAL:
            setattr(new, name, entries.pop(name))
        new.__dict__.update(entries)
        for cell in fresh:
            cell.fill(run)
        return new

    def _scope_of_run(self) -> dict[str, Any]:
        """Return the globals for a run: a copy if some of them are to be others."""
        scope, then = self.scope, self.variables
        now = map(scope.get, then, repeat(MISSING))
        is_same = all(map(operator.is_, now, then.values()))
        return scope if is_same and not self.stores else {**scope, **then}


_SPECIAL = ("__defaults__", "__kwdefaults__", "__qualname__", "__module__")
