"""The record of a call: its operations, the calls in it, and what reads what.

The call runs once, as the forward of a `remat` call that is recorded whatever its
options are; nothing is saved, and nothing is recomputed. `explain` and `compare` show
it under this policy or that.

Invariant: a call with the same arguments does what was found, but for what calls in it
are asked to do (`ask`). Graphs, streams, gradients and buffers are as they were after.
Rejected: a trace on fake tensors. Some operations choose another kernel there, and the
user's code may look at values.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.absent import Absent
from remat._base.calls import in_place
from remat._base.context import Observe, here
from remat._base.errors import name_in
from remat._base.tensors import parts
from remat._base.types import Fn
from remat._graph.graph import handles_at, nodes_of
from remat._graph.handles import PackedOutside, stored_by
from remat._partial.cache import CallKind, owner_of
from remat._partial.candidates import moves
from remat._partial.decide import ACCUMULATES, Situation
from remat._partial.options import Options
from remat._partial.plan import Fate, Record
from remat._partial.recorder import Recorder
from remat._partial.replay import is_droppable
from remat._partial.values import Storages
from remat._reach.reach import Reach
from remat._report.inputs import (
    is_parameter,
    reader_of,
    tensors_in,
    undoing,
)
from remat._report.reports import ExplainedInput
from remat._torch import base_tensor, current_task
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
    again: tuple[int, ...]  # the operations that its recompute runs


@dataclass(frozen=True, slots=True)
class Examined:
    """What one call did; storages are by number."""

    record: Record
    readers: Mapping[int, Iterable[str]]  # what reads each storage in the backward
    sizes: Mapping[int, int]  # the bytes of each storage
    # The inputs, each with why it is kept even if no recompute reads it; and by index,
    # those that are differentiated, and those that a call keeps a copy of.
    leaves: tuple[ExplainedInput, ...]
    needs: frozenset[int]
    copied: frozenset[int]
    itself: frozenset[int]  # what the graph saves itself, without a handle
    situation: Situation
    differentiable: bool  # whether an output requires grad
    scalar: bool  # whether those outputs have one element each
    differentiates: bool  # whether it runs a backward itself
    inside: tuple[str, ...]  # of each operation, the innermost call; "" if in none
    calls: tuple[CallWithin, ...]  # the ones around before the ones inside
    exposed: frozenset[int]  # the storages whose memory Python reads or writes
    kind: CallKind  # what calls that share its record have in common
    owner: Any  # the module whose calls share it, once modules of the kind differ
    streams: tuple[str, ...]

    @property
    def times(self) -> list[int]:
        """How often calls within recompute each operation."""
        counts = Counter(i for call in self.calls for i in call.again)
        return [counts[i] for i in range(len(self.record.steps))]

    def nbytes(self, storages: Iterable[int]) -> int:
        """Return the bytes of some storages."""
        return sum(self.sizes[s] for s in storages)

    def saved_by_plain(self) -> frozenset[int]:
        """Return the storages that stay alive for the backward without remat."""
        return self.itself.union(self.readers, *self.record.roots)

    def bytes_recomputed(self, kept: frozenset[int], own: frozenset[int]) -> int:
        """Return the bytes that the largest recompute holds besides what was `kept`.

        Blocks are alike in most models, so the first that a backward recomputes is at
        the peak. `own` is what a recompute of the whole call holds.
        """
        # The recompute of a call within holds those of the calls around it, too.
        held = {-1: own - kept}
        for i, call in enumerate(self.calls):
            held[i] = held[call.around] | (call.holds - kept)
        return max(map(self.nbytes, held.values()))


# --- The run ---


def examine(
    fn: Fn,
    label: str,
    args: Any,
    kwargs: Any,
    options: Options,
    ask: AskOptions | None = None,
) -> Examined | None:
    """Run a call, and put everything back; None if no tensor requires grad.

    If no result requires grad, it runs again, and all arguments are differentiated.
    """
    first: Examined | None = None
    for every in (False, True):
        with undoing(fn, args, kwargs, every=every) as (inputs, ledger), ledger:
            reach = Reach(fn, label, inputs.args, inputs.kwargs)
            leaves = reach.take_tensors()
            needs = [t.requires_grad for t in leaves]
            if True not in needs:
                fn(*inputs.args, **inputs.kwargs)  # what it raises is to be seen
                return None
            call = Saved(reach, options, leaves, needs)
            run = in_place(fn, _Asks), inputs.args, inputs.kwargs, leaves
            found = _examined(call, CallNotes(leaves, ask), owner_of(fn, args), *run)
            if found.differentiable or not (first or inputs.has_others):
                return found
            first = first or found
    return first


class _Asks:
    """Any policy may be asked about the record."""

    asks_modules, keeps_calls = True, False


def _examined(
    call: Saved, noting: "CallNotes", owner: Any, fn: Fn, *run: Any
) -> Examined:
    """Run a call, and return what was found."""
    leaves: Sequence[Tensor] = run[-1]
    situation, context = call.situation(leaves), here()
    before, context.reporter = context.reporter, noting
    try:
        with noting:
            result = call.forward(fn, *run)
    finally:
        context.reporter = before
    outs = tensors_in(result)
    alive = {handle.position for handle in call.alive()}
    record = noting.record(outs, {*range(len(call.handles))} - alive)
    noting.note_readers(outs, leaves)
    noting.note_kept(call.kept)
    if call.leaf_changes.accumulates:
        situation = dataclasses.replace(situation, given_up=ACCUMULATES)
    return Examined(
        record=record,
        readers=noting.readers,
        sizes=noting.storages.sizes,
        leaves=tuple(_leaf(call.name_of(i), t) for i, t in enumerate(leaves)),
        needs=frozenset(i for i, needed in enumerate(call.inputs.needs) if needed),
        copied=frozenset(call.inputs.may_be_written),
        itself=frozenset(noting.itself),
        situation=situation,
        differentiable=any(t.requires_grad for t in outs),
        scalar=all(t.numel() == 1 for t in outs if t.requires_grad),
        differentiates=noting.differentiates,
        inside=tuple(noting.inside),
        calls=tuple(noting.calls()),
        exposed=frozenset(noting.exposed),
        kind=call.kind(leaves),
        owner=owner,
        streams=tuple(stream.name for stream, _ in call.ambient.moved),
    )


def _leaf(name: str, tensor: Tensor) -> ExplainedInput:
    nbytes = tensor.numel() * tensor.element_size()  # of sparse ones too
    real, stays = _as_real(tensor), ""
    if not is_droppable(real):
        stays = _ALIVE if is_parameter(real) else "its kind of tensor is not dropped"
    meta = name, tensor.dtype, tuple(tensor.shape), nbytes
    return ExplainedInput(*meta, bool(stays), stays, is_parameter(tensor))


_ALIVE = "a leaf, which is alive anyway"


def _as_real(tensor: Tensor) -> Tensor:
    """Return a real tensor like a fake one, but without data."""
    if not hasattr(tensor, "fake_mode") or isinstance(tensor, nn.Parameter):
        return tensor
    real = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return real if tensor.is_leaf else real.view(0)


# --- What is noted ---


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


@dataclass(slots=True)
class _CallNote:
    """What was noted of a call, the one that is examined first."""

    call: Saved
    around: int  # the index of the call that it runs in
    # For each handle its storage, and how many operations ran before it.
    packed: dict[int, tuple[int, int]]
    steps: list[int]  # the operations that ran in it, by index


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
        self._noted: dict[int, _CallNote] = {}  # by the id of the call
        self.inside: list[str] = []  # of each operation, the innermost call
        super().__init__(leaves, None, self.storages)

    @override
    def note(self, func: Any, arguments: Any, results: Any, *, draws: bool) -> None:
        i, inside = len(self.steps), here().inside[1:]
        super().note(func, arguments, results, draws=draws)
        for call in inside:
            if id(call) in self._noted:  # not one of an earlier graph, recomputed here
                self._noted[id(call)].steps.append(i)
        self.inside.append(name_in(inside[-1].label) if inside else "")
        self.differentiates |= current_task() >= 0

    def observe(self, call: Saved, observe: Observe | None) -> Observe:
        """Return a function that is called with each tensor that a call saves."""
        is_first, inside = not self._noted, here().inside
        index = {key: i for i, key in enumerate(self._noted)}
        around = index.get(id(inside[-1]), 0) if inside else 0
        noted = self._noted[id(call)] = _CallNote(call, around, {}, [])

        def both(position: int, tensor: Tensor | None) -> None:
            if is_first:
                self.saved_storages.pack(tensor)
            if tensor is not None:
                noted.packed[position] = self._number(tensor), len(self.steps)
            if observe is not None:
                observe(position, tensor)

        return both

    def entered(self, call: Any, inputs: Sequence[Tensor]) -> None:
        """Be told of the forward of a call under torch.func, which saves no handles."""

    def asked(self, block: Any, lowering: Any, args: tuple[Any, ...]) -> Any:
        """Return how a rematerialized function in the function is called."""
        ask = self._ask
        return (lowering, block._options) if ask is None else ask(block, lowering, args)

    def note_readers(self, outs: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
        """Note which nodes of the graph read each storage."""
        numbers = {
            id(noted.call.handle_at(position)): number
            for noted in self._noted.values()
            for position, (number, _) in noted.packed.items()
        }
        for node, tensors in nodes_of(outs, {t.grad_fn for t in leaves}):
            found = [*map(self._number, tensors)]
            self.itself.update(found)
            found += [numbers[id(h)] for h in handles_at(node) if id(h) in numbers]
            for number in found:
                self.readers.setdefault(number, {})[reader_of(node)] = None

    def note_kept(self, places: Iterable[Any]) -> None:
        """Note what is kept of calls within by their own rules."""
        for place in places:
            self.itself.update(map(self._number, place.stored()))

    def calls(self) -> Iterator[CallWithin]:
        """Yield the calls within, those around before those inside."""
        for noted in [*self._noted.values()][1:]:
            call, waiting = noted.call, noted.call.alive()
            choice = call.planned.choice if call.planned else None
            made: Any = choice[1] if choice else None
            if made and len(made.record.steps) != len(noted.steps):
                made = None  # it is of another call
            fates = made.full.plan.fates if made else repeat(Fate.RECOMPUTED)
            runs = zip(noted.steps, fates, strict=False)
            last = max((noted.packed[h.position][1] for h in waiting), default=0)
            away = self._away(noted.steps, made) if made else ()
            kept = inputs_kept(call) if waiting else ()
            yield CallWithin(
                around=noted.around - 1,
                inputs=frozenset(map(self._number, kept)),
                holds=frozenset(noted.packed[h.position][0] for h in waiting),
                away=frozenset(away),
                again=tuple(i for i, f in runs if f.is_run and i < last),
            )

    def _number(self, tensor: Tensor) -> int:
        return self.storages.number(base_tensor(tensor))

    def _away(self, steps: Sequence[int], made: Any) -> Iterator[int]:
        """Yield the storages of what a call offloads."""
        pairs = zip(made.full.plan.residuals, made.destinations, strict=True)
        for (i, k), decision in pairs:
            step = self.steps[steps[i]]
            if moves(decision, step.op.outputs):
                yield step.makes[k]


def inputs_kept(call: Saved) -> Iterator[Tensor]:
    """Yield the tensors that a call keeps of its inputs, some as other hooks have."""
    for value in call.inputs.values:
        if type(value) is PackedOutside:
            yield from stored_by(value)
        elif type(value) is not Absent:
            yield value
