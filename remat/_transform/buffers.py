"""Buffers that a function updates in place are updated once, by its forward.

`function` uses it under torch.func. Under base autograd `inputs` copies buffers.

Invariant: the forward works on copies, which share memory until they are written. What
it wrote is written back. A recompute starts from the values before that.
Rejected: version counters, which do not count batch norm's update of its running
statistics; and a copy of every buffer, which may be large and never written.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from remat._base.absent import Absent
from remat._torch import is_shared, snapshot


def copy_buffers(
    inner: list[Tensor], needs: Sequence[bool], buffers: Mapping[int, bool]
) -> dict[int, Tensor]:
    """Put copies in place of inputs that may be updated; return the copies by index.

    Args:
        inner: the tensors that the forward is to run on, changed here.
        needs: which of them require grad, and so cannot be updated.
        buffers: those captured, and whether registered as a module's buffer.
    """
    copies: dict[int, Tensor] = {}
    if not buffers and False not in needs:
        return copies
    for i, t in enumerate(inner):
        # Running statistics are vectors, and may be passed as arguments as well.
        if needs[i] or not (i in buffers or t.dim() == 1):
            continue
        copy = snapshot(t)
        if copy is not None or buffers.get(i, False):
            inner[i] = copies[i] = t.clone() if copy is None else copy
    return copies


def written_to(
    inputs: Sequence[Tensor], copies: Mapping[int, Tensor], buffers: Mapping[int, bool]
) -> Iterator[int]:
    """Yield the inputs whose copies the forward wrote to."""
    for i, copy in copies.items():
        if is_shared(copy):
            continue
        # Memory of its own and the same value: it was written with that value, or a
        # kernel that may write only read it.
        captured = i in buffers and snapshot(copy) is not None
        if copy._version or captured or not is_same(copy, inputs[i]):
            yield i


def update(buffer: Tensor, copy: Tensor) -> Tensor:
    """Write `copy` to `buffer`; return the value from before."""
    before = buffer.clone()
    if not is_same(copy, buffer):
        buffer.copy_(copy)
    return before


def copies_of_buffers(
    inputs: Sequence[Tensor], updated: Sequence[int]
) -> Sequence[Tensor]:
    """Return inputs with copies in place of those that a recompute updates again."""
    copied = list(inputs)
    for i in updated:
        if type(copied[i]) is not Absent:
            copied[i] = copied[i].clone()
    return copied


def is_same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of the same shape hold the same bytes."""
    if type(a) is not Tensor or a.device.type == "meta":
        return not (a._version or b._version)
    if a.is_quantized:  # torch compares scale and bytes, and crashes on views as bytes
        return torch.equal(a, b)
    # No view as bytes can say that a tensor is conjugate.
    flat = [t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)
