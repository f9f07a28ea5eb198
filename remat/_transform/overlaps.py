"""Inputs that share memory and that a forward wrote to, as a buffer and a part of it.

What was saved of each is a copy. Where a recompute writes to one, it is to read that in
the other, so those that are gone are made anew in the memory that they shared.

Invariant: where one of them is still there, all are in its memory, and all of it is put
back after the run.
Rejected: one copy of the whole storage. A part of it may be all that is passed.
"""

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from remat._partial.values import storage_of
from remat._torch import unseen


# Where inputs are in memory, by index: first and last.
Ranges = Mapping[int, tuple[int, int]]


def overlapping(ranges: list[tuple[int, int, int]]) -> Sequence[Ranges]:
    """Return groups of inputs that share memory; of each its place, and its index."""
    ranges.sort()
    firsts, lasts, _ = zip(*ranges, strict=True) if ranges else ((), (), ())
    if not any(map(operator.lt, firsts[1:], lasts)):
        return ()
    groups: list[dict[int, tuple[int, int]]] = []
    end = -1
    for first, last, i in ranges:
        if first >= end:
            groups.append({})
        groups[-1][i] = first, last
        end = max(end, last)
    return [group for group in groups if len(group) > 1]


def together(group: Ranges, tensors: Sequence[Tensor], there: int | None) -> None:
    """Put tensors of a group, other than one that is there, in the same memory."""
    if there is None:
        start = min(first for first, _ in group.values())
        storage = torch.UntypedStorage(max(end for _, end in group.values()) - start)
    else:
        t = tensors[there]
        start = group[there][0] - int(t.storage_offset()) * t.itemsize
        storage = storage_of(t)
    with unseen():
        for i, (first, _) in group.items():
            offset, rest = divmod(first - start, tensors[i].itemsize)
            if i != there and not rest:
                t = tensors[i].detach()
                tensors[i].set_(storage, offset, t.shape, t.stride())
                if there is None:
                    tensors[i].copy_(t)
