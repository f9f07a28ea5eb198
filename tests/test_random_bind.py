"""bind: unmodified torch code as a function of a key."""

import math
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F, init  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from remat import RandomnessError, random, remat
from remat.random import bind, fold_in, key, split
from remat.random._bind import _COMPOSITES, _RULES
from remat.testing import count_ops, live_bytes


ONES = torch.ones(3)


def make(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator)


def bound(seed, fn, *args):
    with bind(key(seed)):
        return fn(*args)


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


class Unmoved:
    """The global stream stands where it stood."""

    def __enter__(self):
        self.state = torch.get_rng_state()

    def __exit__(self, *_):
        assert torch.equal(torch.get_rng_state(), self.state)


# --- Which draw is of which key ---------------------------------------------------


def test_the_ith_draw_is_of_the_key_with_i_folded_in():
    k, x = key(7), make(5, 6)
    with bind(k):
        drawn = torch.rand(3), F.dropout(x, 0.3), torch.randn(2, 2), torch.randperm(9)
    assert torch.equal(drawn[0], random.uniform(fold_in(k, 0), (3,)))
    assert torch.equal(drawn[1], random.dropout(fold_in(k, 1), x, 0.3))
    assert torch.equal(drawn[2], random.normal(fold_in(k, 2), (2, 2)))
    assert torch.equal(drawn[3], random.permutation(fold_in(k, 3), 9))


def test_a_call_that_draws_nothing_is_not_counted():
    x = make(5, 6)
    heads = make(1, 2, 3, 4)
    with bind(key(7)):
        assert F.dropout(x, training=False) is x
        F.dropout(x, 0.0)
        F.rrelu(x)
        F.scaled_dot_product_attention(heads, heads, heads)
        nn.LSTM(6, 6, 2, dropout=0.5).requires_grad_(False)
        nn.Dropout(0.5).eval()(x)
        torch.rand(2, generator=torch.Generator().manual_seed(0))
        with bind(key(8)):
            torch.rand(9)
        drawn = torch.rand(3)
    # The LSTM's 8 parameters were drawn.
    assert torch.equal(drawn, random.uniform(fold_in(key(7), 8), (3,)))


def test_a_block_a_decorator_and_a_wrapped_function_draw_the_same():
    x = make(5, 6)

    @bind(key(3))
    def decorated(x):
        return F.dropout(x)

    want = bound(3, F.dropout, x)
    assert torch.equal(decorated(x), want)
    assert torch.equal(decorated(x), want)  # from 0 again
    assert torch.equal(bind(key(3))(F.dropout)(x), want)
    assert decorated.__name__ == "decorated"


def test_of_two_blocks_the_inner_counts_and_the_outer_goes_on_where_it_was():
    with bind(key(1)):
        a = torch.rand(3)
        with bind(key(2)):
            inner = torch.rand(3)
        b = torch.rand(3)
    assert torch.equal(a, random.uniform(fold_in(key(1), 0), (3,)))
    assert torch.equal(inner, random.uniform(fold_in(key(2), 0), (3,)))
    assert torch.equal(b, random.uniform(fold_in(key(1), 1), (3,)))


def test_a_raw_key_binds_as_a_typed_one():
    assert torch.equal(
        bind(key(3).data)(torch.rand)(4), random.uniform(fold_in(key(3), 0), (4,))
    )


def test_an_array_of_keys_is_refused():
    with pytest.raises(
        ValueError, match=r"bind takes one key, got keys of shape \[3\]"
    ):
        bind(split(key(0), 3)).__enter__()


def test_after_an_error_in_the_block_nothing_is_bound():
    with pytest.raises(KeyError, match="mine"), bind(key(1)):
        raise KeyError("mine")
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), want)


def test_a_generator_is_drawn_from_as_without_bind():
    def draws(g):
        return [
            torch.rand(4, generator=g),
            torch.empty(4).normal_(generator=g),
            torch.bernoulli(torch.full((9,), 0.5), generator=g),
            torch.rrelu(make(9), 0.1, 0.9, True, g),
            init.normal_(torch.empty(3), generator=g),
        ]

    want = draws(torch.Generator().manual_seed(5))
    with Unmoved():
        got = bound(1, draws, torch.Generator().manual_seed(5))
    assert all(map(torch.equal, got, want))


def test_seeding_and_forking_inside_change_nothing():
    def seeded():
        torch.manual_seed(11)
        with torch.random.fork_rng():
            return torch.rand(4)

    assert torch.equal(bound(1, seeded), bound(1, torch.rand, 4))


# --- Each function, against the same without bind ---------------------------------


X = make(2, 4, 16, 16)
Q = make(2, 4, 6, 8, seed=1)
SEQUENCE = make(5, 3, 8, seed=2)
P = X.sigmoid()

