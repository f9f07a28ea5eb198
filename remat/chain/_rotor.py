"""Rotor: the plan with the least work for a chain of unequal stages, under a budget.

A dynamic program over subchains and bytes. For subchain `i, j` with `m` bytes:

    V(i, j, m) = min of
        keep stage i by option o: f_i + b_o + V(i + 1, j, m - saved_o)
        recompute i .. e - 1:     f_i + .. + f_{e-1} + V(e, j, m - carry_e) + V(i, e, m)

where what the first stages need must fit in `m`. The plan is optimal among *persistent*
schedules, in which a stored value stays until the backward of its stage. For some
chains with little room another schedule has less work.

Invariant: no plan exceeds the budget. Bytes are counted in slots, sizes rounded up. The
rounding wastes bytes, so plans for a few more slots are tried as well; the bytes of
each plan are counted exactly before it is taken.
Rejected: one table for all budgets. Its slots would be too coarse for small budgets.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, INRIA RR-9302, 2019.
Several options for a stage: Zhao et al., "Rockmate", ICML 2023.
"""

import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from remat.chain._actions import check_count
from remat.chain._plan import Keep, Parts, Recompute, Rotor, Stage, Stages


class Choice(NamedTuple):
    """What may be done with the first stages of a subchain.

    Attributes:
        keep: Record the first stage. None: recompute the stages before `rest`.
        need: The bytes that the first stages need while they run.
        held: The bytes that exist while the rest of the subchain is reversed.
        work: The work of the first stages, in this run.
        rest: The subchain after them.
        inner: The subchain that is run again afterwards. It may be empty.
    """

    keep: Keep | None
    need: int
    held: int
    work: float
    rest: tuple[int, int]
    inner: tuple[int, int]


def rotor(
    stages: Sequence[Stage],
    budget: int,
    *,
    input_bytes: int = 0,
    input_gradient_bytes: int = 0,
    slots: int = 500,
) -> Rotor:
    """Find the plan with the least work whose peak is under a budget.

    The last stage is recorded in the forward. If a loss follows the chain whose bytes
    matter, it is a last stage: then no residuals of the stage before have to wait.

    Args:
        stages: The stages of the chain.
        budget: How many bytes may exist at once, with the input.
        input_bytes: The bytes of the input.
        input_gradient_bytes: The bytes of its cotangent, if there is one.
        slots: In how many parts the budget is divided. More find better plans. The time
            is proportional to it, and to the third power of the number of stages: about
            a second for 50 stages and 500 slots.

    Returns:
        The plan.

    Raises:
        ValueError: the budget is too small. The message has the least that works.

    Source: Beaumont et al., INRIA RR-9302, arXiv 1911.13214, 2019.

    Example:
        >>> from remat.chain.schedules import Option
        >>> stage = Stage(1.0, output_bytes=1, options=(Option(4, backward_cost=2.0),))
        >>> plan = rotor([stage] * 6, budget=12)
        >>> plan.peak, plan.cost, plan.evaluations(6)
        (12, 22.0, Evaluations(forward=6, backward=4))
    """
    check_count("rotor", "slots", slots)
    numbers = Stages(tuple(stages), input_bytes, input_gradient_bytes)
    fastest = tuple(Keep(i, _fastest(stage)) for i, stage in enumerate(stages))
    if Rotor(numbers, fastest).peak <= budget:
        return Rotor(numbers, fastest)
    smallest = Rotor(numbers, _smallest(numbers))
    if smallest.peak > budget:
        raise ValueError(
            f"remat: a budget of {budget} bytes is too small for this chain of "
            f"{len(numbers)} stages. The least budget that works is {smallest.peak} "
            "bytes"
        )
    plans = map(partial(Rotor, numbers), _solve(numbers, budget - input_bytes, slots))
    found = next((plan for plan in plans if plan.peak <= budget), smallest)
    return min(found, smallest, key=lambda plan: plan.cost)


def least_budget(
    stages: Sequence[Stage], *, input_bytes: int = 0, input_gradient_bytes: int = 0
) -> int:
    """Return the least budget for which `rotor` finds a plan, in bytes.

    Args:
        stages: The stages of the chain.
        input_bytes: The bytes of the input.
        input_gradient_bytes: The bytes of its cotangent, if there is one.

    Example:
        >>> from remat.chain.schedules import Option
        >>> stage = Stage(1.0, output_bytes=1, options=(Option(4),))
        >>> least_budget([stage] * 6)
        7
    """
    numbers = Stages(tuple(stages), input_bytes, input_gradient_bytes)
    return Rotor(numbers, _smallest(numbers)).peak


