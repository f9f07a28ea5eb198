"""A mixed-integer program: what a step saves, under limits at some operations.

Called by `choose`, which adds the limits that a walk finds exceeded.

Invariant: a limit is a necessary condition, where it counts what is saved alone. So the
least work of the program is a lower bound.
Rejected: a limit at each operation. A step of 96 blocks has thousands, of which a few
bind. Rejected: to end the search by time. Two processes would choose differently.
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat._fit.walk import Walker


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
        return dict(idle_at(self.walker, self.choices, at))

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
        optimize = importlib.import_module("scipy.optimize")
        whole = [1] * len(self.choices)
        found: Any = optimize.milp(
            self._costs(),
            integrality=whole + [0] * (self._count - len(whole)),
            bounds=optimize.Bounds(self._least_values(), 1),
            constraints=optimize.LinearConstraint(*self._constraints()),
            options={"node_limit": nodes, "mip_rel_gap": gap},
        )
        self.bound = found.mip_dual_bound
        if found.x is None:
            return None
        return frozenset(i for i, k in self._saved.items() if found.x[k] > 0.5)

    def _costs(self) -> list[float]:
        """Return the microseconds of what runs again; of two choices the smaller."""
        operations, sizes = self.walker.record.operations, self.walker.record.sizes
        costs = [0.0] * self._count
        for i in self.runs:
            costs[self._again[i]] = operations[i].seconds * 1e6
        for i in self.choices:
            kept = sum(sizes[n] for n in self.walker.choices[i])
            costs[self._saved[i]] = 1e-7 * kept
        return costs

    def _least_values(self) -> list[int]:
        """Return 1 for what the backward reads: it is needed."""
        least = [0] * self._count
        for n in self.walker.targets:
            least[self._needed[n]] = 1
        return least

    def _constraints(self) -> tuple[Any, list[float]]:
        """Return a matrix, and the least value that each row may have."""
        sparse = importlib.import_module("scipy.sparse")
        least = [value for value, _ in self._rows]
        rows = [row for _, row in self._rows]
        for at, limit in self.limits.items():
            rows.append([*self._idle_row(at)])
            least.append(-limit / _UNIT)
        entries = [(r, k, x) for r, row in enumerate(rows) for k, x in row]
        if not entries:  # nothing may be saved
            return sparse.csr_array((len(rows), self._count)), least
        at, columns, values = zip(*entries, strict=True)
        shape = len(rows), self._count
        return sparse.csr_array((values, (at, columns)), shape=shape), least


_UNIT = 1e4  # bytes, so that numbers are of one order
