"""The stream as operations of torch: one node in a graph, whatever is drawn.

`data` is always uint64[..., 2], a row (seed, offset) per key.

Invariant: the operations are functional and are given no generator, so that vmap with
`randomness="error"`, make_fx and torch.compile take them for arithmetic.
Rejected: writing them out as arithmetic on tensors, which is 177 nodes for a key.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat._compat import is_unwatched
from remat.random import _philox


_LIBRARY = torch.library.Library("remat", "FRAGMENT")


def split(data: Tensor, num: int) -> Tensor:
    """Return `num` keys for each: uint64[num, ..., 2]."""
    return (_split if is_unwatched(data) else torch.ops.remat.split)(data, num)


def fold_in(data: Tensor, value: int | Tensor) -> Tensor:
    """Return the key that `split` would give at index `value`: uint64[..., 2].

    Args:
        data: The keys.
        value: From 0 to 2**64 - 1; or a tensor of integers, taken modulo 2**64, that
            broadcasts with the keys.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(_NO_INTEGERS.format(got=value.dtype))
        if is_unwatched(data) and is_unwatched(value):
            return _fold_in_tensor(data, value)
        return torch.ops.remat.fold_in_tensor(data, value)
    if not 0 <= value < 2**64:
        raise ValueError(_NO_WORD.format(got=value))
    value -= value >> 63 << 64
    return (_fold_in if is_unwatched(data) else torch.ops.remat.fold_in)(data, value)


_NO_INTEGERS = (
    "remat: `fold_in` takes an integer or a tensor of integers, got a tensor of {got}. "
    "Convert it, or fold in its position."
)
_NO_WORD = (
    "remat: `fold_in` takes an integer from 0 to 2**64 - 1, got {got}. Take it modulo "
    "2**64."
)


def bits(data: Tensor, n: int, width: int) -> Tensor:
    """Return random words of `width` bits (8, 16, 32 or 64): int64[..., n].

    Zero-extended, except for 64 bits: these are the bit pattern of an int64.
    """
    draw = _bits if is_unwatched(data) else torch.ops.remat.bits
    return draw(data, n, width)


def uniform(data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return numbers uniform in [0, 1): dtype[..., n]."""
    draw = _uniform if is_unwatched(data) else torch.ops.remat.uniform
    return draw(data, n, dtype)


def normal(data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers: dtype[..., n]."""
    draw = _normal if is_unwatched(data) else torch.ops.remat.normal
    return draw(data, n, dtype)


# --- Kernels ----------------------------------------------------------------------


def _split(data: Tensor, num: int) -> Tensor:
    return _philox.split(data.reshape(-1, 2), num).view(num, *data.shape)


def _fold_in(data: Tensor, value: int) -> Tensor:
    return _philox.fold_in(data.reshape(-1, 2), value).view(data.shape)


def _fold_in_tensor(data: Tensor, value: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(data.shape[:-1], value.shape)
    rows = data.expand(*shape, 2).reshape(-1, 2)
    words = value if value.dtype == torch.uint64 else value.to(torch.int64)
    words = words.view(torch.int64).expand(shape).reshape(-1)
    return _philox.fold_in(rows, words).view(*shape, 2)


def _draw(kernel: Callable[[Tensor, int, Any], Tensor]) -> Callable[..., Tensor]:
    def draw(data: Tensor, n: int, kind: Any) -> Tensor:
        return kernel(data.reshape(-1, 2), n, kind).view(*data.shape[:-1], n)

    return draw


_bits = _draw(_philox.bits)
_uniform = _draw(_philox.uniform)
_normal = _draw(_philox.normal)


# --- What the shapes are ------------------------------------------------------------


def _split_shape(data: Tensor, num: int) -> Tensor:
    return data.new_empty(num, *data.shape)


def _fold_in_shape(data: Tensor, value: int) -> Tensor:
    del value
    return data.new_empty(data.shape)


def _fold_in_tensor_shape(data: Tensor, value: Tensor) -> Tensor:
    return data.new_empty(*torch.broadcast_shapes(data.shape[:-1], value.shape), 2)


def _bits_shape(data: Tensor, n: int, width: int) -> Tensor:
    del width
    return data.new_empty(*data.shape[:-1], n, dtype=torch.int64)


def _draw_shape(data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return data.new_empty(*data.shape[:-1], n, dtype=dtype)


# --- Batches: more keys -------------------------------------------------------------


def _batched(op: Any, out_dim: int = 0) -> Callable[..., tuple[Tensor, int]]:
    def rule(info: Any, in_dims: Any, data: Tensor, *args: Any) -> tuple[Tensor, int]:
        del info
        return op(data.movedim(in_dims[0], 0), *args), out_dim

    return rule


def _batched_fold_in(
    info: Any, in_dims: Any, data: Tensor, value: Tensor
) -> tuple[Tensor, int]:
    del info
    rank = max(
        data.ndim - 1 - (in_dims[0] is not None), value.ndim - (in_dims[1] is not None)
    )
    if in_dims[0] is not None:
        data = _with_rank(data.movedim(in_dims[0], 0), rank + 2)
    if in_dims[1] is not None:
        value = _with_rank(value.movedim(in_dims[1], 0), rank + 1)
    return torch.ops.remat.fold_in_tensor(data, value), 0


def _with_rank(batch: Tensor, ndim: int) -> Tensor:
    """Put dimensions of size one behind the first."""
    return batch[(slice(None), *[None] * (ndim - batch.ndim))]


# --- Registration -----------------------------------------------------------------

for _schema, _kernel, _shape in (
    ("split(Tensor data, SymInt num) -> Tensor", _split, _split_shape),
    ("fold_in(Tensor data, int value) -> Tensor", _fold_in, _fold_in_shape),
    (
        "fold_in_tensor(Tensor data, Tensor value) -> Tensor",
        _fold_in_tensor,
        _fold_in_tensor_shape,
    ),
    ("bits(Tensor data, SymInt n, int width) -> Tensor", _bits, _bits_shape),
    ("uniform(Tensor data, SymInt n, ScalarType dtype) -> Tensor", _uniform, _draw_shape),
    ("normal(Tensor data, SymInt n, ScalarType dtype) -> Tensor", _normal, _draw_shape),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{_name}", _shape, lib=_LIBRARY)
    torch.library.register_vmap(
        f"remat::{_name}",
        _batched_fold_in
        if _name == "fold_in_tensor"
        else _batched(
            getattr(torch.ops.remat, _name).default, 1 if _name == "split" else 0
        ),
        lib=_LIBRARY,
    )
