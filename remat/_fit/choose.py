"""Chooses what a step saves, so that its peak fits and least is recomputed.

A mixed-integer program chooses, whose limits a walk corrects; without scipy, what frees
most for its work is dropped until the peak fits. Then single choices are changed and
exchanged, while that makes it better.

Invariant: a walk has found that the peak fits, or `None` is returned. A search ends
after so many operations that are walked over, so that it ends alike everywhere.
Rejected: the program alone. Just-in-time recomputes hold memory that depends on what
else is saved, which is no linear function of it.
Rejected: to cut the record into segments and solve each. The program for 96 blocks is
solved in a quarter of a second: only the limits that a walk found exceeded are in it.
Rejected: a time limit. Two processes would choose differently.
"""

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from remat._fit.walk import Walked, Walker
from remat._partial.solver import Choices, Prices, SavingProgram


Chosen = frozenset[int]


def has_solver() -> bool:
    """Say whether scipy is installed: programs, and policies with a budget, need it."""
    return importlib.util.find_spec("scipy") is not None


def chosen_for(walker: Walker, budget: int) -> Chosen | None:
    """Return the operations whose results are saved; None if nothing was found.

    More bytes never cost more work, but for what a solver rounds.
    """
    if budget not in walker.known:
        every = frozenset(walker.choices)
        if walker(every).peak <= budget:
            return every
        choose = _best_solved if _is_solved(walker) else greedy
        found, steps = choose(walker, budget), _STEPS
        if found is None and walker(least_for(walker)).peak <= budget:
            found, steps = least_for(walker), _STEPS_FROM_LEAST
        if found is not None:
            found = improved(walker, found, budget, steps)
        walker.known[budget] = found
    return walker.known[budget]


