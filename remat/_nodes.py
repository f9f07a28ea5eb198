"""What a search found, as data: each value as it was at the call, and how to make it.

A node holds what its value held, part by part. `build` makes the value again around the
tensors of a run. Which objects are made anew and which are set back in place is for the
run to say (`_restore`).

Invariant: no node holds a tensor, nor a module, object, container or closure of the
user's. The graph holds a call where Python's garbage collector does not see it: if the
call led back to what it computed, both would live forever.
Rejected: `copy.deepcopy`. It runs the user's code, and copies what nobody changes.
"""

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from typing_extensions import override

from remat._errors import RecomputeError
from remat._kinds import SEQUENCES, can_be_made_anew
from remat._objects import attributes, identities, set_attributes


class Building(Protocol):
    """What a node asks of a run.

    Attributes:
        tensors: stand for those found.
        built: the values made so far, by the identity of their nodes.
    """

    tensors: Any
    built: dict[int, Any]

    def make(self, node: "Composite") -> Any:
        """Return the value of a node that was not built yet."""

    def make_object(self, node: "ObjectNode") -> Any:
        """Return an object that holds what it held."""


class Node:
    """How to make one value.

    Attributes:
        live: whether it leads to a tensor.
    """

    __slots__ = ()
    live = True

    def build(self, run: Building) -> Any:
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
    def build(self, run: Building) -> Any:
        """Return the run's tensor."""
        return run.tensors[self.index]


_TENSOR_NODES: list[TensorNode] = []
_Part = tuple[Any, Any, str]  # key, value, and how it is written


class Composite(Node):
    """A value made of others, which may refer to itself: built once a run.

    Attributes:
        children: how to make those parts that are not plain, by key.
        live: taken for granted until the search of the value has ended.
    """

    __slots__ = ("children", "live")

    def __init__(self) -> None:
        self.children: dict[Any, Node] = {}
        self.live = True

    def parts(self) -> Iterator[_Part]:
        """Yield what the value holds that may be more than plain."""
        raise NotImplementedError

    def hold(self, key: Any, node: Node) -> None:
        """Hold a node in place of a part."""
        self.children[key] = node

    def settle(self) -> None:
        """End the search of this value."""
        self.live = any(child.live for child in self.children.values())

    @override
    def build(self, run: Building) -> Any:
        """Return the value, the same one each time in a run."""
        built = run.built.get(id(self))
        return run.make(self) if built is None else built

    def new(self, run: Building) -> Any:
        """Make the value anew."""
        raise NotImplementedError


# --- Containers ---


class ContainerNode(Composite):
    """A container, or an instance of a subclass of one.

    Attributes:
        items: what it holds, None in place of tensors and children. The latter are
            keyed by position, by name if they are attributes.
        tensors: the positions of tensors, and their indices among those found.
        entries: the attributes of an instance of a subclass.
    """

    __slots__ = ("_base", "_kind", "entries", "items", "tensors")

    def __init__(self, value: Any, bases: Sequence[type], items: list[Any]) -> None:
        super().__init__()
        self._kind: Any = type(value)
        self._base: Any = _base_of(self._kind, bases)
        self.items = items
        self.tensors: list[tuple[int, int]] = []
        self.entries = {} if self._kind is self._base else attributes(value)

    @override
    def parts(self) -> Iterator[_Part]:
        yield from named(self.entries)

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self.entries[key] = None

    def hold_item(self, i: int, node: Node) -> None:
        """Hold a node in place of an item."""
        self.items[i] = None
        if type(node) is TensorNode:
            self.tensors.append((i, node.index))
        else:
            self.children[i] = node

    @override
    def settle(self) -> None:
        super().settle()
        self.live = self.live or bool(self.tensors)

    def _filled(self, run: Building) -> list[Any]:
        """Return the items around a run's tensors."""
        items, tensors = self.items.copy(), run.tensors
        for i, index in self.tensors:
            items[i] = tensors[index]
        for key, child in self.children.items():
            if isinstance(key, int):
                items[key] = child.build(run)
        return items

    def _give_entries(self, new: Any, run: Building) -> None:
        if self.entries:
            set_attributes(new, filled(self.entries, self.children, run))


class SequenceNode(ContainerNode):
    """A list, tuple, set, frozenset or deque."""

    __slots__ = ("_rest",)

    def __init__(self, value: Any) -> None:
        super().__init__(value, SEQUENCES, [*value])
        self._rest = (value.maxlen,) if self._base is deque else ()

    @override
    def new(self, run: Building) -> Any:
        base, kind = self._base, self._kind
        if base in (tuple, frozenset):
            is_struct = hasattr(kind, "n_sequence_fields")
            make: Any = kind if is_struct else functools.partial(base.__new__, kind)
            new = run.built[id(self)] = make(self._filled(run))
        else:
            new = base.__new__(kind)
            run.built[id(self)] = new  # it may hold itself
            base.__init__(new, self._filled(run), *self._rest)
        self._give_entries(new, run)
        return new


