"""Chooses what a budget of bytes keeps of a record, so that least is recomputed.

`solver` is the program that chooses. Here are the problem of a record, and what is
known of problems that were solved.

Invariant: what `solve` returns was evaluated without the solver, so that rounding in
the solver never makes a choice exceed the limit. More bytes never cost more work. A
plan that saves what was chosen keeps the bytes that were counted, or fewer.
Rejected: to decide while the forward runs. What is worth keeping depends on what the
backward reads, which is known at its end.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat._partial.candidates import moves, overwritten
from remat._partial.effects import measured_work, work
from remat._partial.plan import Record, Step, makers_of, overwrites, plan, saveable_in
from remat._partial.solver import Choices, Prices, SavingProgram
from remat._partial.values import storage_bytes
from remat.policies import Decision, Policy
from remat.policies._within import Budget, Within


class Spent(NamedTuple):
    """What a policy with a budget keeps of one record."""

    policy: Within
    solution: "Solution"
    decisions: Sequence[Decision]  # what becomes of the result of each operation

    @property
    def overdrawn(self) -> int:
        """The bytes that must be kept, if they are more than the budget; else 0."""
        nbytes = self.solution.nbytes
        return nbytes if nbytes > self.policy.budget.nbytes else 0


def spent_by(
    policy: Policy | None,
    record: Record,
    may: Sequence[Decision],
    exposed: Iterable[int],
    *,
    prune: bool,
) -> Spent | None:
    """Return what the budget in a policy keeps; None if there is no budget in it."""
    if not isinstance(policy, Within):
        return None
    budget = policy.budget
    musts = overwritten(record, [policy.must(step.op) for step in record.steps])
    must = {i for i, has_to in enumerate(musts) if has_to}
    args = record, may, must, exposed, cost_of(budget)
    problem, steps = problem_of(*args, prune=prune)
    found = solve(problem, budget.nbytes, time_limit=budget.time_limit)
    kept = frozenset(i for k in found.saved for i in steps[k])
    pairs = enumerate(may)
    decisions = [d if i in kept else Decision.RECOMPUTE for i, d in pairs]
    return Spent(policy, found._replace(saved=kept), decisions)


def cost_of(budget: Budget) -> Callable[[Step], float]:
    """Return what says how much an operation costs."""
    return measured_work if budget.costs == "measured" else work


# --- The problem of a record ---


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

    @property
    def may_save(self) -> list[int]:
        """The operations that may be saved."""
        return [i for i, op in enumerate(self.operations) if op.may_save]

    @functools.cached_property
    def makers(self) -> dict[int, list[int]]:
        """The operations that make each value."""
        found = defaultdict(list)
        for i, op in enumerate(self.operations):
            for v in dict.fromkeys(op.makes):
                found[v].append(i)
        return dict(found)


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
    made = defaultdict(set)
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

    # A collective goes with what it overwrites.
    over = {i: j for j, each in overwrites(record).items() for i in each}
    groups = defaultdict(list)
    for i in range(len(steps)):
        groups[over.get(i, i)].append(i)
    operations = tuple(map(operation, groups.values()))
    roots = values({*extra_roots}.union(*record.roots))
    if not prune:  # all that is not saved runs again
        roots |= {v for op in operations for v in op.makes}
    stay = [i for i in saveable if not moves(may[i], steps[i].op.outputs)]
    problem = Problem(operations, _sizes(record, stay), frozenset(roots))
    return problem, [*groups.values()]


def _sizes(record: Record, saveable: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the bytes of each value that some steps make."""
    nbytes, of_wrapper = defaultdict(int), dict(record.inside)
    for step in (record.steps[i] for i in saveable):
        for s, value in zip(step.makes, step.op.outputs, strict=True):
            v = of_wrapper.get(s, s)
            nbytes[v] = max(nbytes[v], storage_bytes(value))
    return tuple(sorted(nbytes.items()))


def _read(step: Step) -> Sequence[int]:
    """Return the storages whose values an operation reads."""
    forced = step.always_runs or step.on_subclass
    whole = {*step.metadata_only} >= {*range(len(step.makes))}
    reads_none = bool(step.metadata_only) and not forced and (step.draws or whole)
    return () if reads_none else step.reads


# --- Solutions ---


class Solution(NamedTuple):
    """What to save."""

    saved: frozenset[int]  # operations
    work: float  # the cost of all that is recomputed
    nbytes: int  # of all that is saved
    # How much less work another choice could cost, as a fraction. 0 if this is proven
    # to be the best.
    gap: float = 0.0


