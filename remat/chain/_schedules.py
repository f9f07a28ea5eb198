"""The schedules: binomial checkpointing, and segments.

Carry 0 of a chain is stored in the first of `c` checkpoints, and the steps are reversed
from the last to the first. A step runs once more when it is reversed; all other
evaluations are *advances*. With `beta(c, r)`, the longest chain that `c` checkpoints
reverse with at most `r` advances of each step, the fewest advances are `t(l, c) = r * l
- beta(c + 1, r - 1)`, for the least `r` with `beta(c, r) >= l`. A subchain of `l` steps
is split where `k + t(l - k, c - 1) + t(k, c)` is least, so the count is that exactly.
Rejected: a table of optimal splits: it is quadratic in the length.

Sources: Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26, 2000; Chen, Xu,
Zhang and Guestrin, "Training deep nets with sublinear memory cost", arXiv 1604.06174.
"""

import abc
import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from typing_extensions import override

from remat.chain._actions import (
    Action,
    Advance,
    Drop,
    Evaluations,
    Load,
    OfCounts,
    Reverse,
    Save,
    Schedule,
)


def beta(slots: int, repetitions: int) -> int:
    """Return the length of the longest chain that can be reversed.

    Example:
        >>> beta(slots=3, repetitions=2)
        10
    """
    return math.comb(slots + repetitions, slots) if repetitions >= 0 else 0


def repetitions(length: int, slots: int) -> int:
    """Return the least repetitions that reverse a chain: r in t(l, c).

    Example:
        >>> repetitions(10, 3), repetitions(11, 3)
        (2, 3)
    """
    if length <= 1:
        return 0
    high = 1
    while beta(slots, high) < length:
        high *= 2
    return bisect.bisect_left(range(high), length, key=lambda r: beta(slots, r))


def advances(length: int, slots: int) -> int:
    """Return t(l, c), the fewest advances that reverse a chain.

    Each step runs once more, recorded, when it is reversed: that is not counted here.

    Example:
        >>> advances(10, 3), advances(1000, 10)
        (15, 3636)
    """
    if length <= 1 or slots >= length - 1:  # large binomials are slow to compute
        return max(length - 1, 0)
    r = repetitions(length, slots)
    return r * length - beta(slots + 1, r - 1)


@functools.lru_cache(4096)  # the same subchains come up again and again
def split(length: int, slots: int) -> int:
    """Return the least k that minimizes `k + t(length - k, slots - 1) + t(k, slots)`.

    It is how far to advance before the next checkpoint.
    """
    if slots >= length - 1:
        return 1
    r = repetitions(length, slots)
    return max(1, beta(slots, r - 2), length - beta(slots - 1, r))


def descent(start: int, stop: int, slots: int, width: int = 1) -> Iterator[int]:
    """Return the carries to store on a first run over a subchain that goes to its end.

    It goes over the last unit too, unrecorded, as the classic schedule does with a
    chain that is one unit longer.
    """
    left = units(start, stop, width) + 1
    while left > 1:
        yield start
        slots -= 1
        if not slots:
            return
        move = split(left, slots + 1)
        start, left = start + move * width, left - move


def save_on_the_way(carries: Iterable[int], stop: int) -> Iterator[Action]:
    """Advance from the first carry to carry `stop`, and store the carries."""
    live = None
    for carry in carries:
        if live is not None:
            yield Advance(live, carry)
        yield Save(carry)
        live = carry
    if live is not None:
        yield Advance(live, stop)


def reverse(
    stored: Iterable[int], stop: int, slots: int, width: int = 1
) -> Iterator[Action]:
    """Reverse a subchain, with at most `slots` carries, in units of `width` steps."""
    stack = list(stored)
    while stack:
        live = stack[-1]
        yield Load(live)
        while (left := units(live, stop, width)) > 1:
            free = slots - len(stack)
            move = split(left, free + 1) if free else left - 1
            yield Advance(live, live + move * width)
            live += move * width
            if free and left - move > 1:
                yield Save(live)
                stack.append(live)
        yield Reverse(live, stop)
        stop = live
        if stack[-1] == live:
            yield Drop(stack.pop())


