"""The barrier: in a graph, what a recompute reads is read after the cotangents.

`_transform/function.py` passes what a node saved through it while a graph is made. It
is the identity, and reads the cotangents. So a recompute comes after them, and no
optimizer takes its operations for those of the forward.

Invariant: linear, so each derivative is the identity, at every level.
Rejected: `torch.library.register_autograd`. Such an operator has no jvp: its tangents
are zero, without an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.context import here
from remat._base.operators import barrier, same
from remat._base.wrappers import taken_apart
from remat._torch import bottoms, lower_to_alias


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
    """Have what is given to a recompute read the cotangents.

    They are those below all levels, for vmap and jvp must not batch or dualize the
    order.
    """
    lower_to_alias(barrier, same)
    context = here()
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
