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
