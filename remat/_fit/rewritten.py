"""Rewrites a record: what calls make again is more storages, and more operations.

Invariant: without a call that is recomputed, the rewritten record has the bytes of the
record. Rejected: a walk that knows of all this. It would ask for each storage, at each
operation, which of its copies is meant.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from remat._fit.record import STORED, BlockCall, StepOp, StepRecord


def is_asked(op: Any) -> bool:
    """Say whether a call asks its policy about an operation."""
    return bool(op.reads and op.makes and not op.writes and op.fate != STORED)


def outermost(calls: Iterable[BlockCall]) -> list[BlockCall]:
    """Return the calls that are in no other."""
    found: list[BlockCall] = []
    for call in sorted(calls, key=lambda call: (call.first, -call.end)):
        if call.operations and (not found or call.first >= found[-1].end):
            found.append(call)
    return found


# --- What a call changes in place, and returns ---


def with_twins(
    record: StepRecord, calls: Sequence[BlockCall]
) -> tuple[StepRecord, set[int]]:
    """Return a record in which what a call returns and makes again are two storages.

    A call cannot save what it changes in place. If its own backward reads such a
    result, it makes another one. Those are returned, too. Where the block is no call,
    they are the time that its graph holds the result longer than others do.
    """
    sizes, lives = [*record.sizes], _Lives(record)
    operations, twins = [*record.operations], set()
    for n in range(len(record.sizes)):
        call = next((c for c in calls if record.born[n] in c.operations), None)
        if call is None or not _needs_twin(record, n, call):
            continue
        twin, others = len(sizes), 0
        twins.add(twin)
        for i, op in enumerate(operations):
            if i in call.operations or op.node in call.nodes:
                operations[i] = _renamed(op, {n: twin}, makes=False)
            elif n in op.reads:
                others = i + 1
        first = operations[record.born[n]]
        operations[record.born[n]] = replace(
            first, makes=(*first.makes, twin), inside=first.inside - sizes[n]
        )
        sizes.append(sizes[n])
        others = max(record.left[n], others)
        lives.add(record.born[n], min(others, lives.dies[n]), lives.dies[n])
        lives.dies[n] = others
    made = replace(record, operations=tuple(operations), sizes=tuple(sizes))
    return lives.put_in(made), twins


def _needs_twin(record: StepRecord, n: int, call: BlockCall) -> bool:
    operations = [record.operations[i] for i in call.operations]
    makers = [op for op in operations if n in (*op.makes, *op.writes)]
    is_whole = len(makers) == 1 and is_asked(makers[0]) and not makers[0].always
    return (
        not is_whole
        and record.left[n] > call.end
        and any(n in op.reads and op.node in call.nodes for op in record.operations)
    )


def _renamed(op: StepOp, names: dict[int, int], *, makes: bool = True) -> StepOp:
    """Return an operation on other storages."""
    reads, made, writes = (
        tuple(names.get(n, n) for n in each) for each in (op.reads, op.makes, op.writes)
    )
    return replace(op, reads=reads, makes=made if makes else op.makes, writes=writes)


class _Lives:
    """When storages are made and freed."""

    def __init__(self, record: StepRecord) -> None:
        self.born, self.left, self.dies = (
            [*each] for each in (record.born, record.left, record.dies)
        )

    def add(self, born: int, left: int, dies: int) -> None:
        """Add a storage."""
        self.born.append(born)
        self.left.append(left)
        self.dies.append(dies)

    def make_room(self, at: int, count: int) -> None:
        """Have all from an operation on be some operations later.

        What is freed before it is freed by then.
        """
        self.born = [i if i < at else i + count for i in self.born]
        self.left = [i if i <= at else i + count for i in self.left]
        self.dies = [i if i <= at else i + count for i in self.dies]

    def put_in(self, record: StepRecord) -> StepRecord:
        """Return a record with these."""
        born, left, dies = tuple(self.born), tuple(self.left), tuple(self.dies)
        return replace(record, born=born, left=left, dies=dies)


# --- Modules around blocks ---


def with_nests(record: StepRecord, names: Collection[str]) -> StepRecord:
    """Return a record in which some modules run again, with the blocks in them.

    They save their inputs alone. When their backward begins, all of their operations
    run again, and the blocks in them are units then.
    """
    nests = outermost(call for call in record.calls if call.name in names)
    for nest in nests:
        record = _run_again(record, nest)
    return record


def _run_again(record: StepRecord, nest: BlockCall) -> StepRecord:
    """Return a record in which a call runs again before its backward."""
    operations, turn = record.operations, record.turn
    own = {t for t in range(turn, len(operations)) if operations[t].node in nest.nodes}
    if not own:
        return record
    at, count = min(own), len(nest.operations)
    lives, copies = _copied(record, nest, own, at)
    changed = [
        _renamed(op, copies) if t in own else op for t, op in enumerate(operations)
    ]
    changed[at:at] = [
        replace(_renamed(operations[i], copies), node=-1) for i in nest.operations
    ]

    def moved(each: range) -> range:
        is_copied = each.start in nest.operations
        by = at - nest.first if is_copied else count if each.start >= at else 0
        return range(each.start + by, each.stop + by)

    calls = [
        (call, moved(call.operations)) for call in record.calls if call is not nest
    ]
    made = replace(
        record,
        operations=tuple(changed),
        sizes=(*record.sizes, *(record.sizes[n] for n in copies)),
        calls=tuple(c._replace(first=r.start, end=r.stop) for c, r in calls),
        copied=(*map(moved, record.copied), range(at, at + count)),
        viewed=record.viewed | {copies[n] for n in record.viewed & copies.keys()},
    )
    return lives.put_in(made)


def _copied(
    record: StepRecord, nest: BlockCall, own: set[int], at: int
) -> tuple[_Lives, dict[int, int]]:
    """Return when storages live, with those that a call makes again at an operation."""
    lives = _Lives(record)
    copies: dict[int, int] = {}
    lives.make_room(at, len(nest.operations))
    readers: dict[int, set[int]] = {}
    for t, op in enumerate(record.operations):
        for n in op.reads:
            readers.setdefault(n, set()).add(t)
    for n, born in enumerate(record.born):
        if born not in nest.operations:
            continue
        copies[n] = len(lives.born)
        reads, is_inside = readers.get(n, set()), record.left[n] <= nest.end
        left = at + min(record.left[n], nest.end) - nest.first
        is_saved = record.dies[n] > record.turn and (is_inside or bool(reads & own))
        lives.add(born - nest.first + at, left, lives.dies[n] if is_saved else left)
        # What is returned lives on for others.
        others = () if is_inside else reads - own
        later = [t + 1 + (len(nest.operations) if t >= at else 0) for t in others]
        lives.dies[n] = max(lives.left[n], *later, 0)
    over = max((lives.dies[n] for n in copies.values()), default=0)
    for i in nest.operations:
        for n in {*record.operations[i].reads} - copies.keys():
            if record.born[n] >= 0:  # a call holds what it was given
                lives.dies[n] = max(lives.dies[n], over)
    return lives, copies
