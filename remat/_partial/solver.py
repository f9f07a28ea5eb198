"""A mixed-integer program: what is saved, so that least runs again within limits.

With s_i for "operation i is saved", r_i for "it runs again", n_v for "value v is
needed", and k_v for "v is saved and needed":

    least      sum of cost_i r_i
    such that  n_v = 1                          for what the backward reads
               n_v <= r_i + sum of s_j          for each i that makes v, j that save it
               r_i <= n_v                       for each value v that i reads or makes
               k_v >= s_j + n_v - 1             for each j that saves v
               sum of bytes_v k_v <= limit_t    for the values that are idle at t

Only the s_i must be integers: for given s_i the least others are integers. A limit
counts what is saved alone. So it is a necessary condition, and the least work of the
program is a lower bound. `remat.fit` corrects limits by walks, and a budget of a call
has one, at the end of its forward.

Rejected: a knapsack over residuals, each with the cost of its own operation. What is
recomputed for one is there for others too, so costs do not add up: such choices cost a
quarter more work on random programs.
"""

import contextlib
import ctypes
import importlib
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from remat.policies._within import NO_SCIPY


class Choices(NamedTuple):
    """What there is to choose. Operations and values are numbers.

    Attributes:
        choices: the values that are saved if an operation is.
        makers: the operations that make or change each value that is not just there.
        touched: the values of `makers` that an operation reads, makes or changes.
        targets: the values that the backward reads.
        is_idle: whether a value counts in the limit of an operation, if it is saved;
            None if all do.
        always: the values that are saved in any case.
    """

    choices: Mapping[int, Sequence[int]]
    makers: Mapping[int, Sequence[int]]
    touched: Mapping[int, Sequence[int]]
    targets: Collection[int]
    is_idle: Callable[[int, int], bool] | None = None
    always: Collection[int] = ()


class Prices(NamedTuple):
    """What the operations and the values of a program cost.

    Attributes:
        costs: of running each operation again.
        sizes: the bytes of each value.
        unit: bytes, so that numbers are of one order.
        tie: what saving a byte costs, so that the smaller of two choices is taken.
        must: operations that are saved.
        forced: operations that run again unless they are saved.
    """

    costs: Sequence[float]
    sizes: Mapping[int, int] | Sequence[int]
    unit: float
    tie: float = 0.0
    must: Collection[int] = ()
    forced: Collection[int] = ()