FUNCTIONS = {
    "rand": lambda: torch.rand(2, 3),
    "rand of a tuple": lambda: torch.rand((2, 3), dtype=torch.float64),
    "rand of size=": lambda: torch.rand(size=(2, 3), dtype=torch.bfloat16),
    "rand, complex": lambda: torch.rand(5, dtype=torch.complex64),
    "rand, out": lambda: torch.rand(4, out=torch.empty(4)),
    "rand, a leaf": lambda: torch.rand(4, requires_grad=True),
    "randn": lambda: torch.randn(torch.Size([2, 3])),
    "randn of nothing": lambda: torch.randn(()),
    "randn, half": lambda: torch.randn(5, dtype=torch.float16),
    "randn, complex": lambda: torch.randn(5, dtype=torch.complex128),
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
    "normal_, complex": lambda: torch.empty(20, dtype=torch.complex64).normal_(),
    "uniform_": lambda: torch.empty(20, dtype=torch.float64).uniform_(-1, to=2),
    "bernoulli_": lambda: torch.empty(20, dtype=torch.int64).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty(2, 4, 16, 16).bernoulli_(P),
    "random_": lambda: torch.empty(20, dtype=torch.int64).random_(),
    "random_, floats": lambda: torch.empty(20).random_(),
    "random_ to": lambda: torch.empty(20).random_(7),
    "random_ from, to": lambda: torch.empty(20, dtype=torch.int8).random_(-5, 7),
    "random_ from": lambda: torch.empty(9, dtype=torch.int64).random_(-(2**63), None),
    "exponential_": lambda: torch.empty(20).exponential_(2.0),
    "log_normal_": lambda: torch.empty(20).log_normal_(),
    "cauchy_": lambda: torch.empty(20).cauchy_(),
    "geometric_": lambda: torch.empty(20, dtype=torch.int64).geometric_(0.1),
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
    "Categorical": lambda: torch.distributions.Categorical(P[0, 0]).sample((9,)),
    "Normal": lambda: torch.distributions.Normal(X, P).rsample(),
    "Laplace": lambda: torch.distributions.Laplace(X, P).rsample(),
    "Exponential": lambda: torch.distributions.Exponential(P).sample(),
}

ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3)
ENCODER = nn.TransformerEncoderLayer(8, 2, 16)
DECODER = nn.TransformerDecoderLayer(8, 2, 16)
# Of a tensor that gradients flow to.
LAYERS = {
    "dropout": (X, F.dropout),
    "dropout, in place": (X, lambda x: F.dropout(x * 1, inplace=True)),
    "torch.dropout": (X, lambda x: torch.dropout(x, 0.3, True)),
    "native_dropout": (X, lambda x: torch.native_dropout(x, 0.3, None)),
    "dropout1d": (X[0], F.dropout1d),
    "dropout1d of one": (X[0, 0], F.dropout1d),
    "dropout2d": (X, F.dropout2d),
    "dropout3d": (X.view(2, 4, 4, 8, 8), F.dropout3d),
    "dropout3d of one": (X.view(8, 4, 8, 8), F.dropout3d),
    "alpha_dropout": (X, lambda x: F.alpha_dropout(x, 0.5, True)),
    "feature_alpha_dropout": (X, lambda x: F.feature_alpha_dropout(x, 0.5, True)),
    "rrelu": (X, lambda x: F.rrelu(x, training=True)),
    "rrelu, in place": (X, lambda x: F.rrelu(x * 1, training=True, inplace=True)),
    "gumbel_softmax": (X, F.gumbel_softmax),
    "gumbel_softmax, hard": (X, lambda x: F.gumbel_softmax(x, 0.5, hard=True, dim=1)),
    "fractional_max_pool2d": (
        X,
        lambda x: F.fractional_max_pool2d(x, 2, output_size=7),
    ),
    "fractional_max_pool2d, indices": (
        X,
        lambda x: F.fractional_max_pool2d(
            x, 2, output_ratio=(0.4, 0.4), return_indices=True
        ),
    ),
    "fractional_max_pool3d": (
        X,
        lambda x: F.fractional_max_pool3d(x, 2, output_size=(2, 7, 7)),
    ),
    "attention": (
        Q,
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.3),
    ),
    "causal attention": (
        Q,
        lambda q: F.scaled_dot_product_attention(
            q, q, q, dropout_p=0.3, is_causal=True
        ),
    ),
    "FractionalMaxPool2d": (X, nn.FractionalMaxPool2d(2, output_size=7)),
    "RReLU": (X, nn.RReLU()),
    "MultiheadAttention": (
        SEQUENCE,
        lambda x: ATTENTION(x, x, x),
    ),
    "MultiheadAttention, no weights": (
        SEQUENCE,
        lambda x: ATTENTION(x, x, x, need_weights=False),
    ),
    "TransformerEncoderLayer": (SEQUENCE, ENCODER),
    "TransformerDecoderLayer": (
        SEQUENCE,
        lambda x: DECODER(x, x.sin()),
    ),
    "LSTM": (SEQUENCE, nn.LSTM(8, 6, 3, dropout=0.4, bidirectional=True)),
    "GRU": (SEQUENCE, nn.GRU(8, 6, 3, dropout=0.4, batch_first=True)),
    "RNN": (SEQUENCE, nn.RNN(8, 6, 2, dropout=0.4, bias=False)),
    "RNN, relu": (SEQUENCE, nn.RNN(8, 6, 2, dropout=0.4, nonlinearity="relu")),
}


