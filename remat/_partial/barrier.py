"""The barrier: in a graph, what a recompute reads is read after the cotangents.

`rules` passes what a node saved through it while a graph is made. It is the identity,
and reads the cotangents. So a recompute comes after them, and no optimizer takes its
operations for those of the forward.

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
from remat._torch import bottoms, lower_to_alias


_library = torch.library.Library("remat", "FRAGMENT")
_library.define("barrier(Tensor x, Tensor[] after) -> Tensor")
# What inductor runs for it.
_library.define("same(Tensor(a) x, Tensor[] after) -> Tensor(a)")


def _copied(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return x.clone()


def _same(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return x


def _fake(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return torch.empty_like(x)


for _name, _kernel in (("barrier", _copied), ("same", _same)):
    torch.library.impl(_library, _name, "CompositeExplicitAutograd")(_kernel)
    torch.library.register_fake(f"remat::{_name}", _fake, lib=_library)

_barrier = torch.ops.remat.barrier.default


class _Barrier(torch.autograd.Function):
    @staticmethod
    @override
    def forward(x: Tensor, *after: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return _barrier(x, [*after])

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


def behind(saved: Sequence[Any], cotangents: Sequence[Tensor]) -> list[Any]:
    """Return what was saved, to be read after the cotangents."""
    return [
        _Barrier.apply(t, *cotangents) if isinstance(t, Tensor) else t for t in saved
    ]


@contextmanager
def recomputing_after(cotangents: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Have what is given to a recompute read the cotangents.

    They are those below all levels, for vmap and jvp must not batch or dualize the
    order.
    """
    lower_to_alias(_barrier, torch.ops.remat.same.default)
    context = here()
    before, context.after = context.after, bottoms(cotangents)
    try:
        yield context.after
    finally:
        context.after = before


def after_cotangents(kept: Tensor) -> Tensor:
    """Return what was kept below autograd, to be read after the cotangents."""
    after = here().after
    return _barrier(kept, [*after]) if after else kept.detach()


# --- Names ---

# A name is an operation without a result, which the tape of the call hears.
_library.define("named(Tensor x, str name) -> ()")


def _nothing(x: Tensor, name: str) -> None:
    del x, name


torch.library.impl(_library, "named", "CompositeExplicitAutograd")(_nothing)
torch.library.register_fake("remat::named", _nothing, lib=_library)
_library.impl("named", torch.library.fallthrough_kernel, "Autograd")
named = torch.ops.remat.named.default


def _batched(info: Any, in_dims: Any, x: Tensor, name: str) -> Any:
    del info, in_dims
    return named(x, name), None


torch.library.register_vmap("remat::named", _batched, lib=_library)
