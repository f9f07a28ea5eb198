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

import ctypes
import importlib
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from remat._fit.walk import Walked, Walker


Chosen = frozenset[int]


def has_solver() -> bool:
    """Say whether scipy is installed: programs, and policies with a budget, need it."""
    return importlib.util.find_spec("scipy") is not None


def chosen_for(walker: Walker, budget: int) -> Chosen | None:
    """Return the operations whose results are saved; None if nothing was found."""
    every = frozenset(walker.choices)
    if walker(every).peak <= budget:
        return every
    found = solved(walker, budget) if has_solver() else None
    if found is None:
        found = greedy(walker, budget)
    return None if found is None else improved(walker, found, budget)


def lowest(walker: Walker) -> Chosen:
    """Return a choice of nearly the lowest peak that can be found.

    A search that fails for some bytes may do for fewer. So after a bisection, less is
    asked for in steps, until nothing is found.
    """
    extremes: list[Chosen] = [frozenset(walker.choices), frozenset()]
    best = min(extremes, key=lambda chosen: walker(chosen).peak)
    low, high = max(walker.base), walker(best).peak
    while high - low > high * _NEAR:
        middle = (low + high) // 2
        found = _below(walker, middle)
        if found is None:
            low = middle
        else:
            best, high = found, walker(found).peak
    for less in _LOWER:
        found = (
            _below(walker, int(high * less)) if high * less > max(walker.base) else None
        )
        if found is not None:
            best, high = found, walker(found).peak
    return best


def _below(walker: Walker, budget: int) -> Chosen | None:
    found = solved(walker, budget) if has_solver() else None
    return greedy(walker, budget) if found is None else found


_LOWER = 0.99, 0.97, 0.94, 0.9
_NEAR = 2e-3


def least_of(walker: Walker, budget: int) -> Iterator[Chosen]:
    """Yield choices of a low peak, where none was found for a budget."""
    chosen = lowest(walker)
    if walker(chosen).peak <= budget:
        yield improved(walker, chosen, budget)
    yield chosen


# --- The program ---


def idle_at(
    walker: Walker, chosen: Iterable[int], at: int
) -> Iterator[tuple[int, int]]:
    """Yield what is saved and not used at an operation, and its bytes."""
    sizes = walker.record.sizes
    for i in chosen:
        size = sum(sizes[n] for n in walker.choices[i] if walker.is_idle(n, at))
        if size:
            yield i, size


