"""Tensors that torch gives no public way to make or to tell; fake ones; storages.

A storage has one number wherever remat tells storages apart: `storage_id` of a tensor
on it, which is the address of a `StorageRef`.

Invariant: nothing here reads a value or keeps a storage alive. What is copied as fake
keeps its devices, its ties and the memory that it shares.
Rejected: tensors on the meta device: autocast and the choice of attention kernels
depend on the device. Addresses of memory: storages without bytes share one.
"""

import logging
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    transform_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from remat._torch.fakes import RememberingMode
from remat._torch.shards import copied_without_sending
from remat._torch.tracing import eager_only


T = TypeVar("T")

# Made as remat is imported. Made later they could be operations of a user's call, whose
# record they would be in, or of another device.
EMPTY = torch.empty(0, device="cpu")
EMPTY_LEAF = torch.empty(0, device="cpu", requires_grad=True)

# Deleted by: a public fake tensor that needs no mode.
tensor_without_data: Callable[..., Any] = Tensor._make_wrapper_subclass

# Deleted by: subclasses without data whose address cannot be taken.
refuse_data_ptr: Callable[[Tensor], None] = vars(torch._C)[
    "_set_throw_on_mutable_data_ptr"
]


# Deleted by: a public plain tensor that has metadata and no memory.
def has_no_memory(tensor: Tensor) -> bool:
    """Say whether a tensor is plain to Python, of a subclass to torch, without data."""
    return type(tensor) is Tensor and _keys_of(tensor).has(_PYTHON)


_keys_of: Callable[[Tensor], Any] = vars(torch._C)["_dispatch_keys"]
_PYTHON = torch._C.DispatchKey.Python


# Deleted by: a public way for a subclass to have no `__torch_function__`.
no_torch_function: Any = torch._C._disabled_torch_function_impl


# Deleted by: a public `Tensor.is_zerotensor`.
def is_lazy(tensor: Tensor) -> bool:
    """Say whether what operations do with a tensor depends on more than metadata."""
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


# Deleted by: a FakeTensorMode that takes tensors made outside of it.
def as_fake(tensor: Tensor) -> Tensor:
    """Return a tensor that has no wrapper as one of the FakeTensorMode there is."""
    mode: Any = torch._C._get_dispatch_mode(_FAKE)
    if mode is None or type(tensor) is not Tensor:
        return tensor
    return tensor if is_functorch_wrapped_tensor(tensor) else mode.from_tensor(tensor)


# Deleted by: a public way to ask which FakeTensorMode there is.
def fake_mode_here() -> Any:
    return torch._C._get_dispatch_mode(_FAKE)


_FAKE = torch._C._TorchDispatchModeKey.FAKE

# Deleted by: a public class of what fake tensors refuse.
NO_VALUES = DataDependentOutputException, DynamicOutputShapeException


class AddressAnswers(TorchFunctionMode):
    """Answers what torch answers by the address of a fake tensor, which is 0."""

    is_remats_check = True

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is _TENSOR.const_data_ptr and is_fake(args[0]):
            func = _TENSOR.data_ptr  # which its storage refuses
        elif func is _TENSOR.__deepcopy__ and is_fake(args[0]):
            func = _deep_copy
        return func(*args, **(kwargs or {}))


_TENSOR: Any = Tensor


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


# Deleted by: fake tensors that say where they are without being dispatched.
DEVICE_OF: Any = torch.ops.prim.device.default


def fake_device(fake: Any) -> torch.device:
    """Say where a fake tensor is, as its mode does."""
    is_inside = fake.fake_mode.in_kernel_invocation
    return torch.device("meta") if is_inside else fake.fake_device


# Deleted by: a public FakeTensorMode that keeps the values that are known.
def fake_mode() -> Any:
    """Return a mode in which operations make fake tensors, also of real ones.

    They refuse their address: kernels that torch does not see would write there.
    Integers that are there keep their values, and so do those that `arange` makes, and
    results of these alone: a mask can be asked whether it is all true.
    """
    return _WithIntegers()