def _fastest(stage: Stage) -> int:
    """Return the option with the least work, of these the one with the fewest bytes."""
    return min(
        range(len(stage.options)),
        key=lambda o: (stage.options[o].backward_cost, stage.options[o].saved_bytes),
    )


# --- Choices ------------------------------------------------------------------------


def _choices(numbers: Stages) -> Callable[[int, int], Iterator[Choice]]:
    """Return what lists the choices for a subchain."""
    running = [numbers.running(i) for i in range(len(numbers))]

    def keep(i: int, j: int) -> Iterator[Choice]:
        for number, option in enumerate(numbers.stages[i].options):
            part, held = Keep(i, number), option.saved_bytes
            work = numbers.stages[i].forward_cost + option.backward_cost
            need = numbers.recording(part, j)
            yield Choice(part, need, held, work, (i + 1, j), (i, i))

    def recompute(i: int, j: int) -> Iterator[Choice]:
        for e in range(i + 1, j):
            held, work = numbers.carry(e), numbers.work[e] - numbers.work[i]
            need = max(held, running[i][e] + numbers.gradient(j))
            yield Choice(None, need, held, work, (e, j), (i, e))

    return lambda i, j: itertools.chain(keep(i, j), recompute(i, j))


def _subchains(length: int) -> Iterator[tuple[int, int]]:
    """Iterate over all subchains, the short ones first."""
    for size in range(1, length + 1):
        for i in range(length - size + 1):
            yield i, i + size


def _follow(
    choose: Callable[[int, int, int], Choice],
    slots_of: Callable[[int], int],
    i: int,
    j: int,
    room: int,
) -> Parts:
    """Make the choices for a subchain one after the other."""
    parts: list[Keep | Recompute] = []
    while i < j:
        choice = choose(i, j, room)
        e = choice.rest[0]
        inner = () if choice.keep else _follow(choose, slots_of, i, e, room)
        parts.append(choice.keep or Recompute(i, e, inner))
        room -= slots_of(choice.held)
        i = e
    return tuple(parts)


# --- The least bytes ----------------------------------------------------------------


def _smallest(numbers: Stages) -> Parts:
    """Return the parts with the least peak, of these some with little work."""
    length, choices = len(numbers), _choices(numbers)
    best = {(i, i): (0, 0.0) for i in range(length + 1)}
    chosen: dict[tuple[int, int], Choice] = {}

    def worth(choice: Choice) -> tuple[int, float]:
        (rest, work), (inner, again) = best[choice.rest], best[choice.inner]
        peak = max(choice.need, choice.held + rest, inner)
        return peak, choice.work + work + again

    for i, j in _subchains(length):
        chosen[i, j] = min(choices(i, j), key=worth)
        best[i, j] = worth(chosen[i, j])
    return _follow(lambda i, j, _: chosen[i, j], lambda _: 0, 0, length, 0)


# --- The least work -----------------------------------------------------------------


def _solve(numbers: Stages, room: int, slots: int) -> Iterator[Parts]:
    """Solve for some more slots than there are, then for fewer, down to the right ones.

    The last parts fit in the room. Earlier ones have less work, and may fit too.
    """
    length = len(numbers)
    unit, spare = _unit(numbers, room, slots)
    table = _Table(numbers, unit, room // unit + spare)
    for most in range(room // unit + spare, room // unit - 1, -1):
        if table.rows[0, length][most] < math.inf:
            yield _follow(table.choose, table.slots_of, 0, length, most)


def _unit(numbers: Stages, room: int, slots: int) -> tuple[int, int]:
    """Return the bytes of a slot, and how many slots the rounding may waste."""
    length = len(numbers)
    sizes = [f(k) for k in range(length + 1) for f in (numbers.carry, numbers.gradient)]
    for stage in numbers.stages:
        sizes.append(stage.extra_bytes)
        for option in stage.options:
            sizes += option.saved_bytes, option.forward_extra, option.backward_extra
    divisor = math.gcd(*sizes)
    if divisor * slots >= room:
        return divisor, 0
    return -(-room // slots), length + 1


class _Table:
    """The least work of each subchain, for each number of slots."""

    def __init__(self, numbers: Stages, unit: int, slots: int) -> None:
        self._unit, self._slots = unit, slots
        self._choices = _choices(numbers)
        length = len(numbers)
        empty = array("d", [0.0]) * (slots + 1)
        self.rows: dict[tuple[int, int], Sequence[float]]
        self.rows = {(i, i): empty for i in range(length + 1)}
        for i, j in _subchains(length):
            self.rows[i, j] = self._row(i, j)

    def slots_of(self, size: int) -> int:
        """Return how many slots so many bytes take."""
        return -(-size // self._unit)

    def choose(self, i: int, j: int, room: int) -> Choice:
        """Return the choice with the least work for a subchain."""

        def work(choice: Choice) -> float:
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
