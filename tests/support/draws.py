"""What the tests of keys, streams and samplers share: keys, draws, known numbers."""

import math

import torch

from remat import random
from remat.random import _ops


K = random.key(42)
KEYS = random.split(K, (2, 3))
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
FLOATS = [*DIGITS]


def each_of(draw, keys=KEYS):
    """What each key draws alone, stacked in the shape of the keys."""
    if not keys.ndim:
        return draw(keys)
    return torch.stack([each_of(draw, k) for k in keys])


# --- Raw keys, and draws as functions of them and of a number of values -----------


LAST = 2**64 - 1


def raw(*rows):
    return torch.tensor(rows, dtype=torch.uint64)


ONE = raw(42, 0)
MANY = raw([42, 0], [0, 0], [LAST, LAST], [7, 2**32 - 2], [2**63, 2**63], [1, LAST])

RAW_DRAWS = {
    **{f"uniform {d}": lambda k, n, d=d: _ops.uniform(k, n, d) for d in FLOATS},
    **{f"normal {d}": lambda k, n, d=d: _ops.normal(k, n, d) for d in FLOATS},
    **{f"bits {w}": lambda k, n, w=w: _ops.bits(k, n, w) for w in (8, 16, 32, 64)},
    "split": lambda k, n: _ops.split(k, n).movedim(0, -2).flatten(-2),
}


# --- The stream of the seed 42, by torch.func._random of torch 2.15 ---------------


SPLIT = raw(
    [8643895580192075859, 6287785766076502189],
    [6033254488940945703, 8380643633896839790],
    [12143778050234647077, 14270118698559565209],
)
FOLDED = raw(7527850912803292081, 3344896577480189866)  # with 7
WORDS = [
    *(0x9CEAF053, 0x77F5493B, 0x12BF50AD, 0x5742B3D7),
    *(0xFCDB2127, 0x53BA6CFD, 0x838F5A6E, 0x744E06FB),
]
UNIFORM = {
    torch.float32: [0.9177295565604164, 0.9581486582756042, 0.7473247647285461],
    torch.float16: [0.04052734375, 0.15380859375, 0.08447265625, 0.47998046875],
    torch.bfloat16: [0.32421875, 0.23046875, 0.67578125, 0.83984375],
    torch.float64: [0.34183667592359457, 0.9785982803638217, 0.8477970729176431],
}
NORMAL = [-0.9701898694, 0.1940188855, -1.2356212139, 1.9239265919]
NORMAL_64 = [
    *(0.886497505901441, 0.4393560694379269),
    *(-0.15660962291201724, -0.013718678830210487),
]


def integers_of(dtype):
    """The stream as integers: the low bits of its words, or pairs of words."""
    size = 8 * dtype.itemsize
    pairs = [a << 32 | b for a, b in zip(WORDS[::2], WORDS[1::2], strict=True)]
    wanted = [w % 2**size for w in (pairs if size == 64 else WORDS)]
    sign = 2 ** (size - 1) if dtype.is_signed else 2**size
    return torch.tensor([w if w < sign else w - 2 * sign for w in wanted], dtype=dtype)


# --- Samplers, each with the shape of what one key draws --------------------------


ROW = torch.tensor([0.5, 1.0, 2.0, 4.0])
PROBABILITIES = torch.tensor([0.1, 0.0, 0.5, 0.4])
TABLE = torch.arange(24.0).view(2, 4, 3)


def dropped(keys):
    """Drop from rows, of which there is one for each key."""
    shape = random.key_data(keys).shape[:-1]
    return random.dropout(keys, ROW.expand(*shape, 4), 0.5)


