"""What a budget keeps of a record: so many bytes, so that least is recomputed.

A mixed-integer program, with s_i for "operation i is saved", r_i for "it runs again"
and n_v for "value v is needed":

    least      sum of cost_i r_i
    such that  the bytes of what is saved and needed are at most the limit
               n_v = 1                for each root v
               n_v <= r_i + s_i       for each operation i that makes v
               r_i <= n_v             for each value v that operation i reads or makes

Only the s_i must be integers. For given s_i the least r_i and n_v are integers.

Invariant: what `solve` returns was evaluated without the solver, so that rounding in
the solver never makes a choice exceed the limit. More bytes never cost more work. A
plan that saves what was chosen keeps the bytes that were counted, or fewer.
Rejected: a knapsack over residuals, each with the cost of its own operation. What is
recomputed for one is there for others too, so costs do not add up: such choices cost a
quarter more work on random programs. And to decide while the forward runs. What is
worth keeping depends on what the backward reads, which is known at its end.
"""

import functools
import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from remat._partial.candidates import moves, overwritten
from remat._partial.cost import measured_work, work
from remat._partial.plan import Record, Step, makers_of, overwrites, plan, saveable_in
from remat._partial.values import storage_bytes
from remat.policies import Decision, Policy
from remat.policies._within import NO_SCIPY, Budget, Within


class CostedOperation(NamedTuple):
    """One operation of a problem."""

    cost: float  # of running it again
    reads: tuple[int, ...] = ()
    # Makes or changes. If it runs again, all of these values are needed: what made them
    # before runs again as well.
    makes: tuple[int, ...] = ()
    may_save: bool = True  # then no other operation makes its values
    must_save: bool = False  # where its values are needed
    always_runs: bool = False  # unless its values are saved and needed


@dataclass(frozen=True)
class Problem:
    """Operations in order, and what a backward reads of the values that they make."""

    operations: tuple[CostedOperation, ...]
    # Of each value that may be saved. What shares memory is one value. Values that no
    # operation makes are inputs, and cost nothing.
    nbytes: tuple[tuple[int, int], ...]
    roots: frozenset[int]  # the values that the backward reads

    def makers(self) -> dict[int, list[int]]:
        """Return the operations that make each value."""
        found = defaultdict[int, list[int]](list)
        for i, op in enumerate(self.operations):
            for v in op.makes:
                found[v].append(i)
        return found

    @property
    def may_save(self) -> frozenset[int]:
        """The operations that may be saved."""
        return frozenset(i for i, op in enumerate(self.operations) if op.may_save)

    @property
    def must_save(self) -> frozenset[int]:
        """The operations that must be saved."""
        return frozenset(i for i, op in enumerate(self.operations) if op.must_save)


@dataclass(frozen=True, slots=True)
class Solution:
    """What to save."""

    saved: frozenset[int]  # operations
    work: float  # the cost of all that is recomputed
    nbytes: int  # of all that is saved
    # How much less work another choice could cost, as a fraction. 0 if this is proven
    # to be the best.
    gap: float = 0.0


def solution_of(problem: Problem, saved: Collection[int]) -> Solution:
    """Return what a choice costs: the work and the bytes.

    Example:
        >>> chain = CostedOperation(1.0, (0,), (1,)), CostedOperation(2.0, (1,), (2,))
        >>> problem = Problem(chain, ((1, 4), (2, 4)), frozenset({1, 2}))
        >>> solution_of(problem, {1})
        Solution(saved=frozenset({1}), work=1.0, nbytes=4, gap=0.0)
    """
    runs, used, kept = _followed(problem, saved)
    work = math.fsum(problem.operations[i].cost for i in runs)
    nbytes = sum(n for v, n in problem.nbytes if v in kept)
    return Solution(frozenset(used), work, nbytes)


def _followed(
    problem: Problem, saved: Collection[int]
) -> tuple[set[int], set[int], set[int]]:
    """Return what runs again, the operations that are saved, and their values."""
    operations, makers = problem.operations, problem.makers()
    chosen = {*saved} | problem.must_save
    needed, used, runs = set[int](), set[int](), set[int]()

    def need(values: Iterable[int]) -> None:
        todo = [*values]
        while todo:
            v = todo.pop()
            if v not in needed:
                needed.add(v)
                for i in makers.get(v, ()):
                    if i in chosen:
                        used.add(i)
                    elif i not in runs:
                        runs.add(i)
                        todo += (*operations[i].reads, *operations[i].makes)

    need(problem.roots)
    for i, op in enumerate(operations):
        if op.always_runs and i not in used | runs:
            chosen.discard(i)
            runs.add(i)
            need((*op.reads, *op.makes))
    return runs, used, {v for i in used for v in operations[i].makes if v in needed}