def check_function_of_the_key(fn):
    with Unmoved():
        a, b, c = (first(bound(seed, fn)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    plain = first(fn())
    for kind in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(a, kind) == getattr(plain, kind)


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_a_draw_is_a_function_of_the_key_alone(fn):
    check_function_of_the_key(fn)


@pytest.mark.parametrize(("x", "fn"), LAYERS.values(), ids=LAYERS.keys())
def test_a_layer_is_a_function_of_the_key_and_gradients_flow(x, fn):
    x = x.clone().requires_grad_()
    check_function_of_the_key(lambda: fn(x))
    ys = [first(bound(1, fn, x)) for _ in range(2)]
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in ys]
    assert torch.equal(*grads)
    assert grads[0].norm() > 0


def test_what_a_method_writes_to_is_returned():
    x = torch.empty(4)
    with bind(key(0)):
        for write in (x.normal_, x.uniform_, x.random_, x.exponential_):
            assert write() is x
        y = F.dropout(x, 0.5, inplace=True)
    assert y is x


def test_the_default_dtype_and_device_are_those_of_the_call():
    with bind(key(0)):
        with torch.device("meta"):
            assert torch.rand(3).is_meta
        assert torch.rand(3, device="meta").is_meta
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.rand(3).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"), bind(key(0)):
        assert torch.randn(3).is_meta


@pytest.mark.parametrize("fn", [torch.normal, lambda m, s: m.clone().normal_()])
def test_a_draw_is_a_constant_of_its_parameters(fn):
    mean, std = make(4).requires_grad_(), make(4).exp().requires_grad_()
    y = bound(1, fn, mean, std)
    (g,) = torch.autograd.grad(y.sum(), mean)
    assert torch.equal(g, torch.zeros(4))


# --- Distributions ----------------------------------------------------------------


N = 40_000
# Mean and standard deviation of a draw, where they exist; else quartiles.
MOMENTS = {
    "rand": (lambda: torch.rand(N), 0.5, 12**-0.5),
    "randn": (lambda: torch.randn(N), 0, 1),
    "complex": (lambda: torch.randn(N, dtype=torch.complex64).abs().square(), 1, 1),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), 1, 4 * 12**-0.5),
    "normal_": (lambda: torch.empty(N).normal_(3, 2), 3, 2),
    "normal": (lambda: torch.normal(torch.full((N,), 3.0), 2.0), 3, 2),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.5),
    "log_normal_": (
        lambda: torch.empty(N).log_normal_(0.5, 0.5),
        math.exp(0.625),
        math.exp(0.625) * math.sqrt(math.exp(0.25) - 1),
    ),
    "geometric_": (lambda: torch.empty(N).geometric_(0.3), 1 / 0.3, 0.7**0.5 / 0.3),
    "cauchy_": (lambda: torch.empty(N).cauchy_(1, 2).sub(1).abs().lt(2), 0.5, 0.5),
    "random_": (lambda: torch.empty(N).random_(10), 4.5, 8.25**0.5),
    "randint": (lambda: torch.randint(-5, 5, (N,)), -0.5, 8.25**0.5),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), 0.3, 0.21**0.5),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), N, True),
        1.5,
        0.75**0.5,
    ),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1, 0.5),
    "dropout2d": (lambda: F.dropout2d(torch.ones(N, 1, 1, 1), 0.2), 1, 0.5),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.randn(N), 0.3, True), 0, 1),
    "feature_alpha_dropout": (
        lambda: F.feature_alpha_dropout(torch.randn(N, 1, 1), 0.3, True),
        0,
        1,
    ),
    "rrelu": (
        lambda: F.rrelu(-torch.ones(N), 0.2, 0.4, True),
        -0.3,
        0.2 * 12**-0.5,
    ),
    "gumbel_softmax": (
        lambda: F.gumbel_softmax(
            torch.tensor([0.25, 0.75]).log().expand(N, 2), hard=True
        )[:, 1],
        0.75,
        0.1875**0.5,
    ),
}


@pytest.mark.parametrize(("fn", "mean", "std"), MOMENTS.values(), ids=MOMENTS.keys())
def test_a_draw_has_the_moments_of_its_distribution(fn, mean, std):
    x = bound(0, fn).double()
    assert abs(x.mean() - mean) < 5 * std / math.sqrt(N)
    assert abs(x.std() / std - 1) < 0.03


