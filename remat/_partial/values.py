"""Describes tensors, arguments and results as data, and numbers their storages.

Invariant: tensors that share a storage have the same number, and no two storages do:
each is referred to weakly, so that its address is not used again. A description holds
no tensor. Sparse, nested and quantized tensors have several storages or none, so each
has a number of its own, and is held.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat._base.absent import PLAIN, tensors_of
from remat._base.op import Value
from remat._base.tensors import wrapped_by
from remat._base.types import CONSTANTS
from remat._offload.offload import extent
from remat._partial.plan import Passed, Slot
from remat._torch.graphs import finished
from remat._torch.levels import base_tensor
from remat._torch.modes import no_torch_functions, viewed
from remat._torch.tensors import StorageRef, storage_id


class Storages:
    """The numbers of the storages that were met."""

    __slots__ = ("_numbers", "_references", "inside")

    def __init__(self) -> None:
        # For each wrapper of a tensor, the number of the storage that it wraps.
        self.inside: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._references: list[Any] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, a new one if it has none yet."""
        key = key_of(tensor)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._references.append(_reference_to(tensor))
            inner = None if is_strided(tensor) else wrapped_by(tensor)
            if inner is not None:
                inner_number = self.number(inner)
                self.inside[number] = self.inside.get(inner_number, inner_number)
        return number

    def known(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it has none yet."""
        return self._numbers.get(key_of(base_tensor(tensor)))

    def alias(self, tensor: Tensor, number: int) -> None:
        """Give a tensor the number of another one, of which it is a copy."""
        base = base_tensor(tensor)
        self._numbers[key_of(base)] = number
        self._references.append(_reference_to(base))


def key_of(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from others, while both exist."""
    return storage_id(tensor) if is_strided(tensor) else id(tensor)


def _reference_to(tensor: Tensor) -> Any:
    """Return an object that keeps the key of a tensor from being used again."""
    return StorageRef(storage_of(tensor)) if is_strided(tensor) else tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor."""
    # A recorder around this one would take it for the user's code reading memory.
    with no_torch_functions():
        return tensor.untyped_storage()


def storage_if_any(tensor: Tensor) -> Any:
    """Return the storage of a tensor; None if it has none, as one of a vmap's end."""
    try:
        return storage_of(tensor)
    except RuntimeError:  # also NotImplementedError
        return None


def is_strided(tensor: Tensor) -> bool:
    """Say whether a tensor is a strided view of one storage, and nothing more."""
    if sees_operations(tensor) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested)


def sees_operations(tensor: Tensor) -> bool:
    """Say whether a tensor is of a subclass that has a `__torch_dispatch__`."""
    kind = type(tensor)
    if kind in PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    return not hasattr(tensor, "fake_mode")


def value_of(tensor: Tensor) -> Value:
    """Return the metadata of a tensor."""
    with no_torch_functions():  # as in `storage_of`
        if is_strided(tensor):
            where = tensor.stride(), int(tensor.storage_offset())
            return shared_value(tensor.shape, tensor.dtype, tensor.device, *where)
        shape = () if tensor.is_nested else tensor.shape
        return shared_value(shape, tensor.dtype, tensor.device)


def viewed_as(tensor: Tensor, value: Value) -> Tensor | None:
    """Return a tensor as another view of its storage; None if that is too small."""
    if value_of(tensor) == value:
        return tensor
    has_strides = is_strided(tensor) and len(value.stride) == len(value.shape)
    if not has_strides or tensor.dtype != value.dtype:
        return None
    fits = storage_bytes(value) <= storage_of(tensor).nbytes()
    return viewed(tensor, value.shape, value.stride, value.offset) if fits else None


def storage_bytes(value: Value) -> int:
    """Return the bytes of the storage that was made for a value."""
    if len(value.stride) != len(value.shape):  # of sparse and nested tensors
        return value.nbytes
    return (value.offset + extent(value.shape, value.stride)) * value.dtype.itemsize


def shared_value(shape: Sequence[int], *meta: Any) -> Value:
    """Return a `Value`, one for all that are alike."""
    try:
        return _known_value(shape, *meta)
    except TypeError:  # symbolic sizes do not hash
        return Value(tuple(shape), *meta)


# Many tensors are alike, and making a `Value` costs more than finding one here.
@functools.lru_cache(maxsize=4096)
def _known_value(shape: Sequence[int], *meta: Any) -> Value:
    return Value(tuple(shape), *meta)


class Described:
    """The tensors that an operation takes or returns, and what is known of each."""

    __slots__ = ("all_strided", "hides_aliases", "on_subclass", "tensors", "values")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[Value] = []
        self.all_strided = True
        # Whether a tensor is of a subclass, and whether that sees operations.
        self.on_subclass = self.hides_aliases = False

    def _describe(self, tensor: Tensor) -> Value:
        if type(tensor) not in PLAIN and not hasattr(tensor, "fake_mode"):
            self.on_subclass = True
            self.hides_aliases = self.hides_aliases or sees_operations(tensor)
        self.all_strided = self.all_strided and is_strided(tensor)
        self.tensors.append(tensor)
        self.values.append(value_of(tensor))
        return self.values[-1]


class Arguments(Described):
    """The arguments of an operation. Made before the operation can change them."""

    __slots__ = ("args", "described", "kwargs")

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs
        positional = tuple(map(self._described, args))
        named = [(name, self._described(arg)) for name, arg in kwargs.items()]
        self.described = positional, tuple(named)  # as an `Op` holds them

    def _described(self, arg: Any) -> Any:
        if type(arg) in _HELD_AS_IS:
            return arg
        if isinstance(arg, Tensor):
            return self._describe(arg)
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._described, arg))
        for tensor in tensors_of(arg) if isinstance(arg, dict) else ():
            self._describe(tensor)
        # Others, such as a generator, belong to the user: only their class is held.
        return type(arg)


# A `torch.Size` is described as the tuple that it is.
_HELD_AS_IS = CONSTANTS - {torch.Size}


class Results(Described):
    """What an operation returned. `form` has a `Slot` or `Passed` for each tensor."""

    __slots__ = ("_passed", "form")

    def __init__(self, result: Any, arguments: Arguments) -> None:
        super().__init__()
        self._passed = {id(t): k for k, t in enumerate(arguments.tensors)}
        self.form = self._form_of(result)

    def _form_of(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            self._describe(result)
            k = self._passed.get(id(result))
            return Slot(len(self.tensors) - 1) if k is None else Passed(k)
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._form_of, result))
        return finished(result)  # a collective's own would hold its tensors
