"""Chooses one option for each block of a chain, so that the least work is done.

A chain is a row of stages, in the order of the forward. What a stage saves is alive
until its backward; while it runs, or its backward, it needs memory beside what the
stages before it saved. A nest is a row of stages that may also be recomputed as a
whole: then it saves its input alone, and its stages run again, under options of their
own, when its backward begins. That is rotor's recursion (Beaumont et al. 2019, and
Rockmate for several options per stage), for the nests that a model has.

Invariant: sizes are rounded up, so a chain that fits in units fits in bytes. The table
is for all amounts of memory at once.
Rejected: `remat.chain.schedules.rotor`. It recomputes any run of stages, where in a
model only a called module can be: a nest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Cost:
    """What one option of a stage costs."""

    saves: int  # the bytes that stay alive after its forward
    needs: int  # the most in it and its backward, beside those alive before
    work: float  # in seconds


@dataclass(frozen=True, slots=True)
class ChainStage:
    """A stage of a chain, and its options."""

    key: str  # what tells its choice in the result; "" if there is none
    choices: Mapping[str, Cost]  # by the name of the option


@dataclass(frozen=True, slots=True)
class Nest:
    """A row of stages that may be recomputed as a whole."""

    key: str  # what tells whether it is
    items: tuple["Item", ...]
    whole: Cost  # of doing so, beside what its stages cost


Item: TypeAlias = ChainStage | Nest
WHOLE = "whole"


class Assignment(NamedTuple):
    """What is chosen if there is a certain amount of memory."""

    memory: int  # the least bytes for which this is chosen
    work: float
    picks: Mapping[str, str]  # of each stage, and `WHOLE` of a nest that is recomputed


class _Cell(NamedTuple):
    """The best that can be done from a stage on, as a linked list of picks."""

    work: float
    picks: Any


_NO_WAY = _Cell(float("inf"), None)
_BestByMemory: TypeAlias = list[_Cell]


def front(items: Sequence[Item], memory: int, units: int = 1000) -> list[Assignment]:
    """Return the best assignments, from the one that needs least memory on.

    Example:
        >>> plain, again = Cost(10, 12, 0.0), Cost(2, 12, 1.0)
        >>> options = {"plain": plain, "again": again}
        >>> stages = [ChainStage(key, options) for key in "abc"]
        >>> for found in front(stages, 40, 40):
        ...     print(found.memory, found.work, *found.picks.values())
        16 2.0 again again plain
        24 1.0 plain again plain
        32 0.0 plain plain plain
    """
    unit = max(1, -(-memory // units))
    solved = _Solving(unit, units).before(items, [_Cell(0.0, None)] * (units + 1))
    found: list[Assignment] = []
    for m, cell in enumerate(solved):
        if cell is _NO_WAY or (found and cell.work >= found[-1].work):
            continue
        found.append(Assignment(m * unit, cell.work, dict(_unlinked(cell.picks))))
    return found


class _Solving:
    """The recursion. Memory is counted in units."""

    def __init__(self, unit: int, units: int) -> None:
        self._unit, self._units = unit, units

    def before(self, items: Sequence[Item], after: _BestByMemory) -> _BestByMemory:
        """Return the table before some items, given the one after them."""
        for item in reversed(items):
            if isinstance(item, ChainStage):
                after = self._before_stage(item, after)
            else:
                after = self._before_nest(item, after)
        return after

    def _before_stage(self, stage: ChainStage, after: _BestByMemory) -> _BestByMemory:
        table = [_NO_WAY] * (self._units + 1)
        for name, choice in stage.choices.items():
            pick = (stage.key, name) if stage.key else None
            for m, rest in self._reachable(choice, after):
                work = choice.work + rest.work
                if work < table[m].work:
                    picks = rest.picks if pick is None else (pick, rest.picks)
                    table[m] = _Cell(work, picks)
        return table

    def _before_nest(self, nest: Nest, after: _BestByMemory) -> _BestByMemory:
        table = self.before(nest.items, after)
        inside = self.before(nest.items, [_Cell(0.0, None)] * (self._units + 1))
        for m, rest in self._reachable(nest.whole, after):
            work = nest.whole.work + inside[m].work + rest.work
            if work < table[m].work:
                # The linked lists are joined, and not copied.
                pick = inside[m].picks
                picks = rest.picks if pick is None else (pick, rest.picks)
                table[m] = _Cell(work, ((nest.key, WHOLE), picks))
        return table

    def _reachable(self, choice: Cost, after: _BestByMemory) -> list[tuple[int, _Cell]]:
        """Return the amounts for which a choice fits, and what follows it then."""
        # Rounded up.
        saves, needs = -(-choice.saves // self._unit), -(-choice.needs // self._unit)
        least, last = max(needs, saves, 0), self._units
        cells = ((m, after[min(m - saves, last)]) for m in range(least, last + 1))
        return [(m, cell) for m, cell in cells if cell is not _NO_WAY]


def _unlinked(picks: Any) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    todo = [picks]
    while todo:
        part = todo.pop()
        if part is None:
            continue
        if isinstance(part[0], str):
            found.append(part)
        else:
            todo += [part[1], part[0]]
    return found


def peak(items: Sequence[Item], picks: Mapping[str, str]) -> int:
    """Return the bytes that an assignment needs in which no nest is recomputed."""
    saved = highest = 0
    for stage in flat(items):
        choice = _chosen(stage, picks)
        highest = max(highest, saved + choice.needs)
        saved += choice.saves
    return max(highest, saved)


def work(items: Sequence[Item], picks: Mapping[str, str]) -> float:
    """Return what an assignment costs in which no nest is recomputed."""
    return sum(_chosen(stage, picks).work for stage in flat(items))


def _chosen(stage: ChainStage, picks: Mapping[str, str]) -> Cost:
    return stage.choices[picks[stage.key] if stage.key else next(iter(stage.choices))]


def flat(items: Sequence[Item]) -> list[ChainStage]:
    """Return the stages of a chain, also those in nests."""
    found: list[ChainStage] = []
    for item in items:
        found += [item] if isinstance(item, ChainStage) else flat(item.items)
    return found