def test_dropout_of_features_drops_whole_ones():
    x = torch.ones(50, 20, 3, 3)
    for fn in (F.dropout2d, lambda x: F.feature_alpha_dropout(x, 0.5, True)):
        y = bound(0, fn, x).flatten(2)
        assert torch.equal(y, y[..., :1].expand_as(y))
        assert len(y.unique()) == 2


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("fn", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_dropping_nothing_or_all_is_as_plain(fn, p):
    assert torch.equal(bound(0, fn, X, p, True), fn(X, p, True))


@pytest.mark.parametrize("fn", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_a_probability_outside_0_and_1_is_refused(fn):
    with pytest.raises(ValueError, match=r"1\.5"):
        bound(0, fn, X, 1.5, True)


def test_an_integer_draw_spans_its_range():
    with bind(key(0)):
        assert set(torch.randint(3, 6, (99,)).tolist()) == {3, 4, 5}
        assert set(torch.empty(99, dtype=torch.bool).random_().tolist()) == {
            False,
            True,
        }
        small = torch.empty(4000, dtype=torch.uint8).random_()
        wide = torch.empty(99, dtype=torch.int64).random_()
        every = torch.empty(99, dtype=torch.int64).random_(-(2**63), None)
        floats = torch.empty(99).random_()
    assert (small.min(), small.max()) == (0, 255)
    assert wide.min() >= 0
    assert wide.max() > 2**62
    assert every.min() < -(2**61)
    assert 2**22 < floats.max() <= 2**24


def test_an_exponential_draw_is_never_zero():
    assert bound(0, torch.empty(2**22).exponential_).min() > 0


def test_without_replacement_nothing_comes_twice_and_nothing_of_probability_0():
    p = torch.tensor([1.0, 0.0, 3.0, 2.0])
    x = bound(0, torch.multinomial, p.expand(100, 4), 3)
    assert torch.equal(x.sort().values, torch.tensor([0, 2, 3]).expand(100, 3))
    with pytest.raises(ValueError, match="4 categories to draw, got 5"):
        bound(0, torch.multinomial, p, 5)


BAD = {
    "bernoulli": (torch.bernoulli, torch.tensor([0.5, 1.5]), "between 0 and 1"),
    "bernoulli_": (torch.ones(2).bernoulli_, torch.tensor([0.5, -1]), "between 0 and"),
    "normal": (lambda s: torch.normal(0.0, s), -ONES, "at least 0, got"),
    "normal_": (lambda s: s.normal_(0, -1.0), ONES, "must be at least 0"),
    "multinomial": (lambda p: p.multinomial(1), 0 * ONES, "not all zero, got"),
    "negative": (lambda p: p.multinomial(1, True), -ONES, "none negative"),
    "exponential_": (lambda x: x.exponential_(0.0), ONES, "lambd > 0, got 0.0"),
    "cauchy_": (lambda x: x.cauchy_(0.0, -1.0), ONES, "sigma > 0"),
    "geometric_": (lambda x: x.geometric_(1.5), ONES, "0 < p < 1"),
    "randint": (lambda x: torch.randint_like(x, 3, 3), ONES, r"empty, got \(3, 3\)"),
    "dropout": (F.dropout2d, torch.ones(()), "2 dimensions"),
    "a layout": (
        lambda x: torch.rand_like(x, layout=torch.sparse_coo),
        ONES,
        "strided",
    ),
}


@pytest.mark.filterwarnings("ignore:dropout2d. Received:UserWarning")
@pytest.mark.parametrize(("fn", "x", "why"), BAD.values(), ids=BAD.keys())
def test_what_no_distribution_has_is_refused(fn, x, why):
    with pytest.raises(ValueError, match=why):
        bound(0, fn, x.clone())


# --- Attention and recurrent layers against torch's -------------------------------


MASK = make(6, 6, seed=3)
HOW = {
    "plain": {},
    "causal": {"is_causal": True},
    "a scale": {"scale": 0.3},
    "a bias": {"attn_mask": MASK},
    "a mask": {"attn_mask": MASK > 0},
    "a mask of nothing": {"attn_mask": torch.zeros(6, 6, dtype=torch.bool)},
    "few heads": {"enable_gqa": True},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_happens_to_drop_nothing_is_torchs(how, dtype):
    q = Q.to(dtype).requires_grad_()
    kv = q[:, :2] if how.get("enable_gqa") else q
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, kv, kv, **how)
    # Of 1e-9 nothing is dropped; but it is written out.
    with count_ops() as ops:
        got = bound(
            0, lambda: F.scaled_dot_product_attention(q, kv, kv, dropout_p=1e-9, **how)
        )
    assert ops["remat::uniform"] == 1
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.float().square().sum(), q)[0] for y in (got, want)]
    torch.testing.assert_close(*grads)


def test_attention_is_autocast_as_torchs():
    def attend(p):
        return F.scaled_dot_product_attention(Q, Q, Q, MASK, dropout_p=p)

    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        got, want = bound(0, attend, 1e-9), attend(0.0)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want)


