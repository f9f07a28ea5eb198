"""A model of transformer blocks, each wrapped by one system, on any device."""

from dataclasses import dataclass

import torch
from _block import (
    HEADS,
    Params,
    add_attention,
    add_mlp,
    attention,
    block_params,
    hidden,
    queries,
    stream,
)
from _systems import Wrapper
from torch import Tensor

from remat import checkpoint_name


@dataclass(frozen=True)
class Sizes:
    """How large a model is, and its batch."""

    layers: int
    batch: int
    time: int
    width: int
    heads: int = HEADS


def named_block(params: Params, x: Tensor, heads: int) -> Tensor:
    """Apply the block, and name what is expensive to compute again."""
    qkv = checkpoint_name(queries(params, x), "qkv")
    x = add_attention(params, x, attention(qkv, heads))
    return add_mlp(params, x, checkpoint_name(hidden(params, x), "hidden"))


class Model:
    """Blocks in a row, each wrapped by one system."""

    def __init__(
        self,
        wrap: Wrapper,
        sizes: Sizes,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def moved(t: Tensor) -> Tensor:
            return t.detach().to(device, dtype).requires_grad_()

        self.block, self.heads = wrap(named_block), sizes.heads
        self.x = moved(stream(sizes.batch, sizes.time, sizes.width))
        params = [block_params(sizes.width, layer) for layer in range(sizes.layers)]
        self.layers = [{k: moved(p) for k, p in layer.items()} for layer in params]

    def applied(self, layers: list[Params], x: Tensor) -> Tensor:
        """Return what the last block makes of a stream."""
        for params in layers:
            x = self.block(params, x, self.heads)
        return x

    def forward(self) -> Tensor:
        """Apply the blocks to the stream of the model."""
        return self.applied(self.layers, self.x)

    def step(self) -> None:
        """Add to the gradients of all parameters."""
        self.forward().sum().backward()
