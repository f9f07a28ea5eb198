"""Wrappers of one tensor, such as a DTensor: what is inside, and how to wrap it again.

Called by `_partial`, which follows values through wrappers, and by `_graph`, which
offloads what is inside.

Invariant: nothing here runs an operation or reads a value. Rejected: DTensor by name.
Other subclasses follow the same protocol, `__tensor_flatten__`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remat._base.types import TENSORS
from remat._torch import no_torch_functions


def wrapped_by(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a wrapper is made of; None if there is not just one."""
    if type(tensor) in TENSORS or not is_traceable_wrapper_subclass(tensor):
        return None
    parts = _parts(tensor)[0].values()
    inner = [part for part in parts if isinstance(part, Tensor)]
    return inner[0] if len(inner) == 1 else None


def taken_apart(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what is inside of all wrappers, and a function that wraps it again."""
    inner = wrapped_by(tensor)
    if inner is None:
        return tensor, _as_it_is
    parts, context = _parts(tensor)
    layout = tensor.size(), tensor.stride()
    own = [name for name, part in parts.items() if part is not inner]
    names = [name for name in parts if name not in own]
    parts = {name: parts[name] for name in own}
    wrap = functools.partial(_wrapped, type(tensor), parts, names, context, layout)
    innermost, again = taken_apart(inner)
    return innermost, functools.partial(_twice, again, wrap)


def _parts(tensor: Any) -> tuple[dict[str, Any], Any]:
    with no_torch_functions():
        names, context = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}, context


def _wrapped(
    kind: Any,
    parts: dict[str, Any],
    names: Sequence[str],
    context: Any,
    layout: Any,
    inner: Tensor,
) -> Tensor:
    parts = {**parts, **dict.fromkeys(names, inner)}
    return kind.__tensor_unflatten__(parts, context, *layout)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _twice(
    first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor], tensor: Tensor
) -> Tensor:
    return then(first(tensor))
