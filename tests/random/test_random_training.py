"""Training with dropout ends in the same parameters, bit for bit, with remat.

A transformer of two blocks, no weight of which is used on both sides of a call, is
trained for twenty steps. A mask that differed once would show in every parameter.
"""

import contextlib
import functools

import pytest
import torch
from support.tables import rows
from support.zoo import plainly
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from remat import random, remat
from remat.testing import assert_same, count_ops, live_bytes


STEPS, BLOCKS = 20, 2
VOCABULARY, LENGTH, WIDTH, HEADS, P = 16, 8, 32, 2, 0.1
TOKENS = (torch.arange(2)[:, None] * 5 + torch.arange(LENGTH + 1) * 3) % VOCABULARY
KEY = random.key(0)


def dropped(x, source, i):
    """Drop elements of `x`: the i-th time from this key, generator or global stream."""
    if isinstance(source, random.Key):
        return random.dropout(random.fold_in(source, i), x, P)
    if isinstance(source, torch.Generator):
        return x * (torch.rand(x.shape, generator=source) > P) / (1 - P)
    return functional.dropout(x, P)


def attention(q, k, v, source):
    if source is None:
        attend = functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, dropout_p=P)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return dropped(weights, source, 0) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "ab")
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, source):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        a = attention(*heads.permute(2, 0, 3, 1, 4), source).transpose(1, 2).flatten(2)
        x = x + dropped(self.out(a), source, 1)
        h = dropped(functional.gelu(self.up(self.norms[1](x))), source, 2)
        return x + dropped(self.down(h), source, 3)


class Model(nn.Module):
    def __init__(self, block, wrap):
        super().__init__()
        self.wrap = wrap
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, source):
        x = dropped(self.embedding(tokens[:, :-1]) + self.positions, source, 0)
        for i, block in enumerate(self.blocks):
            keyed = isinstance(source, random.Key)
            own = random.fold_in(source, 1 + i) if keyed else source
            x = self.wrap(block)(x, own)
        return functional.cross_entropy(
            self.head(x).flatten(0, 1), tokens[:, 1:].flatten()
        )


# --- What is drawn from, in each step ---------------------------------------------


def keys(step, _):
    return random.fold_in(KEY, step), contextlib.nullcontext()


def a_generator(_, generator):
    return generator, contextlib.nullcontext()


def the_global_stream(*_):
    return None, contextlib.nullcontext()


def bound_keys(step, _):
    return None, random.bind(random.fold_in(KEY, step))


# --- Training ---------------------------------------------------------------------


def by_backward(model, draws, optimizer):
    """Train, with each backward outside of what the forward drew in."""
    optimizer = optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        source, bound = draws(step)
        with bound:
            loss = model(TOKENS, source)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def by_func_grad(model, draws, _):
    """Train without state: the parameters and momenta are arguments and results."""
    params = {n: p.detach() for n, p in model.named_parameters()}
    momenta = {n: torch.zeros_like(p) for n, p in params.items()}
    losses = []
    for step in range(STEPS):
        source, bound = draws(step)
        with bound:
            loss = lambda p, s=source: functional_call(model, p, (TOKENS, s))
            gradients, value = grad_and_value(loss)(params)
        momenta = {n: 0.9 * m + gradients[n] for n, m in momenta.items()}
        params = {n: p - 0.03 * momenta[n] for n, p in params.items()}
        losses.append(value.item())
    return losses, params


def trained(wrap, draws, train, block, optimizer):
    """Return what training ends in, with the streams, and how often blocks ran."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    model = Model(block, wrap)
    start = torch.get_rng_state()
    with count_ops() as ops:
        losses, params = train(model, lambda step: draws(step, generator), optimizer)
    state = torch.get_rng_state()
    assert losses[-1] < 0.8 * losses[0], "it learns"
    moved = not torch.equal(start, state)
    return (losses, params, state, generator.get_state()), ops["gelu"], moved


ADAM = functools.partial(torch.optim.AdamW, lr=3e-3)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9)

RUNS = {
    "keys": (keys, by_backward, Block, ADAM),
    "a generator": (a_generator, by_backward, Block, MOMENTUM),
    "the global stream": (the_global_stream, by_backward, Block, ADAM),
    "bound keys": (bound_keys, by_backward, Block, MOMENTUM),
    "keys, func.grad": (keys, by_func_grad, Block, None),
    "the global stream, func.grad": (the_global_stream, by_func_grad, Block, None),
}


@rows("run", RUNS, fast=("bound keys", "a generator"))
def test_training_ends_in_the_same_parameters_and_streams(run):
    want, once, theirs = trained(plainly, *run)
    got, twice, ours = trained(remat, *run)
    assert_same(got, want)
    assert (once, twice) == (STEPS * BLOCKS, 2 * STEPS * BLOCKS)
    assert theirs == ours == (run[0] is the_global_stream)


def checkpointed(fn):
    return functools.partial(checkpoint, fn, use_reentrant=False)


def test_a_mask_that_differed_would_have_shown():
    run = RUNS["a generator"]
    want, once, _ = trained(plainly, *run)
    got, twice, _ = trained(checkpointed, *run)
    # torch's own checkpoint draws from where the generator has got to.
    assert twice == 2 * once
    assert not any(torch.equal(p, want[1][n]) for n, p in got[1].items())


# --- What is kept for the backward ------------------------------------------------

LAYERS = 3
KEY_BYTES, STATE_BYTES = 16, torch.get_rng_state().nbytes
NUMBER_BYTES = 8  # of a Python number, which torch saves past hooks
GENERATOR = torch.Generator().manual_seed(3)


def layers(x, source):
    for i in range(LAYERS):
        x = dropped(x.sin(), source, i)
    return x


# By what is wrapped and drawn from: the tensors, and other bytes, besides the input.
KEPT = {
    # In plain the inputs of the sines, but for the first, and the result.
    "masks": (plainly, None, 2 * LAYERS, 0),
    "keys": (plainly, KEY, LAYERS, LAYERS * KEY_BYTES),
    "torch's checkpoint, a state": (checkpointed, None, 1, STATE_BYTES),
    # The states of streams are kept, if they moved, in no tensor.
    "remat, a state": (remat, None, 1, 0),
    "remat, the state of a generator": (remat, GENERATOR, 1, LAYERS * NUMBER_BYTES),
    "remat, nothing": (remat, KEY, 1, 0),
}


@rows("wrap, source, tensors, other", KEPT)
def test_what_dropout_keeps(wrap, source, tensors, other):
    x = torch.rand(2000, requires_grad=True)
    assert live_bytes(lambda: wrap(layers)(x, source)) == tensors * x.nbytes + other
    y = wrap(layers)(x, source)
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == (0 if tensors > 1 else LAYERS)
    assert not x.grad.isnan().any()


@pytest.mark.parametrize("source", [KEY, None], ids=["keys", "the global stream"])
def test_a_block_keeps_its_input_alone(source):
    block, x = Block(), torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    # With a key the scores are divided by a number.
    number = 0 if source is None else NUMBER_BYTES
    assert live_bytes(lambda: remat(block)(x, source)) == x.nbytes + number
    assert live_bytes(lambda: block(x, source)) > 10 * x.nbytes


def test_dropout_costs_a_key_outside_of_remat_and_nothing_within(monkeypatch):
    model = Model(Block, remat)
    run = lambda: model(TOKENS, KEY)
    run()
    with_dropout = live_bytes(run)
    monkeypatch.setattr(random, "dropout", lambda _key, x, _p: x)
    # The key of the dropout after the embedding. Those of the blocks are inputs.
    assert with_dropout - live_bytes(run) == KEY_BYTES
