"""Decides what a backward recomputes, what it is handed, and what it does without.

A record lists the operations of one forward and the storages that they touch, by
number. From the storages that the backward reads, `plan` walks back through what made
them, and stops where a policy lets a result be kept.

Invariant: a storage is needed as a whole or not at all. Whatever makes or changes a
needed one runs, in order; an operation that is left out has neither read nor written
anything that is needed. No tensors here: a record can be written by hand.
Rejected: dataflow between tensors. Views and in-place operations make one value of
many, and only their storage tells.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from remat._base.op import Op, Value


class Slot(int):
    """Stands for the output of that index in what an operation returned."""


class Passed(int):
    """Stands for the tensor argument of that index, returned as it is."""


def filled(form: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Return what an operation returns, by its form.

    Example:
        >>> filled((None, Slot(0), Passed(1)), ["out"], ["a", "b"])
        (None, 'out', 'b')
    """
    if isinstance(form, Slot):
        return outputs[form]
    if isinstance(form, Passed):
        return inputs[form]
    if isinstance(form, (list, tuple)):
        return type(form)(filled(part, outputs, inputs) for part in form)
    return form


_FIRST = Slot(0)


class Step(NamedTuple):
    """One operation of a record, with the storages it touches.

    Attributes:
        op: the operation.
        reads: the storages of its tensor arguments, in order.
        makes: the storages of its outputs, in order.
        writes: the storages that it changes in place.
        draws: whether it moves a random stream.
        may_draw: whether it would with other arguments.
        metadata_only: the outputs that do not depend on the values of its arguments.
        runs: whether it runs in any case: Python reads what it gives, or nobody knows.
        opaque: whether some of its tensors are of a class of their own, so that nobody
            knows what shares memory.
        watched: whether some are of a class that sees what is called: an operation of
            the function's or one that the class adds. It is kept, or it runs.
        result: what it returned, with a `Slot` or `Passed` for each tensor.
    """

    op: Op
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    draws: bool = False
    may_draw: bool = False
    metadata_only: tuple[int, ...] = ()
    runs: bool = False
    opaque: bool = False
    watched: bool = False
    result: Any = _FIRST

    @property
    def is_view(self) -> bool:
        """Whether it gives nothing but other looks at storages that it reads."""
        return bool(self.makes) and not self.writes and {*self.makes} <= {*self.reads}


class Pack(NamedTuple):
    """One tensor that a graph saved, of which a handle stands.

    Attributes:
        storage: its storage.
        value: how it looks at that.
        after: how many operations had run by then: a recompute stops there, at the
            latest.
        is_lazy: whether it is conjugated or negated when it is read.
    """

    storage: int
    value: Value
    after: int = 0
    is_lazy: bool = False

    def is_of(self, made: Value) -> bool:
        """Say whether it is a view of what was made with its storage, and no more."""
        return not self.is_lazy and self.value.dtype == made.dtype


@dataclass(frozen=True, slots=True)
class Record:
    """What one forward did.

    Attributes:
        steps: its operations, in order.
        inputs: the storage of each leaf.
        roots: for each output, the storages that its backward reads; where the graph
            holds handles, for each of them, what it stands for.
        outputs: the storage of each output.
        packs: what each handle stands for, None where there is none.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    roots: tuple[frozenset[int], ...]
    outputs: tuple[int | None, ...] = ()
    packs: tuple[Pack | None, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names given to values."""
        return frozenset().union(*(step.op.names for step in self.steps))


