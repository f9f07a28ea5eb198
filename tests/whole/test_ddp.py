"""DistributedDataParallel: two gloo processes on the CPU."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat import remat
from remat.testing import assert_same, count_ops


pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
STEPS = 3


class Block(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        return x + self.wrap(self.branch)(x)

    def branch(self, x):
        return self.inner(x).sin().sin()


def as_it_is(fn):
    return fn


def train(wrap, rank):
    """Take some steps; return gradients, buffers, and how often each got ready."""
    torch.manual_seed(0)
    module = nn.Sequential(Block(wrap), nn.Linear(4, 4), Block(wrap))
    # Small buckets: a parameter that gets ready twice or never shows at once.
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-5)
    ready = dict.fromkeys(dict(module.named_parameters()), 0)

    def count(name):
        def hook(_):
            ready[name] += 1

        return hook

    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(count(name))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with count_ops() as ops:
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            ddp(x.roll(rank)[rank * 4 :][:4]).pow(2).mean().backward()
            optimizer.step()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return grads, dict(module.named_buffers()), ready, ops["sin"]


def work(rank, path):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{path}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        results = [train(as_it_is, rank), train(remat, rank)]
        torch.save(results, f"{path}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_gradients_are_those_of_plain_and_every_parameter_gets_ready_once(tmp_path):
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (grads, buffers, _, sines), (ours, our_buffers, ready, more) in results:
        assert_same(ours, grads)
        assert_same(our_buffers, buffers)
        assert all(g.abs().max() > 0 for g in grads.values())
        assert set(ready.values()) == {STEPS}
        assert (sines, more) == (2 * 2 * STEPS, 2 * 3 * STEPS)
    (_, (first, *_)), (_, (second, *_)) = results
    assert_same(first, second)  # averaged over the processes
