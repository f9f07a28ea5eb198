"""Chooses what a step saves, so that its peak fits and least is recomputed.

    greedy     drop what frees most for its work, until the peak fits
    solved     a mixed-integer program, whose limits a walk corrects
    improved   save more, and exchange what is saved, while the peak fits

Invariant: a walk has found that the peak fits, or `None` is returned.
Rejected: the program alone. Just-in-time recomputes hold memory that depends on what
else is saved, which is no linear function of it.
Rejected: to cut the record into segments and solve each. The program for 96 blocks is
solved in a quarter of a second: only the limits that a walk found exceeded are in it.
Rejected: a time limit. Two processes would choose differently.
"""

import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence

from remat._fit.search import (
    Chosen,
    greedy,
    idle_at,
    improved,
    lowered,
    lowest_by_greed,
    lowest_of_a_kind,
    repaired,
)
from remat._fit.walk import Walked, Walker
from remat._partial.solver import Choices, Prices, SavingProgram


def has_solver() -> bool:
    """Say whether scipy is installed: programs, and policies with a budget, need it."""
    return importlib.util.find_spec("scipy") is not None


def chosen_for(walker: Walker, budget: int) -> Chosen | None:
    """Return the operations whose results are saved; None if nothing was found.

    More bytes never cost more work, but for what a solver rounds.
    """
    every = frozenset(walker.choices)
    if walker(every).peak <= budget:
        return every
    if not (has_solver() and walker.is_solved):
        return _found(walker, greedy(walker, budget), budget)
    return _Ladder(walker).at_most(budget)


def least_for(walker: Walker, budget: int) -> Chosen:
    """Return the choice of the lowest peak, where none was found for a budget."""
    if has_solver() and walker.is_solved and walker.choices:
        chosen = _Ladder(walker).first_above(budget)
        if chosen is not None:
            return chosen
    extremes: list[Chosen] = [frozenset(walker.choices), frozenset()]
    found = lowest_by_greed(walker)
    return min((found, *extremes), key=lambda chosen: walker(chosen).peak)


def quickly_for(walker: Walker, budget: int) -> Chosen:
    """Return some choice for a budget, or one of a low peak."""
    chosen = solved(walker, budget, **_SOON) if has_solver() else None
    if chosen is None:
        chosen = chosen_for(walker, budget)
    return least_for(walker, budget) if chosen is None else chosen


def takes_less(walker: Walker, budget: int, seconds: float) -> bool:
    """Say whether a choice for a budget takes less than some seconds."""
    if has_solver() and walker.choices and _Ladder(walker).bound(budget) >= seconds:
        return False
    chosen = chosen_for(walker, budget)
    return chosen is not None and walker.seconds(chosen) < seconds


def _found(walker: Walker, chosen: Chosen | None, budget: int) -> Chosen | None:
    return None if chosen is None else improved(walker, chosen, budget)


_SOON = {"mip_rel_gap": 1e-2}  # near enough to the optimum

# --- The ladder ---


class _Ladder:
    """Solves for budgets that are the same whatever is asked for.

    The program is no bound where recomputes hold much, and what is found there for more
    bytes may be worse, or nothing. So it is also solved for rungs below, as long as
    less work may be found on them. What is chosen for fewer bytes is a choice for more.
    """

    def __init__(self, walker: Walker) -> None:
        self._walker = walker
        self._low = max(walker.base)
        self._high = walker(walker.choices).peak
        # Where limits may be exceeded; more of these are found by walks.
        self._at = {*itertools.islice(_apart(walker, walker.base), _LIMITS)}

    def at_most(self, budget: int) -> Chosen | None:
        """Return the best choice whose peak is at most a budget."""
        walker, last = self._walker, self._rung_at(budget)
        best, work = None, math.inf
        if not self._is_tight(last):
            best = self._solved(budget)
            work = math.inf if best is None else walker.seconds(best)
            if work <= self.bound(budget) * _GAP:
                return best
        for nbytes in map(self._nbytes, range(last, -1, -1)):
            if work <= self.bound(nbytes) * _GAP:  # no choice for so few is better
                break
            found = self._solved(nbytes)
            if found is None or walker(found).peak > budget:
                continue
            if walker.seconds(found) < work * _LESS:
                best, work = found, walker.seconds(found)
        if best is None:
            best = self.first_above(budget)
        return best if best is not None and walker(best).peak <= budget else None

    def first_above(self, budget: int) -> Chosen | None:
        """Return the first choice of the rungs above a budget, with less if it may."""
        found = self._lowered_above(budget)
        known = self._walker.known
        if _LEAST not in known:
            known[_LEAST] = lowest_of_a_kind(self._walker)
        each = [chosen for chosen in (found, known[_LEAST]) if chosen is not None]
        return min(each, key=lambda chosen: self._walker(chosen).peak)

    def _lowered_above(self, budget: int) -> Chosen | None:
        for k in range(self._rung_at(budget), _RUNGS + 1):
            nbytes = self._nbytes(k)
            if self.bound(nbytes) < math.inf:
                found = self._solved(nbytes)
                if found is not None:
                    return lowered(self._walker, found)
        return None

    def _rung_at(self, budget: int) -> int:
        """Return the first rung that is not below a budget."""
        share = (budget - self._low) / max(self._high - self._low, 1)
        return min(max(math.ceil(share * _RUNGS), 0), _RUNGS)

    def _nbytes(self, rung: int) -> int:
        return self._low + (self._high - self._low) * rung // _RUNGS

    def _solved(self, budget: int) -> Chosen | None:
        known = self._walker.known
        if budget not in known:
            program = program_of(self._walker)
            found = solved(self._walker, budget, program)
            self._at |= program.limits.keys()
            known[budget] = _found(self._walker, found, budget)
        return known[budget]

    def bound(self, budget: int) -> float:
        """Return the least seconds there may be; infinity if nothing fits."""
        base = self._walker.base
        if max(base) > budget:
            return math.inf
        program = program_of(self._walker)
        program.limits = {t: budget - base[t] for t in self._at}
        program.solve(**_ENDS)
        return program.bound / 1e6

    def _is_tight(self, rung: int) -> bool:
        """Say whether a rung is near those for which there is nothing."""
        return rung <= _NEAR or self.bound(self._nbytes(rung - _NEAR)) == math.inf


