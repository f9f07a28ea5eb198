"""Plans by blocks from the walk and the program of plans for a step.

In: a record with the calls of blocks. Out: for each block whether it is recomputed, and
which of its results are saved then.

A *unit* is a call of a block: a span of the record. It differs from a scope in two
rules. Its recompute fills all its residuals at once, when the first one is read. And
what leaves a unit, or is there before it, is always saved, as a call keeps its inputs.

Invariant: all calls of a block have the same decisions, as they share what they follow.
Rejected: to simulate each block under several policies, and to distribute memory by
what that measures. It took sixty times as long, and found nothing better.
"""

import threading
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from remat._base.absent import LIKE
from remat._base.context import here
from remat._base.op import Op
from remat._fit.record import BlockCall, StepOp, StepRecord
from remat._fit.rewritten import is_asked, outermost, with_twins
from remat._fit.walk import Recomputing, Walker
from remat._scope.following import Cursor, Placed
from remat._torch.operators import is_view_op
from remat.policies import Decision, Policy


@dataclass(frozen=True, repr=False)
class OfBlock(Policy):
    """Answers as a plan says, operation by operation of a call.

    Operations are aligned with the plan, with as few as possible more or fewer.
    """

    placed: Placed

    is_in_order = True

    @override
    def decide(self, op: Op) -> Decision:
        """Return what the plan says about the next operation of the call that runs."""
        if is_view_op(op.func):
            return Decision.RECOMPUTE
        cursor, name = _AT.cursor(self), str(op.func)
        names, at = cursor.placed.names, cursor.at
        if cursor.costs is None and at < len(names) and names[at] == name:
            cursor.at = at + 1
        else:
            at = cursor.align(name)
        is_saved = at >= 0 and cursor.placed.saves[at]
        return Decision.SAVE if is_saved else Decision.RECOMPUTE

    @override
    def __repr__(self) -> str:
        count = sum(self.placed.saves)
        return f"{count} of {len(self.placed.saves)} results"


class _InBlocks(threading.local):
    """Where the call is that asked last in a thread."""

    def __init__(self) -> None:
        self._call: Any = None
        self._of: OfBlock | None = None
        self._cursor: Cursor | None = None

    def cursor(self, policy: OfBlock) -> Cursor:
        call = here().nested_choices
        before = None if self._call is None else self._call()
        if self._cursor is None or self._of is not policy or call is not before:
            self._call = None if call is None else weakref.ref(call)
            self._of, self._cursor = policy, Cursor(0, policy.placed)
        elif call is None and self._cursor.at == len(policy.placed.names):
            self._cursor = Cursor(0, policy.placed)
        return self._cursor


_AT = _InBlocks()


