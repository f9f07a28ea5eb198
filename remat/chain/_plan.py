"""A plan for a chain of unequal stages: which are recorded, and which run again.

The parts of a plan cover the stages in order. A `Keep` records one stage, and holds its
residuals until its backward. A `Recompute` runs several stages without recording, and
keeps their input alone; when the backward arrives, they run again, by a plan of their
own. So a plan is also a nesting of rematerialized functions.

Invariant: what a plan costs, in work and in bytes, is a function of the plan and the
numbers of the chain. The solver is not asked.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", INRIA
RR-9302, arXiv 1911.13214, 2019.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from remat.chain._actions import (
    Action,
    Advance,
    Backward,
    Drop,
    Evaluations,
    Load,
    Record,
    Save,
    Schedule,
)


@dataclass(frozen=True)
class Option:
    """One way to record a stage.

    Args:
        saved_bytes: What exists from the recorded run of the stage to its backward:
            its residuals and its output.
        backward_cost: The work of the backward, with what it recomputes inside.
        forward_extra: The bytes that exist besides, while the stage is recorded.
        backward_extra: The bytes that exist besides, while its backward runs.

    Example:
        >>> whole = Option(saved_bytes=400, backward_cost=2.0)
        >>> recomputed = Option(saved_bytes=100, backward_cost=3.0)
        >>> Stage(1.0, output_bytes=100, options=(whole, recomputed)).options[1]
        Option(saved_bytes=100, backward_cost=3.0, forward_extra=0, backward_extra=0)
    """

    saved_bytes: int
    backward_cost: float = 0.0
    forward_extra: int = 0
    backward_extra: int = 0


@dataclass(frozen=True)
class Stage:
    """The numbers of one stage of a chain.

    Args:
        forward_cost: The work of the stage.
        output_bytes: The bytes of its output.
        options: The ways to record it.
        gradient_bytes: The bytes of the cotangent of its output. None: as many as those
            of the output.
        extra_bytes: The bytes that exist besides, while it runs without recording.

    Example:
        >>> from remat.chain.schedules import rotor
        >>> cheap = Stage(1.0, output_bytes=1, options=(Option(4),))
        >>> dear = Stage(9.0, output_bytes=1, options=(Option(4),))
        >>> rotor([cheap, cheap, dear, dear], budget=16).evaluations(4)
        Evaluations(forward=4, backward=1)
    """

    forward_cost: float
    output_bytes: int
    options: tuple[Option, ...]
    gradient_bytes: int | None = None
    extra_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError("remat: a Stage takes at least one Option; got none")
        least = min(option.saved_bytes for option in self.options)
        if least < self.output_bytes:
            raise ValueError(
                "remat: saved_bytes of an Option contains the output of its Stage, "
                f"{self.output_bytes} bytes; got {least}"
            )


@dataclass(frozen=True)
class Keep:
    """Record a stage, by one of its options, until its backward.

    Example:
        >>> from remat.chain.schedules import rotor
        >>> stage = Stage(1.0, output_bytes=1, options=(Option(4),))
        >>> plan = rotor([stage] * 6, budget=12)
        >>> plan.parts[-1]
        Keep(stage=5, option=0)
    """

    stage: int
    option: int


@dataclass(frozen=True)
class Recompute:
    """Run stages `start` .. `stop - 1`, and run them again by `inner` when needed.

    Example:
        >>> from remat.chain.schedules import rotor
        >>> stage = Stage(1.0, output_bytes=1, options=(Option(4),))
        >>> plan = rotor([stage] * 6, budget=12)
        >>> plan.parts[0]
        Recompute(start=0, stop=2,
                  inner=(Keep(stage=0, option=0), Keep(stage=1, option=0)))
    """

    start: int
    stop: int
    inner: "Parts"


Parts = tuple[Keep | Recompute, ...]
"""What a plan does with the stages of a chain, in order.

Example:
    >>> from remat.chain.schedules import Option, Stage, rotor
    >>> stage = Stage(1.0, output_bytes=1, options=(Option(4),))
    >>> [type(part).__name__ for part in rotor([stage] * 6, budget=12).parts]
    ['Recompute', 'Recompute', 'Keep', 'Keep']
