"""Programs seen from below a level of torch.func: under a vmap, and in forward mode.

    Batch    (*inputs) -> outs, for all examples at once
    Dual     (*primals, *tangents) -> (*outs, *tangents of outs)

The levels below see a program like any other, and its backward recomputes all at once.

Invariant: the function sees inputs that require grad exactly where it does in plain
code. Else other kernels would be chosen.
Rejected: a node at the level. At a vmap nothing is differentiated. A jvp rule evaluates
once more for the tangents, and below it torch turns forward mode off.
"""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import override

from remat._base.absent import Absent
from remat._base.errors import MutationError
from remat._base.program import (
    Evaluation,
    InputIndex,
    OutputIndex,
    OutsideVmap,
    PerInput,
    Program,
    Request,
    requires_grad,
)
from remat._base.tensors import changed_since, versions_of
from remat._base.types import Outputs
from remat._graph.graph import reached_inputs
from remat._reach.copies import note_copy
from remat._torch import (
    JVP,
    base_dual_level_active,
    base_tensor,
    batch,
    call_at_jvp,
    grad_level,
    has_proxies,
    is_of_torch_func,
    leaf_at,
    lifted,
    no_torch_functions,
    requires_grad_above,
    requires_grad_at_any_level,
    taken_apart_at_jvp,
    unpack_dual,
    unwrap_for_grad,
)