class SavingProgram:
    """The program of some choices; its rows are sums, and the least that each may be.

    Attributes:
        limits: the bytes that may be saved and idle at an operation.
        bound: the least work that there may be, once it is solved; infinity if no
            choice fits.
    """

    def __init__(self, problem: Choices, prices: Prices) -> None:
        self._problem, self._prices = problem, prices
        self.limits: dict[int, float] = {}
        self.bound = 0.0
        runs = {i for each in problem.makers.values() for i in each}
        # The operations that save a value.
        self._saved_by: dict[int, list[int]] = {}
        for i, each in problem.choices.items():
            for n in each:
                self._saved_by.setdefault(n, []).append(i)
        columns = itertools.count()
        self._saved = {i: next(columns) for i in sorted(problem.choices)}
        self._needed = {n: next(columns) for n in sorted(problem.makers)}
        self._again = {i: next(columns) for i in sorted(runs.union(prices.forced))}
        # Where it is not just whether its operation is saved.
        several = [
            ns for i, ns in problem.choices.items() if len(ns) > 1 or i in prices.must
        ]
        self._kept = {
            n: next(columns)
            for n in dict.fromkeys(n for ns in several for n in ns)
            if n not in problem.targets or len(self._saved_by[n]) > 1
        }
        self._count = next(columns)
        self._rows = [*self._closure()]

    def _closure(self) -> Iterable[tuple[float, list[tuple[int, float]]]]:
        """Yield rows, and the least value that each may have."""
        problem = self._problem
        for n, makers in problem.makers.items():
            if n in problem.always:
                continue
            saved = [(self._saved[i], 1.0) for i in self._saved_by.get(n, ())]
            for i in makers:  # what is needed is saved, or made again
                yield 0, [(self._again[i], 1.0), *saved, (self._needed[n], -1.0)]
        for i, again in self._again.items():
            for n in problem.touched[i]:
                yield 0, [(self._needed[n], 1.0), (again, -1.0)]
        for n, kept in self._kept.items():
            # One sum, not a row for each: half of two choices is not half of the bytes.
            saved = [(self._saved[i], -1.0) for i in self._saved_by[n]]
            yield -1, [(kept, 1.0), *saved, (self._needed[n], -1.0)]
        for i in self._prices.forced:
            saved = [(self._saved[i], 1.0)] if i in self._saved else []
            yield 1, [(self._again[i], 1.0), *saved]

    def refuse(self, kept: Collection[int]) -> None:
        """Refuse to save all of some values: they take more than the limit.

        For a solver a millionth more than the limit is the limit.
        """
        columns = [self._kept.get(n, self._saved[self._saved_by[n][0]]) for n in kept]
        self._rows.append((1.0 - len(columns), [(k, -1.0) for k in columns]))

    def solve(self, **options: float) -> frozenset[int] | None:
        """Return what is saved at least work; None if nothing was found.

        Args:
            **options: of scipy's solver, which say when the search ends.
        """
        optimize, sparse = _scipy()
        if not self._count:  # there is nothing to choose
            self.bound = 0.0
            return frozenset()
        whole = len(self._saved)  # those columns come first
        lowest = [0] * self._count
        for column in (
            *(self._needed[n] for n in self._problem.targets),
            *map(self._saved.__getitem__, self._prices.must),
        ):
            lowest[column] = 1
        matrix, least = self._constraints(sparse)
        with without_lines_of_highs():
            found = optimize.milp(
                self._costs(),
                integrality=[1] * whole + [0] * (self._count - whole),
                bounds=optimize.Bounds(lowest, 1),
                constraints=optimize.LinearConstraint(matrix, least),
                options=options,
            )
        # None where the search found at once that nothing fits, or had no time.
        bound = 0.0 if found.status == _OUT_OF_TIME else math.inf
        if found.mip_dual_bound is not None and found.status != _INFEASIBLE:
            bound = found.mip_dual_bound
        self.bound = bound if bound > -math.inf else 0.0
        if found.x is None:
            return None
        return frozenset(i for i, k in self._saved.items() if found.x[k] > 0.5)

    def _costs(self) -> list[float]:
        costs, prices = [0.0] * self._count, self._prices
        for i, column in self._again.items():
            costs[column] = prices.costs[i]
        for i, column in self._saved.items():
            nbytes = sum(prices.sizes[n] for n in self._problem.choices[i])
            costs[column] = prices.tie * nbytes
        return costs

    def _constraints(self, sparse: Any) -> tuple[Any, list[float]]:
        """Return a matrix, and the least value that each row may have."""
        problem, unit, is_idle = self._problem, self._prices.unit, self._problem.is_idle
        least = [value for value, _ in self._rows]
        rows = [row for _, row in self._rows]
        for at, limit in self.limits.items():
            rows.append([])
            least.append(-limit / unit)
            seen: set[int] = set()
            for i, column in self._saved.items():
                for n in problem.choices[i]:
                    size = -self._prices.sizes[n] / unit
                    kept = self._kept.get(n)
                    if kept in seen or (is_idle and not is_idle(n, at)):
                        continue
                    seen |= set() if kept is None else {kept}
                    rows[-1].append((column if kept is None else kept, size))
        shape = len(rows), self._count
        entries = [(r, k, x) for r, row in enumerate(rows) for k, x in row]
        if not entries:  # nothing may be saved
            return sparse.csr_array(shape), least
        at, columns, values = zip(*entries, strict=True)
        return sparse.csr_array((values, (at, columns)), shape=shape), least


_OUT_OF_TIME, _INFEASIBLE = 1, 2  # statuses of scipy's


def _scipy() -> tuple[Any, Any]:
    """Return the modules of scipy that solve, or raise an ImportError."""
    try:
        optimize: Any = importlib.import_module("scipy.optimize")
        return optimize, importlib.import_module("scipy.sparse")
    except ModuleNotFoundError as error:
        raise ImportError(NO_SCIPY) from error


@contextlib.contextmanager
def without_lines_of_highs() -> Iterator[None]:
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
