"""Tensors of kinds that torch gives no public way to make or to tell.

Invariant: nothing here reads a value. Rejected: tensors on the meta device in place of
those without data. Their device would not be that of what they stand for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor


# Deleted by: a public fake tensor that needs no mode.
tensor_without_data: Callable[..., Any] = Tensor._make_wrapper_subclass

# Deleted by: subclasses without data whose address cannot be taken.
refuse_data_ptr: Callable[[Tensor], None] = vars(torch._C)[
    "_set_throw_on_mutable_data_ptr"
]


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
    if (
        mode is None
        or type(tensor) is not Tensor
        or is_functorch_wrapped_tensor(tensor)
    ):
        return tensor
    return mode.from_tensor(tensor)


_FAKE = torch._C._TorchDispatchModeKey.FAKE
