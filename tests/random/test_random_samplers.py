"""Samplers: the numbers, their distribution and shapes; derivatives of parameters."""

import functools
import math

import pytest
import torch
from support import draws
from support.draws import DISTRIBUTIONS, FLOATS, KEYS, ROW, SAMPLERS, TABLE, K, each_of
from support.tables import rows
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import random
from remat.testing import assert_same


D = torch.float64
samplers = pytest.mark.parametrize(
    "draw", [d for _, d in SAMPLERS.values()], ids=SAMPLERS
)


# --- Shapes and transforms: one table for all ----------------------------------------


@rows("shape, draw", SAMPLERS)
def test_one_key_draws_the_shape_asked_for(shape, draw):
    assert draw(K).shape == shape
    assert_same(draw(K), draw(K))
    assert_same(draw(K), draw(random.key_data(K)))


@rows("shape, draw", SAMPLERS)
def test_an_array_of_keys_draws_what_each_draws(shape, draw):
    each = each_of(draw)
    assert each.shape == (2, 3, *shape)
    assert_same(draw(KEYS), each)
    assert_same(draw(KEYS[:0]), each[:0])


@samplers
def test_vmap_over_keys_draws_what_each_draws(draw):
    each = each_of(draw)
    assert_same(vmap(vmap(draw))(KEYS), each)
    assert_same(vmap(vmap(draw), in_dims=1, out_dims=1)(KEYS), each)
    assert_same(vmap(draw)(KEYS), each)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_draw_of_a_key_on_meta_has_a_shape(name, monkeypatch):
    _, draw = SAMPLERS[name]
    want = draw(K)
    for parameter in ("ROW", "PROBABILITIES", "TABLE"):
        on_meta = getattr(draws, parameter).to("meta")
        monkeypatch.setattr(draws, parameter, on_meta)
    got = draw(K.to("meta"))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.is_meta or "permutation" in name


@samplers
def test_a_trace_by_make_fx_draws_the_same(draw):
    assert_same(make_fx(draw)(KEYS[0, 0])(K), draw(K))
    assert_same(make_fx(vmap(draw))(KEYS[0])(KEYS[1]), vmap(draw)(KEYS[1]))


def test_a_compiled_function_draws_the_same():
    """One of all samplers: each alone takes a compilation."""
    torch._dynamo.reset()
    draws = [draw for _, draw in SAMPLERS.values()]
    all_of = lambda key: [draw(key) for draw in draws]
    compiled = torch.compile(all_of, backend="aot_eager", fullgraph=True)
    assert_same(compiled(K), all_of(K))


# Draws whose size or bounds are those of an input: its values, its rows, and a number.
SIZED = {
    "shape": lambda k, x, n, a: random.uniform(k, (n, 2), maxval=a),
    "maxval": lambda k, x, n, a: random.uniform(k, 3, maxval=n),
    "std": lambda k, x, n, a: random.normal(k, (n,), std=a),
    "tensors": lambda k, x, n, a: random.uniform(k, x.shape, None, x, x.abs() + a),
    "randint": lambda k, x, n, a: random.randint(k, x.shape, 0, n + 1),
    "choice": lambda k, x, n, a: random.choice(k, x, n),
    "choice without": lambda k, x, n, a: random.choice(k, n, n, replace=False),
    "choice of two": lambda k, x, n, a: random.choice(k, x, (2,), replace=False),
    "choice with p": lambda k, x, n, a: random.choice(k, n, 5, p=x.square()),
    "categorical": lambda k, x, n, a: random.categorical(k, a * x),
    "categorical without": lambda k, x, n, a: random.categorical(
        k, x, -1, (n,), replace=False
    ),
    "permutation": lambda k, x, n, a: random.permutation(k, x),
    "dropout": lambda k, x, n, a: random.dropout(k, x, a / 99),
    "split": lambda k, x, n, a: random.uniform(random.split(k, n), 3),
    "split into a shape": lambda k, x, n, a: random.uniform(random.split(k, (2, n)), 3),
    "fold_in": lambda k, x, n, a: random.uniform(random.fold_in(k, n), 3),
    "key": lambda k, x, n, a: random.uniform(random.key(n), 3),
}

FEW = "shape", "categorical without"


@rows("draw", SIZED, fast=FEW)
def test_a_compiled_function_of_any_size_draws_the_same(draw):
    torch._dynamo.reset()
    fn = lambda k, x, a: draw(k, x, x.shape[0], a)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 5, 8):
        x = torch.linspace(-1.0, 1.0, n)
        assert_same(compiled(K, x, n / 2), fn(K, x, n / 2))


@rows("draw", SIZED, fast=FEW)
def test_a_size_of_a_trace_stays_a_symbol(draw):
    fn = lambda x, data: draw(data, x, x.shape[0], 1.5)
    args = torch.rand(4), K.data
    traced = make_fx(fn, tracing_mode="symbolic")(*args)
    sizes = {0: torch.export.Dim("rows", min=2, max=1000)}, None
    module = nn.Module()
    module.forward = fn
    exported = torch.export.export(module, args, dynamic_shapes=sizes).module()
    for n in (4, 7, 30):
        x = torch.linspace(-1, 2, n)
        assert_same(traced(x, K.data), fn(x, K.data))
        assert_same(exported(x, K.data), fn(x, K.data))


