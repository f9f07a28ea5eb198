"""Two gloo processes on the CPU, or four: FSDP2, DDP and tensor parallel.

Each arrangement is trained for three steps plain, with remat and with torch's
checkpoint. Gradients and parameters have to be plain's bit for bit; a fourth step is
counted: sines have run again, and collectives no more often than with the checkpoint.
All arrangements of a test share their processes, for these take seconds to start.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.clients import theirs
from support.processes import (
    BLOCKS,
    STEPS,
    STYLES,
    WIDTH,
    Block,
    Model,
    assert_as_plain,
    blocks_of,
    called,
    check_each,
    collectives,
    decorated,
    in_each_way,
    in_processes,
    in_two_processes,
    inside,
    method,
    needs_gloo,
    one_batch,
    only_root,
    replicated,
    sharded,
    train,
)
from support.tables import rows
from support.zoo import plainly
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from remat import policies, remat
from remat.testing import assert_same


pytestmark = needs_gloo


# --- FSDP2 ---


def sharded_first(wrap):
    """Shard the blocks, and only then replace what they do."""
    model = sharded(called)(plainly)
    for block in model.blocks:
        block.forward = wrap(block.forward)
    return model


def sharded_sublayers(wrap):
    """Shard the layers of a block, which is rematerialized as a whole."""
    model = called(wrap)
    for block in model.blocks:
        fully_shard(block.mlp[0])
        fully_shard(block.mlp[2])
    return fully_shard(model)


def accumulated(model, rank, step):
    """Two batches, of which the second sends gradients."""
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        one_batch(model, rank, 10 * step + part)


def sharded_and_parallel(build, replicas=1):
    """Tensor parallel in each block, whose shards FSDP2 has."""

    def make(wrap):
        shape = (replicas, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        model = build(wrap)
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], COLUMNS_AND_ROWS)
            fully_shard(block, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    return make


COLUMNS_AND_ROWS = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
AWAY = CPUOffloadPolicy(pin_memory=False)


def with_dropout(wrap):
    return inside(wrap, dropout=0.3)


FSDP = {
    **{style: (sharded(build), one_batch) for style, build in STYLES.items()},
    "inside, gathered": (sharded(inside, reshard_after_forward=False), one_batch),
    "called, gathered": (sharded(called, reshard_after_forward=False), one_batch),
    "inside, accumulated": (sharded(inside), accumulated),
    "called, accumulated": (sharded(called), accumulated),
    "inside, mixed precision": (sharded(inside, mp_policy=HALF), one_batch),
    "called, mixed precision": (sharded(called, mp_policy=HALF), one_batch),
    "inside, offloaded": (sharded(inside, offload_policy=AWAY), one_batch),
    "called, offloaded": (sharded(called, offload_policy=AWAY), one_batch),
    "inside, only root": (only_root(inside), one_batch),
    "called, only root": (only_root(called), one_batch),
    "decorated, only root": (only_root(decorated), one_batch),
    "replaced once sharded": (sharded_first, one_batch),
    "sublayers": (sharded_sublayers, one_batch),
    "sublayers, accumulated": (sharded_sublayers, accumulated),
    "dropout": (sharded(with_dropout), one_batch),
    "tensor parallel, inside": (sharded_and_parallel(inside), one_batch),
    "tensor parallel, called": (sharded_and_parallel(called), one_batch),
}


def in_pairs(model, rank, step):
    """Processes that share the layers share each batch."""
    one_batch(model, rank // 2, step)


def sharded_and_replicated(build):
    """Two replicas, each of two shards."""

    def make(wrap):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        return sharded(build, mesh=mesh)(wrap)

    return make


OF_FOUR = {
    "tensor parallel, inside": (sharded_and_parallel(inside, 2), in_pairs),
    "tensor parallel, called": (sharded_and_parallel(called, 2), in_pairs),
    "replicas, inside": (sharded_and_replicated(inside), one_batch),
    "replicas, called": (sharded_and_replicated(called), one_batch),
}


# --- DDP ---


def shared(wrap):
    """Two blocks with the same layers."""
    model = called(wrap)
    model.blocks[2].mlp = model.blocks[0].mlp
    return model


def normalized(build):
    """Blocks whose norm has running statistics."""

    def make(wrap):
        model = build(wrap)
        for block in model.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)
        return model

    return make


class Unused(Block):
    """Has a layer that nothing uses, and one that only one process uses."""

    def __init__(self):
        super().__init__()
        self.unused, self.sometimes = nn.Linear(2, 2), nn.Linear(WIDTH, WIDTH)

    def branch(self, x):
        return self.mlp(self.sometimes(x) if dist.get_rank() else x)

    def forward(self, x):
        return x + self.branch(self.norm(x))


def unsent(model, rank, step):
    """Two batches, of which the second sends gradients."""
    with model.no_sync():
        one_batch(model, rank, 10 * step)
    one_batch(model, rank, 10 * step + 1)


DDP = {
    **{style: (replicated(build), one_batch) for style, build in STYLES.items()},
    "one bucket": (replicated(called, bucket_cap_mb=25), one_batch),
    "static graph": (replicated(called, static_graph=True), one_batch),
    "views of buckets": (replicated(called, gradient_as_bucket_view=True), one_batch),
    "unused": (
        replicated(lambda wrap: called(wrap, Unused), find_unused_parameters=True),
        one_batch,
    ),
    "no_sync": (replicated(called), unsent),
    "shared weights": (replicated(shared), one_batch),
    "dropout": (replicated(with_dropout), one_batch),
    "batch norm": (replicated(normalized(called)), one_batch),
}


# --- Tensor parallel ---


def parallel(build, plan):
    def make(wrap):
        model, mesh = build(wrap), init_device_mesh("cpu", (2,))
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return model

    return make


def whole_batch(model, rank, step):
    one_batch(model, 0, step)  # the processes share each batch


IN_SEQUENCE = {
    "norm": SequenceParallel(sequence_dim=0),
    "mlp.0": ColwiseParallel(input_layouts=Shard(0)),
    "mlp.2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
}


class Parts(Model):
    """Each process has a part of the sequence between the blocks."""

    def forward(self, x):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(self.embed(x), mesh, [Replicate()])
        x = x.redistribute(mesh, [Shard(0)])
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x.full_tensor())


def parts_called(wrap):
    return Parts([Block() for _ in range(BLOCKS)], lambda block, x: wrap(block)(x))


def parts_inside(wrap):
    branch = lambda self, x: wrap(self.mlp)(x)
    return Parts([Block(branch) for _ in range(BLOCKS)])


class Sum(torch.autograd.Function):
    """Adds up over the processes, in the forward or else in the backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward = forward
        return total_of(x) if forward else x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent if ctx.forward else total_of(cotangent), None