class _WithIntegers(RememberingMode):
    """Computes with copies of integers that are there."""

    def __init__(self) -> None:
        super().__init__()
        # By the storage of a user: that one, so that its number stays, and the copy.
        self._copies: dict[int, tuple[Any, Any]] = {}

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # `eager_only` does that, in a fifth of the time

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE_OF and is_fake(args[0]):
            return fake_device(args[0])
        kwargs = kwargs or {}
        key = self.key_of(func, args, kwargs)
        if key is not None:
            found = self.made_again(key, args)
            if found is not NotImplemented:
                return found
        passed = tree_leaves((args, kwargs))
        if func.overloadpacket is torch.ops.aten.arange:
            found = self.dispatch(func, types, args, kwargs)
            return self._arranged(found, func, args, kwargs)
        if not any(type(x) is Tensor and _is_known(x) for x in passed):
            return self.noted(key, func, types, args, kwargs)
        args, kwargs = tree_map_only(Tensor, self.copied, (args, kwargs))
        if all(_is_known(x) for x in passed if isinstance(x, Tensor)):
            return tree_map_only(Tensor, self._result, func(*args, **kwargs))
        return self.dispatch(func, types, args, kwargs)

    def _arranged(self, found: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `arange` makes, with its values if these are kept."""
        is_number = found.is_floating_point() or found.is_complex()
        if is_number or found.device.type != "cpu" or found.numel() > _KNOWN:
            return found
        return self._result(func(*args, **kwargs))

    def _result(self, tensor: Tensor) -> Any:
        if not _is_known(tensor):
            return self.from_tensor(tensor)
        vars(tensor)[_COPIED] = True
        return tensor

    def copied(self, tensor: Any) -> Any:
        """Return what stands for a user's tensor here; others as they are."""
        if type(tensor) is not Tensor or not _is_known(tensor):
            return tensor
        if _COPIED in vars(tensor):
            return tensor
        key = storage_id(tensor)
        if key not in self._copies:
            storage = tensor.untyped_storage()
            self._copies[key] = storage, storage.clone()
        view = tensor.storage_offset(), tensor.shape, tensor.stride()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return self._result(copy.set_(self._copies[key][1], *view))


_KNOWN = 1 << 22  # elements of a tensor whose values are kept
_COPIED = "_remat_copied"  # the mark of tensors that are not the user's


def _is_known(tensor: Tensor) -> bool:
    """Say whether the values of a tensor are kept: if it is small, and of integers."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if is_number or tensor.is_meta or is_fake(tensor):
        return False
    is_plain = tensor.layout is torch.strided and not is_functorch_wrapped_tensor(
        tensor
    )
    return is_plain and tensor.numel() <= _KNOWN


# Deleted by: fake kernels that raise without writing to a log.
@contextmanager
def without_log_of_fakes() -> Iterator[None]:
    """Have an error of a fake kernel raised alone. The log has twenty lines of it."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def empty_in(mode: Any, tensor: Tensor) -> Tensor:
    """Return a fake tensor like one of any level, of memory of its own."""
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


# Deleted by: a public way to copy a module as fake tensors.
def copied_as_fake(
    value: T,
    mode: Any,
    device: torch.device,
    replicas: Sequence[Any] = (),
    shards: Sequence[Any] = (),
) -> T:
    """Return a deep copy whose tensors are fake, on `device` if they are on meta."""
    with _Copying(mode, device):
        return copied_without_sending(value, replicas, shards)


class _Copying(TorchFunctionMode):
    """Makes copies of tensors fake."""

    def __init__(self, mode: Any, device: torch.device) -> None:
        super().__init__()
        self._mode, self._device = mode, device

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch._C.TensorBase.clone:  # by the copy of a parameter
            return self._fake(args[0])
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._copied(tensor)
            return memo[id(tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _copied(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            if type(tensor) is Tensor and _is_known(tensor):
                return self._mode.copied(tensor)
            fake = self._fake(tensor.detach()).requires_grad_(tensor.requires_grad)
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake

    def _fake_part(self, _: str, part: Any) -> Any:
        # One of a DTensor is its mesh.
        return self._fake(part) if isinstance(part, Tensor) else part

    def _fake(self, tensor: Tensor) -> Any:
        if is_traceable_wrapper_subclass(tensor):
            return transform_subclass(tensor, self._fake_part)
        if not (is_fake(tensor) or tensor.is_meta):
            return self._mode.from_tensor(tensor, static_shapes=True)
        device = self._device if tensor.is_meta else tensor.device
        view = tensor.storage_offset(), tensor.shape, tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return FakeTensor(
            self._mode, empty.set_(tensor.untyped_storage(), *view), device
        )


# Deleted by: optimizers that ask what a tensor is by `isinstance`.
@contextmanager
def foreach_of_fakes() -> Iterator[None]:
    """Have optimizers take fake tensors for tensors where they choose `foreach`."""
    _FOREACH_TYPES.append(FakeTensor)
    try:
        yield
    finally:
        _FOREACH_TYPES.remove(FakeTensor)


_FOREACH_TYPES: list[type] = vars(sys.modules[torch.optim.Optimizer.__module__])[
    "_foreach_supported_types"
]


# Deleted by: a public way to say where a GradScaler has its scale, or that it has none.
@contextmanager
def scales_put_back() -> Iterator[None]:
    """Take from each `GradScaler` the scale that it makes for the first loss."""
    begun: list[Any] = []

    def noted(scaler: Any, device: torch.device) -> None:
        begun.append(scaler)
        _make_scale(scaler, device)

    setattr(torch.amp.GradScaler, _MAKE_SCALE, noted)
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, _MAKE_SCALE, _make_scale)
        for scaler in begun:
            scaler._scale = scaler._growth_tracker = None


_MAKE_SCALE = "_lazy_init_scale_growth_tracker"
_make_scale: Callable[..., None] = vars(torch.amp.GradScaler)[_MAKE_SCALE]

# --- Storages ---


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
        return _storage_of(self.address)

    def count(self) -> int:
        return _count_of_storage(self.address) if self.get() is not None else 0


# Deleted by: a public count of a tensor's references. All of Python's are one.
use_count: Callable[[Tensor], int] = operator.methodcaller("_use_count")


# Deleted by: a public way to change a tensor without counting it as a change.
preserved_version = vars(torch.autograd)["_unsafe_preserve_version_counter"]


# Deleted by: a public copy-on-write clone. A dispatch mode sees the second of one.
_is_cow: Callable[[Tensor], bool] = vars(torch._C)["_is_cow_tensor"]
SHARED_COPY: Any = torch.ops.aten._lazy_clone.default


def shared_copy(tensor: Tensor) -> Tensor | None:
    """Return a copy that shares memory until either is written, or None if none can."""
    if type(tensor) is not Tensor or has_no_memory(tensor) or tensor.is_quantized:
        return None
    try:
        return torch._lazy_clone(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def is_shared(copy: Tensor) -> bool:
    """Say whether a tensor is a `shared_copy` that was never written to."""
    return type(copy) is Tensor and _is_cow(copy)
