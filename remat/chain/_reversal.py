"""The backward of a chain: runs its schedule.

    (*inputs, *cotangents) -> gradients

It begins with the checkpoints that the forward left. A second backward of the same
graph finds none, and runs the forward's part of the schedule again.

Invariant: at most the checkpoints of the schedule are stored, one carry is live, and
the residuals of one segment exist. Each step is reversed once, the last one first.
Where the backward itself is differentiated, each of its parts is a call: it is cut into
about sqrt(n) segments, and a graph holds a carry and a cotangent for each.
Rejected: the schedule there as well. Its advances would each hold a carry.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.context import differentiated
from remat._base.program import Evaluation, Program, Request, has_derivatives
from remat._base.types import Outputs
from remat._torch import (
    base_dual_level_active,
    is_forward_ad_enabled,
    is_under_jvp,
    requires_grad_at_any_level,
    unwrap_dead,
)
from remat._transform.checks import RefuseReads
from remat._transform.function import Primal, Vjp, call as evaluate
from remat.chain._actions import (
    Action,
    Advance,
    Backward,
    Drop,
    Load,
    RecordStep,
    Reverse,
    Save,
)
from remat.chain._forward import ChainCall
from remat.chain._segment import Segment
from remat.chain._segments import Sqrt
from remat.chain._steps import Live
from remat.chain._stored import Stored, can_be_written


class Reversal(Program):
    """The vjp of a chain."""

    __slots__ = ("_call", "_chain", "_given", "_wanted")

    def __init__(
        self,
        chain: Primal,
        call: ChainCall,
        wanted: Sequence[int],
        given: Sequence[int],
    ) -> None:
        self._chain, self._call = chain, call
        self._wanted, self._given = wanted, given

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Reverse all steps, and return the gradients."""
        del mode
        count = len(self._call.needs)
        primals, cts = inputs[:count], inputs[count:]
        cotangents = dict(zip(self._given, cts, strict=True))
        run = Reversing(self._chain, self._call, primals, self._wanted, cotangents)
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


