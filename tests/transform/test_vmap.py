"""`torch.func.vmap`: dimensions, batches in batches, chunks, randomness."""

import pytest
import torch
from support.tables import crossed
from support.zoo import (
    WS,
    XS,
    W,
    X,
    assert_rematerialized,
    leaves_of,
    matmul,
    rematerialized,
    scalar,
)
from torch.func import grad, vmap


def backward_through(batched, *tensors):
    """The values and the gradients of `batched` at copies of `tensors`."""
    tensors = leaves_of(*tensors)
    out = batched(*tensors)
    scalar(out).backward()
    return out, [t.grad for t in tensors]


# --- Dimensions ---


@crossed("w_dim, x_dim, out_dim", [0, 1, -1], [0, 1, 2, -1, None], [0, 1, -1])
@rematerialized(matmul, evaluations=2)
def test_any_dimensions(f, w_dim, x_dim, out_dim):
    batched = vmap(f, (w_dim, x_dim), out_dim)
    w = WS.movedim(0, w_dim)
    x = X if x_dim is None else XS.movedim(0, x_dim)
    return backward_through(batched, w, x)


def test_dimensions_of_trees():
    def fn(tree, *, scale):
        h = tree["x"][0] @ tree["w"]
        return {"a": h.sin() * scale, "b": (h.sum(0), h[0, 0])}

    def transform(f):
        def batched(w, x):
            in_dims = ({"w": None, "x": [1, None]},)
            out_dims = {"a": 2, "b": (1, 0)}
            tree = {"w": w, "x": [x, "text"]}
            return vmap(f, in_dims, out_dims)(tree, scale=2.0)

        return backward_through(batched, W, XS.movedim(0, 1))

    assert_rematerialized(transform, fn, evaluations=2)


# --- Randomness ---


def noisy(w, x):
    return (torch.nn.functional.dropout(x @ w, 0.5) + torch.rand(4)).sin()


def batch(f, randomness="error"):
    return backward_through(vmap(f, (None, 0), randomness=randomness), W, XS)


def vmap_grad(f, randomness="error"):
    derivative = grad(lambda w, x: f(w, x).sum())
    return vmap(derivative, (None, 0), randomness=randomness)(W, XS)


def grad_vmap(f, randomness="error"):
    batched = vmap(f, (None, 0), randomness=randomness)
    return grad(lambda w: batched(w, XS).sum())(W)


RANDOM = {"backward_vmap": batch, "vmap_grad": vmap_grad, "grad_vmap": grad_vmap}
random = pytest.mark.parametrize("how", RANDOM)


@pytest.mark.parametrize("randomness", ["same", "different"])
@random
@rematerialized(noisy, evaluations=2)
def test_randomness_is_replayed(f, how, randomness):
    torch.manual_seed(3)
    return RANDOM[how](f, randomness), torch.rand(1)


@random
@rematerialized(noisy, plain=2, evaluations=3)
def test_randomness_is_an_error_unless_asked_for(f, how):
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="called random operation while in rand"):
        RANDOM[how](f)
    return RANDOM[how](f, "same")
