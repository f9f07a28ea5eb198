"""Budgets of bytes: which schedule of steps that are alike stays under one.

`_loops` takes a budget, `_measure` tells the numbers of a step, and `_call` asks.

Invariant: bytes are those of stored carries, of the live carry, and of the steps that
run at a time. Arguments, results and the gradients of both come on top.
Rejected: the peak of a whole training step as a budget. A loop does not know what else
is alive: `remat.fit` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat._base.sizes import bytes_in
from remat.chain._actions import Schedule
from remat.chain._binomial import Binomial, Online
from remat.chain._segments import Uniform


TOGETHER = 32  # steps that are reversed together, at most
_SLOTS = 2**20  # of a loop whose carries take no bytes


@dataclass(frozen=True, slots=True)
class LoopBudget:
    """What a user asks for in place of checkpoints; `policy` is that of the steps."""

    nbytes: int
    policy: Any = None


def budget_of(
    taker: str, budget: int | str | None, policy: Any, **others: object
) -> LoopBudget | None:
    """Return the budget that a user asks for; None if for none."""
    if budget is None:
        return None
    for name, value in others.items():
        if value is not None:
            shown = {"taker": taker, "budget": budget, "name": name, "value": value}
            raise ValueError(_BOTH.format(**shown))
    return LoopBudget(bytes_in(budget, taker), policy)


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
    """

    carry: int
    cotangent: int
    advance: int
    reverse: tuple[tuple[int, int], ...]

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
        """Return the bytes beside stored carries: to advance, or to reverse a unit."""
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
    """A schedule, its peak, and how many steps it runs again."""

    nbytes: int
    cost: int
    schedule: Schedule


def chosen(
    step: StepBytes, length: int | None, nbytes: int
) -> tuple[Schedule | None, int]:
    """Return the schedule with the least work that fits, or None; and the least bytes.

    Of those with as much work, it is the first one.
    """
    if length is None:
        slots = max(1, _slots(step, nbytes - step.between(1), _SLOTS))
        options = [_priced(step, Online(slots), 0, slots, 1)]
    else:
        options = [*_of_steps(step, length, nbytes)]
    fitting = [option for option in options if option.nbytes <= nbytes]
    found = min(fitting, key=lambda option: option.cost, default=None)
    least = min(option.nbytes for option in options)
    return None if found is None else found.schedule, least


def _of_steps(step: StepBytes, length: int, nbytes: int) -> Iterator[Priced]:
    """Yield schedules of equal steps: segments, then those with fewer carries.

    Segments run each step twice, which is the least, and the longest come first.
    """
    together = min(step.together, length)
    for size in range(together, 0, -1):
        count = -(-length // size)
        runs = max(step.carry + step.advance, step.reversing(-(-length // count)))
        yield Priced((count - 1) * step.carry + runs, length, Uniform(count))
    yield _binomial(step, length, 1, 1)
    for unroll in range(1, together + 1):
        free = nbytes - step.between(unroll)
        slots = _slots(step, free, -(-length // unroll))
        if slots:
            yield _binomial(step, length, slots, unroll)


def _slots(step: StepBytes, free: int, most: int) -> int:
    """Return how many carries may be stored, with the first, which is an argument."""
    if free < 0:
        return 0
    return min(free // step.carry + 1, most) if step.carry else most


def _binomial(step: StepBytes, length: int, slots: int, unroll: int) -> Priced:
    schedule = Binomial(slots, unroll)
    cost = schedule.evaluations(length).backward
    return _priced(step, schedule, cost, slots, unroll)


def _priced(
    step: StepBytes, schedule: Schedule, cost: int, slots: int, unroll: int
) -> Priced:
    nbytes = (slots - 1) * step.carry + step.between(unroll)
    return Priced(nbytes, cost, schedule)


_BOTH = (
    "remat: {taker} got budget={budget!r} and {name}={value!r}: pass one of them. A "
    "budget chooses the checkpoints."
)
