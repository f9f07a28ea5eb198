"""Budgets of bytes: which schedule of equal steps or unequal stages stays under one.

`_loops` takes a budget, `_measure` tells the numbers of steps, and `_call` asks.

Invariant: bytes are those of stored carries, of the live carry, and of the steps that
run at a time. Arguments, results and the gradients of both come on top.
Rejected: the peak of a whole training step as a budget. A loop does not know what else
is alive. Rejected: the plan of `rotor` alone. Its time grows with the third power of
the stages, and it plans for a forward that records stages, as that of a chain does not.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat._base.sizes import bytes_in
from remat.chain._actions import without_records
from remat.chain._rotor import Stages, rotor
from remat.chain.schedules import (
    Action,
    Advance,
    Backward,
    Binomial,
    Drop,
    Load,
    Multilevel,
    Online,
    RecordStep,
    Reverse,
    Save,
    Schedule,
    Storage,
    Uniform,
)


DISK_BYTES_PER_SECOND = 1e9  # nominal, of a write and of a read
TOGETHER = 32  # steps that are reversed together, at most
_SLOTS = 2**20  # of a loop whose carries take no bytes


@dataclass(frozen=True, slots=True)
class LoopBudget:
    """What a user asks for in place of checkpoints; `policy` is that of the steps."""

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
    """A schedule, its peak, and its cost: in steps, or of unequal stages in seconds."""

    nbytes: int
    cost: float
    schedule: Schedule


@functools.lru_cache(64)  # to follow all schedules takes long
def chosen(
    numbers: "StepBytes | Staged", length: int | None, nbytes: int, disk: bool
) -> tuple[Schedule | None, int]:
    """Return the schedule with the least work that fits, or None; and the least bytes.

    Of those with as much work, it is the first one.
    """
    if isinstance(numbers, Staged):
        options = _of_stages(numbers, nbytes, disk)
    elif length is None:
        slots = max(1, _slots(numbers, nbytes - numbers.between(1), _SLOTS))
        options = [_priced(numbers, Online(slots), 0, slots, 1)]
    else:
        options = [*_of_steps(numbers, length, nbytes, disk)]
    fitting = [option for option in options if option.nbytes <= nbytes]
    found = min(fitting, key=lambda option: option.cost, default=None)
    least = min(option.nbytes for option in options)
    return None if found is None else found.schedule, least


def _of_steps(
    step: StepBytes, length: int, nbytes: int, disk: bool
) -> Iterator[Priced]:
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
        if disk and free >= step.carry:
            yield _multilevel(step, length, slots - 1, unroll)


def _slots(step: StepBytes, free: int, most: int) -> int:
    """Return how many carries may be stored, with the first, which is an argument."""
    if free < 0:
        return 0
    return min(free // step.carry + 1, most) if step.carry else most


def _binomial(step: StepBytes, length: int, slots: int, unroll: int) -> Priced:
    schedule = Binomial(slots, unroll)
    cost = schedule.evaluations(length).backward
    return _priced(step, schedule, cost, slots, unroll)


def _multilevel(step: StepBytes, length: int, slots: int, unroll: int) -> Priced:
    """Return a schedule with carries on disk, where the first carry is read, too."""
    slots = max(slots, 1)
    transfer = step.carry / DISK_BYTES_PER_SECOND / max(step.seconds, 1e-9)
    schedule = Multilevel(slots, None, transfer, transfer, unroll)
    cost = schedule.evaluations(length).backward
    cost += 2 * transfer * schedule.on_disk(length)
    return _priced(step, schedule, cost, slots + 1, unroll)


def _priced(
    step: StepBytes, schedule: Schedule, cost: float, slots: int, unroll: int
) -> Priced:
    nbytes = (slots - 1) * step.carry + step.between(unroll)
    return Priced(nbytes, cost, schedule)


_DISK = (
    "remat: {taker} got disk=True and no budget=. Pass a budget, or say what goes to "
    "disk by checkpoints=schedules.Multilevel(...)."
)
_BOTH = (
    "remat: {taker} got budget={budget!r} and {name}={value!r}: pass one of them. A "
    "budget chooses the checkpoints."
)


# --- Unequal stages, of `sequential` ---


_ROTOR = 32  # stages, for which `rotor` takes a second at most
_MOST = 64  # checkpoints that are tried


class Staged(NamedTuple):
    """The numbers of stages, and the bytes of gradients that several of them give."""

    stages: Stages
    shared: int


def _of_stages(numbers: Staged, nbytes: int, disk: bool) -> list[Priced]:
    """Return schedules of unequal stages, those with the fewest bytes first."""
    schedules = [*_schedules(len(numbers.stages))]
    if disk:
        schedules += _on_disk(numbers)
    if len(numbers.stages) <= _ROTOR:
        with contextlib.suppress(ValueError):  # it is too small
            schedules.append(rotor(numbers.stages.stages, nbytes))
    options = [_followed(numbers, schedule) for schedule in schedules]
    return sorted(options, key=lambda option: option.nbytes)


def _schedules(length: int) -> Iterator[Schedule]:
    root = math.isqrt(length)
    counts = {-(-length // size) for size in range(1, root + 1)}
    yield from map(Uniform, sorted(counts | {*range(1, root + 1)}))
    for checkpoints in range(1, min(length, _MOST)):
        yield from (Binomial(checkpoints, unroll) for unroll in (1, 2, 4))


def _on_disk(numbers: Staged) -> Iterator[Schedule]:
    """Yield schedules with carries on disk, of mean bytes and of mean work."""
    stages = numbers.stages.stages
    seconds = max(sum(s.forward_cost for s in stages), 1e-9)
    transfer = sum(s.output_bytes for s in stages) / DISK_BYTES_PER_SECOND / seconds
    for memory in range(1, min(len(stages), _MOST)):
        yield Multilevel(memory, None, transfer, transfer)


def _followed(numbers: Staged, schedule: Schedule) -> Priced:
    """Return what a schedule takes: bytes, and seconds."""
    followed = _Simulated(numbers)
    length = len(numbers.stages)
    for action in without_records(schedule.forward(length)):
        followed.do(action)
    followed.turn(length)
    for action in schedule.backward(length):
        followed.do(action)
    return Priced(followed.peak, followed.seconds, schedule)


class _Simulated:
    """Follows actions; adds up the peak of bytes, and the seconds of all steps."""

    def __init__(self, numbers: Staged) -> None:
        self._stages, self._shared = numbers
        self.peak, self.seconds = 0, 0.0
        self._stored: dict[int, int] = {}  # in memory: the bytes of each
        self._on_disk: set[int] = set()
        self._recorded: set[int] = set()
        self._live, self._size = 0, 0  # its number, and its bytes: an argument has none
        self._cotangent = 0

    def turn(self, length: int) -> None:
        """Go from the forward to the backward."""
        self._cotangent = self._stages.gradient(length)

    def do(self, action: Action) -> None:
        """Take an action into account."""
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
            case Save(step, storage):
                self._save(step, storage)
            case Load(step):
                self._load(step)
            case Drop(step):
                self._stored.pop(step, 0)
                self._on_disk.discard(step)
            case Reverse(start, stop):
                self._reverse(start, stop)
            case RecordStep(step):
                self._record(step)
            case Backward(step) if step in self._recorded:
                self._pull(step)
            case Backward(step):
                for part in (Load(step), Reverse(step, step + 1), Drop(step)):
                    self.do(part)

    def _held(self) -> int:
        """Return the bytes that are alive between two actions."""
        is_shared = self._live in self._stored or self._live - 1 in self._recorded
        live = 0 if is_shared else self._size
        stored = sum(self._stored.values())
        stages = self._stages.stages
        return stored + live + sum(stages[k].saved_bytes for k in self._recorded)

    def _note(self, nbytes: int) -> None:
        self.peak = max(self.peak, nbytes)

    def _save(self, step: int, storage: Storage) -> None:
        if storage is Storage.MEMORY:
            self._stored[step] = self._size
            return
        self._on_disk.add(step)
        self._transfer(step)

    def _load(self, step: int) -> None:
        self._live = step
        if step in self._stored:
            self._size = self._stored[step]
        else:
            self._size = self._stages.carry(step)
            self._transfer(step)
            self._note(self._held() + self._cotangent)

    def _transfer(self, step: int) -> None:
        self.seconds += self._stages.carry(step) / DISK_BYTES_PER_SECOND

    def _run(self, start: int, stop: int, nbytes: int) -> None:
        """Note what some stages take besides what is held, and their seconds."""
        self._note(self._held() + nbytes)
        self.seconds += self._stages.work[stop] - self._stages.work[start]

    def _advance(self, start: int, stop: int) -> None:
        stages = self._stages
        self._run(start, stop, self._cotangent + max(stages.running(start, stop)))
        self._live, self._size = stop, stages.carry(stop)

    def _reverse(self, start: int, stop: int) -> None:
        several = self._shared if stop > start + 1 else 0
        parts = tuple(range(start, stop))
        self._run(start, stop, self._stages.peak(parts, stop) + several)
        self._pulled(start)

    def _record(self, step: int) -> None:
        stage = self._stages.stages[step]
        nbytes = stage.saved_bytes + stage.forward_extra
        self._run(step, step + 1, self._cotangent + nbytes)
        self._recorded.add(step)
        self._live, self._size = step + 1, 0

    def _pull(self, step: int) -> None:
        stages = self._stages
        gradients = stages.gradient(step + 1) + stages.gradient(step)
        self._note(self._held() + gradients + stages.stages[step].backward_extra)
        self._recorded.remove(step)
        self._pulled(step)

    def _pulled(self, step: int) -> None:
        """Have the cotangent of a carry, and no live carry."""
        self._live, self._size = -1, 0
        self._cotangent = self._stages.gradient(step)
