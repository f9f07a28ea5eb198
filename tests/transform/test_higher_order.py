"""Derivatives of derivatives.

Under torch.func a backward is a call itself, in memory as in values. So it is under
base autograd with `higher_order=True`; without, the graph of a backward is plain's.
"""

from functools import partial

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
    evaluations_at_base,
    leaves_of,
    matmul,
    plainly,
    scalar,
)
from torch.autograd import functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import remat
from remat.testing import count_ops, live_bytes, peak_bytes


BOTH = (0, 1)
higher_order = partial(remat, higher_order=True)


# --- Second order ---


def autograd_twice(loss, w, x):
    w, x = leaves_of(w, x)
    first = torch.autograd.grad(loss(w, x), (w, x), create_graph=True)
    return first, torch.autograd.grad(scalar(first), (w, x))


def backward_of_backward(loss, w, x):
    w, x = leaves_of(w, x)
    first = torch.autograd.grad(loss(w, x), (w, x), create_graph=True)
    scalar(first).backward()
    return w.grad, x.grad


def grad_of_grad(loss, w, x):
    return grad(lambda w, x: scalar(grad(loss, BOTH)(w, x)), BOTH)(w, x)


def grad_of_vjp(loss, w, x):
    def pulled(w, x):
        value, pull = vjp(loss, w, x)
        return scalar(pull(value))

    return grad(pulled, BOTH)(w, x)


def backward_of_grad(loss, w, x):
    w, x = leaves_of(w, x)
    scalar(grad(loss, BOTH)(w, x)).backward()
    return w.grad, x.grad


def grad_of_autograd(loss, w, x):
    """A penalty on the gradient, computed by plain autograd within a level."""

    def penalty(w):
        h = w * 1
        (first,) = torch.autograd.grad(loss(h, x), h, create_graph=True)
        return first.sin().sum()

    return grad(penalty)(w)


def jvp_of_grad(loss, w, x):
    return jvp(grad(loss, BOTH), (w, x), (V, V))


def grad_of_jvp(loss, w, x):
    return grad(lambda w, x: jvp(loss, (w, x), (V, w))[1].sin(), BOTH)(w, x)


def hessian_vector_product(loss, w, x):
    w, x = leaves_of(w, x)
    return functional.hvp(loss, (w, x), (V, V))


def double_backward_trick(loss, w, x):
    w, x = leaves_of(w, x)
    return functional.jvp(loss, (w, x), (V, V))


