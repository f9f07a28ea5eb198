"""Graphs around a call and in it, under `torch.func`: followed, or refused by name."""

import functools

import pytest
import torch
from support.tables import rows
from support.transforms import some
from support.zoo import (
    assert_not_vanishing,
    assert_rematerialized,
    counted,
    leaves_of,
    make,
    plainly,
    scalar,
)
from torch import nn
from torch.autograd import functional
from torch.autograd.function import once_differentiable
from torch.func import grad, vjp, vmap
from torch.nn import functional as F  # noqa: N812

from remat import CaptureError, remat
from remat._graph import graph
from remat.testing import assert_same


A = make(6, 3, seed=21)


def grad_of(f):
    return grad(lambda x: scalar(f(x)))


def grad_over_grad(f):
    return grad(lambda x: scalar(grad_of(f)(x)))(A)


def backward_over_grad(f):
    (x,) = leaves_of(A)
    scalar(grad_of(f)(x)).backward()
    return x.grad


def backward_over_backward(f):
    (x,) = leaves_of(A)
    (first,) = torch.autograd.grad(scalar(f(x)), x, create_graph=True)
    scalar(first).backward()
    return x.grad


# --- Graphs that were made outside of the call ---


def pulled(f, x):
    """A call that holds a pullback: of the gradient of a cube, say."""
    y, pull = vjp(lambda x: x**3, x)
    return f(lambda ct: pull(ct)[0].sin())(y)


def pulled_below(f, x):
    (below,) = leaves_of(A)
    _, pull = vjp(lambda y: y * below, below)
    result = grad(lambda x: scalar(f(lambda ct: pull(ct)[0])(x)))(x)
    return result, torch.autograd.grad(result.sum(), below)


PULLED = {
    "grad": lambda f: grad_of(functools.partial(pulled, f))(A),
    "vmap_grad": lambda f: vmap(grad_of(functools.partial(pulled, f)))(A),
    "grad_grad": lambda f: grad_over_grad(functools.partial(pulled, f)),
    "base": lambda f: pulled_below(f, A),
}


@pytest.mark.parametrize("how", PULLED)
def test_a_call_that_holds_a_pullback_is_called_as_it_is(how):
    with pytest.warns(UserWarning, match="holds a pullback of torch.func.vjp"):
        actual = PULLED[how](remat)
    assert_same(actual, PULLED[how](plainly))
    assert_not_vanishing(actual)


def test_a_tensor_left_over_from_another_level_holds_no_graph():
    kept = []

    def noting(x):
        kept.append(x.sin())
        return x.sum()

    grad(noting)(A)
    # Plain code takes it for the constant that it is by now.
    assert_rematerialized(
        lambda f: grad_of(f)(A), lambda x: x.exp() * kept[0], evaluations=2
    )


def derivative_of(h, x):
    (result,) = torch.autograd.grad(h.sum(), x, create_graph=True, allow_unused=True)
    return 0 * x if result is None else result


def partly_of(h, x):
    return derivative_of(h * x, x)


def edge_of(h, x):
    edge = torch.autograd.graph.get_gradient_edge(h)
    return lambda y: torch.autograd.grad(edge, x, y.sin(), create_graph=True)[0]


@pytest.mark.parametrize("fn", [derivative_of, partly_of])
@pytest.mark.parametrize("lower", [lambda f: f, vmap])
def test_a_derivative_of_what_was_computed_outside_is_refused(fn, lower):
    def loss(f):
        return lambda x: scalar(f(x.sin() * x, x))

    assert_not_vanishing(lower(grad(loss(fn)))(A))  # which plain code gives
    with pytest.raises(CaptureError, match="`h` was computed outside of the function"):
        lower(grad(loss(remat(fn))))(A)


def test_a_captured_edge_of_a_graph_is_refused():
    def loss(wrap):
        return lambda x: scalar(wrap(edge_of(x.sin() * x, x))(x))

    with pytest.raises(CaptureError, match="a GradientEdge was computed outside"):
        grad(loss(remat))(A)
    assert_not_vanishing(grad(loss(lambda f: f))(A))


FUNCTIONAL = {
    "jacobian": lambda x: torch.autograd.functional.jacobian(torch.sin, x),
    "vjp": lambda x: torch.autograd.functional.vjp(torch.sin, x, x.detach())[1],
    "hessian": lambda x: torch.autograd.functional.hessian(lambda x: x.sin().sum(), x),
    "requires_grad_": lambda x: derivative_of(*2 * (x.detach().requires_grad_(),)),
    "by_name": lambda x: functional.jacobian(torch.sin, x),
}


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_what_torch_refuses_under_its_transforms_is_refused(case):
    fn, calls = counted(FUNCTIONAL[case])
    messages = "You are attempting to call Tensor", "remat: Tensor"
    # Also where a function refers to nothing else, as it is without the counter.
    for f, message in zip((fn, remat(fn)), messages, strict=True):
        with pytest.raises(RuntimeError, match=rf"^{message}.requires_grad_\(\)"):
            grad_of(lambda x, f=f: f(x.sin()))(A)
    assert len(calls) == 2
    with pytest.raises(RuntimeError, match=r"^remat: Tensor.requires_grad_\(\)"):
        grad_of(lambda x: remat(FUNCTIONAL[case])(x.sin()))(A)


# --- Hooks, which run after the recompute has ended ---


@pytest.mark.parametrize("prune", [False, True])
def test_hooks_set_inside_refer_to_variables_of_functions_around(prune):
    factor, shift = 3.0, make(6, 3, seed=31)

    def fn(x):
        h = x.sin()
        h.register_hook(lambda g: g * factor + shift)
        return h.exp()

    # No operation of the forward reads the shift, but the hook finds it.
    wrap = functools.partial(remat, prune=prune)
    assert_rematerialized(lambda f: grad_of(f)(A), fn, evaluations=2, wrap=wrap)