def solution_of(problem: Problem, saved: Collection[int]) -> Solution:
    """Return what a choice costs: the work and the bytes."""
    runs, used, kept = _followed(problem, saved)
    work = math.fsum(problem.operations[i].cost for i in runs)
    nbytes = sum(n for v, n in problem.nbytes if v in kept)
    return Solution(frozenset(used), work, nbytes)


def _followed(
    problem: Problem, saved: Collection[int]
) -> tuple[set[int], set[int], set[int]]:
    """Return what runs again, the operations that are saved, and their values."""
    operations, makers = problem.operations, problem.makers
    chosen = {*saved}.union(i for i, op in enumerate(operations) if op.must_save)
    needed, used, runs = set(), set(), set()

    def need(todo: list[int]) -> None:
        while todo:
            v = todo.pop()
            if v in needed:
                continue
            needed.add(v)
            for i in makers.get(v, ()):
                if i in chosen:
                    used.add(i)
                elif i not in runs:
                    runs.add(i)
                    todo += (*operations[i].reads, *operations[i].makes)

    need([*problem.roots])
    for i, op in enumerate(operations):
        if op.always_runs and i not in used | runs:
            chosen.discard(i)
            runs.add(i)
            need([*op.reads, *op.makes])
    return runs, used, {v for i in used for v in operations[i].makes if v in needed}


@functools.lru_cache(maxsize=256)
def _known(problem: Problem) -> set[Solution]:
    """Return what was found for a problem, for any limit; first nothing, and all."""
    return {solution_of(problem, ()), solution_of(problem, problem.may_save)}


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
    found, bound = _searched(problem, limit, max(time_limit, 0.0))
    known = _known(problem)
    known.update(found)
    # Another thread may add to them.
    fitting = [s for s in [*known] if s.nbytes <= limit]
    if not fitting:  # what must be saved takes more
        return solution_of(problem, ())
    best = min(fitting, key=lambda s: (s.work, s.nbytes, [*s.saved]))
    return best._replace(gap=max(best.work - bound, 0.0) / (best.work or 1.0))


@functools.lru_cache(maxsize=1024)
def _searched(
    problem: Problem, limit: int, time_limit: float
) -> tuple[list[Solution], float]:
    """Return what the solver finds, and a bound of the work; no choice has less.

    The bound is infinite if what must be saved takes more than the limit.
    """
    ops, sizes = problem.operations, dict(problem.nbytes)
    forced = [i for i, op in enumerate(ops) if op.always_runs]
    # What always runs, unless saved and needed, may not be needed once another
    # operation is saved. The solver takes it for saved: its bound may be too low.
    all_of_it = solution_of(problem, problem.may_save)
    if all_of_it.nbytes <= limit and not any(ops[i].may_save for i in forced):
        return [all_of_it], all_of_it.work
    # The solver compares with 1e-6: whole numbers, as small as can be, and costs of one
    # order.
    unit = max((op.cost for op in ops), default=0.0) / 1e4 or 1.0
    prices = Prices(
        [op.cost / unit for op in ops],
        dict.fromkeys(problem.makers, 0) | sizes,
        max(sizes.values(), default=0) or 1,
        must=[i for i, op in enumerate(ops) if op.must_save],
        forced=forced,
    )
    program, bound = SavingProgram(_choices_of(problem), prices), 0.0
    step = math.gcd(*sizes.values()) or 1
    program.limits[_END] = limit // step * step
    for _ in range(_ATTEMPTS):
        saved = program.solve(mip_rel_gap=0.0, time_limit=time_limit)
        bound = max(bound, program.bound * unit)
        if saved is None:
            break
        found = solution_of(problem, saved)
        if found.nbytes <= limit:
            # The solver adds up in another order.
            is_best = found.work <= bound * (1 + _PRECISION)
            return [found], found.work if is_best else bound
        program.refuse(_followed(problem, saved)[2])
    return [], bound


def _choices_of(problem: Problem) -> Choices:
    """Return the choices of a problem, of which all count at the end of a forward."""
    ops, makers = problem.operations, problem.makers
    touched = (dict.fromkeys((*op.reads, *op.makes)) for op in ops)
    return Choices(
        {i: [*dict.fromkeys(ops[i].makes)] for i in problem.may_save},
        makers,
        {i: [v for v in vs if v in makers] for i, vs in enumerate(touched)},
        problem.roots & makers.keys(),
    )


_END = 0  # the only place with a limit
_ATTEMPTS = 8
_PRECISION = 1e-6
