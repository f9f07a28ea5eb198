"""Models of Hugging Face's transformers, small and with random weights, as clients.

Configurations are the defaults but for sizes: decoders keep their caches, dropout is as
it comes. Nothing is downloaded.
"""

from dataclasses import replace

import pytest
import torch
from support.clients import Client


hf = pytest.importorskip("transformers", reason="needs the extra `clients`")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


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


def images():
    return {
        "pixel_values": torch.randn(4, 3, 16, 16),
        "labels": torch.tensor([0, 1] * 2),
    }


# --- Models ---


def llama(**options):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, **options))


def mixtral(**options):
    config = hf.MixtralConfig(
        **GROUPED, num_local_experts=4, output_router_logits=True, **options
    )
    return hf.MixtralForCausalLM(config)


def gemma():
    """Layers with a sliding window and without, and a cache of each kind."""
    config = hf.Gemma3TextConfig(
        **GROUPED,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return hf.Gemma3ForCausalLM(config)


def gpt2():
    config = hf.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPT2LMHeadModel(config)


def t5():
    config = hf.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL))


def vit():
    config = {**SMALL, "image_size": 16, "patch_size": 4}
    del config["vocab_size"], config["max_position_embeddings"]
    return hf.ViTForImageClassification(hf.ViTConfig(**config))


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


def of_decoder(model):
    return [model.model.layers]


def of_adapted(model):
    return of_decoder(model.base_model.model)


CLIENTS = {
    "llama": Client(llama, of_decoder, language),
    "llama-padded": Client(llama, of_decoder, padded_language),
    "llama-dropout": Client(
        lambda: llama(attention_dropout=0.2), of_decoder, padded_language
    ),
    "mixtral": Client(mixtral, of_decoder, language),
    "mixtral-jitter": Client(
        lambda: mixtral(router_jitter_noise=0.1), of_decoder, language
    ),
    "gemma": Client(gemma, of_decoder, language),
    "gpt2": Client(gpt2, lambda model: [model.transformer.h], language),
    "t5": Client(
        t5, lambda model: [model.encoder.block, model.decoder.block], language
    ),
    "bert": Client(bert, lambda model: [model.bert.encoder.layer], padded_language),
    "vit": Client(vit, lambda model: [model.vit.layers], images),
}

DECODERS = "llama", "mixtral", "gemma", "gpt2", "t5"


def without_cache(name):
    """torch's checkpoint cannot recompute a layer that appends to a cache."""
    client = CLIENTS[name]
    if name not in DECODERS:
        return client
    return replace(client, inputs=lambda: {**client.inputs(), "use_cache": False})


def clients(*names):
    return pytest.mark.parametrize("name", names or tuple(CLIENTS))