def total_of(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def by_hand(wrap):
    """Each process has half of the features between two layers."""

    def branch(self, x):
        return Sum.apply(wrap(self.mlp)(Sum.apply(x, False)), True)

    return blocks_of(lambda: Block(branch))


def by_hand_called(wrap):
    model = by_hand(plainly)
    model.call = lambda block, x: wrap(block)(x)
    return model


TENSOR = {
    **{
        style: (parallel(build, COLUMNS_AND_ROWS), whole_batch)
        for style, build in STYLES.items()
    },
    "sequence, called": (parallel(parts_called, IN_SEQUENCE), whole_batch),
    "sequence, inside": (parallel(parts_inside, IN_SEQUENCE), whole_batch),
    "by hand, called": (by_hand_called, whole_batch),
    "by hand, inside": (by_hand, whole_batch),
}


# --- The comparison ---


WRAPS = {"plain": plainly, "remat": remat, "checkpoint": theirs}
# Of parameters that get ready late, never or again, and of what a recompute changes.
SOME = "called", "static graph", "unused", "no_sync", "batch norm"
ARRANGEMENTS = {
    "FSDP2": FSDP,
    "DDP": DDP,
    "some of DDP": {name: DDP[name] for name in SOME},
    "tensor parallel": TENSOR,
    "FSDP2 of four": OF_FOUR,
}
PROCESSES = {"FSDP2 of four": 4}


def train_all(kind, rank):
    def run(arrangement, wrap):
        make, batch = arrangement
        return train(make(wrap), rank, batch)

    return in_each_way(ARRANGEMENTS[kind], WRAPS, run)


def a_result(sines=2, talks=1, grad=1.0):
    grads = [[torch.tensor([grad])]]
    return {"gradients": grads}, Counter({"sin": sines, "c10d::allreduce_": talks})


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (a_result(sines=1), "0 of 1 sines run again"),
        (a_result(talks=2), "2 collectives, 1 with the checkpoint"),
        (a_result(grad=1.5), "differs in value"),
        ("Traceback", "remat: Traceback"),
    ],
)
def test_the_comparison_fails_on_what_is_wrong(ours, said):
    checkpoint = a_result()
    ways = {"plain": a_result(sines=1), "remat": a_result(), "checkpoint": checkpoint}
    assert_as_plain("right", ways)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=said):
        assert_as_plain("wrong", {**ways, "remat": ours})


