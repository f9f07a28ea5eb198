"""Draws for DTensors: each process draws the numbers of its own shard.

Element e of a draw depends on the key and on e alone (`_philox`). A shard is a number
of runs, each of elements in a row. Run r starts at an element whose block is the first
of another key: the same seed, with the offset of that block. So a shard is an ordinary
draw from an array of keys.

Invariant: the numbers of a shard are those that the full draw has there, bit for bit.
Rejected: to draw everything and keep the shard. Each process would do the work of all.
Rejected: a key for each process. Numbers would change with the number of processes; a
program that wants that folds in the rank.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.random import _ops


class Sharded(tuple[int, ...]):
    """The shape of a draw, and how it is laid out on a mesh of devices.

    Attributes:
        mesh: of the devices.
        placements: one for each dimension of the mesh.
    """

    mesh: Any
    placements: tuple[Any, ...]

    def __new__(
        cls, shape: Sequence[int], mesh: Any, placements: Sequence[Any]
    ) -> "Sharded":
        """Return such a shape."""
        new = super().__new__(cls, shape)
        new.mesh, new.placements = mesh, tuple(placements)
        return new


def is_dtensor(value: Any) -> bool:
    """Say whether a value is a DTensor."""
    # Who has one has imported this, which takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def shape_like(x: Tensor, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return a shape, by default that of a tensor, laid out like a tensor.

    A dimension is sharded if that of the tensor is, and is as long.
    """
    shape = tuple(x.shape if shape is None else shape)
    if not is_dtensor(x):
        return shape
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415

    like: Any = x
    whole, lengths = shape == tuple(x.shape), dict(enumerate(shape))

    def fits(p: Any) -> bool:
        if whole:
            return not p.is_partial()
        return type(p) is Shard and lengths.get(p.dim) == x.shape[p.dim]

    placements = [p if fits(p) else Replicate() for p in like.placements]
    return Sharded(shape, like.device_mesh, placements)


def draw(
    op: Callable[[Tensor, int, Any], Tensor], data: Tensor, shape: Sharded, kind: Any
) -> Tensor:
    """Return the numbers of one key, or of each: a DTensor."""
    from torch.distributed.tensor import Shard  # noqa: PLC0415

    keys, part = data.shape[:-1], local_part(shape)
    moved = [
        Shard(p.dim + len(keys)) if type(p) is Shard else p for p in shape.placements
    ]
    if part is None:
        numbers = op(data, math.prod(shape), kind).reshape((*keys, *shape))
        return _cut(numbers, shape, moved)
    numbers = shard(op, data, shape, *part, kind)
    return _joined(numbers, (*keys, *shape), shape.mesh, moved)


def draw_each(
    op: Callable[[Tensor, int, Any], Tensor], data: Tensor, x: Tensor, kind: Any
) -> Tensor:
    """Return numbers for a DTensor, whose shape begins with that of the keys."""
    shape = shape_like(x)
    assert isinstance(shape, Sharded)
    part = local_part(shape)
    k = data.ndim - 1
    if part is None:
        numbers = op(data, math.prod(shape[k:]), kind).reshape(tuple(shape))
        return _cut(numbers, shape, shape.placements)
    lengths, starts = part
    for dim in range(k):
        data = data.narrow(dim, starts[dim], lengths[dim])
    numbers = shard(op, data, shape[k:], lengths[k:], starts[k:], kind)
    return _joined(numbers, shape, shape.mesh, shape.placements)


def _joined(
    numbers: Tensor, shape: Sequence[int], mesh: Any, placements: Sequence[Any]
) -> Tensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        numbers, mesh, placements, run_check=False, shape=size, stride=stride
    )


def _cut(numbers: Tensor, shape: Sharded, placements: Sequence[Any]) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415

    everywhere = [Replicate() for _ in placements]
    whole: Any = DTensor.from_local(numbers, shape.mesh, everywhere, run_check=False)
    return whole.redistribute(placements=placements)


def local_part(shape: Sharded) -> tuple[list[int], list[int]] | None:
    """Return the lengths and the starts of what this process has of a shape.

    None if that is not one block of it.
    """
    from torch.distributed.tensor import Shard  # noqa: PLC0415

    lengths, starts = [*shape], [0] * len(shape)
    here = shape.mesh.get_coordinate()
    if here is None:
        return [0] * len(shape), starts
    for i, (p, position) in enumerate(zip(shape.placements, here, strict=True)):
        if p.is_replicate():
            continue
        if type(p) is not Shard:
            return None
        n = lengths[p.dim]
        size = -(-n // shape.mesh.size(i))
        skipped = min(n, size * position)
        starts[p.dim] += skipped
        lengths[p.dim] = min(size, n - skipped)
    return lengths, starts


def shard(
    op: Callable[[Tensor, int, Any], Tensor],
    data: Tensor,
    shape: Sequence[int],
    lengths: Sequence[int],
    starts: Sequence[int],
    kind: Any,
) -> Tensor:
    """Return a block of the numbers that each key gives for a shape."""
    out = (*data.shape[:-1], *lengths)
    cut = [d for d, (n, m) in enumerate(zip(shape, lengths, strict=True)) if n != m]
    if not cut or 0 in lengths:
        return op(data, math.prod(lengths), kind).reshape(out)
    last = cut[-1]
    first = _starts_of_runs(shape, lengths, starts, last)
    run, per_block = math.prod(lengths[last:]), _ops.per_block(op, kind)
    block, lane = first // per_block, first % per_block
    seed, offset = data.view(torch.int64).unsqueeze(-2).unbind(-1)
    offset = offset + block.to(data.device)
    rows = torch.stack((seed.expand_as(offset), offset), -1).view(torch.uint64)
    numbers = op(rows, run + int(lane.max()), kind)
    return _from_lanes(numbers, lane, run).reshape(out)


def _starts_of_runs(
    shape: Sequence[int], lengths: Sequence[int], starts: Sequence[int], last: int
) -> Tensor:
    """Return the number of the first element of each run: int64[:], on the CPU."""
    first = torch.zeros((), dtype=torch.int64, device="cpu")
    for d in range(last):
        places = torch.arange(lengths[d], device="cpu") + starts[d]
        first = first.unsqueeze(-1) + places * math.prod(shape[d + 1 :])
    return first.reshape(-1) + starts[last] * math.prod(shape[last + 1 :])


def _from_lanes(numbers: Tensor, lane: Tensor, run: int) -> Tensor:
    """Return the runs of some rows of numbers, each from its lane on."""
    if not lane.any():
        return numbers[..., :run]
    index = lane.unsqueeze(-1) + torch.arange(run, device="cpu")
    index = index.to(numbers.device).expand(*numbers.shape[:-1], run)
    return numbers.gather(-1, index)
