"""`remat.is_recomputing` tells code inside whether it runs again."""

import threading

import pytest
import torch
from support.zoo import Evaluations, make

import remat
from remat import remat as rematerialize
from remat.testing import count_ops


def leaf(n):
    return make(n, seed=2).requires_grad_()


def test_it_is_false_outside():
    assert remat.is_recomputing() is False


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("prune", [False, True])
def test_it_is_true_in_a_recompute_alone(higher_order, prune):
    seen = Evaluations()

    @rematerialize(higher_order=higher_order, prune=prune)
    def f(x):
        seen.note(remat.is_recomputing())
        return x.sin().sin()

    f(leaf(3)).sum().backward()
    assert [*seen] == [False, True]
    assert not remat.is_recomputing()


def test_it_is_true_under_torch_func():
    seen = Evaluations()

    def f(x):
        seen.note(remat.is_recomputing())
        return x.sin().sin().sum()

    torch.func.grad(rematerialize(f))(torch.ones(3))
    assert [*seen] == [False, True]


def test_it_is_of_the_thread_that_asks():
    asked, seen = threading.Event(), []

    def other():
        asked.wait(10)
        seen.append(remat.is_recomputing())

    def f(x):
        if remat.is_recomputing():
            asked.set()
            thread.join(10)
        return x.sin().sin()

    thread = threading.Thread(target=other)
    thread.start()
    rematerialize(f)(leaf(3)).sum().backward()
    assert seen == [False]


def test_metrics_are_logged_once():
    logged = Evaluations()

    @rematerialize
    def layer(x):
        y = x.sin()
        if not remat.is_recomputing():
            logged.note(y.detach().mean().item())
        return y.sin()

    x = leaf(3)
    with count_ops() as ops:
        layer(x).sum().backward()
    assert ops["mean"] == 1
    assert ops["sin"] == 3
    assert [*logged] == [x.detach().sin().mean().item()]
    assert x.grad.abs().min() > 0
