"""The walk over what a call refers to: each value once; and what it finds.

Invariant: a value that was walked is held until the walk is forgotten, so that its
identity is not used again. Rejected: a list of visited identities alone, for the same
reason.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any, TypeAlias

from torch import Tensor

from remat._base.code import static_of
from remat._base.types import INERT, TENSORS
from remat._capture.nodes import CellNode, Composite, FunctionNode, Node, TensorNode
from remat._capture.paths import Path
from remat._capture.stream_search import StreamSearch


class Findings:
    """What a walk found besides nodes. Each tensor has one index, in order.

    Attributes:
        tensors: each once, in order.
        origins: the path of each.
        buffers: the tensors that the function may update in place, as it would without
            remat: index, and whether it is a module's registered buffer.
        constants: in the arguments, in order.
        code: the code found, in order: of functions, types of objects, modes of
            modules.
        in_arguments: whether what is searched now is an argument.
        is_contained: whether nothing was found but functions, numbers and packages.
        is_lazy: whether some module has no parameters yet.
        scripted: the name of a TorchScript module, if there is one.
        stream_search: what looks for random streams, and those that it found.
    """

    __slots__ = (
        *("_index", "buffers", "code", "constants", "in_arguments", "is_contained"),
        *("is_lazy", "origins", "scripted", "stream_search", "tensors"),
    )

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.origins: list[Path] = []
        self.buffers: dict[int, bool] = {}
        self.code: list[Any] = []
        self.constants: list[Any] = []
        self.in_arguments = self.is_contained = True
        self.is_lazy, self.scripted = False, ""
        self.stream_search = StreamSearch()
        self._index: dict[int, int] = {}

    # --- Tensors ---

    def index_of(self, value: Tensor, path: Path, *, registered: bool = False) -> int:
        """Return the index of a tensor, which is added if it is new."""
        index = self._index.get(id(value))
        if index is None:
            index = self._index[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.origins.append(path)
            if not self.in_arguments or registered:
                self.is_contained = False
                if not value.requires_grad:
                    self.buffers[index] = registered
        elif registered and not value.requires_grad:
            self.buffers[index] = True
        return index

    # --- What tells calls apart ---

    def note_constants(self, values: Iterable[Any]) -> None:
        """Note what an argument holds that tells calls apart."""
        if self.in_arguments:
            self.constants += map(static_of, values)

    def end_arguments(self) -> None:
        """Go on with what the function reaches besides its arguments."""
        self.in_arguments, self.is_contained = False, not self.code


class ValueWalk:
    """One walk.

    Attributes:
        cells: the variables of functions that are being walked, outermost first.
        found: what was found, besides nodes.
        is_compiled: whether the walk is inside of compiled code.
        is_sharded: whether it is inside of a module whose parameters FSDP exchanges.
    """

    __slots__ = ("_nodes", "_open", "cells", "found", "is_compiled", "is_sharded")

    def __init__(self) -> None:
        self.found = Findings()
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


Visit: TypeAlias = Callable[[ValueWalk, Any, Path], Node | None]
