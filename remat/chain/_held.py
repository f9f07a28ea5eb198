"""What a chain holds while it runs, by its schedule: `held` and `plot`.

Called by users, to choose a schedule before anything has run.

Invariant: it follows the actions of the schedule, which a chain follows too. It runs no
step.
Rejected: bytes. A schedule does not know how large a carry is, nor what a step records.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remat._report import plots
from remat.chain._actions import (
    Action,
    Advance,
    Backward,
    Drop,
    Record,
    Reverse,
    Save,
    Schedule,
    Storage,
)


@dataclass(frozen=True, slots=True)
class Held:
    """What a chain holds at one time.

    The live carry comes on top.

    Attributes:
        evaluations: how many steps have run.
        memory: how many carries are stored in memory.
        disk: how many carries are stored on disk.
        recorded: how many steps have their residuals.

    Example:
        >>> from remat.chain.schedules import Binomial
        >>> max(held(Binomial(checkpoints=3), 10), key=lambda state: state.memory)
        Held(evaluations=7, memory=3, disk=0, recorded=0)
    """

    evaluations: int
    memory: int
    disk: int
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
        Held(evaluations=4640, memory=0, disk=0, recorded=0)
        >>> max(state.memory for state in states)
        10
    """
    state = _State()
    for action in schedule.forward(length):
        yield from state.after(action)
    for action in schedule.backward(length):
        yield from state.after(action)


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
        ('steps evaluated so far', ['carries in memory', 'recorded steps'])
    """
    states = [*held(schedule, length)]
    series = {
        "carries in memory": [state.memory for state in states],
        "carries on disk": [state.disk for state in states],
        "recorded steps": [state.recorded for state in states],
    }
    used = {name: counts for name, counts in series.items() if any(counts)}
    at = [state.evaluations for state in states]
    title = f"{schedule!r}, {length:,} steps"
    axes = "steps evaluated so far", "carries and steps held"
    return plots.lines(at, used, axes, title, ax)


class _State:
    """Follows actions, and counts."""

    def __init__(self) -> None:
        self._stored: dict[int, Storage] = {}
        self._run = self._recorded = self._on_disk = 0

    def after(self, action: Action) -> Iterator[Held]:
        """Do an action, and return what is held then."""
        match action:
            case Advance(start, stop):
                self._run += stop - start
            case Save(step, storage):
                self._stored[step] = storage
                self._on_disk += storage is Storage.DISK
            case Drop(step):
                self._on_disk -= self._stored.pop(step) is Storage.DISK
            case Record():
                self._run += 1
                self._recorded += 1
            case Backward():
                self._recorded -= 1
            case Reverse(start, stop):
                self._run += stop - start
                self._recorded += stop - start
                yield self._now()
                self._recorded -= stop - start
            case _:
                return
        yield self._now()

    def _now(self) -> Held:
        memory = len(self._stored) - self._on_disk
        return Held(self._run, memory, self._on_disk, self._recorded)
