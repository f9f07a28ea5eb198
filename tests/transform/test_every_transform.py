"""Every transform of every function of the zoo: values, and evaluations.

Also of functions that are rematerialized twice: remat in remat.
"""

from functools import partial

import pytest
import torch
from support.compositions import EVERY, assert_derivatives
from support.tables import crossed, rows
from support.zoo import (
    XS,
    ZOO,
    V,
    W,
    X,
    assert_rematerialized,
    counted,
    leaves_of,
    matmul,
    plainly,
    scalar,
)
from torch.autograd import functional
from torch.func import grad, hessian, jacrev, jvp, vmap

from remat import remat
from remat.testing import assert_same


AT_BASE = [how for how, transform in EVERY.items() if transform.at_base]

# `linearize` warns of what its own tracing leaves in the graph.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"
)


def each(hows, whole=()):
    """Pairs of a transform and a function, once and nested.

    All that are not nested are fast under those in `whole`. Under each of the others
    two are, and one nested.
    """

    def row(i, how, k, case, nested):
        place = (k - i) % len(EVERY[how].cases)
        is_fast = place == 2 if nested else place < 2 or how in whole
        marks = () if is_fast else pytest.mark.slow
        name = f"{how}-{case}{'-nested' * nested}"
        return pytest.param(how, case, nested, id=name, marks=marks)

    rows = [
        row(i, how, k, case, nested)
        for i, how in enumerate(hows)
        for k, case in enumerate(EVERY[how].cases)
        for nested in (False, True)
    ]
    return pytest.mark.parametrize(("how", "case", "nested"), rows)


WRONG = {
    "not rematerialized": (plainly, "1 evaluations, not 2"),
    "other values": (lambda f: lambda *xs: 2 * remat(f)(*xs), "differs in value"),
}


@rows("wrap, message", WRONG)
def test_the_comparison_of_derivatives_fails_for_another_function(
    wrap, message, monkeypatch
):
    monkeypatch.setattr("support.compositions.remat", wrap)
    with pytest.raises(AssertionError, match=message):
        assert_derivatives("grad", *ZOO["matmul"])


@each(EVERY, whole=("backward", "grad", "jvp", "vmap_grad", "grad_vmap", "grad_grad"))
def test_a_rematerialized_function_has_the_derivatives_of_plain(how, case, nested):
    assert_derivatives(how, *ZOO[case], nested=nested, saves=case != "linear")


@each(AT_BASE, whole=("backward",))
def test_with_higher_order_each_backward_at_base_is_a_call(how, case, nested):
    assert_derivatives(how, *ZOO[case], nested=nested, calls=True)


@pytest.mark.parametrize("how", AT_BASE)
def test_a_linear_function_beside_a_curved_one_is_not_recomputed(how):
    transform = EVERY[how]
    linear, calls = counted(ZOO["linear"][0])
    curved, others = counted(matmul)

    def both(linear, curved):
        return transform(lambda w, x: scalar(linear(w, curved(w, x))), W, X)

    expected = both(linear, curved)
    calls.clear()
    others.clear()
    assert_same(both(remat(linear), remat(curved)), expected)
    recomputed = transform.plain + transform.backwards
    assert (len(calls), len(others)) == (transform.plain, recomputed)


# What is wrapped is a derivative of a loss, or a batch of it, and its input.
WRAPPED = {
    "loss": (lambda loss: loss, X),
    "grad": (lambda loss: grad(loss, (0, 1)), X),
    "vmap": (lambda loss: lambda w, xs: vmap(lambda x: loss(w, x))(xs), XS),
    "vmap_grad": (lambda loss: vmap(grad(loss), (None, 0)), X[None]),
    "hessian": (hessian, X),
    "jvp": (lambda loss: lambda w, x: jvp(loss, (w, x), (V, w)), X),
}


@crossed("how, case", WRAPPED, ZOO, each=2)
def test_a_derivative_may_be_wrapped(how, case):
    (derivative, x), (fn, call) = WRAPPED[how], ZOO[case]

    def transform(wrapped):
        inputs = leaves_of(W, x)
        out = wrapped(*inputs)
        scalar(out).backward()
        return out, [t.grad for t in inputs]

    # One call, in which nothing is added up in another order: bitwise.
    assert_rematerialized(
        transform, derivative(lambda w, x: scalar(call(fn, w, x))), evaluations=2
    )


def apply(depth, wrap, fn):
    for _ in range(depth):
        fn = wrap(fn)
    return fn


@pytest.mark.parametrize(
    ("how", "depth"),
    [
        *(("backward", n) for n in (1, 2, 3, 5, 120)),
        *(("grad", n) for n in (1, 2, 3, 5)),
    ],
)
def test_each_depth_costs_an_evaluation_under_func_and_none_at_base(how, depth):
    transform = lambda f: EVERY[how](lambda w, x: scalar(f(w, x)), W, X)
    evaluations = 1 + (depth if how == "grad" else 1)
    assert_rematerialized(
        transform, matmul, evaluations=evaluations, wrap=partial(apply, depth, remat)
    )


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("curved", [True, False], ids=["curved", "linear"])
def test_each_order_recomputes_the_calls_whose_values_it_reads(order, curved):
    derivative = lambda g: grad(lambda w: g(w).sin() if curved else g(w))
    transform = lambda f: apply(order, derivative, f)(W[0, 0])
    # Where every value matters to the next order, it recomputes all calls before; where
    # none does, only the last. Reassociated: higher order.
    evaluations = 2**order if curved else 1 + order
    assert_rematerialized(
        transform, torch.exp, evaluations=evaluations, reassociated=True
    )


@pytest.mark.parametrize("order", [2, 3], ids=["second", "third"])
def test_tangents_of_tangents_are_evaluated_with_the_value(order):
    def derivative(g):
        return lambda w: jvp(g, (w,), (V,))[1]

    def transform(f):
        (w,) = leaves_of(W)
        result = apply(order, derivative, f)(w)
        result.sum().backward()
        return result, w.grad

    # Reassociated: higher order.
    assert_rematerialized(transform, torch.exp, evaluations=2, reassociated=True)


def small_jacobian(**options):
    return lambda f: functional.jacobian(f, (W[:2, :2], X[:2, :2]), **options)


def small_jacrev(chunk):
    return lambda f: jacrev(f, chunk_size=chunk)(W[:2, :2], X[:2, :2])


# One recompute for each of the four outputs, for each chunk of them, or for all.
CHUNKS = {
    "jacrev_1": (small_jacrev(1), 4),
    "jacrev_3": (small_jacrev(3), 2),
    "jacobian": (small_jacobian(vectorize=False), 4),
    "vectorized": (small_jacobian(vectorize=True), 1),
}


@rows("transform, pulls", CHUNKS)
def test_a_jacobian_recomputes_once_for_each_pull(transform, pulls):
    assert_rematerialized(transform, matmul, evaluations=1 + pulls)
