"""Compiled code of several processes: DDP, tensor parallel, DTensors, collectives.

Gradients are those of the same code without remat and uncompiled. What is recomputed is
counted by the profiler: under a mode that counts, Dynamo compiles nothing.
"""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
from support.processes import in_two_processes, local, needs_gloo
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import remat
from remat import policies
from remat.testing import assert_same


pytestmark = [
    needs_gloo,
    # Dynamo warns of its own deprecations.
    pytest.mark.filterwarnings("default"),
]


# --- Steps: each returns gradients, for a wrapper and a compiler ---


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).tanh()).tanh()


def blocks(is_rematerialized):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    return remat.nn.apply(model, Block) if is_rematerialized else model


def gradients(model, call, rank):
    x = torch.linspace(-1, 1, 12).view(3, 4) + rank
    call(x).square().sum().backward()
    return [local(p.grad) for p in model.parameters()]


def ddp(is_rematerialized, compiled, rank):
    model = DistributedDataParallel(blocks(is_rematerialized))
    return gradients(model, compiled(model), rank)


def parallel(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (2,))
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def tensor_parallel(is_rematerialized, compiled, rank, kind=Block):
    torch.manual_seed(0)
    model = parallel(nn.Sequential(kind(), kind()))
    if is_rematerialized:
        remat.nn.apply(model, kind)
    return gradients(model, compiled(model), 0)


class Residual(Block):
    """The backward reads nothing of its last collective."""

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def tensor_parallel_residual(is_rematerialized, compiled, rank):
    return tensor_parallel(is_rematerialized, compiled, rank, Residual)


def titan(is_rematerialized, compiled, rank):
    """Tensor parallel, then remat, then compiled by block, then FSDP2."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallel(nn.Sequential(Residual(), Residual()), mesh["tensor"])
    if is_rematerialized:
        remat.nn.apply(model, Residual)
    calls = [compiled(block) for block in model]
    for block in model:
        fully_shard(block, mesh=mesh["data"])
    return gradients(model, lambda x: calls[1](calls[0](x)), 0)


def block(w, x):
    return torch.tanh(torch.tanh(x @ w) @ w)


def gathered(w, x):
    y = functional.all_gather_single_autograd(torch.tanh(x @ w), 0, dist.group.WORLD)
    return torch.tanh(y @ w)


def of_function(fn, policy=None, *, are_dtensors=False):
    def step(is_rematerialized, compiled, rank):
        f = remat.remat(fn, policy=policy) if is_rematerialized else fn
        torch.manual_seed(0)
        w, x = torch.randn(4, 4), torch.ones(3, 4)
        if are_dtensors:
            mesh = init_device_mesh("cpu", (2,))
            w = distribute_tensor(w, mesh, [Shard(0)])
            x = distribute_tensor(x, mesh, [Replicate()])
        w = w.detach().requires_grad_()
        compiled(lambda w, x: f(w, x).square().sum())(w, x).backward()
        return [local(w.grad)]

    return step


# The step, and how many collectives more than plain compiled code it runs.
STEPS = {
    "DDP": (ddp, 0),
    "tensor parallel": (tensor_parallel, 2),  # as with torch's checkpoint
    "tensor parallel, residual": (tensor_parallel_residual, 0),
    "tensor parallel by block, FSDP2": (titan, 0),
    "DTensors": (of_function(block, are_dtensors=True), 2),
    "DTensors, dots": (
        of_function(block, policies.dots_saveable, are_dtensors=True),
        2,
    ),
    "collective": (of_function(gathered), 1),
    "collective saved": (of_function(gathered, policies.save_collectives), 0),
}
SENT = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"


def counted(step, *args):
    """What a step returns the second time, and how often what runs is called."""
    step(*args)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        result = step(*args)
    names = [e.name for e in found.events()]
    sent = [f"_c10d_functional::{name}" for name in SENT]
    return result, names.count("aten::tanh"), sum(names.count(name) for name in sent)


def run_all(rank):
    # A class that remat makes ends with its modules, if the collector runs between two
    # steps. With another class the second one is compiled again.
    gc.disable()
    results = {}
    for name, (step, _) in STEPS.items():
        for is_rematerialized in (False, True):
            for compiles in (False, True):
                torch._dynamo.reset()
                compiled = compiled_eagerly if compiles else (lambda fn: fn)
                way = is_rematerialized, compiles
                results[name, *way] = counted(step, is_rematerialized, compiled, rank)
    return results


compiled_eagerly = functools.partial(torch.compile, backend="aot_eager")


@pytest.mark.slow
def test_compiled_code_recomputes_in_each_process(tmp_path, subtests):
    for rank, results in enumerate(in_two_processes(tmp_path, run_all)):
        for name, (_, more) in STEPS.items():
            with subtests.test(name, rank=rank):
                want = results[name, False, False][0]
                assert all(g.any() for g in want)
                for way in (False, True), (True, False), (True, True):
                    assert_same(results[name, *way][0], want)
                _, once, sent = results[name, False, True]
                assert results[name, True, True][1:] == (2 * once, sent + more)
                assert once > 0
