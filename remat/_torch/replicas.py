"""Copies of replicas (DistributedDataParallel) that send nothing.

Invariant: no communication, and no memory beside that of the copy's tensors.
Rejected: a deep copy, which makes a reducer: buckets of real memory, and collectives
that other processes have to join.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from remat._torch.shards import copies_of_shards


T = TypeVar("T")


def replicas_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the replicas among modules and those in them."""
    inside = (each for module in modules for each in module.modules())
    found = [m for m in inside if isinstance(m, DistributedDataParallel)]
    return [*dict.fromkeys(found)]


def copied_without_sending(
    value: T, replicas: Sequence[Any], shards: Sequence[Any] = ()
) -> T:
    """Return a deep copy of a value in which replicas call their modules alone."""
    memo = {id(each): object.__new__(type(each)) for each in replicas}
    finish = copies_of_shards(shards, memo)
    for each in replicas:
        state = {k: v for k, v in vars(each).items() if k not in _OF_PROCESSES}
        vars(memo[id(each)]).update(copy.deepcopy(state, memo), **_ALONE)
    finish()
    return copy.deepcopy(value, memo)


_OF_PROCESSES = {"logger", "process_group", "reducer", "device_mesh", "_device_mesh"}
# Deleted by: a public way to call a replica without its reducer, also with buffers.
_ALONE = {"_use_python_reducer": True, "logger": None, "reducer": None}


def in_buckets(replica: Any) -> list[Tensor]:
    """Return the parameters whose gradients a replica sends."""
    named = replica.module.named_parameters()
    left_out = replica.parameters_to_ignore
    return [p for name, p in named if p.requires_grad and name not in left_out]


def holds_gradients(replica: Any) -> bool:
    """Say whether gradients are views of what a replica sends."""
    return replica.gradient_as_bucket_view
