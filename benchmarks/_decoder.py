"""What one GPU computes of a decoder block of Llama's 70B shape, on meta tensors.

Tensor parallel splits heads and the hidden layer, and sequence parallel the residual
stream: a block gathers the stream before each pair of products, and scatters the sums
after it. The collectives are torch's functional ones, whose results on meta tensors
need no process group.

Invariant: shapes and dtypes are those of one rank, so bytes are what one GPU holds.
Rejected: ``scaled_dot_product_attention``, which on meta tensors is not the kernel that
a GPU runs, and would hold the weights of attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from remat import checkpoint_name


_parallel = torch.ops._c10d_functional_autograd
_wait = torch.ops._c10d_functional.wait_tensor
_flash = torch.ops.aten._scaled_dot_product_flash_attention
GROUP = "tensor parallel"
COLLECTIVES = "all_gather_into_tensor", "reduce_scatter_tensor"

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, of one sequence, and of the tensor parallel group.

    There are as many heads of keys and values as ranks, so that each has one.
    """

    layers: int = 80
    width: int = 8192
    heads: int = 64
    head: int = 128
    hidden: int = 28672
    vocabulary: int = 128256
    tokens: int = 8192
    parallel: int = 8

    def params(self) -> Params:
        """Return the parameters of a block that one rank has."""
        q, kv = self.heads * self.head // self.parallel, self.head
        hidden = self.hidden // self.parallel
        sizes = {
            "norm1": (self.width,),
            "norm2": (self.width,),
            "qkv": (q + 2 * kv, self.width),
            "out": (self.width, q),
            "gate": (hidden, self.width),
            "up": (hidden, self.width),
            "down": (self.width, hidden),
        }
        return {name: _empty(*size).requires_grad_() for name, size in sizes.items()}

    def stream(self) -> Tensor:
        """Return the residual stream of one sequence, of which a rank has a part."""
        stream = _empty(1, self.tokens // self.parallel, self.width)
        return stream.requires_grad_()

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions, which all blocks share."""
        return _empty(self.tokens, self.head), _empty(self.tokens, self.head)


def _empty(*size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="meta")


def block(
    params: Params, x: Tensor, angles: tuple[Tensor, Tensor], shape: Shape
) -> Tensor:
    """Add attention and an MLP to this rank's part of the stream."""
    h = _norm(x, params["norm1"])
    x = x + _scattered(_attention(params, _gathered(h, shape), angles, shape), shape)
    h = _norm(x, params["norm2"])
    return x + _scattered(_mlp(params, _gathered(h, shape)), shape)


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    # rms_norm has no fused kernel on meta tensors. This one has, and saves as much.
    return functional.layer_norm(x, x.shape[-1:], scale)


def _attention(
    params: Params, x: Tensor, angles: tuple[Tensor, Tensor], shape: Shape
) -> Tensor:
    heads = shape.heads // shape.parallel
    qkv = checkpoint_name(functional.linear(x, params["qkv"]), "qkv")
    split = qkv.unflatten(-1, (-1, shape.head)).transpose(1, 2)
    queries, keys, values = split.split((heads, 1, 1), 1)
    queries, keys = _rotated(queries, *angles), _rotated(keys, *angles)
    shared = (t.expand(-1, heads, -1, -1) for t in (keys, values))
    h = checkpoint_name(_flash(queries, *shared, 0.0, True)[0], "attention")
    return functional.linear(h.transpose(1, 2).flatten(2), params["out"])


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cosines + torch.cat((-right, left), -1) * sines


def _mlp(params: Params, x: Tensor) -> Tensor:
    gate, up = (functional.linear(x, params[name]) for name in ("gate", "up"))
    checkpoint_name((gate, up), "hidden")
    return functional.linear(functional.silu(gate) * up, params["down"])


def _gathered(x: Tensor, shape: Shape) -> Tensor:
    """Return the parts of all ranks, one sequence."""
    made = _wait(
        _parallel.all_gather_into_tensor(x.flatten(0, 1), shape.parallel, GROUP)
    )
    return checkpoint_name(made.unflatten(0, (1, -1)), "gathered")


def _scattered(x: Tensor, shape: Shape) -> Tensor:
    """Add up over the ranks, and return this rank's part of the sequence."""
    flat = x.flatten(0, 1)
    made = _wait(_parallel.reduce_scatter_tensor(flat, "sum", shape.parallel, GROUP))
    return checkpoint_name(made.unflatten(0, (1, -1)), "scattered")
