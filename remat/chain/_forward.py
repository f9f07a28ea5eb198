"""The forward of a chain: one sweep over its steps, which leaves checkpoints behind.

`_call` makes a `ChainCall`, and `_chain` a program of it.

Invariant: while it runs it holds one carry, the checkpoints, and what is collected.
Rejected: a graph of all steps. Which inputs the result depends on would be known for
certain, for the memory that a chain is there to save.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from typing_extensions import override

from remat._ambient.ambient import Ambient, noted
from remat._ambient.modes import are_users_modes, modes_around
from remat._base import pytree
from remat._base.context import here
from remat._base.errors import CaptureError
from remat._base.pytree import TENSOR
from remat._base.types import INERT, Fn
from remat._graph.graph import reached_inputs
from remat._reach.moment import Moment
from remat._reach.reach import Reach, reach_of
from remat._torch.levels import current_layer
from remat._transform.call import Call
from remat._transform.checks import refuse_leaks
from remat._transform.function import Primal
from remat.chain import _steps
from remat.chain._actions import Action, Advance, Drop, Save, Schedule
from remat.chain._schedules import Online
from remat.chain._steps import Between, Columns, Cut, Frame, Live, Steps, Stored


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
        kept_from: by step, how much calls within had kept before it by their own rules.
        changes: whether steps change what others may read; known after the forward.
        makes_streams: whether a step left a generator that it made, which later steps
            may draw from.
    """

    def __init__(
        self,
        reach: Reach,
        fn: Fn,
        args: tuple[Any, ...],
        carry: tuple[Sequence[Tensor], Frame],
        steps: Steps,
        schedule: Schedule,
        progress: Progress,
    ) -> None:
        super().__init__(reach, fn, args, {})
        tensors, self._form = carry
        self.steps, self.schedule, self._progress = steps, schedule, progress
        self.length = steps.length or 0
        index = {id(t): i for i, t in enumerate(self._inputs)}
        self.initial = [index[id(t)] for t in tensors]
        scanned = (
            ()
            if steps.scanned is None
            else _steps.tensors_and_frame(args[steps.scanned])[0]
        )
        self.scanned = [index[id(t)] for t in scanned]
        self.kept_from: list[int] = []
        self.outs = Outs((), ())
        self.needs: Sequence[bool] = ()
        self.stores = self.changes = self.makes_streams = False
        self.cut: Cut | None = None
        # The last carry, and what was collected, until their places are known.
        self._results: Sequence[Live] = ()
        self._stored: Stored | None = None

    def first(self, inputs: Sequence[Tensor]) -> Live:
        """Return the initial carry."""
        tensors = [inputs[i] for i in self.initial]
        return Live(tensors, self._form, [self.needs[i] for i in self.initial])

    @override
    def instead(self, fn: Any, args: Sequence[Any]) -> Any:
        """Run all steps, with the function and the arguments of the forward."""
        sweep = _Sweep(self, fn, args)  # local: it leads to the call
        carry, collected = self._results = sweep.run_all()
        self.length, self._stored = sweep.count, sweep.stored
        self.changes = sweep.is_noting
        return carry.tree, collected.tree

    def noted(
        self, fn: Any, args: Sequence[Any], inputs: Sequence[Tensor] | None = None
    ) -> Between | None:
        """Note what all that the steps reach holds now, as at a call from here on.

        They run on these `inputs` of the chain; on those of the forward if None.
        """
        if inputs is None:
            assert self.cut is not None
            inputs = self.cut.inputs
        reach = Reach(fn, self.steps.label, args, {})
        known_streams = {stream.of for stream in self.reach.streams}
        if not known_streams.issuperset(stream.of for stream in reach.streams):
            self.makes_streams = True
        index = {id(t): i for i, t in enumerate(inputs)}
        numbers = [index.get(id(t)) for t in reach.take_tensors()]
        reach.not_as_a_whole()
        known = [i for i in numbers if i is not None]
        if len(known) == len(numbers):
            return Between(reach, known, modes_around() if are_users_modes() else None)
        if not self.steps.is_repeated:
            return None
        what = f"`{reach.name_of(numbers.index(None))}`"
        raise CaptureError(CHANGED.format(label=self.steps.label, what=what))

    def forget_streams(self) -> None:
        """Forget where random streams were, from which no step drew."""
        if self._stored is not None and not self.makes_streams:
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
        if self.changes:
            self.reach.not_as_a_whole()


def call_of(
    fn: Fn,
    args: tuple[Any, ...],
    steps: Steps,
    schedule: Schedule,
    progress: Progress = None,
) -> ChainCall | None:
    """Return a call of a chain; None, with a warning, where no walk can tell."""
    tensors, frame = carry = _steps.tensors_and_frame(args[0])
    names: list[str] = []  # of the tensors of the initial carry, for errors
    for path, leaf in zip(pytree.paths(frame.treedef), frame.leaves, strict=True):
        if leaf is TENSOR:
            names.append(f"carry{path}")
        elif steps.is_repeated and type(leaf) not in INERT:
            # It may hold a tensor, and cannot be looked into.
            kind = type(leaf).__qualname__
            raise TypeError(_OPAQUE.format(label=steps.label, path=path, kind=kind))
    named = dict(zip(names, tensors, strict=True))
    # Steps read the live carry, and not the container of the initial one.
    args = None, *args[1:]
    reach = reach_of(fn, steps.label, args, named)
    if reach is None:
        return None
    return ChainCall(reach, fn, args, carry, steps, schedule, progress)


