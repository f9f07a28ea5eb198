"""The random stream as torch operators. A draw is one node in a graph.

`data` is always uint64[..., 2], a row (seed, offset) for each key. On some devices
torch has kernels of its own. These are used, once a check has shown that they agree.

Invariant: the operators are functional and take no generator, so vmap with
`randomness="error"`, make_fx and torch.compile treat them as arithmetic. A batch of
keys gives the same numbers as its keys one by one.
Rejected: arithmetic on tensors instead of operators. One key would take 177 nodes, and
100 kernels where Python's integers are enough.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from remat._torch.modes import is_unwatched
from remat._torch.operators import native_random
from remat.random import _philox


# --- Kernels ----------------------------------------------------------------------


def _split(data: Tensor, num: int) -> Tensor:
    """Return `num` new keys for each key: uint64[num, ..., 2]."""
    native = _native(data.device)
    if native is not None and num and data.numel():
        return native.split(data.contiguous(), num)
    return _philox.split(data.reshape(-1, 2), num).view(num, *data.shape)


def _fold_in(data: Tensor, value: int) -> Tensor:
    # Not torch's own: before 2.14 it refuses integers above 2**63 - 1.
    return _philox.split(data.reshape(-1, 2), 1, value).view(data.shape)


def _bits(data: Tensor, n: int, width: int) -> Tensor:
    """Return random words: int64[..., n].

    Those of 8, 16 or 32 bits are zero-extended; 64 bits are the pattern of an int64.
    """
    return _read(data, n, torch.int64, _philox.BITS[width])


def _uniform(data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return numbers uniform in [0, 1), multiples of 2**-precision: dtype[..., n]."""
    native = _native(data.device)
    if native is not None:
        return _fill(native.uniform_, data, n, dtype)
    return _read(data, n, dtype, _philox.UNIFORM[dtype])


