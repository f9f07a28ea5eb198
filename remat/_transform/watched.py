"""Buffers that forwards leave as they are: watched by a checksum, and not copied.

Invariant: what is remembered of a buffer goes with it.
Rejected: to copy a mask of a causal model in each call.
"""

import ctypes
import weakref
import zlib
from collections.abc import Sequence

from torch import Tensor

from remat._torch import unseen


# Of the inputs that may be written to, small ones are copied in each call, up to some
# bytes in all. The others are watched, if they are more than some bytes.
_COPIED_EACH = 2**13
_COPIED_IN_ALL = 2**18
WATCHED_FROM = 2**16
# Those that the last forward left as they were.
STILL: dict[int, weakref.ref[Tensor]] = {}


def note_still(tensor: Tensor) -> None:
    """Note that a forward left a tensor as it was."""
    key = id(tensor)
    if key not in STILL:
        STILL[key] = weakref.ref(tensor, lambda _: STILL.pop(key, None))


def to_watch(inputs: Sequence[Tensor], found: Sequence[int]) -> list[int]:
    """Return which of some inputs are not copied in each call, but watched."""
    left, later = _COPIED_IN_ALL, list[int]()
    for i in sorted(found, key=lambda i: inputs[i].nbytes):
        left -= inputs[i].nbytes
        if left < 0 or inputs[i].nbytes > _COPIED_EACH:
            later.append(i)
    return later if sum(inputs[i].nbytes for i in later) > WATCHED_FROM else []


def sum_of(tensor: Tensor) -> int:
    with unseen():
        held = tensor.contiguous()
        memory = (ctypes.c_char * held.nbytes).from_address(held.data_ptr())
        return zlib.crc32(memory)
