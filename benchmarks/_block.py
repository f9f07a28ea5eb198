"""The transformer block that the benchmarks checkpoint, and the systems that do it.

The block is pre-norm, attention and an MLP: a function of a pytree of parameters and
the residual stream, or a module. The systems are wrappers of one function, as in
``_systems.py``. Those that save dots save the results of the same operators, ``DOTS``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _systems import BASELINE, SYSTEMS, Wrapper
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from remat import policies, remat
from remat.testing import count_ops


Params = dict[str, Tensor]
Step = Callable[[], None]

HEADS = 4


# --- The systems ---------------------------------------------------------------------


_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
DOTS = (_aten.mm, _aten.addmm, _aten.bmm, _ATTENTION)
SELECTIVE = "torch SAC, dots"
DEFAULT, PRUNED, SAVING = "remat", "remat, prune=True", "remat, dots"


def selective(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap in torch's selective activation checkpointing, which saves ``DOTS``."""
    saved = [packet.default for packet in DOTS]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    return functools.partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


BLOCK_SYSTEMS: dict[str, Wrapper] = {
    "plain": SYSTEMS["plain"],
    BASELINE: SYSTEMS[BASELINE],
    SELECTIVE: selective,
    DEFAULT: remat,
    PRUNED: functools.partial(remat, prune=True),
    SAVING: functools.partial(remat, policy=policies.dots_saveable),
}


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


# --- Steps ---------------------------------------------------------------------------


def stream(*shape: int) -> Tensor:
    """Draw a residual stream, which requires grad."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).requires_grad_()


def block_step(wrap: Wrapper, *shape: int) -> Step:
    """Return one forward and backward of a wrapped block, to all that it reads."""
    fn, params, x = wrap(block), block_params(shape[-1]), stream(*shape)
    return differentiated(lambda: fn(params, x, HEADS), [x, *params.values()])


def module_step(wrap: Wrapper, *shape: int) -> Step:
    """Return the same for the module."""
    module, x = Block(shape[-1]), stream(*shape)
    fn = wrap(module)
    return differentiated(lambda: fn(x), [x, *module.parameters()])


def differentiated(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Step:
    """Return forward and backward, after which the leaves have no gradients."""

    def step() -> None:
        forward().sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def dots_run(step: Step) -> int:
    """Run a step and count the products in it."""
    with count_ops() as ops:
        step()
    return sum(ops[packet.__name__] for packet in DOTS)


def verdict(met: bool, bound: str) -> str:
    """Say whether a number meets its target."""
    return f"{'met' if met else 'MISSED'} ({bound})"
