"""A mode of fake tensors that knows the operations that it has done before.

A step of many layers is a few dozen operations, done hundreds of times. torch keeps
what they return, too, and takes four times as long to find it.

Invariant: what is known here is what torch has found in its own memory, for arguments
that are alike in all that torch looks at. Other operations are left to torch.
Rejected: to do a block once, and to copy what was noted of it for those like it. The
code of a block may depend on its number, or on what others have left.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from typing_extensions import override


class _RememberedResult(NamedTuple):
    """A result: an argument, a view of one, or a new tensor."""

    argument: int  # which; -1 for a new tensor
    is_view: bool = False
    view: tuple[Any, ...] = ()  # offset, sizes and strides
    dtype: Any = None
    device: Any = None
    attributes: Any = None


class _Remembered(NamedTuple):
    """What an operation returns: None stands for itself."""

    results: Sequence[_RememberedResult | None]
    is_tuple: bool


# Deleted by: a memory of a FakeTensorMode that takes less time than an operation.
class RememberingMode(FakeTensorMode):
    """Makes the results of operations that it knows, on tensors that are alike."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._allow_unsafe_data_ptr_access = False
        self._known: dict[Any, _Remembered] = {}
        self._answered = 0  # the id of the arguments that torch's memory knew last

    @override
    def _output_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Any
    ) -> Any:
        result = super()._output_from_cache_entry(state, entry, key, func, args)
        self._answered = id(args)
        return result

    def key_of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what an operation is known by; None if it is left to torch."""
        key = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        key.append(torch.is_inference_mode_enabled())
        with torch._C.DisableTorchFunction():
            if not (args and self._describe(args, key)):
                return None
            if kwargs:
                key.append(tuple(kwargs))
                if not self._describe(kwargs.values(), key):
                    return None
        return tuple(key)

    def _describe(self, values: Iterable[Any], key: list[Any]) -> bool:
        """Add what torch looks at; say whether that is all that there is."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                is_ours = value.fake_mode is self and value.constant is None
                if not (is_ours and _is_plain(value)):
                    return False
                size = value.untyped_storage().nbytes()
                key += (value.shape, value.stride(), value.storage_offset(), size)
                key += (value.dtype, value.fake_device, value.requires_grad)
                key.append(value.is_inference())
            elif kind is tuple or kind is list:
                key += (kind, len(value))
                if not self._describe(value, key):
                    return False
            elif kind in _NO_TENSORS:
                key += (kind, value)
            else:
                return False
        return True

    def made_again(self, key: Any, args: Any) -> Any:
        """Return what an operation returns; `NotImplemented` if that is not known."""
        known = self._known.get(key)
        if known is None:
            return NotImplemented
        if not known.is_tuple:
            return self._made(known.results[0], args)
        return tuple([self._made(each, args) for each in known.results])

    def _made(self, like: _RememberedResult | None, args: Any) -> Any:
        if like is None:
            return None
        if like.argument >= 0 and not like.is_view:
            return args[like.argument]
        with torch._C.DisableTorchFunction():
            if like.is_view:
                made = torch.empty(0, dtype=like.dtype, device="meta")
                made.set_(args[like.argument].untyped_storage(), *like.view)
            else:
                _, *size = like.view
                made = torch.empty_strided(*size, dtype=like.dtype, device="meta")
            made = Tensor._make_subclass(
                FakeTensor,
                made,
                False,
                dispatch_device=True,
                device_for_backend_keys=like.device,
            )
        _refuse_data_ptr(made)
        vars(made).update(like.attributes)
        return made

    def noted(self, key: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Leave an operation to torch, and note what it returns if that is known."""
        self._answered = 0
        result = self.dispatch(func, types, args, kwargs)
        if key is not None and self._answered == id(args):
            with torch._C.DisableTorchFunction():
                is_tuple = type(result) is tuple
                each = result if is_tuple else (result,)
                found = [_result_of(func, args, value) for value in each]
            if NotImplemented not in found:
                self._known[key] = _Remembered(found, is_tuple)
        return result


def _is_plain(tensor: Any) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not (
        tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    )


def _result_of(func: Any, args: Any, value: Any) -> Any:
    """Return how a result is made again; `NotImplemented` if it is not plain."""
    if value is None:
        return None
    if type(value) is not FakeTensor or value.requires_grad or not _is_plain(value):
        return NotImplemented
    given = [k for k, arg in enumerate(args) if type(arg) is FakeTensor]
    same = [k for k in given if args[k] is value]
    if same:
        return _RememberedResult(same[0])
    number = _storage_id(value)
    shared = [k for k in given if _storage_id(args[k]) == number]
    if bool(shared) != func.is_view:
        return NotImplemented
    view = value.storage_offset(), value.shape, value.stride()
    what = value.dtype, value.fake_device, {**vars(value)}
    return _RememberedResult(shared[0] if shared else -1, bool(shared), view, *what)


_storage_id: Any = vars(torch._C)["_storage_id"]
_refuse_data_ptr: Any = vars(torch._C)["_set_throw_on_mutable_data_ptr"]
_NO_TENSORS = {
    *(int, float, bool, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
}