def _normal(data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers: dtype[..., n]."""
    # Torch's normal numbers agree to rounding only, so on the CPU ours are drawn.
    native = None if data.is_cpu else _native(data.device)
    if native is not None:
        return _fill(native.normal_, data, n, dtype)
    return _read(data, n, dtype, _philox.NORMAL[dtype])


def per_block(kind: int | torch.dtype) -> int:
    """Return how many numbers come from one block of the stream.

    `kind` is a width of bits, or the dtype of uniform or of normal numbers.
    """
    readings: Any = _philox.BITS | _philox.UNIFORM
    return readings[kind].per_block


def _read(data: Tensor, n: int, dtype: torch.dtype, reading: Any) -> Tensor:
    values = _philox.draw(data.reshape(-1, 2), n, dtype, reading)
    return values.view(*data.shape[:-1], n)


def _fill(kernel: Any, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(*data.shape[:-1], n, dtype=dtype, device=data.device)
    if out.numel():
        # The kernel takes a key for each number. All numbers of a row share one.
        keys = data.contiguous()
        kernel(keys.unsqueeze(-2) if data.ndim > 1 else keys, out)
    return out


# --- torch's own kernels ----------------------------------------------------------


@functools.cache
def _native(device: torch.device) -> Any | None:
    """Return torch's own module for a device, if it draws the same numbers as ours."""
    native = native_random(device.type)
    try:
        return native if native is not None and _agrees(native, device) else None
    except (RuntimeError, TypeError, AttributeError):
        return None  # torch's private module changed; ours still works


def _agrees(native: Any, device: torch.device) -> bool:
    """Say whether a few draws agree: normal numbers to rounding, others bit for bit."""
    keys = torch.tensor(_KEYS, dtype=torch.uint64, device="cpu")
    theirs = keys.to(device)
    same = torch.equal(native.split(theirs, 3).cpu(), _philox.split(keys, 3))
    for dtype in _philox.UNIFORM:
        uniform = _philox.draw(keys, 9, dtype, _philox.UNIFORM[dtype])
        normal = _philox.draw(keys, 9, dtype, _philox.NORMAL[dtype])
        same &= torch.equal(_fill(native.uniform_, theirs, 9, dtype).cpu(), uniform)
        drawn = _fill(native.normal_, theirs, 9, dtype).cpu()
        same &= torch.allclose(drawn, normal, rtol=1e-2, atol=1e-2)
    return same


_KEYS = [[42, 0], [2**64 - 1, 2**64 - 1], [2**40 + 3, 2**32 - 2]]


# --- vmap: a batch is more keys ---------------------------------------------------


def _more_keys(op: Any, out_dim: int) -> Callable[..., tuple[Tensor, int]]:
    def rule(info: Any, in_dims: Any, data: Tensor, *args: Any) -> tuple[Tensor, int]:
        del info  # the batch size is not needed
        return op(data.movedim(in_dims[0], 0), *args), out_dim

    return rule


# --- Operators --------------------------------------------------------------------


_LIBRARY = torch.library.Library("remat", "FRAGMENT")
F = TypeVar("F", bound=Callable[..., Tensor])


def _operator(
    schema: str,
    kernel: F,
    shape: Callable[[Tensor, Any, Any], Tensor],
    out_dim: int = 0,
) -> F:
    """Make a kernel an operator. Return the function that calls it.

    `shape` is the kernel of tensors without values; its last argument may be None.
    """

    def meta(data: Tensor, first: Any, second: Any = None) -> Tensor:
        return shape(data, first, second)

    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    # Not `register_fake`, which looks up the source of what it is given.
    _LIBRARY.impl(name, meta, "Meta")
    op: Any = getattr(torch.ops.remat, name)
    rule = _more_keys(op.default, out_dim)
    torch.library.register_vmap(f"remat::{name}", rule, lib=_LIBRARY)

    def call(data: Tensor, *args: Any) -> Tensor:
        return (kernel if is_unwatched(data) else op)(data, *args)

    return call  # pyrefly: ignore[bad-return]


def _of_row(data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return data.new_empty(*data.shape[:-1], n, dtype=dtype)


split = _operator(
    "split(Tensor data, SymInt num) -> Tensor",
    _split,
    lambda data, num, _: data.new_empty(num, *data.shape),
    out_dim=1,
)
_fold_in_number = _operator(
    "fold_in(Tensor data, SymInt value) -> Tensor",
    _fold_in,
    lambda data, *_: data.new_empty(data.shape),
)
bits = _operator(
    "bits(Tensor data, SymInt n, int width) -> Tensor",
    _bits,
    lambda data, n, _: _of_row(data, n, torch.int64),
)
uniform = _operator(
    "uniform(Tensor data, SymInt n, ScalarType dtype) -> Tensor", _uniform, _of_row
)
normal = _operator(
    "normal(Tensor data, SymInt n, ScalarType dtype) -> Tensor", _normal, _of_row
)


def fold_in(data: Tensor, value: int | Tensor) -> Tensor:
    """Return the key that `split` would give at index `value`: uint64[..., 2]."""
    if isinstance(value, Tensor):
        return _fold_in_each(data, value)
    if not 0 <= value < 2**64:
        raise ValueError(_OUT_OF_RANGE.format(got=value))
    return _fold_in_number(data, as_int64(value))


def _fold_in_each(data: Tensor, value: Tensor) -> Tensor:
    if value.dtype.is_floating_point or value.dtype in _NO_INTEGERS:
        raise TypeError(_NOT_INTEGERS.format(got=value.dtype))
    if not value.ndim and value.is_cpu and is_unwatched(value) and is_unwatched(data):
        return _fold_in_number(data, as_int64(int(value.item()) % 2**64))
    if value.dtype != torch.uint64:
        value = value.to(torch.int64)
    shape = torch.broadcast_shapes(data.shape[:-1], value.shape)
    seed, offset = data.view(torch.int64).expand(*shape, 2).unbind(-1)
    moved = torch.stack((seed, offset + value.view(torch.int64)), -1)
    return split(moved.view(torch.uint64), 1)[0]


def as_int64(word: int) -> int:
    """Return the int64 with the bits of a word. Operators take words as int64."""
    # A symbol of a trace is always below 2**63, and is returned as it is.
    return word if word < 2**63 else word - 2**64


_NO_INTEGERS = {torch.bool, torch.complex32, torch.complex64, torch.complex128}
_NOT_INTEGERS = (
    "remat: `fold_in` takes an integer or a tensor of integers, got a tensor of {got}. "
    "Convert the tensor, or fold in a position instead."
)
_OUT_OF_RANGE = (
    "remat: `fold_in` takes an integer from 0 to 2**64 - 1, got {got}. Take it modulo "
    "2**64."
)