class SavingProgram:
    """A mixed-integer program: what is saved at least work, with some limits.

    A limit counts what is saved alone. So it is a necessary condition, and the least
    work of the program is a lower bound. The variables are whether an operation is
    saved, whether a storage is needed, whether an operation runs again, and whether one
    of several results that are saved is kept, as the backward needs it.
    """

    def __init__(self, walker: Walker) -> None:
        self.walker = walker
        # The bytes that may be saved and idle at an operation.
        self.limits: dict[int, float] = {}
        # The least work that there may be, in microseconds, once it is solved.
        self.bound = 0.0
        several = [each for each in walker.choices.values() if len(each) > 1]
        runs = sorted({i for each in walker.makers.values() for i in each})
        columns = itertools.count()
        self._saved = {i: next(columns) for i in sorted(walker.choices)}
        self._needed = {n: next(columns) for n in sorted(walker.makers)}
        self._again = {i: next(columns) for i in runs}
        self._kept = {
            n: next(columns) for ns in several for n in ns if n not in walker.targets
        }
        self._count = next(columns)
        self._rows = [*self._closure()]

    def _closure(self) -> Iterable[tuple[float, list[tuple[int, float]]]]:
        """Yield rows, and the least value that each may have."""
        walker = self.walker
        for n, makers in walker.makers.items():
            born = walker.record.born[n]
            saved = (
                [(self._saved[born], 1.0)] if n in walker.choices.get(born, ()) else []
            )
            for i in makers:  # what is needed is saved, or made again
                yield 0, [(self._again[i], 1.0), *saved, (self._needed[n], -1.0)]
        for i, again in self._again.items():
            for n in walker.touched[i]:
                yield 0, [(self._needed[n], 1.0), (again, -1.0)]
        for n, kept in self._kept.items():
            saved_at = self._saved[walker.record.born[n]]
            yield -1, [(kept, 1.0), (saved_at, -1.0), (self._needed[n], -1.0)]

    def solve(self, nodes: int = 200, gap: float = 1e-3) -> Chosen | None:
        """Return what is saved at least work; None if there is nothing.

        The search ends after some nodes of its tree, or at a gap to the optimum.
        """
        optimize = importlib.import_module("scipy.optimize")
        walker, operations = self.walker, self.walker.record.operations
        sizes = walker.record.sizes
        # The microseconds of what runs again; of two choices the smaller.
        costs = [0.0] * self._count
        for i, column in self._again.items():
            costs[column] = operations[i].seconds * 1e6
        for i, column in self._saved.items():
            costs[column] = 1e-7 * sum(sizes[n] for n in walker.choices[i])
        # What the backward reads is needed.
        lowest = [0] * self._count
        for n in walker.targets:
            lowest[self._needed[n]] = 1
        whole = len(self._saved)  # those columns come first
        constraints = optimize.LinearConstraint(*self._constraints())
        with _without_lines_of_highs():
            found: Any = optimize.milp(
                costs,
                integrality=[1] * whole + [0] * (self._count - whole),
                bounds=optimize.Bounds(lowest, 1),
                constraints=constraints,
                options={"node_limit": nodes, "mip_rel_gap": gap},
            )
        self.bound = found.mip_dual_bound
        if found.x is None:
            return None
        return frozenset(i for i, k in self._saved.items() if found.x[k] > 0.5)

    def _constraints(self) -> tuple[Any, list[float]]:
        """Return a matrix, and the least value that each row may have."""
        sparse = importlib.import_module("scipy.sparse")
        walker = self.walker
        least = [value for value, _ in self._rows]
        rows = [row for _, row in self._rows]
        for at, limit in self.limits.items():
            rows.append([])
            least.append(-limit / _UNIT)
            for i, column in self._saved.items():
                for n in walker.choices[i]:
                    if walker.is_idle(n, at):
                        size = -walker.record.sizes[n] / _UNIT
                        rows[-1].append((self._kept.get(n, column), size))
        shape = len(rows), self._count
        entries = [(r, k, x) for r, row in enumerate(rows) for k, x in row]
        if not entries:  # nothing may be saved
            return sparse.csr_array(shape), least
        at, columns, values = zip(*entries, strict=True)
        return sparse.csr_array((values, (at, columns)), shape=shape), least


_UNIT = 1e4  # bytes, so that numbers are of one order


@contextmanager
def _without_lines_of_highs() -> Iterator[None]:
    """Leave out of stdout what HiGHS writes there in C, whatever its options are.

    What others write meanwhile comes a little later.
    """
    if os.name != "posix":
        yield
        return
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    with tempfile.TemporaryFile() as written:
        stdout = os.dup(1)
        os.dup2(written.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(stdout, 1)
            written.seek(0)
            for line in written.readlines():
                if not line.startswith(b"HighsMipSolver"):
                    os.write(1, line)
            os.close(stdout)


# --- Without a solver ---


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


# --- With a solver ---


def solved(walker: Walker, budget: int) -> Chosen | None:
    """Solve the program, until a walk finds that the peak fits.

    A limit that a walk finds exceeded becomes lower by what recomputes held there. That
    may be too low, as other choices recompute other things.
    """
    if not walker.choices:  # scipy takes no program without variables
        return None
    program, last = SavingProgram(walker), None
    for _ in range(_ROUNDS):
        chosen = program.solve()
        if chosen is None:
            break
        last, walked = chosen, walker(chosen)
        if walked.peak <= budget:
            return chosen
        _correct(program, chosen, walked, budget)
    return None if last is None else repaired(walker, last, budget)


_ROUNDS = 30
_AT_ONCE = 6  # limits that are corrected in one round


def _correct(
    program: SavingProgram, chosen: Chosen, walked: Walked, budget: int
) -> None:
    over = [t for t, nbytes in enumerate(walked.bytes) if nbytes > budget]
    over.sort(key=lambda t: -walked.bytes[t])
    walker, sizes = program.walker, program.walker.record.sizes
    kept = walker.storages(chosen) & walked.needed
    seen: set[frozenset[int]] = set()
    for t in over:
        kind = frozenset(i for i, _ in idle_at(walker, walker.choices, t))
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


# --- Better ---


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