class Fate(Enum):
    """What becomes of an operation in a recomputation."""

    RUN = "recomputed"
    METADATA_ONLY = "recomputed, on no values"
    KEEP = "saved"
    DEAD = "dead"

    @property
    def is_run(self) -> bool:
        """Whether the operation runs again."""
        return self in {Fate.RUN, Fate.METADATA_ONLY}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recomputation does with each operation of a record.

    Attributes:
        fates: one for each.
        residuals: the outputs kept since the forward, as pairs of an operation and the
            index of its output, in order.
        needed: the leaves whose values are read.
        live: the storages whose values are there.
        linked: the leaves that what is kept was computed from: to be differentiated
            again, it has to be known what it depends on.
    """

    fates: tuple[Fate, ...]
    residuals: tuple[tuple[int, int], ...]
    needed: frozenset[int]
    live: frozenset[int]
    linked: frozenset[int] = frozenset()

    @property
    def kept(self) -> frozenset[int]:
        """The operations whose results are kept."""
        return frozenset(i for i, _ in self.residuals)


def plan(
    record: Record,
    saveable: Collection[int] = (),
    outputs: Iterable[int] | None = None,
    *,
    learned: Iterable[int] = (),
    prune: bool = True,
) -> Plan:
    """Decide what becomes of each operation.

    Args:
        record: what the forward did.
        saveable: the operations whose results a policy lets be kept. What a result
            shares memory with, or is changed in place, is not kept for all that.
        outputs: those whose cotangents there are; None for all.
        learned: more storages that are needed.
        prune: whether to leave out what is not needed. If not, all but what is kept is
            recomputed.

    Returns:
        The plan. With fewer outputs it needs no more, and of what it kept no more.

    Example:
        >>> sin = Op("sin")
        >>> steps = Step(sin, (0,), (1,)), Step(sin, (1,), (2,))
        >>> record = Record(steps, (0,), (frozenset({0, 1}),))
        >>> plan(record).fates
        (<Fate.RUN: 'recomputed'>, <Fate.DEAD: 'dead'>)
        >>> plan(record, saveable=[0]).residuals
        ((0, 0),)
    """
    walk, steps = _Walk(record, saveable), record.steps
    walk.need(learned)
    for j in range(len(record.roots)) if outputs is None else outputs:
        walk.need(record.roots[j])
    for i, step in enumerate(steps):
        if step.runs or step.draws or (step.watched and i not in walk.kept):
            walk.run(
                i,
                metadata_only=bool(step.metadata_only)
                and not (step.runs or step.watched),
            )
    fates = tuple(walk.fate(i, prune) for i in range(len(steps)))
    residuals = tuple(
        (i, k)
        for i in sorted(walk.kept)
        for k, s in enumerate(steps[i].makes)
        if s in walk.live or not prune
    )
    leaves = [*enumerate(record.inputs)]
    needed = frozenset(i for i, s in leaves if s in walk.live or not prune)
    sources = walk.sources(i for i, _ in residuals)
    linked = frozenset(i for i, s in leaves if s in sources)
    return Plan(fates, residuals, needed, frozenset(walk.live), linked)


class _Walk:
    """One walk back from what is needed."""

    def __init__(self, record: Record, saveable: Collection[int]) -> None:
        self._steps = record.steps
        self._makers = _makers(record)
        whole = [i for i in saveable if self._is_whole(i, record.inputs)]
        self._saveable = {*whole}
        self.live: set[int] = set()
        self.run_steps: set[int] = set()
        self.metadata_only: set[int] = set()
        self._todo: list[int] = []
        self.kept: set[int] = set()

    def _is_whole(self, i: int, inputs: Sequence[int]) -> bool:
        """Say whether the outputs of a step are its alone, and stay as it made them."""
        step = self._steps[i]
        alone = all(self._makers[s] == [i] and s not in inputs for s in step.makes)
        # Constants are made again, as in JAX: others may fill them past operations.
        made = bool(step.makes and step.reads)
        return alone and made and not (step.writes or step.runs or step.draws)

    def need(self, storages: Iterable[int]) -> None:
        """Need storages, and with them what made and changed them."""
        self._todo += storages
        while self._todo:
            s = self._todo.pop()
            if s in self.live:
                continue
            self.live.add(s)
            for i in self._makers.get(s, ()):
                if i in self._saveable:
                    self.kept.add(i)
                else:
                    self._run(i, metadata_only=self._is_metadata_only(i, s))

    def _is_metadata_only(self, i: int, storage: int) -> bool:
        """Say whether what a step puts in a storage depends on none that it reads."""
        step = self._steps[i]
        if not step.metadata_only:
            return False
        made = [k for k, s in enumerate(step.makes) if s == storage]
        return bool(made) and {*made} <= {*step.metadata_only}

    def run(self, i: int, *, metadata_only: bool) -> None:
        """Have a step run, whether or not what it makes is needed."""
        self._saveable.discard(i)
        self.kept.discard(i)
        self._run(i, metadata_only=metadata_only)
        self.need(())

    def _run(self, i: int, *, metadata_only: bool) -> None:
        step = self._steps[i]
        if metadata_only:
            self.metadata_only.add(i)
        elif i not in self.run_steps:
            self.run_steps.add(i)
            self._todo += (*step.reads, *step.makes)

    def sources(self, steps: Iterable[int]) -> set[int]:
        """Return the storages that some steps depend on."""
        todo, seen = [s for i in steps for s in self._steps[i].reads], set[int]()
        while todo:
            s = todo.pop()
            if s not in seen:
                seen.add(s)
                todo += (
                    r for i in self._makers.get(s, ()) for r in self._steps[i].reads
                )
        return seen

    def fate(self, i: int, prune: bool) -> Fate:
        """Return what becomes of a step."""
        step = self._steps[i]
        if i in self.kept:
            return Fate.KEEP
        if i in self.run_steps or not prune:
            return Fate.RUN
        if not self.live.isdisjoint(step.makes) and step.is_view:
            return Fate.RUN
        return Fate.METADATA_ONLY if i in self.metadata_only else Fate.DEAD


def _makers(record: Record) -> dict[int, list[int]]:
    """Return which steps make or change each storage."""
    makers = defaultdict(list)
    for i, step in enumerate(record.steps):
        # Nothing but views makes no storage; with something new among them, whoever
        # needs any of the storages needs the operation.
        made = step.makes if {*step.makes}.difference(step.reads) else ()
        for s in {*made, *step.writes}:
            makers[s].append(i)
    return makers
