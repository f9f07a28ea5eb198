"""Chooses what a step saves, so that its peak fits and least is recomputed.

Called by `planning`, on the record of a whole step, and by `segments` on parts of it.

    greedy     drop what frees most for its work, until the peak fits
    solved     a mixed-integer program, whose limits a walk corrects
    improved   save more, and exchange what is saved, while the peak fits

Invariant: a walk has found that the peak fits, or `None` is returned.
Rejected: the program alone. Just-in-time recomputes hold memory that depends on what
else is saved, which is no linear function of it.
Rejected: a time limit. Two processes would choose differently.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat._fit.options import has_solver
from remat._fit.walk import Walked, Walker


Chosen = frozenset[int]


def chosen_for(walker: Walker, budget: int, tries: int = 2000) -> Chosen | None:
    """Return the operations whose results are saved; None if nothing was found.

    Args:
        walker: over the record.
        budget: the most bytes that there may be.
        tries: how many walks may be spent on making it better.
    """
    every = frozenset(walker.choices)
    if walker(every).peak <= budget:
        return every
    found = [greedy(walker, budget)]
    if has_solver():
        found.append(solved(walker, budget))
    fits = [one for one in found if one is not None]
    if not fits:
        return None
    best = min(fits, key=walker.seconds)
    return improved(walker, best, budget, tries)


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


# --- Without a solver --------------------------------------------------------------


def greedy(walker: Walker, budget: int) -> Chosen | None:
    """Drop what frees most bytes at the peak for its work, until the peak fits."""
    chosen, walked = {*walker.choices}, walker(walker.choices)
    lowest: Chosen | None = None
    while walked.peak > budget:
        found = [*_idle_at(walker, chosen, walked.at)]
        if not found:
            return lowest
        before = walked.seconds
        _, dropped = min(
            ((walker.seconds(chosen - {i}) - before) / size, i) for i, size in found
        )
        chosen.discard(dropped)
        walked = walker(chosen)
    return frozenset(chosen)


def _idle_at(
    walker: Walker, chosen: Iterable[int], at: int
) -> Iterable[tuple[int, int]]:
    """Yield what is saved and not used at an operation, and its bytes."""
    sizes = walker.record.sizes
    for i in chosen:
        size = sum(sizes[n] for n in walker.choices[i] if walker.is_idle(n, at))
        if size:
            yield i, size


# --- A mixed-integer program -------------------------------------------------------


@dataclass
class Program:
    """Which operations to save: least work, with a limit at some operations.

    The variables are whether an operation is saved, whether a storage is needed,
    whether an operation runs again, and whether one of several results that are saved
    is kept, as the backward needs it.

    Attributes:
        walker: over the record.
        limits: the bytes that may be saved and idle at an operation.
    """

    walker: Walker
    limits: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        walker = self.walker
        self.choices = sorted(walker.choices)
        self.numbers = sorted(walker.makers)
        self.runs = sorted({i for each in walker.makers.values() for i in each})
        count = len(self.choices)
        self._saved = {i: k for k, i in enumerate(self.choices)}
        self._needed = {n: count + k for k, n in enumerate(self.numbers)}
        count += len(self.numbers)
        self._again = {i: count + k for k, i in enumerate(self.runs)}
        count += len(self.runs)
        self._kept = {n: count + k for k, n in enumerate(self._perhaps_kept())}
        self._count = count + len(self._kept)
        self._rows = [*self._closure()]

    def _perhaps_kept(self) -> Iterable[int]:
        walker = self.walker
        several = (each for each in walker.choices.values() if len(each) > 1)
        return (n for each in several for n in each if n not in walker.targets)

    def _closure(self) -> Iterable[tuple[float, list[tuple[int, float]]]]:
        """Yield rows, and the least value that each may have."""
        walker = self.walker
        for n, makers in walker.makers.items():
            born = walker.record.born[n]
            saved = [(self._saved[born], 1.0)] if n in self._stored(born) else []
            for i in makers:
                yield 0, [(self._again[i], 1.0), *saved, (self._needed[n], -1.0)]
        for i in self.runs:
            for n in walker.touched(i):
                yield 0, [(self._needed[n], 1.0), (self._again[i], -1.0)]
        for n, kept in self._kept.items():
            saved = self._saved[walker.record.born[n]]
            yield -1, [(kept, 1.0), (saved, -1.0), (self._needed[n], -1.0)]

    def _stored(self, operation: int) -> Sequence[int]:
        return self.walker.choices.get(operation, ())

    def idle(self, at: int) -> dict[int, int]:
        """Return the bytes that each choice keeps idle at an operation."""
        return dict(_idle_at(self.walker, self.choices, at))

    def _idle_row(self, at: int) -> Iterable[tuple[int, float]]:
        walker = self.walker
        for n, born in ((n, i) for i in self.choices for n in walker.choices[i]):
            if walker.is_idle(n, at):
                column = self._kept.get(n, self._saved[born])
                yield column, -walker.record.sizes[n] / _UNIT

    def solve(self, nodes: int = 200, gap: float = 1e-3) -> Chosen | None:
        """Return what is saved at least work; None if there is nothing.

        Args:
            nodes: of the search tree, at most.
            gap: to the optimum at which the search may end.
        """
        import numpy as np
        from scipy import optimize, sparse

        walker = self.walker
        least = [value for value, _ in self._rows]
        rows = [row for _, row in self._rows]
        for at, limit in self.limits.items():
            rows.append([*self._idle_row(at)])
            least.append(-limit / _UNIT)
        entries = [(r, k, x) for r, row in enumerate(rows) for k, x in row]
        at, columns, values = zip(*entries, strict=True)
        matrix = sparse.csr_array(
            (values, (at, columns)), shape=(len(rows), self._count)
        )
        low = np.zeros(self._count)
        for n in walker.targets:
            low[self._needed[n]] = 1
        costs = np.zeros(self._count)
        operations, sizes = walker.record.operations, walker.record.sizes
        for i in self.runs:
            costs[self._again[i]] = operations[i].seconds * 1e6
        for i in self.choices:
            costs[self._saved[i]] = 1e-7 * sum(sizes[n] for n in walker.choices[i])
        whole = np.zeros(self._count)
        whole[: len(self.choices)] = 1
        found: Any = optimize.milp(
            costs,
            integrality=whole,
            bounds=optimize.Bounds(low, 1),
            constraints=optimize.LinearConstraint(matrix, lb=least),
            options={"node_limit": nodes, "mip_rel_gap": gap},
        )
        self.bound = found.mip_dual_bound
        if found.x is None:
            return None
        return frozenset(i for i, k in self._saved.items() if found.x[k] > 0.5)


_UNIT = 1e4  # bytes, so that numbers are of one order


def solved(walker: Walker, budget: int, rounds: int = 30) -> Chosen | None:
    """Solve the program, until a walk finds that the peak fits.

    A limit that a walk finds exceeded becomes lower by what recomputes held there.
    """
    program = Program(walker)
    for _ in range(rounds):
        chosen = program.solve()
        if chosen is None:
            return None
        walked = walker(chosen)
        if walked.peak <= budget:
            return chosen
        _correct(program, chosen, walked, budget)
    return None


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


# --- Better ------------------------------------------------------------------------


def improved(walker: Walker, chosen: Chosen, budget: int, tries: int) -> Chosen:
    """Save more, and exchange what is saved, while the peak fits and work shrinks."""
    best, work = chosen, walker.seconds(chosen)
    while tries > 0:
        found = None
        for candidate, seconds in _neighbours(walker, best, work):
            tries -= 1
            if walker(candidate).peak <= budget:
                found = candidate, seconds
                break
            if tries <= 0:
                break
        if found is None:
            return best
        best, work = found
    return best


def _neighbours(
    walker: Walker, chosen: Chosen, work: float
) -> Iterable[tuple[Chosen, float]]:
    """Yield sets that differ in one or two choices and have less work."""
    others = sorted(set(walker.choices) - chosen)
    added = []
    for j in others:
        more = chosen | {j}
        seconds = walker.seconds(more)
        if seconds < work * _LESS:
            added.append((seconds, j, more))
    added.sort()
    yield from ((more, seconds) for seconds, _, more in added)
    for seconds, j, more in added:
        for i in sorted(chosen):
            less = more - {i}
            exchanged = walker.seconds(less)
            if exchanged < work * _LESS:
                yield less, exchanged


_LESS = 1 - 1e-9
