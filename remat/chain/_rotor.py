"""Rotor: the plan with the least work for a chain of unequal stages, under a budget.

The parts of a plan cover the stages in order. A stage is recorded until its backward,
or several run without recording and run again by a plan of their own, when the backward
arrives. A dynamic program finds the parts. For subchain `i, j` with `m` bytes:

    V(i, j, m) = min of
        record stage i:    f_i + b_i + V(i + 1, j, m - saved_i)
        run i .. e - 1:    f_i + .. + f_{e-1} + V(e, j, m - carry_e) + V(i, e, m)

where what the first stages need must fit in `m`. The plan is optimal among *persistent*
schedules: a stored value stays until the backward of its stage.

Invariant: no plan exceeds the budget. Bytes are counted in slots, sizes rounded up. To
waste few, more slots are tried as well, and the bytes of each plan counted exactly.
Rejected: one table for all budgets. Its slots would be too coarse for small budgets.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for
heterogeneous chains", INRIA RR-9302, arXiv 1911.13214.
"""

import functools
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.chain._actions import (
    Action,
    Advance,
    Backward,
    Drop,
    Evaluations,
    Load,
    RecordStep,
    Save,
    Schedule,
)


@dataclass(frozen=True)
class StageCosts:
    """The numbers of one stage of a chain.

    Args:
        forward_cost: The work of the stage.
        output_bytes: The bytes of its output.
        saved_bytes: What exists from a recorded run of the stage to its backward: its
            residuals and its output.
        backward_cost: The work of its backward.
        gradient_bytes: The bytes of the cotangent of its output. None: as many as those
            of the output.
        extra_bytes: The bytes that exist besides, while it runs without recording.
        forward_extra: The bytes that exist besides, while it is recorded.
        backward_extra: The bytes that exist besides, while its backward runs.

    Example:
        >>> from remat.chain.schedules import rotor
        >>> cheap = StageCosts(1.0, output_bytes=1, saved_bytes=4)
        >>> dear = StageCosts(9.0, output_bytes=1, saved_bytes=4)
        >>> rotor([cheap, cheap, dear, dear], budget=16).evaluations(4)
        Evaluations(forward=4, backward=1)
    """

    forward_cost: float
    output_bytes: int
    saved_bytes: int
    backward_cost: float = 0.0
    gradient_bytes: int | None = None
    extra_bytes: int = 0
    forward_extra: int = 0
    backward_extra: int = 0

    def __post_init__(self) -> None:
        if self.saved_bytes < self.output_bytes:
            raise ValueError(
                "remat: saved_bytes of a stage contains its output, "
                f"{self.output_bytes} bytes; got {self.saved_bytes}"
            )


@dataclass(frozen=True)
class Rerun:
    """Run stages `start` .. `stop - 1`, and again by `inner` when needed."""

    start: int
    stop: int
    inner: "RotorParts"


# In order. A number is a stage that is recorded until its backward.
RotorParts = tuple[int | Rerun, ...]