"""


@dataclass(frozen=True)
class Stages:
    """The numbers of a chain.

    Carry 0 is the input. It exists all the time. Subchain `i`, `j` has the stages
    `i` .. `j - 1`. Carry `i` and the cotangent of carry `j` exist when it is reversed.
    """

    stages: tuple[Stage, ...]
    input_bytes: int = 0
    input_gradient_bytes: int = 0

    def __len__(self) -> int:
        return len(self.stages)

    def option(self, part: Keep) -> Option:
        """Return the option that a part chose."""
        return self.stages[part.stage].options[part.option]

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

    def recording(self, part: Keep, stop: int) -> int:
        """Return the peak of recording a stage of subchain `_, stop`, and reversing it.

        What other stages hold does not count, and carry `part.stage` doesn't.
        """
        i, option = part.stage, self.option(part)
        forward = self.gradient(stop) + option.forward_extra
        backward = self.gradient(i + 1) + self.gradient(i) + option.backward_extra
        return option.saved_bytes + max(forward, backward)

    def running(self, start: int) -> list[int]:
        """Return the peak of running stages `start` .. `stop - 1`, for each `stop`.

        Carry `start` does not count, as it stays; the cotangent does not either.
        """
        peaks = (
            (self.carry(k) if k > start else 0)
            + self.carry(k + 1)
            + self.stages[k].extra_bytes
            for k in range(start, len(self))
        )
        return [*([0] * (start + 1)), *itertools.accumulate(peaks, max)]

    def cost(self, parts: Parts) -> float:
        """Return the work of parts, forward and backward."""
        return sum(map(self._cost, parts))

    def _cost(self, part: Keep | Recompute) -> float:
        if isinstance(part, Keep):
            forward = self.stages[part.stage].forward_cost
            return forward + self.option(part).backward_cost
        return self.work[part.stop] - self.work[part.start] + self.cost(part.inner)

    def peak(self, parts: Parts, stop: int) -> int:
        """Return the peak of the parts of subchain `_, stop`, without its input."""
        held, peak = 0, 0
        for part in parts:
            if isinstance(part, Keep):
                peak = max(peak, held + self.recording(part, stop))
                held += self.option(part).saved_bytes
            else:
                run = self.running(part.start)[part.stop] + self.gradient(stop)
                inner = self.peak(part.inner, part.stop)
                peak = max(peak, held + run, held + inner)
                held += self.carry(part.stop)
        return peak


@dataclass(frozen=True)
class Rotor(Schedule):
    """A plan for a chain of unequal stages, as `rotor` finds it.

    The forward ends with the last stage recorded: its residuals wait for the backward.

    Args:
        numbers: The stages of the chain, and its input.
        parts: What is done with the stages, in order.

    Example:
        >>> from remat.chain.schedules import rotor
        >>> stage = Stage(1.0, output_bytes=1, options=(Option(4),))
        >>> plan = rotor([stage] * 6, budget=12)
        >>> plan.peak, plan.cost
        (12, 10.0)
    """

    numbers: Stages
    parts: Parts

    @property
    def cost(self) -> float:
        """The work of a forward and a backward."""
        return self.numbers.cost(self.parts)

    @property
    def peak(self) -> int:
        """The most bytes that exist at once, with the input of the chain."""
        numbers = self.numbers
        return numbers.input_bytes + numbers.peak(self.parts, len(numbers))

    def forward(self, length: int) -> Iterator[Action]:
        """Record the stages that are kept, and run the others."""
        self._check(length)
        return _forward(self.parts)

    def backward(self, length: int) -> Iterator[Action]:
        """Reverse the stages that are kept, and run the others by their own plans."""
        self._check(length)
        return _backward(self.parts)

    def evaluations(self, length: int) -> Evaluations:
        """Count the runs of all stages."""
        self._check(length)
        return Evaluations(length, sum(map(_runs, self.parts)) - length)

    def _check(self, length: int) -> None:
        if length != len(self.numbers):
            raise ValueError(
                f"remat: this plan is for {len(self.numbers)} stages; got a chain of "
                f"{length}. Make a plan with remat.chain.schedules.rotor"
            )


def _forward(parts: Parts, stored: int | None = None) -> Iterator[Action]:
    """Run parts once. Carry `stored` is stored already."""
    for part in parts:
        if isinstance(part, Keep):
            yield Record(part.stage, part.option)
            continue
        if part.start != stored:
            yield Save(part.start)
        yield Advance(part.start, part.stop)


def _backward(parts: Parts, stored: int | None = None) -> Iterator[Action]:
    """Reverse parts that ran once. Whoever stored carry `stored` drops it."""
    for part in reversed(parts):
        if isinstance(part, Keep):
            yield Backward(part.stage)
            continue
        yield Load(part.start)
        yield from _forward(part.inner, part.start)
        yield from _backward(part.inner, part.start)
        if part.start != stored:
            yield Drop(part.start)


def _runs(part: Keep | Recompute) -> int:
    if isinstance(part, Keep):
        return 1
    return part.stop - part.start + sum(map(_runs, part.inner))
