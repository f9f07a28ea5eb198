"""torch's checkpoint and that of `remat.compat`, for tests that say the same of both.

A test that takes `checkpoint` runs with each. With torch's it shows that the test says
what torch does; with ours, that we do the same.
"""

import functools

import pytest
import torch
from support.compared import leaf
from torch import nn
from torch.utils import checkpoint as torchs

from remat import compat


theirs = functools.partial(torchs.checkpoint, use_reentrant=False)
ours = functools.partial(compat.checkpoint, use_reentrant=False)
both = pytest.mark.parametrize("checkpoint", [theirs, ours], ids=["torch", "remat"])

their_sequential = functools.partial(torchs.checkpoint_sequential, use_reentrant=False)
both_sequential = pytest.mark.parametrize(
    "sequential",
    [their_sequential, compat.checkpoint_sequential],
    ids=["torch", "remat"],
)
both_modules = pytest.mark.parametrize("api", [torchs, compat], ids=["torch", "remat"])


def wrapped(checkpoint):
    """The checkpoint as a transform of functions."""
    return lambda fn: functools.partial(checkpoint, fn)


# --- What the tests of both compute ---


def sin_exp(x):
    return x.sin().exp()


def slope_of_sin_exp():
    """The gradient of the sum of `sin_exp`, as plain autograd gives it."""
    x = leaf(3)
    return torch.autograd.grad(sin_exp(x).sum(), x)[0]


def derivative(f):
    """Return the function's derivative by `autograd.grad` inside."""

    def g(x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(f(y).sum(), y, create_graph=True)[0]

    return g


class Logged(nn.Module):
    def __init__(self, index, log):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.index, self.log = index, log

    def forward(self, x):
        self.log.note(self.index)
        return self.linear(x).tanh()


def chain(modules, x):
    for module in modules:
        x = module(x)
    return x


KINDS = {
    "Sequential": lambda modules: nn.Sequential(*modules),
    "list": list,
    "ModuleList": nn.ModuleList,
}
