"""Models of Hugging Face's transformers, unmodified: trainings are those of plain."""

from dataclasses import replace

import pytest
import torch
from support.clients import (
    STYLES,
    adamw,
    assert_recomputed,
    assert_trains_as_plain,
    built,
    bytes_after_forward,
    of_style,
    products,
    replace_forward,
    sgd,
    train,
)
from support.decoders import CLIENTS, clients, tokens, without_cache
from support.zoo import plainly
from torch import nn

from remat import policies, remat
from remat.testing import assert_same, count_ops


pytestmark = pytest.mark.clients
styles = pytest.mark.parametrize("style", STYLES)


# --- Training ---


@styles
@clients()
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_three_steps_are_those_of_plain(name, style, optimizer):
    assert_trains_as_plain(CLIENTS[name], style, remat, optimizer=optimizer)


@styles
@clients("llama", "mixtral", "t5", "bert", "vit")
def test_gradients_add_up_over_micro_batches(name, style):
    assert_trains_as_plain(CLIENTS[name], style, remat, micro_batches=2)


@styles
@clients("llama", "bert")
def test_under_autocast(name, style):
    client = CLIENTS[name]

    def build():
        model = client.build()
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return model

    assert_trains_as_plain(replace(client, build=build), style, remat)


@styles
@clients("llama", "t5")
def test_layers_that_thaw_during_training(name, style):
    def thaw(model, step):
        for block in CLIENTS[name].blocks(model):
            block[0].requires_grad_(step > 0)

    assert_trains_as_plain(CLIENTS[name], style, remat, before=thaw)


@styles
def test_a_model_that_generates_between_steps(style):
    """Under no_grad nothing is recomputed, and a cache grows token by token."""
    ids = tokens(2, 5)
    greedy = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    written = []

    def generate(model, step):
        model.eval()
        written.append(model.generate(ids, max_new_tokens=6, **greedy))
        model.train()

    assert_trains_as_plain(CLIENTS["llama"], style, remat, before=generate)
    assert_same(written[3:], written[:3])
    assert written[0].shape == (2, 11)


@clients("llama", "mixtral", "t5", "bert")
def test_parts_of_layers(name):
    """Attention and feed-forward of each layer, each by itself, and the layer too."""

    def parts(blocks, wrap):
        for layer in (layer for block in blocks for layer in block):
            for part in layer.children():
                if not isinstance(part, nn.ModuleList):
                    part.forward = wrap(part.forward)
        replace_forward(blocks, wrap)

    assert_trains_as_plain(CLIENTS[name], parts, remat, times=2)


@clients("llama", "mixtral", "t5", "bert", "vit")
def test_in_the_place_of_the_checkpoint_that_models_call(name):
    """Models have a hook for a checkpoint: they give it a partial of their layer."""

    def enable(blocks, wrap):
        for layer in (layer for block in blocks for layer in block):
            layer.gradient_checkpointing = wrap is not plainly
            layer._gradient_checkpointing_func = lambda fn, *args: wrap(fn)(*args)

    assert_trains_as_plain(without_cache(name), enable, remat)


# --- Policies ---


POLICIES = {
    "prune": {"prune": True},
    "dots": {"policy": policies.dots_saveable},
    "everything": {"policy": policies.everything_saveable},
}


@styles
@clients("llama", "mixtral", "t5", "bert", "vit")
@pytest.mark.parametrize("options", POLICIES)
def test_policies(name, style, options):
    """Products are kept, all but attention's own, or else run again, once."""
    client, wrap = CLIENTS[name], remat(**POLICIES[options])
    want = train(client, built(client))
    ours = of_style(client, style, wrap)
    assert_same(train(client, ours), want)
    if options == "prune":
        assert_recomputed(client, ours)
    else:
        ran, of_plain = (products(client, model) for model in (ours, built(client)))
        assert ran == of_plain
        nothing = of_style(client, style, remat)
        kept, less = (bytes_after_forward(client, model) for model in (ours, nothing))
        assert kept > less


# --- torch.func ---


@styles
@clients("llama", "vit")
def test_under_torch_func(name, style):
    """A gradient with respect to a dict of parameters, three times by one model."""
    client = without_cache(name)

    def grads(model, inputs):
        def loss(params):
            return client.loss(torch.func.functional_call(model, params, (), inputs))

        return torch.func.grad(loss)(dict(model.named_parameters()))

    plain, ours = (of_style(client, style, wrap) for wrap in (plainly, remat))
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = client.inputs()
        with count_ops() as ops:
            want = grads(plain, inputs)
        with count_ops() as more:
            got = grads(ours, inputs)
        assert_same(got, want, reassociated=True)
        assert more["mm"] + more["addmm"] > ops["mm"] + ops["addmm"]
    assert all(g.abs().max() > 0 for g in want.values())


# --- The model stays what it is ---


def test_the_state_dict_of_a_model_whose_forwards_are_replaced_is_plains():
    client = CLIENTS["llama"]
    plain, ours = (of_style(client, "forward", wrap) for wrap in (plainly, remat))
    train(client, plain)
    ours.load_state_dict(plain.state_dict())
    assert_same(ours.state_dict(), plain.state_dict())
    assert_same(train(client, ours), train(client, plain))
    assert_recomputed(client, ours)
