"""Buffers that a function updates in place are updated once, by its forward.

Invariant: the forward works on copies, which share memory until written; what it wrote
is written back, and the values from before are what a recomputation starts from.
Rejected: version counters, which batch norm's update of its running statistics passes
by, and copying every buffer, which may be large and never written.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from remat._torch import is_shared, snapshot


def shield(
    inner: list[Tensor], needs: Sequence[bool], buffers: Mapping[int, bool]
) -> dict[int, Tensor]:
    """Put copies in place of what may be updated; return them by index.

    Args:
        inner: the tensors that the forward is to run on, changed here.
        needs: which of them require grad, and so cannot be updated.
        buffers: those captured, and whether registered as a module's buffer.
    """
    copies: dict[int, Tensor] = {}
    if not buffers and False not in needs:
        return copies
    for i, t in enumerate(inner):
        # Running statistics are vectors, and may be passed as well: see above.
        if needs[i] or not (i in buffers or t.dim() == 1):
            continue
        copy = snapshot(t)
        if copy is not None or buffers.get(i, False):
            inner[i] = copies[i] = t.clone() if copy is None else copy
    return copies


def written(
    leaves: Sequence[Tensor], copies: Mapping[int, Tensor], buffers: Mapping[int, bool]
) -> Iterator[int]:
    """Yield the indices of what the forward wrote to."""
    for i, copy in copies.items():
        if is_shared(copy):
            continue
        # Kept its value: written with that value, or only read by a kernel that may
        # write.
        captured = i in buffers and snapshot(copy) is not None
        if copy._version or captured or not is_same(copy, leaves[i]):
            yield i


def update(buffer: Tensor, copy: Tensor) -> Tensor:
    """Write `copy` to `buffer`; return the value from before."""
    before = buffer.clone()
    if not is_same(copy, buffer):
        buffer.copy_(copy)
    return before


def is_same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of the same shape hold the same bytes."""
    if type(a) is not Tensor or a.device.type == "meta":
        return not (a._version or b._version)
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)
