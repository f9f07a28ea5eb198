"""Plans by blocks: bytes are as predicted from the first step on, in any code."""

import copy

import pytest
import torch
from support.allocated import most_allocated
from support.fitted import (
    IDS,
    Lm,
    Mlp,
    ResNet,
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
from support.traced import compiling
from torch import nn

import remat
from remat._scope.following import OfBlock
from remat.testing import assert_same, count_ops


pytest.importorskip("scipy")

LONG = torch.arange(4 * 64).view(4, 64) % 100
IMAGES = torch.randn(4, 3, 32, 32)


def words_of_long(out):
    return nn.functional.cross_entropy(out.flatten(0, -2), LONG.flatten())


class Unequal(nn.Module):
    def __init__(self):
        super().__init__()
        widths = 64, 128, 256, 512, 256, 1024
        self.enter, self.leave = nn.Linear(8, 32), nn.Linear(32, 4)
        self.blocks = nn.Sequential(*(Wide(width) for width in widths))

    def forward(self, x):
        return self.leave(self.blocks(self.enter(x)))


class Wide(Mlp):
    def __init__(self, width):
        super().__init__(32)
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)


class Twice(nn.Module):
    """Calls each block twice, and one of them under two names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mlp(8) for _ in range(3))
        self.again = self.layers[0]

    def forward(self, x):
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.again(x)


# A model, its arguments, its loss; the shares it may take of what a step adds, with the
# FLOPs that are recomputed at most.
ROWS = {
    "a language model": (
        *(lambda: Lm(6, 64, dropout=0.0), (LONG,), words_of_long),
        {0.6: 10.5e6, 0.5: 33.6e6, 0.4: 56.7e6},
    ),
    "dropout": (lambda: Lm(6, 64), (LONG,), words_of_long, {0.6: 6.3e6, 0.4: 56.7e6}),
    "unequal blocks": (
        *(Unequal, (torch.randn(256, 8),), square),
        {0.9: 8.4e6, 0.75: 20e6},
    ),
    "blocks called twice": (
        *(Twice, (torch.randn(256, 8),), square),
        {0.9: 0.27e6, 0.6: 0.92e6},
    ),
    "in place": (ResNet, (IMAGES,), square, {0.9: 0, 0.75: 38.9e6}),
    "in evaluation mode": (
        *(lambda: ResNet().eval(), (IMAGES,), square),
        {0.9: 0, 0.8: 20e6},
    ),
    "several results": (UNet, (torch.randn(2, 3, 32, 32),), square, {0.6: 37.8e6}),
    "a cache": (llama, (IDS,), lambda out: words(out.logits), {0.6: 0.6e6}),
    "modules around blocks": (
        *(staged, (torch.randn(1024, 8),), square),
        {0.4: 92.3e6, 0.3: 256e6},
    ),
}
CASES = [(name, share) for name, row in ROWS.items() for share in row[3]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "share"), CASES)
def test_steps_by_blocks_are_as_predicted(name, share):
    make, args, loss, most = ROWS[name]
    torch.manual_seed(0)
    model = make()
    high = remat.fit(model, *args, budget="1GB", loss=loss, over="blocks")
    budget = int(high.resident + share * (high.peak - high.resident))
    plan = remat.fit(model, *args, budget=budget, loss=loss, over="blocks")
    assert plan.peak <= budget
    assert plan.seconds > 0
    assert plan.recomputed <= most[share]
    assert {*plan.blocks} <= {*remat.nn.blocks(model)}
    real = plan.apply(copy.deepcopy(model))
    for _ in range(3):
        before = bytes_before(real, *args)
        used, _ = most_allocated(step, real, args, {}, loss)
        assert abs(before + used - plan.peak) <= 0.002 * plan.peak
        real.zero_grad()
    # torch counts those of attention, too.
    assert flops_of(real, args, loss) - flops_of(model, args, loss) >= plan.recomputed
    found, expected = (
        gradients(m, lambda m=m: step(m, args, {}, loss)) for m in (real, model)
    )
    assert_same(found, expected)


def flops_of(model, args, loss):
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        step(copy.deepcopy(model), args, {}, loss)
    return counter.get_total_flops()


def test_blocks_follow_decisions_by_place():
    make, args, loss, _ = ROWS["dropout"]
    most = remat.fit(make(), *args, budget="1GB", loss=loss).plain_peak
    plan = remat.fit(make(), *args, budget=int(0.7 * most), loss=loss, over="blocks")
    (name, policy), *_ = plan.applied.units
    assert isinstance(policy, OfBlock)
    assert 0 < sum(policy.placed.saves) < len(policy.placed.saves)
    assert plan.blocks[0] == name


@pytest.mark.parametrize("share", [0.8, 0.6, 0.0])  # 0: the least that there is
def test_a_plan_for_a_step_holds_in_compiled_code(share):
    torch.manual_seed(0)
    model, x = mlps(), torch.randn(256, 8)
    high = remat.fit(model, x, budget="1GB", loss=square)
    with pytest.raises(remat.BudgetError, match=r"least budget") as raised:
        remat.fit(model, x, budget=1, loss=square)
    between = int(high.resident + share * (high.peak - high.resident))
    budget = max(between, raised.value.least)
    plan = remat.fit(model, x, budget=budget, loss=square)
    real = plan.apply(copy.deepcopy(model))
    before = bytes_before(real, x)
    with compiling():
        compiled = torch.compile(real, backend="aot_eager", fullgraph=True)
        with pytest.warns(UserWarning, match=r"cannot be followed in compiled code"):
            step(compiled, (x,), {}, square)
        real.zero_grad()
        used, _ = most_allocated(step, compiled, (x,), {}, square)
        assert before + used <= 1.005 * budget < high.peak
        found = gradients(real, lambda: step(compiled, (x,), {}, square))
    assert_same(found, gradients(model, lambda: step(model, (x,), {}, square)))


def test_nested_blocks_are_recomputed_within_the_outer_ones():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Mlp(16), Mlp(16)) for _ in range(3)))
    x = torch.randn(256, 16, requires_grad=True)
    select = ["*", "*.*"]
    with pytest.raises(remat.BudgetError, match=r"least budget") as raised:
        remat.fit(model, x, loss=square, budget=1, over="blocks", select=select)
    budget = raised.value.least
    options = {"loss": square, "over": "blocks", "select": select}
    plan = remat.fit(model, x, budget=budget, **options)
    real = plan.apply(copy.deepcopy(model))
    used, _ = most_allocated(step, real, (x,), {}, square)
    assert abs(bytes_before(model, x) + used - plan.peak) <= 0.002 * plan.peak
    with count_ops() as ops:
        step(real, (x,), {}, square)
    assert ops["relu"] > 6