def test_attention_with_a_mask_and_causal_is_refused():
    with pytest.raises(ValueError, match=r"either attn_mask or is_causal"):
        bound(
            0,
            lambda: F.scaled_dot_product_attention(
                Q, Q, Q, MASK, dropout_p=0.5, is_causal=True
            ),
        )


RECURRENT = {
    "LSTM": lambda p: nn.LSTM(8, 6, 3, dropout=p),
    "LSTM, both ways": lambda p: nn.LSTM(8, 6, 2, dropout=p, bidirectional=True),
    "LSTM, batch first": lambda p: nn.LSTM(8, 6, 2, dropout=p, batch_first=True),
    "GRU": lambda p: nn.GRU(8, 6, 3, dropout=p, bidirectional=True),
    "GRU, no bias": lambda p: nn.GRU(8, 6, 3, dropout=p, bias=False),
    "RNN": lambda p: nn.RNN(8, 6, 3, dropout=p),
}


def flat(out):
    leaves = torch.utils._pytree.tree_leaves(out)
    return [t for t in leaves if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("build", RECURRENT.values(), ids=RECURRENT.keys())
def test_recurrent_layers_that_happen_to_drop_nothing_are_torchs(build, packed):
    model, x = build(1e-9), SEQUENCE
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2])
    got = flat(bound(0, model, x))
    model.dropout = 0.0
    for a, b in zip(got, flat(model(x)), strict=True):
        torch.testing.assert_close(a, b)


def test_between_recurrent_layers_it_drops_what_dropout_of_the_layer_would():
    model = nn.GRU(8, 6, 2, dropout=0.5)
    lower, upper = nn.GRU(8, 6), nn.GRU(6, 6)
    weights = [*model.parameters()]
    for layer, own in ((lower, weights[:4]), (upper, weights[4:])):
        for p, q in zip(layer.parameters(), own, strict=True):
            p.data = q.data
    got, _ = bound(0, model, SEQUENCE)
    between = random.dropout(fold_in(fold_in(key(0), 0), 0), lower(SEQUENCE)[0], 0.5)
    torch.testing.assert_close(got, upper(between)[0])


def test_a_transformer_in_training_takes_no_fused_path():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    with torch.no_grad(), count_ops() as ops:
        bound(0, model, SEQUENCE)
        bound(0, model.eval(), SEQUENCE)
    assert not {op for op in ops if "_transformer_encoder" in str(op)}
    # In training only: in the attention, and after it, the middle and the end.
    assert ops["remat::uniform"] == 4


