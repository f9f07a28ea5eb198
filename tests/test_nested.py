"""Remat in remat: values, and what full recomputation costs at each depth.

This release does not prune: a call inside a call is evaluated once in each
recomputation of the outer one and once in its own. The counts here are those of full
recomputation.
"""

from functools import partial

import pytest
import torch
from helpers import (
    BIG,
    DEPTH,
    ZOO,
    V,
    W,
    X,
    and_backward,
    assert_rematerialized,
    assert_zoo_rematerialized,
    block,
    counted,
    leaves_of,
    matmul,
    plainly,
    scalar,
)
from torch.func import grad, hessian, jvp, vjp, vmap

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


full = partial(remat, prune=False)


def deep(depth):
    def wrap(fn):
        for _ in range(depth):
            fn = remat(fn)
        return fn

    return wrap


def backward(loss, w, x):
    w, x = leaves_of(w, x)
    loss(w, x).backward()
    return w.grad, x.grad


def twice(loss, w, x):
    w, x = leaves_of(w, x)
    (first,) = torch.autograd.grad(loss(w, x), w, create_graph=True)
    return torch.autograd.grad(first.sin().sum(), (w, x))


# Evaluations: the forward; in the backward the recomputation of the outer call, which
# is the forward of the inner one, and the recomputation of the inner call.
TRANSFORMS = {
    "backward": (backward, 3),
    "grad": (lambda loss, w, x: grad(loss, (0, 1))(w, x), 3),
    "vjp": (lambda loss, w, x: vjp(loss, w, x)[1](W[0, 0]), 3),
    "vmap_grad": (
        lambda loss, w, x: vmap(grad(loss), (None, 0))(w, torch.stack([x, -x])),
        3,
    ),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", TRANSFORMS)
def test_two_deep(how, case):
    transform, evaluations = TRANSFORMS[how]
    assert_zoo_rematerialized(transform, case, evaluations=evaluations, wrap=deep(2))


@pytest.mark.parametrize("case", ZOO)
def test_two_deep_in_forward_mode(case):
    transform = and_backward(lambda loss, w, x: jvp(loss, (w, x), (V, V)))
    assert_zoo_rematerialized(
        transform, case, plain=1 + 1, evaluations=1 + 3, wrap=deep(2)
    )


# The forward, 1, and its backward, 2, as for one order. The backward of the forward, 2.
# That of the backward runs the same again on record, 1 + 1, and its derivative, 1.
# `hessian` takes that on dual numbers: the value and its tangent 1 + 1, the backward 3.
@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize(
    ("transform", "evaluations"),
    [(twice, 8), (lambda loss, w, x: hessian(loss)(w, x), 5)],
    ids=["twice", "hessian"],
)
def test_two_deep_in_second_order(transform, evaluations, case):
    # Reassociated: second order.
    assert_zoo_rematerialized(
        transform, case, evaluations=evaluations, wrap=deep(2), reassociated=True
    )


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_each_depth_evaluates_once_more(depth):
    def transform(f):
        return backward(lambda w, x: scalar(f(w, x)), W, X)

    assert_rematerialized(transform, matmul, evaluations=1 + depth, wrap=deep(depth))


def ops_of(fn):
    """Ops of the forward and of the backward."""
    (x,) = leaves_of(X)
    with count_ops() as forward:
        out = fn(x).sum()
    with count_ops() as backward:
        out.backward()
    return (forward["mm"], forward["tanh"]), (backward["mm"], backward["tanh"])


def layer(x):
    return torch.tanh(W.t() @ torch.tanh(W @ x))


def test_ops_of_one_call():
    assert ops_of(layer) == ((2, 2), (2, 0))
    assert ops_of(full(layer)) == ((2, 2), (4, 2))


def test_ops_of_a_call_in_a_call():
    assert ops_of(full(full(layer))) == ((2, 2), (6, 4))
    assert ops_of(full(full(full(layer)))) == ((2, 2), (8, 6))


def test_ops_of_two_calls_in_a_row():
    inner = full(layer)
    assert ops_of(lambda x: inner(inner(x))) == ((4, 4), (8, 4))


def test_ops_of_two_calls_in_a_call():
    inner = full(layer)
    outer = full(lambda x: inner(inner(x)))
    # 4 of their own, 4 recomputed in the outer call, 4 in the inner ones.
    assert ops_of(outer) == ((4, 4), (12, 8))


def test_ops_of_a_call_and_more_in_a_call():
    inner = full(layer)
    outer = full(lambda x: torch.tanh(W @ inner(x)))
    assert ops_of(outer) == ((3, 3), (3 + 3 + 2, 3 + 2))


def chain(wrap_outer, wrap_inner):
    """Two groups of three blocks."""

    def group(x):
        for _ in range(3):
            x = wrap_inner(block)(x)
        return x

    return lambda x: wrap_outer(group)(wrap_outer(group)(x)).sum()


MEMORY_TRANSFORMS = {
    "backward": lambda f: f(*leaves_of(BIG)).backward(),
    "grad": lambda f: grad(f)(BIG),
}


@pytest.mark.parametrize("how", MEMORY_TRANSFORMS)
def test_peak_of_calls_in_calls(how):
    def peak(*wraps):
        return peak_bytes(lambda: MEMORY_TRANSFORMS[how](chain(*wraps))) // BIG.nbytes

    plain, outer, both = (
        peak(plainly, plainly),
        peak(remat, plainly),
        peak(remat, remat),
    )
    assert plain > 1.5 * outer
    assert outer > 1.5 * both


def test_only_the_inputs_of_the_outer_call_are_kept():
    (x,) = leaves_of(BIG)

    def kept(*wraps):
        return live_bytes(lambda: chain(*wraps)(x)) // BIG.nbytes

    assert kept(plainly, plainly) == 6 * DEPTH - 1
    assert kept(plainly, remat) == 5
    assert kept(remat, remat) == 1


# --- Functions that wrap others ---


def assert_nested(transform, fn, *, plain, evaluations, reassociated=False):
    """`transform(wrap, fn)` wraps functions that call `fn`."""
    fn, calls = counted(fn)
    expected = transform(plainly, fn)
    assert len(calls) == plain
    calls.clear()
    assert_same(transform(remat, fn), expected, reassociated=reassociated)
    assert len(calls) == evaluations


def test_a_recursive_function():
    def transform(wrap, fn):
        def power(n, w):
            return w if n == 0 else wrapped(n - 1, w) @ fn(w)

        wrapped = wrap(power)
        (w,) = leaves_of(W)
        wrapped(4, w).sum().backward()
        return w.grad

    # The forward, 4; then each depth recomputes those below it: 4 + 3 + 2 + 1.
    # Reassociated: w is used in each call, and by the call inside.
    assert_nested(transform, torch.sin, plain=4, evaluations=14, reassociated=True)


def test_the_inner_call_captures_what_the_outer_computed():
    def transform(wrap, fn):
        def outer(w, x):
            h = x @ w
            return wrap(lambda y: fn(y) * h)(w)

        w, x = leaves_of(W, X)
        wrap(outer)(w, x).sum().backward()
        return w.grad, x.grad

    assert_nested(transform, torch.sin, plain=1, evaluations=3)


def test_an_inner_call_on_constants_is_the_function_itself():
    def transform(wrap, fn):
        (w,) = leaves_of(W)
        wrap(lambda w: w * wrap(fn)(X))(w).sum().backward()
        return w.grad

    # The forward and the recomputation of the outer call.
    assert_nested(transform, torch.exp, plain=1, evaluations=2)


def test_an_inner_call_without_grad_mode_is_the_function_itself():
    def transform(wrap, fn):
        def outer(w):
            with torch.no_grad():
                constant = wrap(fn)(w)
            return w * constant

        (w,) = leaves_of(W)
        wrap(outer)(w).sum().backward()
        return w.grad

    assert_nested(transform, torch.exp, plain=1, evaluations=2)
