"""Chooses what a step saves, so that its peak fits and least is recomputed.

Called by `planning`.

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

from collections.abc import Iterator

from remat._fit.options import has_solver
from remat._fit.program import Chosen, Program, idle_at
from remat._fit.walk import Walked, Walker


def chosen_for(walker: Walker, budget: int) -> Chosen | None:
    """Return the operations whose results are saved; None if nothing was found.

    Args:
        walker: over the record.
        budget: the most bytes that there may be.
    """
    every = frozenset(walker.choices)
    if walker(every).peak <= budget:
        return every
    found = solved(walker, budget) if has_solver() else None
    if found is None:
        found = greedy(walker, budget)
    return None if found is None else improved(walker, found, budget)


def lowest(walker: Walker) -> Chosen:
    """Return a choice of nearly the lowest peak that can be found, by bisection."""
    extremes: list[Chosen] = [frozenset(walker.choices), frozenset()]
    best = min(extremes, key=lambda chosen: walker(chosen).peak)
    low, high = max(walker.base), walker(best).peak
    while high - low > high * _NEAR:
        middle = (low + high) // 2
        found = solved(walker, middle) if has_solver() else greedy(walker, middle)
        if found is None:
            low = middle
        else:
            best, high = found, walker(found).peak
    return best


_NEAR = 2e-3


def least_of(walker: Walker, budget: int) -> Iterator[Chosen]:
    """Yield choices of a low peak, where none was found for a budget."""
    chosen = lowest(walker)
    if walker(chosen).peak <= budget:
        yield improved(walker, chosen, budget)
    yield chosen


# --- Without a solver --------------------------------------------------------------


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


# --- With a solver ---------------------------------------------------------------


def solved(walker: Walker, budget: int, rounds: int = 30) -> Chosen | None:
    """Solve the program, until a walk finds that the peak fits.

    A limit that a walk finds exceeded becomes lower by what recomputes held there. That
    may be too low, as other choices recompute other things.
    """
    program, last = Program(walker), None
    for _ in range(rounds):
        chosen = program.solve()
        if chosen is None:
            break
        last, walked = chosen, walker(chosen)
        if walked.peak <= budget:
            return chosen
        _correct(program, chosen, walked, budget)
    return None if last is None else repaired(walker, last, budget)


_AT_ONCE = 6  # limits that are corrected in one round


def _correct(program: Program, chosen: Chosen, walked: Walked, budget: int) -> None:
    over = [t for t, nbytes in enumerate(walked.bytes) if nbytes > budget]
    over.sort(key=lambda t: -walked.bytes[t])
    walker, sizes = program.walker, program.walker.record.sizes
    kept = walker.storages(chosen) & walked.needed
    seen: set[frozenset[int]] = set()
    for t in over:
        idle = program.idle(t)
        kind = frozenset(idle)
        if kind in seen:
            continue
        seen.add(kind)
        held = walked.bytes[t] - sum(sizes[n] for n in kept if walker.is_idle(n, t))
        limit = budget - held
        program.limits[t] = min(program.limits.get(t, limit), limit)
        if len(seen) == _AT_ONCE:
            return


def repaired(walker: Walker, chosen: Chosen, budget: int) -> Chosen | None:
    """Change single choices while less is over the budget; None if that does not do."""
    best, over = chosen, _over(walker(chosen), budget)
    tries = iter(range(_STEPS // len(walker.record.operations)))
    while over:
        for i in sorted(walker.choices):
            if next(tries, None) is None:
                return None
            less = _over(walker(best ^ {i}), budget)
            if less < over:
                best, over = best ^ {i}, less
                break
        else:
            return None
    return best


def _over(walked: Walked, budget: int) -> int:
    """Return the bytes over a budget, of all operations together."""
    return sum(nbytes - budget for nbytes in walked.bytes if nbytes > budget)


# --- Better ------------------------------------------------------------------------


def improved(walker: Walker, chosen: Chosen, budget: int) -> Chosen:
    """Save more, and exchange what is saved, while the peak fits and work shrinks."""
    best, work = chosen, walker.seconds(chosen)
    tries = iter(range(_STEPS // len(walker.record.operations)))
    while True:
        for candidate in _neighbours(walker, best):
            if next(tries, None) is None:
                return best
            seconds = walker.seconds(candidate)
            if seconds < work * _LESS and walker(candidate).peak <= budget:
                best, work = candidate, seconds
                break
        else:
            return best


_STEPS = 100_000  # operations that are walked over: less than a second
_LESS = 1 - 1e-9


def _neighbours(walker: Walker, chosen: Chosen) -> Iterator[Chosen]:
    """Yield choices that save one operation more, then those that exchange one."""
    runs = walker.closure(walker.storages(chosen))[1]
    operations = walker.record.operations
    others = sorted(runs.intersection(walker.choices))
    others.sort(key=lambda i: -operations[i].seconds)
    yield from (chosen | {i} for i in others)
    yield from ((chosen | {i}) - {k} for i in others for k in sorted(chosen))
