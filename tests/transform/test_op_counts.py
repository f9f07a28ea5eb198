"""The operations of a derivative are those of plain, and those recomputed."""

import sys
from functools import partial

import pytest
import torch
from support.compositions import LAYOUTS
from support.tables import rows
from support.zoo import W, X, leaves_of, matmul, ops_of, plainly, scalar
from torch.autograd.forward_ad import dual_level, make_dual
from torch.func import grad, jvp, vjp, vmap

from remat import remat
from remat.testing import assert_same, count_ops


full = partial(remat, prune=False)


def backward(f):
    scalar(f(*leaves_of(W, X))).backward()


def anomalous_backward(f):
    with torch.autograd.set_detect_anomaly(True):
        backward(f)


def backward_vmap(f):
    w, xs = leaves_of(W, torch.stack([X, -X, 2 * X]))
    scalar(vmap(f, (None, 0))(w, xs)).backward()


def grad_of_tangent(f):
    grad(lambda x: jvp(f, (x,), (W,))[1].sum())(X)


def backward_of_dual(f):
    (x,) = leaves_of(X)
    with dual_level():
        torch.autograd.grad(f(make_dual(x, W)).sum(), x)


def pulled(f):
    return lambda w: vjp(f, w)[1](torch.ones((), dtype=torch.double))[0]


def second(outer, inner, f):
    inner_derivative = inner(lambda w: f(w).sum())
    outer(lambda w: inner_derivative(w).sum())(W)


# How, of what: the operations in plain, and with all of the forward recomputed.
COUNTS = {
    # The last product saves its factors, and nobody reads what it gives.
    "backward": (backward, matmul, {"mm": (6, 7), "tanh": (1, 2), "sin": (1, 1)}),
    "anomaly": (anomalous_backward, matmul, {"mm": (6, 7), "tanh_backward": (1, 1)}),
    "backward_vmap": (backward_vmap, matmul, {"tanh": (1, 2), "tanh_backward": (1, 1)}),
    # The last product, which no derivative reads, is recomputed as well.
    "grad": (
        lambda f: grad(lambda w: f(w, X).sum())(W),
        matmul,
        {"mm": (5, 7), "tanh": (1, 2)},
    ),
    "vmap_grad": (
        lambda f: vmap(grad(lambda w, x: f(w, x).sum()), (None, 0))(W, X[None]),
        matmul,
        {"tanh": (1, 2), "tanh_backward": (1, 1)},
    ),
    # Once for the value and the tangent, and once more for its gradient.
    "grad_of_tangent": (grad_of_tangent, torch.exp, {"exp": (1, 2)}),
    "backward_of_dual": (backward_of_dual, lambda x: x.cos().sin(), {"sin": (4, 6)}),
    # The value, and the value within the backward: both are linear in what follows, so
    # that the outer derivative recomputes the second alone.
    "grad_grad": (partial(second, grad, grad), torch.exp, {"exp": (1, 3)}),
    "grad_vjp": (partial(second, grad, pulled), torch.exp, {"exp": (1, 3)}),
    "vjp_grad": (partial(second, pulled, grad), torch.exp, {"exp": (1, 3)}),
    "vjp_vjp": (partial(second, pulled, pulled), torch.exp, {"exp": (1, 3)}),
}


@rows("derivative, fn, expected", COUNTS)
def test_operations_are_those_of_plain_and_those_of_another_forward(
    derivative, fn, expected
):
    counts = []
    for wrap in (plainly, full):
        with count_ops() as ops:
            derivative(wrap(fn))
        counts.append([ops[name] for name in expected])
    assert [*zip(*counts, strict=True)] == [*expected.values()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_are_those_of_plain_for_any_layout(layout):
    def forward_ops(f):
        with count_ops() as ops:
            vmap(lambda x: vjp(lambda w: f(x, w), W)[0])(LAYOUTS[layout])
        return ops["mm"], ops["bmm"]

    def all_ops(f):
        with count_ops() as ops:
            vmap(grad(lambda w, x: f(x, w).sum()), (None, 0))(W, LAYOUTS[layout])
        return ops["mm"] + ops["bmm"]

    assert forward_ops(remat(torch.matmul)) == forward_ops(torch.matmul)
    assert all_ops(full(torch.matmul)) == all_ops(torch.matmul) + 1


# --- Some of the outputs ---


def branches(x, y):
    return x.sin().cos() * 2, y.exp().tanh() * 3


@pytest.mark.parametrize("held", [True, False])
def test_outputs_without_a_cotangent_are_not_differentiated(held):
    def differentiated(fn):
        x, y = leaves_of(W, X)
        first, second = fn(x, y)
        if not held:
            del second
        ops = ops_of(lambda: first.sum().backward())
        assert y.grad is None
        return x.grad, (ops["sin"], ops["cos"], ops["exp"], ops["tanh_backward"])

    expected, plain = differentiated(branches)
    grad, recomputed = differentiated(full(branches))
    assert_same(grad, expected)
    assert plain == (1, 1, 0, 0)
    # Each branch is recomputed as long as somebody may differentiate it. Of the cosine
    # itself, which is before what the other branch saves, nobody needs the value.
    assert recomputed == ((2, 2, 1, 0) if held else (2, 1, 0, 0))


# --- Calls in calls, at base ---


def layer(x):
    return torch.tanh(W.t() @ torch.tanh(W @ x))


inner = full(layer)


def test_a_call_of_four_operations_is_few_calls_in_python():
    def python_calls(run):
        found = []
        sys.setprofile(lambda frame, event, _: event == "call" and found.append(frame))
        try:
            result = run()
        finally:
            sys.setprofile(None)
        return len(found), result

    fn = remat(lambda w, x: (w @ (w @ x).tanh()).tanh())
    assert ops_of(lambda: fn(*leaves_of(W, X)).sum().backward())["tanh"] == 2 * 2
    forwards, backwards = [], []
    # Three calls look for writes that torch does not count. In one of the others the
    # collector may call finalizers.
    for _ in range(6):
        count, y = python_calls(partial(fn, *leaves_of(W, X)))
        forwards.append(count)
        backwards.append(python_calls(partial(y.backward, torch.ones_like(y)))[0])
    # A build for CUDA is asked for the generators and settings of its devices, too.
    forward, backward = (70, 78) if torch.version.cuda is None else (75, 79)
    assert min(forwards) <= forward
    assert min(backwards) <= backward
