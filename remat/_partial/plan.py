"""Decides what a backward recomputes, what the policy saves, and what is left out.

`plan` walks back from the storages that the backward reads through what made them, and
stops at results that the policy saves. The residuals of a call within are left out if
nothing else has a part of that call run: its own backward computes them, at once.

Invariant: a storage is needed as a whole or not at all. Whatever makes or changes it
runs again, in order. A record holds no tensors, and can be written by hand.
Rejected: dataflow between tensors. Views and in-place operations make one value of
many, and only their storage tells. To leave out the residuals of each call within, as
JAX's `remat3`: that runs products again whose results are read.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from remat._base.op import Op, Value


class Slot(int):
    """In the form of a result: the output of that index."""


class Passed(int):
    """In the form of a result: the tensor argument of that index, returned as it is."""


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
    """One operation of a record, with the storages that it touches."""

    op: Op
    reads: tuple[int, ...] = ()  # the storage of each tensor argument
    makes: tuple[int, ...] = ()  # the storage of each output
    writes: tuple[int, ...] = ()  # changes in place
    draws: bool = False  # moves a random stream
    may_draw: bool = False  # would with other arguments
    # The outputs that depend on no value of its arguments, only on metadata.
    metadata_only: tuple[int, ...] = ()
    # In every recompute: Python reads its result, or what it does is not known.
    always_runs: bool = False
    # A tensor is of a subclass that does not tell which tensors share memory.
    hides_aliases: bool = False
    # An argument is of a subclass, which may see the operation. Then the operation is
    # saved or runs again, and is never left out.
    on_subclass: bool = False
    result: Any = _FIRST  # with a `Slot` or `Passed` for each tensor

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective that writes in place."""
        return bool(self.writes) and getattr(self.op.func, "namespace", "") == "c10d"

    @property
    def is_view(self) -> bool:
        """Whether its outputs are all views of storages that it reads."""
        return bool(self.makes) and not self.writes and {*self.makes} <= {*self.reads}


class Pack(NamedTuple):
    """One tensor that a graph saved, for which it holds a handle."""

    storage: int
    value: Value
    # How many operations had run. A recompute that fills this handle last stops there.
    after: int = 0
    is_lazy: bool = False  # it is conjugated or negated when it is read
    version: int = 0  # of its storage: whether it was changed in place by then

    def is_of(self, made: Value) -> bool:
        """Say whether it is a view of the output that was made with its storage."""
        return not self.is_lazy and self.value.dtype == made.dtype


class Within(NamedTuple):
    """The residuals of a call within, and the inputs that it needs without them."""

    inputs: frozenset[int]
    residuals: frozenset[int]


@dataclass(frozen=True, slots=True)
class Record:
    """What one forward did."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]  # the storage of each input
    # For each output, the storages that its backward reads. Where the graph holds
    # handles: for each handle, the storage that it stands for.
    roots: tuple[frozenset[int], ...]
    outputs: tuple[int | None, ...] = ()  # the storage of each output
    packs: tuple[Pack | None, ...] = ()  # None where the tensor itself is saved
    inside: tuple[tuple[int, int], ...] = ()  # wrappers of one tensor, and its storage
    transforms: tuple[int, ...] = ()  # of torch.func around it, but for `grad`
    sets_hooks: bool = False  # which may read any input when the backward runs them
    within: tuple[Within, ...] = ()  # in the order in which they ended

    @property
    def names(self) -> frozenset[str]:
        """The names given to values."""
        return frozenset().union(*(step.op.names for step in self.steps))


class Fate(Enum):
    """What becomes of an operation in a recompute."""

    RECOMPUTED = "recomputed"
    # As only its metadata, or that it draws, matters.
    METADATA_ONLY = "run on arbitrary values"
    SAVED = "saved"
    DEAD = "dead"

    @property
    def is_run(self) -> bool:
        """Whether the operation runs again."""
        return self in {Fate.RECOMPUTED, Fate.METADATA_ONLY}


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What a recompute does with each operation of a record."""

    fates: tuple[Fate, ...]
    # What the forward saves: the index of an operation, and that of its output.
    residuals: tuple[tuple[int, int], ...]
    needed: frozenset[int]  # the inputs whose values are read, by index
    live: frozenset[int]  # the storages whose values a recompute has
    # The inputs that residuals were computed from, and depend on where they are
    # differentiated again.
    residual_sources: frozenset[int] = frozenset()

    def may_drop(self, i: int, *, is_differentiated: bool) -> bool:
        """Say whether no recompute reads an input, however often it is differentiated.

        `is_differentiated` says whether a node leads from residuals to their inputs.
        """
        is_source = is_differentiated and i in self.residual_sources
        return i not in self.needed and not is_source

    @property
    def saved(self) -> frozenset[int]:
        """The operations whose results are saved."""
        return frozenset(i for i, _ in self.residuals)


