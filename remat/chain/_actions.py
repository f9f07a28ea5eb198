"""What a schedule tells a chain to do: its actions, and what all schedules share.

A chain has steps 0 .. length - 1. Carry `k` is the input of step `k`, and carry
`length` is the result. At any time at most one carry is *live*: the next step runs on
it. Other carries are *stored*, as checkpoints. Actions name steps and carries.

Invariant: a schedule is data. It runs nothing and holds no tensor, and its iterators
are lazy: a chain of 100,000 steps never exists as a list of actions.
Rejected: actions as named tuples. `Advance(0, 3)` would equal `Reverse(0, 3)`.
"""

import abc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat._report import render


@dataclass(frozen=True, slots=True)
class Advance:
    """Run steps `start` .. `stop - 1` from the live carry, and record nothing.

    Carry `start` is live before it, carry `stop` after it.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> [*Binomial(checkpoints=2).forward(10)][-1]
        Advance(start=6, stop=10)
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Save:
    """Store the live carry, which is carry `step`. It stays live.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> actions = Binomial(checkpoints=2).forward(10)
        >>> next(action for action in actions if isinstance(action, Save))
        Save(step=0)
    """

    step: int


@dataclass(frozen=True, slots=True)
class Load:
    """Make the stored carry `step` the live one. It stays stored.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> actions = Binomial(checkpoints=2).backward(10)
        >>> next(action for action in actions if isinstance(action, Load))
        Load(step=6)
    """

    step: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of the stored carry `step`. If it is live, it stays live.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> actions = Binomial(checkpoints=2).backward(10)
        >>> next(action for action in actions if isinstance(action, Drop))
        Drop(step=6)
    """

    step: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """Run steps `start` .. `stop - 1` from the live carry again and reverse them.

    They run with recording, so that the residuals of all of them exist at once. Then
    the cotangent of carry `stop` is pulled back to carry `start`. No carry is live
    after it.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> actions = Binomial(checkpoints=2).backward(10)
        >>> next(action for action in actions if isinstance(action, Reverse))
        Reverse(start=9, stop=10)
    """

    start: int
    stop: int


Action = Advance | Save | Load | Drop | Reverse
"""One thing that a schedule tells a chain to do.

Example:
    >>> from remat.chain.schedules import Action, Binomial
    >>> all(isinstance(a, Action) for a in Binomial(checkpoints=3).backward(10))
    True
"""


class Evaluations(NamedTuple):
    """How many steps are run.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> found = Binomial(checkpoints=3).evaluations(10)
        >>> found.forward, found.backward, sum(found)
        (10, 18, 28)
    """

    forward: int
    backward: int


class Schedule(abc.ABC):
    """Which carries of a chain are stored, and what a backward runs again.

    A forward runs every step once, because its caller needs the result, and leaves
    checkpoints behind. A backward begins with these checkpoints and no live carry. It
    reverses every step once, from the last to the first, and ends with nothing stored.
    Carry 0, the input of the chain, is a checkpoint like the others: it is counted.

    Example:
        >>> class NoCheckpoints(Schedule):
        ...     def forward(self, length):
        ...         return iter([Save(0), Advance(0, length)])
        ...     def backward(self, length):
        ...         return iter([Load(0), Drop(0), Reverse(0, length)])
        >>> NoCheckpoints().evaluations(10)
        Evaluations(forward=10, backward=10)
        >>> import torch
        >>> from remat import chain
        >>> def last(x):
        ...     return chain.fori_loop(
        ...         0, 10, lambda i, x: x.sin(), x, checkpoints=NoCheckpoints()
        ...     )
        >>> torch.func.grad(last)(torch.tensor(1.0))
        tensor(0.0793)
    """

    @abc.abstractmethod
    def forward(self, length: int) -> Iterator[Action]:
        """Return what the forward of a chain does."""

    @abc.abstractmethod
    def backward(self, length: int) -> Iterator[Action]:
        """Return what the backward does with the checkpoints of the forward."""

    def evaluations(self, length: int) -> Evaluations:
        """Predict how many steps the forward and the backward run."""
        forward, backward = self.forward(length), self.backward(length)
        return Evaluations(_steps_of(forward), _steps_of(backward))


def _steps_of(actions: Iterator[Action]) -> int:
    return sum(a.stop - a.start for a in actions if isinstance(a, (Advance, Reverse)))


class OfCounts:
    """A dataclass of counts, which are 1 or more."""

    def __post_init__(self) -> None:
        taker, known = type(self).__name__, vars(self)
        names = ("checkpoints", "segments", "unroll")
        for name in filter(known.__contains__, names):
            value = known[name]
            if not isinstance(value, int) or isinstance(value, bool):
                kind = type(value).__name__
                told = f"takes an integer as {name}; got {value!r}, a {kind}"
                raise TypeError(f"remat: {taker} {told}")
            if value < 1:
                raise ValueError(f"remat: {taker} takes {name} >= 1; got {value}")


# --- What is held while a schedule is followed ---


@dataclass(frozen=True, slots=True)
class Held:
    """What a chain holds at one time.

    The live carry comes on top.

    Attributes:
        evaluations: how many steps have run.
        stored: how many carries are stored.
        recorded: how many steps have their residuals.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> max(held(Binomial(checkpoints=3), 10), key=lambda state: state.stored)
        Held(evaluations=7, stored=3, recorded=0)
    """

    evaluations: int
    stored: int
    recorded: int


def held(schedule: Schedule, length: int) -> Iterator[Held]:
    """Return what a forward and a backward hold, after each change.

    Args:
        schedule: The schedule of the chain.
        length: How many steps it has.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> states = [*held(Binomial(checkpoints=10), 1000)]
        >>> states[-1]
        Held(evaluations=4640, stored=0, recorded=0)
        >>> max(state.stored for state in states)
        10
    """
    run = stored = 0
    for action in itertools.chain(schedule.forward(length), schedule.backward(length)):
        match action:
            case Advance(start, stop):
                run += stop - start
            case Save():
                stored += 1
            case Drop():
                stored -= 1
            case Reverse(start, stop):
                run += stop - start
                yield Held(run, stored, stop - start)
            case Load():
                continue
        yield Held(run, stored, 0)


def plot(schedule: Schedule, length: int, ax: Any = None) -> Any:
    """Draw what a forward and a backward hold, over the steps that have run.

    Args:
        schedule: The schedule of the chain.
        length: How many steps it has.
        ax: the matplotlib axes to draw on; None for new ones.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from remat.chain.schedules import Binomial
        >>> axes = plot(Binomial(checkpoints=3), 10, ax=Figure().subplots())
        >>> axes.get_xlabel(), [line.get_label() for line in axes.get_lines()]
        ('steps evaluated so far', ['stored carries', 'recorded steps'])
    """
    states = [*held(schedule, length)]
    series = {
        "stored carries": [state.stored for state in states],
        "recorded steps": [state.recorded for state in states],
    }
    at = [state.evaluations for state in states]
    title = f"{schedule!r}, {length:,} steps"
    axes = "steps evaluated so far", "carries and steps held"
    return render.lines(at, series, axes, title, ax)