class UnitWalker(Walker):
    """Walks over one record, in which blocks are recomputed as units.

    The choices are, by the first operation that makes them, results of a block in all
    of its calls; and, by a number below zero, a block that is no call: it saves all.
    """

    def __init__(
        self, record: StepRecord, blocks: Collection[str], around: Collection[str] = ()
    ) -> None:
        self._around = around  # modules that run again as a whole
        self._calls = outermost(call for call in record.calls if call.name in blocks)
        self._unit_of = {
            i: u for u, call in enumerate(self._calls) for i in call.operations
        }
        record, self._twins = with_twins(record, self._calls)
        self._always: dict[int, list[int]] = {}  # operations of a unit that run again
        for i, u in self._unit_of.items():
            if record.operations[i].always:
                self._always.setdefault(u, []).append(i)
        super().__init__(record)

    @property
    def blocks(self) -> dict[str, list[BlockCall]]:
        """The calls of each block."""
        found: dict[str, list[BlockCall]] = {}
        for call in self._calls:
            found.setdefault(call.name, []).append(call)
        return found

    # --- What may be recomputed ---

    @override
    def _recomputable(self) -> set[int]:
        found, record = set(), self.record
        used: dict[int, set[int | None]] = {}
        for i in record.forwards:
            op = record.operations[i]
            for n in (*op.reads, *op.makes, *op.writes):
                used.setdefault(n, set()).add(self._unit_of.get(i))
        for n, units in used.items():
            unit = self._unit_of.get(record.born[n])
            if (
                record.born[n] < 0
                or n in record.gathered
                or units == {None}
                or record.left[n] > record.turn_of(n)
            ):
                continue
            found.add(n)
            is_inside = unit is not None and units == {unit}
            if not is_inside or record.left[n] > self._calls[unit].end:
                self.always.add(n)
        self.always -= self._twins
        return found | self._twins

    @override
    def _fixed_bytes(self, again: set[int]) -> list[int]:
        found, record = super()._fixed_bytes(again), self.record
        for n in self._twins:  # they are no memory of their own until then
            for t in range(record.born[n] + 1, min(record.left[n], self._end)):
                found[t] -= record.sizes[n]
        return found

    @override
    def _choices(self, again: set[int]) -> dict[int, list[int]]:
        choices: dict[int, list[int]] = {}
        for k, calls in enumerate(self.blocks.values()):
            rows = [self._makers_in(call, again) for call in calls]
            is_same = all(
                [n for n, _ in row] == [n for n, _ in rows[0]] for row in rows
            )
            whole = [n for row in rows for _, (_, made) in row for n in made]
            choices[-1 - k] = sorted({*whole, *self._written_in(calls, again)})
            for each in zip(*rows, strict=True) if is_same else ():
                made = [n for _, (_, ns) in each for n in ns if self.record.sizes[n]]
                if made:
                    choices[each[0][1][0]] = made
        return {i: made for i, made in choices.items() if made}

    def _makers_in(
        self, call: BlockCall, again: set[int]
    ) -> list[tuple[str, tuple[int, list[int]]]]:
        """Return operations a policy is asked about, with what they make inside."""
        found: list[tuple[str, tuple[int, list[int]]]] = []
        for i in call.operations:
            op = self.record.operations[i]
            if is_asked(op):
                made = [n for n in op.makes if n in again and n not in self.always]
                found.append((op.name, (i, made if self._is_whole(i) else [])))
        return found

    def _is_whole(self, i: int) -> bool:
        """Say whether a call can save what an operation makes: nothing changes it."""
        op = self.record.operations[i]
        return not op.always and all(self.makers.get(n, [i]) == [i] for n in op.makes)

    def _written_in(self, calls: Any, again: set[int]) -> Iterable[int]:
        for call in calls:
            for i in call.operations:
                op = self.record.operations[i]
                yield from (n for n in op.makes if n in again and n not in self.always)

    # --- What runs again ---

    @override
    def _touched_by(self, op: StepOp) -> set[int]:
        is_like = op.name.split(".")[1] in LIKE
        return {*op.makes, *op.writes, *(() if is_like else op.reads)}

    @override
    def runs_with(self, i: int) -> Iterable[int]:
        return self._always.get(self._unit_of[i], ())

    @override
    def _ends(
        self, needed: set[int], saved: set[int], runs: set[int]
    ) -> dict[int, int]:
        """Return until when something refers to each storage.

        A call holds what its recompute reads: its inputs until its backward is over,
        and what it saves itself until the recompute has run.
        """
        record = self.record
        ends = {n: record.dies[n] if n in self.targets else 0 for n in needed}
        again = {self._unit_of[i] for i in runs}
        over = {u: max(ends[n] for n in self._groups[u]) for u in again}
        done = {u: self._done_at(u, saved) for u in again}
        for i in runs:
            u = self._unit_of[i]
            for n in self.touched[i]:
                is_own = self._unit_of.get(record.born[n]) == u
                ends[n] = max(ends.get(n, 0), done[u] if is_own else over[u])
        for u in again:
            for n in record.viewed.intersection(self._groups[u]):
                ends[n] = max(ends[n], done[u])
        return ends

    @override
    def _all_again(self, chosen: Iterable[int]) -> Iterable[int]:
        copied = [i for each in self.record.copied for i in each]
        return [*super()._all_again(chosen), *copied]

    # --- The walk ---

    @override
    def _fill(
        self, t: int, saved: set[int], recomputing: Recomputing, filled: set[int]
    ) -> int:
        highest = 0
        for unit, reads in self._asks.get(t, ()):
            if unit in filled or reads <= saved:
                continue
            filled.add(unit)
            for m in self._groups[unit]:
                if m not in saved:
                    highest = max(highest, recomputing.compute(m))
        return highest

    @override
    def _due(self, first: dict[int, int]) -> dict[int, int]:
        """Return when a unit is filled: when the first of its residuals is read."""
        # The residuals of each unit, in the order in which they are made.
        self._groups: dict[int, list[int]] = {}
        for n in sorted(self.targets - self.always, key=self.record.born.__getitem__):
            self._groups.setdefault(self._unit_of[self.record.born[n]], []).append(n)
        self._asks = self._recomputes_at()
        # For each unit, when that may be, and for what.
        self._times: dict[int, list[tuple[int, set[int]]]] = {}
        for t in sorted(self._asks):
            for u, reads in self._asks[t]:
                self._times.setdefault(u, []).append((t, reads))
        groups = self._groups.values()
        due = {n: min(first[m] for m in group) for group in groups for n in group}
        return first | due

    def _done_at(self, unit: int, saved: set[int]) -> int:
        """Return the operation before which a unit has been recomputed."""
        times = self._times[unit]
        return 1 + next(t for t, reads in times if not reads <= saved)

    def _recomputes_at(self) -> dict[int, list[tuple[int, set[int]]]]:
        """Return the units that an operation of the backward may have recomputed.

        That is so if not all that it reads is saved. A view of a parameter is not.
        """
        found: dict[int, list[tuple[int, set[int]]]] = {}
        for t, each in self._triggers.items():
            for n in set(each) - self.always:
                found.setdefault(t, []).append(
                    (self._unit_of[self.record.born[n]], {n})
                )
        nodes = {k: u for u, call in enumerate(self._calls) for k in call.nodes}
        for t in range(self._turn, self._end):
            op = self.record.operations[t]
            unit = nodes.get(op.node)
            if op.reads_view and unit in self._groups:
                found.setdefault(t, []).append((unit, {-1}))
        return found

    # --- What blocks do ---

    def policies(self, chosen: Iterable[int]) -> dict[str, OfBlock | None]:
        """Return the policies of the blocks in which something runs again."""
        saved, needed, runs = self.closure(chosen)
        # What Python holds is saved, too: it is there anyway.
        kept = (saved & needed) - (self.always - self.targets)
        record = self.record
        alive = {n for n, dies in enumerate(record.dies) if dies > record.turn_of(n)}
        kept |= alive - self.makers.keys()
        found: dict[str, OfBlock | None] = dict.fromkeys(self._around)
        for name, calls in self.blocks.items():
            if not any(i in runs for call in calls for i in call.operations):
                continue
            names: list[str] = []
            saves: list[bool] = []
            for i in calls[0].operations:
                op = self.record.operations[i]
                if is_asked(op):
                    names.append(op.name)
                    saves.append(any(map(kept.__contains__, op.makes)))
            none = len(names)
            placed = Placed(
                ("", 0, name, 0), (*names,), (*saves,), (0,) * none, (0,) * none
            )
            found[name] = OfBlock(placed)
        return found
