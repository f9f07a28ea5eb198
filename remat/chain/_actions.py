"""What a schedule tells a chain to do: its actions, and what all schedules share.

A chain has steps 0 .. length - 1. Carry `k` is the input of step `k`, and carry
`length` is the result. At any time at most one carry is *live*: the next step runs on
it. Other carries are *stored*, as checkpoints. Actions name steps and carries.

Invariant: a schedule is data. It runs nothing and holds no tensor, and its iterators
are lazy: a chain of 100,000 steps never exists as a list of actions.
Rejected: actions as named tuples. `Advance(0, 3)` would equal `Reverse(0, 3)`.
"""

import abc
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Storage(enum.Enum):
    """Where a checkpoint is stored.

    Example:
        >>> from remat.chain.schedules import Multilevel
        >>> actions = Multilevel(memory=2, disk=1).forward(100)
        >>> sorted({a.storage.value for a in actions if isinstance(a, Save)})
        ['disk', 'memory']
    """

    MEMORY = "memory"
    """On the device of the carry."""
    DISK = "disk"
    """In a file below `REMAT_OFFLOAD_DIR`, or the folder for temporary files."""


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
        Save(step=0, storage=<Storage.MEMORY: 'memory'>)
    """

    step: int
    storage: Storage = Storage.MEMORY


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


@dataclass(frozen=True, slots=True)
class Record:
    """Run step `step` from the live carry with recording, and hold its residuals.

    Its input and its output exist as long as the residuals. Carry `step + 1` is live
    after it. `option` is the number of one of the ways in which the stage can be
    recorded. Only plans of `rotor` say this.

    Example:
        >>> from remat.chain.schedules import Option, Stage, rotor
        >>> stage = Stage(1.0, output_bytes=1, options=(Option(4),))
        >>> plan = rotor([stage] * 6, budget=12)
        >>> next(action for action in plan.forward(6) if isinstance(action, Record))
        Record(step=4, option=0)
    """

    step: int
    option: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Pull the cotangent of carry `step + 1` back to carry `step`.

    The step was recorded before. Its residuals are let go. No carry is live after it.

    Example:
        >>> from remat.chain.schedules import Option, Stage, rotor
        >>> stage = Stage(1.0, output_bytes=1, options=(Option(4),))
        >>> plan = rotor([stage] * 6, budget=12)
        >>> next(action for action in plan.backward(6) if isinstance(action, Backward))
        Backward(step=5)
    """

    step: int


Action = Advance | Save | Load | Drop | Reverse | Record | Backward
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
        ...     def evaluations(self, length):
        ...         return Evaluations(length, length)
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

    @abc.abstractmethod
    def evaluations(self, length: int) -> Evaluations:
        """Predict how many steps the forward and the backward run."""


def check_count(taker: str, name: str, value: object, least: int = 1) -> None:
    """Refuse an argument of a schedule that is not a count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"remat: {taker} takes an integer as {name}; got {value!r}, a "
            f"{type(value).__name__}"
        )
    if value < least:
        raise ValueError(f"remat: {taker} takes {name} >= {least}; got {value}")
