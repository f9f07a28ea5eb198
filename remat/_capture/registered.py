"""Nodes of values that only their own class, or a view of them, can take apart.

Invariant: that of `nodes`. What a class is rebuilt from besides its children is a part
like them: it may change, and may hold tensors.
Rejected: the registry alone. A read-only mapping cannot be registered with attributes.
"""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from remat._base.errors import CaptureError
from remat._base.interpreter import mapping_of
from remat._base.pytree import Registered
from remat._capture.nodes import Building, Composite, Node, Part


class RegisteredNode(Composite):
    """An instance of a class that is registered as a pytree.

    Children are keyed by position, and `None` is the key of what else there is.
    """

    __slots__ = ("_context", "_how", "items")

    def __init__(self, value: Any, how: Registered) -> None:
        super().__init__()
        self._how = how
        self.items, self._context = taken_apart(value, how)

    @override
    def parts(self) -> Iterator[Part]:
        for i, item in enumerate(self.items):
            yield i, item, f"<child {i}>"
        yield None, self._context, "<rest>"

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        if key is None:
            self._context = None
        else:
            self.items[key] = None

    @override
    def new(self, run: Building) -> Any:
        items, context = self.items.copy(), self._context
        for key, child in self.children.items():
            if key is None:
                context = child.build(run)
            else:
                items[key] = child.build(run)
        new = run.built[self.identity] = self._how.unflatten(context, items)
        return new

    def now(self, value: Any) -> list[Any]:
        """Return the children that an instance has now."""
        return taken_apart(value, self._how)[0]


def taken_apart(value: Any, how: Registered) -> tuple[list[Any], Any]:
    """Return the children of an instance, and what else it is rebuilt from.

    Raises:
        CaptureError: its class is registered with a function that returns no such pair.
    """
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


class ProxyNode(Composite):
    """A read-only view of a mapping."""

    __slots__ = ("_mapping",)

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._mapping = mapping_of(value)

    @override
    def parts(self) -> Iterator[Part]:
        yield "mapping", self._mapping, ""

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self._mapping = None

    @override
    def new(self, run: Building) -> Any:
        mapping = self._mapping
        for child in self.children.values():
            mapping = child.build(run)
        new = run.built[self.identity] = MappingProxyType(mapping)
        return new
