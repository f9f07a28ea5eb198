"""What torch draws inside of bind: distributions, attention, dropout, layers."""

import functools
import math

import pytest
import torch
from support.binding import (
    KEYS,
    ONES,
    SEQUENCE,
    Q,
    X,
    attended,
    bound,
    flat,
    make,
    per_example,
    pooled,
    unmoved,
)
from support.tables import rows
from torch import nn
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat import random
from remat.random import key
from remat.random._rerouted import integers
from remat.testing import assert_same, count_ops


N = 20_000
# Mean and standard deviation of a draw, where they exist; else quartiles.
MOMENTS = {
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), 1, 4 * 12**-0.5),
    "normal_": (lambda: torch.empty(N).normal_(3, 2), 3, 2),
    "normal": (lambda: torch.normal(torch.full((N,), 3.0), 2.0), 3, 2),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.5),
    "random_": (lambda: torch.empty(N).random_(10), 4.5, 8.25**0.5),
    "randint": (lambda: torch.randint(-5, 5, (N,)), -0.5, 8.25**0.5),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), N, True),
        1.5,
        0.75**0.5,
    ),
    "dropout2d": (lambda: F.dropout2d(torch.ones(N, 1, 1, 1), 0.2), 1, 0.5),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.randn(N), 0.3, True), 0, 1),
    "feature_alpha_dropout": (
        lambda: F.feature_alpha_dropout(torch.randn(N, 1, 1), 0.3, True),
        0,
        1,
    ),
    "gumbel_softmax": (
        lambda: F.gumbel_softmax(
            torch.tensor([0.25, 0.75]).log().expand(N, 2), hard=True
        )[:, 1],
        0.75,
        0.1875**0.5,
    ),
}


@rows("fn, mean, std", MOMENTS)
def test_a_draw_has_the_moments_of_its_distribution(fn, mean, std):
    x = bound(0, fn).double()
    assert abs(x.mean() - mean) < 5 * std / math.sqrt(N)
    assert abs(x.std() / std - 1) < 0.03


@pytest.mark.parametrize(
    "fn", [F.dropout2d, lambda x: F.feature_alpha_dropout(x, 0.5, True)]
)
def test_dropout_of_features_drops_whole_ones(fn):
    y = bound(0, fn, torch.ones(50, 20, 3, 3)).flatten(2)
    assert torch.equal(y, y[..., :1].expand_as(y))
    assert len(y.unique()) == 2


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("fn", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_dropping_nothing_or_all_is_as_plain(fn, p):
    assert torch.equal(bound(0, fn, X, p, True), fn(X, p, True))


def filled(dtype, count, *bounds):
    """Integers of the whole range of the dtype, or between bounds."""
    return bound(0, torch.empty(count, dtype=dtype).random_, *bounds)


def test_an_integer_draw_spans_its_range():
    assert {*bound(0, torch.randint, 3, 6, (99,)).tolist()} == {3, 4, 5}
    assert {*filled(torch.bool, 99).tolist()} == {False, True}
    small, wide = filled(torch.uint8, 4000), filled(torch.int64, 99)
    assert (small.min(), small.max()) == (0, 255)
    assert wide.min() >= 0
    assert wide.max() > 2**62
    assert filled(torch.int64, 99, -(2**63), None).min() < -(2**61)
    assert 2**22 < filled(torch.float32, 99).max() <= 2**24


def test_an_exponential_draw_is_never_zero():
    assert bound(0, torch.empty(2**22).exponential_).min() > 0


def test_multinomial_without_replacement_draws_each_possible_category_once():
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
    "randint": (lambda x: torch.randint_like(x, 3, 3), ONES, r"high, got \(3, 3\)"),
    "dropout": (F.dropout2d, torch.ones(()), "2 dimensions"),
    "dimensions": (lambda x: x.expand(2, 2, 3).multinomial(1), ONES, "or 2 dim.*3"),
    "samples": (lambda x: x.multinomial(0), ONES, "at least 1 sample, got 0"),
    **{
        f"p of {fn.__name__}": (lambda x, fn=fn: fn(x, 1.5, True), X, r"1\.5")
        for fn in (F.dropout, F.dropout2d, F.alpha_dropout)
    },
    "a mask, and causal": (
        *(lambda q: attended(q, attn_mask=q, is_causal=True), Q),
        "either attn_mask or is_causal",
    ),
    "a layout": (
        lambda x: torch.rand_like(x, layout=torch.sparse_coo),
        ONES,
        "strided",
    ),
}


@pytest.mark.filterwarnings("ignore:dropout2d. Received:UserWarning")
@rows("fn, x, why", BAD)
def test_parameters_of_no_distribution_are_refused(fn, x, why):
    with pytest.raises(ValueError, match=why):
        bound(0, fn, x.clone())


@pytest.mark.parametrize(
    ("low", "high"), [(-5, None), (-(2**62), 2**63 - 1), (-(2**63), None)]
)
def test_a_range_of_64_bits_is_drawn_from_all_of_it_and_not_beyond(low, high):
    x = filled(torch.int64, 10_000, low, high)
    assert low <= x.min() < low + 2**54
    assert x.max() > 2**63 - 2**54


def test_randint_draws_from_a_range_of_64_bits():
    x = bound(0, torch.randint, -(2**63), 2**63 - 1, (10_000,))
    assert abs(x.double().mean()) < 2**63 * 5 / 3**0.5 / 100


