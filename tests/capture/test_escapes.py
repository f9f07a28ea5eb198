"""Leaves and modules made inside a function, and intermediate values that get out."""

import types

import pytest
import torch
from support.runs import assert_replayed, gradients, leaf
from torch import nn
from torch.func import grad

from remat import CaptureError, remat
from remat.testing import assert_same_gradients, count_ops


def steps_by_an_inner_gradient(x):
    w = torch.zeros(3, requires_grad=True)
    (g,) = torch.autograd.grad((w - x).sin().sum(), w, create_graph=True)
    return (w - 0.1 * g) * x


def makes_a_module(x):
    layer = nn.Linear(3, 3)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer(x).sin().exp()


@pytest.mark.parametrize(
    ("fn", "sines"),
    [(steps_by_an_inner_gradient, (2, 3)), (makes_a_module, (1, 2))],
    ids=["a leaf", "a module"],
)
def test_what_is_made_inside_is_no_input(fn, sines):
    assert_replayed(gradients(fn, leaf(3)), sin=sines)


def returns_a_leaf(x):
    return x.sin().exp(), torch.ones(3, requires_grad=True)


def test_a_leaf_made_inside_may_be_returned():
    def program(wrap):
        y, made = wrap(returns_a_leaf)(x)
        assert made.is_leaf
        return torch.autograd.grad((y * made).sum(), (x, made))

    x = leaf(3)
    assert_replayed(program, sin=2)


# Ways of differentiating in which a call is one node of the graph.
ONE_NODE = {
    "higher_order": lambda fn, x: remat(fn, higher_order=True)(x),
    "grad": lambda fn, x: grad(lambda x: first(remat(fn)(x)).sum())(x.detach()),
}
in_one_node = pytest.mark.parametrize("call", ONE_NODE.values(), ids=ONE_NODE.keys())


def first(out):
    return out[0] if isinstance(out, tuple) else out


@in_one_node
def test_in_one_node_returning_a_leaf_made_inside_is_refused(call):
    with pytest.raises(CaptureError, match="a leaf that requires grad is returned"):
        call(returns_a_leaf, leaf(3))


def by_nonlocal():
    last = None

    def fn(x):
        nonlocal last
        last = x.sin()
        return last.exp().sum()

    return fn, lambda: last


def by_list():
    kept = []

    def fn(x):
        kept.append(x.sin())
        return kept[-1].exp().sum()

    return fn, lambda: kept[-1]


def by_attribute():
    holder = types.SimpleNamespace()

    def fn(x):
        holder.last = x.sin()
        return holder.last.exp().sum()

    return fn, lambda: holder.last


# Each makes a function, and tells which intermediate value got out of it.
escaping = pytest.mark.parametrize("make", [by_nonlocal, by_list, by_attribute])


@escaping
def test_an_intermediate_that_got_out_is_differentiated(make):
    def program(wrap):
        fn, escaped = make()
        y = wrap(fn)(x)
        return torch.autograd.grad(y + escaped().square().sum(), x)

    x = leaf(3)
    assert_replayed(program, sin=2)


@escaping
def test_an_intermediate_that_got_out_may_be_looked_at(make):
    def program(wrap):
        fn, escaped = make()
        y = wrap(fn)(x)
        return escaped().detach(), torch.autograd.grad(y, x)

    x = leaf(3)
    assert_replayed(program, sin=2)


@in_one_node
@escaping
def test_in_one_node_an_intermediate_that_got_out_is_refused(make, call):
    fn, _ = make()
    with pytest.raises(CaptureError, match="left it other than by being returned"):
        call(fn, leaf(3))


# --- TorchScript -------------------------------------------------------------------


@pytest.fixture
def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        return torch.jit.script(nn.Linear(2, 2))


def test_a_scripted_module_gets_its_gradients(scripted):
    def fn(x):
        return scripted(x).sin().exp()

    x = leaf(2)
    with count_ops() as ops:
        assert_same_gradients(remat(fn), fn, x, wrt=[*scripted.parameters()])
        assert_same_gradients(remat(scripted), scripted, x)
    assert ops["sin"] == 1 + 2


def test_a_scripted_module_is_refused_under_grad(scripted):
    with pytest.raises(CaptureError, match="Linear is a TorchScript module"):
        grad(lambda x: remat(scripted)(x).sum())(torch.randn(2))
