"""The operations of a derivative are those of plain, and those recomputed."""

import sys
from functools import partial

import pytest
import torch
from support.compositions import LAYOUTS
from support.zoo import W, X, leaves_of, ops_of, scalar
from torch.func import grad, vjp, vmap

from remat import remat
from remat.testing import assert_same, count_ops


full = partial(remat, prune=False)


def backward(f):
    scalar(f(*leaves_of(W, X))).backward()


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
