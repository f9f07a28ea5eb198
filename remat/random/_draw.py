"""What the samplers share: from parameters to a shape, from a key to numbers.

Invariant: numbers have the shape `key.shape + shape`, and each key's numbers are the
ones that it would give alone.
Rejected: letting a parameter widen the result. Whether it widens the result would
depend on the number of keys.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from remat._torch import current_layer, must_inline
from remat.random import _reuse, _sharded
from remat.random._key import KeyLike, data_of, integer
from remat.random._sharded import Sharded, is_dtensor, shape_like


Shape: TypeAlias = int | tuple[int, ...] | Tensor | None
Value: TypeAlias = float | Tensor
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def consumed(key: KeyLike) -> Tensor:
    """Return the data of a key, and count the key as consumed."""
    data = data_of(key)
    _reuse.consume(data)
    return data


def draw(
    op: Callable[[Tensor, int, Any], Tensor],
    data: Tensor,
    shape: tuple[int, ...],
    kind: Any,
) -> Tensor:
    """Return `op`'s numbers, `shape` of them from each key."""
    if isinstance(shape, Sharded):
        return _sharded.draw(op, data, shape, kind)
    numbers = op(data, math.prod(shape), kind)
    return numbers.reshape((*data.shape[:-1], *shape))


def shape_for(key: KeyLike, shape: Shape, **parameters: Value) -> tuple[int, ...]:
    """Return the requested shape; by default, the broadcast shape of the parameters."""
    tensors = {name: p for name, p in parameters.items() if isinstance(p, Tensor)}
    if shape is None:
        shape = torch.broadcast_shapes(*(p.shape for p in tensors.values()))
    shape = as_shape(shape)
    layout = next(filter(is_dtensor, tensors.values()), None)
    if layout is not None and not isinstance(shape, Sharded):
        shape = shape_like(layout, shape)
    for name, value in tensors.items():
        result = (*data_of(key).shape[:-1], *shape)
        if not fits(value.shape, result):
            raise ValueError(_WIDENS.format(name, list(value.shape), list(result)))
    return shape


_WIDENS = (
    "remat: `{}` has shape {}, which does not broadcast to the draws' {}. Pass a "
    "`shape` that it broadcasts to, or None to use the parameters' shape."
)


def as_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape given by a number, a sequence of numbers, a DTensor or None."""
    if shape is None:
        return ()
    if is_dtensor(shape):
        return shape_like(shape)
    if isinstance(shape, Sharded):
        return shape
    lengths = tuple(map(integer, shape if isinstance(shape, Iterable) else (shape,)))
    if any(n < 0 for n in lengths):
        raise ValueError(f"remat: no shape has negative lengths, got {list(lengths)}.")
    return lengths


def fits(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Say whether one shape broadcasts to another."""
    pairs = zip(reversed(shape), reversed(result), strict=False)
    return len(shape) <= len(result) and all(a in (1, b) for a, b in pairs)


def as_parameter(value: Value, like: Tensor) -> Tensor:
    """Return a parameter as a tensor of the dtype and device of the draws `like`."""
    if not isinstance(value, Tensor):
        if torch.compiler.is_compiling():
            # A sum, because `full` would make the number a constant of the graph.
            return torch.zeros((), dtype=like.dtype, device=like.device) + value
        return torch.full((), value, dtype=like.dtype, device=like.device)
    return value.to(like.dtype)


def is_readable(value: Tensor) -> bool:
    """Say whether values are free to read: not on a GPU and not in a trace."""
    if must_inline() or current_layer() is not None:
        return False
    return type(value) in (Tensor, torch.nn.Parameter) and value.is_cpu


def float_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the requested dtype, by default torch's. Refuse one that has no draws."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in _FLOATS:
        raise TypeError(
            f"remat: this distribution has no values in {dtype}. Use float16, "
            "bfloat16, float32 or float64."
        )
    return dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute results of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def is_number(value: Value, number: float) -> bool:
    """Say whether a parameter is a Python number with this value."""
    return isinstance(value, (int, float)) and value == number


def check_scale(name: str, value: Value) -> None:
    """Raise if a number cannot be a scale."""
    if not isinstance(value, Tensor) and not value >= 0:
        raise ValueError(f"remat: `{name}` is {value}; it must be at least 0.")


def moved(z: Tensor, loc: Value, scale: Value) -> Tensor:
    """Return `z * scale + loc`."""
    if not is_number(scale, 1):
        z = z * as_parameter(scale, z)
    return z if is_number(loc, 0) else z + as_parameter(loc, z)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def below(t: Tensor) -> Tensor:
    """Return the largest value below each one of `t`, with the derivatives of `t`."""
    # Not nextafter: it has no derivative, and no kernel for some dtypes and devices.
    bits = t.view(_BITS[t.dtype.itemsize])
    down = torch.where(bits > 0, bits - 1, bits + 1)
    down = torch.where(bits == 0, torch.iinfo(bits.dtype).min + 1, down)
    # Exact. Integers carry no derivative, so the step has none.
    return t - (bits.view(t.dtype) - down.view(t.dtype))


# Binary digits, and the exponent of the smallest normal number as frexp gives it.
_FORMATS = {
    torch.float16: (11, -13),
    torch.bfloat16: (8, -125),
    torch.float32: (24, -125),
    torch.float64: (53, -1021),
}


def rounded(number: float, dtype: torch.dtype) -> float:
    """Round a number as torch does. This is ten times as fast as making a tensor."""
    if dtype.itemsize == 2:
        number = rounded(number, torch.float32)
    digits, least = _FORMATS[dtype]
    unit = max(math.frexp(number)[1], least) - digits
    return math.ldexp(round(math.ldexp(number, -unit)), unit)


def number_below(value: float, dtype: torch.dtype) -> float:
    """Return the next smaller value of a dtype."""
    digits, least = _FORMATS[dtype]
    fraction, exponent = math.frexp(value)
    # Below a power of two, values are twice as dense.
    exponent = max(exponent - (fraction == 0.5), least) if value else least
    return value - math.ldexp(1.0, exponent - digits)
