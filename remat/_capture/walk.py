"""The walk over what a call refers to: each value once.

Invariant: a value that was walked is held until the walk is forgotten, so that its
identity is not used again. Rejected: a list of visited identities alone, for the same
reason.
"""

from collections.abc import Callable, Container
from typing import Any, TypeAlias

from remat._base.types import INERT, TENSORS
from remat._capture.callables import CellNode, FunctionNode
from remat._capture.found import Found
from remat._capture.nodes import Composite, Node, TensorNode
from remat._capture.paths import Path


class Walk:
    """One walk.

    Attributes:
        cells: the variables of functions that are being walked, outermost first.
        found: what was found, besides nodes.
        is_compiled: whether the walk is inside of compiled code.
        is_sharded: whether it is inside of a module whose parameters FSDP exchanges.
    """

    __slots__ = ("_nodes", "_open", "cells", "found", "is_compiled", "is_sharded")

    def __init__(self) -> None:
        self.found = Found()
        self.is_compiled = self.is_sharded = False
        self.cells: list[CellNode] = []
        self._nodes: dict[int, tuple[Any, Node | None]] = {}
        self._open: set[int] = set()  # what is being walked

    @staticmethod
    def visit_of(kind: type, /) -> "Visit":
        """Return what to do at the instances of a class."""
        raise NotImplementedError

    def visit(self, value: Any, path: Path) -> Node | None:
        """Return how to make a value again; None if it is the same at any time."""
        kind = type(value)
        if kind in INERT:
            return None
        if kind in TENSORS:
            return TensorNode.of(self.found.index_of(value, path))
        key = id(value)
        known = self._nodes.get(key)
        if known is not None:
            if key in self._open:
                for cell in self.cells:
                    cell.may_hold_itself = True
            return known[1]
        self._open.add(key)
        node = self.visit_of(kind)(self, value, path)
        self._open.discard(key)
        if isinstance(node, Composite):
            node.identity = key
        return node

    def remember(self, value: Any, node: Node | None) -> None:
        """Remember the node of a value, before its parts are walked: one may be it."""
        self._nodes[id(value)] = value, node

    def walk_parts(self, value: Any, node: Composite, path: Path) -> Composite:
        """Walk the parts of a value, which may be others later."""
        found = self.found
        self._nodes[id(value)] = value, node
        found.code.append(type(value))
        if type(node) is not FunctionNode and not found.in_arguments:
            found.is_contained = False
        for key, part, text in node.parts():
            if type(part) not in INERT:
                child = self.visit(part, (path, text))
                if child is not None:
                    node.hold(key, child)
        node.settle()
        return node

    def walk_fixed(self, value: Any, node: Composite, path: Path) -> Composite | None:
        """Walk the parts of a value that is always the same if they are."""
        self.walk_parts(value, node, path)
        if node.children:
            return node
        self._nodes[id(value)] = value, None
        return None

    def walked(self) -> list[tuple[Any, Any]]:
        """Return each value walked, and its node."""
        return [*self._nodes.values()]

    def known(self) -> Container[int]:
        """Return the identities of the values walked."""
        return self._nodes.keys()

    def originals(self) -> dict[int, Any]:
        """Return the user's own value for each node, by the identity of the node."""
        pairs = self._nodes.values()
        return {id(node): value for value, node in pairs if node is not None}


Visit: TypeAlias = Callable[[Walk, Any, Path], Node | None]
