"""The table in docs/compile.md: what is compiled, and what becomes of `remat(fn)`.

Each row on each backend. The details are tested by the files named test_traced.
"""

import pytest
import torch
from support.zoo import ops_of
from torch import nn
from torch.func import grad

from remat import remat
from remat.testing import assert_same, count_ops


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


# --- What is compiled calls remat ---


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


def test_a_compiled_dropout_inside_draws_the_same_mask_again(backend, weight):
    dropped = lambda w: torch.nn.functional.dropout(x @ w, 0.5)
    compiled = torch.compile(dropped, backend=backend)
    out = remat(lambda w: (compiled(w) ** 2).sum())(weight)
    out.backward()
    # Homogeneous of degree 2: this is 1 if both passes drew the same mask.
    euler = (weight * weight.grad).sum() / (2 * out)
    torch.testing.assert_close(euler, torch.ones(()))
