"""Policies by the size of a result.

Invariant: sizes are in bytes, like memory.
Rejected: sizes in elements. A policy would save twice as many bytes in float32 as in
half precision.
"""

from dataclasses import dataclass

from remat._base.op import Op
from remat.policies._policy import Policy


@dataclass(frozen=True)
class Size(Policy):
    """Saves results by the total bytes of an operation's outputs."""

    larger: bool
    than: float

    def decide(self, op: Op) -> bool:
        """Compare the bytes."""
        return op.nbytes > self.than if self.larger else op.nbytes < self.than

    def __repr__(self) -> str:
        return f"save_{'larg' if self.larger else 'small'}er_than({self.than!r})"


def save_larger_than(nbytes: float) -> Policy:
    """Save the results of operations whose outputs have more than `nbytes` bytes.

    Args:
        nbytes: the total bytes of all outputs of one operation.

    Returns:
        The policy.

    Raises:
        TypeError: `nbytes` is not a number.
        ValueError: `nbytes` is negative.

    Source: Keras' `RematScope(mode="larger_than")`, which counts elements.

    Example:
        >>> import torch
        >>> from remat.policies import Value
        >>> out = Value((256,), torch.float32, torch.device("cpu"))
        >>> save_larger_than(1000)(Op(torch.ops.aten.sin.default, outputs=(out,)))
        <Decision.SAVE: 3>
    """
    return Size(True, _checked_bytes(nbytes, "save_larger_than"))


def save_smaller_than(nbytes: float) -> Policy:
    """Save the results of operations whose outputs have fewer than `nbytes` bytes.

    Args:
        nbytes: the total bytes of all outputs of one operation.

    Returns:
        The policy.

    Raises:
        TypeError: `nbytes` is not a number.
        ValueError: `nbytes` is negative.

    Example:
        >>> from remat.policies import dots_saveable
        >>> dots_saveable & save_smaller_than(2**20)
        (dots_saveable & save_smaller_than(1048576))
    """
    return Size(False, _checked_bytes(nbytes, "save_smaller_than"))


def _checked_bytes(nbytes: object, taker: str) -> float:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | float):
        raise TypeError(
            f"remat: {taker} takes a number of bytes; got {nbytes!r}, a "
            f"{type(nbytes).__name__}"
        )
    if not nbytes >= 0:
        raise ValueError(
            f"remat: {taker} takes a number of bytes, at least 0; got {nbytes!r}"
        )
    return nbytes
