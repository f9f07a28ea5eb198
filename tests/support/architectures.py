"""More models of transformers, small and with random weights, as clients.

With those of `decoders` there is one of each kind that the library has. Configurations
are the defaults but for sizes, so dropout is on where it comes so.
"""

from dataclasses import replace

import numpy as np
import torch
from support.clients import Client
from support.decoders import CLIENTS as DECODERS, GROUPED, SMALL, hf, language, tokens


# --- Inputs ---


def pictures():
    return {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "labels": torch.tensor([0, 1] * 2),
    }


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
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(4, 3, 16, 16),
        "return_loss": True,
    }


# --- Models ---


ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 0,
    **ENDS,
}


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**GROUPED))


def qwen():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8))


def mamba():
    config = hf.MambaConfig(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, **ENDS
    )
    return hf.MambaForCausalLM(config)


def roberta():
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL))


def bart():
    config = hf.BartConfig(max_position_embeddings=64, **ENCODER_DECODER)
    return hf.BartForConditionalGeneration(config)


def swin():
    config = hf.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    )
    return hf.SwinForImageClassification(config)


def convnext():
    config = hf.ConvNextConfig(
        patch_size=4, hidden_sizes=[16, 32], depths=[2, 2], num_stages=2
    )
    return hf.ConvNextForImageClassification(config)


def wav2vec2(**options):
    config = hf.Wav2Vec2Config(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=[16, 16],
        conv_stride=[10, 4],
        conv_kernel=[20, 8],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        **options,
    )
    return hf.Wav2Vec2ForCTC(config)


def whisper():
    config = hf.WhisperConfig(
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        **ENCODER_DECODER,
    )
    return hf.WhisperForConditionalGeneration(config)


def clip():
    text = {**SMALL, "projection_dim": 16, **ENDS}
    vision = {**SMALL, "projection_dim": 16, "image_size": 16, "patch_size": 4}
    del vision["vocab_size"], vision["max_position_embeddings"]
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return hf.CLIPModel(config)


# --- Clients ---


def both_stacks(model):
    return [model.model.encoder.layers, model.model.decoder.layers]


CLIENTS = {
    **DECODERS,
    "mistral": Client(mistral, lambda m: [m.model.layers], language),
    "qwen": Client(qwen, lambda m: [m.model.layers], language),
    "mamba": Client(mamba, lambda m: [m.backbone.layers], language),
    "roberta": Client(roberta, lambda m: [m.roberta.encoder.layer], language),
    "bart": Client(bart, both_stacks, language),
    "swin": Client(swin, lambda m: [s.blocks for s in m.swin.encoder.layers], pictures),
    "convnext": Client(
        convnext, lambda m: [s.layers for s in m.convnext.encoder.stages], pictures
    ),
    # Else a layer that is dropped in the last step has no gradient.
    "wav2vec2": Client(
        lambda: wav2vec2(layerdrop=0.0), lambda m: [m.wav2vec2.encoder.layers], sound
    ),
    "whisper": Client(whisper, both_stacks, spectrogram),
    "clip": Client(
        clip,
        lambda m: [m.text_model.encoder.layers, m.vision_model.encoder.layers],
        captioned_pictures,
    ),
}

CACHED = (
    "llama",
    "mixtral",
    "gemma",
    "gpt2",
    "t5",
    "mistral",
    "qwen",
    "mamba",
    "bart",
    "whisper",
)


def without_cache(name):
    client = CLIENTS[name]
    if name.split("-")[0] not in CACHED:
        return client
    return replace(client, inputs=lambda: {**client.inputs(), "use_cache": False})
