"""Nodes of containers, of values in one piece, and of registered classes.

Invariant: that of `nodes`, with one exception. What `compared` knows of an iterator or
of a large container holds that.
Rejected: a node for each item. A list of numbers is copied in one piece.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from remat._base.errors import CaptureError
from remat._base.pytree import Registered
from remat._capture.container_kinds import CONTAINERS, refill
from remat._capture.holders import HolderKind
from remat._capture.nodes import (
    Composite,
    MadeNode,
    Node,
    NodePart,
    Rebuilding,
    TensorNode,
    filled,
    named,
)
from remat._capture.objects import attributes, set_attributes


class ContainerNode(Composite):
    """A container, or an instance of a subclass of one.

    Attributes:
        how: it is read and written.
        keys: of a dict, its keys, which are children by the text of their positions.
        items: what it holds, with None for tensors and children. Children are keyed
            by position, and attributes among them by name.
        tensors: the positions of tensors, and their indices among those found.
        entries: the attributes of an instance of a subclass.
    """

    __slots__ = ("_kind", "_limit", "entries", "how", "items", "keys", "tensors")

    def __init__(self, value: Any, how: HolderKind) -> None:
        super().__init__()
        self._kind, self.how = type(value), how
        self._limit = value.maxlen if isinstance(value, deque) else None
        self.keys, self.items = how.held(value)
        self.tensors: list[tuple[int, int]] = []
        self.entries = {} if self._kind in CONTAINERS else attributes(value)
        factory = getattr(value, FACTORY, None) if how.keyed else None
        if factory is not None:
            self.entries[FACTORY] = factory

    @override
    def parts(self) -> Iterator[NodePart]:
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

    def hold_key(self, i: int, node: Node) -> None:
        """Hold a node in place of a key."""
        self.keys[i] = None
        self.children[str(i)] = node

    @override
    def settle(self) -> None:
        super().settle()
        self.live = self.live or bool(self.tensors)

    @override
    def new(self, run: Rebuilding) -> Any:
        how, kind = self.how, self._kind
        new: Any
        if issubclass(kind, frozenset):  # of tensors: in any order
            new = run.built[self.identity] = frozenset.__new__(kind, self._filled(run))
        elif how.frozen:
            new = run.built[self.identity] = how.new(kind, self._filled(run), None)
        else:
            # It may hold itself.
            new = run.built[self.identity] = how.new(kind, (), self._limit)
            refill(how, new, self._filled_keys(run), self._filled(run))
        if self.entries:
            entries = filled(self.entries, self.children, run)
            if FACTORY in entries:
                new.default_factory = entries.pop(FACTORY)
            if entries:
                set_attributes(new, entries)
        return new

    def _filled(self, run: Rebuilding) -> list[Any]:
        """Return the items around a run's tensors."""
        items, tensors = self.items.copy(), run.tensors
        for i, index in self.tensors:
            items[i] = tensors[index]
        for key, child in self.children.items():
            if isinstance(key, int):
                items[key] = child.build(run)
        return items

    def _filled_keys(self, run: Rebuilding) -> list[Any]:
        keys, children = self.keys, self.children
        if None not in keys:
            return keys
        built = ((key, children.get(str(i))) for i, key in enumerate(keys))
        return [key if child is None else child.build(run) for key, child in built]


FACTORY = "default_factory"


class WholeNode(Composite):
    """A value that is not taken apart: a buffer, an iterator, a large container."""

    __slots__ = ("_give",)

    def __init__(self, give: Callable[[], Any]) -> None:
        super().__init__()
        self._give, self.live = give, False

    @override
    def new(self, run: Rebuilding) -> Any:
        new = run.built[self.identity] = self._give()
        return new


# --- Values that only their own class can take apart ---


class RegisteredNode(MadeNode):
    """An instance of a class that is registered as a pytree.

    What it is rebuilt from besides its children is a part like them: it may change, and
    may hold tensors.
    """

    __slots__ = ("_how",)

    def __init__(self, value: Any, how: Registered) -> None:
        self._how = how
        items, context = flattened(value, how)
        texts = [*(f"<child {i}>" for i in range(len(items))), "<rest>"]
        super().__init__(
            lambda parts: how.unflatten(parts[-1], parts[:-1]), [*items, context], texts
        )

    @property
    def items(self) -> Sequence[Any]:
        """Its children, without those that are held as nodes."""
        return self._parts[:-1]

    def now(self, value: Any) -> list[Any]:
        """Return the children that an instance has now."""
        return flattened(value, self._how)[0]


def flattened(value: Any, how: Registered) -> tuple[list[Any], Any]:
    """Return the children of an instance, and what else it is rebuilt from."""
    found: Any = how.flatten(value)
    try:
        children, context = found[:2]
        return [*children], context
    except (KeyError, TypeError, ValueError) as error:
        name, kind = type(value).__qualname__, type(found).__name__
        raise CaptureError(_NO_PAIR.format(name=name, kind=kind)) from error


_NO_PAIR = (
    "remat: the function that {name} is registered with returned a {kind}. It must "
    "return a pair: a list of what holds tensors, and what else is needed to rebuild."
)
