"""`remat.nn.apply` in models of transformers, diffusers and peft: blocks are found."""

import copy

import pytest
import torch
from support.clients import (
    Client,
    assert_changed_trains_as_plain,
    assert_recomputed,
    built,
    changed,
    gradients,
    products,
    train,
)
from support.decoders import (
    ARCHITECTURES,
    adapted,
    language,
    llama,
    of_adapted,
    without_cache,
)
from support.diffusion import CLIENTS as DIFFUSERS

import remat
from remat.testing import assert_same


pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
hooks = pytest.importorskip("accelerate.hooks", reason="needs the extra `clients`")
peft = pytest.importorskip("peft", reason="needs the extra `clients`")
CLIENTS = {**ARCHITECTURES, **DIFFUSERS}
every = pytest.mark.parametrize("name", CLIENTS)


# --- Which blocks ---


def both(name, count=2):
    return [f"{name}.{i}" for i in range(count)]


CODERS = [*both("model.encoder.layers"), *both("model.decoder.layers")]
BLOCKS = {
    **dict.fromkeys(
        ("llama", "llama-padded", "llama-dropout", "mixtral", "mixtral-jitter"),
        both("model.layers"),
    ),
    **dict.fromkeys(("gemma", "mistral", "qwen"), both("model.layers")),
    "gpt2": both("transformer.h"),
    "t5": [*both("encoder.block"), *both("decoder.block")],
    "bert": both("bert.encoder.layer"),
    "roberta": both("roberta.encoder.layer"),
    "vit": both("vit.layers"),
    "mamba": both("backbone.layers"),
    "bart": CODERS,
    "whisper": CODERS,
    "swin": [
        *both("swin.encoder.layers.0.blocks"),
        *both("swin.encoder.layers.1.blocks"),
    ],
    "convnext": [
        *both("convnext.encoder.stages.0.layers"),
        *both("convnext.encoder.stages.1.layers"),
    ],
    "wav2vec2": both("wav2vec2.encoder.layers"),
    "clip": [*both("text_model.encoder.layers"), *both("vision_model.encoder.layers")],
    "unet": [
        *both("down_blocks.0.attentions"),
        *both("down_blocks.0.resnets"),
        *both("down_blocks.1.resnets"),
        *both("up_blocks.0.resnets", 3),
        *both("up_blocks.1.attentions", 3),
        *both("up_blocks.1.resnets", 3),
        "mid_block.attentions.0",
        *both("mid_block.resnets"),
    ],
    "flux": [*both("transformer_blocks"), *both("single_transformer_blocks")],
    "dit": both("transformer_blocks"),
    "autoencoder": [
        "encoder.down_blocks.0.resnets.0",
        "encoder.down_blocks.1.resnets.0",
        "encoder.mid_block.attentions.0",
        *both("encoder.mid_block.resnets"),
        *both("decoder.up_blocks.0.resnets"),
        *both("decoder.up_blocks.1.resnets"),
        "decoder.mid_block.attentions.0",
        *both("decoder.mid_block.resnets"),
    ],
}


@every
def test_the_blocks_that_are_found(name):
    assert [*remat.nn.blocks(built(CLIENTS[name]))] == BLOCKS[name]


# --- Training ---


@pytest.mark.parametrize("name", ["llama", "bert", "convnext", "unet"])
def test_a_model_that_is_saved_loaded_and_copied(name, tmp_path):
    client = CLIENTS[name]
    plain, ours = built(client), changed(client, remat.nn.apply)
    assert [*ours.state_dict()] == [*plain.state_dict()]
    assert repr(ours).replace("remat ", "") == repr(plain)
    copied = copy.deepcopy(ours)
    want = train(client, ours)
    assert_same(train(client, copied), want)
    assert_recomputed(client, copied)
    ours.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).train()
    assert_same(loaded.state_dict(), ours.state_dict())
    assert products(client, loaded) == products(client, plain)
    remat.nn.remove(ours)
    assert products(client, ours) == products(client, plain)


def hooked(model):
    """accelerate puts a `forward` of its own into each layer."""
    for layer in model.bert.encoder.layer:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu"))


def unhooked(model):
    for layer in model.bert.encoder.layer:
        hooks.remove_hook_from_module(layer)


@pytest.mark.parametrize("change", [remat.nn.apply, remat.nn.enable])
@pytest.mark.parametrize("order", ["hook, remat", "remat, hook", "hook, remat, unhook"])
def test_hooks_that_replace_forward(change, order):
    changes = {"hook": hooked, "unhook": unhooked, "remat": change}

    def in_order(model):
        for name in order.split(", "):
            changes[name](model)

    assert_changed_trains_as_plain(CLIENTS["bert"], in_order)


def test_the_librarys_checkpointing_is_not_added_to_ours():
    client = without_cache("llama")
    model = changed(client, remat.nn.apply)
    want = products(client, model)
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=r"remat\.nn\.apply recomputes blocks already"):
        model(**client.inputs())
    model.activation_checkpointing_disable()
    assert products(client, model) == want


# --- Adapters ---


def with_adapters(before):
    model = remat.nn.apply(llama()) if before else llama()
    return adapted(model, "q_proj", "v_proj", "up_proj", lora_dropout=0.1)


ADAPTED = Client(lambda: with_adapters(False), of_adapted, language)


@pytest.mark.parametrize("before", [True, False])
def test_adapters_before_and_after(before):
    """The embeddings are frozen: no input of the first layer requires grad."""
    torch.manual_seed(0)
    ours = with_adapters(before).train()
    if not before:
        assert [*remat.nn.blocks(ours)] == both("base_model.model.model.layers")
        remat.nn.apply(ours)
    plain = built(ADAPTED)
    assert_same(train(ADAPTED, ours), train(ADAPTED, plain))
    trained = [p for p in ours.parameters() if p.requires_grad]
    assert 0 < len(trained) < len([*ours.parameters()]) / 2
    assert all(p.grad.abs().max() > 0 for p in trained)
    assert_recomputed(ADAPTED, ours)
    merged, want = ours.merge_and_unload(), plain.merge_and_unload()
    assert_same(merged.state_dict(), want.state_dict())
    inputs = language()
    assert_same(merged.eval()(**inputs).logits, want.eval()(**inputs).logits)


def test_adapters_are_saved_and_loaded(tmp_path):
    ours = changed(ADAPTED, remat.nn.apply)
    train(ADAPTED, ours)
    ours.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    remat.nn.apply(loaded)
    results = []
    for model in ours, loaded:
        torch.manual_seed(3)
        model.zero_grad()
        model.train()(**language()).loss.backward()
        results.append([g for g in gradients(model) if torch.is_tensor(g)])
    assert_same(results[1], results[0])
