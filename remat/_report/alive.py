"""Counts the bytes of the storages that are alive, of tensors with or without values.

Invariant: a storage counts from the operation that makes it until its last reference is
gone, with the bytes that an allocator takes for it. It has one number all that time,
and is not held.
Rejected: the profiler for this. Tensors without values allocate nothing.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from remat._base.absent import Absent
from remat._base.observer import Observer
from remat._torch import storage_id


class Alive(Observer):
    """Numbers storages, and counts their bytes."""

    is_of_call = False

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []  # in the order in which they were met
        self.live = 0
        self._numbers: dict[int, tuple[int, Any, torch.device]] = {}

    def hold(self, tensor: Tensor) -> int:
        """Count the storage of a tensor until it is freed; return its number, or -1."""
        if not has_storage(tensor):
            return -1
        key = storage_id(tensor)
        known = self._numbers.get(key)
        if known is not None:
            return known[0]
        return self._count(tensor.untyped_storage(), key, tensor.device)

    def _count(self, storage: Any, key: int, device: torch.device) -> int:
        number, size = len(self.sizes), allocated(storage.nbytes(), device)
        freed = weakref.ref(storage, partial(self._free, key, number))
        self._numbers[key] = number, freed, device
        self.sizes.append(size)
        self.live += size
        return number

    def resized(self, storage: Any) -> tuple[int, int]:
        """Count a storage anew whose size was changed; return both numbers, or -1."""
        key = storage._cdata
        if key not in self._numbers:
            return -1, -1
        before, _, device = self._numbers[key]
        self._free(key, before, None)
        return before, self._count(storage, key, device)

    def is_held(self, tensor: Tensor) -> bool:
        """Say whether the storage of a tensor is counted."""
        return has_storage(tensor) and storage_id(tensor) in self._numbers

    def _free(self, key: int, number: int, _: Any) -> None:
        del self._numbers[key]
        self.live -= self.sizes[number]
        self.freed(number)

    def freed(self, number: int) -> None:
        """Be told that a storage was freed."""


def has_storage(tensor: Tensor) -> bool:
    """Say whether the bytes of a tensor are those of one storage."""
    if type(tensor) is Absent or tensor.layout is not torch.strided:
        return False
    return not tensor.is_nested


def allocated(nbytes: int, device: torch.device) -> int:
    """Return the bytes that an allocator takes for a storage."""
    block = 512 if device.type == "cuda" else 1
    return -(-nbytes // block) * block
