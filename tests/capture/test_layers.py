"""Layers of torch are recomputed with their dropout and their parametrizations."""

import pytest
import torch
from support.runs import assert_replayed, leaf
from torch import nn
from torch.nn.utils import parametrizations


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
