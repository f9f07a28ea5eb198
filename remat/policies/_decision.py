"""What a policy may answer, and the order of the answers.

Invariant: the answers are ordered by how near a kept result is, RECOMPUTE <
OFFLOAD_TO_DISK < OFFLOAD < SAVE, so that any two have a nearer and a farther one.
Rejected: OFFLOAD with a place in it, as in JAX. Two that differ have no order, and
policies that offload to different places could not be combined.
"""

from enum import Enum
from typing import TypeAlias

from torch.utils.checkpoint import CheckpointPolicy


class Decision(Enum):
    """What may become of the result of an operation, from far to near.

    True if it is kept anywhere. `a | b` is the nearer of two, `a & b` the farther.

    Example:
        >>> Decision.SAVE & Decision.OFFLOAD
        <Decision.OFFLOAD: 2>
        >>> bool(Decision.RECOMPUTE)
        False
    """

    RECOMPUTE = 0
    """It is computed again, if the backward reads it."""
    OFFLOAD_TO_DISK = 1
    """It may be kept in a file."""
    OFFLOAD = 2
    """It may be kept in pinned memory of the host."""
    SAVE = 3
    """It may be kept where it is."""

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
        """Whether the result is kept, but elsewhere."""
        return self in PLACES.values()


Answer: TypeAlias = bool | Decision | CheckpointPolicy
PLACES = {"pinned_host": Decision.OFFLOAD, "disk": Decision.OFFLOAD_TO_DISK}
_OF_TORCH = {
    "SAVE": Decision.SAVE,
    "RECOMPUTE": Decision.RECOMPUTE,
    "OFFLOAD": Decision.OFFLOAD,
}


def decision_of(answer: object) -> Decision | None:
    """Return what an answer means, or None if it means nothing."""
    if isinstance(answer, Decision):
        return answer
    if isinstance(answer, bool):
        return Decision.SAVE if answer else Decision.RECOMPUTE
    if isinstance(answer, CheckpointPolicy):  # MUST_SAVE, PREFER_CPU_OFFLOAD, ...
        return _OF_TORCH[answer.name.rpartition("_")[2]]
    return None


def place(to: object, taker: str) -> Decision:
    """Return the decision to offload to a place.

    Raises:
        ValueError: there is no such place.
    """
    if isinstance(to, str) and to in PLACES:
        return PLACES[to]
    raise ValueError(
        f"remat: {taker} offloads to one of {', '.join(map(repr, PLACES))}; got {to!r}"
    )


def check_places(src: object, dst: object, taker: str) -> None:
    """Check where JAX's policies offload from and to.

    Raises:
        ValueError: there is no such place.
    """
    if src != "device":
        raise ValueError(f"remat: {taker} offloads from 'device'; got {src!r}")
    place(dst, taker)
