"""A program in forward mode, as a program: one evaluation gives values and tangents.

    (*primals, *tangents) -> (*outs, *tangents of outs)

`function` makes one where the innermost level is a jvp, and evaluates it below, as it
does with `Batch` under a vmap. The levels below see a program like any other: they
batch it, or make a node of it, whose backward recomputes values and tangents at once.

Invariant: the function sees inputs that require grad where it does in plain code. And
no node relies on forward mode. torch turns it off within `Function.jvp`, so
a second level of it around would see tangents of zero.
Rejected: a node with a jvp rule. It evaluates the program once more for the tangents.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import override

from remat._base.errors import MutationError
from remat._base.program import Evaluation, OutsideVmap, Program, Request
from remat._base.tensors import versions_of
from remat._base.types import Outputs
from remat._torch import (
    JVP,
    base_tensor,
    grad_level,
    has_proxies,
    leaf_at,
    lifted,
    push_forward,
    requires_grad_at_any_level,
    taken_apart_at_jvp,
    unpack_dual,
    unwrap_for_grad,
)


class Dual(Program):
    """A program in forward mode: the same call, seen from below that level.

    Args:
        primal: the program.
        given: the inputs that have tangents.
        needs: which inputs some level differentiates that does not show below: one
            above this, or that of the user's dual numbers.

    Attributes:
        is_split: whether there is such a level. Its node is of values alone.
        primal: the program.
        arity: how many inputs it has.
        count: how many outputs it has, once it has run.
        positions: of those that have tangents, once it has run.
    """

    __slots__ = (
        *("_given", "_marked", "_needs", "_versions", "arity", "count", "is_split"),
        *("positions", "primal"),
    )

    def __init__(
        self, primal: Program, given: Sequence[int], needs: Sequence[bool]
    ) -> None:
        self.primal, self.arity, self._given = primal, len(needs), given
        self.count, self._needs = 0, needs
        self.is_split = True in needs
        self._marked = self.is_split and primal.is_forward
        self.positions: list[int] | None = None
        self._versions: Sequence[int | None] | None = None

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the program on dual numbers, in a level of their own."""
        primals, tangents = inputs[: self.arity], inputs[self.arity :]
        self._refuse_changed(tangents)
        run = self._run_marked if self._marked else self.primal.run
        run = functools.partial(run, mode=mode)
        outs, found = push_forward(run, primals, self._given, tangents)
        self.count = len(outs)
        if self.positions is None:
            self.positions = [j for j, t in enumerate(found) if t is not None]
        pairs = ((outs[j], found[j]) for j in self.positions)
        return (*outs, *(torch.zeros_like(o) if t is None else t for o, t in pairs))

    def _run_marked(self, *duals: Tensor, mode: Any) -> Outputs:
        # As plain code sees them: requiring grad.
        with grad_level() as level:
            pairs = zip(duals, self._needs, strict=True)
            inner = [leaf_at(level, t, requires_grad=need) for t, need in pairs]
            outs = self.primal.run(*inner, mode=mode)
            return tuple(o if o is None else unwrap_for_grad(o, level) for o in outs)

    def _refuse_changed(self, tangents: Sequence[Tensor]) -> None:
        """Refuse tangents that were changed in place since the first run."""
        if has_proxies():
            return
        versions = versions_of([*map(base_tensor, tangents)])
        if self._versions is None:
            self._versions = versions
        elif versions != self._versions:
            raise MutationError(_CHANGED)

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        """That of the program, and which inputs have tangents."""
        return (*self.primal.signature, "dual", *self._given)

    @property
    @override
    def once(self) -> Mapping[int, Any]:  # pyrefly: ignore[bad-override]
        """That of the program."""
        return self.primal.once

    @property
    @override
    def outside(self) -> tuple[OutsideVmap, ...]:  # pyrefly: ignore[bad-override]
        """That of the program."""
        return self.primal.outside

    @property
    @override
    def is_forward(self) -> bool:
        """Whether the next run is the forward of a user's call."""
        return self.primal.is_forward

    @override
    def forward(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate the forward of the user's call."""
        return self.primal.forward(program, inputs, request)

    @override
    def uses(self, count: int) -> Sequence[int]:
        """Return what the program uses, and the tangents."""
        return (*self.primal.uses(self.arity), *range(self.arity, count))

    @override
    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        """Refuse what the program refuses."""
        self.primal.refuse_changed(inputs[: self.arity])

    @override
    def check_reached(
        self, outs: Sequence[Any], inputs: Sequence[Tensor], missing: Sequence[int]
    ) -> None:
        """Check that the program reaches what it reached."""
        missing = [i for i in missing if i < self.arity]
        self.primal.check_reached(outs, inputs, missing)


class Duals(NamedTuple):
    """The inputs of a program in forward mode, from below the level.

    Attributes:
        primals: all inputs, without tangents.
        given: those that have tangents.
        tangents: of those.
    """

    primals: Sequence[Tensor]
    given: Sequence[int]
    tangents: Sequence[Tensor]

    def of(self, program: Program, needs: Sequence[bool]) -> Dual:
        """Return a program that is evaluated on these. `needs` is as of `Dual`."""
        return Dual(program, self.given, needs)

    def request(self, dual: Dual, request: Request) -> Request:
        """Return what is asked of that program, given what is asked of its primal."""
        needs = [*request.needs, *map(requires_grad_at_any_level, self.tangents)]
        is_split = request.is_split or dual.is_split
        return request._replace(needs=needs, in_forward_mode=True, is_split=is_split)


def duals_at_level(layer: Any, inputs: Sequence[Tensor]) -> Duals:
    """Take the inputs of a program at a jvp level apart."""
    level = layer.level()
    pairs = [taken_apart_at_jvp(level, t) for t in lifted(layer, JVP, inputs)]
    return _duals(pairs)


def duals_here(inputs: Sequence[Tensor]) -> Duals:
    """Take inputs apart that may be dual numbers of a `dual_level` of the user's."""
    return _duals([*map(unpack_dual, inputs)])


def _duals(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Duals:
    given = [i for i, (_, t) in enumerate(pairs) if t is not None]
    tangents = [t for _, t in pairs if t is not None]
    return Duals([t for t, _ in pairs], given, tangents)


class Found(NamedTuple):
    """What a program in forward mode gave, taken apart.

    Attributes:
        outs: what its primal gives: the outputs, and what updated inputs held before.
        tangents: of outputs, by index.
        evaluation: of the primal.
    """

    outs: Sequence[Any]
    tangents: Mapping[int, Tensor]
    evaluation: Evaluation

    def joined(self, outs: Sequence[Any]) -> list[Any]:
        """Return outputs as dual numbers of the innermost level.

        Args:
            outs: those of this, or others in their places.
        """
        joined = [*outs]
        for j, tangent in self.tangents.items():
            joined[j] = forward_ad.make_dual(_dense(joined[j]), tangent)
        return joined


def taken_apart(dual: Dual, results: Sequence[Any], evaluation: Evaluation) -> Found:
    """Take apart what a program in forward mode gave."""
    positions = dual.positions or ()
    count, end = dual.count, dual.count + len(positions)
    tangents = dict(zip(positions, results[count:end], strict=True))
    request, differentiable = evaluation.request, evaluation.differentiable
    last = len(results) - evaluation.residuals
    of_primal = evaluation._replace(
        residuals=0,
        recomputation=None,
        request=request._replace(needs=request.needs[: dual.arity]),
        used=[i for i in evaluation.used if i < dual.arity],
        differentiable=[*differentiable[:count], *differentiable[end:last]],
        shared=[j for j in evaluation.shared if j < count],
    )
    return Found([*results[:count], *results[end:last]], tangents, of_primal)


def _dense(tensor: Tensor) -> Tensor:
    """Copy a tensor that is expanded.

    torch copies a tangent into memory that is laid out like the value. Not to be called
    in the forward of a Function, where levels below would record no copy.
    """
    return tensor.contiguous() if _is_expanded(tensor) else tensor


def _is_expanded(tensor: Tensor) -> bool:
    """Say whether several elements of a tensor are one in memory, by `expand`."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


_CHANGED = (
    "remat: a tangent was changed in place since the forward, and a backward needs it "
    "as it was. Change a copy, or take the backward first."
)
