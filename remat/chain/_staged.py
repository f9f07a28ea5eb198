"""Budgets for `sequential`: the schedule of unequal stages with the least work.

Invariant: what a schedule takes is found by following its actions, as the chain follows
them, with the numbers of each stage. So all kinds of schedules compare.
Rejected: the plan of `rotor` alone. Its time grows with the third power of the stages,
and it plans for a forward that records stages, which that of a chain does not.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from remat.chain._actions import (
    Action,
    Advance,
    Backward,
    Drop,
    Load,
    Record,
    Reverse,
    Save,
    Schedule,
    Storage,
)
from remat.chain._budget import DISK_BYTES_PER_SECOND, LoopBudget, Priced
from remat.chain._plan import Keep, Stages
from remat.chain._rotor import rotor
from remat.chain._segments import Uniform
from remat.chain.schedules import Binomial, Multilevel


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
    followed = _Followed(numbers)
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
        if isinstance(action, Record):
            yield Save(action.step)
            yield Advance(action.step, action.step + 1)
        else:
            yield action


class _Followed:
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
            case Record(step):
                self._record(step)
            case Backward(step) if step in self._recorded:
                self._pull(step)
            case Backward(step):
                for part in (Load(step), Reverse(step, step + 1), Drop(step)):
                    self.do(part)

    def _held(self) -> int:
        """Return the bytes that are alive between two actions."""
        options = (self._stages.stages[k].options[0] for k in self._recorded)
        is_shared = self._live in self._stored or self._live - 1 in self._recorded
        live = 0 if is_shared else self._size
        stored = sum(self._stored.values())
        return stored + live + sum(option.saved_bytes for option in options)

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
        parts = tuple(Keep(k, 0) for k in range(start, stop))
        several = self._shared if stop > start + 1 else 0
        self._note(self._held() + stages.peak(parts, stop) + several)
        self.seconds += stages.work[stop] - stages.work[start]
        self._live, self._size = -1, 0
        self._cotangent = stages.gradient(start)

    def _record(self, step: int) -> None:
        stages = self._stages
        option = stages.stages[step].options[0]
        held = self._held() + self._cotangent
        self._note(held + option.saved_bytes + option.forward_extra)
        self.seconds += stages.work[step + 1] - stages.work[step]
        self._recorded.add(step)
        self._live, self._size = step + 1, 0

    def _pull(self, step: int) -> None:
        stages = self._stages
        option = stages.stages[step].options[0]
        gradients = stages.gradient(step + 1) + stages.gradient(step)
        self._note(self._held() + gradients + option.backward_extra)
        self._recorded.remove(step)
        self._live, self._size = -1, 0
        self._cotangent = stages.gradient(step)


def _running(stages: Stages, start: int, stop: int) -> Iterator[int]:
    """Yield what each step takes beside the carry at the start."""
    for k in range(start, stop):
        before = stages.carry(k) if k > start else 0
        yield before + stages.carry(k + 1) + stages.stages[k].extra_bytes