def _best_solved(walker: Walker, budget: int) -> Chosen | None:
    """Return the best choice that a program finds for a budget, or for less.

    Where recomputes hold much, what is found for more bytes may be worse, or nothing.
    So the program is also solved on rungs below, which are the same whatever is asked
    for, as long as less work may be found there.
    """
    best, work = None, math.inf
    low, high = max(walker.base), walker(walker.choices).peak
    rungs = (low + (high - low) * k // _RUNGS for k in range(_RUNGS, -1, -1))
    at = _first_limits(walker)
    for nbytes in (budget, *(n for n in rungs if n < budget)):
        solving = _Solving(walker, nbytes, at)
        if work <= solving.bound * _GAP:  # no choice for so few bytes is better
            break
        found = solving.choice()
        at |= solving.limits.keys()
        if found is not None and walker.seconds(found) < work * _LESS:
            best, work = found, walker.seconds(found)
    return best


def least_for(walker: Walker) -> Chosen:
    """Return the choice of the lowest peak that is found.

    From what bisection finds, from results of one kind, and from saving nothing.
    """
    find = solved if _is_solved(walker) else greedy
    if _LEAST not in walker.known:
        best = frozenset(walker.choices)
        low, high = max(walker.base), walker(best).peak
        while high - low > high * _CLOSE:
            middle = (low + high) // 2
            found = find(walker, middle)
            if found is None:
                low = middle
            else:
                best, high = found, walker(found).peak
        starts = dict.fromkeys((best, _of_a_kind(walker), frozenset()))
        each = [lowered(walker, start) for start in starts]
        walker.known[_LEAST] = min(each, key=lambda chosen: walker(chosen).peak)
    return walker.known[_LEAST]


def quickly_for(walker: Walker, budget: int) -> Chosen:
    """Return some choice for a budget, or one of a low peak."""
    chosen = solved(walker, budget, **_SOON) if _is_solved(walker) else None
    if chosen is None:
        chosen = chosen_for(walker, budget)
    return least_for(walker) if chosen is None else chosen


def _is_solved(walker: Walker) -> bool:
    # scipy takes no program without variables.
    return has_solver() and walker.is_solved and bool(walker.choices)


_LEAST, _PROGRAM = "least", "program"
_RUNGS = 64
_CLOSE = 2e-3
_GAP = 1.0005
_LESS = 1 - 1e-9
_SOON = {"mip_rel_gap": 1e-2}  # near enough to the optimum

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


def solved(walker: Walker, budget: int, **ends: float) -> Chosen | None:
    """Solve the program, until a walk finds that the peak fits."""
    return _Solving(walker, budget, _first_limits(walker), **ends).choice()


def _first_limits(walker: Walker) -> set[int]:
    """Return operations whose limits may be exceeded. Walks find others."""
    return {*itertools.islice(_apart(walker, walker.base), _LIMITS)}


class _Solving:
    """The program of a walker for one budget.

    Its limits are what no choice may exceed, at first. One that a walk finds exceeded
    becomes lower by what recomputes held there. That may be too low, as other choices
    recompute other things.

    Attributes:
        limits: the bytes that may be saved and idle at operations.
        bound: the least seconds there may be; infinity if nothing fits.
    """

    def __init__(
        self, walker: Walker, budget: int, at: Iterable[int], **ends: float
    ) -> None:
        self._walker, self._budget, self._ends = walker, budget, _ENDS | ends
        self.limits: dict[int, float] = {t: budget - walker.base[t] for t in at}
        self._first, self.bound = None, math.inf
        if max(walker.base) <= budget:
            self._first = self._solve()
            self.bound = self._program.bound / 1e6

    @property
    def _program(self) -> SavingProgram:
        known = self._walker.known
        if _PROGRAM not in known:
            known[_PROGRAM] = program_of(self._walker)
        return known[_PROGRAM]

    def _solve(self) -> Chosen | None:
        self._program.limits = self.limits
        return self._program.solve(**self._ends)

    def choice(self) -> Chosen | None:
        """Return a choice that fits; None if none was found."""
        chosen, least, since = self._first, math.inf, 0
        last = chosen
        for _ in range(_ROUNDS):
            if chosen is None or since > _IN_VAIN:
                break
            last, walked = chosen, self._walker(chosen)
            if walked.peak <= self._budget:
                return chosen
            since = 0 if walked.peak < least else since + 1
            least = min(least, walked.peak)
            self._correct(chosen, walked)
            chosen = self._solve()
        return None if last is None else repaired(self._walker, last, self._budget)

    def _correct(self, chosen: Chosen, walked: Walked) -> None:
        walker, limits = self._walker, self.limits
        sizes = walker.record.sizes
        saved, needed, _ = walker.closure(chosen)
        kept = (saved - walker.always) & needed
        over = _apart(walker, walked.bytes, self._budget)
        for t in itertools.islice(over, _AT_ONCE):
            idle = sum(sizes[n] for n in kept if walker.is_idle(n, t))
            limit = self._budget - (walked.bytes[t] - idle)
            limits[t] = min(limits.get(t, limit), limit)


_LIMITS = 12
_ROUNDS = 30
_IN_VAIN = 7  # rounds that are no nearer
_AT_ONCE = 6  # limits that are corrected in one round


def _apart(walker: Walker, nbytes: Sequence[int], least: int = 0) -> Iterator[int]:
    """Yield operations with most bytes first, of which other choices are idle."""
    over = [t for t, each in enumerate(nbytes) if each > least]
    over.sort(key=lambda t: -nbytes[t])
    seen: set[frozenset[int]] = set()
    for t in over:
        kind = frozenset(i for i, _ in _idle_at(walker, walker.choices, t))
        if kind not in seen:
            seen.add(kind)
            yield t


def _idle_at(
    walker: Walker, chosen: Iterable[int], at: int
) -> Iterator[tuple[int, int]]:
    """Yield what is saved and not used at an operation, and its bytes."""
    sizes = walker.record.sizes
    for i in chosen:
        size = sum(sizes[n] for n in walker.choices[i] if walker.is_idle(n, at))
        if size:
            yield i, size


# --- By walks alone ---

_STEPS = 100_000  # operations that are walked over: less than a second
_STEPS_FROM_LEAST = 5 * _STEPS  # where the program finds nothing
_REPAIRS = 15_000  # the same, for each search that may fail
_DIGITS = 12  # of seconds


def greedy(walker: Walker, budget: int) -> Chosen | None:
    """Drop what frees most bytes at the peak for its work, until the peak fits."""
    chosen = {*walker.choices}
    walked = walker(chosen)
    while walked.peak > budget:
        idle, again = _idle_at(walker, chosen, walked.at), walker.closure(chosen)
        found = [(walker.more(i, again) / size, i, size) for i, size in idle]
        if not found:
            return None
        found.sort()
        freed = 0
        for _, i, size in found:
            chosen.discard(i)
            freed += size
            if freed >= walked.peak - budget:
                break
        walked = walker(chosen)
    return frozenset(chosen)


def improved(
    walker: Walker, chosen: Chosen, budget: int, steps: int = _STEPS
) -> Chosen:
    """Save more, and exchange what is saved, while the peak fits and work shrinks.

    At the same work a lower peak is better: it leaves room for what was not planned.
    """

    def score(candidate: Chosen, least: Any = None) -> tuple[float, float]:
        work = round(walker.seconds(candidate), _DIGITS)
        if least is not None and work > least[0]:
            return work, math.inf
        peak = walker(candidate).peak
        return (work, peak) if peak <= budget else (math.inf, math.inf)

    return _descended(walker, chosen, _neighbours, score, steps)


def repaired(walker: Walker, chosen: Chosen, budget: int) -> Chosen | None:
    """Change single choices while less is over the budget; None if that does not do."""

    def over(candidate: Chosen, _: int | None = None) -> int:
        walked = walker(candidate).bytes
        return sum(nbytes - budget for nbytes in walked if nbytes > budget)

    found = _descended(walker, chosen, _flipped, over, _REPAIRS)
    return None if over(found) else found


def lowered(walker: Walker, chosen: Chosen) -> Chosen:
    """Change and exchange what is saved while the peak becomes lower."""

    def candidates(walker: Walker, best: Chosen) -> Iterator[Chosen]:
        yield from _flipped(walker, best)
        yield from _neighbours(walker, best)

    def peak(candidate: Chosen, _: int | None = None) -> int:
        return walker(candidate).peak

    return _descended(walker, chosen, candidates, peak)


def _of_a_kind(walker: Walker) -> Chosen:
    """Return a choice of a low peak, from those that save all results of one kind.

    Layers are alike. What is best saved of them all is often one of their results.
    """
    kinds: dict[Any, set[int]] = {}
    for i, made in walker.choices.items():
        size = sum(walker.record.sizes[n] for n in made)
        kinds.setdefault((walker.record.operations[i].name, size), set()).add(i)
    starts = [frozenset(kind) for kind in kinds.values() if len(kind) > 2]
    starts.sort(key=lambda chosen: walker(chosen).peak)
    pressed = (_pressed(walker, chosen) for chosen in starts[:_STARTS])
    return min(pressed, key=lambda chosen: walker(chosen).peak, default=frozenset())


_STARTS = 3


def _pressed(walker: Walker, chosen: Chosen) -> Chosen:
    """Change single choices while the peak becomes lower, or what is near it."""
    found: Chosen | None = chosen
    while found is not None:
        chosen, found = found, repaired(walker, found, walker(found).peak - 1)
    return chosen


def _flipped(walker: Walker, chosen: Chosen) -> Iterator[Chosen]:
    """Yield choices that save one operation more, or one fewer."""
    return (chosen ^ {i} for i in sorted(walker.choices))


def _neighbours(walker: Walker, chosen: Chosen) -> Iterator[Chosen]:
    """Yield choices that save one operation more, then those that exchange one."""
    others = walker.left_out(chosen)
    yield from (chosen | {i} for i in others)
    yield from ((chosen | {i}) - {k} for i in others for k in sorted(chosen))


def _descended(
    walker: Walker,
    best: Chosen,
    neighbours: Callable[[Walker, Chosen], Iterator[Chosen]],
    score: Callable[..., Any],
    steps: int = _STEPS,
) -> Chosen:
    """Go on to the first better neighbour, until there is none."""
    least, tries = score(best), _tries(walker, steps)
    while True:
        for candidate in neighbours(walker, best):
            if next(tries, None) is None:
                return best
            found = score(candidate, least)
            if found < least:
                best, least = candidate, found
                break
        else:
            return best


def _tries(walker: Walker, steps: int = _STEPS) -> Iterator[int]:
    return iter(range(steps // len(walker.record.operations)))


def spare(walker: Walker, chosen: Chosen) -> Chosen:
    """Return what is saved and need not be, if more is recomputed than was planned.

    Without it the peak is lower, even if what is recomputed takes twice its bytes.
    """

    def peak(candidate: Chosen) -> int:
        return walker(candidate, times=2).peak

    left, least, tries = chosen, peak(chosen), _tries(walker)
    for i in sorted(chosen):
        if next(tries, None) is not None and (found := peak(left - {i})) <= least:
            left, least = left - {i}, found
    for i in sorted(chosen - left):
        if next(tries, None) is None or peak(left | {i}) <= least:
            left |= {i}
    return chosen - left
