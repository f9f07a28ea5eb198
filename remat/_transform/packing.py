"""The hook that packs what the graph of a forward saves.

`saved` runs the forward under `Packing.pack`. The handles that it makes are what a
backward reads (`remat._graph.handles`).

Invariant: an input as it was at the call is saved itself, and so is a leaf that
requires grad. All else becomes a handle. A graph refers to the hook of what it saved,
so the hook refers to the call only while the forward runs.
Rejected: handles for inputs, too. To give one back, the function would have to run.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from remat._base.context import here
from remat._base.tensors import version_of
from remat._graph.handles import Handle, PackedOutside, VersionedTensor, meta_of
from remat._torch import is_below_tracer, is_of_torch_func, unwrap_dead, without_node
from remat._transform.filling import is_of_trace
from remat._transform.saved_call import SavedCall


class Packing:
    """The hook of one forward, and what it has packed.

    Args:
        call: that gives the values of handles.
        inputs: of the call.
        observe: is told what is saved at each position, None for what stays itself.

    Attributes:
        handles: in order; None for what stays itself.
        metas: of what the handles stand for, in the same order.
    """

    __slots__ = (
        *("_call", "_frozen", "_index", "_is_traced", "_observe", "_saved", "_reach"),
        *("_versions", "handles", "metas"),
    )

    def __init__(
        self,
        call: SavedCall,
        inputs: Sequence[Tensor],
        observe: Callable[[int, Tensor | None], None] | None,
    ) -> None:
        self._call, self._reach, self._saved = call, call.reach, call.inputs.values
        first = call.reach.first_parameter
        self._index = {id(t): i for i, t in enumerate(inputs[:first])}
        needs = call.inputs.needs
        self._frozen: set[int] = set()
        if False in needs[first:]:
            pairs = zip(inputs[first:], needs[first:], strict=True)
            self._frozen = {id(t) for t, need in pairs if not need}
        self._versions, self._is_traced = call.inputs.versions, is_below_tracer()
        self.handles: list[weakref.ref[Handle] | None] = []
        self.metas: list[Any] = []
        examining = here().examining
        if examining is not None:
            observe = examining.observe(call, observe)
        self._observe = observe

    def pack(self, t: Tensor) -> Any:
        """Be the hook that saves a tensor."""
        if type(t) is not Tensor and is_of_trace(t, self._is_traced):
            return t
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
        node = t.grad_fn
        if node is None and (t.requires_grad or id(t) in self._frozen):
            return self._itself(t, version_of(t), None)
        handles = self.handles
        position = len(handles)
        handle = Handle(self._call, position)
        handles.append(weakref.ref(handle))
        self.metas.append(meta_of(t, node))
        if self._observe is not None:
            self._observe(position, t)
        return handle

    def _itself(self, t: Tensor, version: int | None, i: int | None) -> Any:
        self.handles.append(None)
        self.metas.append(None)
        if self._observe is not None:
            self._observe(len(self.handles) - 1, None)
        if i is not None and type(self._saved[i]) is PackedOutside:
            return self._saved[i]
        return VersionedTensor(t, version, self._reach)

    def done(self) -> None:
        """Drop the references to the call, now that the forward has ended."""
        del self._call, self._reach, self._saved, self._observe
        del self.handles, self.metas
