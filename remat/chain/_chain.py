"""A chain: a call whose function runs again and again, as one node; and its backward.

The backward, a `Reversal`, begins with the checkpoints that the forward left. A second
one of the same graph runs the forward's part of the schedule again. One that is itself
differentiated makes a call of each of about sqrt(n) segments.

Invariant: the graph holds the inputs of the chain, and a chain of any length one node.
At most the checkpoints of the schedule are stored, one carry is live, and the residuals
of one segment exist. Each step is reversed once, the last one first.
Rejected: a node for each segment, as nested calls would have. A checkpoint could not be
let go of before the whole backward has ended. Rejected: the schedule in a second
derivative. Its advances would each hold a carry.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.context import differentiated
from remat._base.errors import CaptureError
from remat._base.program import (
    Evaluation,
    InputIndex,
    OutputIndex,
    Program,
    Request,
    has_derivatives,
)
from remat._base.types import Outputs
from remat._torch.autograd import base_dual_level_active, is_forward_ad_enabled
from remat._torch.graphs import is_under_jvp
from remat._torch.levels import current_layer, requires_grad_at_any_level
from remat._transform.checks import RefuseReads
from remat._transform.function import Vjp, evaluate
from remat._transform.levels import Below
from remat.chain._actions import Action, Advance, Drop, Load, Reverse, Save
from remat.chain._forward import CHANGED, ChainProgram
from remat.chain._schedules import Sqrt, Uniform, ranges_of
from remat.chain._segment import Segment, segment_from
from remat.chain._steps import Live, Stored, can_be_written, cutting


# --- The backward ---


class Reversal(Program):
    """The vjp of a chain."""

    __slots__ = ("_call", "_chain", "_wanted", "_with_cotangents")

    def __init__(
        self,
        chain: ChainProgram,
        wanted: Sequence[InputIndex],
        with_cotangents: Sequence[OutputIndex],
    ) -> None:
        self._chain, self._call = chain, chain.call
        self._wanted, self._with_cotangents = wanted, with_cotangents

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Reverse all steps, and return the gradients."""
        del mode
        count = len(self._call.needs)
        primals, cts = inputs[:count], inputs[count:]
        cotangents = dict(zip(self._with_cotangents, cts, strict=True))
        run = Reversing(self._chain, primals, self._wanted, cotangents)
        with differentiated(), run.surroundings:
            for action in run.actions(is_watched(inputs)):
                run.do(action)
        return tuple(run.gradient_of(i) for i in self._wanted)

    @override
    def evaluate(
        self, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Run it, without a graph: what it would reach is not asked."""
        outs = self.run(*inputs)
        used = range(len(inputs))
        return outs, Evaluation(request, used, [*map(has_derivatives, outs)])


def is_recorded_at_any_level(tensors: Sequence[Tensor]) -> bool:
    """Say whether what is done with tensors becomes a graph."""
    return torch.is_grad_enabled() and any(map(requires_grad_at_any_level, tensors))


def is_watched(tensors: Sequence[Tensor]) -> bool:
    """Say whether what is done with tensors is differentiated."""
    if is_recorded_at_any_level(tensors):
        return True
    return is_under_jvp() or (base_dual_level_active() and is_forward_ad_enabled())


class Reversing:
    """One run of a reversal; `surroundings` refuse reads of carries that changed."""

    live: Live | None = None

    def __init__(
        self,
        chain: ChainProgram,
        inputs: Sequence[Tensor],
        wanted: Sequence[InputIndex],
        cotangents: Mapping[OutputIndex, Tensor],
    ) -> None:
        self._chain, self._call, self._inputs = chain, chain.call, inputs
        self._wanted = wanted
        self._is_watched = False
        outs = chain.call.outs
        # The cotangents of the live carry, and those of what was collected.
        self._cts = [cotangents.get(j) for j in outs.of_carry]
        self._collected = [cotangents.get(j) for j in outs.of_collected]
        self._grads: dict[int, Tensor] = {}
        # The gradients of what is scanned: whole, or in parts below a vmap, where no
        # whole can be written to.
        self._whole: dict[int, Tensor] = {}
        self._slices: dict[int, list[tuple[int, Tensor]]] = {}
        self._stored = Stored(on_disk=False)
        self.surroundings = ExitStack()
        self._refused: RefuseReads | None = None

    def actions(self, is_watched: bool) -> Iterator[Action]:
        """Return what to do."""
        call, self._is_watched = self._call, is_watched
        length, schedule = call.length, call.schedule
        taken = None if is_watched else call.take_stored()
        if taken is not None:
            self._stored = taken
            return schedule.backward(length)
        if is_watched:
            schedule = Sqrt()
        else:  # graphs do not lead through files
            self._stored = Stored(call.steps.on_disk)
        self.live = call.first(self._inputs)
        # The checkpoints are gone, or are of another level: the steps that lead to them
        # run again, but not those from the last one to the result.
        forward = schedule.forward(length)
        saves = (
            a for a in forward if not (isinstance(a, Advance) and a.stop == length)
        )
        return itertools.chain(saves, schedule.backward(length))

    @property
    def carried(self) -> list[Tensor]:
        """The cotangents of the carry at the end of what is not reversed yet."""
        return [ct for ct in self._cts if ct is not None]

    @property
    def gradients(self) -> dict[int, Tensor]:
        """The gradients of inputs so far, by index."""
        return self._grads | self._whole

    def do(self, action: Action) -> None:
        """Do one thing."""
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
            case Save(step):
                assert self.live is not None
                self._stored.save(step, self.live)
            case Load(step):
                self._load(step)
            case Drop(step):
                self._stored.drop(step)
            case Reverse(start, stop):
                self._reverse(start, stop)

    def _load(self, step: int) -> None:
        """Make a stored carry the live one, and refuse reads of what was changed."""
        self.live = None  # freed first
        # The state of the call knows of carry 0: its tensors are inputs.
        changed = self._stored.changed(step) if step else []
        if changed and self._refused is None:  # one mode for all carries
            self._refused = self.surroundings.enter_context(RefuseReads())
        name = f"the carry of step {step} of {self._call.steps.label}"
        for t in changed:
            assert self._refused is not None
            self._refused.refuse(t, lambda: name)
        self.live = self._stored.load(step)

    def _segment(
        self, start: int, stop: int
    ) -> tuple[Segment, Sequence[bool], list[Tensor]]:
        """Make a segment of the live carry; with what it needs, and its inputs."""
        live, self.live = self.live, None
        assert live is not None
        bounds = start, stop
        segment, given = segment_from(self._chain, live, self._inputs, bounds)
        return segment, live.needs, given

    def _advance(self, start: int, stop: int) -> None:
        segment, _, given = self._segment(start, stop)
        if self._is_watched:
            self.live = segment.carry_of(evaluate(segment, given))
        else:
            self.live = segment.advance(given)

    def _reverse(self, start: int, stop: int) -> None:
        """Pull the cotangents back over some steps."""
        segment, needs, given = self._segment(start, stop)
        cts = self._take_cotangents(start, stop, len(needs))
        if not cts:  # nothing that was differentiated depends on these steps
            return
        request = Request([*needs, *self._call.needs], at_base=False)
        arity = len(request.needs)
        evaluation = Evaluation(request, range(arity), asks_grad_mode=True)
        rule = Vjp(segment, evaluation, arity, self._wanted_of(needs), [*cts])
        given += cts.values()
        grads = evaluate(rule, given) if self._is_watched else rule.run(*given)
        self._take(grads, needs, start, stop)

    def _wanted_of(self, needs: Sequence[bool]) -> list[int]:
        """Return which inputs of a segment are differentiated."""
        wanted = [i for i, need in enumerate(needs) if need]
        return wanted + [len(needs) + i for i in self._wanted]

    def _take_cotangents(self, start: int, stop: int, count: int) -> dict[int, Tensor]:
        """Take the cotangents of a segment whose first carry has so many tensors."""
        places = [*map(self._call.steps.place, range(start, stop))]
        rows = [
            None if ct is None else ct.select(0, place)
            for place in places
            for ct in self._collected
        ]
        cts = [*self._cts, *rows]
        self._cts = [None] * count  # let go of while the steps are reversed
        return {j: ct for j, ct in enumerate(cts) if ct is not None}

    def _take(
        self, grads: Sequence[Any], needs: Sequence[bool], start: int, stop: int
    ) -> None:
        """Take the gradients that the vjp of a segment gave."""
        found = dict(zip(self._wanted_of(needs), grads, strict=True))
        count = len(needs)
        self._cts = [found.get(i) for i in range(count)]
        first, _ = self._call.steps.slices(start, stop)
        for i in self._wanted:
            self._add(i, found[count + i], first)

    def _add(self, i: int, grad: Tensor | None, place: int) -> None:
        """Add to the gradient of an input, or write that of slices to its place."""
        if grad is None:
            return
        if i not in self._call.scanned:
            known = self._grads.get(i)
            self._grads[i] = grad if known is None else known + grad
        elif self._is_watched or not can_be_written(grad):
            self._slices.setdefault(i, []).append((place, grad))
        else:  # joined, it would be held twice
            if i not in self._whole:
                self._whole[i] = torch.zeros_like(self._inputs[i])
            self._whole[i].narrow(0, place, len(grad)).copy_(grad)

    def gradient_of(self, i: int) -> Tensor | None:
        """Return the gradient of an input, once all steps are reversed."""
        slices = self._slices.pop(i, None)
        if slices is not None:
            self._grads[i] = self._joined(i, slices)
        elif i in self._whole:
            self._grads[i] = self._whole.pop(i)
        for k, index in enumerate(self._call.initial):
            if index == i:
                ct, self._cts[k] = self._cts[k], None
                self._add(i, ct, 0)
        return self._grads.get(i)

    def _joined(self, i: int, slices: list[tuple[int, Tensor]]) -> Tensor:
        """Join the gradients of slices. Those that are missing are zero."""
        whole = self._inputs[i]
        parts: list[Tensor] = []
        end = 0
        for place, grad in sorted(slices, key=lambda pair: pair[0]):
            if place > end:
                parts.append(torch.zeros_like(whole.narrow(0, end, place - end)))
            parts.append(grad)
            end = place + grad.shape[0]
        if end < whole.shape[0]:
            rest = whole.narrow(0, end, whole.shape[0] - end)
            parts.append(torch.zeros_like(rest))
        return torch.cat(parts)


# --- The node ---


class Chain(ChainProgram):
    """All steps of a chain."""

    __slots__ = ()

    @override
    def evaluate_first(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate for the first time, and keep the checkpoints."""
        call = self.call
        # Before the sweep, which makes leaves of what any level differentiates.
        call.needs, below = request.needs, program
        while isinstance(below, Below):  # of some level inside a vmap, or outside
            pairs = zip(call.needs[: below.arity], below.needs, strict=True)
            call.needs = [inside or outside for inside, outside in pairs]
            below = below.program
        # Under a vmap a checkpoint would be of a level that is gone in the backward.
        call.stores = program is self and not request.is_jvp
        results, evaluation = super().evaluate_first(program, inputs, request)
        if evaluation.updated and call.steps.is_repeated:
            name = call.reach.name_of(evaluation.updated[0])
            raise CaptureError(CHANGED.format(label=self.label, what=f"`{name}`"))
        assert self.state is not None
        if call.scanned:  # steps are given slices, which are elsewhere
            whole = {*range(len(inputs))}.difference(call.scanned)
            self.state = self.state.located(whole)
        if not self.state.ambient.moved:
            call.forget_streams()
        return results, evaluation

    @override
    def own_vjp(
        self,
        seen_as: Program,
        evaluation: Evaluation,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> Program | None:
        del evaluation
        if seen_as is not self:  # under a vmap: it is differentiated in segments
            return None
        return Reversal(self, wanted, given)

    @override
    def run_forward(self, inputs: Sequence[Tensor], mode: Any) -> Outputs:
        call = self.call
        with cutting(inputs, call.needs, are_leaves=True) as cut:
            call.cut = cut
            outs: Any = super().run_forward(cut.inputs, mode)
            needs = call.note_outs(outs)
            outs = [*map(cut.value, outs)]
        call.cut = None  # which leads to leaves that nothing is to hold
        return _connected(outs, needs, inputs)

    @override
    def recompute(self, inputs: Sequence[Tensor], mode: Any) -> Outputs:
        """Run all steps for who differentiates them: by jvp, or around a vmap.

        A graph of it holds a carry for each of about sqrt(n) segments.
        """
        del mode
        call = self.call
        cuts = Sqrt() if is_recorded_at_any_level(inputs) else Uniform(1)
        live = call.first(inputs)
        rows: list[Sequence[Tensor]] = []
        for steps in ranges_of(cuts, call.length):
            bounds = steps.start, steps.stop
            segment, given = segment_from(self, live, inputs, bounds)
            outs = evaluate(segment, given)
            live = segment.carry_of(outs)
            tensors = outs[len(live.tensors) :]
            width = max(1, len(tensors) // len(steps))
            rows += [tensors[i : i + width] for i in range(0, len(tensors), width)]
        if call.steps.is_reversed:
            rows.reverse()
        columns = [torch.stack([*c]) for c in zip(*rows, strict=True)]
        places = [*call.outs.of_carry, *call.outs.of_collected]
        found = dict(zip(places, [*live.tensors, *columns], strict=True))
        return tuple(found[j] for j in range(len(places)))


def _connected(
    outs: Sequence[Tensor], needs: Iterable[bool], inputs: Sequence[Tensor]
) -> Outputs:
    """Return the outputs of a chain with a graph, by way of a zero, to all inputs."""
    ends = [t for t in inputs if requires_grad_at_any_level(t)]
    if not ends:
        return tuple(outs)
    if current_layer() is not None:
        # Tangents depend on all inputs, if one has a tangent. And a recompute, for a
        # level that differentiates fewer of them, is to be the same operations.
        ends = [*filter(has_derivatives, inputs)]
    # Waiting for an accelerator takes longer than sending it a zero.
    devices = [t.device for t in ends]
    device = next((d for d in devices if d.type != "cpu"), devices[0])
    total = functools.reduce(torch.add, (_nothing_of(t).to(device) for t in ends))
    # The tangent of a sum does not depend on what is summed, and that of this does.
    zero = torch.expm1(total)
    pairs = zip(outs, needs, strict=True)
    return tuple(o - zero.to(o.device, o.dtype) if need else o for o, need in pairs)


def _nothing_of(tensor: Tensor) -> Tensor:
    """Return the sum of no elements of a tensor."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).narrow(0, 0, 0).sum()
