"""Budgets for loops: which schedule of equal steps stays under so many bytes.

`_loops` takes a budget, `_measure` tells the numbers of a step, and `_within` asks.

Invariant: bytes are those of stored carries, of the live carry, and of the steps that
run at a time. Arguments, results and the gradients of both are there in any case, and
come on top. Rejected: the peak of a whole training step as a budget. A loop does not
know what else is alive.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat._base.sizes import bytes_in
from remat.chain.schedules import Binomial, Multilevel, Online, Schedule, Uniform


DISK_BYTES_PER_SECOND = 1e9  # nominal, of a write and of a read
TOGETHER = 32  # steps that are reversed together, at most
_SLOTS = 2**20  # of a loop whose carries take no bytes


@dataclass(frozen=True, slots=True)
class LoopBudget:
    """What a user asks for in place of checkpoints.

    Attributes:
        nbytes: how many bytes there may be.
        disk: whether carries may be written to disk.
        policy: of the steps, which changes what they hold.
    """

    nbytes: int
    disk: bool = False
    policy: Any = None


def budget_of(
    taker: str,
    budget: int | str | None,
    policy: Any,
    *,
    disk: bool = False,
    **others: object,
) -> LoopBudget | None:
    """Return the budget that a user asks for; None if for none."""
    if budget is None:
        if disk:
            raise ValueError(_DISK.format(taker=taker))
        return None
    for name, value in others.items():
        if value is not None:
            shown = {"taker": taker, "budget": budget, "name": name, "value": value}
            raise ValueError(_BOTH.format(**shown))
    return LoopBudget(bytes_in(budget, taker), disk, policy)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The numbers of a step that is like all others.

    Attributes:
        carry: the bytes of a carry.
        cotangent: those of its cotangent.
        advance: the bytes that exist beside the carry before, while a step runs.
        reverse: the same while several steps are run again and reversed: how many, and
            the bytes. With the cotangents, and without what the gradients of arguments
            take.
        seconds: of a step, at nominal rates.
    """

    carry: int
    cotangent: int
    advance: int
    reverse: tuple[tuple[int, int], ...]
    seconds: float

    @property
    def together(self) -> int:
        """How many steps may be reversed together."""
        return self.reverse[-1][0]

    def reversing(self, count: int) -> int:
        """Return the bytes of reversing so many steps, at most `together`.

        Each of the operations of a segment takes what grows with its steps, and the
        peak is the largest. So it is convex, and a line between two of its points is
        above it. A line beyond them would not be.
        """
        assert count <= self.together, "nothing is known of so many steps"
        above = next(k for k, (steps, _) in enumerate(self.reverse) if steps >= count)
        steps, nbytes = self.reverse[above]
        if steps == count:
            return nbytes
        fewer, less = self.reverse[above - 1]
        return less + -(-(nbytes - less) * (count - fewer) // (steps - fewer))

    def between(self, unroll: int) -> int:
        """Return the bytes beside stored carries while steps run one after another.

        That is the live carry, and either an advance below the cotangent, or a unit of
        steps that is reversed.
        """
        advance = self.advance + self.cotangent
        return self.carry + max(advance, self.reversing(unroll))


def counts_together(length: int) -> list[int]:
    """Return how many steps of a chain to reverse together, to measure it.

    Example:
        >>> counts_together(5), counts_together(1000)
        ([1, 2, 4, 5], [1, 2, 4, 8, 16, 32])
    """
    powers = [2**k for k in range(TOGETHER.bit_length())]
    return [
        *(n for n in powers if n < length),
        *([length] if length <= TOGETHER else ()),
    ]


class Priced(NamedTuple):
    """A schedule with what it costs.

    Attributes:
        nbytes: that exist at a time, at most.
        cost: of a backward in steps; where stages differ, of all in seconds.
        schedule: see above.
    """

    nbytes: int
    cost: float
    schedule: Schedule


def least(step: StepBytes, length: int) -> Priced:
    """Return the schedule that needs the fewest bytes."""
    few = _binomial(step, length, 1, 1)
    return min([few, *_uniform(step, length)], key=lambda option: option.nbytes)


def chosen(step: StepBytes, length: int, budget: LoopBudget) -> Schedule | None:
    """Return the schedule that runs the fewest steps under a budget; None if none fits.

    Segments run each step twice, so those come first, of these the longest that fit.
    """
    for segments in _uniform(step, length):
        if segments.nbytes <= budget.nbytes:
            return segments.schedule
    options = _options(step, length, budget)
    found = min(options, key=lambda option: option.cost, default=None)
    return None if found is None else found.schedule


def online(step: StepBytes, nbytes: int) -> Online | None:
    """Return the schedule of a loop whose length is not known; None if none fits."""
    slots = _slots(step, nbytes - step.between(1), _SLOTS)
    return Online(slots) if slots else None


def _uniform(step: StepBytes, length: int) -> Iterator[Priced]:
    """Yield equal segments of each size, the longest first."""
    for size in range(min(step.together, length), 0, -1):
        count = -(-length // size)
        runs = max(step.carry + step.advance, step.reversing(-(-length // count)))
        yield Priced((count - 1) * step.carry + runs, length, Uniform(count))


def _options(step: StepBytes, length: int, budget: LoopBudget) -> Iterator[Priced]:
    """Yield what fits with fewer carries than segments have."""
    for unroll in range(1, min(step.together, length) + 1):
        free = budget.nbytes - step.between(unroll)
        slots = _slots(step, free, -(-length // unroll))
        if slots:
            yield _binomial(step, length, slots, unroll)
        if budget.disk and free >= step.carry:
            yield _multilevel(step, length, slots - 1, unroll)


def _slots(step: StepBytes, free: int, most: int) -> int:
    """Return how many carries may be stored, with the first, which is an argument."""
    if free < 0:
        return 0
    return min(free // step.carry + 1, most) if step.carry else most


def _binomial(step: StepBytes, length: int, slots: int, unroll: int) -> Priced:
    schedule = Binomial(slots, unroll)
    nbytes = (slots - 1) * step.carry + step.between(unroll)
    return Priced(nbytes, schedule.evaluations(length).backward, schedule)


def _multilevel(step: StepBytes, length: int, slots: int, unroll: int) -> Priced:
    """Return a schedule with carries on disk, where the first carry is read, too."""
    slots = max(slots, 1)
    transfer = step.carry / DISK_BYTES_PER_SECOND / max(step.seconds, 1e-9)
    schedule = Multilevel(slots, None, transfer, transfer, unroll)
    cost = schedule.evaluations(length).backward
    cost += 2 * transfer * schedule.on_disk(length)
    return Priced(slots * step.carry + step.between(unroll), cost, schedule)


_DISK = (
    "remat: {taker} got disk=True and no budget=. Pass a budget, or say what goes to "
    "disk by checkpoints=schedules.Multilevel(...)."
)
_BOTH = (
    "remat: {taker} got budget={budget!r} and {name}={value!r}: pass one of them. A "
    "budget chooses the checkpoints."
)
