"""Operations as data: what a record holds of each, and what a policy is asked about.

Invariant: no tensor is held, so a record outlives the call it was made of and can be
written by hand in a test.
Rejected: torch.fx nodes, which hold a graph and the modules it was traced from.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor without holding it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a recorded function.

    Attributes:
        func: the overload that ran, `torch.ops.aten.mm.default` say.
        inputs: its tensor arguments, in order.
        outputs: the tensors that it returned, in order.
        constants: its other arguments, tensors in them left out.
        names: what `checkpoint_name` calls its outputs.
        source: the user's line, "file:line, in function".
    """

    func: Any
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    constants: tuple[Any, ...] = ()
    names: frozenset[str] = field(default=frozenset())
    source: str = ""

    @property
    def packet(self) -> Any:
        """The operation without its overload, `torch.ops.aten.mm` say."""
        return self.func.overloadpacket

    @property
    def nbytes(self) -> int:
        """The bytes of its outputs, which saving it would keep."""
        return sum(value.nbytes for value in self.outputs)
