"""The operators of remat that graphs hold.

    barrier     the identity, which also reads other tensors
    same        what inductor runs for it: without a copy
    named       a name of a value

Invariant: an operator computes nothing. It says what a graph must not reorder or lose.
Rejected: marks in the metadata of nodes, which the tracers drop.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


LIBRARY = torch.library.Library("remat", "FRAGMENT")
LIBRARY.define("barrier(Tensor x, Tensor[] after) -> Tensor")
# The mark of an alias in its schema is what inductor goes by.
LIBRARY.define("same(Tensor(a) x, Tensor[] after) -> Tensor(a)")
LIBRARY.define("named(Tensor x, str name) -> ()")

barrier: Any = torch.ops.remat.barrier.default
same: Any = torch.ops.remat.same.default
named: Any = torch.ops.remat.named.default


def _copied(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return x.clone()


def _same(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return x


def _like(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return torch.empty_like(x)


for _name, _kernel in (("barrier", _copied), ("same", _same)):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    # Not `register_fake`, which looks up the source of what it is given.
    LIBRARY.impl(_name, _like, "Meta")


def _nothing(x: Tensor, name: str) -> None:
    del x, name


def _batched(info: Any, in_dims: Any, x: Tensor, name: str) -> Any:
    del info, in_dims
    return named(x, name), None


LIBRARY.impl("named", _nothing, "Meta")
torch.library.register_vmap("remat::named", _batched, lib=LIBRARY)
LIBRARY.impl("named", torch.library.fallthrough_kernel, "Autograd")
