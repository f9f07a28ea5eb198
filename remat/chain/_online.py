"""Online checkpointing: for chains whose length is known only at their end.

The forward stores every carry when it is live, and lets an earlier one go when there is
no room. Each stored carry has a *level*. A carry is dispensable if a later one has a
higher level. When there is no room, a dispensable carry is dropped. If there is none,
the latest carry is dropped, and the one that takes its place gets a level more. So
the stored carries spread out as the chain grows, whenever it ends.

Invariant: the backward can reverse a chain of any length from the carries stored at its
end, without more repetitions of a step than the best schedule that knows the length.
Rejected: a stride that doubles when there is no room. Right before it doubles, no
checkpoint is free for the last interval: 16 times the steps for a chain of 10,000.

Source: Wang, Moin and Iaccarino, "Minimal repetition dynamic checkpointing algorithm
for unsteady adjoint calculation", SIAM J. Sci. Comput. 31, 2009. The problem is also
that of Stumm and Walther, "New algorithms for optimal online checkpointing", SIAM J.
Sci. Comput. 32, 2010. Within each interval the backward is binomial.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from remat.chain._actions import (
    Action,
    Advance,
    Drop,
    Evaluations,
    Save,
    Schedule,
    check_count,
)
from remat.chain._binomial import advances, reverse


class Placer:
    """Decides which carries to store while a chain runs.

    `at` is called once for each step, in order, before the step runs. It is not called
    for the result of the chain.

    Args:
        checkpoints: How many carries may be stored at once, with carry 0.

    Example:
        >>> placer = Online(checkpoints=2).online()
        >>> placer.at(0)
        [Save(step=0, storage=<Storage.MEMORY: 'memory'>)]
        >>> [len(placer.at(step)) for step in (1, 2)], placer.stored
        ([1, 2], (0, 2))
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
        """Return what to do when carry `step` is live.

        Raises:
            ValueError: the step is not the next one.
        """
        if step != self._next:
            raise ValueError(f"remat: expected carry {self._next}; got carry {step}")
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
        >>> placer = schedule.online()
        >>> [placer.at(step) for step in range(4)][-1]
        [Drop(step=2), Save(step=3, storage=<Storage.MEMORY: 'memory'>)]
        >>> next(schedule.backward(4, placer.stored))
        Load(step=3)
    """

    checkpoints: int

    def __post_init__(self) -> None:
        check_count("Online", "checkpoints", self.checkpoints)

    def online(self) -> Placer:
        """Return what decides about the carries of one forward."""
        return Placer(self.checkpoints)

    def forward(self, length: int) -> Iterator[Action]:
        """Do what `online` does, for a chain of known length."""
        placer = self.online()
        for step in range(length):
            yield from placer.at(step)
            yield Advance(step, step + 1)

    def backward(
        self, length: int, stored: Iterable[int] | None = None
    ) -> Iterator[Action]:
        """Reverse a chain.

        Args:
            length: How many steps the forward ran.
            stored: The carries that the forward left. None: they are computed.
        """
        if stored is None:
            stored = self._stored(length)
        return reverse(stored, length, self.checkpoints)

    def evaluations(self, length: int) -> Evaluations:
        """Count by following the places, in time proportional to the length."""
        stored = self._stored(length)
        intervals = itertools.pairwise([*stored, length])
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
