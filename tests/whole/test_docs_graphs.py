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


def under_grad(fn):
    return torch.func.grad(lambda x: remat(fn)(x).sum())(torch.ones(3))


def test_an_intermediate_that_leaves_has_its_gradient_at_base():
    kept = []

    def fn(x):
        kept.append(x.sin().sin())
        return x.cos()

    x = ones(3)
    with count_ops() as ops:
        remat(fn)(x)
        got = gradient(kept.pop(), x)
    assert ops["sin"] == 2 + 1
    assert torch.equal(got, gradient(x.sin().sin(), x))
    with pytest.raises(CaptureError, match=LEFT):
        under_grad(fn)


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


VIEWS = {
    "row": lambda x: x.sin().sin()[0],
    "view": lambda x: x.sin().sin().view(-1),
}


@pytest.mark.parametrize("fn", VIEWS.values(), ids=list(VIEWS))
@compared(sin=3)
def test_results_that_share_memory_may_be_changed_in_place(wrap, counting, fn):
    x = ones(3, 3)
    return gradient(wrap(fn)(x * 1).mul_(2).exp(), x)


def test_a_dual_result_that_shares_memory_may_be_changed_in_place():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, 3), torch.ones(3, 3))
        remat(lambda x: x[0])(dual).mul_(2)


def test_a_view_is_a_view():
    x = ones(3, 2)
    for fn in torch.view_as_complex, torch.t:
        assert remat(fn)(x).data_ptr() == x.data_ptr()


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


def test_backward_inside_runs_once_at_base():
    def fn(x):
        x.sin().sum().backward()
        return x.exp()

    x = ones(3)
    with count_ops() as ops:
        remat(fn)(x).sum().backward()
    assert ops["exp"] == 2
    assert torch.equal(x.grad, x.cos() + x.exp())
    with pytest.raises(CaptureError, match=r"calls backward\(\)"):
        under_grad(fn)


# --- Forward mode ---


def test_a_tangent_that_plain_leaves_none_is_none():
    x, y = torch.ones(3), ones(3)
    with forward_ad.dual_level(), count_ops() as ops:
        dual = forward_ad.make_dual(x, torch.ones(3))
        plain = forward_ad.unpack_dual(both(dual, y)[1])
        outs = remat(both)(dual, y)
        ours = forward_ad.unpack_dual(outs[1])
        outs[1].sum().backward()
    assert plain.tangent is None
    assert ours.tangent is None
    assert ops["exp"] == 3


def test_a_constant_requires_no_grad_under_forward_mode():
    x, y = torch.ones(3), ones(3)
    with forward_ad.dual_level(), count_ops() as ops:
        dual = forward_ad.make_dual(x, torch.ones(3))
        outs = remat(lambda x, y: (x.sin() * y, y.detach().cos()))(dual, y)
        outs[0].sum().backward()
    assert not outs[1].requires_grad
    assert ops["sin"] == 2
