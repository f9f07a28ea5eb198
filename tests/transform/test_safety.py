"""Programs whose recompute could be another function: right, or refused."""

import gc
from collections import OrderedDict, deque
from functools import partial

import pytest
import torch
from support.runs import replayed
from torch import nn
from torch.func import grad

from remat import CaptureError, MutationError, policies, remat
from remat.testing import assert_same, count_ops


def leaf():
    return torch.linspace(0.1, 1.0, 3).requires_grad_()


# --- Memory shared by outputs ---


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, torch.adjoint])
def test_a_view_that_only_flips_a_bit_keeps_its_value(view):
    x = torch.randn(3, 3, dtype=torch.cfloat, requires_grad=True)
    with count_ops() as ops:
        y = remat(lambda x: (view(x), x.sin().exp()))(x)
        y[1].abs().sum().backward()
    assert ops["sin"] == 2
    assert torch.equal(y[0], view(x))


# --- Tensors that leave, or are kept, other than by being returned ---


def later(x):
    y = x.sin()
    return lambda: y.sin()


def one_by_one(x):
    return (y.sin() for y in [x.sin()])


# --- Containers of very many entries ---


def grown(container):
    if isinstance(container, dict):
        container[len(container)] = None
    else:
        container.append(None)


@pytest.mark.parametrize(
    "make", [list, deque, dict.fromkeys, OrderedDict.fromkeys], ids=range(4)
)
def test_what_was_only_added_to_a_large_container_is_left_out_of_a_recomputation(make):
    log = make(range(2000))

    def fn(x):
        grown(log)
        return (x.sin() * len(log)).exp()

    x = torch.linspace(0.0, 1e-3, 3).requires_grad_()
    with count_ops() as ops:
        y = remat(fn)(x)
        grown(log)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert len(log) == 2002
    assert ops["sin"] == 2
    (want,) = torch.autograd.grad((x.sin() * 2001).exp().sum(), x)
    assert_same(got, want)


def backward_inside(x, w):
    (x.detach().sin() * w).sum().backward()
    return (x * w).sin().sin()