@dataclass(frozen=True)
class Stages:
    """The numbers of a chain. Carry 0, its input, exists all the time.

    Subchain `i`, `j` has the stages `i` .. `j - 1`. Carry `i` and the cotangent of
    carry `j` exist when it is reversed.
    """

    stages: tuple[StageCosts, ...]
    input_bytes: int = 0
    input_gradient_bytes: int = 0

    def __len__(self) -> int:
        return len(self.stages)

    def carry(self, k: int) -> int:
        """Return the bytes of carry `k`."""
        return self.stages[k - 1].output_bytes if k else self.input_bytes

    def gradient(self, k: int) -> int:
        """Return the bytes of the cotangent of carry `k`."""
        if not k:
            return self.input_gradient_bytes
        given = self.stages[k - 1].gradient_bytes
        return self.carry(k) if given is None else given

    @functools.cached_property
    def work(self) -> tuple[float, ...]:
        """The work of all stages before each one."""
        return (0, *itertools.accumulate(stage.forward_cost for stage in self.stages))

    def recording(self, k: int, stop: int) -> int:
        """Return the peak of recording a stage, and of reversing it."""
        stage = self.stages[k]
        recorded = self.gradient(stop) + stage.forward_extra
        pulled = self.gradient(k + 1) + self.gradient(k) + stage.backward_extra
        return stage.saved_bytes + max(recorded, pulled)

    def running(self, start: int, stop: int) -> Iterator[int]:
        """Yield the peak of each of some stages as it runs; carry `start` stays."""
        for k in range(start, stop):
            before = self.carry(k) if k > start else 0
            yield before + self.carry(k + 1) + self.stages[k].extra_bytes

    def cost(self, parts: RotorParts) -> float:
        """Return the work of parts, forward and backward."""
        total = 0.0
        for part in parts:
            if isinstance(part, int):
                stage = self.stages[part]
                total += stage.forward_cost + stage.backward_cost
            else:
                again = self.work[part.stop] - self.work[part.start]
                total += again + self.cost(part.inner)
        return total

    def peak(self, parts: RotorParts, stop: int) -> int:
        """Return the peak of the parts of subchain `_, stop`, without its input."""
        held, peak = 0, 0
        for part in parts:
            if isinstance(part, int):
                peak = max(peak, held + self.recording(part, stop))
                held += self.stages[part].saved_bytes
            else:
                run = max(self.running(part.start, part.stop)) + self.gradient(stop)
                inner = self.peak(part.inner, part.stop)
                peak = max(peak, held + run, held + inner)
                held += self.carry(part.stop)
        return peak


@dataclass(frozen=True)
class Rotor(Schedule):
    """A plan for a chain of unequal stages, as `rotor` finds it.

    Its forward ends with the last stage recorded.

    Example:
        >>> stage = StageCosts(1.0, output_bytes=1, saved_bytes=4)
        >>> plan = rotor([stage] * 6, budget=12)
        >>> plan.peak, plan.cost
        (12, 10.0)
    """

    numbers: Stages
    parts: RotorParts

    @property
    def cost(self) -> float:
        """The work of a forward and a backward."""
        return self.numbers.cost(self.parts)

    @property
    def peak(self) -> int:
        """The most bytes that exist at once, with the input of the chain."""
        inside = self.numbers.peak(self.parts, len(self.numbers))
        return self.numbers.input_bytes + inside

    def forward(self, length: int) -> Iterator[Action]:
        """Record the stages that are kept, and run the others."""
        self._check(length)
        return _first_run(self.parts)

    def backward(self, length: int) -> Iterator[Action]:
        """Reverse the stages that are kept, and run the others by their own plans."""
        self._check(length)
        return _reversed(self.parts)

    def evaluations(self, length: int) -> Evaluations:
        """Count the runs of all stages."""
        self._check(length)
        return Evaluations(length, _runs(self.parts) - length)

    def _check(self, length: int) -> None:
        count = len(self.numbers)
        if length != count:
            raise ValueError(_OTHER.format(count=count, length=length))


def _first_run(parts: RotorParts, stored: int | None = None) -> Iterator[Action]:
    """Run parts once. Carry `stored` is stored already."""
    for part in parts:
        if isinstance(part, int):
            yield RecordStep(part)
            continue
        if part.start != stored:
            yield Save(part.start)
        yield Advance(part.start, part.stop)


def _reversed(parts: RotorParts, stored: int | None = None) -> Iterator[Action]:
    """Reverse parts that ran once. Whoever stored carry `stored` drops it."""
    for part in reversed(parts):
        if isinstance(part, int):
            yield Backward(part)
            continue
        yield Load(part.start)
        yield from _first_run(part.inner, part.start)
        yield from _reversed(part.inner, part.start)
        if part.start != stored:
            yield Drop(part.start)


