"""Shared vocabulary: what flows between modules. No behaviour.

`Leaf` is `Any` on purpose: a pytree leaf is whatever the user put there, and no
narrower type is true.
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
    *(range, slice, threading.Thread, types.CodeType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
}
