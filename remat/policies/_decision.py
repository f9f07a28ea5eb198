"""The decisions of a policy, and their order.

Policies return decisions, and `_graph/residual.py` carries them out.

Invariant: decisions are ordered by how near the result stays: RECOMPUTE <
OFFLOAD_TO_DISK < OFFLOAD < SAVE. So one of any two is nearer.
Rejected: OFFLOAD with a destination as a field, as in JAX. Two destinations would have
no order, so policies that offload to different places could not be combined.
"""

from enum import Enum
from typing import TypeAlias

from torch.utils.checkpoint import CheckpointPolicy


class Decision(Enum):
    """What to do with the result of an operation, from farthest to nearest.

    `bool(decision)` is False for RECOMPUTE and True for the others. `a | b` is the
    nearer of two decisions, and `a & b` is the farther.

    Example:
        >>> Decision.SAVE & Decision.OFFLOAD
        <Decision.OFFLOAD: 2>
        >>> bool(Decision.RECOMPUTE)
        False
    """

    RECOMPUTE = 0
    """Recompute the result if the backward reads it."""
    OFFLOAD_TO_DISK = 1
    """Save the result in a file."""
    OFFLOAD = 2
    """Save the result in pinned memory of the host."""
    SAVE = 3
    """Save the result where it is."""

    def __bool__(self) -> bool:
        return self is not Decision.RECOMPUTE

    def __or__(self, other: "Decision") -> "Decision":
        return self if self.value >= other.value else other

    def __and__(self, other: "Decision") -> "Decision":
        return self if self.value <= other.value else other

    def __invert__(self) -> "Decision":
        return Decision.RECOMPUTE if self else Decision.SAVE

    @property
    def offloads(self) -> bool:
        """Whether the result is offloaded."""
        return self in DESTINATIONS.values()


Answer: TypeAlias = bool | Decision | CheckpointPolicy
DESTINATIONS = {"pinned_host": Decision.OFFLOAD, "disk": Decision.OFFLOAD_TO_DISK}
_OF_TORCH = {
    "SAVE": Decision.SAVE,
    "RECOMPUTE": Decision.RECOMPUTE,
    "OFFLOAD": Decision.OFFLOAD,
}


def decision_of(answer: object) -> Decision | None:
    """Return the decision that an answer means, or None if it is not an answer."""
    if isinstance(answer, Decision):
        return answer
    if isinstance(answer, bool):
        return Decision.SAVE if answer else Decision.RECOMPUTE
    if isinstance(answer, CheckpointPolicy):  # MUST_SAVE, PREFER_CPU_OFFLOAD, ...
        return _OF_TORCH[answer.name.rpartition("_")[2]]
    return None


def destination(to: object, taker: str) -> Decision:
    """Return the decision to offload to a destination, or raise a ValueError."""
    if isinstance(to, str) and to in DESTINATIONS:
        return DESTINATIONS[to]
    known = ", ".join(map(repr, DESTINATIONS))
    raise ValueError(f"remat: {taker} offloads to one of {known}; got {to!r}")


def check_offload(src: object, dst: object, taker: str) -> None:
    """Check the `offload_src` and `offload_dst` of one of JAX's policies."""
    if src != "device":
        raise ValueError(f"remat: {taker} offloads from 'device'; got {src!r}")
    destination(dst, taker)
