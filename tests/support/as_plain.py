"""One comparison: a program as plain code, and with a function in it rematerialized."""

import torch
from support.zoo import Evaluations, assert_not_vanishing, make, plainly
from torch import nn

from remat import remat
from remat.testing import assert_same


def assert_as_plain(program, *, evaluations=2, plain=1, wrap=remat):
    """`program(wrap, note)` gives the same for a function and for its remat."""
    results, counts = [], []
    for how in (plainly, wrap):
        notes = Evaluations()
        torch.manual_seed(0)
        results.append(program(how, notes.note))
        counts.append(len(notes))
    expected, actual = results
    assert_same(actual, expected)
    assert_not_vanishing(expected)
    assert counts == [plain, evaluations], f"{counts} evaluations"


def assert_recomputed(run, plain, ours, wrap=remat):
    """`run(wrap)` gives the values of plain, and how often something ran, say."""
    expected, once = run(plainly)
    found, again = run(wrap)
    assert_same(found, expected)
    assert (once, again) == (plain, ours), f"{once} and {again} times"


def leaf(seed=1, shape=(4, 4)):
    return make(*shape, seed=seed).requires_grad_()


def grads(*leaves):
    return [t.grad for t in leaves]


def trained(model, x, call):
    """Return what three steps of an optimizer make of the parameters of a model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.detach().clone() for p in model.parameters()]


class Router(nn.Module):
    """Leaves a loss, and the attention, on itself."""

    def __init__(self, note):
        super().__init__()
        self.inner, self.note = nn.Linear(4, 4), note

    def forward(self, x):
        self.note(None)
        self.weights = self.inner(x).softmax(-1)
        self.loss = self.weights.square().mean()
        return (self.weights * x).tanh()
