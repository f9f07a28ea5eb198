"""What a forward may write to unseen: its values before, and how they are put back.

`saved_inputs` notes the bytes of such inputs, or copies them. `refill` recomputes in
these contexts.

Invariant: a tensor that is not in memory that can be read at once is copied by torch.
After a context all tensors hold what they held, and no version was counted.
Rejected: a copy of each tensor. To make one and to compare it costs ten times as much
as to read a few bytes, and most forwards write to none.
"""

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from ctypes import string_at

import torch
from torch import Tensor

from remat._torch import (
    Renorm,
    function_mode_count,
    is_shared,
    no_torch_functions,
    preserved_version,
    renorms_taken_back,
    unseen,
)
from remat._transform.leaves import addresses_of


# Those of which the bytes are the values, whatever the tensor is marked as.
_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


Memory = tuple[int, bytes]  # an address, and what is there


def memory_of(tensor: Tensor) -> Memory | None:
    """Return where a tensor is and what it holds; None if that cannot be read at once.

    None of a copy that shares memory until it is written: to torch this is a write.
    """
    if function_mode_count():
        with no_torch_functions():  # a mode may note who reads memory
            return _memory_of(tensor)
    return _memory_of(tensor)


def _memory_of(tensor: Tensor) -> Memory | None:
    if (
        type(tensor) is not Tensor
        or not tensor.is_cpu
        or tensor.dtype not in _DTYPES
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or is_shared(tensor)
    ):
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # it has no memory
        return None
    return address, string_at(address, tensor.nbytes)


def written_to(tensors: Sequence[Tensor], befores: Mapping[int, Memory]) -> list[int]:
    """Return which tensors hold other bytes than before, or are elsewhere."""
    now = addresses_of([tensors[i] for i in befores])
    if now is None:
        return [*befores]
    pairs = zip(befores.items(), now, strict=True)
    return [
        i
        for (i, (address, held)), where in pairs
        if where != address or string_at(address, len(held)) != held
    ]


def with_bytes(tensor: Tensor, held: bytes) -> Tensor:
    """Return a tensor like another that holds bytes."""
    with unseen():
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        ctypes.memmove(copy.data_ptr(), held, len(held))
    return copy


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, which no mode sees."""
    if type(tensor) is not Tensor:
        return tensor.clone()  # a fake tensor has no memory for a kernel to read
    with unseen():
        return tensor.clone()


def can_be_put_back(tensor: Tensor) -> bool:
    """Say whether a tensor may be written to: on a device, copies stand in for it."""
    return type(tensor) is Tensor and tensor.is_cpu and not tensor.is_inference()


class PutBack:
    """A context in which tensors hold other values, in place.

    Args:
        tensors: that are written.
        values: what they are to hold.
    """

    __slots__ = ("_before", "_tensors", "_values", "_versions")

    def __init__(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._tensors, self._values = tensors, values

    def __enter__(self) -> None:
        self._versions = preserved_version((*self._tensors,))
        self._versions.__enter__()
        with unseen():
            self._before = [t.detach().clone() for t in self._tensors]
        self._write(self._values)

    def __exit__(self, *_: object) -> None:
        self._write(self._before)
        self._versions.__exit__(None, None, None)

    def _write(self, values: Sequence[Tensor]) -> None:
        with unseen():
            for tensor, value in zip(self._tensors, values, strict=True):
                if tensor.shape != value.shape:
                    tensor.resize_(value.shape)
                tensor.data.copy_(value)


class RowsPutBack:
    """A context in which weights of embeddings hold the rows of before a forward.

    Args:
        pairs: a weight, and what embeddings did to it from that forward on, in order.
    """

    __slots__ = ("_around", "_now", "_pairs")

    def __init__(self, pairs: Sequence[tuple[Tensor, Sequence[Renorm]]]) -> None:
        self._pairs = pairs

    def __enter__(self) -> None:
        self._around = contextlib.ExitStack()
        self._around.enter_context(renorms_taken_back())
        weights = tuple(t for t, _ in self._pairs)
        self._around.enter_context(preserved_version(weights))
        with unseen(), torch.no_grad():
            self._now = [
                [t.detach()[renorm.rows] for renorm in found]
                for t, found in self._pairs
            ]
            for t, found in self._pairs:
                for renorm in reversed(found):
                    t.data[renorm.rows] = renorm.before

    def __exit__(self, *_: object) -> None:
        with unseen(), torch.no_grad():
            for (t, found), now in zip(self._pairs, self._now, strict=True):
                for renorm, rows in zip(found, now, strict=True):
                    t.data[renorm.rows] = rows
        self._around.close()
