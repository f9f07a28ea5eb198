"""Small language models of transformers, and sentences for them."""

import pytest
import torch


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


def tokens(rows=4, length=24):
    return torch.randint(3, 64, (rows, length))


def language():
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def llama(**options):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, **options))