# --- What a policy keeps of a record ---


@dataclass(frozen=True, slots=True)
class Spent:
    """What a budget keeps of one record."""

    budget: Budget
    must: frozenset[int]  # operations whose results must be kept
    may: tuple[Decision, ...]  # where results go if they are kept
    solution: Solution  # what is kept
    least: Solution  # what must be, and what it costs to recompute the rest

    @property
    def decisions(self) -> list[Decision]:
        """What becomes of the result of each operation."""
        kept = self.solution.saved
        return [
            decision if i in kept else Decision.RECOMPUTE
            for i, decision in enumerate(self.may)
        ]

    @property
    def overdrawn(self) -> int:
        """The bytes that must be kept, if they are more than the budget; else 0."""
        nbytes = self.least.nbytes
        return nbytes if self.solution.nbytes > self.budget.nbytes else 0


def spent_by(
    policy: Policy | None,
    record: Record,
    decisions: Sequence[Decision],
    exposed: Collection[int],
    *,
    prune: bool,
) -> Spent | None:
    """Return what the budget in a policy keeps; None if there is no budget in it."""
    if not isinstance(policy, Within):
        return None
    musts = overwritten(record, [policy.must(step.op) for step in record.steps])
    pairs = enumerate(zip(musts, decisions, strict=True))
    must = frozenset(i for i, (has_to, may) in pairs if has_to and may)
    return spend(policy.budget, must, record, decisions, exposed, prune=prune)


def spend(
    budget: Budget,
    must: frozenset[int],
    record: Record,
    may: Sequence[Decision],
    extra_roots: Iterable[int],
    *,
    prune: bool,
) -> Spent:
    """Return what a budget keeps of a record."""
    args = record, may, must, extra_roots, cost_of(budget)
    problem, steps = problem_of(*args, prune=prune)
    found = solve(problem, budget.nbytes, time_limit=budget.time_limit)
    saved = frozenset(i for k in found.saved for i in steps[k])
    solution = replace(found, saved=saved)
    return Spent(budget, must, tuple(may), solution, solution_of(problem, ()))


def cost_of(budget: Budget) -> Callable[[Step], float]:
    """Return what says how much an operation costs."""
    return measured_work if budget.costs == "measured" else work


# --- The problem of a record ---


def problem_of(
    record: Record,
    may: Sequence[Decision],
    must: Container[int],
    extra_roots: Iterable[int],
    cost: Callable[[Step], float],
    *,
    prune: bool = True,
) -> tuple[Problem, list[list[int]]]:
    """Return what there is to choose in a record, and the steps of each operation."""
    steps, of_wrapper = record.steps, dict(record.inside)
    saveable = saveable_in(record, [i for i, decision in enumerate(may) if decision])
    if not prune:  # what no recompute reads is not saved by a plan
        live = plan(record, extra_roots=extra_roots).live
        saveable = {i for i in saveable if live.intersection(steps[i].makes)}
    made = defaultdict[int, set[int]](set)
    for s, makers in makers_of(record).items():
        for i in makers:
            made[i].add(s)

    def values(storages: Iterable[int]) -> set[int]:
        # A wrapper, and what it wraps, are one value.
        return {of_wrapper.get(s, s) for s in storages}

    def operation(group: Sequence[int]) -> CostedOperation:
        ours = [steps[i] for i in group]
        makes = values(s for i in group for s in made[i])
        may_save = all(i in saveable or steps[i].is_collective for i in group)
        always = any(s.always_runs or s.draws or s.on_subclass for s in ours)
        return CostedOperation(
            math.fsum(map(cost, ours)),
            tuple(sorted(values(s for step in ours for s in _read(step)))),
            tuple(sorted(makes)),
            may_save=may_save,
            must_save=may_save and any(i in must for i in group),
            always_runs=always or (not prune and bool(makes)),
        )

    groups = _groups(record)
    operations = tuple(map(operation, groups))
    roots = values({*extra_roots}.union(*record.roots))
    if not prune:  # all that is not saved runs again
        roots |= {v for op in operations for v in op.makes}
    stay = [i for i in saveable if not moves(may[i], steps[i].op.outputs)]
    return Problem(operations, _sizes(record, stay), frozenset(roots)), groups


