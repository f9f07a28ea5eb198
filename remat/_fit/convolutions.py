"""The bytes that convolutions hold while they run on the CPU.

oneDNN copies what they read into its layout, and copies what they compute back.

Invariant: what is counted are copies that oneDNN was seen to make, of shapes alone.
Rejected: to ask oneDNN. It tells of a convolution only once it has memory for it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def convolution(x: Tensor, w: Tensor, bias: Any, *rest: Any) -> int:
    stride, padding, _, transposed, _, _ = rest[:6]
    y = _shape_of_result(x, w, rest)
    results = math.prod(y) * x.element_size()
    if not _is_copied(x):
        return results + _REORDERED * w.nbytes
    if _is_small(x, w, rest):
        return results + _columns(x, w, y)
    if _is_product(w, stride, padding, transposed):
        return 0
    is_padded = bias is not None and y[1] % _BLOCK != 0
    copied = _read(x) + _weight(w) + is_padded * _bias(y) + _blocked(x, y)
    return max(copied, results + _blocked(x, y))


def convolution_backward(
    g: Tensor, x: Tensor, w: Tensor, _bias_sizes: Any, *rest: Any
) -> int:
    stride, padding, _, transposed, _, groups, (of_x, of_w, of_bias) = rest[:7]
    x_bytes, b_bytes = x.nbytes if of_x else 0, _bias(g.shape) if of_bias else 0
    of_weight = (w.nbytes if of_w else 0) + b_bytes
    if not _is_copied(x):
        is_summed = of_w and w.shape[1] == 1 and max(w.shape[2:]) > 3
        of_weight += _SUMS * w.nbytes + b_bytes if is_summed else _REORDERED * w.nbytes
        return x_bytes + of_weight + _is_other(g) * g.nbytes
    if _is_small(x, w, rest):
        return x_bytes + of_weight + (_columns(x, w, g.shape) if of_w else 0)
    if _is_product(w, stride, padding, transposed):
        return 0
    copied, highest = _blocked(g, g.shape), 0
    if of_x:
        x_copied = _blocked(x, x.shape)
        # With strides, what no result reads is filled in afterwards.
        results = (1 if {*stride} == {1} else 2) * x_bytes
        highest = max(copied + _weight(w) + x_copied, x_copied + results)
    if not of_w:
        return highest
    if _is_by_columns(w, groups):
        return max(highest, x_bytes + of_weight + _by_columns(w, g))
    made = _weight(w) + b_bytes  # copied back when the others are freed
    return max(highest, x_bytes + made + max(copied + _read(x), of_weight))


# What oneDNN sums up apart, for large kernels of one channel: 256, and two copies.
_SUMS = 257
_REORDERED = 3  # copies of a weight for inputs that stay as they are


def _shape_of_result(x: Tensor, w: Tensor, rest: Sequence[Any]) -> tuple[int, ...]:
    stride, padding, dilation, transposed, output_padding, groups = rest[:6]
    every = zip(x.shape[2:], w.shape[2:], strict=True)
    sizes: list[int] = []
    for k, (n, size) in enumerate(every):
        s, p, d = (v[k] if len(v) > k else v[0] for v in (stride, padding, dilation))
        if transposed:
            more = output_padding[k] if len(output_padding) > k else output_padding[0]
            sizes.append((n - 1) * s - 2 * p + d * (size - 1) + more + 1)
        else:
            sizes.append((n + 2 * p - d * (size - 1) - 1) // s + 1)
    channels = w.shape[1] * groups if transposed else w.shape[0]
    return (x.shape[0], channels, *sizes)


def _is_copied(x: Tensor) -> bool:
    """Say whether the tensors of a convolution are brought into another layout."""
    return not (_is_last(x) and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1)


def _is_other(g: Tensor) -> bool:
    """Say whether a gradient has another layout than an input with channels last."""
    return not (_is_last(g) or is_expanded(g))  # as of a sum


def _is_last(x: Tensor) -> bool:
    last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return x.ndim in (4, 5) and x.is_contiguous(memory_format=last)


def _is_small(x: Tensor, w: Tensor, rest: Sequence[Any]) -> bool:
    """Say whether torch computes a convolution itself, by a product of columns."""
    wide = w.ndim > 3 and min(w.shape[-2:]) > 3
    few = x.shape[0] == 1 and x.numel() <= 20480
    return few and rest[5] == 1 and not (wide or rest[3])


def _columns(x: Tensor, w: Tensor, y: Sequence[int]) -> int:
    if math.prod(w.shape[2:]) == 1:
        return 0
    return math.prod(w.shape[1:]) * math.prod(y[2:]) * x.element_size()


def _is_by_columns(w: Tensor, groups: int) -> bool:
    """Say whether oneDNN finds the gradient of a weight by a product of columns.

    It does for groups whose channels fill no block, but for small kernels of one
    channel, and for kernels that are larger than its own.
    """
    kernel = max(w.shape[2:])
    is_small = w.shape[1] == 1 and kernel <= 3
    return kernel > 14 or (groups > 1 and w.shape[1] % 8 != 0 and not is_small)


def _by_columns(w: Tensor, g: Tensor) -> int:
    """Return the bytes of the columns, and of sums of the gradient, of each thread."""
    columns = math.prod(w.shape[1:]) * math.prod(g.shape[2:]) * w.element_size()
    return torch.get_num_threads() * (4 * w.nbytes + columns) + 256


def _is_product(
    w: Tensor, stride: Sequence[int], padding: Sequence[int], transposed: bool
) -> bool:
    """Say whether a convolution is a product of matrices."""
    at_once = {*w.shape[2:], *stride} == {1} and not any(padding)
    return at_once and not transposed


# The channels of a block, in oneDNN's layout for wide vectors.
_BLOCK = 16


def _blocked(like: Tensor, shape: Sequence[int], block: int = _BLOCK) -> int:
    channels = -(-shape[1] // block) * block
    return shape[0] * channels * math.prod(shape[2:]) * like.element_size()


def _read(x: Tensor) -> int:
    """Return the bytes of the copy of an input; a few channels are read as they are."""
    few = x.shape[1]
    if few < 4:
        return 0
    return _blocked(x, x.shape, 8 if few <= 8 else _BLOCK)


def _bias(shape: Sequence[int]) -> int:
    return -(-shape[1] // _BLOCK) * _BLOCK * 4


def _weight(w: Tensor) -> int:
    out = -(-w.shape[0] // _BLOCK) * _BLOCK
    if w.shape[1] == 1:  # of groups
        return out * w[0].nbytes
    return out * _blocked(w, (1, *w.shape[1:]), 8 if w.shape[1] <= 8 else _BLOCK)


def is_expanded(tensor: Tensor) -> bool:
    """Say whether elements of a tensor share memory, as those of `expand` do."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(n > 1 and stride == 0 for n, stride in dims)