def test_what_was_patched_in_torch_since_is_called(monkeypatch):
    model = nn.MultiheadAttention(8, 2, dropout=0.0)
    calls = []

    def attention(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    bound(0, lambda: model(SEQUENCE, SEQUENCE, SEQUENCE, need_weights=False))
    assert len(calls) == 1


# --- What is not keyed is refused -------------------------------------------------


LIBRARY = torch.library.Library("remat_test_bind", "DEF")
LIBRARY.define("noisy(Tensor x) -> Tensor")
LIBRARY.impl("noisy", lambda x: x + torch.rand(3), "CompositeExplicitAutograd")
REFUSED = {
    "poisson": lambda: torch.poisson(ONES),
    "binomial": lambda: torch.binomial(ONES, ONES / 2),
    "_standard_gamma": lambda: torch.distributions.Gamma(ONES, ONES).sample(),
    "_sample_dirichlet": lambda: torch.distributions.Dirichlet(ONES).sample(),
    "rand": lambda: torch.ops.aten.rand([3]),
    "normal_functional": lambda: torch.ops.aten.normal_functional(ONES),
    "uniform": lambda: torch.ops.aten.uniform(ONES),
    "exponential": lambda: torch.ops.aten.exponential(ONES),
    "rrelu_with_noise": lambda: torch._C._nn.rrelu_with_noise(
        -ONES, ONES.clone(), 0.1, 0.3, True
    ),
    "noisy": lambda: torch.ops.remat_test_bind.noisy(ONES),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_draw_is_refused_and_the_stream_is_as_before(name):
    refusal = pytest.raises(
        RandomnessError, match=rf"{name}[.\w]* drew from.*\n.*{__file__}"
    )
    with Unmoved(), refusal:
        bound(0, REFUSED[name])


def test_a_scripted_function_that_draws_is_refused():
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(_scripted)
    # TorchScript raises an error of its own, without ours.
    with Unmoved(), pytest.raises(RuntimeError, match="failed in the TorchScript"):
        bound(0, scripted, ONES)


def _scripted(x: torch.Tensor):
    return F.dropout(x, 0.5, True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_draw_in_a_checkpoint_of_torchs_is_refused_unless_bound_in_it(reentrant):
    x = make(5, 6).requires_grad_()

    def checkpointed(fn):
        return checkpoint(fn, x, use_reentrant=reentrant)

    with pytest.raises(RandomnessError, match=rf"of a key bound outside.*{__file__}"):
        bound(0, checkpointed, F.dropout)
    bound(0, checkpointed, torch.sin)
    drop = bind(key(0))(F.dropout)
    checkpointed(drop).square().sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(drop(x).square().sum(), x)[0])


# Operations that torch tags as random, have no rule, and are the guard's.
UNKEYED = set(
    """
    poisson binomial rrelu_with_noise rrelu_with_noise_ miopen_rnn _standard_gamma
    _sample_dirichlet _fused_dropout _fill_mem_eff_dropout_mask_ _cudnn_rnn
    _cudnn_init_dropout_state _lstm_mps cauchy exponential geometric log_normal random
    uniform normal_functional rrelu_with_noise_functional _fused_sdp_choice
    _cudnn_attention_backward _cudnn_attention_forward _efficient_attention_forward
    _flash_attention_forward _flash_attention_forward_no_dropout_inplace
    _nested_tensor_softmax_with_shape _scaled_dot_product_attention_math
    _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _triton_scaled_dot_attention
    """.split()  # noqa: SIM905
)
KEYED = {f.__name__ for f in [*_RULES, *_COMPOSITES]}


def tagged_ops():
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        base, _, overload = op.partition(".")
        if space == "aten":
            packet = getattr(torch.ops.aten, base)
            if (
                torch.Tag.nondeterministic_seeded
                in getattr(packet, overload or "default").tags
            ):
                yield base


def test_each_operation_that_torch_calls_random_is_keyed_or_known_to_be_refused():
    unknown = {*tagged_ops()} - KEYED - UNKEYED
    assert not unknown or torch.__version__ > "2.14"


@pytest.mark.parametrize("module", [F, init])
def test_each_function_of_torch_that_draws_has_a_rule_or_is_run_with_the_mode_on(
    module,
):
    unseen = set()
    for name, fn in vars(module).items():
        if not isinstance(fn, types.FunctionType) or name.startswith("_"):
            continue
        calls = {*fn.__code__.co_names} & (KEYED | {"poisson", "binomial"})
        asks = {"has_torch_function_variadic", "has_torch_function_unary"}
        # Which the mode sees from outside only.
        if calls - {name} and asks & {*fn.__code__.co_names}:
            unseen |= {name} if fn not in _RULES and fn not in _COMPOSITES else set()
    assert not unseen


# --- Per example: vmap over keys --------------------------------------------------


KEYS = split(key(5), 3)
XS = make(3, 4, 8, seed=6)
BATCHED = {
    "dropout": F.dropout,
    "dropout1d": F.dropout1d,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "rand": lambda x: torch.rand(2, 3),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(10, (50,)),
    "randperm": lambda x: torch.randperm(20),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.abs()),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 3),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "MultiheadAttention": lambda x: ATTENTION(x, x, x)[0],
    "TransformerEncoderLayer": ENCODER,
}


def per_example(fn):
    def one(k, x):
        with bind(k):
            return fn(x)

    return one


@pytest.mark.parametrize("fn", BATCHED.values(), ids=BATCHED.keys())
def test_under_vmap_each_key_draws_what_it_draws_alone(fn):
    one = per_example(fn)
    for in_dims in ((0, 0), (0, None), (None, 0)):
        args = [a if d == 0 else a[0] for a, d in zip((KEYS, XS), in_dims, strict=True)]
        got = vmap(one, in_dims)(*args)
        rows = [
            one(*(a[i] if d == 0 else a for a, d in zip(args, in_dims, strict=True)))
            for i in range(3)
        ]
        torch.testing.assert_close(got.expand(3, *rows[0].shape), torch.stack(rows))


def test_under_vmap_a_batched_tensor_is_written_in_place_and_another_refused():
    one = per_example(lambda x: x.clone().normal_())
    assert torch.equal(vmap(one)(KEYS, XS)[1], one(KEYS[1], XS[1]))
    with pytest.raises(RuntimeError, match="vmapped over"):
        vmap(one, (0, None))(KEYS, XS[0])


def test_nested_vmap_draws_for_each_key():
    one = per_example(F.dropout)
    keys = split(key(1), (2, 3))
    got = vmap(lambda ks: vmap(one)(ks, XS))(keys)
    assert torch.equal(got[1, 2], one(keys[1, 2], XS[2]))


def test_per_example_gradients_have_per_example_masks():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    params = dict(model.named_parameters())

    def loss(params, k, x):
        with bind(k):
            return functional_call(model, params, (x,)).square().sum()

    got = vmap(grad(loss), (None, 0, 0))(params, KEYS, XS)
    for i in range(3):
        want = grad(loss)(params, KEYS[i], XS[i])
        for name in params:
            torch.testing.assert_close(got[name][i], want[name])


