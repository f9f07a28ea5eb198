"""Plans for steps under `torch.func.grad`, which keeps the graph until it ends."""

import copy

import pytest
import torch
from support.allocated import most_allocated
from support.fitted import (
    IDS,
    Lm,
    UNet,
    bytes_before,
    gradients,
    llama,
    mlps,
    square,
    staged,
    step,
    words,
)
from support.runs import assert_same
from support.tables import rows
from torch import func, nn

import remat
from remat.testing import count_ops


OVER = {"over": "functional"}
X = torch.randn(256, 8)


def grad(model, x, loss):
    """Return the gradients by the parameters of a model, by name."""
    given = {name: p.detach() for name, p in model.named_parameters()}
    return func.grad(lambda ps: loss(func.functional_call(model, ps, (x,))))(given)


def grad_and_value(model, x, loss):
    given = {name: p.detach() for name, p in model.named_parameters()}

    def value(given):
        return loss(func.functional_call(model, given, (x,)))

    return func.grad_and_value(value)(given)[0]


def flops_of(model):
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        grad(model, X, square)
    return counter.get_total_flops()


def range_of(model, x, loss):
    """Return the least budget, and the peak of the step as it is."""
    most = remat.fit(model, x, loss=loss, budget="1GB", **OVER).plain_peak
    with pytest.raises(remat.BudgetError, match=r"The least budget") as raised:
        remat.fit(model, x, loss=loss, budget=1, **OVER)
    return raised.value.least, most


ROWS = {
    "mlps": (mlps, X, square),
    "lm": (lambda: Lm(dropout=0.0), IDS, words),
    "tied lm": (lambda: Lm(dropout=0.0, tied=True), IDS, words),
    "unet": (UNet, torch.randn(2, 3, 32, 32), square),
    "modules around blocks": (staged, X, square),
    "llama": (llama, IDS, lambda out: words(out.logits)),
}


@rows("make, x, loss", ROWS, fast=("mlps",))
def test_the_budget_holds_under_grad(make, x, loss):
    """In the first step, too; and no budget between is far from used."""
    torch.manual_seed(0)
    model = make()
    least, most = range_of(model, x, loss)
    assert least < 0.6 * most
    wanted, work = grad(model, x, loss), []
    for share in 0.7, 0.3, 0.0:
        budget = int(least + share * (most - least))
        plan = remat.fit(model, x, loss=loss, budget=budget, **OVER)
        assert 0.7 * budget < plan.peak <= budget
        work.append(plan.recomputed)
        real = plan.apply(copy.deepcopy(model))
        for call in grad, grad, grad_and_value:
            before = bytes_before(real, x)
            used, found = most_allocated(call, real, x, loss)
            assert 0.98 * plan.peak <= before + used <= 1.001 * plan.peak
            assert_same(found, wanted, reassociated=True)
    assert 0 < work[0] < work[1] < work[2]


def test_blocks_are_recomputed_as_a_whole():
    model = mlps()
    least, most = range_of(model, X, square)
    budget = (least + 2 * most) // 3
    plan = remat.fit(model, X, loss=square, budget=budget, **OVER)
    names = [name for name, _ in plan.applied.units]
    assert 0 < len(names) < 6
    assert plan.blocks == tuple(names)
    real = plan.apply(copy.deepcopy(model))
    with count_ops() as ops:
        grad(real, X, square)
    assert ops["relu"] == 6 + len(names)
    assert flops_of(real) - flops_of(model) == plan.recomputed
    assert plan.over == "functional"
    found = gradients(real, lambda: step(real, (X,), {}, square))
    assert_same(found, gradients(model, lambda: step(model, (X,), {}, square)))


def test_the_least_budget_runs_the_model_again_as_a_whole():
    """What is in one call is freed as in a backward without torch.func."""
    model = mlps()
    least, _ = range_of(model, X, square)
    plan = remat.fit(model, X, loss=square, budget=least, **OVER)
    assert plan.applied.units[0] == ("", None)
    real = plan.apply(copy.deepcopy(model))
    with count_ops() as ops:
        grad(real, X, square)
    assert ops["relu"] == 12 + len(plan.applied.units) - 1 > 12
    assert flops_of(real) - flops_of(model) == plan.recomputed


def test_per_sample_gradients_are_right():
    model = mlps()
    least, _ = range_of(model, X, square)
    plan = remat.fit(model, X, loss=square, budget=least, **OVER)
    real = plan.apply(copy.deepcopy(model))

    def each(model):
        given = {name: p.detach() for name, p in model.named_parameters()}

        def loss(given, x):
            return square(func.functional_call(model, given, (x,)))

        return func.vmap(func.grad(loss), (None, 0))(given, X[:4])

    with count_ops() as ops:
        found = each(real)
    assert ops["relu"] == 12 + len(plan.applied.units) - 1
    assert_same(found, each(model), reassociated=True)


def test_what_does_not_run_under_torch_func_says_so():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
    )
    with pytest.raises(RuntimeError, match=r"running_mean|in-place"):
        remat.fit(model, X, loss=square, budget="1MB", select="*", **OVER)


class Turned(nn.Module):
    """Blocks that share tensors which are computed once, as layers of llama do."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, turn, at):
            return x + (self.linear(x).tanh() * turn[at]).sin()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(4)])

    def forward(self, at):
        x, turn = at.expand(256, 8).sin(), at.cos()
        for block in self.blocks:
            x = block(x, turn, at)
        return x


def test_integers_that_blocks_share_leave_others_as_they_are():
    """Marks are set on them in planning, and taken off: not what fake tensors have."""
    model, at = Turned(), torch.arange(8)
    least, most = range_of(model, at, square)
    wanted = grad(model, at, square)
    remat.fit(model, at, loss=square, budget=(least + most) // 2, **OVER).apply(model)
    with count_ops() as ops:
        assert_same(grad(model, at, square), wanted)
    assert ops["tanh"] > 4
