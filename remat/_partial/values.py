"""Tensors as data: what a record holds of them, and what tells their storages apart.

Invariant: nothing here reads a value. Rejected: to take every tensor for its storage.
Sparse, nested and quantized ones have several or none, and are told apart as objects.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat._base.absent import PLAIN, Absent, tensors_of
from remat._base.op import Value
from remat._base.types import CONSTANTS
from remat._offload.bytes import extent
from remat._partial.plan import Passed, Slot
from remat._torch import StorageRef, no_torch_functions, storage_id


def key_of(tensor: Any) -> int:
    """Return what tells storages apart, among those that are held."""
    return key_if(is_plain(tensor), tensor)


def key_if(plain: bool, tensor: Any) -> int:
    """Return the key of a tensor that is known to be plain, or not to be."""
    if type(tensor) is Absent:
        return id(tensor.storage_of)
    return storage_id(tensor) if plain else id(tensor)


def reference_if(plain: bool, tensor: Any) -> Any:
    """Return what, while it is held, keeps the key from standing for another."""
    if type(tensor) is Absent:
        return tensor.storage_of
    return StorageRef(_storage_of(tensor)) if plain else tensor


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    # A recorder around this one would take it for the user's reading memory.
    with no_torch_functions():
        return tensor.untyped_storage()


def is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is a view of one storage, and nothing more."""
    plain = not is_of_own_class(tensor) and tensor.layout is torch.strided
    return plain and not (tensor.is_quantized or tensor.is_nested)


def is_of_own_class(tensor: Tensor) -> bool:
    """Say whether a tensor is of a class that sees the operations done with it."""
    kind = type(tensor)
    if kind in PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    return not hasattr(tensor, "fake_mode")


def is_watched(tensor: Tensor) -> bool:
    """Say whether a tensor is of a class that sees the functions called with it."""
    return type(tensor) not in PLAIN and not hasattr(tensor, "fake_mode")


def value_of(tensor: Tensor) -> Value:
    """Return the metadata of a tensor."""
    with no_torch_functions():  # as in `_storage_of`
        return _value_if(is_plain(tensor), tensor)


def _value_if(plain: bool, tensor: Tensor) -> Value:
    if plain:
        where = tensor.stride(), int(tensor.storage_offset())
        return _value(tensor.shape, tensor.dtype, tensor.device, *where)
    shape = () if tensor.is_nested else tensor.shape
    return _value(shape, tensor.dtype, tensor.device)


def can_be_seen_as(tensor: Tensor, value: Value) -> bool:
    """Say whether a tensor is that, or its storage as large as such a view needs."""
    if value_of(tensor) == value:
        return True
    is_strided = is_plain(tensor) and len(value.stride) == len(value.shape)
    if not is_strided or tensor.dtype != value.dtype:
        return False
    end = value.offset + extent(value.shape, value.stride)
    return end * value.dtype.itemsize <= _storage_of(tensor).nbytes()


def _value(shape: Sequence[int], *meta: Any) -> Value:
    try:
        return _shared_value(shape, *meta)
    except TypeError:  # sizes that depend on values do not hash
        return Value(tuple(shape), *meta)


# Many tensors are alike, and to make one costs more than all that is looked at for it.
@functools.lru_cache(maxsize=4096)
def _shared_value(shape: Sequence[int], *meta: Any) -> Value:
    return Value(tuple(shape), *meta)


class Looks:
    """What is known of the tensors that an operation takes, or of those it returns.

    Each is looked at once, which costs more than all else that is noted of it.

    Attributes:
        tensors: in order.
        plain: whether each is.
        values: the metadata of each.
    """

    __slots__ = ("plain", "tensors", "values")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.plain: list[bool] = []
        self.values: list[Value] = []

    def _look_at(self, tensor: Tensor) -> Value:
        plain = is_plain(tensor)
        value = _value_if(plain, tensor)
        self.tensors.append(tensor)
        self.plain.append(plain)
        self.values.append(value)
        return value


class Given(Looks):
    """The arguments of an operation, to be looked at before it changes them.

    Attributes:
        args: the positional ones.
        kwargs: those by name.
        described: both, as an `Op` holds them.
    """

    __slots__ = ("args", "described", "kwargs")

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs
        positional = tuple(map(self._described, args))
        named = [(name, self._described(arg)) for name, arg in kwargs.items()]
        self.described = positional, tuple(named)

    def _described(self, arg: Any) -> Any:
        if type(arg) in _ATOMS:
            return arg
        if isinstance(arg, Tensor):
            return self._look_at(arg)
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._described, arg))
        if isinstance(arg, dict):
            for tensor in tensors_of(arg):
                self._look_at(tensor)
        # A generator is the user's, and not to be held.
        return type(arg)


class Returned(Looks):
    """What an operation returned.

    Attributes:
        form: that, without its tensors.
    """

    __slots__ = ("_passed", "form")

    def __init__(self, result: Any, given: Given) -> None:
        super().__init__()
        self._passed = dict(zip(map(id, given.tensors), itertools.count()))
        self.form = self._form_of(result)

    def _form_of(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            self._look_at(result)
            k = self._passed.get(id(result))
            return Slot(len(self.tensors) - 1) if k is None else Passed(k)
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._form_of, result))
        return result


_ATOMS = CONSTANTS - {torch.Size}
