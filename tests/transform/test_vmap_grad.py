"""`vmap` of derivatives and derivatives of `vmap`."""

import pytest
import torch
from support.zoo import (
    BIG,
    BLOCKS,
    DEPTH,
    WS,
    XS,
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
from torch.func import (
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from remat import remat
from remat.testing import count_ops, peak_bytes


BOTH = (0, 1)


def vmap_grad(loss, w, x):
    return vmap(grad_and_value(loss, BOTH), (None, 0))(w, XS)


def vmap_grad_of_batched_weights(loss, w, x):
    return vmap(grad(loss, BOTH), (0, None))(WS, x)


def grad_vmap(loss, w, x):
    return grad(lambda w, xs: scalar(vmap(loss, (None, 0))(w, xs)), BOTH)(w, XS)


def vmap_vmap_grad(loss, w, x):
    return vmap(vmap(grad(loss, BOTH), (0, None)), (None, 0), 1)(WS, XS)


def vmap_grad_vmap(loss, w, x):
    def over_weights(w, x):
        return scalar(vmap(loss, (0, None))(w, x))

    return vmap(grad(over_weights, BOTH), (None, 0))(WS, XS)


def vmap_vjp(loss, w, x):
    def pulled(w, x):
        value, pull = vjp(loss, w, x)
        return value, pull(value)

    return vmap(pulled, (None, 0))(w, XS)


def vjp_vmap(loss, w, x):
    values, pull = vjp(vmap(loss, (None, 0)), w, XS)
    return values, pull(values)


def jacrev_of_a_batch(loss, w, x):
    return jacrev(vmap(loss, (None, 0)), BOTH)(w, XS)


def chunked_vmap_grad(loss, w, x):
    return vmap(grad(loss, BOTH), (None, 0), chunk_size=3)(w, XS)


# Evaluations: the forward and one recomputation, of the whole batch.
FIRST = {
    "vmap_grad": vmap_grad,
    "vmap_grad_weights": vmap_grad_of_batched_weights,
    "grad_vmap": grad_vmap,
    "vmap_vmap_grad": vmap_vmap_grad,
    "vmap_grad_vmap": vmap_grad_vmap,
    "vmap_vjp": vmap_vjp,
    "vjp_vmap": vjp_vmap,
    "jacrev": jacrev_of_a_batch,
    "chunked": chunked_vmap_grad,
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", FIRST)
def test_first_order(how, case):
    assert_zoo_rematerialized(FIRST[how], case, evaluations=2)


def vmap_hessian(loss, w, x):
    return vmap(hessian(loss), (None, 0))(w, XS)


def vmap_grad_of_grad(loss, w, x):
    second = grad(lambda w, x: scalar(grad(loss, BOTH)(w, x)), BOTH)
    return vmap(second, (None, 0))(w, XS)


def grad_vmap_grad(loss, w, x):
    """A penalty on gradients per example."""

    def penalty(w):
        return scalar(vmap(grad(loss, 1), (None, 0))(w, XS))

    return grad(penalty)(w)


def backward_vmap_grad(loss, w, x):
    w, xs = leaves_of(w, XS)
    scalar(vmap(grad(loss, BOTH), (None, 0))(w, xs)).backward()
    return w.grad, xs.grad


def vmap_jvp_grad(loss, w, x):
    return vmap(lambda x: jvp(lambda w: grad(loss)(w, x), (w,), (V,)))(XS)


def grad_vmap_jvp(loss, w, x):
    def tangents(w):
        return scalar(vmap(lambda x: jvp(loss, (w, x), (V, x)))(XS))

    return grad(tangents)(w)


def vmap_jacrev_of_jacrev(loss, w, x):
    return vmap(jacrev(jacrev(loss)), (None, 0))(w, XS)


# Evaluations: as without vmap, see test_higher_order.
SECOND = {
    "vmap_hessian": (vmap_hessian, 3),
    "vmap_grad_grad": (vmap_grad_of_grad, 4),
    "grad_vmap_grad": (grad_vmap_grad, 4),
    "backward_vmap_grad": (backward_vmap_grad, 4),
    "vmap_jvp_grad": (vmap_jvp_grad, 4),
    "grad_vmap_jvp": (grad_vmap_jvp, 4),
    "vmap_jacrev_jacrev": (vmap_jacrev_of_jacrev, 4),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", SECOND)
def test_second_order(how, case):
    transform, evaluations = SECOND[how]
    # Reassociated: second order.
    assert_zoo_rematerialized(
        transform, case, evaluations=evaluations, reassociated=True
    )


# Forward mode alone stores nothing, so nothing is recomputed.
FORWARD = {
    "vmap_jvp": lambda loss, w, x: vmap(lambda x: jvp(loss, (w, x), (V, V)))(XS),
    "vmap_jacfwd": lambda loss, w, x: vmap(jacfwd(loss), (None, 0))(w, XS),
    "jvp_vmap": lambda loss, w, x: jvp(vmap(lambda x: loss(w, x)), (XS,), (WS,)),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_evaluates_once(how, case):
    assert_zoo_rematerialized(
        and_backward(FORWARD[how]),
        case,
        plain=1 + 1,
        evaluations=1 + evaluations_at_base(case),
    )


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_then_backward(how, case):
    def transform(loss, w, x):
        w, x = leaves_of(w, x)
        result = FORWARD[how](loss, w, x)
        value = vmap(lambda x: loss(w, x))(XS)
        scalar((result, value)).backward()
        return result, w.grad

    # Value, tangent, the value alone, and one recomputation of each.
    # Reassociated: second order.
    assert_zoo_rematerialized(
        transform,
        case,
        plain=2,
        evaluations=4 + evaluations_at_base(case),
        reassociated=True,
    )


# `linearize` warns of what its own tracing leaves in the graph.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("case", ZOO)
def test_linearize(case):
    def transform(loss, w, x):
        value, push = linearize(loss, w, x)
        return value, push(V, V), push(w, x)

    # `linearize` traces the function once for the value and once for the tangent.
    assert_zoo_rematerialized(
        and_backward(transform),
        case,
        plain=2 + 1,
        evaluations=2 + evaluations_at_base(case),
    )


# --- Layouts, dimensions ---


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("out_dim", [0, 1, -1])
def test_any_dimensions(dim, out_dim):
    def transform(f):
        derivative = grad(lambda w, x: scalar(f(w, x)), BOTH)
        return vmap(derivative, (None, dim), out_dim)(W, XS.movedim(0, dim))

    assert_rematerialized(transform, matmul, evaluations=2)


LAYOUTS = {
    "contiguous": XS,
    "expanded": X.expand(3, 4, 4),
    "last": XS.movedim(0, -1).contiguous().movedim(-1, 0),
    "transposed": XS.mT,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ZOO)
def test_any_layout_of_the_batch(case, layout):
    def transform(loss, w, x):
        return vmap(grad_and_value(loss, BOTH), (None, 0))(w, LAYOUTS[layout])

    assert_zoo_rematerialized(transform, case, evaluations=2)


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
    assert all_ops(remat(torch.matmul, prune=False)) == all_ops(torch.matmul) + 1


# --- Captured tensors ---


@pytest.mark.parametrize("how", ["vmap_grad", "grad_vmap", "jvp"])
def test_captured_batched_values(how):
    """The wrapped function sees the batch and the variable through its closure."""

    def transform(f):
        def loss(w, x):
            h = x @ w
            return scalar(f(lambda y: (y @ h).tanh() @ w))

        if how == "vmap_grad":
            return vmap(grad(loss, BOTH), (None, 0))(W, XS)
        if how == "grad_vmap":
            return grad(lambda w: vmap(loss, (None, 0))(w, XS).sum())(W)
        ws, xs = leaves_of(WS, XS)
        result = vmap(lambda w, x: jvp(lambda w: loss(w, x), (w,), (V,)))(ws, xs)
        scalar(result).backward()
        return result, ws.grad, xs.grad

    # With the tangent: value, tangent, and one recomputation of each.
    # Reassociated: `w` is used twice inside, once through `h`, and outside.
    assert_rematerialized(
        transform,
        lambda g: g(X),
        evaluations=4 if how == "jvp" else 2,
        reassociated=True,
    )


def test_captured_values_that_nothing_else_carries():
    def transform(f):
        return vmap(grad(lambda w: f(lambda: w.sin() @ X).sum()))(WS)

    assert_rematerialized(transform, lambda g: g().exp(), evaluations=2)


def test_a_base_level_capture_under_vmap():
    def transform(f):
        (x,) = leaves_of(X)

        def loss(w):
            return scalar(f(lambda: (x @ w).tanh()))

        vmap(loss)(WS).sum().backward()
        return x.grad

    assert_rematerialized(transform, lambda g: g(), evaluations=2)


# --- Randomness ---


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("outer", ["vmap_grad", "grad_vmap"])
def test_randomness_is_replayed(outer, randomness):
    def noisy(w, x):
        return torch.nn.functional.dropout(x @ w, 0.5).sin().sum()

    def transform(f):
        torch.manual_seed(3)
        if outer == "vmap_grad":
            derivative = vmap(grad(f), (None, 0), randomness=randomness)
            return derivative(W, XS), torch.rand(1)
        batched = vmap(f, (None, 0), randomness=randomness)
        return grad(lambda w: batched(w, XS).sum())(W), torch.rand(1)

    assert_rematerialized(transform, noisy, evaluations=2)


def test_randomness_is_an_error_unless_asked_for():
    def transform(f):
        with pytest.raises(RuntimeError, match="called random operation while in rand"):
            vmap(grad(f), (None, 0))(W, XS)
        return vmap(grad(f), (None, 0), randomness="same")(W, XS)

    def noisy(w, x):
        return (x @ w * torch.ones(4).bernoulli()).sin().sum()

    def seeded(f):
        torch.manual_seed(3)
        return transform(f)

    assert_rematerialized(seeded, noisy, plain=2, evaluations=3)


# --- Memory ---


BATCH = BIG.view(4, -1)


MEMORY = {
    "vmap_grad": (lambda wrap: vmap(grad(blocks(wrap)))(BATCH), 0.5),
    "grad_vmap": (
        lambda wrap: grad(lambda x: vmap(blocks(wrap))(x).sum())(BATCH),
        0.5,
    ),
    "vmap_grad_grad": (
        lambda wrap: vmap(grad(lambda x: grad(blocks(wrap))(x).sin().sum()))(BATCH),
        0.5,
    ),
}


@pytest.mark.parametrize("how", MEMORY)
def test_at_the_peak_one_block_is_alive(how):
    transform, share = MEMORY[how]
    plain = peak_bytes(lambda: transform(plainly))
    assert plain >= BLOCKS * DEPTH * BIG.nbytes
    assert peak_bytes(lambda: transform(remat)) <= share * plain


def test_ops_are_those_of_plain_and_one_more_forward():
    def ops_of(fn):
        with count_ops() as ops:
            vmap(grad(lambda w, x: fn(w, x).sum()), (None, 0))(W, XS)
        return ops["tanh"], ops["tanh_backward"]

    assert ops_of(matmul) == (1, 1)
    assert ops_of(remat(matmul, prune=False)) == (2, 1)
