"""What a step of other libraries' models costs, by who recomputes their blocks.

Models of transformers and diffusers, with random weights. The library recomputes its
blocks by torch's checkpoint. `remat.nn.enable` has it call remat there, and
`remat.nn.apply` recomputes the blocks without the library's help. Reproduce with

    python benchmarks/libraries.py

``_times.py`` says how times are taken and compared.
"""

import argparse
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import diffusers
import torch
import transformers as hf
from _results import Results
from _systems import PLAIN
from _times import Ratio, Step, interleaved
from torch import Tensor, nn

from remat import nn as remat_nn


LIBRARY, ENABLED, APPLIED = "the library", "remat.nn.enable", "remat.nn.apply"
TARGET = 1.03
WIDTH, BLOCKS, ROWS, LENGTH = 64, 4, 4, 64
SIZES = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
}
ENCODER_DECODER = {
    "vocab_size": 128,
    "d_model": WIDTH,
    "encoder_layers": BLOCKS,
    "decoder_layers": BLOCKS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Client:
    """A model of a library, what it is called with, and its blocks where it says so."""

    model: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]
    blocks: tuple[str, ...] | None = None


def language() -> dict[str, Tensor]:
    """Return sentences, each token of which is predicted."""
    ids = torch.randint(3, 128, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids}


def pictures() -> dict[str, Tensor]:
    """Return pictures with labels."""
    values = torch.randn(ROWS, 3, 32, 32)
    return {"pixel_values": values, "labels": torch.arange(ROWS) % 2}


def sounds() -> dict[str, Tensor]:
    """Return sounds with what is said in them."""
    labels = torch.randint(3, 128, (ROWS, LENGTH))
    return {"input_features": torch.randn(ROWS, 8, 2 * LENGTH), "labels": labels}


def noise() -> dict[str, Tensor]:
    """Return noisy pictures, their steps, and what they show."""
    return {
        "sample": torch.randn(ROWS, 4, 16, 16),
        "timestep": torch.arange(ROWS),
        "encoder_hidden_states": torch.randn(ROWS, 8, 32),
    }


def llama() -> nn.Module:
    """Return a decoder."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, use_cache=False))


def mixtral() -> nn.Module:
    """Return a decoder with experts."""
    experts = {"num_key_value_heads": 2, "num_local_experts": 4}
    config = hf.MixtralConfig(**SIZES, **experts, use_cache=False)
    return hf.MixtralForCausalLM(config)


def bert() -> nn.Module:
    """Return an encoder."""
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES))


def vit() -> nn.Module:
    """Return an encoder of pictures."""
    sizes = {key: n for key, n in SIZES.items() if key != "vocab_size"}
    config = hf.ViTConfig(**sizes, image_size=32, patch_size=4)
    return hf.ViTForImageClassification(config)


def t5() -> nn.Module:
    """Return an encoder and a decoder."""
    sizes = {"vocab_size": 128, "d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH}
    blocks = {"num_layers": BLOCKS, "num_heads": 4, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**sizes, **blocks, use_cache=False)
    )


def whisper() -> nn.Module:
    """Return an encoder of sounds and a decoder."""
    positions = {"max_source_positions": LENGTH, "max_target_positions": LENGTH}
    config = hf.WhisperConfig(
        num_mel_bins=8, **positions, **ENCODER_DECODER, use_cache=False
    )
    return hf.WhisperForConditionalGeneration(config)


def unet() -> nn.Module:
    """Return a U-Net with attention to a text."""
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=4,
    )


UNET_BLOCKS = "**.resnets.*", "**.attentions.*"
CLIENTS: Mapping[str, Client] = {
    "Llama": Client(llama, language),
    "Mixtral": Client(mixtral, language),
    "BERT": Client(bert, language),
    "ViT": Client(vit, pictures),
    "T5": Client(t5, language),
    "Whisper": Client(whisper, sounds),
    "UNet": Client(unet, noise, UNET_BLOCKS),
}


def by_library(model: Any) -> Any:
    """Have a library recompute the blocks of its model."""
    if isinstance(model, hf.PreTrainedModel):
        options = {"use_reentrant": False}
        model.activation_checkpointing_enable(options)
    else:
        model.enable_gradient_checkpointing()
    return model


def step_of(client: Client, system: str) -> Step:
    """Return forward and backward of a model whose blocks a system recomputes."""
    torch.manual_seed(0)
    model, inputs = client.model().train(), client.inputs()
    if system == LIBRARY:
        by_library(model)
    elif system == ENABLED:
        remat_nn.enable(model)
    elif system == APPLIED:
        remat_nn.apply(model, client.blocks and [*client.blocks])
    leaves = [*model.parameters()]

    def step() -> None:
        out = model(**inputs)
        loss = out.sample.square().mean() if "sample" in inputs else out.loss
        loss.backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=[*CLIENTS], choices=[*CLIENTS])
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of libraries, about their own options
    torch.set_num_threads(1)
    results = Results(__file__)
    title = f"Process time of a step: median of {args.rounds} rounds, one thread"
    columns = {
        f"{PLAIN}, ms": ".1f",
        f"{LIBRARY}, ms": ".1f",
        ENABLED: ".3f",
        APPLIED: ".3f",
    }
    cells = results.table("times", title, "model", columns)
    for name in args.only:
        make = functools.partial(step_of, CLIENTS[name])
        steps = {s: make(s) for s in (PLAIN, LIBRARY, ENABLED, APPLIED)}
        found = interleaved(steps, args.rounds)
        ratios = [Ratio.of(found[s], found[LIBRARY]) for s in (ENABLED, APPLIED)]
        times = [median(found[s]) * 1e3 for s in (PLAIN, LIBRARY)]
        cells.add(name, *times, *ratios)
        cells.aim(name, f"<= {TARGET}", ratios[1], ratios[1].low <= TARGET)
    results.show(cells)
    results.finish()


if __name__ == "__main__":
    main()