# Each takes about half a minute.
@rows("kind", {kind: kind for kind in ARRANGEMENTS}, fast=["some of DDP"])
def test_trainings_are_those_of_plain(kind, tmp_path, subtests):
    found = in_processes(PROCESSES.get(kind, 2), tmp_path, train_all, kind)

    def check(name, ways):
        assert_as_plain(name, ways)
        if "FSDP2" in kind:  # what is gathered for the backward is enough
            (_, once), (_, ours), _ = ways.values()
            assert collectives(ours) == collectives(once)

    check_each(found, subtests, check)


# --- What collectives return may be saved ---


SHARED = {**TENSOR, **{name: FSDP[name] for name in FSDP if "parallel" in name}}


def saving(fn):
    return remat(fn, policy=policies.save_collectives)


def train_saving(rank):
    """Train what shares layers, plain and saving; count what each sends."""
    results: dict[Any, Any] = {}
    for name, (make, batch) in SHARED.items():
        for wrap in plainly, remat, saving:
            torch.manual_seed(0)
            seen, ops = train(make(wrap), rank, batch)
            results.setdefault(name, []).append((seen, collectives(ops), ops["sin"]))
    return results


@pytest.mark.slow
def test_no_collective_of_tensor_parallel_is_repeated_if_they_are_saved(
    tmp_path, subtests
):
    repeated = 0
    for rank, found in enumerate(in_two_processes(tmp_path, train_saving)):
        for name, (plain, without, ours) in found.items():
            with subtests.test(name, rank=rank):
                (want, once, sines), (_, again, _), (got, sent, ran) = (
                    plain,
                    without,
                    ours,
                )
                assert_same(got, want)
                assert (sent, ran) == (once, 2 * sines)
                repeated += again - once
    assert repeated > 0


# --- When DDP sends gradients ---


def train_and_watch(rank):
    """Train plain and with remat; count how often each parameter gets ready."""
    results = []
    for wrap in plainly, remat:
        torch.manual_seed(0)
        model, ready = replicated(normalized(method))(wrap), Counter()
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, name=name, ready=ready: ready.update([name])
            )
        seen, ops = train(model, rank)
        results.append((seen, ops["sin"], [*ready.values()]))
    return results


@pytest.mark.slow
def test_every_parameter_gets_ready_once_in_each_step(tmp_path):
    both = in_two_processes(tmp_path, train_and_watch)
    for (want, sines, _), (got, more, ready) in both:
        assert_same(got, want)
        assert len(ready) == len(want["parameters"])
        assert {*ready} == {STEPS + 1}
        assert more == 2 * sines
    first, second = (ours["gradients"] for _, (ours, *_) in both)
    assert_same(first, second)  # averaged over the processes
