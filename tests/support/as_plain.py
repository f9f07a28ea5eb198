"""What tests share that compare graphs and training with those of plain code."""

import torch
from support.zoo import make
from torch import nn


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

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.weights = self.inner(x).softmax(-1)
        self.loss = self.weights.square().mean()
        return (self.weights * x).tanh()
