"""Which inputs of a call a recompute may read before the cotangents, in a graph.

An input is free where views, and products and sums with what comes after the
cotangents, are all that read it: the weights of a block. Such a result comes after the
cotangents, and so does what its derivative computes. Each barrier costs the compiler
nodes in the forward and the backward.

Invariant: an operation of a recompute comes after the cotangents if it reads an input,
or what was computed from one. Views do not count: they move nothing.
Rejected: a barrier for each operation that reads nothing that comes later. It is put on
an input, and other operations may read that input as well.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat._torch import base_tensor, is_view_op, storage_id


_aten = torch.ops.aten

# A derivative reads the cotangent, and the value of another operand.
LINEAR = frozenset(
    (
        *(_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.mul, _aten.mul_),
        *(_aten.mm, _aten.bmm, _aten.mv, _aten.dot, _aten.addmm, _aten.baddbmm),
        *(_aten.addmv, _aten.convolution, _aten.embedding),
    )
)
# Linear in each operand but the first.
NORMS = frozenset((_aten.native_layer_norm, _aten.native_group_norm))


class Order:
    """What the operations of a forward read.

    Args:
        inputs: what the function is given.
    """

    __slots__ = ("_free", "_held", "_late")

    def __init__(self, inputs: Iterable[Any]) -> None:
        tensors = (base_tensor(t) for t in inputs if isinstance(t, Tensor))
        self._free = {*_storages(tensors)}
        self._late: set[int] = set()
        self._held: list[Any] = []  # so that the numbers stay theirs

    def note(self, func: Any, operands: Iterable[Tensor], out: Any) -> None:
        """Note an operation, and whether its result comes after the cotangents."""
        if is_view_op(func):
            return
        read = [*_storages(operands)]
        is_late = not self._late.isdisjoint(read)
        early = [k for k in read if k in self._free]
        packet = getattr(func, "overloadpacket", None)
        if packet in NORMS:
            early = [k for k in read[:1] if k in self._free]
        elif packet in LINEAR:
            early = early[: 0 if is_late else 1]
        if not (is_late or early):
            return
        self._free.difference_update(early)
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self._late.update(early, _storages(results))
        self._held.append(results)

    def close(self) -> None:
        """Let go of the results."""
        self._held.clear()
        self._late.clear()

    def is_free(self, tensor: Tensor) -> bool:
        """Say whether a recompute may read an input before the cotangents."""
        return not self._free.isdisjoint(_storages([base_tensor(tensor)]))


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    for tensor in tensors:
        with suppress(RuntimeError):  # sparse and nested tensors have none
            yield storage_id(tensor)
