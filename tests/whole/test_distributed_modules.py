"""Two gloo processes on the CPU: rematerialized modules under DDP, FSDP2 and FSDP1.

As in `test_distributed`, but the model is changed by `remat.nn.apply`, before or after
it is distributed, or built of modules that `remat` returned. The comparison is with
torch's `checkpoint_wrapper`.
"""

import pytest
import torch
from support.processes import (
    BLOCKS,
    WIDTH,
    Block,
    assert_as_plain,
    blocks_of,
    check_each,
    in_each_way,
    in_two_processes,
    inputs,
    needs_gloo,
    only_root,
    replicated,
    sharded,
    train,
)
from support.zoo import plainly
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import remat


pytestmark = needs_gloo


def checkpointed(model):
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return model


# How a model is changed, and how a block is.
WAYS = {
    "plain": (plainly, plainly),
    "remat": (lambda model: remat.nn.apply(model, Block), remat.remat),
    "checkpoint": (checkpointed, checkpoint_wrapper),
}


# --- Models ---


def applied(change, wrap, **options):
    return change(blocks_of(lambda: Block(**options)))


def found(change, wrap):
    """No blocks are named."""
    return (
        remat.nn.apply(blocks_of(Block))
        if wrap is remat.remat
        else applied(change, wrap)
    )


def of_views(change, wrap):
    """`self.block = remat(Block())`, in a model that somebody writes."""
    return blocks_of(lambda: wrap(Block()))


def with_dropout(change, wrap):
    return applied(change, wrap, dropout=0.3)


def normalized(change, wrap):
    """Blocks whose norm has running statistics."""
    model = blocks_of(Block)
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(WIDTH)
    return change(model)


MODELS = {
    "applied": applied,
    "found": found,
    "views": of_views,
    "dropout": with_dropout,
}


# --- DDP ---


def replicated_first(change, wrap):
    model = DistributedDataParallel(blocks_of(Block), bucket_cap_mb=1e-5)
    change(model.module)
    return model


DDP = {
    **{name: replicated(build) for name, build in MODELS.items()},
    "batch norm": replicated(normalized),
    "static graph": replicated(applied, static_graph=True),
    "static graph, views": replicated(of_views, static_graph=True),
    "unused parameters are looked for": replicated(
        applied, find_unused_parameters=True
    ),
    "applied after": replicated_first,
}


# --- FSDP2 ---


def sharded_first(change, wrap):
    model = sharded(lambda: blocks_of(Block))()
    change(model)
    return model


def only_root_first(change, wrap):
    return change(fully_shard(blocks_of(Block)))


FSDP2 = {
    **{name: sharded(build) for name, build in MODELS.items()},
    **{f"{name}, only root": only_root(build) for name, build in MODELS.items()},
    "applied after": sharded_first,
    "applied after, only root": only_root_first,
}


# --- FSDP1 ---


def wrapped(build, **options):
    """Shard what a policy finds by its class: rematerialized blocks are of it."""

    def make(*way):
        policy = ModuleWrapPolicy({Block})
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(
            build(*way), auto_wrap_policy=policy, device_id=cpu, **options
        )
        shards = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
        assert len(shards) == 1 + BLOCKS
        return model

    return make


FSDP1 = {
    **{name: wrapped(build) for name, build in MODELS.items()},
    "original parameters": wrapped(applied, use_orig_params=True),
    "original parameters, views": wrapped(of_views, use_orig_params=True),
}


# --- The comparison ---


ARRANGEMENTS = {"DDP": DDP, "FSDP2": FSDP2, "FSDP1": FSDP1}


def train_all(kind, rank):
    return in_each_way(
        ARRANGEMENTS[kind], WAYS, lambda make, way: train(make(*way), rank)
    )


def train_in_a_block(rank: int) -> str:
    def batch(model, rank, step):
        with remat.scope():
            loss = model(inputs(rank, step)).square().mean()
        loss.backward()

    try:
        train(FSDP2["applied after"](plainly, plainly), rank, batch)
    except remat.MutationError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_block_around_sharded_modules_says_what_to_do(tmp_path):
    for told in in_two_processes(tmp_path, train_in_a_block):
        assert "was freed" in told
        assert "FSDP frees the parameters" in told
        assert "remat.nn.apply(model, Block)" in told


def explained(rank):
    model = sharded_first(WAYS["remat"][0], plainly)
    report = remat.explain(lambda x: model(x).square().mean(), torch.ones(8, 4))
    return report.advice, {h.kind: h.nbytes for h in report.peak.holders}


def test_the_peak_of_a_step_with_sharded_parameters_is_explained(tmp_path):
    for advice, held in in_two_processes(tmp_path, explained):
        assert advice == ()
        assert held["saved inputs"] > 0
        assert held["parameters"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "FSDP1"])
def test_trainings_are_those_of_plain(kind, tmp_path, subtests):
    found = in_two_processes(tmp_path, train_all, kind)
    check_each(found, subtests, assert_as_plain)
