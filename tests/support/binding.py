"""What the tests of bind share: functions that draw, and how they are bound."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F, init  # noqa: N812

from remat import random
from remat.random import bind, fold_in, key, split


ONES = torch.ones(3)


def make(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator)


def bound(seed, fn, *args):
    with bind(key(seed)):
        return fn(*args)


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


def uniform(seed, i, n=3):
    """What the i-th draw of a block is, if it is of uniform numbers."""
    return random.uniform(fold_in(key(seed), i), (n,))


@contextlib.contextmanager
def unmoved():
    """The global stream stands where it stood."""
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)


X = make(2, 4, 16, 16)
Q = make(2, 4, 6, 8, seed=1)
SEQUENCE = make(5, 3, 8, seed=2)
P = X.sigmoid()

FUNCTIONS = {
    "rand": lambda: torch.rand(2, 3),
    "rand of a tuple": lambda: torch.rand((2, 3), dtype=torch.float64),
    "rand of size=": lambda: torch.rand(size=(2, 3), dtype=torch.bfloat16),
    "rand, out": lambda: torch.rand(4, out=torch.empty(4)),
    "rand, a leaf": lambda: torch.rand(4, requires_grad=True),
    "randn": lambda: torch.randn(torch.Size([2, 3])),
    "randn of nothing": lambda: torch.randn(()),
    "randn, half": lambda: torch.randn(5, dtype=torch.float16),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X, dtype=torch.float64),
    "randn_like, channels last": lambda: torch.randn_like(
        X, memory_format=torch.channels_last
    ),
    "randint": lambda: torch.randint(10, (50,)),
    "randint from": lambda: torch.randint(-3, 9, (50,)),
    "randint of keywords": lambda: torch.randint(
        low=2, high=9, size=(50,), dtype=torch.int8
    ),
    "randint, floats": lambda: torch.randint(9, (50,), dtype=torch.float32),
    "randint_like": lambda: torch.randint_like(X, 9),
    "randint_like from": lambda: torch.randint_like(X, 3, 9, dtype=torch.int32),
    "randint_like, a tensor": lambda: torch.randint_like(X, torch.tensor(9)),
    "randperm": lambda: torch.randperm(20),
    "randperm, int32": lambda: torch.randperm(20, dtype=torch.int32),
    "bernoulli": lambda: torch.bernoulli(P),
    "bernoulli of p": lambda: torch.bernoulli(X, 0.3),
    "Tensor.bernoulli": lambda: P.bernoulli(),
    "normal": lambda: torch.normal(0.0, 1.0, (3, 2)),
    "normal of a mean": lambda: torch.normal(X, 2.0),
    "normal of a std": lambda: torch.normal(0.0, P),
    "normal of both": lambda: torch.normal(X, P),
    "multinomial": lambda: torch.multinomial(P[0, 0], 3),
    "multinomial, replacement": lambda: torch.multinomial(P[0, 0], 30, True),
    "Tensor.multinomial": lambda: P[0, 0].multinomial(5),
    "normal_": lambda: torch.empty(20).normal_(1.0, 2.0),
    "uniform_": lambda: torch.empty(20, dtype=torch.float64).uniform_(-1, to=2),
    "bernoulli_": lambda: torch.empty(20, dtype=torch.int64).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty(2, 4, 16, 16).bernoulli_(P),
    "random_": lambda: torch.empty(20, dtype=torch.int64).random_(),
    "random_, floats": lambda: torch.empty(20).random_(),
    "random_ to": lambda: torch.empty(20).random_(7),
    "random_ from, to": lambda: torch.empty(20, dtype=torch.int8).random_(-5, 7),
    "random_ from": lambda: torch.empty(9, dtype=torch.int64).random_(-(2**63), None),
    "exponential_": lambda: torch.empty(20).exponential_(2.0),
    "init.uniform_": lambda: init.uniform_(torch.empty(8, 9)),
    "init.normal_": lambda: init.normal_(torch.empty(8, 9), 1.0, 2.0),
    "init.trunc_normal_": lambda: init.trunc_normal_(torch.empty(8, 9)),
    "init.xavier_uniform_": lambda: init.xavier_uniform_(torch.empty(8, 9)),
    "init.xavier_normal_": lambda: init.xavier_normal_(torch.empty(8, 9)),
    "init.kaiming_uniform_": lambda: init.kaiming_uniform_(torch.empty(8, 9)),
    "init.kaiming_normal_": lambda: init.kaiming_normal_(torch.empty(8, 9)),
    "init.orthogonal_": lambda: init.orthogonal_(torch.empty(8, 9)),
    "init.sparse_": lambda: init.sparse_(torch.empty(8, 9), 0.3),
    "a linear layer": lambda: nn.Linear(3, 4).weight,
    "svd_lowrank": lambda: torch.svd_lowrank(X[0, 0], 3)[1],
    "pca_lowrank": lambda: torch.pca_lowrank(X[0, 0], 3)[1],
    "Categorical": lambda: torch.distributions.Categorical(P[0, 0]).sample((9,)),
    "Normal": lambda: torch.distributions.Normal(X, P).rsample(),
    "Laplace": lambda: torch.distributions.Laplace(X, P).rsample(),
    "Exponential": lambda: torch.distributions.Exponential(P).sample(),
}

ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3)
ENCODER = nn.TransformerEncoderLayer(8, 2, 16)
DECODER = nn.TransformerDecoderLayer(8, 2, 16)


def attended(q, p=0.3, **how):
    return F.scaled_dot_product_attention(q, q, q, dropout_p=p, **how)


def pooled(x, dims=2, **how):
    return getattr(F, f"fractional_max_pool{dims}d")(x, 2, **how)


def stacked(kind, *, packed=False, **how):
    x = nn.utils.rnn.pack_padded_sequence(SEQUENCE, [5, 3, 2]) if packed else SEQUENCE
    return kind(8, 6, 2, dropout=0.4, **how)(x)


# Of a tensor that gradients flow to.
LAYERS = {
    "dropout": (X, F.dropout),
    "dropout, in place": (X, lambda x: F.dropout(x * 1, inplace=True)),
    "torch.dropout": (X, lambda x: torch.dropout(x, 0.3, True)),
    "dropout1d": (X[0], F.dropout1d),
    "dropout1d of one": (X[0, 0], F.dropout1d),
    "dropout2d": (X, F.dropout2d),
    "dropout3d": (X.view(2, 4, 4, 8, 8), F.dropout3d),
    "dropout3d of one": (X.view(8, 4, 8, 8), F.dropout3d),
    "alpha_dropout": (X, lambda x: F.alpha_dropout(x, 0.5, True)),
    "feature_alpha_dropout": (X, lambda x: F.feature_alpha_dropout(x, 0.5, True)),
    "gumbel_softmax": (X, F.gumbel_softmax),
    "gumbel_softmax, hard": (X, lambda x: F.gumbel_softmax(x, 0.5, hard=True, dim=1)),
    "attention": (Q, lambda q: attended(q)),
    "causal attention": (Q, lambda q: attended(q, is_causal=True)),
    "MultiheadAttention": (SEQUENCE, lambda x: ATTENTION(x, x, x)),
    "MultiheadAttention, no weights": (
        SEQUENCE,
        lambda x: ATTENTION(x, x, x, need_weights=False),
    ),
    "TransformerEncoderLayer": (SEQUENCE, ENCODER),
    "TransformerDecoderLayer": (SEQUENCE, lambda x: DECODER(x, x.sin())),
}

# Draws that have no rule, and are refused by the name before a comma.
REFUSED = {
    "poisson": lambda: torch.poisson(ONES),
    "binomial": lambda: torch.binomial(ONES, ONES / 2),
    "_standard_gamma": lambda: torch.distributions.Gamma(ONES, ONES).sample(),
    "_sample_dirichlet": lambda: torch.distributions.Dirichlet(ONES).sample(),
    "log_normal_": lambda: torch.empty(20).log_normal_(),
    "cauchy_": lambda: torch.empty(20).cauchy_(),
    "geometric_": lambda: torch.empty(20, dtype=torch.int64).geometric_(0.1),
    "rrelu": lambda: F.rrelu(X, training=True),
    "rrelu_": lambda: torch.rrelu_(X * 1, 0.1, 0.3, True),
    "rand, of a pool": lambda: pooled(X, output_size=7, return_indices=True),
    "rand, of a module": lambda: nn.FractionalMaxPool2d(2, output_size=7)(X),
    "rand, of a pool in 3d": lambda: pooled(X, 3, output_size=(2, 7, 7)),
    "the dropout between layers of lstm": lambda: stacked(nn.LSTM, bidirectional=True),
    "the dropout between layers of gru": lambda: stacked(nn.GRU, packed=True),
    "the dropout between layers of rnn_tanh": lambda: stacked(nn.RNN, bias=False),
    "the dropout between layers of rnn_relu": lambda: stacked(
        nn.RNN, nonlinearity="relu"
    ),
    "rand": lambda: torch.ops.aten.rand.default([3]),
}

KEYS = split(key(5), 3)
XS = make(3, 4, 8, seed=6)


def per_example(fn):
    def one(k, x):
        with bind(k):
            return fn(x)

    return one


def flat(out):
    leaves = torch.utils._pytree.tree_leaves(out)
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def loss(w, k, x=XS[0]):
    with bind(k):
        return (F.dropout(x @ w).tanh() * torch.rand(8)).square().sum()
