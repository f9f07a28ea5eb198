"""Tensors as data: what a record holds of them, and what tells their storages apart.

Invariant: nothing here reads a value. Rejected: to take every tensor for its storage.
Sparse, nested and quantized ones have several or none, and are told apart as objects.
"""

from typing import Any

import torch
from torch import Tensor, nn

from remat._absent import Absent
from remat._code import CONSTANT
from remat._compat import StorageRef, no_torch_functions, storage_id
from remat._op import Value
from remat._plan import Passed, Slot


_PLAIN = {Tensor, nn.Parameter, Absent}


def key_of(tensor: Any) -> int:
    """Return what tells storages apart, among those that are held."""
    if type(tensor) is Absent:
        return id(tensor.storage_of)
    return storage_id(tensor) if is_plain(tensor) else id(tensor)


def reference_to(tensor: Any) -> Any:
    """Return what, while it is held, keeps the key from standing for another."""
    if type(tensor) is Absent:
        return tensor.storage_of
    return StorageRef(_storage_of(tensor)) if is_plain(tensor) else tensor


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    # A recorder around this one would take it for the user's reading memory.
    with no_torch_functions():
        return tensor.untyped_storage()


def is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is a view of one storage, and nothing more."""
    plain = type(tensor) in _PLAIN or hasattr(tensor, "fake_mode")
    plain = plain and tensor.layout is torch.strided
    return plain and not (tensor.is_quantized or tensor.is_nested)


def value_of(tensor: Tensor) -> Value:
    """Return the metadata of a tensor."""
    if tensor.is_nested:
        return Value((), tensor.dtype, tensor.device)
    meta = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if not is_plain(tensor):
        return Value(*meta)
    nbytes = 0 if type(tensor) is Absent else _storage_of(tensor).nbytes()
    return Value(*meta, tuple(tensor.stride()), int(tensor.storage_offset()), nbytes)


def as_data(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of an operation as an `Op` holds them."""
    named = tuple((name, _described(arg)) for name, arg in kwargs.items())
    return tuple(map(_described, args)), named


def _described(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return value_of(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(map(_described, arg))
    # A generator is the user's, and not to be held.
    return arg if type(arg) in CONSTANT else type(arg)


def form_of(result: Any, passed: dict[int, int], outputs: list[Tensor]) -> Any:
    """Return what an operation returned without its tensors, which go to `outputs`."""
    if isinstance(result, Tensor):
        outputs.append(result)
        k = passed.get(id(result))
        return Slot(len(outputs) - 1) if k is None else Passed(k)
    if isinstance(result, (list, tuple)):
        return type(result)(form_of(part, passed, outputs) for part in result)
    return result
