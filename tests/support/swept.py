"""Many architectures, as clients: those of others' tables, and what `shrunk` makes."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from support.clients import Client
from support.decoders import ARCHITECTURES
from support.diffusion import CLIENTS as DIFFUSERS
from support.shrunk import hf, shrunk
from torch import Tensor, nn

import remat


# --- Inputs ---


def ids() -> Tensor:
    return torch.randint(4, 60, (2, 12))


def text() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def two_texts() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids()}


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def film() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 8, 3, 32, 32)}


def captioned() -> dict[str, Tensor]:
    return {**text(), **pictures()}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 1600)}


def spectrum() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 32, 160)}


def series() -> dict[str, Tensor]:
    return {"past_values": torch.randn(2, 64, 1)}


def loss(out: Any) -> Tensor:
    """Return a loss in which every tensor of a result takes part."""
    return torch.stack([(1.5 * t).sin().mean() for t in _tensors(out)]).sum()


def _tensors(out: Any) -> Iterator[Tensor]:
    match out:
        case Tensor() if out.requires_grad and out.is_floating_point():
            yield out
        case dict():
            yield from itertools.chain.from_iterable(map(_tensors, out.values()))
        case list() | tuple():
            yield from itertools.chain.from_iterable(map(_tensors, out))


# --- Architectures ---


# What an architecture needs beside small sizes.
OPTIONS: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "vivit": {"num_frames": 8},
    "deepseek_v3": {"num_key_value_heads": 4},
}
ROWS: dict[Callable[[], dict[str, Tensor]], str] = {
    text: """gemma2 phi falcon bloom opt gpt_neox gptj olmo2 cohere starcoder2 mpt
        glm deepseek_v3 qwen2_moe qwen3_next gpt_oss phimoe falcon_mamba rwkv mamba2
        recurrent_gemma lfm2 deberta-v2 electra distilbert fnet mpnet modernbert
        big_bird squeezebert yoso mobilebert""",
    two_texts: "mbart pegasus marian longt5 switch_transformers prophetnet fsmt",
    pictures: "beit dinov2 poolformer resnet regnet cvt",
    film: "timesformer vivit",
    captioned: "siglip",
    sound: "hubert wavlm",
    spectrum: "wav2vec2-bert",
    series: "patchtst",
}


def blocks(model: nn.Module) -> list[list[nn.Module]]:
    return [[*remat.nn.blocks(model).values()]]


def client(kind: str, inputs: Callable[[], dict[str, Tensor]]) -> Client:
    build = partial(shrunk, kind, **OPTIONS.get(kind, {}))
    return Client(build, blocks, inputs, loss)


def shared() -> nn.Module:
    """Return an encoder whose layers share a module, with all that is hooked to it."""
    model: Any = shrunk("bert")
    first, second = model.encoder.layer
    second.attention.output.LayerNorm = first.attention.output.LayerNorm
    return model


SHRUNK = {
    kind: client(kind, make) for make, row in ROWS.items() for kind in row.split()
}
SHRUNK["bert-shared"] = Client(shared, blocks, text, loss)
CLIENTS: dict[str, Client] = {**ARCHITECTURES, **DIFFUSERS, **SHRUNK}


def of_activation(name: str) -> Client:
    """An encoder with an activation of the library's."""
    return Client(partial(shrunk, "bert", hidden_act=name), blocks, text, loss)


ACTIVATIONS = [*hf.activations.ACT2FN]
