"""Searches among choices for a step, by walks alone.

Invariant: a search ends after so many operations that are walked over, not after some
time, so that it ends alike everywhere.
Rejected: to search alone. From a choice that a program found, a few steps are left.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from remat._fit.walk import Walked, Walker


Chosen = frozenset[int]


def idle_at(
    walker: Walker, chosen: Iterable[int], at: int
) -> Iterator[tuple[int, int]]:
    """Yield what is saved and not used at an operation, and its bytes."""
    sizes = walker.record.sizes
    for i in chosen:
        size = sum(sizes[n] for n in walker.choices[i] if walker.is_idle(n, at))
        if size:
            yield i, size


def greedy(walker: Walker, budget: int) -> Chosen | None:
    """Drop what frees most bytes at the peak for its work, until the peak fits."""
    chosen = {*walker.choices}
    walked = walker(chosen)
    while walked.peak > budget:
        saved = walker.storages(chosen)
        found = [
            (walker.more(i, saved, walked) / size, i, size)
            for i, size in idle_at(walker, chosen, walked.at)
        ]
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


def lowest_by_greed(walker: Walker) -> Chosen:
    """Return a choice of a low peak, by bisection."""
    best = frozenset(walker.choices)
    low, high = max(walker.base), walker(best).peak
    while high - low > high * _CLOSE:
        middle = (low + high) // 2
        found = greedy(walker, middle)
        if found is None:
            low = middle
        else:
            best, high = found, walker(found).peak
    return best


_CLOSE = 2e-3


# --- From a choice to a better one ---


def repaired(walker: Walker, chosen: Chosen, budget: int) -> Chosen | None:
    """Change single choices while less is over the budget; None if that does not do."""

    def over(candidate: Chosen, _: int | None = None) -> int:
        return _over(walker(candidate), budget)

    found = _descended(walker, chosen, _flipped, over, _REPAIRS)
    return None if over(found) else found


def _over(walked: Walked, budget: int) -> int:
    """Return the bytes over a budget, of all operations together."""
    return sum(nbytes - budget for nbytes in walked.bytes if nbytes > budget)


# --- Better ---


def improved(walker: Walker, chosen: Chosen, budget: int) -> Chosen:
    """Save more, and exchange what is saved, while the peak fits and work shrinks.

    At the same work a lower peak is better: it leaves room for what was not planned.
    """

    def score(candidate: Chosen, least: Any = None) -> tuple[float, float]:
        work = round(walker.seconds(candidate), _DIGITS)
        if least is not None and work > least[0]:
            return work, math.inf
        peak = walker(candidate).peak
        return (work, peak) if peak <= budget else (math.inf, math.inf)

    return _descended(walker, chosen, _neighbours, score, _STEPS)


def lowered(walker: Walker, chosen: Chosen) -> Chosen:
    """Change and exchange what is saved while the peak becomes lower."""

    def candidates(walker: Walker, best: Chosen) -> Iterator[Chosen]:
        yield from _flipped(walker, best)
        yield from _neighbours(walker, best)

    def peak(candidate: Chosen, _: int | None = None) -> int:
        return walker(candidate).peak

    return _descended(walker, chosen, candidates, peak, _STEPS)


def lowest_of_a_kind(walker: Walker) -> Chosen:
    """Return a choice of a low peak, from those that save all results of one kind.

    Layers are alike. What is best saved of them all is often one of their results.
    """
    kinds: dict[Any, set[int]] = {}
    for i, made in walker.choices.items():
        size = sum(walker.record.sizes[n] for n in made)
        kinds.setdefault((walker.record.operations[i].name, size), set()).add(i)
    starts = [frozenset(kind) for kind in kinds.values() if len(kind) > 2]
    starts.sort(key=lambda chosen: walker(chosen).peak)
    found = [_pressed(walker, chosen) for chosen in starts[:_STARTS]]
    best = min(found, key=lambda each: walker(each).peak, default=frozenset())
    best = lowered(walker, best)
    return improved(walker, best, walker(best).peak)


_STARTS = 3


def _pressed(walker: Walker, chosen: Chosen) -> Chosen:
    """Change single choices while the peak becomes lower, or what is near it."""
    found: Chosen | None = chosen
    while found is not None:
        chosen, found = found, repaired(walker, found, walker(found).peak - 1)
    return chosen


def spare(walker: Walker, chosen: Chosen) -> Chosen:
    """Return what is saved and need not be, if more is recomputed than was planned.

    Without it the peak is lower, even if what is recomputed takes twice its bytes.
    """

    def peak(candidate: Chosen) -> int:
        return walker(candidate, times=2).peak

    tries = iter(range(_STEPS // len(walker.record.operations)))
    left, least = chosen, peak(chosen)
    for i in sorted(chosen):
        if next(tries, None) is not None and (found := peak(left - {i})) <= least:
            left, least = left - {i}, found
    for i in sorted(chosen - left):
        if next(tries, None) is None or peak(left | {i}) <= least:
            left |= {i}
    return chosen - left


_STEPS = 100_000  # operations that are walked over: less than a second
_REPAIRS = 15_000  # the same, for each search that may fail
_DIGITS = 12  # of seconds


def _descended(
    walker: Walker,
    best: Chosen,
    neighbours: Callable[[Walker, Chosen], Iterator[Chosen]],
    score: Callable[..., Any],
    steps: int,
) -> Chosen:
    """Go on to the first better neighbour, until there is none."""
    least = score(best)
    tries = iter(range(steps // len(walker.record.operations)))
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


def _flipped(walker: Walker, chosen: Chosen) -> Iterator[Chosen]:
    """Yield choices that save one operation more, or one fewer."""
    return (chosen ^ {i} for i in sorted(walker.choices))


def _neighbours(walker: Walker, chosen: Chosen) -> Iterator[Chosen]:
    """Yield choices that save one operation more, then those that exchange one."""
    others = walker.left_out(chosen)
    yield from (chosen | {i} for i in others)
    yield from ((chosen | {i}) - {k} for i in others for k in sorted(chosen))
