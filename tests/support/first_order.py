"""The options of each way to differentiate once, of a loss of two 4x4 matrices."""

from collections.abc import Callable
from typing import Any

import torch
from support.transforms import Transform, second
from support.zoo import WS, XS, ZOO, V, W, X, leaves_of, make, scalar
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, jacfwd, jvp, vjp, vmap
from torch.utils._pytree import tree_map


BOTH = (0, 1)
OVER_X, OVER_W = (None, 0), (0, None)


def at_leaves(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """Differentiate at copies of the tensors that require grad."""
    return lambda loss, w, x: derivative(loss, *leaves_of(w, x))


def then_backward(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """Reverse mode of base over a derivative."""

    def transform(loss, w, x):
        w, x = leaves_of(w, x)
        result = derivative(loss, w, x)
        scalar(result).backward()
        return result, w.grad, x.grad

    return transform


def without_grad_mode(derivative: Callable[..., Any]) -> Callable[..., Any]:
    def transform(loss, w, x):
        with torch.no_grad():
            return derivative(loss, w, x)

    return transform


# --- Plain autograd ---


def over_a_retained_graph(loss, w, x):
    w, x = leaves_of(w, x)
    value = loss(w, x)
    value.backward(retain_graph=True)
    value.backward()
    return w.grad, x.grad


def accumulated(loss, w, x):
    w, x = leaves_of(w, x)
    loss(w, x).backward()
    first = w.grad
    loss(w, 2 * x).backward()
    assert w.grad is first
    return w.grad, x.grad


def of_what_is_no_leaf(loss, w, x):
    h = w * 2
    return torch.autograd.grad(loss(h, x), (h, w))


def of_a_frozen_input(loss, w, x):
    (x,) = leaves_of(x)
    loss(w, x).backward()
    return x.grad


BASE = {
    "backward_twice": Transform(
        over_a_retained_graph, evaluations=3, nested=5, backwards=2
    ),
    "backward_frozen": Transform(of_a_frozen_input, backwards=1),
    "backward_accumulated": Transform(
        accumulated, plain=2, evaluations=4, nested=6, backwards=2
    ),
    "no_leaf": Transform(at_leaves(of_what_is_no_leaf), backwards=1),
}


# --- Batches of plain autograd ---


def batched_at_base(batch, w, x):
    def run(loss, *_):
        return then_backward(lambda loss, w, x: batch(loss)(w, x))(loss, w, x)

    return Transform(run, batched=True, backwards=1)


BATCHES = {
    "vmap_inputs": batched_at_base(lambda loss: vmap(loss, OVER_X), W, XS),
    "vmap_weights": batched_at_base(lambda loss: vmap(loss, OVER_W), WS, X),
    "vmap_vmap": batched_at_base(
        lambda loss: vmap(vmap(loss, OVER_W), OVER_X, 1), WS, XS
    ),
}


# --- Reverse mode of torch.func ---


def grad_within_a_graph(loss, w, x):
    """Where the base level requires grad too: then so does the result."""
    result = grad(loss)(w, x)
    assert result.requires_grad
    return result.detach()


GRADS = {
    "grad_0": Transform(lambda loss, w, x: grad(loss)(w, x)),
    "grad_1": Transform(lambda loss, w, x: grad(loss, 1)(w, x)),
    "grad_at_leaves": Transform(at_leaves(grad_within_a_graph)),
    "grad_no_grad": Transform(
        without_grad_mode(lambda loss, w, x: grad(loss, BOTH)(w, x))
    ),
}


def of_pulls(run, **row):
    return Transform(run, of_outputs=True, **({"spared": 1} | row))


def cotangents_of(out, *, batch=()):
    return tree_map(lambda t: make(*batch, *t.shape, seed=t.numel()), out)


def pulled(fn, w, x):
    out, pull = vjp(fn, w, x)
    return out, pull(cotangents_of(out))


def pulled_twice(fn, w, x):
    out, pull = vjp(fn, w, x)
    cts = cotangents_of(out)
    return pull(cts), pull(tree_map(torch.neg, cts))


def pulled_back_a_batch(fn, w, x):
    out, pull = vjp(fn, w, x)
    return vmap(pull)(cotangents_of(out, batch=(3,)))


def pulled_at_a_dual(fn, w, x):
    out, pull = vjp(fn, w, x)
    cts = cotangents_of(out)
    return jvp(pull, (cts,), (cts,))


# A recompute for each pull, a batch being one.
VJPS = {
    "vjp_outputs": of_pulls(pulled),
    "vjp_twice": of_pulls(pulled_twice, evaluations=3, nested=5, spared=2),
    "vjp_batch": of_pulls(pulled_back_a_batch),
    "vjp_no_grad": of_pulls(without_grad_mode(pulled)),
    "vjp_dual_cotangent": of_pulls(pulled_at_a_dual, spared=0),
}


# --- Forward mode ---


def parts(dual):
    primal, tangent = unpack_dual(dual)
    return primal, tangent


def forward_ad_of_one(loss, w, x):
    with dual_level():
        return parts(loss(w, make_dual(x, V)))


def forward_ad_without_grad_mode(loss, w, x):
    with dual_level(), torch.no_grad():
        return parts(loss(make_dual(w, V), x))


FORWARD = {
    "jvp_both": lambda loss, w, x: jvp(loss, (w, x), (V, w)),
    "jvp_one": lambda loss, w, x: jvp(lambda x: loss(w, x), (x,), (V,)),
    "vmap_jvp": lambda loss, w, x: vmap(lambda x: jvp(loss, (w, x), (V, V)))(XS),
    "vmap_jacfwd": lambda loss, w, x: vmap(jacfwd(loss), OVER_X)(w, XS),
    "jvp_vmap": lambda loss, w, x: jvp(vmap(lambda x: loss(w, x)), (XS,), (WS,)),
}
FORWARD_ALONE = {
    **FORWARD,
    "jvp_no_grad": without_grad_mode(FORWARD["jvp_both"]),
    "forward_ad_of_one": forward_ad_of_one,
    "forward_ad_no_grad": forward_ad_without_grad_mode,
}


def forward_over_reverse(loss, w, x):
    with dual_level():
        value = loss(make_dual(w, V), make_dual(x, V))
        grads = torch.autograd.grad(value, (w, x))
        return parts(value), [parts(g) for g in grads]


def reverse_of_the_value(loss, w, x):
    with dual_level():
        value, _ = parts(loss(make_dual(w, V), x))
        value.backward()
        return w.grad, x.grad


def reverse_over_forward(loss, w, x):
    with dual_level():
        _, tangent = parts(loss(make_dual(w, V), make_dual(x, V)))
        return torch.autograd.grad(tangent, (w, x))


FORWARD_AND_REVERSE = {
    # One evaluation gives the value and its tangent, and one recompute both again.
    **{
        f"backward_{name}": second(then_backward(run), 2, 3)
        for name, run in FORWARD.items()
    },
    "forward_over_reverse": second(at_leaves(forward_over_reverse), 2, 3, exact=True),
    "reverse_of_the_value": Transform(at_leaves(reverse_of_the_value)),
    # Values and tangents have a node each, and each is recomputed.
    # In plain torch the tangents of softmax, logsumexp and layer_norm change in place
    # what their own backward reads, and a backward through them raises.
    "reverse_over_forward": second(
        at_leaves(reverse_over_forward),
        *(3, 5),
        cases=tuple(case for case in ZOO if case not in ("reductions", "network")),
    ),
}
