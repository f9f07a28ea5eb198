"""The forward of a chain: one sweep over its steps, which leaves checkpoints behind.

`_call` makes a `ChainCall`, and `_chain` a program of it.

Invariant: while it runs it holds one carry, the checkpoints, and what is collected.
Rejected: a graph of all steps. Which inputs the result depends on would be known for
certain, for the memory that a chain is there to save.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from typing_extensions import override

from remat._ambient.ambient import Ambient, noted
from remat._base.errors import CaptureError
from remat._base.types import Fn
from remat._capture.between import (
    NOTHING,
    Between,
    Nodes,
    RecomputedObjects,
    Unnoted,
    changed_in_forward,
)
from remat._capture.runs import ForwardRun, SnapshotRun, named_change
from remat._capture.snapshot import BoundFunction
from remat._graph.edges import reached_inputs
from remat._torch import current_layer
from remat._transform.call import Call
from remat._transform.checks import refuse_leaks
from remat._transform.function import Primal
from remat.chain._actions import (
    Action,
    Advance,
    Drop,
    Save,
    Schedule,
    Storage,
    without_records,
)
from remat.chain._binomial import Online
from remat.chain._steps import (
    Cut,
    Live,
    Steps,
    refuse_opaque,
    refuse_other_form,
    run_step,
    tensors_and_frame,
)
from remat.chain._stored import Columns, Stored


Progress: TypeAlias = Callable[[int], object] | None


class Outs(NamedTuple):
    """Where in the outputs of a chain the tensors of its last carry are, and others."""

    of_carry: Sequence[int]
    of_collected: Sequence[int]


class ChainCall(Call):
    """A call of a chain, taken apart. Its function is that of one step.

    Attributes:
        steps: how a step calls the function.
        schedule: of checkpoints.
        length: how many steps there are; for some chains only after the forward.
        initial: the inputs that are the initial carry, by index.
        scanned: the inputs that are cut into slices.
        outs: known after the forward.
        needs: which inputs some level differentiates.
        stores: whether the forward stores checkpoints.
        cut: how graphs end between two steps, while the forward runs.
    """

    __slots__ = (
        *("_changing", "_form", "_others", "_progress", "_results", "_stored", "cut"),
        *(
            "_is_noted",
            "initial",
            "length",
            "needs",
            "outs",
            "scanned",
            "schedule",
            "steps",
        ),
        "stores",
    )

    def __init__(
        self,
        fn: Fn,
        args: tuple[Any, ...],
        steps: Steps,
        schedule: Schedule,
        progress: Progress,
    ) -> None:
        super().__init__(fn, steps.label, args, {})
        self.steps, self.schedule, self._progress = steps, schedule, progress
        self.length = steps.length or 0
        index = {id(t): i for i, t in enumerate(self._inputs)}
        tensors, self._form = tensors_and_frame(args[0])
        if steps.is_repeated:
            refuse_opaque(self._form, steps.label)
        self.initial = [index[id(t)] for t in tensors]
        scanned = (
            () if steps.scanned is None else tensors_and_frame(args[steps.scanned])[0]
        )
        self.scanned = [index[id(t)] for t in scanned]
        self.outs = Outs((), ())
        self.needs: Sequence[bool] = ()
        self.stores = False
        self.cut: Cut | None = None
        # The last carry, and what was collected, until their places are known.
        self._results: Sequence[Live] = ()
        self._is_noted = False
        self._stored: Stored | None = None
        # The objects that change, by their nodes, and those nodes that do not change.
        self._changing: Nodes = {}
        self._others: Nodes = {}

    def first(self, inputs: Sequence[Tensor]) -> Live:
        """Return the initial carry."""
        tensors = [inputs[i] for i in self.initial]
        return Live(tensors, self._form, [self.needs[i] for i in self.initial])

    def cut_to(
        self, inputs: Sequence[Tensor], start: int, stop: int
    ) -> Sequence[Tensor]:
        """Return the inputs of the chain, with the slices of some steps."""
        cut, (first, end) = [*inputs], self.steps.slices(start, stop)
        for i in self.scanned:
            cut[i] = cut[i].narrow(0, first, end - first)
        return cut

    @override
    def body(self, fn: BoundFunction, run: ForwardRun) -> Fn:
        assert self._search is not None
        run.watch(self._search.walked())
        return functools.partial(self._run_all, run, fn.fn, fn.args)

    def _run_all(self, run: ForwardRun, fn: Any, args: Sequence[Any]) -> Any:
        sweep = _Sweep(self, run, fn, args)  # local: it leads to the call
        carry, collected = self._results = sweep.run_all()
        self.length, self._stored = sweep.count, sweep.stored
        self._changing, self._is_noted = sweep.changing, sweep.is_noting
        return carry.tree, collected.tree

    @override
    def hand_on(self, run: ForwardRun) -> None:
        """Note which objects changed, and have the user's hold it."""
        self.note_changes(run)
        super().hand_on(run)

    def note_changes(self, run: ForwardRun) -> None:
        """Note which objects changed: a recompute of later steps puts them back."""
        changed = self.changed(run)
        if changed:
            # Those that changed and changed back are in checkpoints alone.
            self._changing |= dict.fromkeys(changed)
            if not self._is_noted:
                self._stored = None  # of its carries nobody knows what objects held
                if self.steps.goes_on is not None:
                    what = named_change(*next(run.changes())[1:])
                    raise CaptureError(_LATE.format(label=self.steps.label, what=what))
        if self._changing:
            self._others = dict.fromkeys(node for node, _ in run.given())

    def changed(self, run: ForwardRun) -> Between:
        """Return what objects hold that differ from the call."""
        try:
            return changed_in_forward(run)
        except Unnoted as error:
            if not self.steps.is_repeated:
                return NOTHING
            label = self.steps.label
            raise CaptureError(CHANGED.format(label=label, what=error)) from None

    def recomputing(self, run: SnapshotRun) -> RecomputedObjects | None:
        """Return what notes and puts back the objects that change, if some do."""
        if not self._changing:
            return None
        return RecomputedObjects(run, self._changing, self._others)

    def forget_streams(self) -> None:
        """Forget where random streams were, from which no step drew."""
        if self._stored is not None:
            self._stored.without_streams()

    def take_stored(self) -> Stored | None:
        """Return the checkpoints of the forward; None if they were taken before."""
        stored, self._stored = self._stored, None
        return stored

    def note_outs(self, outs: Sequence[Tensor]) -> list[bool]:
        """Note where the tensors of the result are; return which require grad."""
        index = {id(t): j for j, t in enumerate(outs)}
        found, self._results = self._results, ()
        self.outs = Outs(*([index[id(t)] for t in part.tensors] for part in found))
        needs = (need for part in found for need in part.needs)
        flags = dict(zip(itertools.chain(*self.outs), needs, strict=True))
        return [flags[j] for j in range(len(outs))]

    @override
    def forward_done(self) -> None:
        super().forward_done()
        self._progress = self.cut = None