# --- Derivatives ------------------------------------------------------------------


def loss(w, k, x=XS[0]):
    with bind(k):
        return (F.dropout(x @ w).tanh() * torch.rand(8)).square().sum()


def written_out(w, k, x=XS[0]):
    y = random.dropout(fold_in(k, 0), x @ w, 0.5).tanh()
    return (y * random.uniform(fold_in(k, 1), (8,))).square().sum()


TRANSFORMS = {
    "grad": grad,
    "grad of grad": lambda f: grad(lambda w, k: grad(f)(w, k).square().sum()),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda v, k: f(v.diag(), k)),
    "jvp": lambda f: lambda w, k: jvp(lambda w: f(w, k), (w,), (w,))[1],
    "vjp": lambda f: lambda w, k: vjp(lambda w: f(w, k), w)[1](ONES[0])[0],
    "linearize": lambda f: lambda w, k: linearize(lambda w: f(w, k), w)[1](w),
    "vmap of grad": lambda f: lambda w, k: vmap(grad(f), (None, 0))(w, split(k, 3)),
}


# torch.func.linearize's own.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_derivatives_are_those_of_the_draws_written_out(transform):
    w = make(8, 8) if transform is not TRANSFORMS["hessian"] else make(8)
    got, want = (transform(f)(w, key(4)) for f in (loss, written_out))
    torch.testing.assert_close(got, want)
    assert got.norm() > 0


def test_backward_outside_of_the_block_is_of_the_same_mask():
    w = make(8, 8).requires_grad_()
    (got,) = torch.autograd.grad(loss(w, key(4)), w)
    assert torch.equal(got, torch.autograd.grad(written_out(w, key(4)), w)[0])


# --- torch.compile ----------------------------------------------------------------


COMPILED = {
    "dropout": per_example(F.dropout),
    "several": lambda k, x: loss(x.T @ x, k),
    "a transformer": per_example(lambda x: ENCODER(x[None])),
    "normal_": per_example(lambda x: torch.empty(4).normal_()),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", COMPILED.values(), ids=COMPILED.keys())
def test_bind_is_compiled_into_one_graph(fn, backend):
    torch._dynamo.reset()
    x = XS[0].clone().requires_grad_()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for k in KEYS:
        torch.testing.assert_close(compiled(k, x), fn(k, x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_transforms_of_bind_are_compiled_into_one_graph(backend):
    torch._dynamo.reset()
    fn = per_example(lambda x: F.dropout(x).square().sum())
    gradients = vmap(grad(fn, argnums=1))
    compiled = torch.compile(gradients, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(KEYS, XS), gradients(KEYS, XS))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_has_the_draws_and_takes_another_key(mode):
    def fn(data, x):
        with bind(data):
            return F.dropout(x) * torch.rand(8)

    traced = make_fx(fn, tracing_mode=mode)(KEYS[0].data, XS[0])
    for k in KEYS:
        assert torch.equal(traced(k.data, XS[0]), fn(k.data, XS[0]))
    draws = [n for n in traced.graph.nodes if "remat.uniform" in str(n.target)]
    assert len(draws) == 2


def test_an_exported_module_takes_the_key_as_an_input():
    class Module(nn.Module):
        def forward(self, data, x):
            with bind(data):
                return F.dropout(x)

    args = KEYS[0].data, XS[0]
    exported = torch.export.export(Module(), args).module()
    assert torch.equal(exported(*args), Module()(*args))


def test_on_meta_tensors_there_are_shapes_and_no_numbers():
    assert bound(0, F.dropout, XS.to("meta")).is_meta
    assert bound(0, torch.randn_like, XS.to("meta")).shape == XS.shape


def test_without_autograd_the_numbers_are_the_same():
    want = bound(0, F.dropout, X)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(bound(0, F.dropout, X), want)


def test_threads_have_blocks_of_their_own():
    with ThreadPoolExecutor(4) as pool:
        drawn = [*pool.map(lambda i: bound(i, F.dropout, X), range(16))]
    for i, y in enumerate(drawn):
        assert torch.equal(y, bound(i, F.dropout, X))


def test_another_draw_is_refused_when_compiled():
    torch._dynamo.reset()
    fn = torch.compile(per_example(torch.poisson), backend="eager", fullgraph=True)
    with Unmoved(), pytest.raises(torch._dynamo.exc.Unsupported, match="Randomness"):
        fn(key(0), ONES)
    fn = torch.compile(per_example(torch.poisson), backend="eager")
    with Unmoved(), pytest.raises(RandomnessError, match="poisson"):
        fn(key(0), ONES)


def test_a_compiled_function_inside_draws_from_the_key():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.dropout(x) * 2, backend="eager")
    want = bound(1, F.dropout, X) * 2
    assert torch.equal(bound(1, compiled, X), want)
    compiled(X)
    assert torch.equal(bound(1, compiled, X), want)


# --- remat: the recomputation draws the same ------------------------------------------


MLP = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8))
MODELS = {
    "mlp": (MLP, make(4, 8, seed=7)),
    "transformer": (ENCODER, SEQUENCE),
    "gru": (nn.GRU(8, 8, 2, dropout=0.5), SEQUENCE),
}


