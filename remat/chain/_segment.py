"""A segment: some steps of a chain as a program, whose inputs begin with a carry.

Invariant: a segment runs in the state of the chain's forward, and random streams are
where they were at its first step.
Rejected: slicing what is scanned inside the segment. The gradient of a slice would be
as large as the whole, in each step.
"""

import functools
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._ambient.ambient import noted
from remat._base import program
from remat._base.context import here
from remat._base.errors import note
from remat._base.program import Evaluation, InputIndex, Program, Request
from remat._base.types import Outputs
from remat._torch.autograd import without_hooks
from remat._transform.state import CallState
from remat.chain import _steps
from remat.chain._forward import ChainProgram
from remat.chain._steps import Between, Cut, Live


class Segment(Program):
    """Some steps of a chain.

    Its inputs are the tensors of a carry, and the inputs of the chain, where what is
    scanned is cut to the steps. Its outputs are the tensors of the carry after the
    steps, and then what is collected of each step.
    """

    def __init__(self, chain: ChainProgram, live: Live, start: int, stop: int) -> None:
        self._chain, self._call = chain, chain.call
        self._live = live._replace(tensors=())
        self._numbers = range(start, stop)
        self._offset = chain.call.steps.slices(start, stop)[0]
        self._ambient: Any = None
        self._objects: Between | None = None
        self._after: Live | None = None

    @property
    @override
    def own(self) -> Container[InputIndex]:
        """Those of the chain, which come after the tensors of the carry here."""
        own, count = self._chain.own, len(self._live.needs)
        return {count + i for i in range(len(self._call.needs)) if i in own}

    def carry_of(self, outs: Sequence[Tensor]) -> Live:
        """Return the carry that the outputs of the last run begin with."""
        assert self._after is not None
        return self._after._replace(tensors=outs[: len(self._after.needs)])

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Run the steps as plain code does."""
        count = len(self._live.needs)
        live = self._live._replace(tensors=inputs[:count])

        def call(fn: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
            steps = self._call.steps
            return _steps.through(
                steps, fn, args, live.tree, self._numbers, self._offset
            )

        carry, ys = self._called(call, inputs[count:], mode, here().runs)
        tensors, frame = _steps.tensors_and_frame(carry)
        # The tensors do not show that a level outside differentiates them.
        needs = [*map(program.has_derivatives, tensors)]
        self._after = Live((), frame, needs, self._ambient, self._objects)
        return (*tensors, *(t for y in ys for t in _steps.tensors_and_frame(y)[0]))

    @override
    def evaluate(
        self, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Run the steps, each with its own graph."""
        known = [*self._live.needs, *self._call.needs]
        needs = [*map(operator.or_, known, request.needs)]
        values, flags = self._step_by_step(inputs, needs, collects=True)
        return values, Evaluation(request, range(len(inputs)), flags)

    def advance(self, inputs: Sequence[Tensor]) -> Live:
        """Run the steps, each with its own graph; return the carry after them."""
        needs = [*self._live.needs, *self._call.needs]
        return self.carry_of(self._step_by_step(inputs, needs, collects=False)[0])

    def _step_by_step(
        self, inputs: Sequence[Tensor], needs: Sequence[bool], *, collects: bool
    ) -> tuple[list[Tensor], list[bool]]:
        """Return the values of the outputs, and which of them require grad."""
        steps, count = self._call.steps, len(self._live.needs)
        live = self._live._replace(tensors=inputs[:count], needs=needs[:count])
        values: list[Tensor] = []
        flags: list[bool] = []

        def call(cut: Cut, fn: Any, args: Sequence[Any]) -> Live:
            now, called, offset = live, (fn, args), self._offset
            for k in self._numbers:
                # Its leaves are the carry before: to hold them is to hold one more.
                now, row = _steps.run_step(steps, called, cut, now, k, offset)[:2]
                if collects:
                    values.extend(row.tensors)
                    flags.extend(row.needs)
            return now

        with _steps.cutting(inputs[count:], needs[count:], self._chain.own) as cut:
            run = functools.partial(call, cut)
            last = without_hooks(self._called, run, cut.inputs, None)
        self._after = last._replace(
            tensors=(), ambient=self._ambient, objects=self._objects
        )
        return [*last.tensors, *values], [*last.needs, *flags]

    def _called(
        self,
        call: Callable[[Any, Sequence[Any]], Any],
        inputs: Sequence[Tensor],
        mode: Any,
        runs: list[Any] | None = None,
    ) -> Any:
        """Call something with the function and the arguments of the chain.

        `runs` gets the run, if its graph is to be differentiated.
        """
        chain, context, all_steps = self._chain, here(), self._call
        reach, state = all_steps.reach, self._state()

        def run(inputs: Sequence[Tensor]) -> Any:
            def body(fn: Any, args: Sequence[Any]) -> Any:
                found = call(fn, args)
                if all_steps.changes:
                    self._objects = all_steps.noted(fn, args, inputs)
                if state.ambient.moved or all_steps.makes_streams:
                    streams = (self._objects or all_steps).reach.streams
                    self._ambient = noted(streams, self._live.ambient)
                return found

            between = self._live.objects
            if between is None:
                return reach.run(inputs, body, runs)
            other, numbers = between.reach, between.numbers

            def users() -> list[Any]:
                return [*map(reach.alive().__getitem__, numbers)]

            tensors = [*map(inputs.__getitem__, numbers)]
            return other.run(tensors, body, runs, users)

        # Calls within ask whether they are recomputed, and read what they kept.
        before = context.recomputing, context.regions
        context.recomputing = (*before[0], chain)
        if chain.kept:
            first = all_steps.kept_from[self._numbers.start]
            context.regions = (*before[1], [chain.kept, True, first, True])
        try:
            return chain.again(run, inputs, mode, state)[0]
        except Exception as error:
            note(error, f"remat: raised while recomputing {chain.label}.")
            raise
        finally:
            context.recomputing, context.regions = before

    def _state(self) -> CallState:
        """Return what the first of the steps ran in."""
        state, live = self._chain.state, self._live
        assert state is not None
        if live.objects is not None and (modes := live.objects.modes) is not None:
            known = state.modes
            modes = modes if known is None else modes.watched_with(known)
            state = state._replace(modes=modes)
        if live.ambient is not None:
            state = state._replace(ambient=live.ambient)
        return state


def segment_from(
    chain: ChainProgram, live: Live, inputs: Sequence[Tensor], steps: tuple[int, int]
) -> tuple[Segment, list[Tensor]]:
    """Return some steps from a carry on, and what they are given."""
    call, cut = chain.call, [*inputs]
    first, end = call.steps.slices(*steps)
    for i in call.scanned:
        cut[i] = cut[i].narrow(0, first, end - first)
    return Segment(chain, live, *steps), [*live.tensors, *cut]