class ChainProgram(Primal):
    """A chain as a program. How it is evaluated is said by `_chain`."""

    __slots__ = ()
    call: ChainCall  # pyrefly: ignore[bad-override-mutable-attribute]


class _Sweep:
    """The forward of a chain, while it runs."""

    def __init__(
        self, call: ChainCall, run: ForwardRun, fn: Any, args: Sequence[Any]
    ) -> None:
        assert call.cut is not None
        self._call, self._run, self._fn, self._args = call, run, fn, args
        self._cut = cut = call.cut
        # Of what every step may change, the first one tells: to look takes time.
        self.is_noting = False
        self.changing: Nodes = {}
        tensors, frame = tensors_and_frame(args[0])
        needs = [t.requires_grad for t in tensors]
        self._live = self._first = Live([*map(cut.value, tensors)], frame, needs)
        self.count = 0
        self.stored = Stored() if call.stores else None
        self._columns = Columns(call.steps)
        self._ambient: Ambient | None = None
        self._progress = call._progress

    def run_all(self) -> tuple[Live, Live]:
        """Run all steps; return the last carry and what was collected."""
        for action in self._actions():
            match action:
                case Advance(start, stop):
                    self._advance(start, stop)
                case Save(step, storage) if self.stored is not None:
                    self._store(step, storage)
                case Drop(step) if self.stored is not None:
                    self.stored.drop(step)
        return self._live, self._columns.stacked()

    def _actions(self) -> Iterable[Action]:
        """Return what to do. Where the length is unknown, ask before each step."""
        steps, schedule = self._call.steps, self._call.schedule
        if steps.length is not None:
            yield from without_records(schedule.forward(self._call.length))
            return
        assert steps.goes_on is not None
        placer = schedule.online() if isinstance(schedule, Online) else None
        while self._goes_on(steps.goes_on):
            k = self.count
            yield from [Save(k)] if placer is None else placer.at(k)
            yield Advance(k, k + 1)

    def _goes_on(self, asked: Callable[[Any, Any], bool]) -> bool:
        """Ask whether there is another step."""
        looks = not self.count or self.is_noting
        before = self._run.noted_now() if looks else ()
        goes_on = asked(self._fn, self._live.tree)
        changed = next(self._run.changes(before), None)
        if changed is not None:
            label, what = self._call.steps.label, named_change(*changed[1:])
            raise CaptureError(_ASKED.format(label=label, what=what))
        return goes_on

    def _advance(self, start: int, stop: int) -> None:
        steps, snapshot = self._call.steps, self._call.snapshot
        called = self._fn, self._args
        for k in range(start, stop):
            live, row, leaves = run_step(
                steps, called, self._cut, self._live, k, look=self._look
            )
            if steps.is_repeated:
                refuse_other_form(live, self._first, k, steps.label)
            refuse_leaks(snapshot, leaves, ())
            del leaves
            if not self.count:
                self.is_noting = bool(self._call.changed(self._run))
            self._live, self.count = live, k + 1
            self._columns.add(row)
            if self._progress is not None:
                self._progress(k + 1)

    def _store(self, step: int, storage: Storage) -> None:
        """Store the live carry, with what objects hold and where streams are."""
        assert self.stored is not None
        self._ambient = noted(self._call.snapshot.streams, self._ambient)
        objects = self._call.changed(self._run) if self.is_noting else NOTHING
        self.changing |= dict.fromkeys(objects)
        ambient = self._ambient if step else None
        live = self._live._replace(ambient=ambient, objects=objects)
        self.stored.save(step, live, storage)

    def _look(self, outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Refuse a step that uses what is differentiated and was not found."""
        if self._call.snapshot.is_contained and current_layer() is None:
            return
        known = [*self._cut.inputs, *leaves]
        ids = {*map(id, known)}
        computed = [o for o in outs if id(o) not in ids]
        self._call.labelled(reached_inputs, computed, known)


CHANGED = (
    "remat: the steps of {label} changed {what}. A recompute of a later step would "
    "find it as it was before the first one. Only attributes, containers and variables "
    "of outer functions are put back, and only if they hold numbers, words and "
    "containers of these. Make it a part of the carry, or return it for each step."
)
_ASKED = (
    "remat: the condition of {label} changed {what}. A recompute does not ask the "
    "condition again. Make it a part of the carry, or change it in the body."
)
_LATE = (
    "remat: {label} changed {what}, and did not in the first step. Whether the "
    "condition did it, which a recompute does not ask again, is not known. Change it "
    "in each step, or make it a part of the carry."
)
