"""Units under `torch.func.grad`, which keeps the graph of a step until it ends.

There a backward is recorded, too: what operations of the forward and of the backward
save is there until the end. A call that is recomputed is one operation of that graph.
It keeps its inputs, and its backward the gradients that it is given; what runs inside
is freed as in a step without torch.func.

Invariant: a block is recomputed as a whole, or is no call.
Rejected: the lifetimes of the step without torch.func. Its peak is half of this one.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from typing_extensions import override

from remat._fit.record import BlockCall, StepRecord, StepRecorder
from remat._fit.rewritten import outermost, with_nests
from remat._fit.simulate import TrainingStep, functional_gradients
from remat._fit.units import OfBlock, UnitWalker


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
        recorder.end()
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
    def _with_saved(
        self, saved: set[int], needed: set[int], runs: set[int]
    ) -> list[int]:
        found, sizes = super()._with_saved(saved, needed, runs), self.record.sizes
        again = {self._calls[self._unit_of[i]].nodes.start for i in runs}
        kept = {n for k, each in self._kept.items() if k not in again for n in each}
        # What is given in the forward is there anyway, as it is saved.
        late = (n for k in again for n in self._given.get(k, ()))
        kept.update(n for n in late if self.record.born[n] >= self._turn)
        change = [0] * (self._end + 1)
        for n in kept:
            change[min(self.record.dies[n], self._end)] += sizes[n]
        live = 0
        for t in range(self._end):
            live += change[t]
            found[t] += live
        return found

    @override
    def _ends(
        self, needed: set[int], saved: set[int], runs: set[int]
    ) -> dict[int, int]:
        ends = super()._ends(needed, saved, runs)
        for k in {self._calls[self._unit_of[i]].nodes.start for i in runs}:
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
