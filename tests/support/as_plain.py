"""What tests share that compare graphs and training with those of plain code."""

from support.zoo import make
from torch import nn


def leaf(seed=1, shape=(4, 4)):
    return make(*shape, seed=seed).requires_grad_()


class Router(nn.Module):
    """Leaves a loss, and the attention, on itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.weights = self.inner(x).softmax(-1)
        self.loss = self.weights.square().mean()
        return (self.weights * x).tanh()
