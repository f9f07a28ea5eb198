"""Buffers that forwards leave as they are: they are watched, and not copied.

A write to a buffer may not be counted by torch, so a call copies its buffers before the
forward. Of a table that no forward writes to, that would be a copy in each call. So
what is large, or one of very many, is copied only until a forward has left it alone.
From then on its version and a checksum of its bytes tell whether a forward wrote to it.

`saved_inputs` asks which inputs to copy, and tells which of them stayed as they were.

Invariant: a write is never missed. What is copied in each call is bounded: `_EACH` and
`_ALL` for small buffers, which running statistics are, and `_OTHERS` for the others.
Rejected: to watch from the start. The value before a write would be gone. Rejected: a
copy that shares memory until it is written. The write moves the user's buffer, and an
array that NumPy made of it is left with memory that is freed.
"""

import ctypes
import weakref
import zlib
from collections.abc import Collection, Sequence

from torch import Tensor

from remat._torch import unseen


_EACH = 2**13  # bytes of one that is always copied
_ALL = 2**18  # bytes of all of these
_OTHERS = 2**16  # bytes of the others, below which they are always copied, too


class Still:
    """Which inputs of one call are copied, and which are watched.

    Args:
        inputs: of the call.
        candidates: the indices of those to which a write may not be counted.

    Attributes:
        copied: the indices of those that are to be copied.
    """

    __slots__ = ("_later", "_sums", "copied")

    def __init__(self, inputs: Sequence[Tensor], candidates: Sequence[int]) -> None:
        self._later: Sequence[int] = ()
        self._sums: dict[int, int] = {}
        self.copied = frozenset(candidates)
        if sum(inputs[i].nbytes for i in candidates) > _OTHERS:
            self._later = _not_always_copied(inputs, candidates)
            still = [i for i in self._later if id(inputs[i]) in _STILL]
            self._sums = {i: _sum_of(inputs[i]) for i in still}
            self.copied -= {*still}

    def note(self, inputs: Sequence[Tensor], changed: Collection[int]) -> None:
        """Note which inputs a forward left as they were."""
        for i in self._later:
            if i not in changed and inputs[i].is_cpu and not inputs[i].is_quantized:
                _note(inputs[i])

    def written(self, inputs: Sequence[Tensor]) -> list[int]:
        """Return the watched inputs that hold other bytes than before the forward."""
        return [i for i, before in self._sums.items() if _sum_of(inputs[i]) != before]

    def forget(self, inputs: Sequence[Tensor], changed: Sequence[int]) -> None:
        """Have those that a forward wrote to copied in later calls."""
        for i in changed:
            _STILL.pop(id(inputs[i]), None)


_STILL: dict[int, weakref.ref[Tensor]] = {}


def _note(tensor: Tensor) -> None:
    key = id(tensor)
    if key not in _STILL:
        _STILL[key] = weakref.ref(tensor, lambda _: _STILL.pop(key, None))


def _not_always_copied(
    inputs: Sequence[Tensor], candidates: Sequence[int]
) -> Sequence[int]:
    left, later = _ALL, list[int]()
    for i in sorted(candidates, key=lambda i: inputs[i].nbytes):
        left -= inputs[i].nbytes
        if left < 0 or inputs[i].nbytes > _EACH:
            later.append(i)
    is_little = sum(inputs[i].nbytes for i in later) <= _OTHERS
    return () if is_little else later


def _sum_of(tensor: Tensor) -> int:
    with unseen():
        held = tensor.contiguous()
        memory = (ctypes.c_char * held.nbytes).from_address(held.data_ptr())
        return zlib.crc32(memory)
