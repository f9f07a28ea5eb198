"""Puts what a call refers to back as it was, for one run of the function.

In a recompute, functions and containers are made anew. Objects and modules hold what
they held at the call for as long as it runs: they stay the same objects, so that what
is kept by their identity, in a table of weak keys say, is found. At the end they hold
again what they held before, and what the recompute did to them is gone.

Under torch.func, an object that leads to a tensor is made anew instead, for it has to
hold another tensor.

Invariant: one thread at a time exchanges what objects hold, and the others make all of
them anew: two that exchange at once would leave one with what a recompute put there.
Rejected: making all objects anew always. A table that knows an object does not know its
copy, and a recompute would find nothing there, or something else.
"""

import threading
from collections.abc import Sequence
from typing import Any, Literal, Self

from torch import Tensor

from remat._context import empty, here
from remat._nodes import CellNode, Composite, ObjectNode
from remat._objects import exchange_attributes, replica_of, set_attributes


_EXCHANGING = threading.RLock()


class Run:
    """A context in which everything is as it was, for one run.

    Args:
        tensors: stand for those found.
        anew: which objects are made anew: those that lead to a tensor, all, or none but
            those that are gone.

    Attributes:
        is_again: whether it is a recompute.
    """

    is_again = True

    __slots__ = ("_anew", "_cells", "_holds_lock", "_undo", "built", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], anew: Literal["live", "all", "none"]
    ) -> None:
        self.tensors, self._anew = tensors, anew
        self.built: dict[int, Any] = {}
        self._undo: list[tuple[Any, dict[str, Any]]] = []
        self._cells: list[Any] = []
        self._holds_lock = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for value, before in reversed(self._undo):
            exchange_attributes(value, before)
        if self._holds_lock:
            _EXCHANGING.release()
        later = here().cells if self._anew == "live" and self.is_again else None
        if later is None:
            empty(self._cells)
        else:
            later += self._cells

    def make(self, node: Composite) -> Any:
        """Return the value of a node that was not built yet."""
        new = node.new(self)
        if type(node) is CellNode:
            self._cells.append(new)
        return new

    def make_object(self, node: ObjectNode) -> Any:
        """Return an object that holds what it held."""
        value = node.ref()
        if value is None or self._makes_anew(node):
            new = self.built[id(node)] = replica_of(node.kind, value)
            set_attributes(new, node.contents(self, None))
            return new
        # Before its parts are made: one of them may refer to it.
        self.built[id(node)] = value
        contents = node.contents(self, value)
        self._undo.append((value, exchange_attributes(value, contents)))
        return value

    def _makes_anew(self, node: ObjectNode) -> bool:
        if self._anew == "all" or (self._anew == "live" and node.live):
            return True
        if not self._holds_lock:
            self._holds_lock = _EXCHANGING.acquire(blocking=False)
            if not self._holds_lock:
                self._anew = "all"
        return not self._holds_lock