VARYING = {
    **{
        name: lambda t, draw=draw: draw(K, 4, None, -t, t)
        for name, draw in DISTRIBUTIONS.items()
    },
    "uniform of 64 bits": lambda t: random.uniform(K, 4, D, minval=-t, maxval=t),
    "bernoulli": lambda t: random.bernoulli(K, 1 / t, 4),
    "dropout": lambda t: random.dropout(K, ROW, 1 / t),
}


@rows("draw", VARYING, fast=("dropout",))
def test_a_parameter_that_varies_is_compiled_twice_at_most(draw):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(draw, backend=counter, fullgraph=True)
    for i in range(12):
        number = 1.5 + 0.37 * i
        assert_same(compiled(number), draw(number))
    assert counter.frame_count == 2


# --- Arguments ---------------------------------------------------------------------


@pytest.fixture
def default_of_64_bits():
    torch.set_default_dtype(D)
    yield
    torch.set_default_dtype(torch.float32)


@rows("draw", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_draw_has_the_dtype_asked_for(draw, dtype):
    assert draw(K, (5,), dtype, 1.0, 2.0).dtype == dtype


@rows("draw", DISTRIBUTIONS)
def test_the_dtype_is_a_floating_point_one_and_torchs_default(draw, default_of_64_bits):
    assert_same(draw(K, (5,), None, 1.0, 2.0), draw(K, (5,), D, 1.0, 2.0))
    with pytest.raises(TypeError, match="has no values in"):
        draw(K, (5,), torch.int64, 1.0, 2.0)


@rows("draw", {n: d for n, d in DISTRIBUTIONS.items() if n != "uniform"})
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_dtypes_compute_in_float32_and_round_once(draw, dtype):
    wide = draw(K, (5,), torch.float32, 1.0, 2.0)
    assert_same(draw(K, (5,), dtype, 1.0, 2.0), wide.to(dtype))


@pytest.mark.parametrize("shape", [5, (5,), [5], torch.Size([5])], ids=repr)
def test_a_shape_is_a_number_or_a_sequence(shape):
    assert_same(random.uniform(K, shape), random.uniform(K, (5,)))
    assert random.uniform(K, 0).shape == (0,)
    assert random.uniform(KEYS, (4, 0)).shape == (2, 3, 4, 0)


WITH_PARAMETERS = {
    **{
        name: lambda t, shape, draw=draw: draw(K, shape, None, -t, t)
        for name, draw in DISTRIBUTIONS.items()
    },
    "bernoulli": lambda t, shape: random.bernoulli(K, t / 4, shape),
    "randint": lambda t, shape: random.randint(K, shape, 0, t.long() + 1),
}


@rows("draw", WITH_PARAMETERS)
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


@rows("draw", BAD)
def test_parameters_that_make_no_distribution_are_refused(draw):
    with pytest.raises(
        ValueError,
        match=r"^remat: (expected|`(std|scale|p|m..val)` |the (prob|sh)|cannot ch|no)",
    ):
        draw()


OTHER_KINDS = {
    "integers of torch.fl": lambda: random.bits(K, (), torch.float32),
    "integers of torch.bool": lambda: random.bits(K, (), torch.bool),
    "integers of torch.uint64": lambda: random.randint(K, (), 0, 2, torch.uint64),
    "`minval` is 0.5; it must": lambda: random.randint(K, (), 0.5, 2),
    "`maxval` is tensor": lambda: random.randint(K, None, 0, ROW),
    "`minval` is tensor": lambda: random.randint(K, 3, ROW.bool(), 2),
    "`maxval` is tensor.*j": lambda: random.randint(K, 3, 0, ROW * 1j),
    "`maxval` is 1j; it must": lambda: random.randint(K, 3, 0, 1j),
    "no -1 in torch.uin": lambda: random.rademacher(K, 3, torch.uint8),
    "no -1 in torch.bool": lambda: random.rademacher(K, 3, torch.bool),
    "cannot choose from keys.*": lambda: random.permutation(K, KEYS),
    "cannot choose from keys": lambda: random.choice(K, KEYS, (2,)),
}
NO_AXIS = {
    "no axis 3 in a tensor": lambda: random.permutation(K, TABLE, 3),
    "no axis 1 in a tensor": lambda: random.categorical(K, ROW, 1),
    "no axis -4 in a te": lambda: random.choice(K, TABLE, axis=-4),
}


@pytest.mark.parametrize(("match", "draw"), OTHER_KINDS.items(), ids=OTHER_KINDS)
def test_arguments_of_another_kind_are_refused(match, draw):
    with pytest.raises(TypeError, match=match):
        draw()


@pytest.mark.parametrize(("match", "draw"), NO_AXIS.items(), ids=NO_AXIS)
def test_an_axis_that_is_not_there_is_refused(match, draw):
    with pytest.raises(IndexError, match=match):
        draw()


# --- Derivatives -------------------------------------------------------------------

POINT = [torch.tensor([0.3, -0.4], dtype=D), torch.tensor([1.5, 2.5], dtype=D)]


@rows("draw", DISTRIBUTIONS)
def test_derivatives_flow_to_the_parameters(draw):
    inputs = [t.clone().requires_grad_() for t in POINT]
    drawn = functools.partial(draw, K, (3, 2), D)
    assert gradcheck(drawn, inputs, check_forward_ad=True)
    assert gradgradcheck(lambda a, b: drawn(a, b).sin(), inputs)


@rows("draw", DISTRIBUTIONS)
def test_derivatives_compose_with_keys_as_arguments(draw):
    a, b = (t[0] for t in POINT)

    def loss(a, b, key):
        return draw(key, (3, 2), D, a, b).sin().sum()

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