def _runs(parts: RotorParts) -> int:
    """Count the runs of stages."""
    again = [part for part in parts if isinstance(part, Rerun)]
    inside = sum(part.stop - part.start + _runs(part.inner) for part in again)
    return len(parts) - len(again) + inside


def rotor(
    stages: Sequence[StageCosts],
    budget: int,
    *,
    input_bytes: int = 0,
) -> Rotor:
    """Find the plan with the least work whose peak is under a budget.

    The last stage is recorded in the forward. If the bytes of a loss after the chain
    matter, make it the last stage: then no residuals of the stage before have to wait.
    The time grows with the third power of the number of stages: about a second for 50.

    Args:
        stages: The stages of the chain.
        budget: How many bytes may exist at once, with the input.
        input_bytes: The bytes of the input. Those of its cotangent, if there is one,
            count as `backward_extra` of the first stage.

    Returns:
        The plan.

    Raises:
        ValueError: the budget is too small. The message has the least that works.

    Example:
        >>> stage = StageCosts(1.0, 1, saved_bytes=4, backward_cost=2.0)
        >>> plan = rotor([stage] * 6, budget=12)
        >>> plan.peak, plan.cost, plan.evaluations(6)
        (12, 22.0, Evaluations(forward=6, backward=4))
    """
    numbers = Stages(tuple(stages), input_bytes)
    fastest = Rotor(numbers, tuple(range(len(stages))))
    if fastest.peak <= budget:
        return fastest
    smallest = Rotor(numbers, _smallest(numbers))
    if smallest.peak > budget:
        shown = {"count": len(numbers), "least": smallest.peak}
        raise ValueError(_TOO_SMALL.format(budget=budget, **shown))
    for parts in _solve(numbers, budget - input_bytes):
        plan = Rotor(numbers, parts)
        if plan.peak <= budget:
            return min(plan, smallest, key=lambda plan: plan.cost)
    return smallest


class FirstPart(NamedTuple):
    """What may be done with the first stages of a subchain."""

    is_kept: bool  # the first stage is recorded; if not, those before `rest` run again
    need: int  # bytes, while the first stages run
    held: int  # bytes, while the rest of the subchain is reversed
    work: float  # of the first stages, in this run
    rest: tuple[int, int]  # the subchain after them
    inner: tuple[int, int]  # the subchain that is run again afterwards; may be empty


def _choices(numbers: Stages) -> Callable[[int, int], Iterator[FirstPart]]:
    """Return what lists the choices for a subchain."""
    length = len(numbers)
    each = (numbers.running(i, length) for i in range(length))
    running = [[*itertools.accumulate(peaks, max)] for peaks in each]

    def choices(i: int, j: int) -> Iterator[FirstPart]:
        stage = numbers.stages[i]
        work = stage.forward_cost + stage.backward_cost
        need = numbers.recording(i, j)
        yield FirstPart(True, need, stage.saved_bytes, work, (i + 1, j), (i, i))
        for e in range(i + 1, j):
            held, work = numbers.carry(e), numbers.work[e] - numbers.work[i]
            need = max(held, running[i][e - i - 1] + numbers.gradient(j))
            yield FirstPart(False, need, held, work, (e, j), (i, e))

    return choices


def _subchains(length: int) -> list[tuple[int, int]]:
    """Return all subchains, the short ones first."""
    sizes = range(1, length + 1)
    return [(i, i + size) for size in sizes for i in range(length - size + 1)]


def _follow(
    choose: Callable[[int, int, int], FirstPart],
    slots_of: Callable[[int], int],
    i: int,
    j: int,
    room: int,
) -> RotorParts:
    """Make the choices for a subchain one after the other."""
    parts: list[int | Rerun] = []
    while i < j:
        choice = choose(i, j, room)
        e = choice.rest[0]
        if choice.is_kept:
            parts.append(i)
        else:
            parts.append(Rerun(i, e, _follow(choose, slots_of, i, e, room)))
        room -= slots_of(choice.held)
        i = e
    return tuple(parts)


