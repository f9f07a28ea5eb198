"""Runs a call once for a report: its operations, the calls in it, and what reads what.

It is the forward of a `remat` call, recorded whatever its options are; nothing is
saved, and nothing is recomputed.

Invariant: a call with the same arguments does what was found, but for what calls in it
are asked to do (`ask`). Graphs, streams, gradients and buffers are as they were after.
Rejected: a trace on fake tensors. Some operations choose another kernel there, and the
user's code may look at values.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.absent import Absent
from remat._base.calls import in_place
from remat._base.context import here
from remat._base.labels import name_in
from remat._base.parts import parts
from remat._base.types import Fn
from remat._graph.graph import handles_at, nodes_of
from remat._graph.handles import PackedOutside, stored_by
from remat._live.reach import Reach
from remat._partial.cache import CallKind, owner_of
from remat._partial.candidates import moves
from remat._partial.decide import ACCUMULATES, Situation
from remat._partial.options import Options
from remat._partial.plan import Fate, Record
from remat._partial.recorder import Recorder
from remat._partial.replay import is_droppable
from remat._partial.values import Storages
from remat._report.inputs import is_parameter, tensors_in, undoing
from remat._report.labels import reader_of, stream_name
from remat._torch import base_tensor, current_task
from remat._transform.lowering import Lowering
from remat._transform.saved import Saved


AskOptions = Callable[..., Any]  # of (block, lowering, args): the options of a call


@dataclass(frozen=True, slots=True)
class CallWithin:
    """A call of a rematerialized function in the function that is examined."""

    around: int  # the index of the call that it runs in; -1 if it runs in none
    # Storages: those that it keeps alive to be recomputed; that its recompute holds for
    # the backward; that its policy offloads.
    inputs: frozenset[int]
    holds: frozenset[int]
    away: frozenset[int]


class _Sizes(Storages):
    """Numbers storages, and notes the bytes of each."""

    __slots__ = ("sizes",)

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    @override
    def number(self, tensor: Tensor) -> int:
        number = super().number(tensor)
        if number not in self.sizes:
            storages = [part.untyped_storage() for part in parts(tensor)]
            self.sizes[number] = sum(s.nbytes() for s in storages)
        return number


class _Asks:
    """Any policy may be asked about the record."""

    asks_modules = True


class CallNotes(Recorder):
    """Records, and notes the readers of storages, and nested calls."""

    tells_modules = True  # to policies that are asked about the record

    def __init__(self, leaves: Sequence[Tensor], ask: AskOptions | None) -> None:
        self._ask = ask
        self.storages = _Sizes()
        # What reads each storage in the backward, and which ones the graph saves
        # itself, without a handle.
        self.readers: dict[int, dict[str, None]] = {}
        self.itself: set[int] = set()
        self.differentiates = False  # whether a backward runs in the run
        # For each operation, the calls that it runs in, the outermost first.
        self._inside: list[tuple[Saved, ...]] = []
        # For each call: for each handle its storage, and how many operations ran
        # before it.
        self._packed: dict[int, tuple[Saved, dict[int, tuple[int, int]]]] = {}
        # For each call, the one that it runs in.
        self._around: dict[int, Saved | None] = {}
        super().__init__(leaves, None, self.storages)

    @override
    def note(self, func: Any, arguments: Any, results: Any, *, draws: bool) -> None:
        super().note(func, arguments, results, draws=draws)
        self._inside.append(here().inside[1:])
        self.differentiates |= current_task() >= 0

    def observe(
        self, call: Saved, observe: Callable[[int, Tensor | None], None] | None
    ) -> Callable[[int, Tensor | None], None]:
        """Return a function that is called with each tensor that a call saves."""
        packed: dict[int, tuple[int, int]] = {}
        is_first = not self._packed
        self._packed[id(call)] = call, packed
        around = here().inside
        self._around[id(call)] = around[-1] if around else None

        def both(position: int, tensor: Tensor | None) -> None:
            if is_first:
                self.saved_storages.pack(tensor)
            if tensor is not None:
                number = self.storages.number(base_tensor(tensor))
                packed[position] = number, len(self.steps)
            if observe is not None:
                observe(position, tensor)

        return both

    def entered(self, call: Any, inputs: Sequence[Tensor]) -> None:
        """Be told of the forward of a call under torch.func, which saves no handles."""

    def asked(
        self, block: Any, lowering: Lowering, args: tuple[Any, ...]
    ) -> tuple[Lowering, Options]:
        """Return how a rematerialized function in the function is called."""
        if self._ask is None:
            return lowering, block._options
        return self._ask(block, lowering, args)

    def note_readers(self, outs: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
        """Note which nodes of the graph read each storage."""
        numbers: dict[int, int] = {}
        for call, packed in self._packed.values():
            for position, (number, _) in packed.items():
                handle = call.handle_at(position)
                if handle is not None:
                    numbers[id(handle)] = number
        for node, tensors in nodes_of(outs, {t.grad_fn for t in leaves}):
            reader = reader_of(node)
            found = [self.storages.number(base_tensor(t)) for t in tensors]
            self.itself.update(found)
            found += [numbers[id(h)] for h in handles_at(node) if id(h) in numbers]
            for number in found:
                self.readers.setdefault(number, {})[reader] = None

    def note_kept(self, places: Iterable[Any]) -> None:
        """Note what is kept of calls within by their own rules."""
        for t in (t for place in places for t in place.stored()):
            self.itself.add(self.storages.number(base_tensor(t)))

    def inner(self, outermost: Saved) -> Iterator[tuple[int, str]]:
        """Yield how often nested calls recompute each operation, and the innermost."""
        times = [0] * len(self.steps)
        for call, packed in self._packed.values():
            if call is outermost:
                continue
            where = self._steps_of(call)
            last = max((packed[h.position][1] for h in call.alive()), default=0)
            for i, fate in zip(where, _fates(call, len(where)), strict=True):
                times[i] += fate.is_run and i < last
        for count, inside in zip(times, self._inside, strict=True):
            yield count, name_in(inside[-1].label) if inside else ""

    def _steps_of(self, call: Saved) -> list[int]:
        """Return the operations that ran in a call, by index."""
        return [i for i, inside in enumerate(self._inside) if call in inside]

    def calls(self, outermost: Saved) -> Iterator[CallWithin]:
        """Yield the calls within, those around before those inside."""
        index = {id(outermost): -1}
        for call, packed in self._packed.values():
            if call is outermost:
                continue
            index[id(call)] = len(index) - 1
            waiting = call.alive()
            yield CallWithin(
                around=index[id(self._around[id(call)])],
                inputs=frozenset(self._inputs_of(call) if waiting else ()),
                holds=frozenset(packed[handle.position][0] for handle in waiting),
                away=frozenset(self._away(call)),
            )

    def _inputs_of(self, call: Saved) -> Iterator[int]:
        """Yield the storages of the inputs that a call keeps."""
        for value in call.inputs.values:
            kept = stored_by(value) if type(value) is PackedOutside else [value]
            for t in kept:
                if type(t) is not Absent:
                    yield self.storages.number(base_tensor(t))

    def _away(self, call: Saved) -> Iterator[int]:
        """Yield the storages of what a call offloads."""
        made = _plans_of(call)
        steps = self._steps_of(call)
        if made is None or len(steps) != len(made.record.steps):
            return
        for (i, k), decision in zip(
            made.full.plan.residuals, made.destinations, strict=True
        ):
            step = self.steps[steps[i]]
            if moves(decision, step.op.outputs):
                yield step.makes[k]


def _plans_of(call: Saved) -> Any:
    """Return the plans that a call follows; None if it follows none."""
    planned = call.planned
    choice = None if planned is None else planned.choice
    return choice[1] if choice else None


def _fates(call: Saved, count: int) -> Sequence[Fate]:
    """Return what a call's recompute does with its `count` operations."""
    made = _plans_of(call)
    fates = made.full.plan.fates if made else ()
    return fates if len(fates) == count else [Fate.RECOMPUTED] * count


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """An input of a call."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int  # of whatever storage it is a view of
    needs: bool  # whether it is differentiated
    stays: str  # why it is kept even if no recompute reads it; "" if it is not
    is_copied: bool  # whether the forward writes to it, so that the call keeps a copy
    is_parameter: bool


@dataclass(frozen=True, slots=True)
class Examined:
    """What one call did; storages are by number."""

    record: Record
    readers: Mapping[int, tuple[str, ...]]  # what reads each storage in the backward
    sizes: Mapping[int, int]  # the bytes of each storage
    leaves: tuple[InputLeaf, ...]
    itself: frozenset[int]  # what the graph saves itself, without a handle
    situation: Situation
    differentiable: bool  # whether an output requires grad
    scalar: bool  # whether those outputs have one element each
    differentiates: bool  # whether it runs a backward itself
    # How often nested calls recompute each operation, and the innermost such call.
    inner: tuple[tuple[int, str], ...]
    calls: tuple[CallWithin, ...]  # the ones around before the ones inside
    exposed: frozenset[int]  # the storages whose memory Python reads or writes
    kind: CallKind  # what calls that share its record have in common
    owner: Any  # the module whose calls share it, once modules of the kind differ
    streams: tuple[str, ...]


def examine(
    fn: Fn,
    label: str,
    args: Any,
    kwargs: Any,
    options: Options,
    ask: AskOptions | None = None,
) -> Examined | None:
    """Run a call, and put everything back; None if no tensor requires grad."""
    with undoing(fn, args, kwargs) as (inputs, ledger), ledger:
        reach = Reach(fn, label, inputs.args, inputs.kwargs)
        leaves = reach.take_tensors()
        needs = [t.requires_grad for t in leaves]
        if True not in needs:
            fn(*inputs.args, **inputs.kwargs)  # what it raises is to be seen
            return None
        call = _Examining(reach, options, leaves, needs, ask)
        result = call.forward(in_place(fn, _Asks), inputs.args, inputs.kwargs, leaves)
        return call.found(leaves, result, owner_of(fn, args))


class _Examining(Saved):
    """A call that is recorded whatever its options are."""

    __slots__ = ("_noting", "_situation")

    def __init__(
        self,
        reach: Reach,
        options: Options,
        inputs: Sequence[Tensor],
        needs: list[bool],
        ask: AskOptions | None,
    ) -> None:
        super().__init__(reach, options, inputs, needs)
        self._situation, self._noting = self.situation(inputs), CallNotes(inputs, ask)

    @override
    def forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        context = here()
        before, context.reporter = context.reporter, self._noting
        try:
            with self._noting:
                return super().forward(fn, args, kwargs, inputs)
        finally:
            context.reporter = before

    def found(self, leaves: Sequence[Tensor], result: Any, owner: Any) -> Examined:
        """Return what was found."""
        outs = tensors_in(result)
        noting = self._noting
        alive = {handle.position for handle in self.alive()}
        gone = {*range(len(self.handles))} - alive
        record = noting.record(outs, gone)
        noting.note_readers(outs, leaves)
        noting.note_kept(self.kept)
        situation = self._situation
        if self.leaf_changes.accumulates:
            situation = dataclasses.replace(situation, given_up=ACCUMULATES)
        return Examined(
            record=record,
            readers={s: tuple(names) for s, names in noting.readers.items()},
            sizes=noting.storages.sizes,
            leaves=tuple(self._leaf(i, t) for i, t in enumerate(leaves)),
            itself=frozenset(noting.itself),
            situation=situation,
            differentiable=any(t.requires_grad for t in outs),
            scalar=all(t.numel() == 1 for t in outs if t.requires_grad),
            differentiates=noting.differentiates,
            inner=tuple(noting.inner(self)),
            calls=tuple(noting.calls(self)),
            exposed=frozenset(noting.exposed),
            kind=self.kind(leaves),
            owner=owner,
            streams=tuple(stream_name(stream) for stream, _ in self.ambient.moved),
        )

    def _leaf(self, i: int, tensor: Tensor) -> InputLeaf:
        nbytes = tensor.numel() * tensor.element_size()  # of sparse ones too
        meta = tensor.dtype, tuple(tensor.shape), nbytes, self.inputs.needs[i]
        stays = ""
        if not is_droppable(real := _as_real(tensor)):
            is_alive = is_parameter(real)
            stays = _ALIVE if is_alive else "its kind of tensor is not dropped"
        is_copied = i in self.inputs.may_be_written
        return InputLeaf(self.name_of(i), *meta, stays, is_copied, is_parameter(tensor))


_ALIVE = "a leaf, which is alive anyway"


def _as_real(tensor: Tensor) -> Tensor:
    """Return a real tensor like a fake one, but without data."""
    if not hasattr(tensor, "fake_mode") or isinstance(tensor, nn.Parameter):
        return tensor
    real = torch.empty(0, dtype=tensor.dtype)
    if tensor.requires_grad:
        real.requires_grad_()
    return real if tensor.is_leaf else real.view(0)
