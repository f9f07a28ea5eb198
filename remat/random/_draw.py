"""What the samplers share: from parameters to a shape, from a key to numbers.

Invariant: numbers have the shape `key.shape + shape`, and each key's numbers are the
ones that it would give alone.
Rejected: letting a parameter widen the result. Whether it widens the result would
depend on the number of keys.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from remat._torch.levels import current_layer
from remat._torch.tracing import must_inline
from remat.random import _ops
from remat.random._key import KeyLike, data_of, integer


Shape: TypeAlias = int | tuple[int, ...] | Tensor | None
Number: TypeAlias = float | Tensor
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def draw(
    op: Callable[[Tensor, int, Any], Tensor],
    data: Tensor,
    shape: tuple[int, ...],
    kind: Any,
) -> Tensor:
    """Return `op`'s numbers, `shape` of them from each key."""
    if isinstance(shape, Sharded):
        keys = data.shape[:-1]
        whole = Sharded((*keys, *shape), shape.mesh, shape.placements, len(keys))
        return draw_each(op, data, whole, kind)
    numbers = op(data, math.prod(shape), kind)
    return numbers.reshape((*data.shape[:-1], *shape))


def shape_for(key: KeyLike, shape: Shape, **parameters: Number) -> tuple[int, ...]:
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


def as_parameter(value: Number, like: Tensor) -> Tensor:
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


def is_number(value: Number, number: float) -> bool:
    """Say whether a parameter is a Python number with this value."""
    return isinstance(value, (int, float)) and value == number


def check_scale(name: str, value: Number) -> None:
    """Raise if a number cannot be a scale."""
    if not isinstance(value, Tensor) and not value >= 0:
        raise ValueError(f"remat: `{name}` is {value}; it must be at least 0.")


def moved(z: Tensor, loc: Number, scale: Number) -> Tensor:
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
FORMATS = {
    dtype: (2 - math.frexp(info.eps)[1], math.frexp(info.tiny)[1])
    for dtype, info in ((dtype, torch.finfo(dtype)) for dtype in _FLOATS)
}


def rounded(number: float, dtype: torch.dtype) -> float:
    """Round a number as torch does. This is ten times as fast as making a tensor."""
    if dtype.itemsize == 2:
        number = rounded(number, torch.float32)
    digits, least = FORMATS[dtype]
    unit = max(math.frexp(number)[1], least) - digits
    return math.ldexp(round(math.ldexp(number, -unit)), unit)


def number_below(value: float, dtype: torch.dtype) -> float:
    """Return the next smaller value of a dtype."""
    digits, least = FORMATS[dtype]
    fraction, exponent = math.frexp(value)
    # Below a power of two, values are twice as dense.
    exponent = max(exponent - (fraction == 0.5), least) if value else least
    return value - math.ldexp(1.0, exponent - digits)


# --- Draws for DTensors ---

# Each process draws the numbers that the full draw has in its shard, bit for bit.
# Element e of a draw depends on the key and on e alone. A shard is a number of runs of
# elements in a row. A run starts at an element whose block is the first of another key:
# the same seed, with the offset of that block. So a shard is a draw from many keys.
# Rejected: a key for each process. Numbers would change with the number of processes.


class Sharded(tuple[int, ...]):
    """The shape of a draw, and how it is laid out on a mesh of devices."""

    mesh: Any
    placements: tuple[Any, ...]

    def __new__(
        cls, shape: Sequence[int], mesh: Any, placements: Sequence[Any], moved: int = 0
    ) -> "Sharded":
        """Return such a shape, whose dimensions have moved by those of keys."""
        from torch.distributed.tensor import Shard  # noqa: PLC0415

        new = super().__new__(cls, shape)
        new.mesh = mesh
        new.placements = tuple(
            Shard(p.dim + moved) if type(p) is Shard else p for p in placements
        )
        return new


def is_dtensor(value: Any) -> bool:
    """Say whether a value is a DTensor."""
    # The import takes long, and a program that has a DTensor has done it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def shape_like(x: Tensor, shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return a shape, by default a tensor's, sharded like it where as long."""
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


def draw_each(
    op: Callable[[Tensor, int, Any], Tensor], data: Tensor, shape: Sharded, kind: Any
) -> Tensor:
    """Return numbers of a shape that begins with that of the keys: a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415

    how: Any = {"run_check": False}
    part, k = local_part(shape), data.ndim - 1
    if part is None:
        numbers = op(data, math.prod(shape[k:]), kind).reshape(tuple(shape))
        everywhere = [Replicate() for _ in shape.placements]
        whole: Any = DTensor.from_local(numbers, shape.mesh, everywhere, **how)
        return whole.redistribute(placements=shape.placements)
    lengths, starts = part
    for dim in range(k):
        data = data.narrow(dim, starts[dim], lengths[dim])
    numbers = shard(op, data, shape[k:], lengths[k:], starts[k:], kind)
    size = torch.Size(shape)
    how |= {"shape": size, "stride": torch.empty(size, device="meta").stride()}
    return DTensor.from_local(numbers, shape.mesh, shape.placements, **how)


def local_part(shape: Sharded) -> tuple[list[int], list[int]] | None:
    """Return the lengths and starts of this process's block; None if it has no one."""
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
    # The number of the first element of each run.
    first = torch.zeros((), dtype=torch.int64, device="cpu")
    for d in range(last):
        places = torch.arange(lengths[d], device="cpu") + starts[d]
        first = first.unsqueeze(-1) + places * math.prod(shape[d + 1 :])
    first = first.reshape(-1) + starts[last] * math.prod(shape[last + 1 :])
    run, per_block = math.prod(lengths[last:]), _ops.per_block(kind)
    block, lane = first // per_block, first % per_block
    seed, offset = data.view(torch.int64).unsqueeze(-2).unbind(-1)
    offset = offset + block.to(data.device)
    rows = torch.stack((seed.expand_as(offset), offset), -1).view(torch.uint64)
    numbers = op(rows, run + int(lane.max()), kind)
    if not lane.any():
        return numbers[..., :run].reshape(out)
    index = lane.unsqueeze(-1) + torch.arange(run, device="cpu")
    index = index.to(numbers.device).expand(*numbers.shape[:-1], run)
    return numbers.gather(-1, index).reshape(out)