class Below(Program):
    """A program as the levels below see it, run inside of one more level.

    Attributes:
        program: the program.
        needs: which of its inputs some level differentiates that does not show below.
    """

    __slots__ = ("_leaves", "needs", "offloading", "program")

    def __init__(self, program: Program, needs: PerInput) -> None:
        self.program, self.needs = program, needs
        self.offloading = program.offloading
        self._leaves: list[Tensor] = []  # of a forward, until it has ended

    @property
    def arity(self) -> int:
        """How many inputs the program has. Others, if there are any, follow them."""
        return len(self.needs)

    @property
    @override
    def once(self) -> Mapping[int, Any]:  # pyrefly: ignore[bad-override]
        return self.program.once

    @property
    @override
    def outside(self) -> tuple[OutsideVmap, ...]:  # pyrefly: ignore[bad-override]
        return self.program.outside

    @property
    @override
    def is_forward(self) -> bool:
        return self.program.is_forward

    @property
    @override
    def passed(self) -> Sequence[Tensor]:
        return self.program.passed

    @override
    def evaluate_first(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        return self.program.evaluate_first(program, inputs, request)

    @override
    def uses(self, count: int) -> Sequence[InputIndex]:
        return (*self.program.uses(self.arity), *range(self.arity, count))

    @property
    @override
    def own(self) -> Container[InputIndex]:
        return self.program.own

    @property
    @override
    def hooked(self) -> Any:  # pyrefly: ignore[bad-override]
        return self.program.hooked

    @override
    def may_write(self, i: InputIndex, tensor: Tensor) -> bool:
        return i < self.arity and self.program.may_write(i, tensor)

    @override
    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        self.program.refuse_changed(inputs[: self.arity])

    @override
    def refuse_leaks(self, leaves: Sequence[Tensor]) -> None:
        own: list[Tensor] = []
        own, self._leaves = self._leaves, own
        with no_torch_functions():  # a mode of ours refuses tensors of levels that end
            self.program.refuse_leaks(own)  # first, as they lead to leaves further out
        del own
        self.program.refuse_leaks(leaves)

    @override
    def check_reached(
        self,
        outs: Sequence[Any],
        inputs: Sequence[Tensor],
        missing: Sequence[InputIndex],
    ) -> None:
        missing = [i for i in missing if i < self.arity]
        self.program.check_reached(outs, inputs, missing)

    @override
    def own_vjp(
        self,
        seen_as: Program,
        evaluation: Evaluation,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> Program | None:
        return self.program.own_vjp(seen_as, evaluation, wanted, given)

    def _function(self, mode: Any, *, is_marked: bool) -> Callable[..., Any]:
        """Return what is run at the level; marked inputs require grad there."""
        run = self._run_marked if is_marked else self.program.run
        return functools.partial(run, mode=mode)

    def _run_marked(self, *inputs: Tensor, mode: Any) -> Outputs:
        with grad_level() as level:
            pairs = enumerate(zip(inputs, self.needs, strict=True))
            # A level refuses writes to what is not of it. Other constants stay.
            inner = [
                leaf_at(level, t, requires_grad=need)
                if need or is_of_torch_func(t) or self.may_write(i, t)
                else t
                for i, (t, need) in pairs
            ]
            for t, there, need in zip(inputs, inner, self.needs, strict=True):
                if there is not t and not need:
                    there.__dict__ = t.__dict__  # a constant may have attributes
                    note_copy(there, base_tensor(t))  # other threads may find it
            outs = self.program.run(*inner, mode=mode)
            # Here, for below the level the outputs have no graph.
            self._note_marked(outs, inner, mode)
            # A mode may hold results: what leads to leaves is looked for after its end.
            self._leaves = [*compress(inner, self.needs)]
            return tuple(o if o is None else unwrap_for_grad(o, level) for o in outs)

    def _note_marked(
        self, outs: Sequence[Any], inner: Sequence[Tensor], mode: Any
    ) -> None:
        """Note what the graph of a marked run is, before it is dropped."""


def to_save(tensor: Tensor, lifted: Tensor) -> Tensor:
    """Return what a node of a level saves of an input: torch saves no inference one."""
    return tensor if tensor.is_inference() else lifted


def needs_above(
    program: Program, request: Request, needs: PerInput, level: int
) -> list[bool]:
    """Return which inputs are differentiated where that does not show below a level.

    Args:
        program: whose inputs they are.
        request: what is asked of it.
        needs: which are differentiated below.
        level: of a vmap or a jvp.
    """
    pairs = zip(request.needs, needs, strict=True)
    found = [need and not below for need, below in pairs]
    if True in needs:
        with no_torch_functions():  # a mode of ours refuses tensors of levels above
            for i, t in enumerate(program.passed):
                found[i] = found[i] or requires_grad_above(t, level)
    return found


class Batch(Below):
    """A program under vmap: one evaluation computes all examples.

    Its `needs` are the inputs that are differentiated only outside the vmap.
    """

    __slots__ = ("_found", "out_dims", "vmap")

    def __init__(
        self, program: Program, needs: PerInput, vmap: tuple[Any, int, str]
    ) -> None:
        super().__init__(program, needs)
        self.vmap = vmap
        self._found: tuple[OutsideVmap, ...] = ()
        self.out_dims: tuple[Any, ...] = ()

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the program on every element of the batch."""
        # Asked before the run: after it the program is a forward no more.
        is_marked = self.program.is_forward and True in self.needs
        function = self._function(mode, is_marked=is_marked)
        outs, self.out_dims = batch(function, *self.vmap)(*inputs)
        return outs

    @property
    def batches_inputs(self) -> bool:
        """Whether it batches any input. A vmap over cotangents batches none."""
        return {*self.vmap[0]} != {None}

    @property
    def found(self) -> Any:
        """What a run found of the level, to be set where no run is made."""
        return self.out_dims

    @found.setter
    def found(self, found: Any) -> None:
        self.out_dims = found

    @override
    def _note_marked(
        self, outs: Sequence[Any], inner: Sequence[Tensor], mode: Any
    ) -> None:
        if mode is not None:
            # Now, for at its end the mode is told of outputs without this graph.
            mode.note_saved(outs)
        differentiable = [j for j, o in enumerate(outs) if requires_grad(o)]
        used, asks_grad_mode, certain = reached_inputs(outs, inner)
        found = OutsideVmap(used, differentiable, asks_grad_mode, certain)
        self._found = (found,)

    @property
    @override
    def outside(self) -> tuple[OutsideVmap, ...]:
        return (*self.program.outside, *self._found)

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return (*self.program.signature, *self.needs, *self.vmap)

    @override
    def may_read_early(self, tensor: Tensor) -> bool:
        return self.program.may_read_early(tensor)


class Dual(Below):
    """A program in forward mode: one evaluation gives values and tangents.

    Its `needs` are the inputs that a level above differentiates, or that of the user's
    dual numbers.
    """

    __slots__ = (
        "_marked",
        "_versions",
        "_with_tangents",
        "count",
        "is_split",
        "positions",
    )

    def __init__(
        self, program: Program, needs: PerInput, with_tangents: Sequence[InputIndex]
    ) -> None:
        super().__init__(program, needs)
        self._with_tangents, self.count = with_tangents, 0
        self.is_split = True in needs  # then its node is of values alone
        self._marked = self.is_split and program.is_forward
        self.positions: list[OutputIndex] | None = None  # of outputs with tangents
        self._versions: Sequence[int | None] | None = None

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the program on dual numbers, in a level of their own."""
        primals, tangents = inputs[: self.arity], inputs[self.arity :]
        # Before the run, which would read a tangent that changed.
        if not has_proxies():
            tensors = [*map(base_tensor, tangents)]
            if self._versions is None:
                self._versions = versions_of(tensors)
            elif changed_since(tensors, self._versions, (Absent,)):
                raise MutationError(_CHANGED)
        function = self._function(mode, is_marked=self._marked)
        written = [i for i, t in enumerate(primals) if self.program.may_write(i, t)]
        given = self._with_tangents, tangents
        outs, found = call_at_jvp(function, primals, *given, written)
        self.count = len(outs)
        if self.positions is None:
            self.positions = [j for j, t in enumerate(found) if t is not None]
        pairs = ((outs[j], found[j]) for j in self.positions)
        return (*outs, *(torch.zeros_like(o) if t is None else t for o, t in pairs))

    @property
    def found(self) -> Any:
        """What a run found of the level, to be set where no run is made."""
        return self.count, self.positions

    @found.setter
    def found(self, found: Any) -> None:
        self.count, self.positions = found

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return (*self.program.signature, "dual", *self._with_tangents)

    def taken_apart(
        self, results: Sequence[Any], evaluation: Evaluation
    ) -> "DualResults":
        """Take apart what an evaluation of this gave."""
        positions = self.positions or ()
        count, end = self.count, self.count + len(positions)
        tangents = dict(zip(positions, results[count:end], strict=True))
        request, differentiable = evaluation.request, evaluation.differentiable
        last = len(results) - evaluation.residuals
        of_program = evaluation._replace(
            residuals=0,
            planned=None,
            request=request._replace(needs=request.needs[: self.arity]),
            used=[i for i in evaluation.used if i < self.arity],
            differentiable=[*differentiable[:count], *differentiable[end:last]],
            shared=[j for j in evaluation.shared if j < count],
        )
        outs = [*results[:count], *results[end:last]]
        return DualResults(outs, tangents, of_program)


class Duals(NamedTuple):
    """The inputs of a program in forward mode, from below the level."""

    primals: Sequence[Tensor]
    with_tangents: Sequence[InputIndex]
    tangents: Sequence[Tensor]

    @classmethod
    def at_level(cls, layer: Any, inputs: Sequence[Tensor]) -> "Duals":
        """Take the inputs of a program at a jvp level apart."""
        level, are_duals = layer.level(), base_dual_level_active()
        pairs = [
            taken_apart_at_jvp(level, there)
            if are_duals or is_of_torch_func(t)
            else (t, None)  # a constant, which stays itself
            for t, there in zip(inputs, lifted(layer, JVP, inputs), strict=True)
        ]
        return cls.of_pairs(pairs)

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> "Duals":
        """Return what pairs of a primal and a tangent, if it has one, are."""
        with_tangents = [i for i, (_, t) in enumerate(pairs) if t is not None]
        tangents = [t for _, t in pairs if t is not None]
        return cls([t for t, _ in pairs], with_tangents, tangents)

    @classmethod
    def here(cls, inputs: Sequence[Tensor]) -> "Duals":
        """Take inputs apart that may be dual numbers of a user's `dual_level`."""
        return cls.of_pairs([*map(unpack_dual, inputs)])

    def request(self, dual: Dual, request: Request) -> Request:
        """Return the request for `dual`, given the request for its program."""
        needs = [*request.needs, *map(requires_grad_at_any_level, self.tangents)]
        is_split = request.is_split or dual.is_split
        return request._replace(needs=needs, is_jvp=True, is_split=is_split)


class DualResults(NamedTuple):
    """What a program in forward mode gave, taken apart."""

    outs: Sequence[Any]  # and what updated inputs held before
    tangents: Mapping[OutputIndex, Tensor]
    evaluation: Evaluation

    def joined(self, outs: Sequence[Any]) -> list[Any]:
        """Return these outputs, or others in their places, as dual numbers here."""
        joined = [*outs]
        for j, tangent in self.tangents.items():
            joined[j] = forward_ad.make_dual(_dense(joined[j]), tangent)
        return joined


def _dense(tensor: Tensor) -> Tensor:
    """Copy a tensor several of whose elements are one in memory, by `expand`.

    torch copies a tangent into memory that is laid out like the value. Not to be called
    in the forward of a Function, where levels below would record no copy.
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    is_expanded = any(size > 1 and stride == 0 for size, stride in pairs)
    return tensor.contiguous() if is_expanded else tensor


_CHANGED = (
    "remat: a tangent was changed in place since the forward, and a backward needs it "
    "as it was. Change a copy, or take the backward first."
)