class Halved(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data / 2
        return super().forward(x).sin().exp()


def overwritten(w, x):
    """The new value is read by nobody, so a plan would leave it out."""
    y = (x @ w).sin().exp()
    w.data = w.data * 1.0
    return y.sin()


@pytest.mark.parametrize(
    "option",
    [{"prune": True}, {"policy": policies.dots_saveable}],
    ids=["prune", "dots"],
)
def test_with_an_assignment_to_data_a_policy_is_given_up_with_a_warning(option):
    w, x = torch.eye(3).requires_grad_(), torch.ones(3, 3)
    with (
        count_ops() as ops,
        pytest.warns(
            UserWarning, match="not followed.* assigns to the .data of a tensor"
        ),
    ):
        remat(overwritten, **option)(w, x).sum().backward()
    assert ops["mm"] == 2 + 1


@pytest.mark.parametrize("is_frozen", [False, True])
def test_another_assignment_to_data_is_refused_and_undone(is_frozen):
    module = Halved(3, 3).requires_grad_(not is_frozen)
    y = remat(module)(leaf())
    weight = module.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(
            MutationError, match=r"`self\.weight` was changed in place inside"
        ):
            y.sum().backward(retain_graph=True)
        assert_same(module.weight.detach(), weight)
    assert module.weight.grad is None


def in_one_node(fn, *others):
    return lambda: remat(fn, higher_order=True)(leaf(), *[make() for make in others])


def under_grad(fn):
    return lambda: grad(fn)(torch.ones(3))


# Under torch.func, and where each call is a node of its own, a gradient would be lost.
REFUSED = {
    "a function": (under_grad(remat(later)), r"returned a function \(`result`\)"),
    "a generator": (under_grad(remat(one_by_one)), "computes when it is read"),
    "backward": (in_one_node(backward_inside, lambda: leaf() * 2), "calls backward"),
    "data": (in_one_node(Halved(3, 3)), r"`self\.weight` was changed in place inside"),
}


IN_ONE_NODE = partial(remat, higher_order=True)


class Accumulates(torch.autograd.Function):
    """Accumulates by itself, as torch's reentrant checkpoint does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            torch.autograd.backward(x.detach() * w, g)
        return g * w, None


@replayed(wrap=IN_ONE_NODE, exp=(1, 2))
def test_a_backward_in_the_backward_of_a_function_in_one_node(wrap):
    x, w = leaf(), leaf()
    fn = lambda x: Accumulates.apply(x, w).exp()
    wrap(fn)(x).sum().backward()
    return x.grad, w.grad


@replayed(wrap=IN_ONE_NODE, sin=(3, 3 + 1 + 2))
def test_in_one_node_a_backward_inside_adds_its_gradients_once(wrap):
    x, w = leaf(), leaf()
    wrap(backward_inside)(x, w).sum().backward()
    return x.grad, w.grad


@replayed(sin=(1, 2))
def test_an_input_retains_its_gradient_in_one_node(wrap):
    x = leaf() * 2

    def fn(x):
        x.retain_grad()
        return x.sin().exp()

    one = partial(wrap, higher_order=True) if wrap is remat else wrap
    (one(fn)(x).sum() + x.sum()).backward()
    assert not vars(x)
    return x.grad


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_lose_a_gradient_is_refused(case):
    run, message = REFUSED[case]
    error = MutationError if case == "data" else CaptureError
    with pytest.raises(error, match=message):
        run()


# --- Tensors of unusual kinds ---


def test_under_inference_mode_func_grad_is_right():
    x = torch.ones(3)
    with torch.inference_mode(), count_ops() as ops:
        got = grad(lambda x: remat(torch.sin)(x).sum())(x)
    assert ops["sin"] == 2
    assert torch.equal(got, x.cos())


# --- A batch of cotangents ---


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["all", "dots"])
@pytest.mark.parametrize("factor", [None, 2.0], ids=["leaf", "computed"])
def test_what_a_transform_inside_does_not_differentiate_gets_its_gradient(
    factor, policy
):
    """A call within the transform saves it in a node of its level."""

    def gradients(wrap):
        h, w = (torch.linspace(-1, 1, 9).view(3, 3).double() for _ in "hw")
        leaf = w.requires_grad_()
        inner = wrap(lambda h, w: torch.tanh(h @ w))
        outer = wrap(lambda w: grad(lambda h: inner(h, w).sum())(h), policy=policy)
        with count_ops() as ops:
            outer(leaf if factor is None else leaf * factor).sin().sum().backward()
        return leaf.grad, ops["tanh"]

    plain, once = gradients(lambda fn, policy=None: fn)
    ours, more = gradients(remat)
    assert_same(ours, plain)
    assert more > once


@pytest.mark.parametrize("inner", [None, policies.dots_saveable], ids=["all", "dots"])
def test_a_backward_inside_of_a_call_within_is_recomputed_as_it_was(inner):
    """What runs around it hands it nothing on, while that is recorded."""
    block = lambda h, w: torch.tanh(torch.tanh(h) @ w)

    def gradients(within, wrap):
        def around(x, w):
            out = within(x.detach().requires_grad_(), w).sum()
            (g,) = torch.autograd.grad(out, w, retain_graph=True)
            return within(x, w) * g.sum()

        w, x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_(), torch.eye(3)
        found = []
        for _ in range(3):
            with count_ops() as ops:
                found += torch.autograd.grad(wrap(around)(x, w).sum(), w)
        return found, ops["tanh"]

    plain, once = gradients(block, lambda fn: fn)
    around = lambda fn: remat(fn, policy=policies.dots_saveable)
    ours, more = gradients(remat(block, policy=inner), around)
    assert_same(ours, plain)
    assert more > once


# --- Objects with `__del__`, which may close what others still use ---


class Resource:
    closed: list[bool] = []  # noqa: RUF012

    def __init__(self):
        self.scale = torch.full((3,), 2.0)

    def __del__(self):
        Resource.closed.append(hasattr(self, "scale"))


def test_a_recompute_finalizes_nothing():
    """No instance is made of a class, be it to see whether one can be."""
    Resource.closed.clear()
    resource, x = Resource(), torch.ones(3, requires_grad=True)
    with count_ops() as ops:
        y = remat(lambda x: (x * resource.scale).exp())(x)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert ops["exp"] == 2
    assert torch.equal(got, 2 * (2 * x).exp())
    gc.collect()
    assert Resource.closed == []
    resource = y = None
    gc.collect()
    assert Resource.closed == [True]
