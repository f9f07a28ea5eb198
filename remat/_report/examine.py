"""The record of a call: its operations, the calls in it, and what reads what.

The call runs once, as the forward of a `remat` call that is recorded whatever its
options are; nothing is saved, and nothing is recomputed. `explain` and `compare` show
it under this policy or that.

Invariant: a call with the same arguments does what was found, but for what calls in it
are asked to do (`ask`). Graphs, streams, gradients and buffers are as they were after.
Rejected: a trace on fake tensors. Some operations choose another kernel there, and the
user's code may look at values.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.calls import in_place
from remat._base.context import Observe, here
from remat._base.errors import name_in
from remat._base.tensors import parts
from remat._base.types import Fn
from remat._graph.graph import handles_at, nodes_of
from remat._partial.candidates import moves
from remat._partial.decide import ACCUMULATES, owner_of
from remat._partial.options import Options
from remat._partial.plan import Fate, Record
from remat._partial.recorder import Recorder
from remat._partial.replay import is_droppable
from remat._partial.values import Storages
from remat._reach.reach import Reach
from remat._report import inputs as _inputs
from remat._report.inputs import Inputs, Ledger, tensors_in, tried
from remat._report.reports import ExplainedInput
from remat._torch.autograd import current_task
from remat._torch.levels import base_tensor
from remat._transform.saved import Saved


AskOptions = Callable[..., Any]  # of (block, lowering, args): the options of a call


def examine(
    fn: Fn,
    label: str,
    args: Any,
    kwargs: Any,
    options: Options,
    ask: AskOptions | None = None,
) -> "Examined | None":
    """Run a call, and put everything back; None if no tensor requires grad.

    If no result requires grad, it runs again, and all arguments are differentiated.
    """

    def run(inputs: Inputs, ledger: Ledger) -> tuple[Examined | None, bool]:
        with ledger:
            reach = Reach(fn, label, inputs.args, inputs.kwargs)
            leaves = reach.take_tensors()
            needs = [t.requires_grad for t in leaves]
            if True not in needs:
                fn(*inputs.args, **inputs.kwargs)  # what it raises is to be seen
                return None, True
            call = Saved(reach, options, leaves, needs)
            found = Examined(call, leaves, owner_of(fn, args), ask)
            found.run_call(in_place(fn, _Asks), inputs.args, inputs.kwargs, leaves)
            return found, found.differentiable

    return tried(run, fn, args, kwargs)


class _Asks:
    """Any policy may be asked about the record."""

    asks_modules, keeps_calls = True, False


@dataclass(slots=True)
class CallWithin:
    """A call of a rematerialized function, the one that is examined or one in it."""

    around: int  # the index of the call within that it runs in; -1 if it runs in none
    # For each handle its storage, and how many operations ran before it; and the
    # operations that ran in it, by index.
    packed: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    # Storages: those that it keeps alive to be recomputed; that its recompute holds for
    # the backward; that its policy offloads.
    inputs: frozenset[int] = frozenset()
    holds: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()
    again: Sequence[int] = ()  # the operations that its recompute runs


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


class Examined(Recorder):
    """What one call did; storages are by number."""

    tells_modules = True  # to policies that are asked about the record

    log: Record  # of its operations
    differentiable: bool  # whether an output requires grad
    scalar: bool  # whether those outputs have one element each
    streams: tuple[str, ...]  # that it moved
    calls: Sequence[CallWithin]  # the ones around before the ones inside

    def __init__(
        self, call: Saved, leaves: Sequence[Tensor], owner: Any, ask: AskOptions | None
    ) -> None:
        self._ask, self.storages = ask, _Sizes()
        # The inputs, each with why it is kept even if no recompute reads it; and by
        # index, those that are differentiated.
        each = enumerate(leaves)
        self.leaves = tuple(_leaf(call.reach.name_of(i), t) for i, t in each)
        self.needs = frozenset(i for i, need in enumerate(call.inputs.needs) if need)
        self.copied: frozenset[int] = frozenset()  # those of which a call keeps a copy
        # What reads each storage in the backward, and which ones the graph saves
        # itself, without a handle.
        self.readers: dict[int, dict[str, None]] = {}
        self.itself: set[int] = set()
        self.differentiates = False  # whether it runs a backward itself
        self.inside: list[str] = []  # of each operation, the innermost call; or ""
        # What calls that share its record have in common, and the module whose calls
        # share it, once modules of the kind differ.
        self.situation, self.kind = call.situation(leaves), call.kind(leaves)
        self.owner = owner
        self._noted: dict[Saved, CallWithin] = {}  # the first is what is examined
        self._call = call
        super().__init__(leaves, None, self.storages)

    def run_call(self, fn: Fn, *run: Any) -> None:
        """Run the call, and note what it does."""
        call, leaves = self._call, run[-1]
        with _inputs.reporting(self), self:
            result = call.forward(fn, *run)
        outs = tensors_in(result)
        alive = {handle.position for handle in call.alive()}
        self.log = self.record(outs, {*range(len(call.handles))} - alive)
        self._note_readers(outs, leaves)
        for place in call.kept:  # of calls within, by their own rules
            self.itself.update(map(self._number, place.stored()))
        if call.leaf_changes.accumulates:
            self.situation = replace(self.situation, given_up=ACCUMULATES)
        needing = [t for t in outs if t.requires_grad]
        self.differentiable = bool(needing)
        self.scalar = all(t.numel() == 1 for t in needing)
        self.copied = frozenset(call.inputs.may_be_written)
        self.streams = tuple(stream.name for stream, _ in call.ambient.moved)
        for each in [*self._noted][1:]:
            self._settle(each, self._noted[each])
        self.calls = [*self._noted.values()][1:]
        self._noted.clear()
        del self._call

    @property
    def times(self) -> list[int]:
        """How often calls within recompute each operation."""
        counts = Counter(i for call in self.calls for i in call.again)
        return [counts[i] for i in range(len(self.log.steps))]

    def nbytes(self, storages: Iterable[int]) -> int:
        """Return the bytes of some storages."""
        return sum(self.storages.sizes[s] for s in storages)

    def saved_by_plain(self) -> frozenset[int]:
        """Return the storages that stay alive for the backward without remat."""
        return frozenset(self.itself).union(self.readers, *self.log.roots)

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

    # --- What is told while it runs ---

    @override
    def note(self, func: Any, arguments: Any, results: Any, *, draws: bool) -> None:
        i, inside = len(self.steps), here().inside[1:]
        super().note(func, arguments, results, draws=draws)
        for call in inside:
            if call in self._noted:  # not one of an earlier graph, recomputed here
                self._noted[call].steps.append(i)
        self.inside.append(name_in(inside[-1].label) if inside else "")
        self.differentiates |= current_task() >= 0

    def observe(self, call: Saved, observe: Observe | None) -> Observe:
        """Return a function that is called with each tensor that a call saves."""
        is_first, inside = not self._noted, here().inside
        index = {noted: i - 1 for i, noted in enumerate(self._noted)}
        noted = CallWithin(index.get(inside[-1], -1) if inside else -1)
        self._noted[call] = noted

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

    # --- What its graph tells ---

    def _note_readers(self, outs: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
        """Note which nodes of the graph read each storage."""
        numbers = {
            id(call.handle_at(position)): number
            for call, noted in self._noted.items()
            for position, (number, _) in noted.packed.items()
        }
        for node, tensors in nodes_of(outs, {t.grad_fn for t in leaves}):
            found = [*map(self._number, tensors)]
            self.itself.update(found)
            found += [numbers[id(h)] for h in handles_at(node) if id(h) in numbers]
            for number in found:
                self.readers.setdefault(number, {})[_inputs.reader_of(node)] = None

    def _settle(self, call: Saved, noted: CallWithin) -> None:
        """Note what a call within keeps, and what its recompute runs."""
        waiting = call.alive()
        made: Any = call.planned.plans if call.planned else None
        if made and len(made.record.steps) != len(noted.steps):
            made = None  # it is of another call
        fates = made.full.plan.fates if made else repeat(Fate.RECOMPUTED)
        runs = zip(noted.steps, fates, strict=False)
        last = max((noted.packed[h.position][1] for h in waiting), default=0)
        noted.again = [i for i, fate in runs if fate.is_run and i < last]
        noted.holds = frozenset(noted.packed[h.position][0] for h in waiting)
        noted.inputs = frozenset(
            map(self._number, _inputs.inputs_kept(call) if waiting else ())
        )
        residuals = made.full.plan.residuals if made else ()
        each = zip(residuals, made.destinations if made else (), strict=True)
        noted.away = frozenset(
            self.steps[noted.steps[i]].makes[k]
            for (i, k), decision in each
            if moves(decision, self.steps[noted.steps[i]].op.outputs)
        )

    def _number(self, tensor: Tensor) -> int:
        return self.storages.number(base_tensor(tensor))


def _leaf(name: str, tensor: Tensor) -> ExplainedInput:
    nbytes = tensor.numel() * tensor.element_size()  # of sparse ones too
    real, stays = tensor, ""
    if hasattr(tensor, "fake_mode") and not isinstance(tensor, nn.Parameter):
        real = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        real = real if tensor.is_leaf else real.view(0)
    if not is_droppable(real):
        stays = (
            _ALIVE
            if _inputs.is_parameter(real)
            else "its kind of tensor is not dropped"
        )
    meta = name, tensor.dtype, tuple(tensor.shape), nbytes
    return ExplainedInput(*meta, bool(stays), stays, _inputs.is_parameter(tensor))


_ALIVE = "a leaf, which is alive anyway"
