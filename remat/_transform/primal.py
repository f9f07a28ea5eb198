"""A user's call as a program: its first run is the forward, later ones recompute.

`api` makes one, and `function` evaluates it. The vjp of it runs it again, and so do
`Batch` and `Dual`.

Invariant: the forward fixes the structure of the result and the state that recomputes
restore and are checked against.
Rejected: running the forward without grad mode. Composite operations decompose
differently there, so a recompute would be another function.
"""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from remat._base.context import here, within
from remat._base.program import Evaluation, Program, Request
from remat._base.tracebacks import note
from remat._base.types import Fn, Outputs
from remat._capture.structure import Out
from remat._torch import torch_functions
from remat._transform import checks, reached
from remat._transform.buffers import copies_of_buffers
from remat._transform.call import Call
from remat._transform.forward import evaluate_forward


if TYPE_CHECKING:
    from remat._transform.state import State


class Primal(Program):
    """One call of a user's function, as a program.

    Args:
        call: the call.

    Attributes:
        call: the call.
        state: what the forward ran in; None until it has.
        evaluation: of the forward; None until then.
    """

    __slots__ = ("__weakref__", "_counts", "call", "evaluation", "state")

    def __init__(self, call: Call) -> None:
        self.call, self._counts = call, (0, 0)  # of inputs and outputs
        self.state: State | None = None
        self.evaluation: Evaluation | None = None

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return self.call.snapshot.signature

    @override
    def may_read_early(self, tensor: Tensor) -> bool:
        """Ask who traces the call."""
        says = self.call.may_read_early
        return says is not None and says(tensor)

    @property
    @override
    def is_forward(self) -> bool:
        """Whether the next run is the first."""
        return self.call.structure is None

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.call.snapshot.label

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        return self.call.snapshot.name_of(index)

    @override
    def forward(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate for the first time, as `program`: this, or one that evaluates it."""
        results, evaluation, state = evaluate_forward(
            self.call, program, inputs, request
        )
        self.evaluation, self.state = evaluation, state
        if request.in_forward_mode:  # recomputes are given no tangents beside primals
            arity, count = self._counts
            differentiable = evaluation.differentiable[:count]
            self.evaluation = evaluation._replace(differentiable=differentiable)
            self.state = state.of_first(arity)
        return results, evaluation

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Recompute, in the state of the forward; the first time, be the forward."""
        call = self.call
        if call.structure is None:
            return self._run_forward(inputs, mode)
        context = here()
        context.recomputing = (*context.recomputing, self)
        try:
            return self._recompute(call.structure, inputs, mode)
        except Exception as error:
            note(error, f"remat: raised while recomputing {self.label}.")
            raise
        finally:
            context.recomputing = context.recomputing[:-1]

    def _run_forward(self, inputs: Sequence[Tensor], mode: Any) -> Outputs:
        call, context = self.call, here()
        if context.examining is not None:
            context.examining.entered(self, inputs)
        context.functions += 1
        try:
            result = self._under(mode, call.run_forward, inputs)
        finally:
            context.functions -= 1
        outs = call.split(result, inputs)
        self._counts = len(inputs), len(outs)
        return outs

    def _recompute(self, out: Out, inputs: Sequence[Tensor], mode: Any) -> Outputs:
        result, inputs = self.again(self.call.run_again, inputs, mode, self.state)
        return out.split_again(result, inputs)

    def again(
        self, run: Fn, inputs: Sequence[Tensor], mode: Any, state: "State | None"
    ) -> tuple[Any, Sequence[Tensor]]:
        """Run something on inputs, in a state of the forward.

        Returns:
            The result, and the inputs as it was given them.
        """
        evaluation = self.evaluation
        assert state is not None
        assert evaluation is not None
        with state.restored(self.call.snapshot, inputs, mode):
            if evaluation.updated:
                inputs = copies_of_buffers(inputs, evaluation.updated)
            if not state.has_classes():
                return self._under(mode, run, inputs), inputs
            inputs = state.in_classes(inputs)
            with torch_functions():
                return self._under(mode, run, inputs), inputs

    def _under(self, mode: Any, run: Fn, inputs: Sequence[Tensor]) -> Any:
        """Run the function under the policy of the call, and a mode if there is one."""
        policy = self.call.policy
        if mode is None and policy is None:
            return run(inputs)
        around = within(policy, followed=mode is not None)
        with around, mode or contextlib.nullcontext():
            result = run(inputs)
        if mode is not None:
            mode.end()
        return result

    @override
    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        """Refuse inputs that were changed in place since the forward.

        Raises:
            MutationError: one was.
        """
        assert self.state is not None
        self.state.refuse_changed(self.call.snapshot, inputs)

    @override
    def check_outputs(self, outs: Sequence[Any]) -> bool:
        """Check that the outputs of a recompute are differentiable as in the forward.

        Raises:
            RecomputeError: they are not.
        """
        assert self.evaluation is not None
        then = self.evaluation.differentiable
        checks.check_differentiable(self.call.snapshot, outs, then)
        return True

    @override
    def check_reached(
        self, outs: Sequence[Any], inputs: Sequence[Tensor], missing: Sequence[int]
    ) -> None:
        """Check that a recompute reaches the inputs that the forward reached.

        Raises:
            RecomputeError: it does not reach one, whose gradient would be lost.
        """
        evaluation, snapshot = self.evaluation, self.call.snapshot
        assert evaluation is not None
        # Where nobody looked what the forward reached, there is nothing to compare.
        is_known = not reached.reaches_only_inputs(snapshot, evaluation.request)
        missing = [i for i in missing if i in evaluation.certain]
        if is_known and missing:
            checks.check_reached(snapshot, outs, inputs, missing)
