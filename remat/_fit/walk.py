"""Predicts the peak of a step for any set of saved storages: a walk over its record.

What is not saved is recomputed just in time, operation by operation, and freed after
its last use: that is how `remat.scope` runs a plan. What is saved lives as long as a
graph, or a value that is computed from it, refers to it.

Invariant: where everything is saved, the peak is that of the record.
Rejected: to run the step for each set. A walk takes a thousandth of the time.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from remat._fit.record import AGAIN, ASKED, StepOp, StepRecord


class Again(NamedTuple):
    """What a backward needs, where some results are saved."""

    saved: set[int]  # storages
    needed: set[int]  # storages
    runs: set[int]  # the operations that run again


class Walked(NamedTuple):
    """What a walk found."""

    peak: int
    at: int  # the operation at which the peak is
    bytes: Sequence[int]  # the most at each operation, with what is recomputed for it


class Walker:
    """Walks over one record, with a scope around a span of its operations."""

    is_solved = True  # by a program; else by searches alone

    def __init__(self, record: StepRecord, span: tuple[int, int] | None = None) -> None:
        self.record, self.span = record, span or (0, record.turn)
        self._end, self._turn = len(record.operations), record.turn
        self.always: set[int] = set()  # the storages that are saved in any case
        again = self._recomputable()
        before = [i for i in record.forwards if i < self.span[1] or record.copied]
        # The operations that make or write each storage that may be recomputed.
        self.makers: dict[int, list[int]] = {n: [] for n in again}
        for i in before:
            for n in (*record.operations[i].makes, *record.operations[i].writes):
                if n in again:
                    self.makers[n].append(i)
        # The operations whose results may be saved, and these storages. A policy is
        # asked once about all results of an operation.
        self.choices = self._choices(again)
        # What the backward reads, and may be recomputed.
        self.targets = {n for n in again if record.dies[n] > record.turn_of(n)}
        self.touched = {
            i: tuple(again.intersection(self._touched_by(record.operations[i])))
            for i in before
        }
        self._fixed = self._fixed_bytes(again)
        self._triggers = self._first_reads()
        first = self._due({n: t for t, each in self._triggers.items() for n in each})
        # From when to when a step has no use for each storage, if it is saved: from its
        # last use before the backward to the first in it, at least.
        self.idle = {n: (record.left[n], t) for n, t in self._first_uses(first)}
        # The bytes at each operation if nothing were saved, and all that the backward
        # reads were there when it does.
        self.base = self._base_bytes(first)
        self._last: tuple[frozenset[int], Again] | None = None  # that was asked for
        self.known: dict[Any, Any] = {}  # what was solved for budgets before

    def _recomputable(self) -> set[int]:
        """Return the storages that a scope around the span may recompute."""
        (first, last), operations = self.span, self.record.operations
        late = {n for op in operations[last : self._turn] for n in op.writes}
        return {
            n
            for op in operations[first:last]
            if op.fate in (ASKED, AGAIN)
            for n in op.makes
            if self.record.left[n] <= self._turn and n not in late
        }

    def _choices(self, again: set[int]) -> dict[int, list[int]]:
        """Return what may be saved, by the operation whose results these are."""
        record = self.record
        choices: dict[int, list[int]] = {}
        for n in sorted(again):
            if record.operations[record.born[n]].fate == ASKED and record.sizes[n]:
                choices.setdefault(record.born[n], []).append(n)
        return choices

    def _touched_by(self, op: StepOp) -> set[int]:
        """Return the storages whose values an operation reads or changes."""
        return {*op.reads, *op.makes, *op.writes}

    def _fixed_bytes(self, again: set[int]) -> list[int]:
        """Return the bytes at each operation if nothing were saved or recomputed."""
        record = self.record
        change = [0] * (self._end + 2)
        for n, size in enumerate(record.sizes):
            born = record.born[n]
            if born >= 0:
                dies = record.left[n] if n in again else record.dies[n]
                change[born] += size
                change[min(max(dies, born + 1), self._end + 1)] -= size
        return _summed(record.resident, change)[: self._end]

    def _first_reads(self) -> dict[int, list[int]]:
        """Return the targets that are first read at each operation of the backward."""
        first: dict[int, int] = {}
        copied = {t for each in self.record.copied for t in each}
        for t in range(self._turn, self._end):
            for n in () if t in copied else self.record.operations[t].reads:
                if n in self.targets:
                    first.setdefault(n, t)
        found: dict[int, list[int]] = {}
        for n in sorted(self.targets):
            t = first.get(n, min(self.record.dies[n], self._end) - 1)
            found.setdefault(t, []).append(n)
        return found

    def _due(self, first: dict[int, int]) -> dict[int, int]:
        """Return when targets are there at the latest, by when they are first read."""
        return first

    def _first_uses(self, first: dict[int, int]) -> Iterable[tuple[int, int]]:
        """Yield when a backward first uses a storage, by what is recomputed too."""
        used = {n: first.get(n, self._end) for n in self.makers}
        # What the backward does not read itself is used when something made of it is.
        for touched in reversed(self.touched.values()):
            made = min((used[n] for n in touched), default=self._end)
            for n in touched:
                if n not in self.targets:
                    used[n] = min(used[n], made)
        return used.items()

    def _base_bytes(self, first: dict[int, int]) -> list[int]:
        change = [0] * (self._end + 2)
        for n, t in first.items():
            born, left = self.record.born[n], self.record.left[n]
            since = max(left, born + 1) if n in self.always else t
            change[since] += self.record.sizes[n]
            dies = min(max(self.record.dies[n], t + 1), self._end)
            change[dies] -= self.record.sizes[n]
        read = _summed(0, change)
        each = zip(self._fixed, self.record.operations, read, strict=False)
        return [fixed + op.inside + read for fixed, op, read in each]

    # --- What runs again ---

    def closure(self, chosen: Iterable[int]) -> Again:
        """Return what runs again, if a policy saves some operations."""
        key = frozenset(chosen)
        if self._last is None or self._last[0] != key:
            saved = self.always.union(n for i in key for n in self.choices[i])
            self._last = key, self._closure_of(saved)
        return self._last[1]

    def _closure_of(self, saved: set[int]) -> Again:
        needed, runs = set(), set()
        todo = [*self.targets]
        while todo:
            n = todo.pop()
            if n in needed:
                continue
            needed.add(n)
            if n in saved:
                continue
            for i in self.makers[n]:
                for k in (i, *self.runs_with(i)):
                    if k not in runs:
                        runs.add(k)
                        todo += self.touched[k]
        return Again(saved, needed, runs)

    def runs_with(self, i: int) -> Iterable[int]:
        """Return the operations that also run again if one does."""
        del i
        return ()

    def seconds(self, chosen: Iterable[int]) -> float:
        """Return the seconds of what runs again if some operations are saved."""
        operations = self.record.operations
        return sum(operations[i].seconds for i in self.closure(chosen).runs)

    def again(self, chosen: Iterable[int]) -> tuple[int, int, float]:
        """Return the FLOPs that run again, the bytes that are made, the seconds."""
        ops = [self.record.operations[i] for i in self._all_again(chosen)]
        nbytes = sum(self.record.sizes[n] for op in ops for n in op.makes)
        return sum(op.flops for op in ops), nbytes, sum(op.seconds for op in ops)

    def _all_again(self, chosen: Iterable[int]) -> Iterable[int]:
        """Return the operations that run again, also those that always do."""
        return self.closure(chosen).runs

    def more(self, choice: int, again: Again) -> float:
        """Return the seconds of what also runs again if a choice is not saved."""
        saved, needed, runs = again
        more: set[int] = set()
        todo = [n for n in self.choices[choice] if n in needed]
        while todo:
            for i in self.makers[todo.pop()]:
                if i not in more and i not in runs:
                    more.add(i)
                    todo += [n for n in self.touched[i] if n not in saved]
        return sum(self.record.operations[i].seconds for i in more)

    def left_out(self, chosen: Iterable[int]) -> list[int]:
        """Return what may be saved and runs again, the most expensive first."""
        runs = self.closure(chosen).runs.intersection(self.choices)
        return sorted(runs, key=lambda i: (-self.record.operations[i].seconds, i))

    # --- The walk ---

    def __call__(self, chosen: Iterable[int], *, times: int = 1) -> Walked:
        """Walk, with the results of some operations saved.

        What is recomputed takes so many times its bytes.
        """
        again, record = self.closure(chosen), self.record
        operations, fixed = record.operations, self._with_saved(again)
        found = [b + op.inside for b, op in zip(fixed, operations, strict=True)]
        recomputing = Recomputing(self, again)
        for t in range(self._turn, self._end):
            recomputing.free_before(t)
            highest = self._fill(t, recomputing)
            found[t] += times * recomputing.live
            if highest:
                before = fixed[t] - sum(record.sizes[n] for n in operations[t].makes)
                found[t] = max(found[t], before + times * highest)
        at = max(range(self._end), key=found.__getitem__)
        return Walked(found[at], at, found)

    def _fill(self, t: int, recomputing: "Recomputing") -> int:
        """Recompute what is first read at an operation; return the most bytes in it."""
        each = map(recomputing.compute, self._triggers.get(t, ()))
        return max(each, default=0)

    def _with_saved(self, again: Again) -> list[int]:
        """Return the fixed bytes, with those of what is saved."""
        change = [0] * (self._end + 2)
        ends = self._ends(again)
        for n in again.saved & again.needed:
            size = self.record.sizes[n]
            change[max(self.record.left[n], self.record.born[n] + 1)] += size
            change[min(ends[n], self._end + 1)] -= size
        return [a + b for a, b in zip(self._fixed, _summed(0, change), strict=False)]

    def _ends(self, again: Again) -> dict[int, int]:
        """Return until when something refers to each storage."""
        record, (saved, needed, runs) = self.record, again
        ends = {n: record.dies[n] if n in self.targets else 0 for n in needed}
        # An operation that may run again refers to what it reads, as long as a graph
        # refers to what it makes.
        for i in sorted(runs, reverse=True):
            op = record.operations[i]
            made = [n for n in (*op.makes, *op.writes) if n in ends and n not in saved]
            last = max((ends[n] for n in made), default=0)
            for n in self.touched[i]:
                if n in ends:
                    ends[n] = max(ends[n], last)
        return ends

    def is_idle(self, number: int, at: int) -> bool:
        """Say whether a step has no use for a storage at an operation."""
        first, last = self.idle[number]
        return first <= at < last


class Recomputing:
    """What is recomputed in the backward of one walk."""

    def __init__(self, walker: Walker, again: Again) -> None:
        self._walker, self._record, self.saved = walker, walker.record, again.saved
        self.filled: set[int] = set()  # the units that were recomputed
        self._alive: set[int] = set()
        self._done: set[int] = set()
        self._readers: dict[int, int] = {}
        for i in again.runs:
            for n in walker.touched[i]:
                self._readers[n] = self._readers.get(n, 0) + 1
        self._freed: dict[int, int] = {}
        self.live = 0  # the bytes of it that are alive
        self._now = 0

    def free_before(self, t: int) -> None:
        """Free what is no longer needed when an operation of the backward begins."""
        self._now = t
        self.live -= self._freed.pop(t, 0)

    def compute(self, target: int) -> int:
        """Compute a storage, and what it needs; return the most bytes alive in it."""
        highest = 0
        stack = [target]
        while stack:
            n = stack.pop()
            todo = [i for i in self._makers(n) if i not in self._done]
            if not todo:
                continue
            i = todo[0]
            missing = [
                m
                for m in self._walker.touched[i]
                if m != n and m not in self._alive and self._is_before(m, i)
            ]
            if missing:
                stack += [n, *missing]
                continue
            highest = max(highest, self._run(i))
            if len(todo) > 1:
                stack.append(n)
        return highest

    def _makers(self, number: int) -> list[int]:
        if number in self.saved:
            return []
        return self._walker.makers[number]

    def _is_before(self, number: int, i: int) -> bool:
        """Say whether an operation reads what earlier ones made, that did not run."""
        makers = self._makers(number)
        return any(k < i and k not in self._done for k in makers)

    def _run(self, i: int) -> int:
        op, sizes = self._record.operations[i], self._record.sizes
        self._done.add(i)
        for n in op.makes:
            if n not in self._alive and n not in self.saved:
                self._alive.add(n)
                self.live += sizes[n]
        kept = sum(sizes[n] for n in op.makes if n in self.saved)
        highest = self.live + kept + op.inside
        for n in self._walker.touched[i]:
            self._readers[n] -= 1
            if n in self._alive and not self._readers[n]:
                self._free(n)
        return highest

    def _free(self, number: int) -> None:
        """Free a storage that no operation reads again, when its graph is done."""
        size = self._record.sizes[number]
        is_target = number in self._walker.targets
        dies = self._record.dies[number] if is_target else 0
        if dies <= self._now:
            self._alive.discard(number)
            self.live -= size
        else:
            self._freed[dies] = self._freed.get(dies, 0) + size


def _summed(start: int, changes: Sequence[int]) -> list[int]:
    return [*accumulate(changes, initial=start)][1:]
