"""What tests of several processes share: models, styles, a training, the processes."""

import os
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from remat.testing import assert_same, count_ops


STEPS, BLOCKS, WIDTH = 3, 3, 8
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)


# --- What is trained ---


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


class Block(nn.Module):
    """A residual block; `call` is what its forward does with its feed-forward part."""

    def __init__(self, call=lambda self, x: self.mlp(x), dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        layers = nn.Linear(WIDTH, 16), Sine(), nn.Linear(16, WIDTH)
        self.mlp = nn.Sequential(*layers, nn.Dropout(dropout))
        self.call = call

    def forward(self, x):
        return x + self.call(self, self.norm(x))

    def branch(self, x):
        return self.mlp(x)


class Model(nn.Module):
    """Blocks between two layers; `call` is what its forward does with each block."""

    def __init__(self, blocks, call=lambda block, x: block(x)):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def blocks_of(block, call=lambda block, x: block(x)):
    """A model whose blocks `block` makes."""
    return Model([block() for _ in range(BLOCKS)], call)


def inside(wrap, **options):
    """`forward` calls `remat(self.mlp)`."""
    return blocks_of(lambda: Block(lambda self, x: wrap(self.mlp)(x), **options))


def method(wrap):
    """`forward` calls `remat(self.branch)`."""
    return blocks_of(lambda: Block(lambda self, x: wrap(self.branch)(x)))


def decorated(wrap):
    """`forward` itself is decorated, in the class."""

    class Decorated(Block):
        forward = wrap(Block.forward)

    return blocks_of(Decorated)


def replaced(wrap):
    """`block.forward = remat(block.forward)`."""
    model = blocks_of(Block)
    for block in model.blocks:
        block.forward = wrap(block.forward)
    return model


def called(wrap, block=Block):
    """The parent calls `remat(block)`."""
    return blocks_of(block, lambda block, x: wrap(block)(x))


STYLES = {
    "inside": inside,
    "method": method,
    "decorated": decorated,
    "replaced": replaced,
    "called": called,
}


# --- Arrangements: each makes a model, given how it is changed ---


def sharded(build, **options):
    """FSDP2: shard each block, and what is around them."""

    def make(*way):
        model = build(*way)
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return make


def only_root(build):
    return lambda *way: fully_shard(build(*way))


def replicated(build, **options):
    # Small buckets: a parameter that gets ready twice or never shows at once.
    options = {"bucket_cap_mb": 1e-5, **options}
    return lambda *way: DistributedDataParallel(build(*way), **options)


# --- One training ---


def inputs(rank, step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator).roll(3 * rank, 0)[:4]


def local(t):
    """The numbers that this process has of a tensor."""
    if t is None:
        return "no gradient"
    return (t.to_local() if isinstance(t, DTensor) else t).detach().clone()


def one_batch(model, rank, step):
    model(inputs(rank, step)).square().mean().backward()


def train(model, rank, batch=one_batch):
    """Take steps; return what they did, and what runs in one more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch(model, rank, step)
        grads.append([local(p.grad) for p in model.parameters()])
        optimizer.step()
    with count_ops() as ops:
        batch(model, rank, STEPS)
    return {
        "gradients": grads,
        "parameters": [local(p) for p in model.parameters()],
        "buffers": [local(b) for b in model.buffers()],
        "stream": torch.rand(2),
    }, ops


# --- The comparison ---


def in_each_way(arrangements, ways, run):
    """Run each arrangement in each way, by name; of what fails, return where."""
    results: dict[Any, Any] = {}
    for name, arrangement in arrangements.items():
        for way, wrap in ways.items():
            torch.manual_seed(0)
            try:
                results[name, way] = run(arrangement, wrap)
            except Exception:  # noqa: BLE001
                results[name, way] = traceback.format_exc()
            dist.barrier()
    return results


def check_each(found, subtests, check):
    """Check what each process found of each arrangement in all ways."""
    for rank, results in enumerate(found):
        for name in dict.fromkeys(name for name, _ in results):
            with subtests.test(name, rank=rank):
                check(name, {way: r for (n, way), r in results.items() if n == name})


def talks(ops):
    """What the processes sent each other, by operation."""
    local = ("wait_tensor", "_wrap_tensor_autograd")
    found = {name: n for name, n in ops.items() if "c10d" in name}
    return Counter({name: n for name, n in found.items() if not name.endswith(local)})


def collectives(ops):
    """How often the processes talked."""
    return talks(ops).total()


def assert_as_plain(name, ways):
    for way, result in ways.items():
        if isinstance(result, str):
            pytest.fail(f"{way}: {result}", pytrace=False)
    (want, ops), (got, more), (_, of_checkpoint) = ways.values()
    assert_same(got, want)
    zero = [g for g in want["gradients"][-1] if torch.is_tensor(g) and g.numel()]
    assert any(g.any() for g in zero)
    # A linear layer is unused, and so is another in one process.
    assert sum(not g.any() for g in zero) <= 4 * BLOCKS * (name == "unused")
    sines, again = ops["sin"], more["sin"] - ops["sin"]
    assert again == sines > 0, f"{again} of {sines} sines run again"
    talked, allowed = collectives(more), collectives(of_checkpoint)
    assert talked <= allowed, f"{talked} collectives, {allowed} with the checkpoint"


# --- Processes ---


def work(
    rank: int, path: str, count: int, task: Callable[..., Any], *args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{path}/store", count)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timeout
    )
    try:
        torch.save(task(*args, rank), f"{path}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def in_processes(
    count: int, path: Any, task: Callable[..., Any], *args: Any
) -> list[Any]:
    """Run `task(*args, rank)` in processes that make a group; return the results."""
    mp.spawn(work, args=(str(path), count, task, *args), nprocs=count)
    return [torch.load(path / f"{r}.pt", weights_only=False) for r in range(count)]


def in_two_processes(path: Any, task: Callable[..., Any], *args: Any) -> list[Any]:
    return in_processes(2, path, task, *args)
