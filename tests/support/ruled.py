"""Functions with rules, and kept ones; how often each part of them has run."""

from collections import Counter

import torch
from support.zoo import Evaluations, make
from torch import nn

from remat import custom_vjp, keep


_RUNS = Evaluations()
ran = _RUNS.note  # with the part that runs: "fn", "fwd", "rem" or "bwd"


def runs():
    """How often each part has run since this was asked."""
    return dict(Counter(_RUNS))


def pair(w, x):
    """A function of two matrices, with two results."""
    return torch.tanh(x @ w) * x.sin(), w.cos()


def fwd(w, x):
    ran("fwd")
    h = torch.tanh(x @ w)
    return (h * x.sin(), w.cos()), {"h": h, "args": (w, x)}


def rem(res, w, x):
    ran("rem")
    return (res["h"] * x.sin(), w.cos()), {"h": res["h"], "args": (w, x)}


def bwd(res, cotangents):
    ran("bwd")
    (h, (w, x)), (first, second) = (res["h"], res["args"]), cotangents
    inner = first * x.sin() * (1 - h * h)
    return x.mT @ inner - second * w.sin(), inner @ w.mT + first * h * x.cos()


def ruled(*, vjp=None, remat=None):
    """`pair` with rules."""
    fn = custom_vjp(pair)
    if vjp is not None:
        fn.defvjp(*vjp)
    if remat is not None:
        fn.defremat(*remat)
    return fn


def counted_pair(w, x):
    ran("fn")
    return pair(w, x)


class Scaled(nn.Module):
    """A module with a parameter, to be kept."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(make(4, 4, seed=7))

    def forward(self, w, x):
        ran("fn")
        return torch.tanh(x @ w) * self.weight.sin(), x.cos()


SCALED = Scaled()


def calls_itself():
    """`pair`, whose `fwd` calls it for its result, as those of JAX's pages do."""
    fn = ruled(vjp=(lambda w, x: (fn(w, x), fwd(w, x)[1]), bwd))
    return fn


# Each with the function that it is to be equal to.
FUNCTIONS = {
    "defremat": (ruled(remat=(fwd, rem, bwd)), pair),
    "defvjp": (ruled(vjp=(fwd, bwd)), pair),
    "both": (ruled(vjp=(fwd, bwd), remat=(fwd, rem, bwd)), pair),
    "without rem": (ruled(remat=(fwd, None, bwd)), pair),
    "calls itself": (calls_itself(), pair),
    "kept": (keep(counted_pair), pair),
    "kept module": (keep(SCALED), SCALED),
}


def body_of(fn):
    """A function that computes what `fn` is given, and reads all that it returns."""

    def body(w, x):
        first, second = fn(w * 1.5, x)
        return (first * x).exp() + second.sin()

    return body
