"""docs/limits.md on graphs: what leaves, results, derivatives inside, tangents."""

from types import SimpleNamespace

import pytest
import torch
from support.claims import gradient, ones
from support.compared import compared
from support.zoo import Evaluations
from torch import nn
from torch.autograd import forward_ad

from remat import CaptureError, remat
from remat.testing import count_ops


@compared(evaluations=3)
def test_a_derivative_inside_runs_the_function_once_more(wrap, counting):
    def fn(x):
        (inner,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return inner.tanh()

    x = ones(3)
    return gradient(wrap(counting(fn))(x), x)


def test_inside_a_module_is_itself():
    seen = Evaluations()

    class Module(nn.Linear):
        def forward(self, x):
            seen.note(self)
            return super().forward(x).exp()

    module = Module(3, 3)
    remat(module)(ones(3)).sum().backward()
    assert [m is module for m in seen] == [True, True]


# --- What leaves, and results ---


LEFT = "left it other than by being returned"


def test_an_intermediate_that_leaves_under_func_and_autocast_is_refused():
    kept, x, w = [], torch.ones(3, 3), torch.ones(3, 3)

    def fn(x, w):
        kept.append(x @ w)
        return x.cos() @ w

    def loss(x, w):
        return (remat(fn)(x, w) + kept[-1]).float().sum()

    with torch.autocast("cpu"), pytest.raises(CaptureError, match=LEFT):
        torch.func.grad(loss, argnums=(0, 1))(x, w)


def test_intermediates_can_be_kept_detached():
    kept = []

    def fn(x):
        kept.append(x.sin().detach())
        return x.cos().cos()

    for _ in range(3):
        with count_ops() as ops:
            remat(fn)(ones(3)).sum().backward()
        assert ops["cos"] == 2 + 1, "recomputed"
    assert len(kept) == 3


def test_a_result_that_hides_tensors_is_refused_under_func_alone():
    def fn(x):
        y = x.sin().sin()
        return SimpleNamespace(read=lambda: y)

    x = ones(3)
    with count_ops() as ops:
        got = gradient(remat(fn)(x).read(), x)
    assert ops["sin"] == 2 + 1
    assert torch.equal(got, gradient(fn(x).read(), x))
    with pytest.raises(CaptureError, match=r"a function \(`result\.read`\)"):
        torch.func.grad(lambda x: remat(fn)(x).read().sum())(torch.ones(3))


def test_a_dual_result_that_shares_memory_may_be_changed_in_place():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, 3), torch.ones(3, 3))
        remat(lambda x: x[0])(dual).mul_(2)


# --- Backwards ---


def both(x, y):
    return x.sin(), y.exp()


def test_two_partial_backwards_work_as_in_plain_code():
    x, y = ones(3), ones(3)
    with count_ops() as ops:
        a, b = remat(both)(x, y)
        a.sum().backward()
        b.sum().backward()
    # Nothing is recomputed for the first: its backward reads `x` alone.
    assert (ops["sin"], ops["exp"]) == (1 + 1, 1 + 1)
    assert torch.equal(x.grad, x.cos())
    assert torch.equal(y.grad, y.exp())


def test_a_gradient_costs_what_the_inputs_asked_for_cost():
    def fn(x, y):
        return x.sin() * y.exp()

    x, y = ones(3), ones(3)
    out, plain = remat(fn)(x, y), fn(x, y)
    with count_ops() as ops:
        gradient(out, x)
    with count_ops() as plain_ops:
        gradient(plain, x)
    assert (ops["sin"], ops["exp"]) == (1, 1)
    assert ops["mul"] == plain_ops["mul"] == 2


# --- Forward mode ---


def test_a_constant_requires_no_grad_under_forward_mode():
    x, y = torch.ones(3), ones(3)
    with forward_ad.dual_level(), count_ops() as ops:
        dual = forward_ad.make_dual(x, torch.ones(3))
        outs = remat(lambda x, y: (x.sin() * y, y.detach().cos()))(dual, y)
        outs[0].sum().backward()
    assert not outs[1].requires_grad
    assert ops["sin"] == 2
