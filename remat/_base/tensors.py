"""What tells tensors apart: their description, and how often they were changed.

Invariant: nothing here reads a value. Rejected: comparing contents to find a change,
which would cost a copy of every input.
"""

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor


T = TypeVar("T")


def describe(tensor: Tensor) -> str:
    """Write a tensor's dtype, shape and device."""
    return f"{describe_meta(tensor.dtype, tensor.shape)} on {tensor.device}"


def describe_meta(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Write a dtype and a shape: "float32[2, 3]"."""
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return how often each was changed in place; `None` where that is not counted."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [*map(version_of, tensors)]


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed; `None` where that is not counted."""
    return None if tensor.is_inference() else tensor._version


def changed_since(
    tensors: Iterable[Any],
    versions: Sequence[int | None],
    others: Container[type],
    known: Container[int] = (),
) -> list[int]:
    """Return the tensors that were changed in place since they had some versions.

    Not those of the classes `others`, and not those that are `known`.
    """
    each = enumerate(zip(tensors, versions, strict=False))
    counted = [(i, t, v) for i, (t, v) in each if v is not None and i not in known]
    return [i for i, t, v in counted if type(t) not in others and version_of(t) != v]


_version = operator.attrgetter("_version")


def outside_inference_mode(fn: Callable[..., T], *args: Any) -> T:
    """Call a function with inference mode off, and grad mode as it is.

    In inference mode a function that turns grad mode on makes no graph.
    """
    if not torch.is_inference_mode_enabled():
        return fn(*args)
    is_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
        return fn(*args)
