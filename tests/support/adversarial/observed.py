"""Values as they are at one moment, to be compared later.

Invariant: two values are observed as equal only if they are equal bit for bit, in the
same order.
Rejected: to keep the values. A program changes them later.
"""

import array
import ctypes
import mmap
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class Observed(tuple):
    """What is to be compared of a value."""


def observed(value: Any) -> Observed:
    """Return what is to be compared of a value; of what is that, itself."""
    return value if isinstance(value, Observed) else Observed(_parts(value))


def _parts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (ChainMap, UserDict, Mapping)):
        items = [(observed(k), observed(v)) for k, v in value.items()]
        return type(value).__name__, items
    if isinstance(value, (list, tuple, deque, UserList)):
        kind, length = type(value).__name__, getattr(value, "maxlen", None)
        return kind, length, [observed(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, map(observed, value)))
    if isinstance(value, (bytearray, array.array, memoryview, mmap.mmap, ctypes.Array)):
        return type(value).__name__, bytes(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.number)):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.nn.Module):
        return type(value).__name__, observed(value.state_dict())
    return type(value).__name__, observed(vars(value))


def _tensor(value: torch.Tensor) -> Any:
    numbers = value.detach().to_dense().contiguous().clone()
    if numbers.dtype is torch.bfloat16:
        numbers = numbers.float()
    shape = tuple(value.shape)
    flags = value.requires_grad, value.is_leaf
    # The text of a number is exact, and says the same of each NaN.
    return "tensor", str(value.dtype), shape, flags, repr(numbers.tolist())