# Evaluations: the forward and its backward are calls, 1 + 1, and each is recomputed
# once by the outer derivative, which depends on the values of both.
SECOND = {
    "autograd_twice": (autograd_twice, 4),
    "backward_of_backward": (backward_of_backward, 4),
    "grad_of_grad": (grad_of_grad, 4),
    "grad_of_vjp": (grad_of_vjp, 4),
    "backward_of_grad": (backward_of_grad, 4),
    "grad_of_autograd": (grad_of_autograd, 4),
    "jvp_of_grad": (jvp_of_grad, 4),
    "grad_of_jvp": (grad_of_jvp, 4),
    # Differentiates the backward by its cotangent alone: the forward is no part of it.
    "double_backward_trick": (double_backward_trick, 3),
    # That trick applied to the first two calls: they are differentiated, by calls, and
    # those by their cotangents.
    "hvp": (hessian_vector_product, 6),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", SECOND)
def test_second_order(how, case):
    transform, evaluations = SECOND[how]
    # Reassociated: w and x are inputs of the forward and of its backward, and each of
    # the two calls adds up its own contributions first.
    assert_zoo_rematerialized(
        transform,
        case,
        evaluations=evaluations,
        reassociated=True,
        wrap=higher_order if how in AT_BASE else remat,
    )


WRAPPED = {
    "grad": lambda loss: grad(loss, BOTH),
    "vmap_grad": lambda loss: lambda w, x: vmap(grad(loss), (None, 0))(w, x[None]),
    "hessian": hessian,
    "jvp": lambda loss: lambda w, x: jvp(loss, (w, x), (V, w)),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", WRAPPED)
def test_a_derivative_may_be_wrapped(how, case):
    fn, call = ZOO[case]

    def transform(derivative):
        w, x = leaves_of(W, X)
        scalar(derivative(w, x)).backward()
        return w.grad, x.grad

    # One call, in which nothing is added up in another order: bitwise.
    assert_rematerialized(
        transform, WRAPPED[how](lambda w, x: scalar(call(fn, w, x))), evaluations=2
    )


# --- Jacobians in all pairs ---


# The level of jacrev is gone when it pulls back, so that under jacfwd the recomputation
# runs on dual numbers and is no call; jacfwd alone records nothing.
PAIRS = {
    (jacrev, jacrev): 4,
    (jacrev, jacfwd): 4,
    (jacfwd, jacrev): 3,
    (jacfwd, jacfwd): 1,
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize(
    ("outer", "inner"), PAIRS, ids=[f"{a.__name__}-{b.__name__}" for a, b in PAIRS]
)
def test_jacobian_of_jacobian(outer, inner, case):
    # Reassociated: second order.
    assert_zoo_rematerialized(
        and_backward(lambda loss, w, x: outer(inner(loss, BOTH), BOTH)(w, x)),
        case,
        plain=1 + 1,
        evaluations=PAIRS[outer, inner] + evaluations_at_base(case),
        reassociated=True,
    )


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_jacobian_of_jacobian_then_backward(jacobian, case):
    def transform(loss, w, x):
        w, x = leaves_of(w, x)
        result = jacobian(jacobian(loss))(w, x)
        scalar(result).backward()
        return result, w.grad, x.grad

    # The four calls (in forward mode: the value, two tangents, a second tangent), and
    # one recomputation of each; but the result of the pull of `jacrev` is the gradient,
    # which the Hessian does not depend on. Reassociated: third order.
    evaluations = 7 if jacobian is jacrev else 8
    assert_zoo_rematerialized(
        transform, case, evaluations=evaluations, reassociated=True
    )


@pytest.mark.parametrize("case", ZOO)
def test_hessian(case):
    assert_zoo_rematerialized(
        lambda loss, w, x: hessian(loss)(w, x), case, evaluations=3
    )


@pytest.mark.parametrize("chunk", [1, 3], ids=["chunks_of_1", "chunks_of_3"])
def test_jacrev_in_chunks(chunk):
    def transform(f):
        return jacrev(f, chunk_size=chunk)(W[:2, :2], X[:2, :2])

    # One recomputation for each chunk of the four outputs.
    assert_rematerialized(transform, matmul, evaluations={1: 1 + 4, 3: 1 + 2}[chunk])


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vectorized"])
def test_functional_jacobian(vectorize):
    def transform(f):
        return functional.jacobian(f, (W[:2, :2], X[:2, :2]), vectorize=vectorize)

    # One recomputation for each output, or one for all.
    assert_rematerialized(transform, matmul, evaluations=1 + (1 if vectorize else 4))


def test_functional_hessian():
    def transform(f):
        return functional.hessian(lambda w: f(w, X[:2, :2]).sum(), W[:2, :2])

    # The forward, its backward, and the backward of that for each of the four inputs.
    # Reassociated: second order.
    assert_rematerialized(
        transform, matmul, evaluations=6, reassociated=True, wrap=higher_order
    )


# --- Third order ---


def autograd_thrice(loss, w, x):
    w, x = leaves_of(w, x)
    value = loss(w, x)
    for _ in range(3):
        grads = torch.autograd.grad(value, (w, x), create_graph=True)
        value = scalar(grads)
    return [g.detach() for g in grads]


def grad_thrice(loss, w, x):
    def second(w):
        return scalar(grad(lambda w: scalar(grad(loss)(w, x)))(w))

    return grad(second)(w)


def mixed(loss, w, x):
    """Forward over reverse over reverse."""

    def second(w):
        return grad(lambda w: scalar(grad(loss)(w, x)))(w)

    return jvp(second, (w,), (V,))


def backward_of_hessian(loss, w, x):
    w, x = leaves_of(w, x)
    scalar(hessian(loss)(w, x)).backward()
    return w.grad, x.grad


# Each order recomputes each of the calls before it once: 2^3. That of the gradient is
# left out where the result is a Hessian, which does not depend on the gradient.
THIRD = {
    "autograd_thrice": (autograd_thrice, 8),
    "grad_thrice": (grad_thrice, 8),
    "jvp_of_grad_of_grad": (mixed, 8),
    "backward_of_hessian": (backward_of_hessian, 7),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", THIRD)
def test_third_order(how, case):
    transform, evaluations = THIRD[how]
    # Reassociated: as in second order.
    assert_zoo_rematerialized(
        transform,
        case,
        evaluations=evaluations,
        reassociated=True,
        wrap=higher_order if how in AT_BASE else remat,
    )


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("curved", [True, False], ids=["curved", "linear"])
def test_evaluations_of_each_order(order, curved):
    def derivative(g):
        return grad(lambda w: g(w).sin() if curved else g(w))

    def transform(f):
        g = f
        for _ in range(order):
            g = derivative(g)
        return g(W[0, 0])

    # Where every value matters to the next order, it recomputes all calls before; where
    # none does, only the last. Reassociated: higher order.
    evaluations = 2**order if curved else 1 + order
    assert_rematerialized(
        transform, torch.exp, evaluations=evaluations, reassociated=True
    )


# --- At base, where the graph of a backward is plain's ---


# The forward, and each backward recomputes it, as it has values of its own to read.
AT_BASE = {
    "autograd_twice": (autograd_twice, 3),
    "backward_of_backward": (backward_of_backward, 3),
    # What the backward by a cotangent reads, the first backward has recomputed.
    "double_backward_trick": (double_backward_trick, 2),
    "hvp": (hessian_vector_product, 3),
    "autograd_thrice": (autograd_thrice, 4),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", AT_BASE)
def test_higher_orders_at_base_are_plains_bit_for_bit(how, case):
    transform, evaluations = AT_BASE[how]
    # The graph of a linear function saves nothing that could be recomputed.
    evaluations = 1 if case == "linear" else evaluations
    assert_zoo_rematerialized(transform, case, evaluations=evaluations)


def test_functional_hessian_at_base_recomputes_for_each_backward():
    def transform(f):
        return functional.hessian(lambda w: f(w, X[:2, :2]).sum(), W[:2, :2])

    # The first, and one for each of the four inputs.
    assert_rematerialized(transform, matmul, evaluations=1 + 5)


# --- Memory ---


def gradient_penalty(wrap):
    return grad(lambda x: grad(blocks(wrap))(x).sin().sum())


def backward_of_create_graph(wrap):
    (x,) = leaves_of(BIG)
    (first,) = torch.autograd.grad(blocks(wrap)(x), x, create_graph=True)
    first.sin().sum().backward()
    return x.grad


def hessian_vector(wrap):
    return jvp(grad(blocks(wrap)), (BIG,), (BIG.cos(),))[1]


def grad_of_tangent(wrap):
    return grad(lambda x: jvp(blocks(wrap), (x,), (BIG.cos(),))[1])(BIG)


def backward_of_func_grad(wrap):
    (x,) = leaves_of(BIG)
    grad(blocks(wrap))(x).sin().sum().backward()
    return x.grad


# With many blocks the peak tends to that of one block; here there are four.
MEMORY = {
    "grad_of_grad": (lambda wrap: gradient_penalty(wrap)(BIG), 0.45),
    "backward_of_backward": (backward_of_create_graph, 0.45),
    "jvp_of_grad": (hessian_vector, 0.5),
    "grad_of_jvp": (grad_of_tangent, 0.5),
    "backward_of_grad": (backward_of_func_grad, 0.45),
}


@pytest.mark.parametrize("how", MEMORY)
def test_second_order_peak(how):
    transform, share = MEMORY[how]
    plain = peak_bytes(lambda: transform(plainly))
    assert plain >= 2 * BLOCKS * DEPTH * BIG.nbytes
    wrap = higher_order if how in AT_BASE else remat
    assert peak_bytes(lambda: transform(wrap)) <= share * plain


def test_with_higher_order_the_graph_of_a_backward_keeps_only_its_inputs():
    def first_order(wrap):
        (x,) = leaves_of(BIG)
        out = blocks(wrap)(x)
        return torch.autograd.grad(out, x, create_graph=True)

    plain = live_bytes(lambda: first_order(plainly)) // BIG.nbytes
    assert plain >= 2 * BLOCKS * DEPTH
    # The input and the cotangent of each block.
    assert live_bytes(lambda: first_order(higher_order)) // BIG.nbytes <= 2 * BLOCKS + 1
    # Without it the graph of the backward is plain's, and saves all that plain's does.
    assert live_bytes(lambda: first_order(remat)) // BIG.nbytes == plain


@pytest.mark.parametrize("outer", [grad, vjp])
@pytest.mark.parametrize("inner", [grad, vjp])
def test_ops_of_second_order(outer, inner):
    def derivative(transform, f):
        if transform is grad:
            return transform(f)
        return lambda w: vjp(f, w)[1](torch.ones((), dtype=torch.double))[0]

    def ops_of(fn):
        inner_derivative = derivative(inner, lambda w: fn(w).sum())
        with count_ops() as ops:
            derivative(outer, lambda w: inner_derivative(w).sum())(W)
        return ops["exp"]

    # The value, and the value within the backward: both are linear in what follows, so
    # that the outer derivative recomputes the second alone.
    assert ops_of(torch.exp) == 1
    assert ops_of(remat(torch.exp, prune=False)) == 3