def plan(
    record: Record,
    saveable: Collection[int] = (),
    targets: Iterable[int] | None = None,
    *,
    extra_roots: Iterable[int] = (),
    prune: bool = True,
) -> CallPlan:
    """Decide what becomes of each operation.

    The policy saves the results of `saveable`. One that shares memory with another
    tensor, or is changed in place, is recomputed anyway; one that a collective
    overwrites is saved as the collective leaves it. `targets` are the handles that a
    backward reads, or the outputs that have cotangents, by index (None for all);
    `extra_roots` are more storages that are needed. With fewer targets a plan needs no
    more, and reads no more residuals. Without `prune` all that is not saved is
    recomputed.

    Example:
        >>> sin = Op("sin")
        >>> steps = Step(sin, (0,), (1,)), Step(sin, (1,), (2,))
        >>> record = Record(steps, (0,), (frozenset({0, 1}),))
        >>> plan(record).fates
        (<Fate.RECOMPUTED: 'recomputed'>, <Fate.DEAD: 'dead'>)
        >>> plan(record, saveable=[0]).residuals
        ((0, 0),)
    """
    walk, steps = _WalkBack(record, saveable), record.steps
    walk.need(extra_roots)
    ends = range(len(record.roots)) if targets is None else targets
    read = frozenset().union(*(record.roots[j] for j in ends))
    within = [call for call in record.within if prune and read & call.residuals]
    walk.need(read.difference(*(call.residuals for call in within)))
    for i, step in enumerate(steps):
        forced = step.always_runs or step.on_subclass
        if step.always_runs or step.draws or (step.on_subclass and i not in walk.saved):
            walk.run(i, metadata_only=bool(step.metadata_only) and not forced)
    for call in reversed(within):
        walk.need(call.inputs if walk.is_late(call) else read & call.residuals)
    fates = tuple(walk.fate(i, prune) for i in range(len(steps)))
    residuals = tuple(
        (i, k)
        for i in sorted(walk.saved)
        for k, s in enumerate(steps[i].makes)
        if s in walk.live or not prune
    )
    inputs = [*enumerate(record.inputs)]
    keeps_all = record.sets_hooks or not prune
    needed = frozenset(i for i, s in inputs if s in walk.live or keeps_all)
    sources = walk.sources(i for i, _ in residuals)
    residual_sources = frozenset(i for i, s in inputs if s in sources)
    return CallPlan(fates, residuals, needed, frozenset(walk.live), residual_sources)


