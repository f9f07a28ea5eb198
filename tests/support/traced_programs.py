"""Programs for compiled code: each takes `wrap` and returns a loss of `w` and `x`.

What is wrapped runs `tanh`, whose result its derivative reads, and nothing else does.
"""

from typing import Any

import torch
from support.traced import block

from remat import checkpoint_name


def plain_block(wrap):
    """Wrapped outside of what is compiled."""
    fn = wrap(block)
    return lambda w, x: fn(w, x).square().sum()


def closure(wrap):
    def loss(w, x):
        fn = wrap(lambda: block(w, x))
        return fn().square().sum()

    return loss


def pytree(wrap):
    def fn(tree, scale):
        y = block(tree["weights"][0], tree["x"])
        return {
            "out": [y * scale],
            "none": None,
            "size": tree["x"].shape[0],
            "name": "y",
        }

    fn = wrap(fn)

    def loss(w, x):
        out = fn({"weights": [w], "x": x}, scale=3.0)
        assert out["none"] is None
        return (out["out"][0] * out["size"]).square().sum()

    return loss


def loop(wrap):
    fn = wrap(block)

    def loss(w, x):
        for _ in range(3):
            x = fn(w, x)
        return x.square().sum()

    return loss


def in_place(wrap):
    """Temporaries that are changed in place."""

    def fn(w, x):
        y = (x @ w).add_(1).mul_(0.5)
        y[1:] = y[1:] * 2
        return torch.tanh(y)

    fn = wrap(fn)
    return lambda w, x: fn(w, x).square().sum()


def named(wrap):
    fn = lambda w, x: torch.tanh(checkpoint_name(torch.tanh(x @ w), "a") @ w)
    fn = wrap(fn)
    return lambda w, x: fn(w, x).square().sum()


def several_results(wrap):
    """One of which nobody uses."""
    fn = lambda w, x: (torch.tanh(x @ w), (x @ w).exp())
    fn = wrap(fn)
    return lambda w, x: fn(w, x)[0].square().sum()


def views(wrap):
    def fn(w, x):
        y = torch.tanh(x @ w)
        return y, y.t(), y[1:]

    fn = wrap(fn)

    def loss(w, x):
        y, turned, rest = fn(w, x)
        return (y * turned.T).sum() + rest.square().sum()

    return loss


def argument_returned(wrap):
    fn = wrap(lambda w, x: (x, torch.tanh(x @ w)))

    def loss(w, x):
        same, y = fn(w, x)
        return (same @ w * y).sum()

    return loss


def branches(wrap):
    """What shapes and constants decide is decided by the trace."""

    def fn(w, x, *, deep):
        y = torch.tanh(x @ w)
        return torch.tanh(y @ w) if deep and x.shape[-1] > 2 else y

    fn = wrap(fn)
    return lambda w, x: fn(w, x, deep=True).square().sum()


def attention(wrap):
    def fn(w, x):
        q = torch.tanh(x @ w).unsqueeze(0)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    fn = wrap(fn)
    return lambda w, x: fn(w, x).square().sum()


def without_gradient(wrap):
    """A part in no_grad, whose results are constants."""

    def fn(w, x):
        with torch.no_grad():
            scale = x.abs().sum()
        return block(w, x) * scale + x.detach()

    fn = wrap(fn)
    return lambda w, x: fn(w, x).square().sum()


def autocast_around(wrap):
    fn = wrap(lambda w, x: block(w.float(), x.float()))

    def loss(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = fn(w, x)
        return y.double().square().sum()

    return loss


def autocast_inside(wrap):
    def fn(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            return block(w.float(), x.float())

    fn = wrap(fn)
    return lambda w, x: fn(w, x).double().square().sum()


def captured_tensor(wrap):
    shift = torch.linspace(-1, 1, 8, dtype=torch.double)
    fn = wrap(lambda w, x: block(w, x + shift))
    return lambda w, x: fn(w, x).square().sum()


PROGRAMS: dict[str, Any] = {
    fn.__name__: fn
    for fn in (
        *(plain_block, closure, pytree, loop, in_place, named, several_results),
        *(views, argument_returned, branches, attention, without_gradient),
        *(captured_tensor, autocast_around, autocast_inside),
    )
}
# Gradients that are sums in another order: of a weight that several calls use, or, in
# second derivatives, of contributions in a short dtype.
REASSOCIATED: dict[str, bool | torch.dtype] = {
    "loop": True,
    "autocast_around": torch.bfloat16,
    "autocast_inside": torch.bfloat16,
}
