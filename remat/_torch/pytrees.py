"""torch's own pytrees: which classes are registered, and how to register one.

Invariant: what is registered here is registered with torch alone. `_base/pytree` has
another registry. Rejected: one for both. Dynamo and torch.func ask that of torch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils import _pytree


# Deleted by: a public registry of torch's pytree classes.
TORCH_NODES: dict[type, Any] = _pytree.SUPPORTED_NODES


# Deleted by: a public torch.utils.pytree in which a class can be registered.
def register_torch_node(
    cls: type,
    name: str,
    children: Sequence[str],
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Register a class whose children are attributes with torch's own pytrees."""

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(instance)
        keys = map(_pytree.GetAttrKey, children)
        return list(zip(keys, leaves, strict=True)), context

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=name,
        flatten_with_keys_fn=flatten_with_keys,
    )


# Deleted by: as above.
def register_torch_class(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Register a class with torch's own pytrees."""
    _pytree.register_pytree_node(cls, flatten, unflatten)
