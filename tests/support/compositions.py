"""Every way to differentiate that the tests of compositions run: pairs, and orders.

How often the function is evaluated follows one rule. Where a backward is a call, as
under torch.func, each derivative recomputes once the calls before it whose values it
reads: a forward and its backward are evaluated, and both again. At base the graph of a
backward is plain's, and each backward recomputes the forward. Forward mode alone stores
nothing, and recomputes nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.first_order import (
    BASE,
    BATCHES,
    BOTH,
    FORWARD_ALONE,
    FORWARD_AND_REVERSE,
    GRADS,
    OVER_W,
    OVER_X,
    VJPS,
    at_leaves,
    then_backward,
)
from support.transforms import TRANSFORMS, Transform, forward, second, some
from support.zoo import WS, XS, V, W, X, assert_rematerialized, leaves_of, scalar
from torch import Tensor
from torch.autograd import functional
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import remat


# --- Batches of derivatives, derivatives of batches ---


def vmap_grad_vmap(loss, w, x):
    over_weights = lambda w, x: scalar(vmap(loss, OVER_W)(w, x))
    return vmap(grad(over_weights, BOTH), OVER_X)(WS, XS)


def vmap_vjp(loss, w, x):
    def of_one(w, x):
        value, pull = vjp(loss, w, x)
        return value, pull(value)

    return vmap(of_one, OVER_X)(w, XS)


def vjp_vmap(loss, w, x):
    values, pull = vjp(vmap(loss, OVER_X), w, XS)
    return values, pull(values)


LAYOUTS = {
    "contiguous": XS,
    "expanded": X.expand(3, 4, 4),
    "last": XS.movedim(0, -1).contiguous().movedim(-1, 0),
    "transposed": XS.mT,
}


def per_example(xs):
    run = lambda loss, w, x: vmap(grad_and_value(loss, BOTH), OVER_X)(w, xs)
    return Transform(run, batched=True)


OF_BATCHES = {
    **{f"vmap_grad_{layout}": per_example(xs) for layout, xs in LAYOUTS.items()},
    "vmap_grad_weights": Transform(
        lambda loss, w, x: vmap(grad(loss, BOTH), OVER_W)(WS, x), batched=True
    ),
    "vmap_vmap_grad": Transform(
        lambda loss, w, x: vmap(vmap(grad(loss, BOTH), OVER_W), OVER_X, 1)(WS, XS),
        batched=True,
    ),
    "vmap_grad_vmap": Transform(vmap_grad_vmap, batched=True),
    "vmap_vjp": Transform(vmap_vjp, batched=True),
    "vjp_vmap": Transform(vjp_vmap, batched=True, spared=1),
    "jacrev_of_a_batch": Transform(
        lambda loss, w, x: jacrev(vmap(loss, OVER_X), BOTH)(w, XS), batched=True
    ),
    "vmap_grad_in_chunks": Transform(
        lambda loss, w, x: vmap(grad(loss, BOTH), OVER_X, chunk_size=3)(w, XS),
        batched=True,
    ),
}


# --- Second order ---


def grad_of_vjp(loss, w, x):
    def of_pull(w, x):
        value, pull = vjp(loss, w, x)
        return scalar(pull(value))

    return grad(of_pull, BOTH)(w, x)


def grad_of_autograd(loss, w, x):
    """A penalty on the gradient, computed by plain autograd within a level."""

    def penalty(w):
        h = w * 1
        (first,) = torch.autograd.grad(loss(h, x), h, create_graph=True)
        return first.sin().sum()

    return grad(penalty)(w)


def vmap_grad_grad(loss, w, x):
    second = grad(lambda w, x: scalar(grad(loss, BOTH)(w, x)), BOTH)
    return vmap(second, OVER_X)(w, XS)


def grad_vmap_grad(loss, w, x):
    """A penalty on gradients per example."""
    return grad(lambda w: scalar(vmap(grad(loss, 1), OVER_X)(w, XS)))(w)


def backward_vmap_grad(loss, w, x):
    w, xs = leaves_of(w, XS)
    scalar(vmap(grad(loss, BOTH), OVER_X)(w, xs)).backward()
    return w.grad, xs.grad


def vmap_jvp_grad(loss, w, x):
    return vmap(lambda x: jvp(lambda w: grad(loss)(w, x), (w,), (V,)))(XS)


def grad_vmap_jvp(loss, w, x):
    return grad(lambda w: scalar(vmap(lambda x: jvp(loss, (w, x), (V, x)))(XS)))(w)


SECOND = {
    # What the backward by a cotangent reads, the first backward has recomputed. With
    # calls: it differentiates the backward by its cotangent alone, not the forward.
    "double_backward_trick": second(
        at_leaves(lambda loss, w, x: functional.jvp(loss, (w, x), (V, V))),
        *(3, 6),
        backwards=1,
    ),
    # That trick applied to the first two calls: they are differentiated, by calls, and
    # those by their cotangents.
    "hvp": second(
        at_leaves(lambda loss, w, x: functional.hvp(loss, (w, x), (V, V))),
        *(6, 15),
        backwards=2,
    ),
    "grad_of_vjp": second(grad_of_vjp),
    "grad_of_autograd": second(grad_of_autograd),
    "jacfwd_jacfwd": forward(
        lambda loss, w, x: jacfwd(jacfwd(loss, BOTH), BOTH)(w, x), order=2
    ),
    "vmap_grad_grad": second(vmap_grad_grad),
    "grad_vmap_grad": second(grad_vmap_grad),
    "backward_vmap_grad": second(backward_vmap_grad, spared=1),
    "vmap_jvp_grad": second(vmap_jvp_grad, 2, 3),
    "grad_vmap_jvp": second(grad_vmap_jvp, 2, 3),
    "vmap_jacrev_jacrev": second(
        lambda loss, w, x: vmap(jacrev(jacrev(loss)), OVER_X)(w, XS)
    ),
}


# --- Third order ---


def autograd_thrice(loss, w, x):
    value = loss(w, x)
    for _ in range(3):
        grads = torch.autograd.grad(value, (w, x), create_graph=True)
        value = scalar(grads)
    return [g.detach() for g in grads]


def grad_of_grad(loss, w, x):
    return grad(lambda w: scalar(grad(loss)(w, x)))(w)


def grad_thrice(loss, w, x):
    return grad(lambda w: scalar(grad_of_grad(loss, w, x)))(w)


def jvp_of_grad_of_grad(loss, w, x):
    return jvp(lambda w: grad_of_grad(loss, w, x), (w,), (V,))


def third(run, evaluations=8, nested=20, **row):
    return Transform(run, order=3, evaluations=evaluations, nested=nested, **row)


# Each order of reverse mode recomputes each of the calls before it once: 2^3. That of
# the gradient is left out where the result is a Hessian, which does not depend on the
# gradient. Forward mode recomputes nothing.
THIRD = {
    "autograd_thrice": third(at_leaves(autograd_thrice), backwards=3),
    "grad_thrice": third(grad_thrice),
    "jvp_of_grad_of_grad": third(jvp_of_grad_of_grad, 4, 8),
    "backward_of_hessian": third(
        then_backward(lambda loss, w, x: hessian(loss)(w, x)), 4, 8
    ),
    "backward_of_jacrev_jacrev": third(
        then_backward(lambda loss, w, x: jacrev(jacrev(loss))(w, x)), 7, 17, spared=4
    ),
    "backward_of_jacfwd_jacfwd": third(
        then_backward(lambda loss, w, x: jacfwd(jacfwd(loss))(w, x)), 2, 3
    ),
}


# Those of the table for all tests whose kind is not below.
SHARED = some(
    *("of_one", "batched_cotangents", "grad_and_value", "duals", "vmap_grad_of_last"),
    *("grad_vmap_of_last", "twice_grad", "jvp_grad", "grad_jvp", "jacrev_jacfwd"),
    *("jacfwd_jacrev", "vmap_hessian"),
)
EVERY = {
    **TRANSFORMS,
    **SHARED,
    **BASE,
    **BATCHES,
    **GRADS,
    **VJPS,
    **{name: forward(run) for name, run in FORWARD_ALONE.items()},
    **FORWARD_AND_REVERSE,
    **OF_BATCHES,
    **SECOND,
    **THIRD,
}


# --- The comparison ---


higher_order = partial(remat, higher_order=True)


def tensors_of(tree: Any) -> Any:
    """The tensors that have derivatives, as `vjp` wants nothing else."""
    if isinstance(tree, dict):
        return {k: tensors_of(v) for k, v in tree.items() if k != "i"}
    if isinstance(tree, list | tuple):
        return [tensors_of(t) for t in tree if isinstance(t, Tensor)]
    return tree


def result_of(transform: Transform, fn: Callable[..., Any], call: Any) -> Any:
    """What a transform makes of a function, with a backward if it stores nothing."""
    reduce = tensors_of if transform.of_outputs else scalar
    loss = lambda w, x: reduce(call(fn, w, x))
    result = transform(loss, W, X)
    if transform.stores_nothing:
        return result, TRANSFORMS["backward"](loss, W, X)
    return result


def evaluations_of(
    transform: Transform, *, saves: bool = True, nested: bool = False, calls: bool
) -> int:
    """How often a function is evaluated.

    Args:
        transform: the way to differentiate.
        saves: whether its graph saves anything that a backward of base could read.
        nested: whether it is rematerialized twice.
        calls: whether each backward is a call at base, too.
    """
    if transform.at_base and not calls:
        # The outer call does nothing but to call the inner one, on its own inputs.
        return transform.plain + saves * transform.backwards
    if transform.stores_nothing:
        return transform.plain + 1 + saves
    if nested:
        return transform.nested - (0 if saves or calls else transform.spared)
    return transform.evaluations


def assert_derivatives(
    how: str,
    fn: Callable[..., Any],
    call: Callable[..., Any],
    *,
    calls: bool = False,
    reassociated: bool = False,
    **which: bool,
) -> None:
    """`call(fn, w, x)` has the same derivatives with `fn` rematerialized.

    At base the graph of a backward is plain's. Elsewhere w and x are inputs of both a
    forward and its backward, and each call adds up its own contributions.
    """
    transform = EVERY[how]
    wrap = higher_order if calls else remat
    in_calls = transform.reassociated and (calls or not transform.at_base)
    assert_rematerialized(
        lambda f: result_of(transform, f, call),
        fn,
        plain=transform.plain + transform.stores_nothing,
        evaluations=evaluations_of(transform, calls=calls, **which),
        reassociated=reassociated or in_calls,
        wrap=(lambda fn: wrap(wrap(fn))) if which.get("nested") else wrap,
    )
