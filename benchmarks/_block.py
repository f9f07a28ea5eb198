"""The transformer block that the benchmarks checkpoint, in four styles.

The block is pre-norm, attention and an MLP. It is a function of a pytree of parameters
and the residual stream; one that closes over its configuration and reads numbers of
this module; a module; or the method of one, as in ``remat(module.forward)``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from _styles import CLOSURE, FUNCTION, Step, Work, module_work
from _systems import DOTS, TensorFn
from torch import Tensor, nn
from torch.nn import functional

from remat.testing import count_ops


Params = dict[str, Tensor]

HEADS, EPS = 4, 1e-5


# --- The block -----------------------------------------------------------------------


def block(params: Params, x: Tensor, heads: int) -> Tensor:
    """Add attention and an MLP to the residual stream ``x`` of (batch, time, width)."""
    x = add_attention(params, x, attention(queries(params, x), heads))
    return add_mlp(params, x, hidden(params, x))


def queries(params: Params, x: Tensor) -> Tensor:
    """Project to queries, keys and values."""
    h = functional.layer_norm(x, x.shape[-1:], params["scale1"], params["shift1"])
    return functional.linear(h, params["qkv"], params["qkv_bias"])


def attention(qkv: Tensor, heads: int) -> Tensor:
    """Attend to the earlier positions, in every head."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return h.transpose(1, 2).flatten(2)


def add_attention(params: Params, x: Tensor, attended: Tensor) -> Tensor:
    """Project what was attended to back to the stream."""
    return x + functional.linear(attended, params["out"], params["out_bias"])


def hidden(params: Params, x: Tensor) -> Tensor:
    """Compute the hidden layer of the MLP, before its activation."""
    h = functional.layer_norm(x, x.shape[-1:], params["scale2"], params["shift2"])
    return functional.linear(h, params["up"], params["up_bias"])


def add_mlp(params: Params, x: Tensor, h: Tensor) -> Tensor:
    """Project the hidden layer back to the stream."""
    h = functional.gelu(h)
    return x + functional.linear(h, params["down"], params["down_bias"])


def block_params(width: int, seed: int = 0) -> Params:
    """Draw the parameters of a block; they require grad."""
    generator = torch.Generator().manual_seed(seed)
    params: Params = {}
    for norm in "12":
        params |= {"scale" + norm: torch.ones(width)}
        params |= {"shift" + norm: torch.zeros(width)}
    sizes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    for layer, (rows, columns) in sizes.items():
        shape = rows * width, columns * width
        weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        params |= {layer: weight, layer + "_bias": torch.zeros(shape[0])}
    return {key: value.requires_grad_() for key, value in params.items()}


def configured(causal: bool, parts: int) -> TensorFn:
    """Return the same as a function that closes over its configuration."""

    def apply(params: Params, x: Tensor, gelu: str = "none") -> Tensor:
        scale, shift = params["scale1"], params["shift1"]
        h = functional.layer_norm(x, (x.shape[-1],), scale, shift, EPS)
        h = functional.linear(h, params["qkv"], params["qkv_bias"])
        q, k, v = h.unflatten(-1, (parts, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = add_attention(params, x, h.transpose(1, 2).flatten(2))
        scale, shift = params["scale2"], params["shift2"]
        h = functional.layer_norm(x, (x.shape[-1],), scale, shift, EPS)
        h = functional.linear(h, params["up"], params["up_bias"])
        h = functional.gelu(h, approximate=gelu)
        return x + functional.linear(h, params["down"], params["down_bias"])

    return apply


class Block(nn.Module):
    """The same as a module of six modules, which hold the parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and an MLP."""
        x = x + self.out(attention(self.qkv(self.norm1(x)), HEADS))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


# --- A step --------------------------------------------------------------------------


def stream(*shape: int) -> Tensor:
    """Draw a residual stream, which requires grad."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).requires_grad_()


def block_work(style: str, *shape: int) -> Work:
    """Return one call of a block in a style, and all that it reads."""
    params, x = block_params(shape[-1]), stream(*shape)
    if style == FUNCTION:
        return Work(block, (params, x, HEADS), [x, *params.values()])
    if style == CLOSURE:
        return Work(configured(True, 3), (params, x), [x, *params.values()])
    return module_work(Block(shape[-1]), x, style)


def dots_run(step: Step, dots: Sequence[Any] = DOTS) -> int:
    """Run a step and count the products in it."""
    with count_ops() as ops:
        step()
    return sum(ops[packet.__name__] for packet in dots)
