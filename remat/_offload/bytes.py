"""The bytes of a tensor: packed without gaps, and made a tensor again.

Called by `offload`, which moves bytes.

Invariant: the tensor that is made of packed bytes has the bits of the first one, and
`respaced` gives it the strides. Rejected: `contiguous`. A matrix product may add up in
another order for a transposed matrix, and a view may be possible of one layout only.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def room(nbytes: int, device: torch.device) -> Tensor:
    """Return uninitialized bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def typed(data: Tensor, like: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """Return bytes as a tensor of the shape and dtype of another tensor."""
    out = torch.empty(0, dtype=like.dtype, device=data.device)
    stride = like.stride() if stride is None else stride
    return out.set_(data.untyped_storage(), 0, like.shape, stride)


def packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the bytes of a tensor without gaps, and its strides in these.

    If its elements overlap, the whole range that they reach over is taken.
    """
    dense = _unexpanded(tensor.detach()).resolve_conj().resolve_neg()
    if _has_gaps(dense.shape, dense.stride()):
        dense = dense.clone()
    size, stride = dense.element_size(), dense.expand(tensor.shape).stride()
    nbytes, start = extent(dense.shape, stride) * size, dense.storage_offset() * size
    data = room(0, dense.device)
    return data.set_(dense.untyped_storage(), start, (nbytes,), (1,)), stride


def respaced(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides, copied if it had others."""
    if tensor.stride() == stride:
        return tensor
    nbytes = extent(tensor.shape, stride) * tensor.element_size()
    out = typed(room(nbytes, tensor.device), tensor, stride)
    _unexpanded(out).copy_(_unexpanded(tensor))
    return out


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a tensor without the elements that `expand` repeats."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [size if stride else min(size, 1) for size, stride in sizes]
    return tensor.as_strided(shape, tensor.stride())


def extent(shape: Sequence[int], stride: Iterable[int]) -> int:
    """Return how many elements of its storage a tensor reaches over."""
    if 0 in shape:
        return 0
    pairs = zip(shape, stride, strict=True)
    return 1 + sum((n - 1) * distance for n, distance in pairs)


def _has_gaps(shape: Sequence[int], stride: Iterable[int]) -> bool:
    """Say whether a tensor leaves gaps in the range that its elements reach over.

    False if elements may overlap, other than by `expand`.
    """
    if 0 in shape:
        return False
    reach, count = 0, 1
    for distance, n in sorted(zip(stride, shape, strict=True)):
        if distance and n > 1:
            if distance <= reach:
                return False
            reach += distance * (n - 1)
            count *= n
    return reach + 1 > count
