"""Records of the planner, written by hand: no tensors, no torch operations."""

import torch

from remat._base.op import Op
from remat._partial.plan import Record, Step


def pure(reads, *makes, **flags):
    """An operation that reads some storages and makes others."""
    return Step(Op("pure"), tuple(reads), makes, **flags)


def view(of):
    return Step(Op("view"), (of,), (of,))


def in_place(target, *reads):
    return Step(Op("in_place"), (target, *reads), (target,), (target,))


def collective(target):
    """Writes in place what the processes have, `all_reduce` say."""
    op = Op(torch.ops.c10d.allreduce_.default)
    return Step(op, (target,), (target,), (target,))


def draw(*reads, makes):
    return Step(Op("draw"), reads, (makes,), draws=True)


def draw_like(of, makes):
    """Draws as many as another has elements, `rand_like` say."""
    return Step(Op("draw_like"), (of,), (makes,), draws=True, metadata_only=(0,))


def dropout(of, out, mask):
    return Step(Op("dropout"), (of,), (out, mask), draws=True, metadata_only=(1,))


def draw_in_place(target):
    return Step(
        Op("draw_"), (target,), (target,), (target,), draws=True, metadata_only=(0,)
    )


def zeros_like(of, makes):
    return Step(Op("zeros_like"), (of,), (makes,), metadata_only=(0,))


def record(*steps, inputs=(0,), roots=(), inside=()):
    """Storages are numbered from 0 by the inputs; `roots` are those of each output."""
    return Record(steps, inputs, tuple(map(frozenset, roots)), inside=tuple(inside))
