"""Remat in remat: values, and what recomputation costs at each depth.

Under base autograd an outer call is run again only as far as the inputs of its inner
calls need it. Under torch.func, a call inside a call is evaluated once in each
recomputation of the outer one and once in its own.
"""

from functools import partial

import pytest
import torch
from support.zoo import (
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


def deep(depth, wrap=remat):
    def wrapped(fn):
        for _ in range(depth):
            fn = wrap(fn)
        return fn

    return wrapped


@pytest.fixture(params=ZOO)
def case(request):
    return request.param


def backward(loss, w, x):
    w, x = leaves_of(w, x)
    loss(w, x).backward()
    return w.grad, x.grad


def twice(loss, w, x):
    w, x = leaves_of(w, x)
    (first,) = torch.autograd.grad(loss(w, x), w, create_graph=True)
    return torch.autograd.grad(first.sin().sum(), (w, x))


def recomputed(case, times):
    """How often a case is evaluated again in backwards of base autograd."""
    return 0 if case == "linear" else times  # which saves nothing


def test_two_deep_in_a_backward(case):
    assert_zoo_rematerialized(
        backward, case, evaluations=1 + recomputed(case, 1), wrap=deep(2)
    )


# Evaluations: the forward; in the backward the recomputation of the outer call, which
# is the forward of the inner one, and the recomputation of the inner call. A pullback
# runs under base autograd: the inner call has nothing to recompute if nothing is saved.
TRANSFORMS = {
    "grad": (lambda loss, w, x: grad(loss, (0, 1))(w, x), lambda case: 3),
    "vjp": (
        lambda loss, w, x: vjp(loss, w, x)[1](W[0, 0]),
        lambda case: 2 + recomputed(case, 1),
    ),
    "vmap_grad": (
        lambda loss, w, x: vmap(grad(loss), (None, 0))(w, torch.stack([x, -x])),
        lambda case: 3,
    ),
}


@pytest.mark.parametrize("how", TRANSFORMS)
def test_two_deep(how, case):
    transform, evaluations = TRANSFORMS[how]
    assert_zoo_rematerialized(
        transform, case, evaluations=evaluations(case), wrap=deep(2)
    )


def test_two_deep_in_forward_mode(case):
    transform = and_backward(lambda loss, w, x: jvp(loss, (w, x), (V, V)))
    evaluations = 1 + 1 + recomputed(case, 1)
    assert_zoo_rematerialized(
        transform, case, plain=1 + 1, evaluations=evaluations, wrap=deep(2)
    )


def test_two_deep_in_second_order(case):
    # The first backward keeps its graph, and so the second recomputes again.
    evaluations = 1 + recomputed(case, 1 + 1)
    assert_zoo_rematerialized(twice, case, evaluations=evaluations, wrap=deep(2))


# The forward, 1, and its backward, 2, as for one order. The backward of the forward, 2.
# That of the backward runs the same again on record, 1 + 1, and its derivative, 1.
# `hessian` takes that on dual numbers: the value and its tangent 1 + 1, the backward 3.
@pytest.mark.parametrize(
    ("transform", "evaluations", "wrap"),
    [
        (twice, 8, partial(remat, higher_order=True)),
        (lambda loss, w, x: hessian(loss)(w, x), 5, remat),
    ],
    ids=["twice", "hessian"],
)
def test_two_deep_in_second_order_with_one_node_for_each_call(
    transform, evaluations, wrap, case
):
    # Reassociated: second order.
    assert_zoo_rematerialized(
        transform, case, evaluations=evaluations, wrap=deep(2, wrap), reassociated=True
    )


@pytest.mark.parametrize(
    ("derivative", "recomputes"),
    [
        # An outer call does nothing but to call the inner one, on its own inputs.
        (backward, lambda depth: 1),
        (lambda loss, w, x: grad(loss, (0, 1))(w, x), lambda depth: depth),
    ],
    ids=["base", "func"],
)
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_what_a_depth_costs(depth, derivative, recomputes):
    def transform(f):
        return derivative(lambda w, x: scalar(f(w, x)), W, X)

    evaluations = 1 + recomputes(depth)
    assert_rematerialized(transform, matmul, evaluations=evaluations, wrap=deep(depth))


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
    assert ops_of(full(full(layer))) == ((2, 2), (4, 2))
    assert ops_of(full(full(full(layer)))) == ((2, 2), (4, 2))


def test_ops_of_two_calls_in_a_row():
    inner = full(layer)
    assert ops_of(lambda x: inner(inner(x))) == ((4, 4), (8, 4))


def test_ops_of_two_calls_in_a_call():
    inner = full(layer)
    outer = full(lambda x: inner(inner(x)))
    # 4 of their own, 2 recomputed in the outer call, up to the input of the second
    # inner one, 4 in the inner ones.
    assert ops_of(outer) == ((4, 4), (10, 6))


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


def assert_nested(transform, fn, *, plain, evaluations):
    """`transform(wrap, fn)` wraps functions that call `fn`."""
    fn, calls = counted(fn)
    expected = transform(plainly, fn)
    assert len(calls) == plain
    calls.clear()
    assert_same(transform(remat, fn), expected)
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
    assert_nested(transform, torch.sin, plain=4, evaluations=14)


def test_the_inner_call_captures_what_the_outer_computed():
    def transform(wrap, fn):
        def outer(w, x):
            h = x @ w
            return wrap(lambda y: fn(y) * h)(w)

        w, x = leaves_of(W, X)
        wrap(outer)(w, x).sum().backward()
        return w.grad, x.grad

    # The product is all that the outer call is run again for.
    assert_nested(transform, torch.sin, plain=1, evaluations=2)


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
