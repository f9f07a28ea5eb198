"""Watches a step: which operation made each storage, and where in the step.

Called by `step`. The profiler says when memory is allocated and freed (`timeline`).
Each operation runs under a mark that the profiler sees, so both tell of the same one.

Invariant: it keeps no storage alive and changes nothing of the step.
Rejected: to count bytes here. Operations use memory that they do not return, and
nothing here sees a free.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.context import here
from remat._base.parts import parts
from remat._base.source import user_line
from remat._graph.handles import Handle, PackedOutside, stored_by
from remat._partial.options import Options
from remat._report.inputs import Ledger, tensors_in
from remat._torch import (
    base_tensor,
    marked,
    next_sequence_number,
    running_node,
    sequence_number,
    storage_id,
)
from remat._transform.lowering import Lowering
from remat._transform.refill import DIFFERENTIATED_AGAIN


MARK, OURS = "remat watches #", "remat keeps"


@dataclass(frozen=True, slots=True)
class WatchedOp:
    """One operation of a step.

    Attributes:
        name: of the operation.
        source: the user's line.
        node: the number of the node whose backward it is in; -1 in a forward.
        called: the name of the call whose forward it is in; "" if it is in none.
        again: the name of the innermost call whose recompute it is in; "" if none.
        saves: whether a policy of a call under torch.func may save its result.
    """

    name: str
    source: str
    node: int
    called: str
    again: str
    saves: bool


@dataclass(frozen=True, slots=True)
class MadeStorage:
    """A storage that an operation made.

    Attributes:
        storage: its number.
        dtype: of the tensor that it was made for.
        shape: of that tensor.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StepWatch(Ledger):
    """A mode that notes the operations of a step and the storages that they make.

    Attributes:
        ops: the operations, in order.
        made: the storages, by operation and address.
        origins: for each node, by number, the first operation of its forward.
        inputs: the storages that calls save as their inputs.
        saved: the storages that policies save.
        gradients: the storages of the parameters' gradients.
        names: of the calls that were not recomputed, with how many calls have it.
        outermost: how many of those calls are in no other.
        last: the index of the last forward operation in a call; -1 if there is none.
        differentiates: whether a backward is differentiated (`create_graph=True`).
    """

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self.ops: list[WatchedOp] = []
        self.made: dict[tuple[int, int], MadeStorage] = {}
        self.origins: dict[int, int] = {}
        self.inputs: set[int] = set()
        self.saved: set[int] = set()
        self.gradients: set[int] = set()
        self.names: dict[str, int] = {}
        self.outermost, self.last = 0, -1
        self.differentiates = False
        self._calls: list[weakref.ref[Any]] = []
        self._packing: dict[str, None] = {}  # the labels of calls under base autograd
        self._handles: dict[int, Sequence[weakref.ref[Handle] | None]] = {}
        self._named: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._in_backward = False

    # --- Operations ---

    @override
    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        node = running_node()
        if node is not None and torch.is_grad_enabled() and not here().recomputing:
            self.differentiates = True
        if node is not None and not self._in_backward:
            self._in_backward = True
            self.saved.update(self._saved_by_policies())
        number, i = -1 if node is None else sequence_number(node), len(self.ops)
        self.ops.append(self._watched(func, number))
        self.origins.setdefault(next_sequence_number() - 1, i)
        with marked(f"{MARK}{i}"):
            result = super().call(func, args, kwargs)
        for part in _parts_in(result):
            if storage_id(part) not in self.entries:
                place = i, part.untyped_storage().data_ptr()
                meta = storage_id(part), part.dtype, tuple(part.shape)
                self.made.setdefault(place, MadeStorage(*meta))
        return result

    def _watched(self, func: Any, node: int) -> WatchedOp:
        context = here()
        again = self._name_of(context.recomputing[-1]) if context.recomputing else ""
        inside = context.inside
        called = self._name_of(inside[-1]) if inside else ""
        called = called or ("a call" if context.functions else "")
        if called and not again:
            self.last = len(self.ops)
        name = getattr(func, "overloadpacket", func).__name__
        saves = bool(context.functions) and context.policy is not None
        return WatchedOp(name, user_line(), node, called, again, saves)

    @override
    def _preserve(self, tensor: Tensor) -> None:
        with marked(OURS):
            super()._preserve(tensor)

    def note_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Note what is a gradient of a parameter."""
        self.gradients.update(map(storage_id, _parts_in([*tensors])))

    # --- Calls ---

    def asked(
        self, block: Any, lowering: Lowering, args: tuple[Any, ...]
    ) -> tuple[Lowering, Options]:
        """Return how a rematerialized function is called: as it is."""
        del self, args
        return lowering, block._options

    def observe(
        self, call: Any, observe: Callable[[int, Tensor | None], None] | None
    ) -> Callable[[int, Tensor | None], None]:
        """Note a call under base autograd, and what it saves of its inputs."""
        self._calls.append(weakref.ref(call))
        self._packing[call.label] = None
        values = call.inputs.values
        self._note(call, [t for v in values for t in _stored(v)])

        def both(place: int, tensor: Tensor | None) -> None:
            # Handles of what a policy saves outlive their call.
            self._handles[id(call.handles)] = call.handles
            if observe is not None:
                observe(place, tensor)

        return both

    def entered(self, call: Any, inputs: Sequence[Tensor]) -> None:
        """Note a call under torch.func, and its inputs."""
        self._note(call, [base_tensor(t) for t in inputs])

    def _note(self, call: Any, inputs: Sequence[Tensor]) -> None:
        context = here()
        if context.recomputing:
            return
        self.inputs.update(map(storage_id, _parts_in(inputs)))
        count = self.names[call.label] = self.names.get(call.label, 0) + 1
        self._named[call] = f"{call.label}\0{count}"
        self.outermost += not (context.inside or context.functions)

    @property
    def again(self) -> tuple[str, ...]:
        """The labels of calls of which a backward is differentiated, and stays."""
        return tuple(label for label in self._packing if label in DIFFERENTIATED_AGAIN)

    def _name_of(self, call: Any) -> str:
        return self._named.get(call, call.label)

    def _saved_by_policies(self) -> Iterator[int]:
        refs = chain.from_iterable(self._handles.values())
        handles = [ref() for ref in refs if ref is not None]
        found = [h.residual for h in handles if h is not None and h.residual]
        for ref in self._calls:
            call = ref()
            if call is not None and call.following is not None:
                found += call.following.residuals_held()
        for residual in found:
            yield from map(storage_id, _parts_in(residual.stored()))

    def words_of(self, called: str) -> str:
        """Return the name of a call, with its number if others have the same label."""
        label, _, number = called.partition("\0")
        count = self.names.get(label, 1)
        return f"{label} (call {number} of {count})" if number and count > 1 else label


def _stored(value: Any) -> list[Tensor]:
    return stored_by(value) if type(value) is PackedOutside else [value]


def _parts_in(tree: Any) -> list[Tensor]:
    return [part for t in tensors_in(tree) for part in parts(base_tensor(t))]