class DictNode(ContainerNode):
    """A dict.

    Attributes:
        keys: its keys, which are children by `~position`.
    """

    __slots__ = ("_has_factory", "keys")

    def __init__(self, value: Any) -> None:
        super().__init__(value, (OrderedDict, dict), [*value.values()])
        self.keys = [*value]
        factory = getattr(value, "default_factory", None)
        self._has_factory = factory is not None
        if self._has_factory:
            self.entries["default_factory"] = factory

    def hold_key(self, i: int, node: Node) -> None:
        """Hold a node in place of a key."""
        self.keys[i] = None
        self.children[str(i)] = node

    @override
    def new(self, run: Building) -> Any:
        new = self._base.__new__(self._kind)
        run.built[id(self)] = new  # it may hold itself
        keys, values = self.keys, self._filled(run)
        if None in keys:
            built = ((k, self.children.get(str(i))) for i, k in enumerate(keys))
            keys = [key if child is None else child.build(run) for key, child in built]
        if self._base is dict:
            dict.update(new, zip(keys, values, strict=True))
        else:
            for key, value in zip(keys, values, strict=True):
                OrderedDict.__setitem__(new, key, value)
        self._give_entries(new, run)
        return new

    @override
    def _give_entries(self, new: Any, run: Building) -> None:
        if not self.entries:
            return
        entries = filled(self.entries, self.children, run)
        if self._has_factory:  # which is in no `__dict__`
            new.default_factory = entries.pop("default_factory")
        if entries:
            set_attributes(new, entries)


def _base_of(kind: type, bases: Sequence[type]) -> type:
    return kind if kind in bases else next(b for b in bases if issubclass(kind, b))


def named(entries: dict[str, Any]) -> Iterator[_Part]:
    """Yield attributes as parts."""
    for name, value in entries.items():
        yield name, value, f".{name}"


def filled(
    entries: dict[str, Any], children: dict[Any, Node], run: Building
) -> dict[str, Any]:
    """Return attributes around a run's tensors."""
    contents = entries.copy()
    for name, child in children.items():
        if name in contents:
            contents[name] = child.build(run)
    return contents


class LargeNode(Composite):
    """A container of many entries: not copied in each call, only compared.

    This one holds the container itself, since nothing else would find it again.
    """

    __slots__ = ("_count", "_identities", "_name", "_value")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__()
        self._value, self._name, self.live = value, name, False
        self._count, self._identities = len(value), _identities_of(value)

    @override
    def new(self, run: Building) -> Any:
        """Return the container; without what was added to its end, if something was.

        Raises:
            RecomputeError: it holds something else than it did.
        """
        value, now = self._value, _identities_of(self._value)
        if now != self._identities:
            pairs = zip(now, self._identities, strict=True)
            grew = all(a.startswith(b) for a, b in pairs)
            if not grew or type(value) not in _GROWING:
                count = f"{len(value):,}"
                raise RecomputeError(_LARGE.format(name=self._name, count=count))
            value = _cut(value, self._count)
        run.built[id(self)] = value
        return value


def _identities_of(value: Any) -> tuple[bytes, ...]:
    items = identities(value)
    return (items, identities(value.values())) if isinstance(value, dict) else (items,)


def _cut(value: Any, count: int) -> Any:
    """Return a copy of the first entries of a container."""
    new = copy.copy(value)
    take = new.popitem if isinstance(new, dict) else new.pop
    for _ in range(len(new) - count):
        take()
    return new


_GROWING = (list, deque, dict, OrderedDict, defaultdict)


_LARGE = (
    "remat: `{name}` changed since the call. It has {count} entries, too many to be "
    "copied in each call, and a recomputation would read it as it is now. Pass what is "
    "needed of it as an argument, or change it after the backward."
)


class CopyNode(Composite):
    """A value that only `copy.copy` copies: an iterator, or a buffer of numbers."""

    __slots__ = ("_copy",)

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._copy, self.live = copy.copy(value), False

    @override
    def new(self, run: Building) -> Any:
        new = run.built[id(self)] = copy.copy(self._copy)
        return new


# --- What can be called ---


class PartialNode(Composite):
    """A `functools.partial`."""

    __slots__ = ("_kind", "_parts")

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._kind = type(value)
        self._parts = [value.func, value.args, value.keywords]

    @override
    def parts(self) -> Iterator[_Part]:
        for i, part in enumerate(self._parts):
            yield i, part, ""

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self._parts[key] = None

    @override
    def new(self, run: Building) -> Any:
        parts = self._parts.copy()
        for i, child in self.children.items():
            parts[i] = child.build(run)
        fn, args, kwargs = parts
        new = run.built[id(self)] = self._kind(fn, *args, **kwargs)
        return new


