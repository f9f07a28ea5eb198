"""Plans by blocks from the walk and the program of plans for a step.

In: a record with the calls of blocks. Out: for each block whether it is recomputed, and
which of its results are saved then.

A *unit* is a call of a block: a span of the record. It differs from a scope in two
rules. Its recompute fills all its residuals at once, when the first one is read. And
what leaves a unit, or is there before it, is always saved, as a call keeps its inputs.

Invariant: all calls of a block have the same decisions, as they share what they follow.
Under torch.func a block is recomputed as a whole, or is no call.
Rejected: to simulate each block under several policies, and to distribute memory by
what that measures. It took sixty times as long, and found nothing better. Under
torch.func, the lifetimes of a step without it: its peak is half of this one.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

from typing_extensions import override

from remat._base.absent import LIKE
from remat._fit.record import BlockCall, StepOp, StepRecord, StepRecorder
from remat._fit.rewritten import is_asked, outermost, with_nests, with_twins
from remat._fit.simulate import TrainingStep, functional_gradients
from remat._fit.walk import Again, Recomputing, Walker
from remat._scope.following import OfBlock, Placed


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
            if not is_inside or record.left[n] > self._calls[unit].operations.stop:
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
            inside = (self.record.operations[i] for c in calls for i in c.operations)
            made = {n for op in inside for n in op.makes if n in again}
            choices[-1 - k] = sorted(made - self.always)
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

    # --- What runs again ---

    @override
    def _touched_by(self, op: StepOp) -> set[int]:
        is_like = op.name.split(".")[1] in LIKE
        return {*op.makes, *op.writes, *(() if is_like else op.reads)}

    @override
    def runs_with(self, i: int) -> Iterable[int]:
        return self._always.get(self._unit_of[i], ())

    @override
    def _ends(self, again: Again) -> dict[int, int]:
        """Return until when something refers to each storage.

        A call holds what its recompute reads: its inputs until its backward is over,
        and what it saves itself until the recompute has run.
        """
        record, (saved, needed, runs) = self.record, again
        ends = {n: record.dies[n] if n in self.targets else 0 for n in needed}
        units = {self._unit_of[i] for i in runs}
        over = {u: max(ends[n] for n in self._groups[u]) for u in units}
        done = {u: self._done_at(u, saved) for u in units}
        for i in runs:
            u = self._unit_of[i]
            for n in self.touched[i]:
                is_own = self._unit_of.get(record.born[n]) == u
                ends[n] = max(ends.get(n, 0), done[u] if is_own else over[u])
        for u in units:
            for n in record.viewed.intersection(self._groups[u]):
                ends[n] = max(ends[n], done[u])
        return ends

    @override
    def _all_again(self, chosen: Iterable[int]) -> Iterable[int]:
        copied = [i for each in self.record.copied for i in each]
        return [*super()._all_again(chosen), *copied]

    # --- The walk ---

    @override
    def _fill(self, t: int, recomputing: Recomputing) -> int:
        highest, saved = 0, recomputing.saved
        for unit, reads in self._asks.get(t, ()):
            if unit in recomputing.filled or reads <= saved:
                continue
            recomputing.filled.add(unit)
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


# --- Under `torch.func.grad`, which keeps the graph of a step until it ends ---
#
# There a backward is recorded, too: what operations of the forward and of the backward
# save is there until the end. A call that is recomputed is one operation of that graph.
# It keeps its inputs, and its backward the gradients that it is given; what runs inside
# is freed as in a step without torch.func.


def record_functional(
    step: TrainingStep, found: StepRecord, alone: StepRecorder
) -> StepRecord:
    """Record a step under `torch.func.grad`."""
    recorder = StepRecorder(
        costs=True, blocks=dict.fromkeys(c.name for c in found.calls)
    )

    @contextmanager
    def around() -> Iterator[None]:
        yield
        recorder.turn = len(recorder.operations)

    with recorder.watching(step) as watched:
        result = functional_gradients(watched._replace(around=around))
        recorder.settle()
        made = recorder.record(alone)
    del result
    each = zip(made.operations, found.operations, strict=False)
    forward = [replace(op, fate=as_is.fate) for op, as_is in each][: made.turn]
    operations = *forward, *made.operations[made.turn :]
    return replace(made, operations=operations).updated(found.update)


class FunctionalWalker(UnitWalker):
    """Walks over the record of a step under `torch.func.grad`.

    The choices are, by a number below zero, the blocks that are no calls.
    """

    is_solved = False

    def __init__(
        self, record: StepRecord, blocks: Collection[str], around: Collection[str] = ()
    ) -> None:
        # By the first node of a call: what its graph would keep, and what it is given.
        self._kept: dict[int, list[int]] = {}
        self._given: dict[int, set[int]] = {}
        record, held = self._as_freed(record, {*blocks, *around}, around)
        record = with_nests(record, around)
        end, dies = len(record.operations), [*record.dies]
        for n in held:
            dies[n] = end
        record = replace(record, dies=tuple(dies))
        super().__init__(record, {*blocks} - {*around}, around)
        for k, calls in enumerate(self.blocks.values()):
            kept = [n for call in calls for n in self._kept.get(call.nodes.start, ())]
            if -1 - k in self.choices:
                self.choices[-1 - k] = sorted({*self.choices[-1 - k], *kept})
            for n in kept:
                left, dies = self.record.left[n], self.record.dies[n]
                self.idle[n] = min(left, dies), self._end

    @override
    def left_out(self, chosen: Iterable[int]) -> list[int]:
        return sorted(self.choices.keys() - chosen)

    @override
    def _all_again(self, chosen: Iterable[int]) -> Iterable[int]:
        units = {self._unit_of[i] for i in self.closure(chosen).runs}
        whole = [i for u in sorted(units) for i in self._calls[u].operations]
        return [*whole, *(i for each in self.record.copied for i in each)]

    @override
    def policies(self, chosen: Iterable[int]) -> dict[str, OfBlock | None]:
        return dict.fromkeys(super().policies(chosen))

    def _as_freed(
        self, record: StepRecord, names: Collection[str], around: Collection[str]
    ) -> tuple[StepRecord, set[int]]:
        """Return a record in which calls keep nothing; note what they would keep.

        Returns also what modules around blocks are given, which they hold.
        """
        calls = outermost(call for call in record.calls if call.name in names)
        unit_of = _units_of(record, calls)
        users: dict[int, set[int | None]] = {}
        last: dict[int, int] = {}
        for i, op in enumerate(record.operations):
            for n in (*op.reads, *op.makes, *op.writes):
                users.setdefault(n, set()).add(unit_of.get(i))
                last[n] = i + 1
        end, dies = len(record.operations), [*record.dies]
        whole = {k for k, call in enumerate(calls) if call.name in around}
        held: set[int] = set()
        for n, born in enumerate(record.born):
            if born < 0 or dies[n] > end:  # it is passed, or a result
                continue
            own, is_made_before = unit_of.get(born), born < record.turn
            left = record.left[n] if is_made_before else 0
            is_inside = own is not None and users[n] == {own} and left <= end
            if is_inside and dies[n] == end:
                if own not in whole:
                    self._kept.setdefault(calls[own].nodes.start, []).append(n)
                dies[n] = max(last[n], left)
            for k in (k for k in users[n] if k is not None and k != own):
                if k in whole:
                    held.add(n)
                else:
                    self._given.setdefault(calls[k].nodes.start, set()).add(n)
        return replace(record, dies=tuple(dies)), held

    @override
    def _choices(self, again: set[int]) -> dict[int, list[int]]:
        return {i: made for i, made in super()._choices(again).items() if i < 0}

    @override
    def _with_saved(self, again: Again) -> list[int]:
        found, sizes = super()._with_saved(again), self.record.sizes
        units = {self._calls[self._unit_of[i]].nodes.start for i in again.runs}
        kept = {n for k, each in self._kept.items() if k not in units for n in each}
        # What is given in the forward is there anyway, as it is saved.
        late = (n for k in units for n in self._given.get(k, ()))
        kept.update(n for n in late if self.record.born[n] >= self._turn)
        change = [0] * (self._end + 1)
        for n in kept:
            change[min(self.record.dies[n], self._end)] += sizes[n]
        return [a + b for a, b in zip(found, accumulate(change), strict=False)]

    @override
    def _ends(self, again: Again) -> dict[int, int]:
        ends = super()._ends(again)
        for k in {self._calls[self._unit_of[i]].nodes.start for i in again.runs}:
            for n in ends.keys() & self._given.get(k, ()):
                ends[n] = self._end
        return ends


def _units_of(record: StepRecord, calls: Sequence[BlockCall]) -> dict[int, int]:
    """Return the call that each operation is of, in the forward or the backward."""
    found = {i: k for k, call in enumerate(calls) for i in call.operations}
    nodes = {node: k for k, call in enumerate(calls) for node in call.nodes}
    for t in range(record.turn, len(record.operations)):
        k = nodes.get(record.operations[t].node)
        if k is not None:
            found[t] = k
    return found
