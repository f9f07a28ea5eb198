"""Rewrites a record: what calls make again is more storages, and more operations.

Invariant: without a call that is recomputed, the rewritten record has the bytes of the
record. Rejected: a walk that knows of all this. It would ask for each storage, at each
operation, which of its copies is meant.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from remat._fit.record import STORED, BlockCall, StepOp, StepRecord


def is_asked(op: Any) -> bool:
    """Say whether a call asks its policy about an operation."""
    return bool(op.reads and op.makes and not op.writes and op.fate != STORED)


def outermost(calls: Iterable[BlockCall]) -> list[BlockCall]:
    """Return the calls that are in no other."""
    found: list[BlockCall] = []
    spans = [(c.operations.start, -c.operations.stop, c) for c in calls if c.operations]
    for first, _, call in sorted(spans, key=itemgetter(0, 1)):
        if not found or first >= found[-1].operations.stop:
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
    operations, twins = [*record.operations], set()
    sizes, born, left, dies = map(list, _storages_of(record))
    for n in range(len(record.sizes)):
        call = next((c for c in calls if born[n] in c.operations), None)
        if call is None or not _needs_twin(record, n, call):
            continue
        twin, others = len(sizes), left[n]
        twins.add(twin)
        for i, op in enumerate(operations):
            if i in call.operations or op.node in call.nodes:
                operations[i] = _renamed(op, {n: twin}, makes=False)
            elif n in op.reads:
                others = max(others, i + 1)
        first = operations[born[n]]
        operations[born[n]] = replace(
            first, makes=(*first.makes, twin), inside=first.inside - sizes[n]
        )
        sizes.append(sizes[n])
        born.append(born[n])
        left.append(min(others, dies[n]))
        dies.append(dies[n])
        dies[n] = others
    return _with(record, operations, sizes, born, left, dies), twins


def _storages_of(record: StepRecord) -> tuple[Sequence[int], ...]:
    return record.sizes, record.born, record.left, record.dies


def _with(
    record: StepRecord, operations: Sequence[StepOp], *storages: Sequence[int]
) -> StepRecord:
    """Return a record of other operations, and of storages as `_storages_of` has."""
    sizes, born, left, dies = map(tuple, storages)
    lives = {"born": born, "left": left, "dies": dies}
    return replace(record, operations=tuple(operations), sizes=sizes, **lives)


def _needs_twin(record: StepRecord, n: int, call: BlockCall) -> bool:
    operations = [record.operations[i] for i in call.operations]
    makers = [op for op in operations if n in (*op.makes, *op.writes)]
    is_whole = len(makers) == 1 and is_asked(makers[0]) and not makers[0].always
    return (
        not is_whole
        and record.left[n] > call.operations.stop
        and any(n in op.reads and op.node in call.nodes for op in record.operations)
    )


def _renamed(op: StepOp, names: dict[int, int], *, makes: bool = True) -> StepOp:
    """Return an operation on other storages."""
    reads, made, writes = (
        tuple(names.get(n, n) for n in each) for each in (op.reads, op.makes, op.writes)
    )
    return replace(op, reads=reads, makes=made if makes else op.makes, writes=writes)


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
    storages, copies = _copied(record, nest, own, at)
    changed = [
        _renamed(op, copies) if t in own else op for t, op in enumerate(operations)
    ]
    changed[at:at] = [
        replace(_renamed(operations[i], copies), node=-1) for i in nest.operations
    ]

    def moved(each: range) -> range:
        is_copied = each.start in nest.operations
        back = at - nest.operations.start
        by = back if is_copied else count if each.start >= at else 0
        return range(each.start + by, each.stop + by)

    calls = [call for call in record.calls if call is not nest]
    return replace(
        _with(record, changed, *storages),
        calls=tuple(c._replace(operations=moved(c.operations)) for c in calls),
        copied=(*map(moved, record.copied), range(at, at + count)),
        viewed=record.viewed | {copies[n] for n in record.viewed & copies.keys()},
    )


def _copied(
    record: StepRecord, nest: BlockCall, own: set[int], at: int
) -> tuple[Sequence[list[int]], dict[int, int]]:
    """Return the storages, with those that a call makes again at an operation."""
    copies: dict[int, int] = {}
    count, end = len(nest.operations), nest.operations.stop
    later_by = at - nest.operations.start
    # All from there on is later. What is freed before it is freed by then.
    sizes, born = [*record.sizes], [i if i < at else i + count for i in record.born]
    left = [i if i <= at else i + count for i in record.left]
    dies = [i if i <= at else i + count for i in record.dies]
    readers: dict[int, set[int]] = {}
    for t, op in enumerate(record.operations):
        for n in op.reads:
            readers.setdefault(n, set()).add(t)
    for n, made in enumerate(record.born):
        if made not in nest.operations:
            continue
        copies[n] = len(born)
        reads, is_inside = readers.get(n, set()), record.left[n] <= end
        lets_go = min(record.left[n], end) + later_by
        is_saved = record.dies[n] > record.turn and (is_inside or bool(reads & own))
        sizes.append(sizes[n])
        born.append(made + later_by)
        left.append(lets_go)
        dies.append(dies[n] if is_saved else lets_go)
        # What is returned lives on for others.
        others = () if is_inside else reads - own
        later = [t + 1 + (count if t >= at else 0) for t in others]
        dies[n] = max(left[n], *later, 0)
    over = max((dies[n] for n in copies.values()), default=0)
    for i in nest.operations:
        for n in {*record.operations[i].reads} - copies.keys():
            if record.born[n] >= 0:  # a call holds what it was given
                dies[n] = max(dies[n], over)
    return (sizes, born, left, dies), copies
