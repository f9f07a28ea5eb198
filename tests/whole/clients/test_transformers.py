"""Models of transformers, unmodified: trainings, caches, hooks, memory."""

from dataclasses import replace

import pytest
import torch
from support.clients import (
    STYLES,
    Client,
    adamw,
    assert_leaves_nothing_behind,
    assert_moved,
    assert_no_more_than_theirs,
    assert_recomputed,
    assert_trains_as_plain,
    built,
    bytes_after_forward,
    bytes_at_peak,
    gradients,
    of_style,
    products,
    replace_forward,
    sgd,
    snapshot,
    theirs,
    train,
)
from support.decoders import CLIENTS, DECODERS, clients, hf, tokens, without_cache
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


# --- Caches ---


@styles
@clients(*DECODERS)
def test_a_cache_is_returned_as_plain_returns_it(name, style):
    """Each layer appends to it once: not again in the recompute."""
    client = CLIENTS[name]
    caches, want = [], []
    for wrap in plainly, remat:
        model = of_style(client, style, wrap)
        torch.manual_seed(1)
        out = model(**client.inputs())
        client.loss(out).backward()
        caches.append(out.past_key_values)
        want.append([snapshot(out), gradients(model)])
    assert_same(want[1], want[0])
    assert type(caches[1]) is type(caches[0])
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 24
    assert_recomputed(client, model)


def two_segments(model):
    """Train on a text in two parts: the second part's gradient reaches the first."""
    torch.manual_seed(1)
    ids = tokens(2, 16)
    cache = hf.DynamicCache(config=model.config)
    losses = []
    for part in ids[:, :10], ids[:, 10:]:
        out = model(input_ids=part, labels=part, past_key_values=cache)
        assert out.past_key_values is cache
        losses.append(out.loss)
    sum(losses).backward()
    assert cache.get_seq_length() == 16
    return [snapshot(losses), snapshot(cache), gradients(model)]


@styles
@clients("llama", "mixtral", "gemma", "gpt2")
def test_gradients_through_a_cache_that_is_handed_on(name, style):
    client = CLIENTS[name]
    want = two_segments(built(client))
    ours = of_style(client, style, remat)
    for _ in range(3):
        ours.zero_grad()
        assert_same(two_segments(ours), want)
    assert_recomputed(client, ours)


# --- What leaves a layer by hooks ---


@styles
@clients("llama", "mixtral", "bert", "vit")
def test_losses_of_what_hooks_collect(name, style):
    """The hidden states and attentions that hooks collect take part in the loss."""
    plain = CLIENTS[name]

    def build():
        model = plain.build()
        model.set_attn_implementation("eager")
        return model

    def inputs():
        options = "output_hidden_states", "output_attentions"
        return {**plain.inputs(), **dict.fromkeys(options, True)}

    def loss(out):
        collected = [*out.hidden_states, *out.attentions]
        return out.loss + sum(t.sin().mean() for t in collected)

    client = Client(build, plain.blocks, inputs, loss)
    assert_trains_as_plain(client, style, remat)


@styles
def test_one_backward_for_each_of_two_losses(style):
    """The routers' loss comes out by hooks; each backward reads a part of the graph."""
    client = CLIENTS["mixtral"]
    seen = []
    for wrap in plainly, remat:
        model = of_style(client, style, wrap)
        torch.manual_seed(1)
        out = model(**client.inputs())
        out.aux_loss.backward(retain_graph=True)
        seen.append(gradients(model))
        out.logits.sin().mean().backward()
        seen.append(gradients(model))
    assert_same(seen[2:], seen[:2])
    assert_moved(model, {"parameters": []})
    assert_recomputed(client, model)


# --- Memory ---


# The profiler takes seconds, so the second style is run for two models.
MEMORY = [(name, "forward") for name in ("mixtral", "gpt2", "t5", "bert")]

MEMORY += [(name, style) for name in ("llama", "vit") for style in STYLES]
of_memory = pytest.mark.parametrize(("name", "style"), MEMORY)


@of_memory
def test_no_more_work_and_bytes_than_with_torchs_checkpoint(name, style):
    all_bytes, held, all_at_peak, peak = assert_no_more_than_theirs(
        without_cache(name), style
    )
    assert held < all_bytes / 2
    assert peak < all_at_peak


@of_memory
def test_a_forward_holds_less_than_plain_with_the_cache_that_it_returns(name, style):
    client = CLIENTS[name]
    plain, ours = (of_style(client, style, wrap) for wrap in (plainly, remat))
    all_bytes, held = (bytes_after_forward(client, model) for model in (plain, ours))
    assert held < all_bytes * 2 / 3


@of_memory
def test_steps_leave_nothing_behind(name, style):
    assert_leaves_nothing_behind(CLIENTS[name], style)


@styles
@clients("llama", "bert")
def test_an_optimizer_in_the_backward(name, style):
    """Each parameter takes its step when it has its gradient, and lets go of that."""
    client = without_cache(name)

    def steps_at_once(wrap):
        model = of_style(client, style, wrap)

        @torch.no_grad()
        def step(p):
            p -= 0.1 * p.grad
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        torch.manual_seed(1)
        for _ in range(3):
            client.loss(model(**client.inputs())).backward()
        return model, [snapshot(p) for p in model.parameters()]

    (plain, want), (other, others), (ours, got) = map(
        steps_at_once, (plainly, theirs, remat)
    )
    assert_same(others, want)
    assert_same(got, want)
    models = plain, other, ours
    all_bytes, allowed, peak = (bytes_at_peak(client, model) for model in models)
    assert peak <= allowed
    assert peak < all_bytes