def _sizes(record: Record, saveable: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the bytes of each value that some steps make."""
    nbytes, of_wrapper = defaultdict[int, int](int), dict(record.inside)
    for step in (record.steps[i] for i in saveable):
        for s, value in zip(step.makes, step.op.outputs, strict=True):
            v = of_wrapper.get(s, s)
            nbytes[v] = max(nbytes[v], storage_bytes(value))
    return tuple(sorted(nbytes.items()))


def _groups(record: Record) -> list[list[int]]:
    """Return the steps of each operation: a collective goes with what it overwrites."""
    over = overwrites(record)
    collective = {i: j for j, made in over.items() for i in made}
    groups = defaultdict[int, list[int]](list)
    for i in range(len(record.steps)):
        groups[collective.get(i, i)].append(i)
    return [*groups.values()]


def _read(step: Step) -> Sequence[int]:
    """Return the storages whose values an operation reads."""
    forced = step.always_runs or step.on_subclass
    whole = {*step.metadata_only} >= {*range(len(step.makes))}
    reads_none = bool(step.metadata_only) and not forced and (step.draws or whole)
    return () if reads_none else step.reads


# --- The best choice ---


class _Solved:
    """What is known of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.solutions = {solution_of(problem, ())}  # found for any limit
        # For each limit the seconds it was given, and the proven bound of the work.
        self.tried: dict[int, tuple[float, float]] = {}

    def best(self, limit: int) -> Solution | None:
        """Return the least work within a limit, of what was found."""
        # Another thread may add to them.
        fitting = [s for s in [*self.solutions] if s.nbytes <= limit]
        return min(fitting, key=lambda s: (s.work, s.nbytes, [*s.saved]), default=None)


_solved = functools.lru_cache(maxsize=256)(_Solved)


def solve(problem: Problem, limit: int, *, time_limit: float = 10.0) -> Solution:
    """Return what to save within a number of bytes, so that least is recomputed.

    The same problem is solved once. When the time is up, the best choice that was found
    is returned, also if it was found for fewer bytes.

    Example:
        >>> chain = CostedOperation(1.0, (0,), (1,)), CostedOperation(2.0, (1,), (2,))
        >>> problem = Problem(chain, ((1, 4), (2, 4)), frozenset({1, 2}))
        >>> [solve(problem, limit).work for limit in (0, 4, 8)]
        [3.0, 1.0, 0.0]
    """
    known = _solved(problem)
    seconds, bound = known.tried.get(limit, (-1.0, 0.0))
    if seconds < time_limit:
        all_of_it = solution_of(problem, problem.may_save)
        known.solutions.add(all_of_it)
        found, bound = [all_of_it], all_of_it.work
        # What always runs, unless saved and needed, may not be needed once another
        # operation is saved. The solver takes it for saved: its bound may be too low.
        is_loose = any(op.always_runs and op.may_save for op in problem.operations)
        if all_of_it.nbytes > limit or is_loose:
            found, bound = _searched(problem, limit, time_limit)
        known.solutions.update(found)
        proven = bound == math.inf or any(s.work <= bound for s in found)
        known.tried[limit] = (math.inf if proven else time_limit), bound
    best = known.best(limit) or solution_of(problem, ())
    gap = 0.0 if best.work <= bound else (best.work - bound) / best.work
    return Solution(best.saved, best.work, best.nbytes, gap)


# --- The solver ---


def _searched(
    problem: Problem, limit: int, time_limit: float
) -> tuple[list[Solution], float]:
    """Return what the solver finds, and a bound of the work; no choice has less.

    The bound is infinite if what must be saved takes more than the limit.
    """
    model, bound = _Model(problem, limit), 0.0
    for _ in range(_ATTEMPTS):
        saved, least = model.solve(time_limit)
        bound = max(bound, least)
        if saved is None:
            break
        found = solution_of(problem, saved)
        if found.nbytes <= limit:
            # The solver adds up in another order.
            is_best = found.work <= bound * (1 + _PRECISION)
            return [found], found.work if is_best else bound
        # For the solver, a millionth more than the limit is the limit.
        model.refuse(saved)
    return [], bound


_ATTEMPTS = 8
_PRECISION = 1e-6


class _Model:
    """The program that scipy solves: its variables are s_i, r_i, n_v and k_v, in order.

    k_v says that value v is saved: of what is made together, only what is needed.
    """

    def __init__(self, problem: Problem, limit: int) -> None:
        ops = problem.operations
        values, count = sorted({v for op in ops for v in op.makes}), len(ops)
        self._problem, self._size = problem, 2 * (count + len(values))
        self._needed = {v: 2 * count + k for k, v in enumerate(values)}
        self._kept = {v: n + len(values) for v, n in self._needed.items()}
        # The factor of each variable, and what their sum is at least.
        self._rows: list[tuple[dict[int, float], float]] = []
        for s, op in enumerate(ops):
            r = count + s
            for v in {*op.makes}:
                n, k = self._needed[v], self._kept[v]
                self._rows.append(({r: 1.0, s: 1.0, n: -1.0}, 0.0))
                self._rows.append(({k: 1.0, n: -1.0, s: -1.0}, -1.0))
            for v in {*op.reads, *op.makes} & self._needed.keys():
                self._rows.append(({self._needed[v]: 1.0, r: -1.0}, 0.0))
            if op.always_runs:
                self._rows.append(({r: 1.0, s: 1.0}, 1.0))
        sizes = [(self._kept[v], n) for v, n in problem.nbytes if v in self._kept and n]
        # Whole numbers, as small as can be: the solver compares with 1e-6.
        unit = math.gcd(*(n for _, n in sizes)) or 1
        most = max((n for _, n in sizes), default=unit) // unit
        row = {k: -(n // unit) / most for k, n in sizes}
        self._rows.append((row, -(limit // unit) / most))

    def refuse(self, saved: Collection[int]) -> None:
        """Refuse a choice that takes too many bytes, and those that save more."""
        _, _, kept = _followed(self._problem, saved)
        row = {self._kept[v]: -1.0 for v in kept}
        self._rows.append((row, 1.0 - len(row)))

    def solve(self, time_limit: float) -> tuple[frozenset[int] | None, float]:
        """Return the operations to save, None if none are found, and a bound."""
        optimize, sparse = _scipy()
        ops, size = self._problem.operations, self._size
        count, costs = len(ops), [op.cost for op in ops]
        # The solver compares with 1e-6, whatever the unit.
        unit = max(costs, default=0.0) / _SCALE or 1.0
        objective = [0.0] * size
        objective[count : 2 * count] = [cost / unit for cost in costs]
        lower, upper = [0.0] * size, [1.0] * size
        for s, op in enumerate(ops):
            lower[s] = float(op.must_save)
            upper[s] = float(op.must_save or op.may_save)
        for v in self._problem.roots & self._needed.keys():
            lower[self._needed[v]] = 1.0
        rows, least = zip(*self._rows, strict=True)
        entries = [(j, k, x) for j, row in enumerate(rows) for k, x in row.items()]
        where = [j for j, _, _ in entries], [k for _, k, _ in entries]
        factors = [x for _, _, x in entries]
        matrix = sparse.csr_array((factors, where), shape=(len(rows), size))
        found = optimize.milp(
            objective,
            integrality=[1] * count + [0] * (size - count),
            bounds=optimize.Bounds(lower, upper),
            constraints=optimize.LinearConstraint(matrix, lb=[*least]),
            options={"mip_rel_gap": 0.0, "time_limit": max(time_limit, 0.0)},
        )
        if found.status == _INFEASIBLE:
            return None, math.inf
        bound = found.get("mip_dual_bound")
        proven = 0.0 if bound is None or not math.isfinite(bound) else max(bound, 0.0)
        if found.x is None:
            return None, proven * unit
        return frozenset(i for i in range(count) if found.x[i] > 0.5), proven * unit


_SCALE = 1e4
_INFEASIBLE = 2  # a status of scipy's


def _scipy() -> tuple[Any, Any]:
    """Return the modules of scipy that solve, or raise an ImportError."""
    try:
        optimize: Any = importlib.import_module("scipy.optimize")
        return optimize, importlib.import_module("scipy.sparse")
    except ModuleNotFoundError as error:
        raise ImportError(NO_SCIPY) from error
