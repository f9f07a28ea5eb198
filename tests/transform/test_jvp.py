"""`torch.func.jvp`: nothing is stored or recomputed, unless there is a backward too."""

import pytest
import torch
from support.zoo import (
    BIG,
    BLOCKS,
    DEPTH,
    ZOO,
    V,
    W,
    X,
    and_backward,
    assert_rematerialized,
    assert_zoo_rematerialized,
    blocks,
    counted,
    elementwise,
    evaluations_at_base,
    leaves_of,
    matmul,
    plainly,
    scalar,
)
from torch.func import grad, jvp

from remat import remat
from remat.testing import assert_same, count_ops, peak_bytes


def of_both(loss, w, x):
    return jvp(loss, (w, x), (V, w))


def of_one(loss, w, x):
    return jvp(lambda x: loss(w, x), (x,), (V,))


def of_a_tree(loss, w, x):
    def of_tree(tree):
        return {"loss": loss(tree["w"], tree["x"])}

    return jvp(of_tree, ({"w": w, "x": x},), ({"w": V, "x": V},))


def with_aux(loss, w, x):
    return jvp(lambda w: (loss(w, x), {"aux": w.sin()}), (w,), (V,), has_aux=True)


def without_grad_mode(loss, w, x):
    with torch.no_grad():
        return jvp(loss, (w, x), (V, V))


JVPS = {
    "both": of_both,
    "one": of_one,
    "tree": of_a_tree,
    "has_aux": with_aux,
    "no_grad": without_grad_mode,
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", JVPS)
def test_forward_mode_evaluates_once(how, case):
    assert_zoo_rematerialized(
        and_backward(JVPS[how]),
        case,
        plain=1 + 1,
        evaluations=1 + evaluations_at_base(case),
    )


def then_backward(how):
    """Reverse over forward: with something to store, the call is recorded after all."""

    def transform(loss, w, x):
        w, x = leaves_of(w, x)
        result = JVPS[how](loss, w, x)
        scalar(result).backward()
        return result, w.grad, x.grad

    return transform


# Evaluations: the value and the tangent, and one recomputation of each.
@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", [how for how in JVPS if how != "no_grad"])
def test_a_backward_through_the_tangent(how, case):
    # Reassociated: second order; w and x are inputs of two calls, value and tangent.
    assert_zoo_rematerialized(
        then_backward(how), case, evaluations=4, reassociated=True
    )


def test_a_backward_through_the_value_alone_recomputes_only_that():
    def transform(f):
        w, x = leaves_of(W, X)
        value, _ = jvp(f, (w, x), (V, V))
        value.sum().backward()
        return w.grad, x.grad

    assert_rematerialized(transform, matmul, evaluations=3)


def test_ops_of_a_gradient_of_a_tangent():
    def ops_of(fn):
        def tangent(x):
            return jvp(fn, (x,), (V,))[1].sum()

        with count_ops() as ops:
            grad(tangent)(X)
        return ops["exp"]

    # Once for the value, once more for the tangent, and once more for its gradient.
    assert ops_of(torch.exp) == 1
    assert ops_of(remat(torch.exp, prune=False)) == 3


def test_at_the_peak_one_block_is_alive():
    def tangent(wrap):
        return lambda x: jvp(blocks(wrap), (x,), (BIG.cos(),))[1]

    def peak(wrap):
        return peak_bytes(lambda: grad(tangent(wrap))(BIG)) // BIG.nbytes

    plain = peak(plainly)
    assert plain >= 3 * BLOCKS * DEPTH
    assert peak(remat) <= plain / 2


def test_an_output_that_has_no_tangent():
    def transform(f):
        (y,) = leaves_of(X)
        (a, b, c), (da, db, dc) = jvp(lambda w: f(w, y), (W,), (V,))
        (a.sum() + (da * db).sum() + b.sum()).backward()
        # Detached: a constant output of a call that is recorded may require grad.
        return a, b, c.detach(), da, db.detach(), dc.detach(), y.grad

    def fn(w, y):
        return w.sin() * y, y.exp(), torch.ones(3)

    # Reassociated: second order.
    assert_rematerialized(transform, fn, evaluations=4, reassociated=True)


def test_an_output_that_has_no_derivative():
    def transform(f):
        (y,) = leaves_of(X)
        out, tangent, index = jvp(lambda w: f(w, y), (W,), (V,), has_aux=True)
        (out + tangent).sum().backward()
        return out, tangent, index, y.grad

    def fn(w, y):
        h = w.sin() * y
        return h, h.argmax()

    # Reassociated: second order.
    assert_rematerialized(transform, fn, evaluations=4, reassociated=True)


def test_the_tangent_that_the_gradient_does_not_reach():
    """Some tangents depend on the variable and some do not."""

    def transform(f):
        def loss(w):
            _, (da, db) = jvp(f, (w, X), (V, V))
            return (da + db).sum()

        return grad(loss)(W)

    def fn(w, x):
        return w.sin(), x.cos()

    # The value, the tangents, and one recomputation of those alone.
    assert_rematerialized(transform, fn, evaluations=3)


def test_jvp_inside():
    def fn(w, x):
        return jvp(torch.sin, (w @ x,), (w,))

    def transform(f):
        return grad(lambda w: scalar(f(w, X)))(W)

    assert_rematerialized(transform, fn, evaluations=2)


def test_jvp_inside_of_jvp():
    def fn(w):
        return jvp(torch.sin, (w @ w,), (w,))[1]

    def transform(f):
        (w,) = leaves_of(W)
        value, tangent = jvp(f, (w,), (V,))
        (value + tangent).sum().backward()
        return value, tangent, w.grad

    # Reassociated: third order.
    assert_rematerialized(transform, fn, evaluations=4, reassociated=True)


@pytest.mark.parametrize("order", [2, 3], ids=["second", "third"])
def test_jvp_of_jvp(order):
    def transform(f):
        def derivative(g):
            return lambda w: jvp(g, (w,), (V,))[1]

        g = f
        for _ in range(order):
            g = derivative(g)
        (w,) = leaves_of(W)
        result = g(w)
        result.sum().backward()
        return result, w.grad

    # A call for the value, and for each level one more for the tangent of each before.
    # Only the last of them is read, and recomputed. Reassociated: higher order.
    assert_rematerialized(
        transform, torch.exp, evaluations=2**order + 1, reassociated=True
    )


def test_one_wrapped_function_over_and_over():
    fn, calls = counted(elementwise)
    wrapped = remat(fn)
    results = [jvp(f, (W, X), (V, V)) for f in [wrapped] * 3 + [fn]]
    assert_same(results[:3], results[3:] * 3)
    assert len(calls) == 4
    wrapped(*leaves_of(W, X)).sum().backward()
    assert len(calls) == 6
