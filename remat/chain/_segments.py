"""Segments: each step runs twice, and each carry is stored at most once.

Invariant: the starts of segments are a function of their number and the length. They
are computed when they are needed, and never held.

Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost",
arXiv 1604.06174, 2016.
"""

import abc
import math
from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from remat.chain._actions import (
    Action,
    Drop,
    Evaluations,
    Load,
    Reverse,
    Schedule,
    check_count,
)
from remat.chain._binomial import save_on_the_way


class Segments(Schedule):
    """A schedule that reverses segments of several steps as a whole."""

    @abc.abstractmethod
    def count(self, length: int) -> int:
        """Return how many segments a chain has."""

    def start(self, segment: int, length: int) -> int:
        """Return the first step of a segment; of segment `count`, the length."""
        return segment * length // self.count(length)

    def forward(self, length: int) -> Iterator[Action]:
        """Store the carry at the start of each segment."""
        starts = (self.start(i, length) for i in range(self.count(length)))
        return save_on_the_way(starts, length)

    def backward(self, length: int) -> Iterator[Action]:
        """Reverse one segment after the other."""
        stop = length
        for segment in reversed(range(self.count(length))):
            start = self.start(segment, length)
            yield Load(start)
            yield Reverse(start, stop)
            yield Drop(start)
            stop = start

    def evaluations(self, length: int) -> Evaluations:
        """Count every step twice."""
        return Evaluations(length, length)


def ranges_of(segments: Segments, length: int) -> list[range]:
    """Return the numbers of the steps of each segment.

    Example:
        >>> ranges_of(Uniform(3), 8)
        [range(0, 2), range(2, 5), range(5, 8)]
    """
    starts = [segments.start(i, length) for i in range(segments.count(length))]
    return [*map(range, starts, [*starts[1:], length])]


@dataclass(frozen=True)
class Uniform(Segments):
    """Cut a chain into equal segments, and store the carry at the start of each.

    Args:
        segments: How many segments. Their lengths differ by one step at most. A chain
            with fewer steps has a segment for each step.

    Source: Chen, Xu, Zhang and Guestrin, arXiv 1604.06174, 2016.

    Example:
        >>> [a for a in Uniform(3).backward(8) if isinstance(a, Reverse)]
        [Reverse(start=5, stop=8), Reverse(start=2, stop=5), Reverse(start=0, stop=2)]
    """

    segments: int

    def __post_init__(self) -> None:
        check_count("Uniform", "segments", self.segments)

    def count(self, length: int) -> int:
        """Return the number of segments, at most one for each step."""
        return min(self.segments, length)


@dataclass(frozen=True)
class Sqrt(Segments):
    """Cut a chain of `n` steps into about sqrt(n) equal segments.

    Carries and residuals of at most `ceil(sqrt(n))` steps each exist at once. That is
    the least sum that equal segments reach, if a carry and the residuals of a step
    have the same size.

    Source: Chen, Xu, Zhang and Guestrin, arXiv 1604.06174, 2016.

    Example:
        >>> Sqrt().count(1000)
        32
    """

    def count(self, length: int) -> int:
        """Return the root of the length, rounded up."""
        return math.isqrt(length - 1) + 1 if length else 0


@dataclass(frozen=True)
class EveryStep(Segments):
    """Store each carry, and reverse each step alone.

    Each step runs once more, and the residuals of one step exist at a time.

    Args:
        unroll: How many steps are reversed together. Only the carries between such
            units are stored. The last unit may be shorter.

    Example:
        >>> list(EveryStep().backward(1))
        [Load(step=0), Reverse(start=0, stop=1), Drop(step=0)]
        >>> EveryStep(unroll=3).count(10)
        4
    """

    unroll: int = 1

    def __post_init__(self) -> None:
        check_count("EveryStep", "unroll", self.unroll)

    def count(self, length: int) -> int:
        """Return the number of units."""
        return -(-length // self.unroll)

    @override
    def start(self, segment: int, length: int) -> int:
        """Give each unit as many steps."""
        return min(segment * self.unroll, length)