def inside(model, k):
    def fn(x):
        with bind(k):
            return first(model(x))

    return fn


# From how to wrap a function, a model and its input, to what has gradients.
USES = {
    "bind outside": lambda wrap, m, x: bound(1, lambda: first(wrap(m)(x))),
    "bind inside": lambda wrap, m, x: wrap(inside(m, key(1)))(x),
    "a key as argument": lambda wrap, m, x: wrap(lambda k, x: inside(m, k)(x))(
        key(1), x
    ),
    "bind outside and inside": lambda wrap, m, x: bound(
        2, lambda: wrap(inside(m, key(1)))(x) * torch.rand(1)
    ),
    "two calls, and draws between": lambda wrap, m, x: bound(
        1, lambda: first(wrap(m)(first(wrap(m)(x)) * torch.rand(1)))
    ),
    "nested": lambda wrap, m, x: bound(
        1, lambda: wrap(lambda x: first(wrap(m)(x)) * torch.rand(1))(x)
    ),
}


def grads_of(y, parameters):
    return torch.autograd.grad(y.square().sum(), parameters, retain_graph=True)


@pytest.mark.parametrize(("model", "x"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_recomputed_draws_are_those_of_the_forward(use, model, x):
    parameters = [*model.parameters()]
    want = use(lambda f: f, model, x)
    with Unmoved():
        got = use(remat, model, x)
        grads = [grads_of(got, parameters) for _ in range(2)]
    assert torch.equal(got, want)
    for a, b, c in zip(*grads, grads_of(want, parameters), strict=True):
        assert torch.equal(a, b)
        # A model that is called twice adds up its gradients in another order.
        torch.testing.assert_close(a, c)


def test_the_recomputation_draws_each_number_again_and_counts_for_nobody():
    x = make(4, 8, seed=7)
    with bind(key(1)):
        y = remat(MLP)(x)
        with count_ops() as ops:
            grads_of(y, [*MLP.parameters()])
        after = torch.rand(3)
    # Of the dropout, and again for its derivative.
    assert ops["remat::uniform"] == 2
    assert ops["tanh"] == 1
    assert torch.equal(after, random.uniform(fold_in(key(1), 1), (3,)))


def test_a_backward_in_a_block_replays_what_was_drawn_outside_of_it():
    x = make(64).requires_grad_()

    def gradient(wrap, *, inside):
        torch.manual_seed(3)
        y = wrap(lambda x: F.dropout(x).sin())(x)
        with bind(key(77)) if inside else nullcontext():
            return torch.autograd.grad(y.sum(), x)[0]

    want = gradient(lambda f: f, inside=False)
    assert torch.equal(gradient(remat, inside=True), want)
    with bind(key(1)):
        y = remat(F.dropout)(x)
    with bind(key(2)):
        (got,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(torch.rand(3), random.uniform(fold_in(key(2), 0), (3,)))
    assert torch.equal(got, bound(1, F.dropout, ONES.new_ones(64)))


def test_two_calls_in_one_block_draw_different_masks():
    x = torch.ones(64)
    with bind(key(1)):
        a, b = (remat(F.dropout)(x) for _ in range(2))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("model", "x"), [*MODELS.values()][:2], ids=[*MODELS][:2])
def test_under_torch_func_recomputed_draws_are_those_of_the_forward(outside, model, x):
    params = dict(model.named_parameters())

    def results(wrap):
        def fn(p, x):
            return functional_call(model, p, (x,))

        def loss(p, k, x):
            if outside:
                return bind(k)(wrap(fn))(p, x).square().sum()
            return wrap(lambda p, k, x: bind(k)(fn)(p, x))(p, k, x).square().sum()

        xs = torch.stack([x, x + 1, x - 1])
        one = grad(loss)(params, KEYS[0], x)
        return flat([one, vmap(grad(loss), (None, 0, 0))(params, KEYS, xs)])

    for a, b in zip(results(remat), results(lambda f: f), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("model", "x"), MODELS.values(), ids=MODELS.keys())
def test_no_key_is_consumed_twice_and_no_global_stream_missed(model, x):
    with random.check_key_reuse(), bind(key(1)):
        y = first(remat(model, rng="error")(x))
        torch.native_dropout(y, 0.5, True)
        y.square().sum().backward()
    model.zero_grad()


def test_no_mask_is_held_for_the_backward():
    x = make(1000, 100).requires_grad_()
    assert live_bytes(lambda: F.dropout(x)) - x.nbytes >= x.numel()
    assert live_bytes(lambda: bound(0, F.dropout, x)) - x.nbytes < 1000
