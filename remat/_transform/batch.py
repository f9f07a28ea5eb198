"""A program under vmap, as a program: one evaluation computes all examples.

`function` makes one where the innermost level is a vmap, and evaluates it below.

Invariant: inputs that are differentiated only outside of the vmap do not require grad
inside of it, as in plain code. Else other kernels would be chosen.
Rejected: a node at the level of a vmap. Nothing is differentiated there.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.program import Evaluation, OutsideVmap, Program, Request
from remat._base.types import Outputs
from remat._torch import batch, grad_level, leaf_at, unwrap_for_grad
from remat._transform.reached import reached_inputs
from remat._transform.vjp import requires_grad


class Batch(Program):
    """A program under vmap: the same call, seen from below that level.

    Args:
        unbatched: the program.
        needs_outside: which inputs are differentiated only outside the vmap.
        vmap: in_dims, batch size and randomness.

    Attributes:
        unbatched: the program.
        out_dims: where its outputs are batched, once it has run.
    """

    __slots__ = (
        *("needs_outside", "_vmap", "once", "out_dims", "outside", "unbatched"),
    )
    once: Mapping[int, Any]
    outside: tuple[OutsideVmap, ...]

    def __init__(
        self,
        unbatched: Program,
        needs_outside: Sequence[bool],
        vmap: tuple[Any, int, str],
    ) -> None:
        self.unbatched, self.needs_outside, self._vmap = unbatched, needs_outside, vmap
        self.out_dims: tuple[Any, ...] = ()
        self.outside = ()
        self.once = {}

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the program on every element of the batch."""
        program = self.unbatched
        is_marked = program.is_forward and True in self.needs_outside
        run = self._run_forward if is_marked else program.run
        run = functools.partial(run, mode=mode)
        outs, self.out_dims = batch(run, *self._vmap)(*inputs)
        if not is_marked:
            self.outside = program.outside
        self.once = program.once
        return outs

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        """That of the program, and how it is batched."""
        return (*self.unbatched.signature, *self.needs_outside, *self._vmap)

    def _run_forward(self, *inputs: Tensor, mode: Any) -> Outputs:
        # As plain code sees them: requiring grad outside the vmap and not inside it,
        # where other kernels would be chosen.
        with grad_level() as level:
            pairs = zip(inputs, self.needs_outside, strict=True)
            inner = [leaf_at(level, t, requires_grad=need) for t, need in pairs]
            outs = self.unbatched.run(*inner, mode=mode)
            if mode is not None:
                mode.note_saved(outs)
            differentiable = [j for j, o in enumerate(outs) if requires_grad(o)]
            used, asks_grad_mode, certain = reached_inputs(outs, inner)
            found = OutsideVmap(used, differentiable, asks_grad_mode, certain)
            self.outside = (*self.unbatched.outside, found)
            return tuple(o if o is None else unwrap_for_grad(o, level) for o in outs)

    @override
    def uses(self, count: int) -> Sequence[int]:
        """Return what the program uses."""
        return self.unbatched.uses(count)

    @override
    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        """Refuse what the program refuses."""
        self.unbatched.refuse_changed(inputs)

    @override
    def check_reached(
        self, outs: Sequence[Any], inputs: Sequence[Tensor], missing: Sequence[int]
    ) -> None:
        """Check that the program reaches what it reached."""
        self.unbatched.check_reached(outs, inputs, missing)

    @override
    def may_read_early(self, tensor: Tensor) -> bool:
        """Ask the program."""
        return self.unbatched.may_read_early(tensor)

    @property
    @override
    def is_forward(self) -> bool:
        """Whether the next run is the forward of a user's call."""
        return self.unbatched.is_forward

    @override
    def forward(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate the forward of the user's call."""
        return self.unbatched.forward(program, inputs, request)

    @override
    def pulled(
        self, program: Program, wanted: Sequence[int], given: Sequence[int]
    ) -> Program | None:
        """Return the vjp that the user's call has for it, if any."""
        return self.unbatched.pulled(program, wanted, given)
