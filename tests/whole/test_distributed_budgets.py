"""Budgets hold for replicas: DistributedDataParallel, in one process and in two."""

import copy

import pytest
import torch
from support.allocated import most_allocated
from support.fitted import Mlp, bytes_before, square
from support.processes import in_processes, needs_gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.testing import assert_same


pytestmark = [needs_gloo, pytest.mark.slow]


def built():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Mlp(32) for _ in range(5)))
    return nn.Sequential(nn.Linear(8, 32), blocks, nn.Linear(32, 4))


def replicated(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def plan_for(model, **options):
    """Plan for gradients that are there, as the buckets of replicas are."""
    options = {"loss": square, "accumulates": True, **options}
    x = torch.randn(256, 8)
    most = remat.fit(model, x, budget="1GB", **options).plain_peak
    return remat.fit(model, x, budget=int(0.75 * most), **options)


def first_applied(plan):
    return plan, replicated(plan.apply(built()))


def then_applied(plan):
    return plan, plan.apply(replicated(built()))


def planned_as_replica(plan):
    plan = plan_for(replicated(built()))
    return plan, plan.apply(replicated(built()))


def by_blocks(_):
    plan = plan_for(replicated(built()), over="blocks")
    return plan, plan.apply(replicated(built()))


WAYS = first_applied, then_applied, planned_as_replica, by_blocks


def steps(model, rank):
    """Run four steps; return their peaks, buckets included, and gradients."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(rank))
    held = sum(p.nbytes for p in model.parameters())
    peaks, grads = [], []
    for _ in range(4):
        before = bytes_before(model, x) + held
        most, _ = most_allocated(lambda: square(model(x)).backward())
        peaks.append(before + most)
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return peaks, grads


def in_each_way(plan, rank):
    of_plain, want = steps(replicated(built()), rank)
    found = {}
    for way in WAYS:
        planned, model = way(copy.deepcopy(plan))
        peaks, got = steps(model, rank)
        assert_same(got, want)
        found[way.__name__] = planned.budget, max(peaks), max(of_plain)
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_replicas_stay_in_the_budget(count, tmp_path):
    plan = plan_for(built())
    for found in in_processes(count, tmp_path, in_each_way, plan):
        for way, (budget, peak, of_plain) in found.items():
            assert peak <= 1.01 * budget < of_plain, way
