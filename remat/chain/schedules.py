"""Schedules: which carries of a chain to store, and which steps to run again.

A schedule is a value that says what a chain does with its steps and carries. It runs
nothing itself, and knows no tensor.

>>> schedule = Binomial(checkpoints=3)
>>> list(schedule.forward(2))[-1]
Advance(start=1, stop=2)
>>> schedule.evaluations(10)
Evaluations(forward=10, backward=18)

Which one to choose:

- `Sqrt`, `Uniform`: each step runs twice. Segments of several steps are reversed as a
  whole, so the residuals of all their steps exist at once.
- `EveryStep`: each step runs twice and is reversed alone, but all carries are stored.
- `Binomial`: the fewest steps for a number of checkpoints (Revolve).
- `Online`: for a chain whose length is known only at its end.

The number of checkpoints always includes carry 0, the input of the chain. `plot` draws
what a schedule holds over time.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from remat.chain._schedules import (
    Action as Action,
    Advance as Advance,
    Drop as Drop,
    Evaluations as Evaluations,
    Held as Held,
    Load as Load,
    Reverse as Reverse,
    Save as Save,
    Schedule as Schedule,
    Segments,
    advances,
    check_count,
    descent,
    held as held,
    plot as plot,
    reverse,
    save_on_the_way,
    units,
)


@dataclass(frozen=True)
class Binomial(Schedule):
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

    def __post_init__(self) -> None:
        check_count("Binomial", "checkpoints", self.checkpoints)
        check_count("Binomial", "unroll", self.unroll)

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


class _Placer:
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
class Online(Schedule):
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

    def __post_init__(self) -> None:
        check_count("Online", "checkpoints", self.checkpoints)

    def online(self) -> _Placer:
        """Return what decides about the carries of one forward."""
        return _Placer(self.checkpoints)

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
