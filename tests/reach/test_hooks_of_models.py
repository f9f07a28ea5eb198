"""Hooks that hold the whole model, on a block that is a call of its own."""

import sys

import torch
from torch import nn

from remat import remat
from remat.testing import count_ops


class Trainer:
    def __init__(self, count):
        self.step, self.model = (
            0,
            nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)
            ),
        )
        for block in self.model:
            block[0].register_forward_hook(self.scaled)

    def scaled(self, _module, _args, out):
        return out * (1 + self.step)


def calls_of_a_step(count):
    """The calls in Python of the first block's forward and backward."""
    trainer = Trainer(count)
    block, x, calls = remat(trainer.model[0]), torch.ones(2, 4), []

    def step():
        block(x).sum().backward()

    step()
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(lambda _frame, event, _arg: calls.append(event))
        try:
            step()
        finally:
            sys.setprofile(None)
    return calls.count("call")


def test_a_call_costs_as_much_beside_many_blocks_as_beside_few():
    assert calls_of_a_step(64) <= 1.05 * calls_of_a_step(2)


def test_what_the_model_beside_holds_is_as_it_was_at_the_call():
    grads, counts = [], []
    for wrap in (lambda fn: fn, remat):
        torch.manual_seed(0)
        trainer = Trainer(3)
        block, x = trainer.model[0], torch.linspace(0, 1, 4)
        with count_ops() as ops:
            out = wrap(block)(x)
            trainer.step = 5
            out.sum().backward()
        grads.append([p.grad for p in block.parameters()])
        counts.append(ops["tanh"])
    assert counts == [1, 2]
    assert all(map(torch.equal, *grads))
