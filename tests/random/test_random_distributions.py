"""Choices, integers, bounds of real numbers, and the distributions of draws."""

import math

import pytest
import torch
from support.draws import (
    DIGITS,
    DISTRIBUTIONS,
    EXTREMES,
    FLOATS,
    KEYS,
    ROW,
    TABLE,
    K,
    integers_of,
    largest,
    least,
)
from support.tables import rows
from torch.func import grad, jvp, vmap

from remat import random
from remat.random import _ops
from remat.random._draw import below, number_below, rounded
from remat.testing import assert_same


D = torch.float64


# --- Choices -----------------------------------------------------------------------


def test_a_permutation_has_every_thing_once():
    orders = random.permutation(KEYS, 50)
    assert_same(orders.sort(-1).values, torch.arange(50).expand(2, 3, 50))
    assert len({tuple(o) for o in orders.view(6, 50).tolist()}) == 6
    x = torch.randn(50, 2)
    assert_same(random.permutation(K, x), x[random.permutation(K, 50)])
    assert_same(random.permutation(K, x.T, 1), x[random.permutation(K, 50)].T)


def test_equal_words_leave_things_in_their_order(monkeypatch):
    monkeypatch.setattr(_ops, "bits", lambda d, n, w: torch.arange(n) // 500)
    assert_same(random.permutation(K, 5000), torch.arange(5000))


def test_independent_rows_have_orders_of_their_own():
    x = torch.arange(40).expand(5, 40)
    rows = random.permutation(K, x, 1, independent=True)
    assert_same(rows.sort(1).values, x.contiguous())
    assert len({tuple(r) for r in rows.tolist()}) == 5


def test_choice_takes_along_the_axis():
    index = random.choice(K, 4, (2, 5))
    want = torch.stack([TABLE[:, i] for i in index.view(-1).tolist()], 1)
    assert_same(random.choice(K, TABLE, (2, 5), axis=1), want.view(2, 2, 5, 3))
    assert_same(random.choice(K, TABLE, (2, 5), axis=-2), want.view(2, 2, 5, 3))


@pytest.mark.parametrize("p", [None, torch.tensor([1.0, 2, 0, 3, 4, 0])])
def test_choice_without_replacement_has_no_thing_twice(p):
    keys = random.split(K, 500)
    drawn = random.choice(keys, 6, (4,), replace=False, p=p)
    assert (drawn.sort(-1).values.diff(dim=-1) > 0).all()
    if p is not None:
        assert set(drawn.unique().tolist()) == {0, 1, 3, 4}


def test_what_has_probability_0_is_not_chosen(monkeypatch):
    p = torch.tensor([0.0, 1, 0, 0, 2, 0])
    logits = p.log()
    assert random.choice(K, 6, 5000, p=p).unique().tolist() == [1, 4]
    assert random.categorical(K, logits, shape=(5000,)).unique().tolist() == [1, 4]
    for extreme, want in ((least, 1), (largest, 4)):
        monkeypatch.setattr(_ops, "uniform", extreme)
        assert random.choice(K, 6, p=p) == want
        assert random.categorical(K, logits).item() in {1, 4}


@pytest.mark.parametrize(
    ("p", "possible"),
    [
        ([1e38, 3e38, 3e38], {0, 1, 2}),
        ([0, 1e-45, 0], {1}),
        ([0, 3e-45, 3e-45, 0], {1, 2}),
        ([0, 1, 0], {1}),
        ([0.0, 3.4e38, 1e-30], {1}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_probabilities_may_have_any_sum(p, possible, dtype):
    p = torch.tensor(p).to(dtype)
    assert set(random.choice(K, len(p), 300, p=p).tolist()) == possible
    batch = torch.stack([p, p])
    each = vmap(lambda k, p: random.choice(k, len(p), 300, p=p))(KEYS[0, :2], batch)
    assert set(each.unique().tolist()) == possible


@pytest.mark.parametrize("p", [[0.0, 0, 0], [1, math.nan, 1], [math.inf, 1, 1]])
def test_an_index_is_in_range_where_weights_are_not_checked(p):
    batch = torch.tensor([p, p])
    drawn = vmap(lambda k, p: random.choice(k, 3, (9,), p=p))(KEYS[0, :2], batch)
    assert drawn.min() >= 0
    assert drawn.max() <= 2


def test_scaling_probabilities_by_two_changes_no_draw():
    p = random.uniform(K, (50,))
    drawn = random.choice(K, 50, 1000, p=p)
    for power in (-100, -3, 100, 127):
        assert_same(random.choice(K, 50, 1000, p=p * 2.0**power), drawn)
    sums = p.cumsum(0)
    u = random.uniform(K, 1000)
    assert_same(torch.searchsorted(sums, u * sums[-1], right=True), drawn)


@pytest.mark.parametrize("p", [None, torch.ones(0)])
@pytest.mark.parametrize("replace", [True, False])
def test_nothing_is_drawn_from_nothing(p, replace):
    assert random.choice(KEYS, 0, (0, 5), replace, p).shape == (2, 3, 0, 5)
    assert random.choice(KEYS, torch.ones(0, 2), 0, replace, p).shape == (2, 3, 0, 2)


def test_categorical_without_replacement_is_distinct_for_each_row():
    logits = random.normal(K, (3, 8))
    drawn = random.categorical(KEYS, logits, -1, (5, 3), replace=False)
    assert drawn.shape == (2, 3, 5, 3)
    assert (drawn.sort(-2).values.diff(dim=-2) > 0).all()


# --- Distributions: fixed keys, so a bound holds for ever or never --------------------

N = 40_000

ndtr, log_ndtr = torch.special.ndtr, torch.special.log_ndtr
TEN = torch.tensor(10.0, dtype=D)
# What is drawn, and how much of its distribution is below a number.
CDFS = {
    "uniform": (
        lambda: random.uniform(K, N, minval=-1.0, maxval=3.0),
        lambda x: (x + 1) / 4,
    ),
    "normal": (
        lambda: random.normal(K, N, mean=1.0, std=2.0),
        lambda x: ndtr((x - 1) / 2),
    ),
    "normal f64": (lambda: random.normal(K, N, D), ndtr),
    "gumbel": (lambda: random.gumbel(K, N, loc=1.0), lambda x: (-(1 - x).exp()).exp()),
    "exponential": (
        lambda: random.exponential(K, N, scale=2.0),
        lambda x: -(-x / 2).expm1(),
    ),
    "laplace": (
        lambda: random.laplace(K, N, loc=1.0, scale=2.0),
        lambda x: 0.5 - 0.5 * (x - 1).sign() * (-(x - 1).abs() / 2).expm1(),
    ),
    "truncated": (
        lambda: random.truncated_normal(K, -1.0, 2.0, N),
        lambda x: (ndtr(x) - ndtr(-TEN / 10)) / (ndtr(TEN / 5) - ndtr(-TEN / 10)),
    ),
    "tail": (
        lambda: random.truncated_normal(K, 10.0, math.inf, N),
        lambda x: 1 - (log_ndtr(-x) - log_ndtr(-TEN)).exp(),
    ),
}


@rows("draw, cdf", CDFS)
def test_the_distribution_is_right_by_kolmogorov_and_smirnov(draw, cdf):
    f = cdf(draw().double().sort().values).double()
    steps = torch.arange(N + 1) / N
    distance = torch.maximum((f - steps[:-1]).abs().max(), (f - steps[1:]).abs().max())
    assert distance * math.sqrt(N) < 1.95  # one key in a thousand is beyond that


COUNTED = {
    "randint": (lambda: random.randint(K, N, 0, 7), [1.0] * 7),
    "randint 8": (lambda: random.randint(K, N, 0, 7, torch.int8), [1.0] * 7),
    "bits": (lambda: random.bits(K, N, torch.uint8), [1.0] * 256),
    "high bits": (lambda: random.bits(K, N, torch.int64) >> 60 & 15, [1.0] * 16),
    "bernoulli": (lambda: random.bernoulli(K, 0.3, N), [7.0, 3.0]),
    "rademacher": (lambda: (random.rademacher(K, N) + 1) // 2, [1.0, 1.0]),
    "choice": (lambda: random.choice(K, 5, N), [1.0] * 5),
    "choice with p": (lambda: random.choice(K, 4, N, p=ROW), ROW.tolist()),
    "categorical": (lambda: random.categorical(K, ROW.log(), shape=N), ROW.tolist()),
    "permutation": (lambda: random.permutation(random.split(K, N), 5)[:, 2], [1.0] * 5),
    # Of the second of two draws: 1/6 + 2/6 ... by hand.
    "without": (
        lambda: random.choice(
            random.split(K, N), 3, (2,), False, torch.tensor([1.0, 2, 3])
        )[:, 1],
        [
            2 / 6 * 1 / 4 + 3 / 6 * 1 / 3,
            1 / 6 * 2 / 5 + 3 / 6 * 2 / 3,
            1 / 6 * 3 / 5 + 2 / 6 * 3 / 4,
        ],
    ),
    "splits": (lambda: random.uniform(random.split(K, N), ()).mul(8).long(), [1.0] * 8),
}


@rows("draw, weights", COUNTED)
def test_frequencies_are_right_by_chi_squared(draw, weights):
    expected = torch.tensor(weights, dtype=D)
    expected *= N / expected.sum()
    counts = torch.bincount(draw().long(), minlength=len(weights))
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = len(weights) - 1
    # One key in ten thousand is beyond that, or fewer.
    assert chi_squared < freedom + 4 * math.sqrt(2 * freedom) + 12


def test_draws_of_neighbouring_keys_are_not_correlated():
    x = random.normal(random.split(K, 50), 2000)
    products = (x @ x.T / 2000)[torch.triu(torch.ones(50, 50), 1) > 0]
    assert products.abs().max() * math.sqrt(2000) < 5
    assert abs(products.mean()) * math.sqrt(2000 * len(products)) < 4


# --- Integers, and bounds of real numbers ---


OF_WIDE_UNIFORM = DISTRIBUTIONS.keys() - {"uniform", "normal"}
extremes = rows("extreme", EXTREMES)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)
INTEGERS = [
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
]


# --- Bits and integers -------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bits_are_the_low_bits_of_the_words(dtype):
    want = integers_of(dtype)
    assert_same(random.bits(K, len(want), dtype), want)


def test_randint_draws_the_numbers_of_torch():
    small = random.randint(K, 8, 0, 10, torch.int32)
    assert small.tolist() == [3, 1, 7, 7, 3, 5, 4, 1]
    assert random.randint(K, 6, 0, 10).tolist() == [9, 9, 3, 5, 7, 9]
    assert random.randint(K, 6, -5, 5).tolist() == [4, 4, -2, 0, 2, 4]


SPANS = [1, 2, 7, 2**31 - 1, 2**31, 2**31 + 1, 2**32 + 3, 2**62, 2**62 + 1]
SPANS += [2**63 - 1, 2**63, 2**63 + 1, 3 * 2**62, 2**64 - 1, 2**64]
RANGES = [
    *((0, 1), (0, 2**28), (-(2**31), 2**31), (0, 2**32 + 1), (-7, 2**62 + 5)),
    *((0, 2**63 - 1), (-(2**63), -1), (1, 2**63), (-(2**62), 2**62 - 1)),
    *((-(2**63), span - 2**63) for span in SPANS),
    *((0, span) for span in SPANS if span <= 2**63),
]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_randint_is_the_unsigned_word_modulo_the_range(low, high):
    words = random.bits(K, 200, torch.uint64).tolist()
    want = [low + w % (high - low) for w in words]
    assert random.randint(K, 200, low, high).tolist() == want
    if high < 2**63:
        tensors = random.randint(K, 200, torch.tensor(low), torch.tensor(high))
        assert tensors.tolist() == want


@pytest.mark.parametrize("high", [2**28, torch.tensor(10)], ids=["wide", "a tensor"])
def test_randint_of_a_small_dtype_takes_64_bits(high):
    words = random.bits(K, 8, torch.uint64).tolist()
    got = random.randint(K, 8, 0, high, torch.int32)
    assert got.tolist() == [w % int(high) for w in words]


def test_bounds_of_a_tensor_may_be_those_of_the_dtype():
    low, high = torch.tensor([0, 255]), torch.tensor([256, 256])
    drawn = random.randint(KEYS, None, low, high, torch.uint8)
    assert (drawn[..., 1] == 255).all()
    least = torch.iinfo(torch.int64).min
    assert random.randint(K, (), torch.tensor(least), torch.tensor(least)) == least


def test_a_tensor_bound_not_above_the_least_gives_the_least():
    got = random.randint(K, None, torch.tensor([3, 3]), torch.tensor([3, -9]))
    assert got.tolist() == [3, 3]
    same = random.uniform(K, None, None, torch.tensor([3.0, 3]), torch.tensor([3.0, 2]))
    assert same.tolist() == [3, 3]
    assert random.uniform(K, (), None, 3.0, 3.0) == 3


@pytest.mark.parametrize("word", [-1, 0, 2**63 - 1, -(2**63)])
def test_no_word_makes_randint_leave_its_range(monkeypatch, word):
    monkeypatch.setattr(_ops, "bits", lambda d, n, w: torch.full((n,), word))
    for low, high in ((0, 3), (0, 2**62 + 1), (-(2**63), -2), (-(2**63), 0)):
        got = random.randint(K, 4, low, high)
        assert got.tolist() == [low + (word % 2**64) % (high - low)] * 4


# --- The bounds of the real numbers --------------------------------------------------

BOUNDS = [(0.0, 1.0), (2.0, 5.0), (-3.0, -1.0), (-1.0, 0.0), (-5.0, -4.0), (1e-3, 1.0)]


@floats
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_uniform_excludes_its_upper_bound(monkeypatch, dtype, low, high):
    lo, hi = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
    below = torch.nextafter(hi, torch.tensor(-math.inf, dtype=dtype))
    args = [(low, high), (lo.double(), hi.double())]
    monkeypatch.setattr(_ops, "uniform", largest)
    for bounds in args:
        top = random.uniform(K, 3, dtype, *bounds)
        assert (top <= below).all()
        assert (top >= below - (below - low) * 2.0 ** (2 - DIGITS[dtype])).all()
    monkeypatch.setattr(_ops, "uniform", least)
    for bounds in args:
        assert_same(random.uniform(K, (), dtype, *bounds), lo)


@floats
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_uniform_is_torchs_but_for_the_bound(dtype, low, high):
    u = random.uniform(K, 5000, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lo, hi = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
    theirs = (u.to(wide) * (hi - lo).to(wide) + lo.to(wide)).to(dtype)
    below = torch.nextafter(hi, lo)
    ours = random.uniform(K, 5000, dtype, low, high)
    assert_same(ours, torch.where(theirs == hi, below, theirs))
    if (dtype, low) == (torch.bfloat16, 2.0):
        assert (theirs == hi).any()
    assert (ours < hi).all()
    assert (ours >= lo).all()


@floats
def test_bounds_are_rounded_as_tensors_are_and_the_value_below_is_the_next(dtype):
    u, w = random.uniform(K, (2, 2000), D, -5.0, 5.0)
    powers = torch.tensor([s * 2.0**e for s in (1, -1) for e in range(-24, 16)])
    small = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, -(2.0**-126), 3e-39])
    numbers = torch.cat([u * 10 ** w.clamp(max=3), powers, small]).to(D)
    values = numbers.to(dtype)
    want = torch.nextafter(values, torch.tensor(-math.inf, dtype=dtype))
    assert [rounded(x, dtype) for x in numbers.tolist()] == values.tolist()
    assert [number_below(x, dtype) for x in values.tolist()] == want.tolist()
    assert_same(below(values), want)


def test_the_bound_has_a_derivative_where_it_was_rounded_to(monkeypatch):
    monkeypatch.setattr(_ops, "uniform", largest)

    def draw(bounds):
        return random.uniform(K, (), torch.bfloat16, bounds[0], bounds[1])

    bounds = torch.tensor([2.0, 5.0])
    assert draw(bounds) < 5
    assert grad(draw)(bounds).tolist() == [0.0, 1.0]
    assert jvp(draw, (bounds,), (torch.tensor([0.0, 3.0]),))[1] == 3


@extremes
@floats
@pytest.mark.parametrize("name", sorted(OF_WIDE_UNIFORM))
def test_extreme_uniform_numbers_give_finite_values(monkeypatch, name, dtype, extreme):
    monkeypatch.setattr(_ops, "uniform", extreme)
    assert DISTRIBUTIONS[name](K, (5,), dtype, 1.0, 2.0).isfinite().all()


@extremes
@floats
def test_extreme_uniform_numbers_give_values_in_range(monkeypatch, dtype, extreme):
    monkeypatch.setattr(_ops, "uniform", extreme)
    assert random.exponential(K, (), dtype, 5.0) >= 0
    assert 1 < random.truncated_normal(K, 1.0, 2.0, (), dtype) < 2
    assert random.truncated_normal(K, -math.inf, math.inf, (), dtype).abs() < 40


@floats
@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 1.1), (-0.01, 0.0), (0.0, 0.01), (8.0, 9.0), (-1.0, 30.0)]
)
def test_truncated_normal_excludes_both_bounds(dtype, low, high):
    x = random.truncated_normal(K, low, high, (20_000,), dtype)
    lo, hi = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
    assert ((x > lo) & (x < hi)).all()


@extremes
def test_bernoulli_of_0_and_1_is_certain_for_every_number(monkeypatch, extreme):
    monkeypatch.setattr(_ops, "uniform", extreme)
    for dtype in FLOATS:
        p = torch.tensor([0.0, 1.0], dtype=dtype)
        assert random.bernoulli(K, p).tolist() == [False, True]
    assert random.bernoulli(K, 1.0)
    assert not random.bernoulli(K, 0.0)


def test_bernoulli_compares_with_all_digits_of_a_tensor(monkeypatch):
    half = lambda data, n, dtype: torch.full((n,), 0.5, dtype=dtype)
    monkeypatch.setattr(_ops, "uniform", half)
    p = torch.tensor([0.5 - 1e-12, 0.5, 0.5 + 1e-12], dtype=D)
    assert random.bernoulli(K, p).tolist() == [False, False, True]
