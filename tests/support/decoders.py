"""Models of Hugging Face's transformers, small and with random weights, as clients.

There is one of each kind that the library has. Configurations are the defaults but for
sizes: decoders keep their caches, dropout is as it comes. Nothing is downloaded.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from support.clients import Client
from torch import nn


hf = pytest.importorskip("transformers", reason="needs the extra `clients`")

# --- Sizes ---


HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SEEING = {**HEADS, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
SMALL = {
    **HEADS,
    "vocab_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 32,
    "decoder_start_token_id": 0,
    **ENDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
}


# --- Inputs ---


def tokens(rows=4, length=24):
    return torch.randint(3, 64, (rows, length))


def language():
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def padded_language():
    """Sentences of different lengths: masks are tensors, and made in each forward."""
    inputs = language()
    lengths = torch.arange(24, 12, -3)[:, None]
    inputs["attention_mask"] = (torch.arange(24) < lengths).long()
    return inputs


def pictures(size=32):
    labels = torch.tensor([0, 1] * 2)
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": labels}


def sound():
    # The library masks parts of the sound with NumPy's generator.
    np.random.seed(torch.randint(1000, ()).item())
    labels = torch.randint(1, 16, (2, 4))
    return {"input_values": torch.randn(2, 1600), "labels": labels}


def spectrogram():
    return {"input_features": torch.randn(2, 8, 32), "labels": tokens(2, 8)}


def captioned_pictures():
    ids = tokens(4, 8)
    ids[:, -1] = ENDS["eos_token_id"]  # what a text says is read at its end
    images = torch.randn(4, 3, 16, 16)
    return {"input_ids": ids, "pixel_values": images, "return_loss": True}


# --- Models ---


def small(name: str, **sizes: Any) -> nn.Module:
    """Return a model of a class of the library."""
    model = getattr(hf, name)
    return model(model.config_class(**sizes))


def client(
    name: str, blocks: str, inputs: Callable[[], dict[str, Any]], **sizes: Any
) -> Client:
    """Return a client; the lists of its layers are at paths, `*` is each of a list."""
    return Client(lambda: small(name, **sizes), at_paths(blocks), inputs)


def at_paths(paths: str) -> Callable[[nn.Module], list[Any]]:
    return lambda model: [found for p in paths.split() for found in _at(model, p)]


def _at(model: nn.Module, path: str) -> list[Any]:
    before, _, after = path.partition(".*.")
    found = attrgetter(before)(model)
    return [attrgetter(after)(part) for part in found] if after else [found]


def llama(**options):
    return small("LlamaForCausalLM", **GROUPED, **options)


def wav2vec2(**options):
    convolutions = {
        "conv_dim": [16, 16],
        "conv_stride": [10, 4],
        "conv_kernel": [20, 8],
    }
    embedded = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    sizes = {**HEADS, "vocab_size": 16, "intermediate_size": 48}
    return small("Wav2Vec2ForCTC", **sizes, **convolutions, **embedded, **options)


def clip():
    joint = {"projection_dim": 16}
    text, seen = {**SMALL, **joint, **ENDS}, {**SEEING, **joint}
    return small("CLIPModel", text_config=text, vision_config=seen, **joint)


def adapted(model, *targets, **options):
    """The model with adapters of peft, whose base is frozen."""
    peft = pytest.importorskip("peft", reason="needs the extra `clients`")
    config = peft.LoraConfig(r=2, target_modules=[*targets], **options)
    model = peft.get_peft_model(model, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero at first, and with it all gradients of lora_A
            torch.nn.init.normal_(p)
    return model


# --- Clients ---


LAYERS, CODERS = "model.layers", "model.encoder.layers model.decoder.layers"
of_adapted = at_paths(f"base_model.model.{LAYERS}")
LLAMA = ("LlamaForCausalLM", LAYERS)
ROUTED = {**GROUPED, "num_local_experts": 4, "output_router_logits": True}
MIXTRAL = ("MixtralForCausalLM", LAYERS, language)
# Layers with a sliding window and without, and a cache of each kind.
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
CLIENTS = {
    "llama": client(*LLAMA, language, **GROUPED),
    "llama-padded": client(*LLAMA, padded_language, **GROUPED),
    "llama-dropout": client(*LLAMA, padded_language, **GROUPED, attention_dropout=0.2),
    "mixtral": client(*MIXTRAL, **ROUTED),
    "mixtral-jitter": client(*MIXTRAL, **ROUTED, router_jitter_noise=0.1),
    "gemma": client(
        "Gemma3ForCausalLM", LAYERS, language, **GROUPED, head_dim=8, **WINDOWS
    ),
    "gpt2": client(
        *("GPT2LMHeadModel", "transformer.h", language),
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "t5": client(
        *("T5ForConditionalGeneration", "encoder.block decoder.block", language),
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bert": client("BertForMaskedLM", "bert.encoder.layer", padded_language, **SMALL),
    "vit": client(
        "ViTForImageClassification", "vit.layers", lambda: pictures(16), **SEEING
    ),
}
# Those that the tests of transformers alone leave out.
ARCHITECTURES = {
    **CLIENTS,
    "mistral": client("MistralForCausalLM", LAYERS, language, **GROUPED),
    "qwen": client("Qwen3ForCausalLM", LAYERS, language, **GROUPED, head_dim=8),
    "mamba": client(
        *("MambaForCausalLM", "backbone.layers", language),
        **{"vocab_size": 64, "hidden_size": 32, "state_size": 4, **ENDS},
        num_hidden_layers=2,
    ),
    "roberta": client("RobertaForMaskedLM", "roberta.encoder.layer", language, **SMALL),
    "bart": client(
        *("BartForConditionalGeneration", CODERS, language),
        **ENCODER_DECODER,
        max_position_embeddings=64,
    ),
    "swin": client(
        *("SwinForImageClassification", "swin.encoder.layers.*.blocks", pictures),
        image_size=32,
        patch_size=4,
        embed_dim=16,
        window_size=4,
        depths=[2, 2],
        num_heads=[2, 4],
    ),
    "convnext": client(
        *("ConvNextForImageClassification", "convnext.encoder.stages.*.layers"),
        pictures,
        patch_size=4,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_stages=2,
    ),
    # Else a layer that is dropped in the last step has no gradient.
    "wav2vec2": Client(
        lambda: wav2vec2(layerdrop=0.0), at_paths("wav2vec2.encoder.layers"), sound
    ),
    "whisper": client(
        *("WhisperForConditionalGeneration", CODERS, spectrogram),
        **ENCODER_DECODER,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
    ),
    "clip": Client(
        clip,
        at_paths("text_model.encoder.layers vision_model.encoder.layers"),
        captioned_pictures,
    ),
}

DECODERS = "llama", "mixtral", "gemma", "gpt2", "t5"
CACHED = (*DECODERS, "mistral", "qwen", "mamba", "bart", "whisper")


def without_cache(name):
    """torch's checkpoint cannot recompute a layer that appends to a cache."""
    client = ARCHITECTURES[name]
    if name.split("-")[0] not in CACHED:
        return client
    return replace(client, inputs=lambda: {**client.inputs(), "use_cache": False})


def clients(*names):
    return pytest.mark.parametrize("name", names or tuple(CLIENTS))
