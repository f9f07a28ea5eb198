"""Samplers: the numbers, their distribution and shapes; derivatives of parameters."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import random
from remat.random import _ops
from remat.random._draw import below, number_below, rounded
from remat.testing import assert_same


K = random.key(42)
KEYS = random.split(K, (2, 3))
D = torch.float64
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROW = torch.tensor([0.5, 1.0, 2.0, 4.0])
PROBABILITIES = torch.tensor([0.1, 0.0, 0.5, 0.4])
TABLE = torch.arange(24.0).view(2, 4, 3)

# Each with the shape of what one key draws.
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
    "dropout": ((4,), lambda k: random.dropout(k, ROW, 0.5)),
}
# Its keys are for the parts of x, whose shape has theirs.
OF_PARTS = {"dropout"}
samplers = pytest.mark.parametrize("name", SAMPLERS)
unbatched = pytest.mark.parametrize("name", [n for n in SAMPLERS if n not in OF_PARTS])


# --- Shapes and transforms: one table for all ----------------------------------------


@samplers
def test_one_key_draws_the_shape_asked_for(name):
    shape, draw = SAMPLERS[name]
    assert draw(K).shape == shape
    assert_same(draw(K), draw(K))
    assert_same(draw(K), draw(random.key_data(K)))


@unbatched
def test_an_array_of_keys_draws_what_each_draws(name):
    shape, draw = SAMPLERS[name]
    each = torch.stack([torch.stack([draw(k) for k in row]) for row in KEYS])
    assert each.shape == (2, 3, *shape)
    assert_same(draw(KEYS), each)
    assert_same(draw(KEYS[:0]), each[:0])


@samplers
def test_vmap_over_keys_draws_what_each_draws(name):
    draw = SAMPLERS[name][1]
    each = torch.stack([torch.stack([draw(k) for k in row]) for row in KEYS])
    assert_same(vmap(vmap(draw))(KEYS), each)
    assert_same(vmap(vmap(draw), in_dims=1, out_dims=1)(KEYS), each)
    if name not in OF_PARTS:
        assert_same(vmap(draw)(KEYS), each)


@samplers
def test_on_meta_a_shape_is_drawn(name, monkeypatch):
    want = SAMPLERS[name][1](K)
    for parameter in ("ROW", "PROBABILITIES", "TABLE"):
        monkeypatch.setitem(globals(), parameter, globals()[parameter].to("meta"))
    got = SAMPLERS[name][1](K.to("meta"))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.is_meta or "permutation" in name


@samplers
def test_a_trace_by_make_fx_draws_the_same(name):
    draw = SAMPLERS[name][1]
    assert_same(make_fx(draw)(KEYS[0, 0])(K), draw(K))
    assert_same(make_fx(vmap(draw))(KEYS[0])(KEYS[1]), vmap(draw)(KEYS[1]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@samplers
def test_a_compiled_function_draws_the_same(name, backend):
    torch._dynamo.reset()
    draw = SAMPLERS[name][1]
    compiled = torch.compile(draw, backend=backend, fullgraph=True)
    assert_same(compiled(K), draw(K))


SIZED = {
    "uniform": lambda k, x, a: random.uniform(k, x.shape, maxval=a),
    "normal": lambda k, x, a: random.normal(k, (x.shape[0],), std=a),
    "of tensors": lambda k, x, a: random.uniform(k, x.shape, None, x, x.abs() + a),
    "randint": lambda k, x, a: random.randint(k, x.shape, 0, x.shape[0] + 1),
    "choice": lambda k, x, a: random.choice(k, x, (2,), replace=False),
    "categorical": lambda k, x, a: random.categorical(k, a * x),
    "dropout": lambda k, x, a: random.dropout(k, x, a / 9),
    "split": lambda k, x, a: random.normal(random.split(k, x.shape[0]), 4),
}


@pytest.mark.parametrize("draw", SIZED.values(), ids=SIZED.keys())
def test_a_compiled_function_of_any_size_draws_the_same(draw):
    torch._dynamo.reset()
    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 5, 8):
        x = torch.linspace(-1.0, 1.0, 4 * n).view(n, 4)
        assert_same(compiled(K, x, n / 2), draw(K, x, n / 2))


VARYING = {
    "uniform": lambda t: random.uniform(K, 4, maxval=t),
    "uniform of 64 bits": lambda t: random.uniform(K, 4, D, minval=-t, maxval=t),
    "normal": lambda t: random.normal(K, 4, mean=t, std=t),
    "gumbel": lambda t: random.gumbel(K, 4, loc=t, scale=t),
    "truncated_normal": lambda t: random.truncated_normal(K, -t, t, 4),
    "bernoulli": lambda t: random.bernoulli(K, 1 / t, 4),
    "dropout": lambda t: random.dropout(K, ROW, 1 / t),
}


@pytest.mark.parametrize("draw", VARYING.values(), ids=VARYING.keys())
def test_a_parameter_that_varies_is_compiled_twice_at_most(draw):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(draw, backend=counter, fullgraph=True)
    for i in range(12):
        number = 1.5 + 0.37 * i
        assert_same(compiled(number), draw(number))
    assert counter.frame_count == 2


FROM_ROWS = {
    "shape": lambda k, n, x: random.uniform(k, (n, 2)),
    "maxval": lambda k, n, x: random.uniform(k, 3, maxval=n),
    "randint": lambda k, n, x: random.randint(k, 3, 0, n),
    "choice": lambda k, n, x: random.choice(k, x, n),
    "choice without": lambda k, n, x: random.choice(k, n, n, replace=False),
    "choice with p": lambda k, n, x: random.choice(k, n, 5, p=x.square()),
    "categorical": lambda k, n, x: random.categorical(k, x, -1, (n,), replace=False),
    "permutation": lambda k, n, x: random.permutation(k, x),
    "split": lambda k, n, x: random.uniform(random.split(k, n), 3),
    "split into a shape": lambda k, n, x: random.uniform(random.split(k, (2, n)), 3),
    "fold_in": lambda k, n, x: random.uniform(random.fold_in(k, n), 3),
    "key": lambda k, n, x: random.uniform(random.key(n), 3),
}


@pytest.mark.parametrize("draw", FROM_ROWS.values(), ids=FROM_ROWS.keys())
def test_a_size_of_a_trace_stays_a_symbol(draw):
    fn = lambda x, data: draw(data, x.shape[0], x)
    args = torch.rand(4), K.data
    traced = make_fx(fn, tracing_mode="symbolic")(*args)
    rows = {0: torch.export.Dim("rows", min=2, max=1000)}, None
    exported = torch.export.export(Plain(fn), args, dynamic_shapes=rows).module()
    for n in (4, 7, 30):
        x = torch.linspace(-1, 2, n)
        assert_same(traced(x, K.data), fn(x, K.data))
        assert_same(exported(x, K.data), fn(x, K.data))


class Plain(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, data):
        return self.fn(x, data)


def test_an_exported_program_takes_keys():
    class Noisy(torch.nn.Module):
        def forward(self, x, key):
            a, b = random.split(key)
            return random.dropout(a, x, 0.5) * random.normal(b, x.shape)

    program = torch.export.export(Noisy(), (TABLE, K)).module()
    assert_same(program(TABLE, KEYS[0, 0]), Noisy()(TABLE, KEYS[0, 0]))


# --- Arguments ---------------------------------------------------------------------

FLOATING = {
    "uniform": lambda dtype: random.uniform(K, (5,), dtype, 2.0, 5.0),
    "normal": lambda dtype: random.normal(K, (5,), dtype, 2.0, 5.0),
    "gumbel": lambda dtype: random.gumbel(K, (5,), dtype, 2.0, 5.0),
    "exponential": lambda dtype: random.exponential(K, (5,), dtype, 5.0),
    "laplace": lambda dtype: random.laplace(K, (5,), dtype, 2.0, 5.0),
    "truncated_normal": lambda dtype: random.truncated_normal(K, 1.0, 2.0, (5,), dtype),
}
floating = pytest.mark.parametrize("draw", FLOATING.values(), ids=FLOATING.keys())


@floating
def test_the_dtype_is_a_floating_point_one_and_torchs_default(draw):
    for dtype in FLOATS:
        assert draw(dtype).dtype == dtype
    assert draw(None).dtype == torch.float32
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert_same(draw(None), draw(torch.float64))
    finally:
        torch.set_default_dtype(before)
    with pytest.raises(TypeError, match="has no values in"):
        draw(torch.int64)


@floating
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_dtypes_compute_in_float32_and_round_once(draw, dtype):
    if draw is not FLOATING["uniform"]:
        assert_same(draw(dtype), draw(torch.float32).to(dtype))


@pytest.mark.parametrize("shape", [5, (5,), [5], torch.Size([5])], ids=repr)
def test_a_shape_is_a_number_or_a_sequence(shape):
    assert_same(random.uniform(K, shape), random.uniform(K, (5,)))
    assert random.uniform(K, 0).shape == (0,)
    assert random.uniform(KEYS, (4, 0)).shape == (2, 3, 4, 0)


def test_shapes_do_not_change_the_numbers_and_fewer_are_a_prefix():
    many = random.normal(K, (24,))
    assert_same(random.normal(K, (2, 3, 4)).view(-1), many)
    assert_same(random.normal(K, (5,)), many[:5])


WITH_PARAMETERS = {
    "uniform": lambda t, shape: random.uniform(K, shape, maxval=t),
    "normal": lambda t, shape: random.normal(K, shape, std=t),
    "gumbel": lambda t, shape: random.gumbel(K, shape, loc=t),
    "exponential": lambda t, shape: random.exponential(K, shape, scale=t),
    "laplace": lambda t, shape: random.laplace(K, shape, scale=t),
    "truncated_normal": lambda t, shape: random.truncated_normal(K, -t, t, shape),
    "bernoulli": lambda t, shape: random.bernoulli(K, t / 4, shape),
    "randint": lambda t, shape: random.randint(K, shape, 0, t.long() + 1),
}
parameters = pytest.mark.parametrize(
    "draw", WITH_PARAMETERS.values(), ids=WITH_PARAMETERS.keys()
)


@parameters
def test_parameters_broadcast_to_the_shape_and_not_beyond(draw):
    assert_same(draw(ROW, None), draw(ROW, (4,)))
    assert_same(draw(ROW, (3, 4)), draw(ROW.expand(3, 4), (3, 4)))
    assert_same(draw(ROW.double(), (4,)), draw(ROW, (4,)))
    for shape in ((), (1,), (4, 3), (1, 1)):
        with pytest.raises(ValueError, match=r"has shape \[4\], which does not broad"):
            draw(ROW, shape)


BAD = {
    "uniform": lambda: random.uniform(K, minval=2.0),
    "infinite": lambda: random.uniform(K, minval=-math.inf),
    "overflow": lambda: random.uniform(K, (), torch.float16, -6e4, 6e4),
    "nan": lambda: random.uniform(K, maxval=math.nan),
    "std": lambda: random.normal(K, std=-1.0),
    "gumbel": lambda: random.gumbel(K, scale=-1.0),
    "exponential": lambda: random.exponential(K, scale=math.nan),
    "laplace": lambda: random.laplace(K, scale=-1.0),
    "truncated": lambda: random.truncated_normal(K, 1.0, 1.0),
    "nothing between": lambda: random.truncated_normal(
        K, 1.0, 1.0001, (), torch.float16
    ),
    "nor far out": lambda: random.truncated_normal(K, 40_000, 40_010, 3, torch.float16),
    "shape": lambda: random.uniform(K, (-1, -2)),
    "tensor bound": lambda: random.randint(K, 3, 0, torch.tensor(1000), torch.uint8),
    "tensor low": lambda: random.randint(K, 3, torch.tensor(-1), 9, torch.uint8),
    "64 bits": lambda: random.randint(
        K, 3, 0, torch.tensor(2**63 + 5, dtype=torch.uint64)
    ),
    "p": lambda: random.bernoulli(K, 1.5),
    "p below": lambda: random.bernoulli(K, -0.1),
    "p nan": lambda: random.bernoulli(K, math.nan),
    "range": lambda: random.randint(K, (), 3, 3),
    "bound": lambda: random.randint(K, (), 0, 257, torch.uint8),
    "low": lambda: random.randint(K, (), -1, 2, torch.uint8),
    "permutation": lambda: random.permutation(K, -1),
    "0-d": lambda: random.permutation(K, torch.ones(())),
    "choice": lambda: random.choice(K, 0),
    "too many": lambda: random.choice(K, 3, (4,), replace=False),
    "p shape": lambda: random.choice(K, 3, p=torch.ones(4)),
    "no weight": lambda: random.choice(K, 3, p=torch.zeros(3)),
    "nan weight": lambda: random.choice(K, 3, p=torch.tensor([1, math.nan, 1])),
    "infinite weight": lambda: random.choice(K, 2, p=torch.tensor([1, math.inf])),
    "negative weight": lambda: random.choice(K, 2, p=torch.tensor([1.0, -1e-9])),
    "few weights": lambda: random.choice(K, 3, 2, False, torch.tensor([0, 1.0, 0])),
    "categorical": lambda: random.categorical(K, torch.ones(3, 5), shape=(4,)),
    "no broadcast": lambda: random.categorical(K, torch.ones(3, 5), shape=(1,)),
    "categories": lambda: random.categorical(K, torch.ones(5), -1, (6,), False),
    "suffix": lambda: random.categorical(K, torch.ones(1, 5), -1, (2, 3), False),
}


@pytest.mark.parametrize("draw", BAD.values(), ids=BAD.keys())
def test_parameters_that_make_no_distribution_are_refused(draw):
    with pytest.raises(
        ValueError,
        match=r"^remat: (expected|`(std|scale|p|m..val)` |the (prob|sh)|cannot ch|no)",
    ):
        draw()


@pytest.mark.parametrize(
    ("draw", "error", "match"),
    [
        (lambda: random.bits(K, (), torch.float32), TypeError, "integers of torch.fl"),
        (lambda: random.bits(K, (), torch.bool), TypeError, "integers of torch.bool"),
        (
            lambda: random.randint(K, (), 0, 2, torch.uint64),
            TypeError,
            "integers of torch.uint64",
        ),
        (lambda: random.randint(K, (), 0.5, 2), TypeError, "`minval` is 0.5; it must"),
        (lambda: random.randint(K, None, 0, ROW), TypeError, "`maxval` is tensor"),
        (lambda: random.randint(K, 3, ROW.bool(), 2), TypeError, "`minval` is tensor"),
        (lambda: random.randint(K, 3, 0, ROW * 1j), TypeError, "`maxval` is tensor"),
        (lambda: random.randint(K, 3, 0, 1j), TypeError, "`maxval` is 1j; it must"),
        (lambda: random.rademacher(K, 3, torch.uint8), TypeError, "no -1 in torch.uin"),
        (lambda: random.rademacher(K, 3, torch.bool), TypeError, "no -1 in torch.bool"),
        (lambda: random.permutation(K, KEYS), TypeError, "cannot choose from keys"),
        (lambda: random.choice(K, KEYS, (2,)), TypeError, "cannot choose from keys"),
        (lambda: random.permutation(K, TABLE, 3), IndexError, "no axis 3 in a tensor"),
        (lambda: random.categorical(K, ROW, 1), IndexError, "no axis 1 in a tensor"),
        (lambda: random.choice(K, TABLE, axis=-4), IndexError, "no axis -4 in a te"),
    ],
)
def test_arguments_of_another_kind_are_refused(draw, error, match):
    with pytest.raises(error, match=match):
        draw()


# --- Bits and integers -------------------------------------------------------------

BLOCKS = [
    *(0x9CEAF053, 0x77F5493B, 0x12BF50AD, 0x5742B3D7),
    *(0xFCDB2127, 0x53BA6CFD, 0x838F5A6E, 0x744E06FB),
]


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32],
)
def test_bits_are_the_low_bits_of_the_words(dtype):
    size = 8 * dtype.itemsize
    words = [w % 2**size for w in BLOCKS]
    if dtype.is_signed:
        words = [w - (w >> size - 1 << size) for w in words]
    got = random.bits(K, 8, dtype)
    assert got.dtype == dtype
    assert got.tolist() == words


def test_bits_of_64_are_two_words():
    words = [(a << 32) + b for a, b in zip(BLOCKS[::2], BLOCKS[1::2], strict=True)]
    assert random.bits(K, 4, torch.uint64).tolist() == words
    assert_same(
        random.bits(K, 4, torch.int64).view(torch.uint64),
        random.bits(K, 4, torch.uint64),
    )
    assert random.bits(K).dtype == torch.uint32


def test_randint_draws_the_numbers_of_torch():
    small = random.randint(K, 8, 0, 10, torch.int32)
    assert small.tolist() == [3, 1, 7, 7, 3, 5, 4, 1]
    assert random.randint(K, 6, 0, 10).tolist() == [9, 9, 3, 5, 7, 9]
    assert random.randint(K, 6, -5, 5).tolist() == [4, 4, -2, 0, 2, 4]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        *((0, 1), (0, 2**28), (-(2**31), 2**31), (0, 2**32 + 1), (-7, 2**62 + 5)),
        *((0, 2**63 - 1), (-(2**63), -1), (1, 2**63), (-(2**62), 2**62 - 1)),
    ],
)
def test_randint_is_the_unsigned_word_modulo_the_range(low, high):
    words = random.bits(K, 64, torch.uint64).tolist()
    want = [low + w % (high - low) for w in words]
    assert random.randint(K, 64, low, high).tolist() == want
    if high < 2**63:
        tensors = random.randint(K, 64, torch.tensor(low), torch.tensor(high))
        assert tensors.tolist() == want


def test_randint_of_small_dtypes_takes_64_bits_for_wide_ranges():
    words = random.bits(K, 8, torch.uint64).tolist()
    got = random.randint(K, 8, 0, 2**28, torch.int32)
    assert got.tolist() == [w % 2**28 for w in words]
    got = random.randint(K, 8, 0, torch.tensor(10), torch.int32)
    assert got.tolist() == [w % 10 for w in words]


SPANS = [1, 2, 7, 2**31 - 1, 2**31, 2**31 + 1, 2**32 + 3, 2**62, 2**62 + 1]
SPANS += [2**63 - 1, 2**63, 2**63 + 1, 3 * 2**62, 2**64 - 1, 2**64]


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("from_below", [True, False])
def test_randint_takes_any_range_of_64_bits(span, from_below):
    low = -(2**63) if from_below or span > 2**63 else 0
    drawn = random.randint(K, 200, low, low + span)
    words = [w % 2**64 for w in random.bits(K, 200, torch.int64).tolist()]
    assert drawn.tolist() == [w % span + low for w in words]
    if low + span < 2**63:
        bounds = torch.tensor(low), torch.tensor(low + span)
        assert_same(random.randint(K, 200, *bounds), drawn)


def test_bounds_of_a_tensor_may_be_those_of_the_dtype():
    low, high = torch.tensor([0, 255]), torch.tensor([256, 256])
    drawn = random.randint(KEYS, None, low, high, torch.uint8)
    assert (drawn[..., 1] == 255).all()
    least = torch.iinfo(torch.int64).min
    assert random.randint(K, (), torch.tensor(least), torch.tensor(least)) == least


def test_randint_covers_a_dtype():
    for dtype in (torch.uint8, torch.int8):
        info = torch.iinfo(dtype)
        drawn = random.randint(K, 10_000, info.min, info.max + 1, dtype)
        assert drawn.dtype == dtype
        assert drawn.unique().tolist() == list(range(info.min, info.max + 1))


def test_a_tensor_bound_not_above_the_least_gives_the_least():
    got = random.randint(K, None, torch.tensor([3, 3]), torch.tensor([3, -9]))
    assert got.tolist() == [3, 3]
    same = random.uniform(K, None, None, torch.tensor([3.0, 3]), torch.tensor([3.0, 2]))
    assert same.tolist() == [3, 3]
    assert random.uniform(K, (), None, 3.0, 3.0) == 3


@pytest.mark.parametrize("word", [-1, 0, 2**63 - 1, -(2**63)])
def test_no_word_makes_randint_leave_its_range(monkeypatch, word):
    monkeypatch.setattr(_ops, "bits", lambda d, n, w: torch.full((n,), word))
    for low, high in ((0, 3), (0, 2**62 + 1), (-(2**63), -2), (5, 6)):
        got = random.randint(K, 4, low, high)
        assert got.tolist() == [low + (word % 2**64) % (high - low)] * 4


# --- The bounds of the real numbers --------------------------------------------------

RANGES = [(0.0, 1.0), (2.0, 5.0), (-3.0, -1.0), (-1.0, 0.0), (-5.0, -4.0), (1e-3, 1.0)]
DIGITS = {
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float32: 24,
    torch.float64: 53,
}


def largest(data, n, dtype):
    return torch.full((*data.shape[:-1], n), 1 - 2.0 ** -DIGITS[dtype], dtype=dtype)


def least(data, n, dtype):
    return torch.zeros((*data.shape[:-1], n), dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("low", "high"), RANGES)
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("low", "high"), RANGES)
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_is_torchs_where_torch_has_kernels(dtype):
    theirs = pytest.importorskip("torch.func._random")
    try:
        want = theirs.uniform(theirs.key(42), 1000, dtype=dtype)
    except (NotImplementedError, TypeError):
        pytest.skip("this torch has no such kernel on the CPU")
    assert_same(random.uniform(K, 1000, dtype), want)


def test_the_bound_has_a_derivative_where_it_was_rounded_to(monkeypatch):
    monkeypatch.setattr(_ops, "uniform", largest)

    def draw(bounds):
        return random.uniform(K, (), torch.bfloat16, bounds[0], bounds[1])

    bounds = torch.tensor([2.0, 5.0])
    assert draw(bounds) < 5
    assert grad(draw)(bounds).tolist() == [0.0, 1.0]
    assert jvp(draw, (bounds,), (torch.tensor([0.0, 3.0]),))[1] == 3


UNBOUNDED = ["normal", "gumbel", "exponential", "laplace", "truncated_normal"]


@pytest.mark.parametrize("extreme", [least, largest])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNBOUNDED[1:])
def test_extreme_uniform_numbers_give_finite_values(monkeypatch, name, dtype, extreme):
    monkeypatch.setattr(_ops, "uniform", extreme)
    got = FLOATING[name](dtype)
    assert got.isfinite().all()
    if name == "truncated_normal":
        assert ((got > 1) & (got < 2)).all()
        inside = random.truncated_normal(K, -math.inf, math.inf, (), dtype)
        assert inside.abs() < 40
    if name == "exponential":
        assert (got >= 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 1.1), (-0.01, 0.0), (0.0, 0.01), (8.0, 9.0), (-1.0, 30.0)]
)
def test_truncated_normal_excludes_both_bounds(dtype, low, high):
    x = random.truncated_normal(K, low, high, (20_000,), dtype)
    lo, hi = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
    assert ((x > lo) & (x < hi)).all()


def test_bernoulli_of_0_and_1_is_certain(monkeypatch):
    for p in (0, 1, 0.0, 1.0):
        assert (random.bernoulli(K, p, (10_000,)) == bool(p)).all()
        for dtype in FLOATS:
            assert (random.bernoulli(K, torch.tensor(p).to(dtype), 10_000) == p).all()
    for extreme in (least, largest):
        monkeypatch.setattr(_ops, "uniform", extreme)
        assert random.bernoulli(K, torch.tensor([0.0, 1.0])).tolist() == [False, True]
        assert random.bernoulli(K, 1.0)
        assert not random.bernoulli(K, 0.0)


def test_bernoulli_compares_with_all_digits_of_a_tensor(monkeypatch):
    half = lambda data, n, dtype: torch.full((n,), 0.5, dtype=dtype)
    monkeypatch.setattr(_ops, "uniform", half)
    p = torch.tensor([0.5 - 1e-12, 0.5, 0.5 + 1e-12], dtype=D)
    assert random.bernoulli(K, p).tolist() == [False, False, True]


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


def test_scaling_probabilities_by_two_changes_no_draw():
    p = random.uniform(K, (50,))
    drawn = random.choice(K, 50, 1000, p=p)
    for power in (-140, -3, 100, 127):
        scaled = p.double() * 2.0**power
        assert_same(
            random.choice(K, 50, 1000, p=scaled.double()),
            random.choice(K, 50, 1000, p=p.double()),
        )
    assert_same(random.choice(K, 50, 1000, p=p * 8), drawn)
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


def normal_cdf(x):
    return torch.special.ndtr(x)


CDFS = {
    "uniform": (
        lambda: random.uniform(K, N, minval=-1.0, maxval=3.0),
        lambda x: (x + 1) / 4,
    ),
    "normal": (
        lambda: random.normal(K, N, mean=1.0, std=2.0),
        lambda x: normal_cdf((x - 1) / 2),
    ),
    "normal f64": (lambda: random.normal(K, N, torch.float64), normal_cdf),
    "gumbel": (lambda: random.gumbel(K, N, loc=1.0), lambda x: (-(-x + 1).exp()).exp()),
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
        lambda x: (
            (normal_cdf(x) - normal_cdf(torch.tensor(-1.0)))
            / (normal_cdf(torch.tensor(2.0)) - normal_cdf(torch.tensor(-1.0)))
        ),
    ),
    "tail": (
        lambda: random.truncated_normal(K, 10.0, math.inf, N),
        lambda x: (
            1
            - (
                torch.special.log_ndtr(-x)
                - torch.special.log_ndtr(-torch.tensor(10.0).double())
            ).exp()
        ),
    ),
}


@pytest.mark.parametrize("name", CDFS)
def test_the_distribution_is_right_by_kolmogorov_and_smirnov(name):
    draw, cdf = CDFS[name]
    f = cdf(draw().double().sort().values).double()
    steps = torch.arange(N + 1) / N
    distance = torch.maximum((f - steps[:-1]).abs().max(), (f - steps[1:]).abs().max())
    assert distance * math.sqrt(N) < 1.95  # one key in a thousand is beyond that


def chi_squared(counts, expected):
    return ((counts - expected) ** 2 / expected).sum().item()


def beyond(freedom):
    """A bound on chi squared that one key in ten thousand is beyond, or fewer."""
    return freedom + 4 * math.sqrt(2 * freedom) + 12


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


@pytest.mark.parametrize("name", COUNTED)
def test_frequencies_are_right_by_chi_squared(name):
    draw, weights = COUNTED[name]
    expected = torch.tensor(weights, dtype=torch.float64)
    expected *= N / expected.sum()
    counts = torch.bincount(draw().long(), minlength=len(weights))
    assert chi_squared(counts, expected) < beyond(len(weights) - 1)


def test_draws_of_neighbouring_keys_are_not_correlated():
    x = random.normal(random.split(K, 50), 2000)
    products = (x @ x.T / 2000)[torch.triu(torch.ones(50, 50), 1) > 0]
    assert products.abs().max() * math.sqrt(2000) < 5
    assert abs(products.mean()) * math.sqrt(2000 * len(products)) < 4


# --- Derivatives -------------------------------------------------------------------

POINT = [torch.tensor([0.3, -0.4], dtype=D), torch.tensor([1.5, 2.5], dtype=D)]
REPARAMETRIZED = {
    "uniform": lambda k, a, b: random.uniform(k, (3, 2), D, a, b),
    "normal": lambda k, a, b: random.normal(k, (3, 2), D, a, b),
    "gumbel": lambda k, a, b: random.gumbel(k, (3, 2), D, a, b),
    "laplace": lambda k, a, b: random.laplace(k, (3, 2), D, a, b),
    "exponential": lambda k, a, b: a + random.exponential(k, (3, 2), D, b),
    "truncated_normal": lambda k, a, b: random.truncated_normal(k, a, b, (3, 2), D),
}
reparametrized = pytest.mark.parametrize("name", REPARAMETRIZED)


@reparametrized
def test_derivatives_flow_to_the_parameters(name):
    inputs = [t.clone().requires_grad_() for t in POINT]

    def draw(a, b):
        return REPARAMETRIZED[name](K, a, b)

    assert gradcheck(draw, inputs, check_forward_ad=True)
    assert gradgradcheck(lambda a, b: draw(a, b).sin(), inputs)


def test_derivatives_are_those_of_the_formulas():
    u = random.uniform(K, 5, D)
    z = random.normal(K, 5, D)
    one = torch.ones((), dtype=D)
    jac = jacrev(lambda a, b: random.uniform(K, 5, D, a, b), (0, 1))(one, 2 * one)
    torch.testing.assert_close(jac, (1 - u, u))
    jac = jacfwd(lambda a, b: random.normal(K, 5, D, a, b), (0, 1))(one, 2 * one)
    torch.testing.assert_close(jac, (torch.ones(5, dtype=D), z))


@reparametrized
def test_derivatives_compose_with_keys_as_arguments(name):
    a, b = (t[0] for t in POINT)

    def loss(a, b, key):
        return REPARAMETRIZED[name](key, a, b).sin().sum()

    each = torch.stack([grad(loss)(a, b, k) for k in KEYS[0]])
    # The kernels of a batch may vectorize otherwise.
    close = torch.testing.assert_close
    close(vmap(grad(loss), in_dims=(None, None, 0))(a, b, KEYS[0]), each)
    assert each.unique().numel() == 3
    close(hessian(loss, 1)(a, b, K), jacrev(jacrev(loss, 1), 1)(a, b, K))
    tangent = jvp(lambda b: loss(a, b, K), (b,), (torch.ones_like(b),))[1]
    close(tangent, grad(loss, 1)(a, b, K))
    traced = make_fx(grad(loss))(a, b, K)
    close(traced(a, b, KEYS[0, 1]), each[1])


def test_derivatives_flow_to_what_is_chosen_from():
    x = torch.randn(4, 3, dtype=D, requires_grad=True)
    for draw in (
        lambda x: random.permutation(KEYS, x, 1),
        lambda x: random.permutation(K, x, independent=True),
        lambda x: random.choice(KEYS, x, (5,)),
        lambda x: random.choice(K, x, (2,), False, torch.ones(3), 1),
    ):
        assert gradcheck(draw, x, check_forward_ad=True)


def test_no_derivative_flows_to_probabilities():
    p = torch.tensor([0.2, 0.8], requires_grad=True)
    for drawn in (
        random.bernoulli(K, p),
        random.categorical(K, p.log(), shape=(5,)),
        random.choice(K, 2, (5,), p=p),
        random.choice(K, 2, (1,), False, p=p),
        random.randint(K, None, 0, (10 * p).long()),
    ):
        assert not drawn.requires_grad
