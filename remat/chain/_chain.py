"""A chain: a call whose function runs again and again, as one node.

Its forward runs step after step, and leaves the checkpoints of its schedule behind. Its
backward is a `Reversal`.

Invariant: the graph holds the inputs of the chain, and a chain of any length one node.
Rejected: a node for each segment, as nested calls would have. A checkpoint could not be
let go of before the whole backward has ended.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.errors import CaptureError
from remat._base.program import (
    Evaluation,
    InputIndex,
    OutputIndex,
    PerInput,
    Program,
    Request,
    has_derivatives,
)
from remat._base.types import Outputs
from remat._torch import current_layer, requires_grad_at_any_level
from remat._transform.function import evaluate
from remat._transform.levels import Below
from remat.chain._forward import CHANGED, ChainProgram
from remat.chain._reversal import Reversal, is_recorded_at_any_level
from remat.chain._segment import segment_from
from remat.chain._segments import Sqrt, Uniform, ranges_of
from remat.chain._steps import cutting


class Chain(ChainProgram):
    """All steps of a chain."""

    __slots__ = ()

    @override
    def evaluate_first(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate for the first time, and keep the checkpoints."""
        call = self.call
        call.needs = _needs_of(program, request)
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
            rows += _cut_rows(outs[len(live.tensors) :], len(steps))
        if call.steps.is_reversed:
            rows.reverse()
        columns = [torch.stack([*c]) for c in zip(*rows, strict=True)]
        places = [*call.outs.of_carry, *call.outs.of_collected]
        found = dict(zip(places, [*live.tensors, *columns], strict=True))
        return tuple(found[j] for j in range(len(places)))


def _cut_rows(tensors: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Return what each of some steps collected."""
    width = len(tensors) // count
    return [tensors[i * width : (i + 1) * width] for i in range(count)] if width else []


def _needs_of(program: Program, request: Request) -> PerInput:
    """Return which inputs some level differentiates, inside a vmap or outside."""
    needs = request.needs
    while isinstance(program, Below):
        pairs = zip(needs[: program.arity], program.needs, strict=True)
        needs = [inside or outside for inside, outside in pairs]
        program = program.program
    return needs


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
    # To wait for an accelerator takes longer than to send it a zero.
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
