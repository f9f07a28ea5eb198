"""The bytes of a tensor: taken out without gaps, and made a tensor again.

Invariant: what is made of the bytes that were taken has the bits of the tensor, and
what is respaced its strides. Rejected: `contiguous`. A matrix product may add up in
another order for a transposed matrix, and a view may be possible of one layout alone.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def room(nbytes: int, device: torch.device) -> Tensor:
    """Return bytes that may hold anything."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def typed(data: Tensor, like: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """Return bytes as a tensor of the shape and dtype of another one."""
    out = torch.empty(0, dtype=like.dtype, device=data.device)
    stride = like.stride() if stride is None else stride
    return out.set_(data.untyped_storage(), 0, like.shape, stride)


def packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the bytes of a tensor without gaps, and the strides that it has in them.

    One whose elements overlap is taken with all that it reaches.
    """
    dense = _unexpanded(tensor.detach()).resolve_conj().resolve_neg()
    if _has_gaps(dense.shape, dense.stride()):
        dense = dense.clone()
    size, stride = dense.element_size(), dense.expand(tensor.shape).stride()
    nbytes, start = extent(dense.shape, stride) * size, dense.storage_offset() * size
    data = room(0, dense.device)
    return data.set_(dense.untyped_storage(), start, (nbytes,), (1,)), stride


def respaced(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with the strides given, copied if it had others."""
    if tensor.stride() == stride:
        return tensor
    nbytes = extent(tensor.shape, stride) * tensor.element_size()
    out = typed(room(nbytes, tensor.device), tensor, stride)
    _unexpanded(out).copy_(_unexpanded(tensor))
    return out


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a tensor without what `expand` repeats."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [size if stride else min(size, 1) for size, stride in sizes]
    return tensor.as_strided(shape, tensor.stride())


def extent(shape: Sequence[int], stride: Iterable[int]) -> int:
    """Return how many elements of its storage a tensor reaches over."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _has_gaps(shape: Sequence[int], stride: Iterable[int]) -> bool:
    """Say whether a tensor leaves out some of what it reaches over.

    False if two of its elements may be the same one, other than by `expand`.
    """
    if 0 in shape:
        return False
    reach, count = 0, 1
    for step, n in sorted(zip(stride, shape, strict=True)):
        if step and n > 1:
            if step <= reach:
                return False
            reach += step * (n - 1)
            count *= n
    return reach + 1 > count