def _smallest(numbers: Stages) -> RotorParts:
    """Return the parts with the least peak, of these some with little work."""
    length, choices = len(numbers), _choices(numbers)
    best = {(i, i): (0, 0.0) for i in range(length + 1)}
    chosen: dict[tuple[int, int], FirstPart] = {}

    def worth(choice: FirstPart) -> tuple[int, float]:
        (rest, work), (inner, again) = best[choice.rest], best[choice.inner]
        peak = max(choice.need, choice.held + rest, inner)
        return peak, choice.work + work + again

    for i, j in _subchains(length):
        chosen[i, j] = min(choices(i, j), key=worth)
        best[i, j] = worth(chosen[i, j])
    return _follow(lambda i, j, _: chosen[i, j], lambda _: 0, 0, length, 0)


# In how many parts the budget is divided. More find better plans, and take longer.
_SLOTS = 500


def _solve(numbers: Stages, room: int) -> Iterator[RotorParts]:
    """Solve for some more slots than there are, then for fewer; the last ones fit."""
    length = len(numbers)
    unit, spare = _unit(numbers, room)
    table = _WorkTable(numbers, unit, room // unit + spare)
    for most in range(room // unit + spare, room // unit - 1, -1):
        if table.rows[0, length][most] < math.inf:
            yield _follow(table.choose, table.slots_of, 0, length, most)


def _unit(numbers: Stages, room: int) -> tuple[int, int]:
    """Return the bytes of a slot, and how many slots the rounding may waste."""
    length = len(numbers)
    sizes = [f(k) for k in range(length + 1) for f in (numbers.carry, numbers.gradient)]
    for stage in numbers.stages:
        sizes += stage.extra_bytes, stage.saved_bytes
        sizes += stage.forward_extra, stage.backward_extra
    divisor = math.gcd(*sizes)
    if divisor * _SLOTS >= room:
        return divisor, 0
    return -(-room // _SLOTS), length + 1


class _WorkTable:
    """The least work of each subchain, for each number of slots."""

    def __init__(self, numbers: Stages, unit: int, slots: int) -> None:
        self._unit, self._slots = unit, slots
        self._choices, length = _choices(numbers), len(numbers)
        empty = array("d", [0.0]) * (slots + 1)
        self.rows: dict[tuple[int, int], Sequence[float]]
        self.rows = {(i, i): empty for i in range(length + 1)}
        for i, j in _subchains(length):
            self.rows[i, j] = self._row(i, j)

    def slots_of(self, size: int) -> int:
        """Return how many slots so many bytes take."""
        return -(-size // self._unit)

    def choose(self, i: int, j: int, room: int) -> FirstPart:
        """Return the choice with the least work for a subchain."""

        def work(choice: FirstPart) -> float:
            if self.slots_of(choice.need) > room:
                return math.inf
            rest = self.rows[choice.rest][room - self.slots_of(choice.held)]
            return choice.work + rest + self.rows[choice.inner][room]

        return min(self._choices(i, j), key=work)

    def _row(self, i: int, j: int) -> Sequence[float]:
        """Compute the least work of a subchain, for all numbers of slots at once."""
        never = [math.inf] * (self._slots + 1)
        found = [never, never]  # min of one argument would be that of its items
        for choice in self._choices(i, j):
            need, held = self.slots_of(choice.need), self.slots_of(choice.held)
            if need > self._slots:
                continue
            work = choice.work
            rest = self.rows[choice.rest][need - held : len(never) - held]
            inner = self.rows[choice.inner][need:]
            sums = [work + a + b for a, b in zip(rest, inner, strict=True)]
            found.append([*never[:need], *sums])
        return array("d", map(min, *found))


_OTHER = (
    "remat: this plan is for {count} stages; got a chain of {length}. Make a plan with "
    "remat.chain.schedules.rotor"
)
_TOO_SMALL = (
    "remat: a budget of {budget} bytes is too small for this chain of {count} stages. "
    "The least budget that works is {least} bytes"
)
