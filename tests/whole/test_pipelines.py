"""Pipelines of rematerialized stages, in two gloo processes, and in four.

Each schedule is trained for three steps plain, with remat and with torch's checkpoint.
Losses and gradients are plain's bit for bit; in a fourth step blocks have run again, as
often as with the checkpoint, and the processes have sent each other what plain's do.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.clients import theirs
from support.processes import (
    STEPS,
    WIDTH,
    Block,
    check_each,
    collectives,
    in_each_way,
    in_processes,
    needs_gloo,
)
from support.zoo import plainly
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from remat import policies, remat
from remat.testing import assert_same, count_ops


pytestmark = needs_gloo

SINGLE = (ScheduleGPipe, Schedule1F1B)
# Each process has two stages.
SEVERAL = (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble)
SCHEDULES = {schedule.__name__: schedule for schedule in (*SINGLE, *SEVERAL)}
MICROBATCHES, ROWS = 4, 8


class Stage(nn.Module):
    """Two blocks, each of which is rematerialized."""

    def __init__(self, wrap):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


def with_policy(fn):
    return remat(fn, policy=policies.dots_saveable)


WRAPS = {"plain": plainly, "remat": remat, "checkpoint": theirs, "policy": with_policy}


def distance(result, target):
    return (result - target).square().mean()


def train(schedule, wrap, rank):
    """Take steps; return losses and gradients, and what runs in one more."""
    count = dist.get_world_size()
    numbers = range(rank, 2 * count if schedule in SEVERAL else rank + 1, count)
    total, cpu = len(numbers) * count, torch.device("cpu")
    stages = []
    for number in numbers:
        torch.manual_seed(number)
        stages.append(PipelineStage(Stage(wrap), number, total, cpu))
    what = stages if schedule in SEVERAL else stages[0]
    pipeline = schedule(what, MICROBATCHES, loss_fn=distance)
    params = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    seen = []
    for step in range(STEPS + 1):
        torch.manual_seed(step)
        x, target = torch.randn(2, ROWS, WIDTH).unbind()
        losses: list[Any] = []
        args = (x,) if rank == 0 else ()
        last = {"target": target, "losses": losses} if rank == count - 1 else {}
        optimizer.zero_grad()
        with count_ops() as ops:
            pipeline.step(*args, **last)
        seen += [copy.deepcopy([p.grad for p in params]), *losses]
        optimizer.step()
    return seen, ops


def train_all(rank):
    return in_each_way(SCHEDULES, WRAPS, lambda *way: train(*way, rank))


def assert_as_plain(name, ways):
    for way, result in ways.items():
        if isinstance(result, str):
            pytest.fail(f"{way}: {result}", pytrace=False)
    (want, once), (_, theirs_ran) = ways["plain"], ways["checkpoint"]
    for way in "remat", "policy":
        got, ops = ways[way]
        assert_same(got, want)
        assert collectives(ops) == collectives(once)
        blocks, again = theirs_ran["sin"], ops["sin"]
        assert once["sin"] < again == blocks, f"{again} sines, the checkpoint {blocks}"
    assert ways["policy"][1]["addmm"] < ways["remat"][1]["addmm"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_pipelines_are_those_of_plain(count, tmp_path, subtests):
    found = in_processes(count, tmp_path, train_all)
    check_each(found, subtests, assert_as_plain)


def a_result(sines, products, sent=1, grad=1.0):
    ops = {"sin": sines, "addmm": products, "c10d::send": sent}
    return [torch.tensor([grad])], ops


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (a_result(1, 3), "1 sines, the checkpoint 2"),
        (a_result(2, 2), "assert 2 < 2"),
        (a_result(2, 3, sent=2), "assert 2 == 1"),
        (a_result(2, 3, grad=1.5), "differs in value"),
        ("Traceback", "remat: Traceback"),
    ],
)
def test_the_comparison_fails_on_what_is_wrong(ours, said):
    ways = {
        "plain": a_result(1, 1),
        "remat": a_result(2, 3),
        "checkpoint": a_result(2, 3),
        "policy": a_result(2, 2),
    }
    assert_as_plain("right", ways)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=said):
        assert_as_plain("wrong", {**ways, "remat": ours})
