"""The table in docs/compile.md: what is compiled, and what becomes of `remat(fn)`.

Each row on each backend. The details are tested by the files named test_traced.
"""

import functools

import pytest
import torch
from support.traced import TRANSFORMS, W, X, assert_traced, begins_again, block, ran
from support.zoo import ops_of
from torch import nn
from torch.func import grad

from remat import remat
from remat.testing import assert_same, count_ops


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @remat
    def forward(self, x):
        return self.linear(x).sin()


# Dynamo and inductor warn of their own deprecations and of slow numerics.
pytestmark = pytest.mark.filterwarnings("default")

OTHERS = [pytest.param(b, marks=pytest.mark.slow) for b in ("eager", "inductor")]


@pytest.fixture(params=["aot_eager", *OTHERS])
def backend(request):
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


@pytest.fixture
def weight():
    return torch.randn(4, 4, requires_grad=True)


x = torch.randn(3, 4)


def body(w, x):
    return torch.tanh(torch.sin(x @ w)).sum()


def gradient(fn, w):
    return torch.autograd.grad(fn(w, x), w)[0]


def again(ops, backend, name="tanh", times=1):
    """Whether a recompute ran: without AOTAutograd it is of eager code."""
    return ops[name] >= times if backend == "eager" else begins_again(ops)


# --- What is compiled calls remat ---


def program(wrap):
    fn = wrap(block)
    return lambda w, x: fn(w, x).square().sum()


def assert_recomputes(transform, backend, **options):
    """Of inductor's code products are counted, since it fuses tanh into its kernels.

    Inductor counts one of the six as `addmm`. Two run again.
    """
    if backend == "inductor":
        options |= {"read": "mm", "factor": 7 / 5, "reassociated": True}
    assert_traced(program, transform, backend, **options)


def test_compiled_loss_then_backward(backend):
    assert_recomputes(TRANSFORMS["backward"], backend)


def test_compiled_func_grad(backend):
    assert_recomputes(TRANSFORMS["grad"], backend)


def test_compiled_step_that_accumulates(backend, weight):
    """Where Dynamo breaks the graph at `.backward()`."""

    def step(w):
        remat(body)(w, x).backward()

    compiled = torch.compile(step, backend=backend)
    compiled(weight)
    torch.testing.assert_close(weight.grad, gradient(body, weight))
    _, ops = ran(lambda: compiled(weight))
    assert again(ops, backend)


def test_after_a_graph_break_within_grad_the_function_runs_uncompiled(backend):
    """Dynamo would compile what is rebuilt for each call, and mix up the globals."""
    weight = torch.eye(4)
    layer = lambda x: torch.relu(nn.functional.dropout(x) @ weight).square().sum()

    def total(x):
        torch._dynamo.graph_break()
        return remat(layer)(x)

    step = torch.compile(grad(total), backend=backend)
    for seed in range(3):
        torch.manual_seed(seed)
        with count_ops() as ops:
            got = step(torch.ones(4))
        torch.manual_seed(seed)
        assert_same(got, grad(layer)(torch.ones(4)))
        assert ops["relu"] == 2


# --- Remat calls what is compiled ---


def test_the_compiled_part_is_recomputed(weight):
    torch._dynamo.reset()
    inner = torch.compile(lambda w: (x @ w).sin(), backend="eager")
    out = remat(lambda w: inner(w).sum())(weight)
    assert ops_of(out.backward)["mm"] == 2  # once again, and once for the gradient


def test_an_eager_call_may_be_pulled_back_within_compiled_code(backend, weight):
    loss = remat(body)(weight, x)

    @torch.compile(backend=backend)
    def pull(loss):
        scaled = loss.sin() * 2
        loss.backward()
        return scaled

    assert ops_of(lambda: pull(loss))["tanh"] == 1
    torch.testing.assert_close(weight.grad, gradient(body, weight))


def test_values_and_gradients_are_those_of_plain_with_other_numbers(backend):
    """A graph holds nothing of the numbers that it was made with."""
    torch._dynamo.reset()
    compiled = torch.compile(grad(program(remat)), backend=backend, fullgraph=True)
    plain = grad(program(lambda fn: fn))
    for scale in (1.0, 0.5, -2.0):
        numbers = W * scale, X + scale
        compiled(*numbers)
        got, ops = ran(functools.partial(compiled, *numbers))
        assert_same(got, plain(*numbers), reassociated=True)
        assert again(ops, backend, times=4)


def test_remat_may_be_applied_inside_compiled_code(backend):
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    step = torch.compile(
        lambda x: remat(torch.sin)(x).exp(), backend=backend, fullgraph=True
    )
    value = step(x).sum()
    (got,), ops = ran(lambda: torch.autograd.grad(value, x))
    (want,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert_same(got, want, reassociated=True)
    assert begins_again(ops) or backend == "eager"  # which has nothing to run again


def test_a_decorated_method_is_compiled(backend):
    module = Decorated()
    (want,) = torch.autograd.grad(module(x).sum(), module.linear.weight)
    for compiled in (lambda x: module(x), module):
        compiled = torch.compile(compiled, backend=backend, fullgraph=True)
        gradient = functools.partial(torch.autograd.grad, inputs=module.linear.weight)
        (got,), ops = ran(functools.partial(gradient, compiled(x).sum()))
        torch.testing.assert_close(got, want)
        assert again(ops, backend, "addmm")


def test_a_compiled_dropout_inside_draws_the_same_mask_again(backend, weight):
    dropped = lambda w: torch.nn.functional.dropout(x @ w, 0.5)
    compiled = torch.compile(dropped, backend=backend)
    out = remat(lambda w: (compiled(w) ** 2).sum())(weight)
    out.backward()
    # Homogeneous of degree 2: this is 1 if both passes drew the same mask.
    euler = (weight * weight.grad).sum() / (2 * out)
    torch.testing.assert_close(euler, torch.ones(()))