SAMPLERS = {
    "bits": ((3,), lambda k: random.bits(k, (3,))),
    "bits 8": ((5,), lambda k: random.bits(k, 5, torch.uint8)),
    "bits 64": ((), lambda k: random.bits(k, (), torch.int64)),
    "uniform": ((), lambda k: random.uniform(k)),
    "uniform of rows": ((2, 4), lambda k: random.uniform(k, (2, 4), maxval=ROW)),
    "normal": ((2, 3), lambda k: random.normal(k, (2, 3))),
    "normal of rows": ((4,), lambda k: random.normal(k, None, mean=1, std=ROW)),
    "bernoulli": ((), lambda k: random.bernoulli(k)),
    "bernoulli of rows": ((4,), lambda k: random.bernoulli(k, PROBABILITIES)),
    "rademacher": ((6,), lambda k: random.rademacher(k, 6)),
    "randint": ((5,), lambda k: random.randint(k, 5, -3, 9)),
    "randint 8": ((5,), lambda k: random.randint(k, 5, -3, 9, torch.int8)),
    "randint of rows": ((4,), lambda k: random.randint(k, None, 0, 9 * ROW.long() + 1)),
    "gumbel": ((7,), lambda k: random.gumbel(k, (7,))),
    "gumbel of rows": ((4,), lambda k: random.gumbel(k, None, None, ROW, ROW)),
    "exponential": ((7,), lambda k: random.exponential(k, (7,))),
    "exponential of rows": ((4,), lambda k: random.exponential(k, None, scale=ROW)),
    "laplace": ((7,), lambda k: random.laplace(k, (7,))),
    "laplace of rows": ((4,), lambda k: random.laplace(k, None, None, ROW, ROW)),
    "truncated_normal": ((7,), lambda k: random.truncated_normal(k, -1, 2, (7,))),
    "truncated_normal of rows": (
        (4,),
        lambda k: random.truncated_normal(k, ROW, math.inf),
    ),
    "permutation": ((9,), lambda k: random.permutation(k, 9)),
    "permutation of rows": ((2, 4, 3), lambda k: random.permutation(k, TABLE, 1)),
    "permutation, independent": (
        (2, 4, 3),
        lambda k: random.permutation(k, TABLE, -2, independent=True),
    ),
    "choice": ((3, 2), lambda k: random.choice(k, 5, (3, 2))),
    "choice of columns": ((2, 5, 3), lambda k: random.choice(k, TABLE, 5, axis=1)),
    "choice with p": ((6,), lambda k: random.choice(k, 4, (6,), p=PROBABILITIES)),
    "choice without": ((2, 2), lambda k: random.choice(k, 6, (2, 2), replace=False)),
    "choice without, with p": (
        (2, 3, 3),
        lambda k: random.choice(k, TABLE, 3, False, PROBABILITIES, axis=-2),
    ),
    "categorical": ((2, 3), lambda k: random.categorical(k, TABLE, axis=1)),
    "categorical, often": (
        (5, 2, 3),
        lambda k: random.categorical(k, TABLE, 1, (5, 2, 3)),
    ),
    "categorical without": (
        (2, 2, 3),
        lambda k: random.categorical(k, TABLE.mT, -1, (2, 2, 3), replace=False),
    ),
    "dropout": ((4,), dropped),
}

# Continuous distributions by two parameters, of which the second is the larger.
DISTRIBUTIONS = {
    "uniform": random.uniform,
    "normal": random.normal,
    "gumbel": random.gumbel,
    "laplace": random.laplace,
    "exponential": lambda k, shape, dtype, a, b: random.exponential(
        k, shape, dtype, b - a
    ),
    "truncated_normal": lambda k, shape, dtype, a, b: random.truncated_normal(
        k, a, b, shape, dtype
    ),
}


# --- In the place of `_ops.uniform`: its largest and its least number -------------


def largest(data, n, dtype):
    return torch.full((*data.shape[:-1], n), 1 - 2.0 ** -DIGITS[dtype], dtype=dtype)


def least(data, n, dtype):
    return torch.zeros((*data.shape[:-1], n), dtype=dtype)


EXTREMES = {"least": least, "largest": largest}