class MethodNode(Composite):
    """A bound method, of a Python class or of a built-in one."""

    __slots__ = ("_function", "_owner")

    def __init__(self, function: Any, owner: Any) -> None:
        super().__init__()
        self._function, self._owner = function, owner

    @override
    def parts(self) -> Iterator[_Part]:
        yield "function", self._function, ""
        yield "owner", self._owner, "self"

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        if key == "owner":
            self._owner = None
        else:
            self._function = None

    @override
    def new(self, run: Building) -> Any:
        children = self.children
        owner, function = self._owner, self._function
        if "owner" in children:
            owner = children["owner"].build(run)
        if "function" in children:
            function = children["function"].build(run)
        if isinstance(function, str):
            new = getattr(owner, function)
        else:
            new = types.MethodType(function, owner)
        run.built[id(self)] = new
        return new


class WrapperNode(Composite):
    """Another function's remat."""

    __slots__ = ("_kind", "_rest", "_wrapped")

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._kind, self._rest = type(value), value.__remat_options__
        self._wrapped = value.__wrapped__

    @override
    def parts(self) -> Iterator[_Part]:
        yield "fn", self._wrapped, ""

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self._wrapped = None

    @override
    def new(self, run: Building) -> Any:
        fn = self.children["fn"].build(run) if self.children else self._wrapped
        new = run.built[id(self)] = self._kind(fn, *self._rest)
        return new


class CellNode(Composite):
    """A variable of an outer function, which several functions may share."""

    __slots__ = ("_content",)

    def __init__(self, cell: types.CellType) -> None:
        super().__init__()
        self._content = content_of(cell)

    @override
    def parts(self) -> Iterator[_Part]:
        if self._content is not EMPTY:
            yield "content", self._content, ""

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self._content = None

    @override
    def new(self, run: Building) -> Any:
        """Make an empty cell: what it holds may be the function that has it."""
        new = run.built[id(self)] = types.CellType()
        return new

    def fill(self, run: Building) -> None:
        """Put in what the variable held."""
        content = self._content
        for child in self.children.values():
            content = child.build(run)
        if content is not EMPTY:
            run.built[id(self)].cell_contents = content


EMPTY = object()


def content_of(cell: types.CellType) -> Any:
    """Return what a variable holds; `EMPTY` if it was not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


class FunctionNode(Composite):
    """A Python function, with its variables and those globals that may change.

    Children are keyed by position for variables, by `(where, name)` for the rest.

    Attributes:
        code: of the function.
        scope: its globals, the user's own.
        stores: the names of globals that it assigns.
        variables: the globals that are not settled, as they were.

    Args:
        fn: the function.
        names: of the globals that are not settled.
        stores: see above.
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
    def parts(self) -> Iterator[_Part]:
        for i, cell in enumerate(self._cells):
            yield i, cell, self.code.co_freevars[i]
        for name, value in self.variables.items():
            yield ("global", name), value, name
        for name, value in self._entries.items():
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
    def new(self, run: Building) -> Any:
        fresh = [cell for cell in self._cells if id(cell) not in run.built]
        cells = tuple([cell.build(run) for cell in self._cells])
        scope = self._scope_of_run()
        new = types.FunctionType(self.code, scope, self._name, closure=cells)
        run.built[id(self)] = new  # what it refers to may be this very function
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
        scope = self.scope
        changed = any(scope.get(n, EMPTY) is not v for n, v in self.variables.items())
        if changed or self.stores:
            return {**scope, **self.variables}
        return scope


_SPECIAL = ("__defaults__", "__kwdefaults__", "__qualname__", "__module__")


# --- Objects ---


class ObjectNode(Composite):
    """An object, its children keyed by attribute.

    Attributes:
        kind: its class.
        ref: returns it, or None once it is gone.
        entries: its attributes, without those that are children.
    """

    __slots__ = ("entries", "kind", "ref")

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.kind = type(value)
        self.ref = _reference_to(value)
        self.entries = attributes(value)

    @override
    def parts(self) -> Iterator[_Part]:
        return named(self.entries)

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self.entries[key] = None

    @override
    def new(self, run: Building) -> Any:
        return run.make_object(self)

    def contents(self, run: Building, value: Any) -> dict[str, Any]:
        """Return what it held, around the run's tensors.

        Args:
            run: the run.
            value: the object, None if it is gone.
        """
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
        return _nothing


def _nothing() -> None:
    return None
