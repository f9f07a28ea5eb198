"""Budgets of bytes: which schedule of equal steps or unequal stages stays under one.

`_loops` takes a budget, `_measure` tells the numbers of steps, and `_within` asks. What
a schedule of unequal stages takes is found by following its actions, as the chain
follows them, with the numbers of each stage. So all kinds of schedules compare.

Invariant: bytes are those of stored carries, of the live carry, and of the steps that
run at a time. Arguments, results and the gradients of both are there in any case, and
come on top.
Rejected: the peak of a whole training step as a budget. A loop does not know what else
is alive. Rejected: the plan of `rotor` alone. Its time grows with the third power of
the stages, and it plans for a forward that records stages, as that of a chain does not.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat._base.sizes import bytes_in
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
        schedule: that is priced.
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


# --- Unequal stages, of `sequential` ---


_ROTOR = 32  # stages, for which `rotor` takes a second at most
_MOST = 64  # checkpoints that are tried


class Staged(NamedTuple):
    """The numbers of stages.

    Attributes:
        stages: of a chain. Its input is an argument, which counts nothing.
        shared: the bytes of gradients that several stages give.
    """

    stages: Stages
    shared: int


def least_staged(numbers: Staged) -> Priced:
    """Return the schedule that needs the fewest bytes."""
    options = (_followed(numbers, s) for s in _schedules(len(numbers.stages)))
    return min(options, key=lambda option: option[:2])


def chosen_staged(numbers: Staged, budget: LoopBudget) -> Schedule | None:
    """Return the schedule with the least work under a budget; None if none fits."""
    schedules = [*_schedules(len(numbers.stages))]
    if budget.disk:
        schedules += _on_disk(numbers)
    if len(numbers.stages) <= _ROTOR:
        schedules += _planned(numbers, budget.nbytes)
    options = [_followed(numbers, schedule) for schedule in schedules]
    fitting = [option for option in options if option.nbytes <= budget.nbytes]
    if not fitting:
        return None
    return min(fitting, key=lambda option: (option.cost, option.nbytes)).schedule


def _schedules(length: int) -> Iterator[Schedule]:
    root = math.isqrt(length)
    counts = {-(-length // size) for size in range(1, root + 1)}
    yield from map(Uniform, sorted(counts | {*range(1, root + 1)}))
    for checkpoints in range(1, min(length, _MOST)):
        yield from (Binomial(checkpoints, unroll) for unroll in (1, 2, 4))


def _planned(numbers: Staged, nbytes: int) -> list[Schedule]:
    try:
        return [rotor(numbers.stages.stages, nbytes)]
    except ValueError:  # it is too small
        return []


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
    for action in _without_records(schedule.forward(length)):
        followed.do(action)
    followed.turn(length)
    for action in schedule.backward(length):
        followed.do(action)
    return Priced(followed.peak, followed.seconds, schedule)


def _without_records(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield what a forward does: it stores the carry of a step that it is to record."""
    for action in actions:
        if isinstance(action, RecordStep):
            yield Save(action.step)
            yield Advance(action.step, action.step + 1)
        else:
            yield action


class _Simulated:
    """Follows actions, and adds up what they take.

    Attributes:
        peak: the most bytes.
        seconds: of all steps, and of transfers.
    """

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

    def _advance(self, start: int, stop: int) -> None:
        stages, held = self._stages, self._held() + self._cotangent
        self._note(held + max(_running(stages, start, stop)))
        self.seconds += stages.work[stop] - stages.work[start]
        self._live, self._size = stop, stages.carry(stop)

    def _reverse(self, start: int, stop: int) -> None:
        stages = self._stages
        parts = tuple(range(start, stop))
        several = self._shared if stop > start + 1 else 0
        self._note(self._held() + stages.peak(parts, stop) + several)
        self.seconds += stages.work[stop] - stages.work[start]
        self._live, self._size = -1, 0
        self._cotangent = stages.gradient(start)

    def _record(self, step: int) -> None:
        stages = self._stages
        stage = stages.stages[step]
        held = self._held() + self._cotangent
        self._note(held + stage.saved_bytes + stage.forward_extra)
        self.seconds += stages.work[step + 1] - stages.work[step]
        self._recorded.add(step)
        self._live, self._size = step + 1, 0

    def _pull(self, step: int) -> None:
        stages = self._stages
        stage = stages.stages[step]
        gradients = stages.gradient(step + 1) + stages.gradient(step)
        self._note(self._held() + gradients + stage.backward_extra)
        self._recorded.remove(step)
        self._live, self._size = -1, 0
        self._cotangent = stages.gradient(step)


def _running(stages: Stages, start: int, stop: int) -> Iterator[int]:
    """Yield what each step takes beside the carry at the start."""
    for k in range(start, stop):
        before = stages.carry(k) if k > start else 0
        yield before + stages.carry(k + 1) + stages.stages[k].extra_bytes
