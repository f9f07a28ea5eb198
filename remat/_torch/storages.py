"""Storages: their numbers, references to them, copies that share one.

A storage has one number wherever remat tells storages apart: `storage_id` of a tensor
on it, which is the address of a `StorageRef`.

Invariant: a number is no reference: nothing here keeps a storage alive.
Rejected: addresses of memory. Storages without bytes share one.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


# Deleted by: `UntypedStorage.__eq__`, or a public identity of storages.
storage_id: Callable[[Tensor], int] = vars(torch._C)["_storage_id"]


# Deleted by: public weak references to storages, and counts of their references.
_storage_class: Any = torch.UntypedStorage

_storage_of: Callable[[int], Any] = _storage_class._new_with_weak_ptr

_count_of_storage: Callable[[int], int] = vars(torch._C)["_storage_Use_Count"]


class StorageRef:
    """A reference to a storage that does not keep it alive."""

    __slots__ = ("_weak", "address")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)
        self.address: int = self._weak.cdata

    def get(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it was freed."""
        return _storage_of(self.address)

    def count(self) -> int:
        """Return how many references there are."""
        return _count_of_storage(self.address) if self.get() is not None else 0


# Deleted by: a public count of a tensor's references. All of Python's are one.
use_count: Callable[[Tensor], int] = operator.methodcaller("_use_count")


# Deleted by: a public way to change a tensor without counting it as a change.
preserved_version = vars(torch.autograd)["_unsafe_preserve_version_counter"]


# Deleted by: a public copy-on-write clone.
def snapshot(tensor: Tensor) -> Tensor | None:
    """Return a copy that shares memory until either is written, or None if none can."""
    if type(tensor) is not Tensor:
        return None
    try:
        return torch._lazy_clone(tensor)
    except (RuntimeError, NotImplementedError):
        return None


# Deleted by: the same. This is what a dispatch mode sees of a snapshot.
SNAPSHOT: Any = torch.ops.aten._lazy_clone.default


_is_cow: Callable[[Tensor], bool] = vars(torch._C)["_is_cow_tensor"]


def is_shared(copy: Tensor) -> bool:
    """Say whether a tensor is a `snapshot` that was never written to."""
    return type(copy) is Tensor and _is_cow(copy)
