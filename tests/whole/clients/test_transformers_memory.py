"""Models of Hugging Face's transformers: caches, what hooks collect, and memory."""

import pytest
import torch
from support.clients import (
    STYLES,
    Client,
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
    snapshot,
    theirs,
)
from support.decoders import CLIENTS, DECODERS, clients, hf, tokens, without_cache
from support.zoo import plainly

from remat import remat
from remat.testing import assert_same


pytestmark = pytest.mark.clients
styles = pytest.mark.parametrize("style", STYLES)


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
