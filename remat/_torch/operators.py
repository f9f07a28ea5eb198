"""What torch has registered: operators, its keyed draws, classes of pytrees.

Invariant: an operator is called as torch calls it. What is registered here as a pytree
is registered with torch alone; `_base/pytree` has another registry.
Rejected: to tell operators by their names. A custom operator may have any name. One
registry of pytrees for both: Dynamo and torch.func ask that of torch.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import (
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
)
from torch.library import CustomOpDef
from torch.utils import _python_dispatch, _pytree

from remat._torch.autograd import dual_level_active
from remat._torch.modes import LeanDispatchMode, below_autograd


try:
    from torch.func import _random  # nothing in torch imports it
except ImportError:
    _random = None


def is_operator(obj: object) -> TypeGuard[Any]:
    """Say whether `obj` is what `torch.ops` holds, or `torch.library.custom_op` made.

    Example:
        >>> is_operator(torch.ops.aten.mm), is_operator(torch.mm)
        (True, False)
    """
    kinds = OpOverload, OpOverloadPacket, HigherOrderOperator, CustomOpDef
    return isinstance(obj, kinds)


# Deleted by: a public way from a custom_op's function to its overload.
def overload_of(operator: Any) -> Any:
    """Return the operator behind a function that `torch.library.custom_op` made."""
    return operator._opoverload if isinstance(operator, CustomOpDef) else operator


# Deleted by: calls of an overload that cost as little as what they call.
def kernel_of(func: Any) -> Callable[..., Any]:
    """Return what an overload calls, or an operator of higher order itself."""
    # From torch 2.14 on `_op` may be a short cut of a custom operator, which is not to
    # be taken everywhere.
    return getattr(func, "_cpp_dispatch_handle", None) or getattr(func, "_op", func)


# Deleted by: a public way to ask whether an operator has a decomposition of its own.
def is_composite(func: Any) -> bool:
    """Say whether an operator is made of others, which a mode may run in its place."""
    return not isinstance(func, OpOverload) or func._can_decompose()


# Deleted by: a public `OpOverload.is_view`.
def is_view_op(func: Any) -> bool:
    """Say whether an operation only looks at a storage in another way."""
    return getattr(func, "is_view", False)


# Deleted by: a public `torch.func.random`.
def native_random(device: str) -> Any:
    """Return torch's own module of keyed draws, if it has kernels for the device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    ops = "aten::_philox_key_split", "aten::_philox_uniform_", "aten::_philox_normal_"
    try:
        key = torch._C._dispatch_key_for_device(device)
        return _random if all(has_kernel(op, key) for op in ops) else None
    except RuntimeError:  # of no dispatch key
        return None


# --- Pytrees ---


# Deleted by: a public registry of torch's pytree classes.
TORCH_NODES: dict[type, Any] = _pytree.SUPPORTED_NODES


# Deleted by: a public torch.utils.pytree in which a class can be registered.
def register_torch_node(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    *,
    name: str | None = None,
    children: Sequence[str] = (),
) -> None:
    """Register a class with torch's own pytrees."""

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(instance)
        keys = map(_pytree.GetAttrKey, children)
        return list(zip(keys, leaves, strict=True)), context

    keyed = flatten_with_keys if children else None
    _pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=keyed
    )


# --- Operations that take another algorithm where a mode is entered ---
#
# Where no graph is made, these compute no vectors in plain code. Under a mode they do,
# and values differ in the last bits; so does what is made of them, such as `cond`.
# Rejected: to leave the mode for them. What they do would be in no record.


# Deleted by: torch choosing algorithms by whether a graph is made, and not by modes.
CHOOSING = "linalg_svdvals", "linalg_eigvalsh"


def _as_in_plain_code(
    func: Callable[..., Any], a: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run an operation as plain code does, as one for a mode of remat's."""
    mode = _python_dispatch._get_current_dispatch_mode()
    makes_graph = a.requires_grad or dual_level_active()
    is_plain = not (makes_graph or is_functorch_wrapped_tensor(a))
    below: Any = nullcontext()
    if is_plain and isinstance(mode, LeanDispatchMode):
        below = below_autograd()
    with torch._C._ExcludeDispatchKeyGuard(_SNAPSHOT), below:
        return func(a, *args, **kwargs)


_SNAPSHOT = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_kernels = torch.library.Library("aten", "IMPL")
for _name in CHOOSING:
    _func = getattr(torch.ops.aten, _name).default
    _kernel = functools.partial(_as_in_plain_code, _func)
    _kernels.impl(_name, _kernel, "PythonTLSSnapshot")