def test_randint_draws_unsigned_integers():
    small = bound(0, lambda: torch.randint(9, (99,), dtype=torch.uint64))
    assert small.dtype is torch.uint64
    assert {*small.tolist()} == {*range(9)}


@pytest.mark.parametrize("span", [2**63, 2**63 + 12345, 2**64 - 1, 2**64])
def test_64_bits_are_taken_modulo_a_wide_range(span):
    low = -(2**63)
    words = random.bits(key(1), 1000, torch.uint64).tolist()
    drawn = integers(key(1), (1000,), low, low + span, torch.int64)
    assert drawn.tolist() == [w % span + low for w in words]


INTEGERS = {
    "exponential_": lambda x: x.exponential_(),
    "bernoulli": torch.bernoulli,
    "multinomial": lambda x: torch.multinomial(x, 1),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_refused_where_torch_refuses_them(name):
    x = torch.ones(3, dtype=torch.int64)
    with pytest.raises(TypeError, match=f"{name} draws floating-point.*torch.int64"):
        bound(0, INTEGERS[name], x)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"int|Long|float"):
        INTEGERS[name](x)


# --- Attention, recurrent layers and dropout ---


MASK = make(6, 6, seed=3)
HOW = {
    "plain": {},
    "causal": {"is_causal": True},
    "a scale": {"scale": 0.3},
    "a negative scale": {"scale": -0.3},
    "a bias": {"attn_mask": MASK},
    "a mask": {"attn_mask": MASK > 0},
    "a mask of nothing": {"attn_mask": torch.zeros(6, 6, dtype=torch.bool)},
    "few heads": {"enable_gqa": True},
}


@rows("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_happens_to_drop_nothing_is_torchs(how, dtype):
    q = Q.to(dtype).requires_grad_()
    kv = q[:, :2] if how.get("enable_gqa") else q
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, kv, kv, **how)
    # Of 1e-9 nothing is dropped; but it is written out.
    dropping = functools.partial(F.scaled_dot_product_attention, dropout_p=1e-9, **how)
    with count_ops() as ops:
        got = bound(0, dropping, q, kv, kv)
    assert ops["remat::uniform"] == 1
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.float().square().sum(), q)[0] for y in (got, want)]
    torch.testing.assert_close(*grads)


def test_attention_is_autocast_as_torchs():
    attend = functools.partial(attended, Q, attn_mask=MASK)
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        got, want = bound(0, attend, 1e-9), attend(0.0)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want)


RECURRENT = {
    "LSTM": lambda p: nn.LSTM(8, 6, 2, dropout=p, bidirectional=True),
    "GRU": lambda p: nn.GRU(8, 6, 2, dropout=p, bias=False),
    "RNN": lambda p: nn.RNN(8, 6, 2, dropout=p),
}


@pytest.mark.parametrize("packed", [False, True])
@rows("build", RECURRENT)
def test_recurrent_layers_that_drop_nothing_are_torchs(build, packed):
    x = SEQUENCE
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2])
    for model in (build(0.0), build(0.5).eval()):
        with unmoved():
            got = flat(bound(0, model, x))
        assert_same(got, flat(model(x)))


def test_rrelu_and_pooling_that_draw_nothing_are_torchs():
    assert_same(bound(0, F.rrelu, X), F.rrelu(X))
    how = {"output_size": 7, "_random_samples": torch.rand(2, 4, 2)}
    assert_same(bound(0, lambda: pooled(X, **how)), pooled(X, **how))


def test_a_transformer_in_training_takes_no_fused_path():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    with torch.no_grad(), count_ops() as ops:
        bound(0, model, SEQUENCE)
        bound(0, model.eval(), SEQUENCE)
    assert not {op for op in ops if "_transformer_encoder" in str(op)}
    # In training only: in the attention, and after it, the middle and the end.
    assert ops["remat::uniform"] == 4


def test_a_function_of_torch_that_was_patched_later_is_called(monkeypatch):
    model = nn.MultiheadAttention(8, 2, dropout=0.0)
    calls = []

    def attention(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    bound(0, lambda: model(SEQUENCE, SEQUENCE, SEQUENCE, need_weights=False))
    assert len(calls) == 1


# --- Memory ---------------------------------------------------------------------------


LAID_OUT = {
    "channels last": X.to(memory_format=torch.channels_last),
    "transposed": X.transpose(1, 3),
    "features first": X.permute(2, 0, 1, 3),
    "a slice": X[:, 1:3, ::2],
    "expanded": X[:1, :, :1].expand(2, 4, 16, 16),
}
LIKE = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "rand_like, channels last": lambda x: torch.rand_like(
        x, memory_format=torch.channels_last
    ),
    "rand_like, contiguous": lambda x: torch.rand_like(
        x, memory_format=torch.contiguous_format
    ),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout2d": F.dropout2d,
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "dropout": F.dropout,
}


@rows("x", LAID_OUT)
@rows("fn", LIKE)
def test_a_draw_has_the_strides_of_torchs_and_the_numbers_of_a_contiguous_one(fn, x):
    got = bound(0, fn, x)
    assert got.stride() == fn(x).stride()
    assert torch.equal(got, bound(0, fn, x.contiguous()))


def test_a_draw_under_vmap_has_the_strides_of_a_transposed_tensor():
    x = make(4, 5).T
    got = vmap(per_example(torch.randn_like), (0, None))(KEYS, x)
    assert got.stride() == (20, *x.stride())
    assert torch.equal(got[1], per_example(torch.randn_like)(KEYS[1], x))
