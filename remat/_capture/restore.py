"""Puts what a call refers to back as it was, for one run of the function.

In a recompute, functions and containers are made anew. Objects and modules stay the
same objects, so that a table with weak keys still finds them. While the function runs
they hold what they held at the call. Afterwards they hold what they held before the
recompute, and what the recompute did to them is gone.

Under torch.func, an object that leads to a tensor is made anew, since it has to hold
another tensor.

Invariant: one thread at a time sets objects back, and the others make all of them anew.
If two did it at once, objects would be left as a recompute had set them.
Rejected: making all objects anew always. A table with weak keys does not know a copy.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor

from remat._base.code import VIEWED
from remat._base.context import empty, here
from remat._capture.callables import CellNode
from remat._capture.modules import ViewNode
from remat._capture.nodes import Composite, ObjectNode
from remat._capture.objects import (
    check_class,
    exchange_attributes,
    exchange_dict,
    replica_of,
    set_attributes,
    slots_in,
)


_EXCHANGING = threading.RLock()
_Undo = list[tuple[Any, dict[str, Any]]]


class _View(NamedTuple):
    """A view of a module, and what it held before a run."""

    view: Any
    slots: dict[str, Any]
    attributes: dict[str, Any]


class SnapshotRun:
    """A context in which everything is as it was, for one run."""

    is_recompute = True

    __slots__ = (
        *("_all_anew", "_cells", "_holds_lock", "_undo", "_views", "built"),
        "tensors",
    )

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self._all_anew = tensors, False
        self.built: dict[int, Any] = {}
        self._undo: _Undo = []
        self._cells: list[Any] = []
        self._holds_lock = False
        self._views: list[_View] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _undo(self._undo)
        for was in reversed(self._views):
            exchange_dict(was.view, was.attributes)
            set_attributes(was.view, was.slots)
        if self._holds_lock:
            _EXCHANGING.release()
        later = here().cells if self.is_recompute else None
        if later is None:
            empty(self._cells)
        else:
            later += self._cells

    def make(self, node: Composite) -> Any:
        """Return the value of a node that was not built yet."""
        new = node.new(self)
        if type(node) is CellNode and node.may_hold_itself:
            # Emptied at the end. Others stay: a function may outlive the run.
            self._cells.append(new)
        return new

    def make_object(self, node: ObjectNode) -> Any:
        """Return an object that holds what it held."""
        value = node.ref()
        if value is None or self._makes_anew(node.live):
            new = self.built[node.identity] = replica_of(node.kind, value)
            set_attributes(new, node.contents(self, None))
            return new
        check_class(node.kind, type(value))
        # Before its parts are made: one of them may refer to it.
        self.built[node.identity] = value
        self._set_back(value, node.contents(self, value))
        return value

    def _set_back(self, value: Any, contents: dict[str, Any]) -> None:
        before = exchange_attributes(value, contents)
        self._undo.append((value, before))
        for was in self._views:  # one that the module itself refers to
            if vars(was.view) is before:
                exchange_dict(was.view, vars(value))

    def make_view(self, node: ViewNode) -> Any:
        """Return a view of a module, which has the dict that the module has now."""
        view = node.ref()
        slots = node.contents(self, view)
        module = slots[VIEWED]
        if view is not None and getattr(view, VIEWED) is module:
            check_class(node.kind, type(view))
            held = slots_in(view)
            self._views.append(_View(view, held, exchange_dict(view, vars(module))))
        else:  # the module was made anew
            view = replica_of(node.kind, view)
            exchange_dict(view, vars(module))
        set_attributes(view, slots)
        self.built[node.identity] = view
        return view

    def _makes_anew(self, is_live: bool) -> bool:
        if self._all_anew or is_live:
            return True
        if not self._holds_lock:
            self._holds_lock = _EXCHANGING.acquire(blocking=False)
            if not self._holds_lock:
                self._all_anew = True
        return not self._holds_lock


def _undo(exchanged: _Undo) -> None:
    for value, before in reversed(exchanged):
        exchange_attributes(value, before)