_LEAST = 0  # bytes, which nothing fits: stands for the least
_RUNGS = 64
_NEAR = 16  # rungs
_LIMITS = 12
_GAP = 1.0005
_LESS = 1 - 1e-9


# --- The program ---


def program_of(walker: Walker) -> SavingProgram:
    """Return the program of a walker, without limits; its work is in microseconds."""
    costs = [op.seconds * 1e6 for op in walker.record.operations]
    values = walker.makers, walker.touched, walker.targets, walker.is_idle
    choices = Choices(walker.choices, *values, walker.always)
    return SavingProgram(choices, Prices(costs, walker.record.sizes, _UNIT, tie=1e-7))


_UNIT = 1e4  # bytes
# The search ends at the root of its tree, or at a gap to the optimum. Of blocks that
# are alike many choices do the same work: hundreds of nodes found none that is better.
_ENDS = {"node_limit": 1, "mip_rel_gap": 1e-3}


def solved(
    walker: Walker,
    budget: int,
    program: SavingProgram | None = None,
    **ends: float,
) -> Chosen | None:
    """Solve the program, until a walk finds that the peak fits.

    A limit that a walk finds exceeded becomes lower by what recomputes held there. That
    may be too low, as other choices recompute other things.
    """
    if not walker.choices:  # scipy takes no program without variables
        return None
    program, last = program or program_of(walker), None
    least, since = math.inf, 0
    for _ in range(_ROUNDS):
        chosen = program.solve(**_ENDS | ends)
        if chosen is None:
            break
        last, walked = chosen, walker(chosen)
        if walked.peak <= budget:
            return chosen
        since = 0 if walked.peak < least else since + 1
        least = min(least, walked.peak)
        if since == _IN_VAIN:
            break
        _correct(program, walker, chosen, walked, budget)
    return None if last is None else repaired(walker, last, budget)


_ROUNDS = 30
_IN_VAIN = 8  # rounds that are no nearer
_AT_ONCE = 6  # limits that are corrected in one round


def _correct(
    program: SavingProgram, walker: Walker, chosen: Chosen, walked: Walked, budget: int
) -> None:
    sizes = walker.record.sizes
    kept = (walker.storages(chosen) - walker.always) & walked.needed
    for t in itertools.islice(_apart(walker, walked.bytes, budget), _AT_ONCE):
        held = walked.bytes[t] - sum(sizes[n] for n in kept if walker.is_idle(n, t))
        limit = budget - held
        program.limits[t] = min(program.limits.get(t, limit), limit)


def _apart(walker: Walker, nbytes: Sequence[int], least: int = 0) -> Iterator[int]:
    """Yield operations with most bytes first, of which other choices are idle."""
    over = [t for t, each in enumerate(nbytes) if each > least]
    over.sort(key=lambda t: -nbytes[t])
    seen: set[frozenset[int]] = set()
    for t in over:
        kind = frozenset(i for i, _ in idle_at(walker, walker.choices, t))
        if kind not in seen:
            seen.add(kind)
            yield t
