"""Packs what the graph of a forward saves: handles, and inputs as they are.

Invariant: what is an input as it was at the call, or a leaf that requires grad, is
saved itself. All else becomes a handle. A hook is held by what it saved, so this one
holds the call only while the forward runs.
Rejected: handles for inputs, too. To give one back, the function would have to run.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from remat._base.checks import version_of
from remat._base.context import here
from remat._capture.snapshot import Snapshot
from remat._graph.handles import Handle, Kept, Outer, meta_of
from remat._torch import is_of_torch_func, unwrap_dead, without_node
from remat._transform.held import Held


class Packing:
    """What one forward saves.

    Args:
        call: that gives the values of handles.
        snapshot: of the call.
        leaves: its inputs.
        held: what is kept of them.
        observe: is told what is saved at each place, None for what stays itself.

    Attributes:
        handles: in order; None for what stays itself.
        metas: of what the handles stand for, in the same order.
    """

    __slots__ = (
        *("_call", "_held", "_index", "_observe", "_snapshot", "_versions"),
        *("handles", "metas"),
    )

    def __init__(
        self,
        call: Any,
        snapshot: Snapshot,
        leaves: Sequence[Tensor],
        held: Held,
        observe: Callable[[int, Tensor | None], None] | None,
    ) -> None:
        self._call, self._snapshot, self._held = call, snapshot, held.values
        self._index = {id(t): i for i, t in enumerate(leaves)}
        self._versions = held.versions
        self.handles: list[weakref.ref[Handle] | None] = []
        self.metas: list[Any] = []
        examining = here().examining
        self._observe = observe if examining is None else examining(call, observe)

    def pack(self, t: Tensor) -> Any:
        """Be the hook that saves a tensor."""
        i = self._index.get(id(t))
        if i is not None:
            version = self._versions[i]
            if version is None or t._version == version:
                return self._itself(t, version, i)
        if is_of_torch_func(t):
            t = unwrap_dead(t)
            if is_of_torch_func(t):  # of a level that was opened inside
                self._itself(t, None, None)
                return without_node(t)
        if t.requires_grad and t.is_leaf:
            return self._itself(t, version_of(t), None)
        handles = self.handles
        place = len(handles)
        handle = Handle(self._call, place)
        handles.append(weakref.ref(handle))
        self.metas.append(meta_of(t))
        if self._observe is not None:
            self._observe(place, t)
        return handle

    def _itself(self, t: Tensor, version: int | None, i: int | None) -> Any:
        self.handles.append(None)
        self.metas.append(None)
        if self._observe is not None:
            self._observe(len(self.handles) - 1, None)
        if i is not None and type(self._held[i]) is Outer:
            return self._held[i]
        return Kept(t, version, self._snapshot, i)

    def done(self) -> None:
        """Let go of the call: the forward has ended."""
        del self._call, self._snapshot, self._held, self._observe
        del self.handles, self.metas
