"""Layers as they are found in real models, whose modules hold more than tensors.

- a decoder layer as in Hugging Face's transformers: rotary attention with an optional
  cache, RMSNorm, SwiGLU, and the model's configuration on each submodule,
- convolutions with batch norm, which updates its buffers,
- a module that holds fifty objects without tensors,
- a function that closes over all blocks of a model and runs two of them, as torch's
  ``checkpoint_sequential`` does.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _block import Block, stream
from _styles import METHOD, MODULE, Work, module_work
from _systems import TensorFn
from torch import Tensor, nn
from torch.nn import functional


# --- The decoder layer ---------------------------------------------------------------


# What a configuration inherits there, and no layer reads.
INHERITED = (None, False, 1, 1.0, "")


class Config:
    """What each submodule of a model holds: eighty attributes."""

    def __init__(self, width: int) -> None:
        self.hidden_size, self.intermediate_size = width, 2 * width
        self.num_attention_heads, self.num_key_value_heads = 4, 2
        self.head_dim, self.num_hidden_layers = width // 4, 12
        self.rms_norm_eps, self.rope_theta = 1e-6, 10000.0
        self.bos_token_id, self.eos_token_id = 1, [2, 3]
        self.id2label = {0: "LABEL_0", 1: "LABEL_1"}
        self.label2id = {"LABEL_0": 0, "LABEL_1": 1}
        self.architectures, self.auto_map = ["Decoder"], {"AutoModel": "model.Decoder"}
        self.layer_types = ["full_attention"] * 12
        self.rope_parameters = {"rope_type": "default", "factor": 1.0}
        self.attn_implementation = "sdpa"
        for k in range(80 - len(vars(self))):
            setattr(self, f"inherited{k}", INHERITED[k % len(INHERITED)])


class RMSNorm(nn.Module):
    """Scale to a mean square of one."""

    def __init__(self, config: Config, size: int) -> None:
        super().__init__()
        self.config, self.eps = config, config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize in float32."""
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(dtype)


class Cache:
    """Keys and values of the positions before, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append to what is held for a layer, and return all of it."""
        if layer in self.layers:
            before = self.layers[layer]
            k, v = torch.cat([before[0], k], -2), torch.cat([before[1], v], -2)
        self.layers[layer] = k, v
        return k, v


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of entries by an angle for each position."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Attend with rotary positions and fewer keys than queries."""

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = self.head_dim**-0.5, True
        width, heads = config.hidden_size, config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(heads, width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return what was attended to, and no weights."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            proj(hidden_states).view(shape).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = position_embeddings
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        causal = self.is_causal and attention_mask is None
        out = functional.scaled_dot_product_attention(
            q, k, v, attention_mask, is_causal=causal, scale=self.scaling
        )
        out = out.transpose(1, 2).reshape(hidden_states.shape)
        return self.o_proj(out), None


class MLP(nn.Module):
    """A hidden layer, of which a second one says how much passes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, hidden, bias = config.hidden_size, config.intermediate_size, False
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Decoder(nn.Module):
    """One layer of a language model."""

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.self_attn, self.mlp = Attention(config, layer_idx), MLP(config)
        self.input_layernorm = RMSNorm(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config, config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        """Add attention and an MLP."""
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def decoder(style: str, *shape: int) -> Work:
    """Return a call of a decoder layer."""
    config = Config(shape[-1])
    layer, x = Decoder(config, 3), stream(*shape)
    steps = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.arange(shape[1])[:, None] * config.rope_theta**-steps
    angles = torch.cat((angles, angles), -1)
    args = x, (angles.cos(), angles.sin()), None, None, False
    fn = layer.forward if style == METHOD else layer
    return Work(fn, args, [x, *layer.parameters()])


# --- The others ----------------------------------------------------------------------


class ConvBlock(nn.Module):
    """Two convolutions with batch norm, and what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Apply them, in train mode."""
        h = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(x + self.bn2(self.conv2(h)))


class Part:
    """An object without tensors, as libraries hang many on their modules."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"part{number}"
        self.sizes, self.options = (number, number + 1), {"scale": 1.0}


class HoldingParts(nn.Module):
    """An MLP that holds fifty of them: ten as attributes, and in a list and a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [Part(k) for k in range(50)]
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        for part in parts[:10]:
            setattr(self, part.name, part)
        self.listed = parts[10:30]
        self.named = {part.name: part for part in parts[30:]}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP, scaled as one of them says."""
        h = functional.gelu(self.up(self.norm(x)))
        return x + self.down(h) * self.listed[3].options["scale"]


def conv_block(style: str, *shape: int) -> Work:
    """Return a call of the convolutions."""
    return module_work(ConvBlock(shape[1]), stream(*shape), style)


def holding_parts(style: str, *shape: int) -> Work:
    """Return a call of the MLP."""
    return module_work(HoldingParts(shape[-1]), stream(*shape), style)


def two_of_many(*shape: int) -> Work:
    """Return a call that runs two of the thirty-two blocks that it can reach."""
    blocks, x = [Block(shape[-1]) for _ in range(32)], stream(*shape)

    def running(start: int, end: int) -> TensorFn:
        def forward(x: Tensor) -> Tensor:
            for k in range(start, end + 1):
                x = blocks[k](x)
            return x

        return forward

    used = [p for block in blocks[4:6] for p in block.parameters()]
    return Work(running(4, 5), (x,), [x, *used])


@dataclass(frozen=True)
class Layer:
    """A layer, and the shapes of its input to be timed and to be counted on."""

    make: Callable[..., Work]
    timed: tuple[int, ...]
    counted: tuple[int, ...]  # few numbers: products are the same for all, and slow


def _in_both_styles(
    name: str, make: Callable[..., Work], *shapes: Any
) -> dict[str, Layer]:
    return {
        name: Layer(functools.partial(make, MODULE), *shapes),
        f"{name}, its forward": Layer(functools.partial(make, METHOD), *shapes),
    }


LAYERS: dict[str, Layer] = {
    **_in_both_styles("decoder, d=64", decoder, (2, 32, 64), (1, 4, 64)),
    **_in_both_styles("decoder, d=256", decoder, (2, 64, 256), (1, 4, 256)),
    **_in_both_styles("conv, batch norm", conv_block, (4, 16, 16, 16), (1, 16, 4, 4)),
    **_in_both_styles("50 objects", holding_parts, (2, 32, 64), (1, 4, 64)),
    "2 of 32 blocks": Layer(two_of_many, (2, 32, 64), (1, 4, 64)),
}