class _WalkBack:
    """One walk back from what is needed."""

    def __init__(self, record: Record, saveable: Collection[int]) -> None:
        self._steps = record.steps
        self._makers = makers_of(record)
        self._linked = _linked(record)
        self._overwrites = overwrites(record)
        whole = [i for i in saveable if self._is_whole(i, record.inputs)]
        self.saveable = {*whole}
        self.live: set[int] = set()
        self.run_steps: set[int] = set()
        self.metadata_only: set[int] = set()
        self._todo: list[int] = []
        self.saved: set[int] = set()

    def _is_whole(self, i: int, inputs: Sequence[int]) -> bool:
        """Say whether no other step makes or changes the outputs of a step."""
        step = self._steps[i]
        overwritten = any(i in made for made in self._overwrites.values())
        alone = overwritten or all(
            self._makers[s] == [i] and s not in inputs and not self._is_shared(s)
            for s in step.makes
        )
        # Constants are recomputed, as in JAX: Python may fill one without an operation.
        made = bool(step.makes and (step.reads or overwritten))
        return alone and made and not (step.writes or step.always_runs or step.draws)

    def _is_shared(self, storage: int) -> bool:
        """Say whether a step writes to a storage by way of a wrapper, or inside one."""
        linked = self._linked.get(storage, ())
        makers = (i for s in linked for i in self._makers.get(s, ()))
        return any(self._steps[i].writes for i in makers)

    def _is_covered(self, i: int) -> bool:
        """Say whether all that a collective overwrites is saved."""
        made = self._overwrites.get(i)
        return made is not None and made <= self.saveable

    def need(self, storages: Iterable[int]) -> None:
        """Need storages, and with them what made and changed them."""
        self._todo += storages
        while self._todo:
            s = self._todo.pop()
            if s in self.live:
                continue
            self.live.add(s)
            self._todo += self._linked.get(s, ())
            for i in self._makers.get(s, ()):
                if i in self.saveable:
                    self.saved.add(i)
                elif not self._is_covered(i):
                    self._run(i, metadata_only=self._is_metadata_only(i, s))

    def _is_metadata_only(self, i: int, storage: int) -> bool:
        """Say whether what a step puts in a storage depends on no value it reads."""
        step = self._steps[i]
        if not step.metadata_only:
            return False
        made = [k for k, s in enumerate(step.makes) if s == storage]
        return bool(made) and {*made} <= {*step.metadata_only}

    def run(self, i: int, *, metadata_only: bool) -> None:
        """Have a step run, whether or not what it makes is needed."""
        self.saveable.discard(i)
        self.saved.discard(i)
        self._run(i, metadata_only=metadata_only)
        self.need(())

    def _run(self, i: int, *, metadata_only: bool) -> None:
        step = self._steps[i]
        if metadata_only:
            self.metadata_only.add(i)
        elif i not in self.run_steps:
            self.run_steps.add(i)
            self._todo += (*step.reads, *step.makes)

    def is_late(self, call: Within) -> bool:
        """Say whether only its residuals would have a call within run, or be saved."""
        todo, seen = [*call.residuals], {*call.inputs}
        while todo:
            s = todo.pop()
            if s in seen:
                continue
            seen.add(s)
            makers = self._makers.get(s, ())
            steps = [self._steps[i] for i in makers]
            is_run = not (self.run_steps | self.metadata_only).isdisjoint(makers)
            is_run = is_run or s in self.live or not self.saveable.isdisjoint(makers)
            if is_run or s in self._linked or any(step.writes for step in steps):
                return False
            todo += (r for step in steps for r in step.reads)
        return True

    def sources(self, steps: Iterable[int]) -> set[int]:
        """Return the storages that some steps depend on."""
        todo, seen = [s for i in steps for s in self._steps[i].reads], set()
        while todo:
            s = todo.pop()
            if s not in seen:
                seen.add(s)
                makers = (self._steps[i] for i in self._makers.get(s, ()))
                todo += (r for step in makers for r in step.reads)
        return seen

    def fate(self, i: int, prune: bool) -> Fate:
        """Return what becomes of a step."""
        step = self._steps[i]
        # A collective is saved with what it overwrote.
        if i in self.saved or (
            self._is_covered(i) and self._overwrites[i] & self.saved
        ):
            return Fate.SAVED
        if i in self.run_steps or not prune:
            return Fate.RECOMPUTED
        if not self.live.isdisjoint(step.makes) and step.is_view:
            return Fate.RECOMPUTED
        return Fate.METADATA_ONLY if i in self.metadata_only else Fate.DEAD


def saveable_in(record: Record, steps: Collection[int]) -> set[int]:
    """Return which of these steps a plan saves if their results are needed."""
    return {*_WalkBack(record, steps).saveable}


def overwrites(record: Record) -> dict[int, frozenset[int]]:
    """Return the steps whose results collectives replace in place, by collective.

    Nothing else has read such a result by then, and the collective writes nothing else.
    """
    steps = record.steps
    if not any(step.is_collective for step in steps):
        return {}
    makers = makers_of(record)
    found: dict[int, frozenset[int]] = {}
    for j, step in enumerate(steps):
        if not step.is_collective or step.always_runs or step.draws:
            continue
        made = [makers[s][0] for s in step.writes if makers[s][1:] == [j]]
        fresh = all(
            len(steps[i].makes) == 1
            and s not in record.inputs
            and not any(s in steps[k].reads for k in range(i + 1, j))
            for i, s in zip(made, step.writes, strict=False)
        )
        if len(made) == len(step.writes) and fresh:
            found[j] = frozenset(made)
    return found


def _linked(record: Record) -> dict[int, list[int]]:
    """Return, for wrappers and for what they wrap, the storages of the same values."""
    linked = defaultdict(list)
    for wrapper, inner in record.inside:
        linked[wrapper].append(inner)
        linked[inner].append(wrapper)
    return linked


def makers_of(record: Record) -> dict[int, list[int]]:
    """Return which steps make or change each storage."""
    makers, inside = defaultdict(list), dict(record.inside)
    for i, step in enumerate(record.steps):
        # A step that returns only views makes no storage. If one output is new, then
        # the step is needed as soon as any of its outputs is.
        read = {*step.reads, *(inside.get(s, s) for s in step.reads)}
        made = step.makes if {*step.makes} - read else ()
        for s in {*made, *step.writes}:
            makers[s].append(i)
    return makers