def units(start: int, stop: int, width: int) -> int:
    """Return how many units the steps from `start` to `stop` are."""
    return -(-(stop - start) // width)


@dataclass(frozen=True)
class Binomial(OfCounts, Schedule):
    """Run the fewest steps again that a number of checkpoints allows.

    A chain of `n` units runs `advances(n + 1, checkpoints)` units in its backward, for
    `unroll=1`. It is `n + 1`, not `n`: the forward runs to the result and records
    nothing, so the last unit runs in the backward again. No schedule with as many
    checkpoints and units runs fewer.

    Args:
        checkpoints: How many carries may be stored at once, with carry 0, which is the
            input of the chain. The live carry, and the residuals of the unit that is
            being reversed, come on top.
        unroll: How many steps are a unit. The residuals of a unit exist at once. The
            last unit may be shorter.

    Source: Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26, 2000.

    Example:
        >>> for action in Binomial(checkpoints=2).forward(4):
        ...     print(action)
        Save(step=0)
        Advance(start=0, stop=2)
        Save(step=2)
        Advance(start=2, stop=4)
        >>> Binomial(checkpoints=10).evaluations(1000)
        Evaluations(forward=1000, backward=3640)
    """

    checkpoints: int
    unroll: int = 1

    def forward(self, length: int) -> Iterator[Action]:
        """Store the carries of the first descent."""
        return save_on_the_way(self._descent(length), length)

    def backward(self, length: int) -> Iterator[Action]:
        """Reverse the chain from the carries of the first descent."""
        return reverse(self._descent(length), length, self.checkpoints, self.unroll)

    @override
    def evaluations(self, length: int) -> Evaluations:
        """Count by the closed form."""
        chain = units(0, length, self.unroll)
        again = advances(chain + 1, self.checkpoints) - chain  # of whole units
        return Evaluations(length, self.unroll * again + length)

    def _descent(self, length: int) -> Iterator[int]:
        return descent(0, length, self.checkpoints, self.unroll)


# --- Chains whose length is known only at their end ---


class Placer:
    """Decides which carries to store while a chain runs.

    It stores every carry when it is live. Each has a *level*, and is dispensable if a
    later one has a higher level. When there is no room, a dispensable carry is dropped.
    If there is none, the latest is dropped, and the one that takes its place gets a
    level more. So the stored carries spread out as the chain grows, whenever it ends,
    and a backward repeats no step more often than the best schedule that knows the
    length. Not a stride that doubles when there is no room: right before it doubles, no
    checkpoint is free for the last interval.
    """

    def __init__(self, checkpoints: int) -> None:
        self._room = checkpoints - 1  # carry 0 is always stored
        self._levels: dict[int, int] = {}  # of the others, in order
        self._dispensable: list[int] = []
        self._next = 0

    @property
    def stored(self) -> tuple[int, ...]:
        """The carries that are stored, in order."""
        return (0, *self._levels) if self._next else ()

    def at(self, step: int) -> list[Action]:
        """Return what to do when carry `step`, the next one, is live."""
        assert step == self._next, f"expected carry {self._next}; got carry {step}"
        self._next += 1
        if step == 0:
            return [Save(0)]
        if not self._room:
            return []
        dropped, level = self._make_room()
        self._levels[step] = level
        return [*dropped, Save(step)]

    def _make_room(self) -> tuple[list[Action], int]:
        """Return what is dropped for a new carry, and the level of the new one."""
        if len(self._levels) < self._room:
            return [], 0
        if self._dispensable:
            carry = self._dispensable.pop()
            del self._levels[carry]
            return [Drop(carry)], 0
        carry, level = self._levels.popitem()
        same = itertools.takewhile(
            lambda item: item[1] == level, reversed(self._levels.items())
        )
        self._dispensable = [step for step, _ in same][::-1]
        return [Drop(carry)], level + 1


@dataclass(frozen=True)
class Online(OfCounts, Schedule):
    """Store carries of a chain whose length nobody knows until it ends.

    `online()` returns the object that decides during the forward. Then `backward`
    reverses the chain from what is stored. Its backward runs at most 1.4 times as many
    steps as that of `Binomial`, which knows the length, for all chains of up to 300
    steps and 12 checkpoints. On average over the lengths it is 1.12 times at most.

    Args:
        checkpoints: How many carries may be stored at once, with carry 0.

    Source: Wang, Moin and Iaccarino, SIAM J. Sci. Comput. 31, 2009.

    Example:
        >>> schedule = Online(checkpoints=3)
        >>> [*schedule.forward(4)][-2:]
        [Save(step=3), Advance(start=3, stop=4)]
        >>> next(schedule.backward(4))
        Load(step=3)
    """

    checkpoints: int

    def online(self) -> Placer:
        """Return what decides about the carries of one forward."""
        return Placer(self.checkpoints)

    def forward(self, length: int) -> Iterator[Action]:
        """Do what `online` does, for a chain of known length."""
        placer = self.online()
        for step in range(length):
            yield from placer.at(step)
            yield Advance(step, step + 1)

    def backward(self, length: int) -> Iterator[Action]:
        """Reverse the chain from the carries that the forward left."""
        return reverse(self._stored(length), length, self.checkpoints)

    @override
    def evaluations(self, length: int) -> Evaluations:
        """Count by following the places, in time proportional to the length."""
        intervals = itertools.pairwise([*self._stored(length), length])
        again = sum(
            advances(stop - start, self.checkpoints - earlier)
            for earlier, (start, stop) in enumerate(intervals)
        )
        return Evaluations(length, length + again)

    def _stored(self, length: int) -> tuple[int, ...]:
        placer = self.online()
        for step in range(length):
            placer.at(step)
        return placer.stored


# --- Segments ---


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


def ranges_of(segments: Segments, length: int) -> list[range]:
    """Return the numbers of the steps of each segment.

    Example:
        >>> ranges_of(Uniform(3), 8)
        [range(0, 2), range(2, 5), range(5, 8)]
    """
    starts = [segments.start(i, length) for i in range(segments.count(length))]
    return [*map(range, starts, [*starts[1:], length])]


@dataclass(frozen=True)
class Uniform(OfCounts, Segments):
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
class EveryStep(OfCounts, Segments):
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

    def count(self, length: int) -> int:
        """Return the number of units."""
        return -(-length // self.unroll)

    @override
    def start(self, segment: int, length: int) -> int:
        """Give each unit as many steps."""
        return min(segment * self.unroll, length)
