"""Chains in compiled code, and decoder layers of another package."""

import pytest
import torch
from support.loops import Plain, by_fori_loop, by_sequential
from support.tables import rows
from support.traced import ran
from support.zoo import W, X, leaves_of, scalar

from remat import chain
from remat.testing import assert_same, count_ops


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@rows("program", {"fori_loop": by_fori_loop, "sequential": by_sequential})
def test_loops_of_known_length_are_compiled(program):
    def gradients(loops, w, x):
        return torch.autograd.grad(scalar(program(loops, w, x)), (w, x))

    w, x = leaves_of(W, X)
    compiled = torch.compile(
        lambda w, x: program(chain, w, x), backend="aot_eager", fullgraph=True
    )

    def run():
        return torch.autograd.grad(scalar(compiled(w, x)), (w, x))

    run()
    got, ops = ran(run)
    assert_same(got, gradients(Plain, w, x), reassociated=True)
    assert ops["tanh"] >= 20


def test_a_while_loop_is_refused_in_compiled_code():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return chain.while_loop(lambda h: h.sum() > 1, torch.sin, x, checkpoints=2)

    with pytest.raises(Exception, match="while_loop cannot be compiled: how many"):
        compiled(leaves_of(X)[0])


def test_decoder_layers_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=4,
        vocab_size=11,
        attn_implementation="eager",
    )

    def program(loops):
        torch.manual_seed(0)
        model = llama.LlamaModel(config).train()
        x = torch.randn(2, 5, 16, requires_grad=True)
        turns = model.rotary_emb(x, torch.arange(5)[None])
        layers = [
            lambda h, layer=layer: layer(h, position_embeddings=turns)
            for layer in model.layers
        ]
        h = loops.sequential(layers, x, checkpoints=2)
        h.square().mean().backward()
        return h.detach(), x.grad, [p.grad for p in model.layers.parameters()]

    with count_ops() as plain:
        want = program(Plain)
    with count_ops() as ops:
        got = program(chain)
    assert_same(got, want)
    assert ops["silu"] > 2 * plain["silu"] - 1 == 7
