"""Shared vocabulary: what flows between modules. No behaviour.

`Leaf` is `Any` on purpose: a pytree leaf is whatever the user put there, and no
narrower type is true.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn


Leaf: TypeAlias = Any
Outputs: TypeAlias = tuple[Tensor | None, ...]
Fn: TypeAlias = Callable[..., Any]

# Classes of which torch makes tensors itself, and which see nothing of what is done.
TENSORS: frozenset[type] = frozenset({Tensor, nn.Parameter})
