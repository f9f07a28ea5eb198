"""Layers of torch are recomputed with their dropout and their parametrizations."""

import pytest
import torch
from support.runs import assert_replayed, configurations, leaf
from torch import nn
from torch.nn.utils import parametrizations

from remat import MutationError, remat
from remat.testing import assert_same, count_ops


class Lstm(nn.LSTM):
    def forward(self, x):
        y, (h, c) = super().forward(x)
        return y, h, c


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


class Index(nn.Module):
    def forward(self, x):
        return torch.tensor([[1, 2], [2, 0]])


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class FusedAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def linear_then(layer):
    return lambda: nn.Sequential(nn.Linear(4, 4), layer)


# How to make a layer, the shape of its input, an operation that it runs, and how often.
# It is none of the last operations, whose results no backward reads.
LAYERS = {
    "LSTM": (
        lambda: Lstm(4, 5, 2, dropout=0.5),
        (3, 2, 4),
        "mkldnn_rnn_layer",
        2,
    ),
    "GRU": (lambda: nn.Sequential(nn.GRU(4, 5), First()), (3, 2, 4), "addmm", 4),
    "attention": (lambda: Attention(4, 2, dropout=0.5), (2, 3, 4), "_softmax", 1),
    "attention, fused": (
        lambda: FusedAttention(4, 2),
        (2, 3, 4),
        "_scaled_dot_product_flash_attention_for_cpu",
        1,
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True),
        (2, 3, 4),
        "native_layer_norm",
        2,
    ),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        (2, 4),
        "_weight_norm_interface",
        1,
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        (2, 4),
        "sub",
        1,
    ),
    "dropout": (linear_then(nn.Dropout(0.5)), (8, 4), "addmm", 1),
    "dropout in place": (linear_then(nn.Dropout(0.5, True)), (8, 4), "addmm", 1),
    "alpha dropout": (linear_then(nn.AlphaDropout(0.5)), (8, 4), "addmm", 1),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.5)),
        (2, 2, 6, 6),
        "convolution",
        1,
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4)),
        (2, 2, 3, 3),
        "convolution",
        1,
    ),
    "embedding": (
        lambda: nn.Sequential(Index(), nn.Embedding(3, 4), nn.Linear(4, 4)),
        (2, 2),
        "embedding",
        1,
    ),
}


@pytest.mark.parametrize(
    ("make", "shape", "op", "times"), LAYERS.values(), ids=LAYERS.keys()
)
def test_layers_of_torch(make, shape, op, times):
    def program(wrap):
        layer = make()
        out = wrap(layer)(x)
        ys = out if isinstance(out, tuple) else (out,)
        leaves = [x, *layer.parameters()]
        loss = sum(y.pow(2).sum() for y in ys)
        return ys, torch.autograd.grad(loss, leaves, allow_unused=True)

    x = leaf(*shape)
    assert_replayed(program, **{op: (times, 2 * times)})


# --- Embeddings that scale their weight in each forward ------------------------------


def weight_of(rows=50):
    """Rows that are longer than one, and stay so now and then by rounding."""
    return (3 * torch.randn(rows, 4)).requires_grad_()


def embedded(x, weight, indices):
    y = nn.functional.embedding(indices, weight, max_norm=1.0)
    return (y * x).sin().exp()


def embedded_twice(x, weight, indices):
    y = nn.functional.embedding(indices, weight, max_norm=1.0).sin()
    return (y * x * nn.functional.embedding(indices + 1, weight, max_norm=0.5)).exp()


def read_before(x, weight, indices):
    # The length, before the rows are scaled.
    y = (x * weight.detach().norm()).sin()
    return (y * nn.functional.embedding(indices, weight, max_norm=1.0)).exp()


def in_a_bag(x, weight, indices):
    y = nn.functional.embedding_bag(
        indices.view(2, -1), weight, max_norm=1.0, mode="sum"
    )
    return (y * x).sin().exp()


def in_another_call(x, weight, indices):
    inner = remat(lambda x: embedded(x, weight, indices))
    return inner(x.cos()).tanh()


@configurations
@pytest.mark.parametrize(
    "fn", [embedded, embedded_twice, read_before, in_a_bag, in_another_call]
)
def test_an_embedding_that_scales_its_weight_does_so_once(fn, ours):
    indices = torch.randint(0, 49, (20,))

    def program(wrap):
        weight, found = weight_of(), []
        for _ in range(4):
            x = torch.randn(4, requires_grad=True)
            y = wrap(fn)(x, weight, indices)
            scaled = weight.detach().clone()
            found += torch.autograd.grad(y.sum(), (x, weight))
            assert_same(weight.detach(), scaled)  # a recompute leaves no trace
            with torch.no_grad():
                weight -= 0.5 * found[-1]
        return found, weight.detach()

    with count_ops() as ops:
        assert_replayed(program, wrap=ours)
    # Plain does it four times, and each recompute once more.
    calls = 2 if fn is embedded_twice else 1
    assert ops["embedding_renorm_"] >= (4 + 4 + 4) * calls


def test_other_changes_of_such_a_weight_are_refused():
    def fn(x, weight, indices):
        y = embedded(x, weight, indices)
        with torch.no_grad():
            weight.mul_(0.5)
        return y

    args = leaf(4), weight_of(), torch.tensor([0, 1])
    with pytest.raises(MutationError, match="`weight` was changed in place inside"):
        remat(fn)(*args)


def test_an_embedding_that_scales_its_weight_can_be_scripted():
    scripted = torch.jit.script(nn.Embedding(4, 3, max_norm=1.0))
    assert scripted(torch.tensor([1])).shape == (1, 3)
