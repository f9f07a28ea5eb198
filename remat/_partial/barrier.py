"""The barrier: in a graph, what a recompute reads is read after the cotangents.

It is the identity, and reads the cotangents. So no optimizer can merge the operations
of a recompute with those of the forward. Each barrier costs the compiler nodes, so
`Order` says which inputs need none.

Invariant: linear, so each derivative is the identity, at every level. An operation of a
recompute comes after the cotangents if it reads an input, or what was computed from
one. Views do not count: they move nothing.
Rejected: `torch.library.register_autograd`. Such an operator has no jvp: its tangents
are zero, without an error.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.context import here
from remat._base.operators import barrier, same
from remat._base.tensors import taken_apart
from remat._torch.graphs import bottoms, lower_to_alias
from remat._torch.levels import base_tensor
from remat._torch.operators import is_view_op
from remat._torch.tensors import storage_id


class _Barrier(torch.autograd.Function):
    @staticmethod
    @override
    def forward(x: Tensor, *after: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return _passed(x, after)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = len(inputs) - 1

    @staticmethod
    @override
    def backward(ctx: Any, cotangent: Any) -> Any:  # pyrefly: ignore[bad-override]
        return (cotangent, *[None] * ctx.count)

    @staticmethod
    @override
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        return _Barrier.apply(tangent)

    @staticmethod
    @override
    def vmap(  # pyrefly: ignore[bad-override]
        info: Any, in_dims: Any, x: Tensor, *after: Tensor
    ) -> Any:
        return _Barrier.apply(x, *after), in_dims[0]


def behind(saved: Tensor, cotangents: Sequence[Tensor]) -> Any:
    """Return what was saved, to be read after the cotangents."""
    return _Barrier.apply(saved, *cotangents)


@contextmanager
def recomputing_after(cotangents: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Have what is given to a recompute read the cotangents."""
    lower_to_alias(barrier, same)
    context = here()
    # It takes the tensors below all levels: vmap and jvp must not batch or dualize the
    # order.
    before, context.after = context.after, bottoms(cotangents)
    try:
        yield context.after
    finally:
        context.after = before


def after_cotangents(kept: Tensor) -> Tensor:
    """Return what was kept below autograd, to be read after the cotangents."""
    after = here().after
    return _passed(kept, after) if after else kept.detach()


def _passed(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    """Pass what is inside of a tensor through the barrier."""
    inner, wrap = taken_apart(x)
    return wrap(barrier(inner, [taken_apart(t)[0] for t in after]))


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
    """What the operations of a forward read."""

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
