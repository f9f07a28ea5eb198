"""What holds the peak of a step, as values: holders, the largest first.

`step` makes them, `advice` reads them, and `reports` shows them.

Invariant: each byte that is alive at the peak is in one holder.
Rejected: one holder for each value. A model has thousands, made by a few lines.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from remat._base.source import short
from remat._report import render as _render


Kind: TypeAlias = Literal[
    "recompute",
    "saved inputs",
    "policy",
    "residuals",
    "loss",
    "forward",
    "cotangents",
    "gradients",
    "parameters",
    "inputs",
]


@dataclass(frozen=True, slots=True)
class HeldValues:
    """Values that are alive at the peak and were made alike.

    Attributes:
        op: the operation that made them; of a gradient, the operation that it is in
            the backward of; "" if they are older than the step.
        dtype: the dtype; None for what an operation uses only while it runs.
        shape: the shape.
        source: the user's line that ran the operation.
        count: how many there are.
        nbytes: the bytes of all of them.
        is_gradient: whether the backward of the operation made them.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat import explain, remat
        >>> block = remat(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)))
        >>> def loss(x):
        ...     return block(x).square().sum()
        >>> peak = explain(loss, torch.ones(256, 8)).peak
        >>> largest = peak.holders[0].values[0]
        >>> largest.op, largest.shape, largest.count, largest.nbytes
        ('addmm', (256, 64), 1, 65536)
    """

    op: str
    dtype: Any
    shape: tuple[int, ...]
    source: str
    count: int
    nbytes: int
    is_gradient: bool = False

    def __str__(self) -> str:
        what = "memory" if self.dtype is None else _render.short(self.dtype, self.shape)
        many = f"{self.count} x {what}" if self.count > 1 else what
        if not self.op:
            return many
        maker = f"backward of {self.op}" if self.is_gradient else self.op
        return f"{many}, made by {maker} at {short(self.source)}"


@dataclass(frozen=True, slots=True)
class Holder:
    """One reason why memory is alive at the peak.

    Attributes:
        kind: "recompute": what the recompute of one call made. "saved inputs": of
            calls, for their recomputes. "policy": what policies save. "residuals":
            what is saved by operations outside of calls. "loss": what the operations
            after the last call made, in the forward or the backward. "forward": what a
            call made in its forward, if the peak is there. "cotangents": gradients of
            activations, on their way through calls. "gradients": of the parameters.
            "parameters" and "inputs": alive before the step.
        name: the holder in words: "recompute of `Block` (call 3 of 12)".
        nbytes: the bytes that it holds.
        share: of all bytes that are alive at the peak.
        values: what it consists of, the largest first.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat import explain, remat
        >>> block = remat(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)))
        >>> def loss(x):
        ...     return block(x).square().sum()
        >>> peak = explain(loss, torch.ones(256, 8)).peak
        >>> [(holder.kind, holder.nbytes) for holder in peak.holders][:2]
        [('cotangents', 131072), ('recompute', 65536)]
    """

    kind: Kind
    name: str
    nbytes: int
    share: float
    values: tuple[HeldValues, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of a step when most bytes are alive.

    Attributes:
        nbytes: the bytes alive then, with parameters and inputs.
        op: the operation that ran then, or the node of the backward.
        holders: what holds them, the largest first.
        advice: what to do about the largest holder.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat import explain, remat
        >>> block = remat(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)))
        >>> def loss(x):
        ...     return block(x).square().sum()
        >>> peak = explain(loss, torch.ones(256, 8)).peak
        >>> peak.nbytes, peak.op
        (206888, 'tanh_backward')
    """

    nbytes: int
    op: str
    holders: tuple[Holder, ...]
    advice: str

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the section "peak"."""
        yield f"peak of a step: {self.nbytes:,} bytes, in {self.op or 'Python'}"
        for holder in self.holders:
            yield f"  {holder.share:4.0%}  {holder.nbytes:,} bytes: {holder.name}"
            if any(value.op for value in holder.values):
                yield f"        largest: {holder.values[0]}"
        yield f"what to do: {self.advice}"
