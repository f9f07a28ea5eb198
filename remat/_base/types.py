"""Shared vocabulary: names of types that flow between rooms, and sets of plain types.

Invariant: no behaviour. `Leaf` is `Any` on purpose: a pytree leaf is whatever the user
put there. Rejected: a set of plain types for each walk over values. They differed by
accident.
"""

import threading
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn


Leaf: TypeAlias = Any
Outputs: TypeAlias = tuple[Tensor | None, ...]
Fn: TypeAlias = Callable[..., Any]


class Opaque:
    """Holds a value that a call neither searches nor puts back."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


# --- Three sets of plain types, which are looked up by the exact class ---

# Classes of which torch makes tensors itself, and which see nothing of what is done.
TENSORS: frozenset[type] = frozenset({Tensor, nn.Parameter})
# Values that hash, compare by what they are, and refer to nothing else.
CONSTANTS: frozenset[type] = frozenset(
    {
        *(bool, bytes, complex, float, int, str, type(None), type(...)),
        *(torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)
# Values that lead to no tensor, no random stream and nothing that changes.
INERT: frozenset[type] = CONSTANTS | {
    *(Opaque, range, slice, threading.Thread, types.CodeType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
}
# The same, without those that may hold something else.
ATOMS: frozenset[type] = INERT - {slice}