# --- Functions that are to be differentiated once ---


class Once(torch.autograd.Function):
    """A cube, as torch.func takes it."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


class OnceAtBase(Once):
    """The same, as torch.func does not take it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    setup_context = torch.autograd.Function.setup_context


REFUSED = {
    # What torch finds in its way differs.
    "backward_grad": (backward_over_grad, Once, "does not require grad"),
    "backward_grad_old": (backward_over_grad, OnceAtBase, "setup_context"),
    "grad_grad_old": (grad_over_grad, OnceAtBase, "setup_context"),
    "backward_backward": (backward_over_backward, Once, "@once_differentiable"),
}


@pytest.mark.parametrize("after", [torch.sin, lambda y: 2 * y])
@rows("transform, function, of_torch", REFUSED)
def test_a_second_derivative_that_torch_refuses_is_not_dropped(
    transform, function, of_torch, after
):
    # What it saves is no input of the call, and so recomputed at base, too.
    fn, calls = counted(lambda x: after(function.apply(1 * x)))
    with pytest.raises(RuntimeError, match=of_torch):
        transform(fn)
    calls.clear()
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        transform(remat(fn))
    assert len(calls) >= 2


@pytest.mark.parametrize("function", [Once, OnceAtBase])
def test_second_derivatives_beside_it_are_not_refused(function):
    x, y = leaves_of(A, 2 * A)
    fn, calls = counted(lambda x, y: function.apply(x) * 2 + y**3)
    by_y = grad(lambda x, y: remat(fn)(x, y).sum(), 1)
    (result,) = torch.autograd.grad(by_y(x, y).sum(), y)
    assert torch.equal(result, 6 * y)
    assert len(calls) == 3


@pytest.mark.parametrize("transform", [grad_over_grad, backward_over_grad])
def test_where_torch_drops_it_the_values_are_those_of_torch(transform):
    fn = lambda x: Once.apply(x) * 2 + x.exp()
    assert_rematerialized(transform, fn, evaluations=4, reassociated=True)


# --- Formulas that choose kernels by grad mode: the same under torch.func as in plain
# ---


LSTM = nn.LSTM(6, 6)
KERNELS = {
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "group_norm": lambda x: F.group_norm(x, 2) ** 3,
    "logit": lambda x: (x.sigmoid() / 2).logit(),
    "cumprod": lambda x: x.cumprod(-1),
    "solve": lambda x: torch.linalg.solve(x[..., :4] + 3 * torch.eye(4), x),
    "det": lambda x: torch.linalg.det(x[..., :4] + torch.eye(4)),
    "weight_norm": lambda x: torch._weight_norm(
        x.view(20, -1), x.detach().view(20, -1).norm(dim=1, keepdim=True), 0
    ),
    "lstm": lambda x: LSTM(x.view(4, 5, 6))[0],
}
# Plain torch has no batching rule for these.
UNBATCHED = ("weight_norm", "lstm")
# The last bit of these depends on the kernel chosen, where nothing batches it.
ROUNDED = ("cumprod", "det")
ROWS = [
    *(("grad", case) for case in KERNELS if case not in ROUNDED),
    *(("grad_vmap", case) for case in KERNELS if case not in (*ROUNDED, *UNBATCHED)),
    *(("vmap_grad", case) for case in KERNELS if case not in UNBATCHED),
]


@pytest.mark.parametrize(("how", "case"), ROWS)
def test_the_kernels_are_those_of_plain_code(how, case):
    x = make(5, 4, 6, seed=30).float()
    transform = lambda f: some(how)[how](lambda x: f(x.sin()).square().sum(), x)
    assert_rematerialized(transform, KERNELS[case], evaluations=2)


# --- Edges that lead to more than the outputs depend on ---


def one_of_two(x, w):
    return remat(lambda x, w: (x * 1.0, x @ w))(x, w)[0] * 2


def unread(x, w):
    return remat(lambda x, w: x * 1.0)(x, w)


@rows("within", {"one of two": one_of_two, "unread": unread})
def test_an_input_that_a_call_within_does_not_use_has_a_gradient_of_zero(within):
    def fn(x, w):
        return remat(within)(x, w).sin() + x

    got, expected = (vjp(f, A, A.mT)[1](A) for f in (remat(fn), fn))
    assert_same(got, expected)
    assert not got[1].any()


def test_a_call_of_higher_order_between_others_is_given_leaves_as_other_tensors():
    """The hooks around it give them back so."""
    factors = {"x": 2.0}
    order = remat(lambda x, w: (x * factors["x"], w * 1.0), higher_order=True)

    @remat
    def between(x, w):
        return order(x, w)[0] * 2

    def fn(x, w):
        return between(x, w).tanh()

    got, expected = (vjp(f, A, A.mT)[1](A) for f in (remat(fn), fn))
    assert_same(got, expected)


# --- Graphs of others ---


def test_graphs_of_others_are_walked_once(monkeypatch):
    asked = []

    def counted(value, edge_of=graph.edge_of):
        asked.append(value)
        return edge_of(value)

    monkeypatch.setattr(graph, "edge_of", counted)
    leaf, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    ends, others, chain_of = {graph.edge_of(leaf)}, set(), [other]
    for _ in range(200):
        chain_of.append(chain_of[-1].sin())
    for t in chain_of:
        assert not graph.leads_to(graph.edge_of(t), ends, others)
    assert 400 < len(asked) < 800
    assert graph.leads_to(graph.edge_of((leaf.sin() * other).exp()), ends, others)
