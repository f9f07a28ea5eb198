"""What a budget keeps of a record: makes the problem, and has it solved.

Invariant: a plan that saves what was chosen keeps the bytes that were counted, or
fewer. Where a plan knows more than a problem says, the problem needs more.
Rejected: to decide while the forward runs. What is worth keeping depends on what the
backward reads, which is known at its end.
"""

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from remat._base.op import Value
from remat._offload.offload import extent
from remat._partial.budget import CostedOperation, Problem, Solution, evaluate, solve
from remat._partial.candidates import overwritten
from remat._partial.cost import measured_work, work
from remat._partial.plan import Record, Step, makers_of, overwrites, plan, saveable_in
from remat.policies import Decision, Policy
from remat.policies._within import Budget, Within


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


def spent(
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
    return Spent(budget, must, tuple(may), solution, evaluate(problem, ()))


def cost_of(budget: Budget) -> Callable[[Step], float]:
    """Return what says how much an operation costs."""
    return measured_work if budget.costs == "measured" else work


# --- The problem ---


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
    made: dict[int, set[int]] = {}
    for s, makers in makers_of(record).items():
        for i in makers:
            made.setdefault(i, set()).add(s)

    def values(storages: Iterable[int]) -> set[int]:
        # A wrapper, and what it wraps, are one value.
        return {of_wrapper.get(s, s) for s in storages}

    def operation(group: Sequence[int]) -> CostedOperation:
        ours = [steps[i] for i in group]
        makes = values(s for i in group for s in made.get(i, ()))
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

    nbytes: dict[int, int] = {}
    for i in sorted(saveable):
        outputs = steps[i].op.outputs
        if not moves(may[i], outputs):
            for s, value in zip(steps[i].makes, outputs, strict=True):
                v = of_wrapper.get(s, s)
                nbytes[v] = max(nbytes.get(v, 0), storage_bytes(value))
    groups = _groups(record)
    operations = tuple(map(operation, groups))
    roots = values({*extra_roots}.union(*record.roots))
    if not prune:  # all that is not saved runs again
        roots |= {v for op in operations for v in op.makes}
    sizes = tuple(sorted(nbytes.items()))
    return Problem(operations, sizes, frozenset(roots)), groups


def _groups(record: Record) -> list[list[int]]:
    """Return the steps of each operation: a collective goes with what it overwrites."""
    over = overwrites(record)
    collective = {i: j for j, made in over.items() for i in made}
    groups: dict[int, list[int]] = {}
    for i in range(len(record.steps)):
        groups.setdefault(collective.get(i, i), []).append(i)
    return [*groups.values()]


def _read(step: Step) -> Sequence[int]:
    """Return the storages whose values an operation reads."""
    forced = step.always_runs or step.on_subclass
    whole = {*step.metadata_only} >= {*range(len(step.makes))}
    reads_none = bool(step.metadata_only) and not forced and (step.draws or whole)
    return () if reads_none else step.reads


def storage_bytes(value: Value) -> int:
    """Return the bytes of the storage that was made for a value."""
    if len(value.stride) != len(value.shape):  # of sparse and nested tensors
        return value.nbytes
    return (value.offset + extent(value.shape, value.stride)) * value.dtype.itemsize


def moves(decision: Decision, outputs: Sequence[Value]) -> bool:
    """Say whether a result is offloaded: what is in host memory stays in it."""
    away = any(value.device.type != "cpu" for value in outputs)
    return decision is Decision.OFFLOAD_TO_DISK or (decision.offloads and away)