def is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Say whether what is done with tensors becomes a graph."""
    return torch.is_grad_enabled() and any(map(requires_grad_at_any_level, tensors))


def is_watched(tensors: Sequence[Tensor]) -> bool:
    """Say whether what is done with tensors is differentiated."""
    if is_recorded(tensors):
        return True
    return is_under_jvp() or (base_dual_level_active() and is_forward_ad_enabled())


class Reversing:
    """One run of a reversal.

    Attributes:
        surroundings: the context of its actions, in which no carry is read that was
            changed in place since the forward.
    """

    def __init__(
        self,
        chain: Primal,
        call: ChainCall,
        inputs: Sequence[Tensor],
        wanted: Sequence[int],
        cotangents: Mapping[int, Tensor],
    ) -> None:
        self._chain, self._call, self._inputs = chain, call, inputs
        self._wanted = wanted
        self._is_watched = False
        outs = call.outs
        # Of the live carry, and of what was collected.
        self._cts = [cotangents.get(j) for j in outs.of_carry]
        self._collected = [cotangents.get(j) for j in outs.of_collected]
        self._grads: dict[int, Tensor] = {}
        # Of what is scanned: the whole of it, or parts where that cannot be written to.
        self._whole: dict[int, Tensor] = {}
        self._slices: dict[int, list[tuple[int, Tensor]]] = {}
        self._live: Live | None = None
        self._stored = Stored()
        self._recorded: dict[int, tuple[Segment, Sequence[bool], Any, Any]] = {}
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
        schedule = Sqrt() if is_watched else schedule
        self._live = call.first(self._inputs)
        forward = (a for a in schedule.forward(length) if not _ends(a, length))
        return itertools.chain(forward, schedule.backward(length))

    def start_at(self, live: Live) -> None:
        """Make a carry the live one, which was not stored."""
        self._live = live

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
                self._live = self._advanced(start, stop)
            case Save(step, storage):
                assert self._live is not None
                self._stored.save(step, self._live, storage)
            case Load(step):
                self._load(step)
            case Drop(step):
                self._stored.drop(step)
            case Reverse(start, stop):
                self._reverse(start, stop)
            case RecordStep(step):
                self._record(step)
            case Backward(step) if step in self._recorded:
                self._pull_recorded(step)
            case Backward(step):  # the forward stored its carry instead
                for part in (Load(step), Reverse(step, step + 1), Drop(step)):
                    self.do(part)

    def _load(self, step: int) -> None:
        """Make a stored carry the live one, and refuse reads of what was changed."""
        self._live = None  # freed first
        # The state of the call knows of carry 0: its tensors are inputs.
        changed = self._stored.changed(step) if step else []
        if changed:
            self._refuse(step, changed)
        self._live = self._stored.load(step)

    def _refuse(self, step: int, changed: Sequence[Tensor]) -> None:
        """Refuse reads of what was changed, in one mode for all carries."""
        if self._refused is None:
            self._refused = self.surroundings.enter_context(RefuseReads())
        name = f"the carry of step {step} of {self._call.steps.label}"
        for t in changed:
            self._refused.refuse(t, lambda name=name: name)

    def _advanced(self, start: int, stop: int) -> Live:
        live, self._live = self._live, None
        assert live is not None
        segment = Segment(self._chain, self._call, live, start, stop)
        inputs = self._cut(start, stop)
        if not self._is_watched:
            return segment.advance(live, inputs)
        outs = evaluate(segment, [*live.tensors, *inputs])
        assert segment.after is not None
        return segment.after._replace(tensors=outs[: len(segment.after.needs)])

    def _cut(self, start: int, stop: int) -> Sequence[Tensor]:
        return self._call.cut_to(self._inputs, start, stop)

    def _slices_of(self, start: int, stop: int) -> tuple[int, int]:
        return self._call.steps.slices(start, stop)

    def _reverse(self, start: int, stop: int) -> None:
        """Pull the cotangents back over some steps."""
        live, self._live = self._live, None
        assert live is not None
        needs = live.needs
        cts = self._cotangents(start, stop, len(needs))
        if not cts:
            return
        segment = Segment(self._chain, self._call, live, start, stop)
        rule = self._rule(segment, needs, [*cts])
        given = [*live.tensors, *self._cut(start, stop), *cts.values()]
        del live
        pull = evaluate if self._is_watched else _run
        self._take(pull(rule, given), needs, start, stop)

    def _record(self, step: int) -> None:
        """Run a step with recording, and hold its graph."""
        live, self._live = self._live, None
        assert live is not None
        assert not self._is_watched
        segment = Segment(self._chain, self._call, live, step, step + 1)
        inputs = [*live.tensors, *self._cut(step, step + 1)]
        inner, outs = self._rule(segment, live.needs, ()).recorded(inputs)
        self._recorded[step] = segment, live.needs, inner, outs
        assert segment.after is not None
        carry = outs[: len(segment.after.needs)]
        self._live = segment.after._replace(
            tensors=[unwrap_dead(o).detach() for o in carry]
        )

    def _pull_recorded(self, step: int) -> None:
        """Pull the cotangents back over a step that was recorded."""
        segment, needs, inner, outs = self._recorded.pop(step)
        cts = self._cotangents(step, step + 1, len(needs))
        if cts:
            rule = self._rule(segment, needs, [*cts])
            grads = rule.pulled_back(outs, [*cts.values()], inner)
            self._take(grads, needs, step, step + 1)

    def _rule(
        self, segment: Segment, needs: Sequence[bool], given: Sequence[int]
    ) -> Vjp:
        """Return the vjp of a segment."""
        request = Request([*needs, *self._call.needs], at_base=False)
        arity = len(request.needs)
        evaluation = Evaluation(request, range(arity), asks_grad_mode=True)
        return Vjp(segment, evaluation, arity, self._wanted_of(needs), given)

    def _wanted_of(self, needs: Sequence[bool]) -> list[int]:
        """Return which inputs of a segment are differentiated."""
        wanted = [i for i, need in enumerate(needs) if need]
        return wanted + [len(needs) + i for i in self._wanted]

    def _cotangents(self, start: int, stop: int, count: int) -> dict[int, Tensor]:
        """Take the cotangents of the outputs of a segment, by index."""
        cts = {j: ct for j, ct in enumerate(self._cts) if ct is not None}
        cts |= self._of_collected(start, stop, len(self._cts))
        self._cts = [None] * count
        return cts

    def _take(
        self, grads: Sequence[Any], needs: Sequence[bool], start: int, stop: int
    ) -> None:
        """Take the gradients that the vjp of a segment gave."""
        found = dict(zip(self._wanted_of(needs), grads, strict=True))
        count = len(needs)
        self._cts = [found.get(i) for i in range(count)]
        first, _ = self._slices_of(start, stop)
        for i in self._wanted:
            self._add(i, found[count + i], first)

    def _of_collected(self, start: int, stop: int, before: int) -> dict[int, Tensor]:
        """Return the cotangents of what steps collect, by output of the segment."""
        cts: dict[int, Tensor] = {}
        width = len(self._collected)
        for k in range(start, stop):
            place = self._slices_of(k, k + 1)[0]
            for j, ct in enumerate(self._collected):
                if ct is not None:
                    cts[before + (k - start) * width + j] = ct.select(0, place)
        return cts

    def _add(self, i: int, grad: Tensor | None, place: int) -> None:
        """Add to the gradient of an input, or note that of slices."""
        if grad is None:
            return
        if i in self._call.scanned:
            self._add_slices(i, grad, place)
        else:
            known = self._grads.get(i)
            self._grads[i] = grad if known is None else known + grad

    def _add_slices(self, i: int, grad: Tensor, place: int) -> None:
        """Write the gradient of slices to its place. Joined, it would be held twice."""
        if self._is_watched or not can_be_written(grad):
            self._slices.setdefault(i, []).append((place, grad))
            return
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


def _ends(action: Action, length: int) -> bool:
    """Say whether an action only computes the result of a chain, which is known."""
    return isinstance(action, Advance) and action.stop == length


def _run(program: Program, inputs: Sequence[Tensor]) -> Outputs:
    return program.run(*inputs)
