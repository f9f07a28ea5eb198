"""Numbers storages, in the order in which they are met.

Called by `recorder`, which refers to storages by these numbers, and by the reports.

Invariant: tensors that share a storage have the same number, and a number is never used
for two storages: each storage is referred to weakly, so that its address is not used
again. Rejected: to number every tensor by its storage. Sparse, nested and quantized
tensors have several storages or none, so each such tensor has a number of its own, and
is held. A wrapper of one tensor, such as a DTensor, is such a tensor too: `inside` has
the number of the storage that it wraps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat._base.absent import PLAIN, Absent
from remat._base.wrappers import wrapped_by
from remat._torch import StorageRef, base_tensor, no_torch_functions, storage_id


class Storages:
    """The numbers of the storages that were met.

    Attributes:
        inside: for each wrapper of a tensor, the number of the storage that it wraps.
    """

    __slots__ = ("_numbers", "_references", "inside")

    def __init__(self) -> None:
        self.inside: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._references: list[Any] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, a new one if it has none yet."""
        strided = is_strided(tensor)
        key = key_if(strided, tensor)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._references.append(_reference_if(strided, tensor))
            if not strided:
                self._look_inside(tensor, number)
        return number

    def _look_inside(self, tensor: Tensor, number: int) -> None:
        inner = wrapped_by(tensor)
        if inner is not None:
            inner_number = self.number(inner)
            self.inside[number] = self.inside.get(inner_number, inner_number)

    def numbers(
        self, tensors: Sequence[Tensor], strided: Sequence[bool]
    ) -> tuple[int, ...]:
        """Return the number of each tensor, given whether each `is_strided`."""
        known = map(self._numbers.get, map(key_if, strided, tensors))
        pairs = zip(tensors, known, strict=True)
        return tuple([self.number(t) if n is None else n for t, n in pairs])

    def known(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it has none yet."""
        return self._numbers.get(key_of(base_tensor(tensor)))

    def alias(self, tensor: Tensor, number: int) -> None:
        """Give a tensor the number of another one, of which it is a copy."""
        base = base_tensor(tensor)
        strided = is_strided(base)
        self._numbers[key_if(strided, base)] = number
        self._references.append(_reference_if(strided, base))


def key_of(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from others, while both exist."""
    return key_if(is_strided(tensor), tensor)


def key_if(strided: bool, tensor: Tensor) -> int:
    """Return `key_of` a tensor, given whether it `is_strided`."""
    if type(tensor) is Absent:
        return id(tensor.storage_of)
    return storage_id(tensor) if strided else id(tensor)


def _reference_if(strided: bool, tensor: Tensor) -> Any:
    """Return an object that keeps the key of a tensor from being used again."""
    if type(tensor) is Absent:
        return tensor.storage_of
    return StorageRef(storage_of(tensor)) if strided else tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor."""
    # A recorder around this one would take it for the user's code reading memory.
    with no_torch_functions():
        return tensor.untyped_storage()


def is_strided(tensor: Tensor) -> bool:
    """Say whether a tensor is a strided view of one storage, and nothing more."""
    return not sees_operations(tensor) and has_one_storage(tensor)


def has_one_storage(tensor: Tensor) -> bool:
    """Say `is_strided` of a tensor that does not see operations."""
    return tensor.layout is torch.strided and not (
        tensor.is_quantized or tensor.is_nested
    )


def sees_operations(tensor: Tensor) -> bool:
    """Say whether a tensor is of a subclass that has a `__torch_dispatch__`."""
    kind = type(tensor)
    if kind in PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    return not hasattr(tensor, "fake_mode")


def is_of_subclass(tensor: Tensor) -> bool:
    """Say whether a tensor is of a subclass, which may see the functions called."""
    return type(tensor) not in PLAIN and not hasattr(tensor, "fake_mode")
