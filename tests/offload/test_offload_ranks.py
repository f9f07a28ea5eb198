"""Offloading in two processes: a folder for each, and nothing left when one dies."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.offloading import ON_LINUX
from support.processes import called, in_two_processes, one_batch, train
from support.zoo import plainly
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from remat import policies, remat
from remat.testing import assert_same


pytestmark = [
    ON_LINUX,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
    ),
]
ON_DISK = policies.dots_saveable.but_offload(to="disk")


def offloading(fn):
    return remat(fn, policy=ON_DISK)


def offloaded():
    """The files that are mapped into this process: folders, and how often."""
    maps = Path("/proc/self/maps").read_text()
    return re.findall(r"/ranks/(\d+)/\S* \(deleted\)", maps)


def in_own_folder(folder, rank):
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["REMAT_OFFLOAD_DIR"] = f"{folder}/$LOCAL_RANK"


def sharded(wrap):
    model = called(wrap)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def replicated(wrap):
    return DistributedDataParallel(called(wrap))


def train_both(folder, rank):
    """Train plain and offloading; say which files there are after a forward."""
    in_own_folder(folder, rank)
    results = []
    for make in replicated, sharded:
        models = []
        for wrap in plainly, offloading:
            torch.manual_seed(0)
            models.append(make(wrap))
            results.append(train(models[-1], rank)[0])
        out = models[-1](torch.ones(4, 4)).sum()
        results.append(offloaded())
        out.backward()
        results.append(offloaded())
    return results


def folders(tmp_path):
    ranks = [tmp_path / "ranks" / str(rank) for rank in range(2)]
    for folder in ranks:
        folder.mkdir(parents=True)
    return ranks


@pytest.mark.slow
def test_each_rank_offloads_to_its_own_folder(tmp_path):
    ranks = folders(tmp_path)
    both = in_two_processes(tmp_path, train_both, str(tmp_path / "ranks"))
    for rank, results in enumerate(both):
        for want, got, held, after in (results[:4], results[4:]):
            assert_same(got, want)
            assert len(held) >= 3  # a product of each block
            assert {*held} == {str(rank)}
            assert after == []
        assert [*ranks[rank].iterdir()] == []


def die(folder, rank):
    """Be killed in the middle of a step, with residuals on disk."""
    in_own_folder(folder, rank)
    model = replicated(offloading)
    one_batch(model, rank, 0)
    out = model(torch.ones(4, 4)).sum()
    held = len(offloaded())
    Path(folder, f"held by {rank}").write_text(str(held))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.backward()


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_nothing_behind(tmp_path):
    ranks = folders(tmp_path)
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        in_two_processes(tmp_path, die, str(tmp_path / "ranks"))
    for rank, folder in enumerate(ranks):
        assert int((tmp_path / "ranks" / f"held by {rank}").read_text()) >= 3
        assert [*folder.iterdir()] == []