class ChainProgram(Primal):
    """A chain as a program. How it is evaluated is said by `_chain`."""

    __slots__ = ()
    saves_kept = False
    call: ChainCall  # pyrefly: ignore[bad-override-mutable-attribute]


class _Sweep:
    """The forward of a chain, while it runs."""

    def __init__(self, call: ChainCall, fn: Any, args: Sequence[Any]) -> None:
        assert call.cut is not None
        self._call, self._fn, self._args = call, fn, args
        self._cut = cut = call.cut
        self._before = self._moment()
        # Whether the steps change what is noted with each checkpoint. Iterators do not
        # tell how far they were read. Modes may count what runs.
        self.is_noting = call.reach.has_iterators or are_users_modes()
        first = call.first(cut.inputs)
        self._live = first._replace(tensors=[*map(cut.value, first.tensors)])
        self._first = _steps.form_of(self._live)
        # A step of functions without variables hides no graph, and uses no other one.
        self._hides = not call.reach.is_contained
        self._looks = self._hides or current_layer() is not None
        self.count = 0
        self.stored = Stored(call.steps.on_disk) if call.stores else None
        self._columns = Columns(call.steps)
        self._ambient: Ambient | None = None
        self._progress = call._progress

    def _moment(self) -> Moment:
        return self._call.reach.moment(self._cut.inputs)

    def change(self, since: Moment | None = None) -> str:
        """Return what changed since a moment, or since the call; "" if nothing did.

        Each step is followed by a look, until one has changed something: a checkpoint
        of a later step is told from what holders held then.
        """
        return next((since or self._before).changes(), "")

    def run_all(self) -> tuple[Live, Live]:
        """Run all steps; return the last carry and what was collected."""
        for action in self._actions():
            match action:
                case Advance(start, stop):
                    self._advance(start, stop)
                case Save(step) if self.stored is not None:
                    self._store(step)
                case Drop(step) if self.stored is not None:
                    self.stored.drop(step)
        return self._live, self._columns.stacked()

    def _actions(self) -> Iterable[Action]:
        """Return what to do. Where the length is unknown, ask before each step."""
        steps, schedule = self._call.steps, self._call.schedule
        if steps.length is not None:
            yield from schedule.forward(self._call.length)
            return
        assert steps.goes_on is not None
        placer = schedule.online() if isinstance(schedule, Online) else None
        while self._goes_on(steps.goes_on):
            k = self.count
            yield from [Save(k)] if placer is None else placer.at(k)
            yield Advance(k, k + 1)

    def _goes_on(self, asked: Callable[[Any, Any], bool]) -> bool:
        """Ask whether there is another step."""
        # Until a step changes something, everything is as it was at the call.
        before = self._moment() if self.is_noting else self._before
        goes_on = asked(self._fn, self._live.tree)
        what = self.change(before)
        if what:
            label = self._call.steps.label
            raise CaptureError(_ASKED.format(label=label, what=what))
        return goes_on

    def _advance(self, start: int, stop: int) -> None:
        steps, reach = self._call.steps, self._call.reach
        called = self._fn, self._args
        kept = here().regions[-1][0]
        look = self._look if self._looks else None
        for k in range(start, stop):
            self._call.kept_from.append(len(kept))
            live, row, leaves = _steps.run_step(
                steps, called, self._cut, self._live, k, look=look
            )
            if steps.is_repeated:
                _steps.refuse_other_form(live, self._first, k, steps.label)
            if self._hides:
                refuse_leaks(reach, leaves, ())
            # They are the carry before. If they lived on, two carries would be alive.
            del leaves
            if not self.is_noting and self.change():
                self.is_noting = True
                self._call.noted(self._fn, self._args)  # or it is refused
            self._live, self.count = live, k + 1
            self._columns.add(row)
            if self._progress is not None:
                self._progress(k + 1)

    def _store(self, step: int) -> None:
        """Store the live carry, with what objects hold and where streams are."""
        assert self.stored is not None
        objects = None
        if self.is_noting and step:
            objects = self._call.noted(self._fn, self._args)
        self._ambient = noted((objects or self._call).reach.streams, self._ambient)
        # A recompute from carry 0 finds streams and objects as at the call.
        ambient = self._ambient if step else None
        live = self._live._replace(ambient=ambient, objects=objects)
        self.stored.save(step, live)

    def _look(self, outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Refuse a step that uses what is differentiated and was not found."""
        known = [*self._cut.inputs, *leaves]
        ids = {*map(id, known)}
        computed = [o for o in outs if id(o) not in ids]
        self._call.labelled(reached_inputs, computed, known)


_OPAQUE = (
    "remat: `carry{path}` of {label} is a {kind}. A carry is made of tensors, numbers "
    "and containers: make the class a dataclass, or register it with remat.register."
)
CHANGED = (
    "remat: the steps of {label} changed {what}, to a tensor that was computed in "
    "them. A recompute of a later step would not find it. Make it a part of the carry, "
    "or return it for each step."
)
_ASKED = (
    "remat: the condition of {label} changed {what}. A recompute does not ask the "
    "condition again. Make it a part of the carry, or change it in the body."
)
