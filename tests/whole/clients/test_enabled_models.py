"""`remat.nn.enable` in models of transformers, diffusers and peft.

Each is also compared with the gradient checkpointing of its library: work, bytes, and
what it does about caches.
"""

import copy
from dataclasses import replace

import pytest
import torch
from support.clients import (
    Client,
    assert_changed_trains_as_plain,
    assert_no_more,
    assert_recomputed,
    built,
    bytes_after_forward,
    changed,
    products,
    train,
)
from support.decoders import (
    ARCHITECTURES,
    CACHED,
    adapted,
    tokens,
    wav2vec2,
    without_cache,
)
from support.diffusion import CLIENTS as DIFFUSERS, diffusers
from support.runs import saved_and_loaded

import remat
from remat import policies
from remat.testing import assert_same, count_ops


pytestmark = [
    pytest.mark.clients,
    # peft asks transformers by an old name.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
pytest.importorskip("peft", reason="needs the extra `clients`")


def client_of(name, *targets):
    """A model with adapters that train, in which nothing else does."""

    def build():
        return adapted(ARCHITECTURES[name].build(), *targets, lora_dropout=0.1)

    blocks = ARCHITECTURES[name].blocks
    inputs = without_cache(name).inputs
    return Client(build, lambda m: blocks(m.base_model.model), inputs, is_adapted=True)


PEFT = {
    "lora-llama": client_of("llama", "q_proj", "v_proj"),
    "lora-bert": client_of("bert", "query", "value"),
    "lora-t5": client_of("t5", "q", "v"),
}
SUPPORTED = [name for name in ARCHITECTURES if name != "convnext"]
CLIENTS = {**{n: without_cache(n) for n in SUPPORTED}, **DIFFUSERS, **PEFT}
# Both a stage and its layers are recomputed: the library says so.
NESTED = {"swin": 2}
every = pytest.mark.parametrize("name", CLIENTS)


def checkpointed(model):
    """Switch on the checkpointing of the library, which is torch's."""
    if hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        model.activation_checkpointing_enable({"use_reentrant": False})


@every
def test_three_steps_are_those_of_plain(name):
    times = NESTED.get(name, 1)
    assert_changed_trains_as_plain(CLIENTS[name], remat.nn.enable, times=times)


@every
def test_no_more_work_and_bytes_than_with_the_librarys_own(name):
    client = CLIENTS[name]
    changes = lambda model: model, checkpointed, remat.nn.enable
    models = [changed(client, change) for change in changes]
    of_plain, held, at_peak, peak = assert_no_more(client, *models)
    assert held < of_plain / 2
    assert peak < at_peak


@pytest.mark.parametrize("name", ["llama", "bert", "dit"])
def test_with_a_policy_products_are_kept(name):
    client = CLIENTS[name]

    def kept(model):
        remat.nn.enable(model, policy=policies.dots_saveable)

    plain, ours = built(client), changed(client, kept)
    assert_same(train(client, ours), train(client, plain))
    assert products(client, ours) == products(client, plain)


def test_layers_that_are_dropped_at_random():
    client = replace(ARCHITECTURES["wav2vec2"], build=lambda: wav2vec2(layerdrop=0.5))
    for change in remat.nn.enable, remat.nn.apply:
        plain, ours = built(client), changed(client, change)
        assert_same(train(client, ours), train(client, plain))
        (_, ran), (_, of_plain) = (products(client, model) for model in (ours, plain))
        assert ran > of_plain


def test_a_model_without_checkpointing_is_refused():
    model = built(ARCHITECTURES["convnext"])
    with pytest.raises(TypeError, match=r"ConvNextFor.* Use remat.nn.apply\(model\)"):
        remat.nn.enable(model)


# --- The library's own switch ---


@pytest.mark.parametrize("name", ["llama", "unet"])
def test_ours_stays_before_and_after_the_librarys_switch(name):
    client, policy = CLIENTS[name], policies.dots_saveable
    model = changed(client, checkpointed)
    remat.nn.enable(model, policy=policy)
    found = remat.nn.applied(model)
    assert {(each.by, each.policy) for each in found.values()} == {
        ("remat.nn.enable", policy)
    }
    want = products(client, model)
    held = bytes_after_forward(client, model)
    checkpointed(model)
    assert products(client, model) == want
    assert bytes_after_forward(client, model) == held
    assert remat.nn.applied(model) == found
    remat.nn.remove(model)
    assert_same(train(client, model), train(client, built(client)))
    assert products(client, model) == products(client, built(client))


def test_layers_that_the_library_was_told_to_leave_out():
    client = CLIENTS["llama"]
    model = built(client)
    model.activation_checkpointing_enable(every_n_layers=2)
    for again in (
        remat.nn.enable(model),
        remat.nn.enable(built(client), every_n_layers=2),
    ):
        assert [*remat.nn.applied(again)] == ["model.layers.0"]
        (_, ran), (_, of_plain) = (products(client, m) for m in (again, built(client)))
        assert ran == of_plain + 6
        assert_same(train(client, again), train(client, built(client)))


def test_a_library_that_cannot_leave_out_layers():
    with pytest.raises(ValueError, match=r"the switch of diffusers in this UNet2D"):
        remat.nn.enable(built(CLIENTS["unet"]), every_n_layers=2)


PAIRS = [
    (remat.nn.enable, remat.nn.apply),
    (remat.nn.apply, remat.nn.enable),
    (checkpointed, remat.nn.apply),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("name", ["llama", "unet", "dit"])
def test_apply_and_enable_refuse_each_other(name, first, second):
    """They nested: 279 products of the UNet for 211."""
    model = changed(CLIENTS[name], first)
    with pytest.raises(ValueError, match=r"is recomputed already, by "):
        second(model)


# --- A library whose checkpointing computes something else ---


def tiny_autoencoder(change=None):
    torch.manual_seed(0)
    channels = {"encoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 2)}
    mirrored = {"decoder_block_out_channels": (8, 8), "num_decoder_blocks": (2, 1)}
    model = diffusers.AutoencoderTiny(**channels, **mirrored).train()
    if change is not None:
        change(model)
    return model


def coded(model):
    """A step through both halves, past the rounding in `forward`: bits, operations."""
    torch.manual_seed(1)
    pictures = torch.rand(2, 3, 16, 16)
    with count_ops() as ops:
        out = model.decode(model.encode(pictures).latents).sample
        out.square().mean().backward()
    return [out, [p.grad for p in model.parameters()]], ops["convolution"]


def test_a_tiny_autoencoder_has_plains_bits():
    """With its library's checkpointing its encoder does not scale the pictures."""
    want, convolutions = coded(tiny_autoencoder())
    with pytest.raises(AssertionError, match="differs in value"):
        assert_same(coded(tiny_autoencoder(checkpointed))[0], want)
    for change in remat.nn.enable, lambda m: (checkpointed(m), remat.nn.enable(m)):
        model = tiny_autoencoder(change)
        found, ran = coded(model)
        assert_same(found, want)
        assert ran == 2 * convolutions - 2  # but the last of each half
        assert [*remat.nn.applied(model)] == ["encoder", "decoder"]
    checkpointed(model)  # again, as a trainer does
    assert coded(copy.deepcopy(model))[1] == ran
    model.zero_grad()
    assert_same(coded(model)[0], want)
    remat.nn.remove(model)
    model.zero_grad()
    assert coded(model)[1] == convolutions
    assert remat.nn.applied(model) == {}


# --- Caches ---


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_is_left_out_where_the_library_leaves_it_out(name):
    client = ARCHITECTURES[name]
    other, ours = (changed(client, c) for c in (checkpointed, remat.nn.enable))
    assert ours.config.use_cache
    assert_same(train(client, ours), train(client, other))
    assert_recomputed(without_cache(name), ours)


GENERATE = {"do_sample": False, "max_new_tokens": 6}


def generated(model):
    ids = tokens(2, 5)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **GENERATE)
        logits = (
            model(input_ids=ids, decoder_input_ids=ids).logits
            if (model.config.is_encoder_decoder)
            else model(input_ids=ids).logits
        )
    return out, logits


@pytest.mark.parametrize("name", [n for n in CACHED if n != "whisper"])
def test_generation_is_as_before_while_enabled_and_once_removed(name):
    client = ARCHITECTURES[name]
    model = built(client).eval()
    seen = []
    for change in lambda m: m, remat.nn.enable, remat.nn.remove:
        change(model)
        torch.manual_seed(0)
        seen.append(generated(model))
    assert_same(seen[1:], [seen[0]] * 2)
    model.train()
    assert_same(train(client, model), train(client, built(client)))


# --- Copies ---


@pytest.mark.parametrize("again", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("name", ["llama", "bert", "dit", "lora-llama"])
def test_a_copy_is_enabled_too(name, again):
    client = CLIENTS[name]
    ours = again(changed(client, remat.nn.enable))
    assert_same(train(client, ours), train(client, built(client)))
    assert_recomputed(client, ours)


@pytest.mark.parametrize("name", ["llama", "swin", "unet"])
def test_what_save_pretrained_writes_is_plains(name, tmp_path):
    client = CLIENTS[name]
    plain, ours = built(client), changed(client, remat.nn.enable)
    assert [*ours.state_dict()] == [*plain.state_dict()]
    train(client, ours)
    ours.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).train()
    assert_same(loaded.state_dict(), ours.state_dict())
    assert products(client, loaded) == products(client, plain)
