"""Programs seen from below a level of torch.func: under a vmap, and in forward mode.

    Batch    (*inputs) -> outs, for all examples at once
    Dual     (*primals, *tangents) -> (*outs, *tangents of outs)

Invariant: the function sees inputs that require grad exactly where it does in plain
code. Else other kernels would be chosen.
Rejected: a node at the level. At a vmap nothing is differentiated. A jvp rule evaluates
once more for the tangents, and below it torch turns forward mode off.
"""

import functools
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, Self

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
    PerInput,
    Program,
    Reached,
    Request,
    requires_grad,
)
from remat._base.tensors import changed_since, versions_of
from remat._base.types import Outputs
from remat._graph.graph import reached_inputs
from remat._reach.copies import note_copy
from remat._torch.autograd import base_dual_level_active
from remat._torch.levels import (
    JVP,
    base_tensor,
    batch,
    call_at_jvp,
    grad_level,
    is_of_torch_func,
    leaf_at,
    lifted,
    requires_grad_above,
    requires_grad_at_any_level,
    taken_apart_at_jvp,
    unpack_dual,
    unwrap_for_grad,
)
from remat._torch.modes import no_torch_functions
from remat._torch.tracing import has_proxies


def _of_program(name: str) -> Any:
    return property(attrgetter(f"program.{name}"))


class Below(Program):
    """A program as the levels below see it, run inside of one more level.

    Attributes:
        program: the program.
        needs: which of its inputs some level differentiates that does not show below.
        arity: how many inputs the program has. Others, if there are any, follow them.
    """

    __slots__ = ("_leaves", "arity", "needs", "offloading", "program")
    # These are those of the program.
    once, outside = _of_program("once"), _of_program("outside")
    passed, own = _of_program("passed"), _of_program("own")
    hooked, is_forward = _of_program("hooked"), _of_program("is_forward")
    evaluate_first, own_vjp = _of_program("evaluate_first"), _of_program("own_vjp")

    def __init__(self, program: Program, needs: PerInput) -> None:
        self.program, self.needs, self.arity = program, needs, len(needs)
        self.offloading = program.offloading
        self._leaves: list[Tensor] = []  # of a forward, until it has ended

    @override
    def uses(self, count: int) -> Sequence[InputIndex]:
        return (*self.program.uses(self.arity), *range(self.arity, count))

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

    def _run_marked(self, *inputs: Tensor, mode: Any) -> Outputs:
        with grad_level() as level:
            inner: list[Tensor] = []
            for i, (t, need) in enumerate(zip(inputs, self.needs, strict=True)):
                # A level refuses writes to what is not of it. Other constants stay.
                if need or is_of_torch_func(t) or self.may_write(i, t):
                    there = leaf_at(level, t, requires_grad=need)
                    if not need:
                        there.__dict__ = t.__dict__  # a constant may have attributes
                        note_copy(there, base_tensor(t))  # other threads may find it
                    t = there
                inner.append(t)
            outs = self.program.run(*inner, mode=mode)
            if isinstance(self, Batch):  # here: below the level outputs have no graph
                self.note_outside(outs, inner, mode)
            # A mode may hold results: what leads to leaves is looked for after its end.
            self._leaves = [*compress(inner, self.needs)]
            return tuple(o if o is None else unwrap_for_grad(o, level) for o in outs)


def needs_above(
    program: Program, request: Request, needs: PerInput, level: int
) -> list[bool]:
    """Return which inputs are differentiated where that does not show below a level.

    `needs` says which are differentiated below. The level is of a vmap or a jvp.
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

    __slots__ = ("_outside", "found", "vmap")

    def __init__(
        self, program: Program, needs: PerInput, vmap: tuple[Any, int, str]
    ) -> None:
        super().__init__(program, needs)
        self.vmap = vmap
        self._outside: tuple[Reached, ...] = ()
        self.found: tuple[Any, ...] = ()  # the dimensions in which outputs are batched

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the program on every element of the batch."""
        # Asked before the run: after it the program is a forward no more.
        is_marked = self.program.is_forward and True in self.needs
        run = self._run_marked if is_marked else self.program.run
        run = functools.partial(run, mode=mode)
        outs, self.found = batch(run, *self.vmap)(*inputs)
        return outs

    @property
    def batches_inputs(self) -> bool:
        """Whether it batches any input. A vmap over cotangents batches none."""
        return {*self.vmap[0]} != {None}

    def note_outside(
        self, outs: Sequence[Any], inner: Sequence[Tensor], mode: Any
    ) -> None:
        """Note what the graph of a marked run is, before it is dropped."""
        if mode is not None:
            # Now, for at its end the mode is told of outputs without this graph.
            mode.note_saved(outs)
        differentiable = [j for j, o in enumerate(outs) if requires_grad(o)]
        found = reached_inputs(outs, inner)
        self._outside = (found._replace(differentiable=differentiable),)

    @property
    @override
    def outside(self) -> tuple[Reached, ...]:  # pyrefly: ignore[bad-override]
        return (*self.program.outside, *self._outside)

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

    __slots__ = (*("_marked", "_versions", "_with_tangents", "found", "is_split"),)

    def __init__(
        self, program: Program, needs: PerInput, with_tangents: Sequence[InputIndex]
    ) -> None:
        super().__init__(program, needs)
        self._with_tangents = with_tangents
        # How many outputs there are; those with tangents, once a run has told.
        self.found: tuple[int, list[OutputIndex] | None] = 0, None
        self.is_split = True in needs  # then its node is of values alone
        self._marked = self.is_split and program.is_forward
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
        run = self._run_marked if self._marked else self.program.run
        run = functools.partial(run, mode=mode)
        written = [i for i, t in enumerate(primals) if self.program.may_write(i, t)]
        given = self._with_tangents, tangents
        outs, found = call_at_jvp(run, primals, *given, written)
        at = self.found[1]
        if at is None:
            at = [j for j, t in enumerate(found) if t is not None]
        self.found = len(outs), at
        pairs = ((outs[j], found[j]) for j in at)
        return (*outs, *(torch.zeros_like(o) if t is None else t for o, t in pairs))

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return (*self.program.signature, "dual", *self._with_tangents)

    def taken_apart(
        self, results: Sequence[Any], evaluation: Evaluation
    ) -> tuple[list[Any], Mapping[OutputIndex, Tensor], Evaluation]:
        """Return what an evaluation of this gave: values, tangents, and what it found.

        Among the values is what updated inputs held before.
        """
        count, positions = self.found[0], self.found[1] or ()
        end = count + len(positions)
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
        return outs, tangents, of_program


class Duals(NamedTuple):
    """The inputs of a program in forward mode, from below the level."""

    primals: Sequence[Tensor]
    with_tangents: Sequence[InputIndex]
    tangents: Sequence[Tensor]

    @classmethod
    def at_level(cls, layer: Any, inputs: Sequence[Tensor]) -> Self:
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
    def of_pairs(cls, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Self:
        """Return what pairs of a primal and a tangent, if it has one, are."""
        with_tangents = [i for i, (_, t) in enumerate(pairs) if t is not None]
        tangents = [t for _, t in pairs if t is not None]
        return cls([t for t, _ in pairs], with_tangents, tangents)

    @classmethod
    def here(cls, inputs: Sequence[Tensor]) -> Self:
        """Take inputs apart that may be dual numbers of a user's `dual_level`."""
        return cls.of_pairs([*map(unpack_dual, inputs)])

    def request(self, dual: Dual, request: Request) -> Request:
        """Return the request for `dual`, given the request for its program."""
        needs = [*request.needs, *map(requires_grad_at_any_level, self.tangents)]
        is_split = request.is_split or dual.is_split
        return request._replace(needs=needs, is_jvp=True, is_split=is_split)


def as_duals(
    values: Sequence[Any], tangents: Mapping[OutputIndex, Tensor]
) -> list[Any]:
    """Return values as dual numbers here, where they have tangents."""
    joined = [*values]
    for j, tangent in tangents.items():
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


# --- What all runs of a program have in common about the levels around it ---


def levels_below(program: Program) -> list[Any]:
    """Return the levels of torch.func around a program, the outermost first.

    A vmap over cotangents does not count, as it batches no input.
    """
    found: list[Any] = []
    while isinstance(program, Below):
        is_vmap = isinstance(program, Batch) and program.batches_inputs
        if is_vmap or isinstance(program, Dual):
            found.append(program)
        program = program.program
    return found


def note_levels(program: Program, found: Sequence[Any], count: int) -> None:
    """Tell levels what an earlier run with `count` outputs found, without a run."""
    left = [*found]
    chain: list[Any] = []
    while isinstance(program, Below):
        chain.append(program)
        program = program.program
    for level in reversed(chain):
        if isinstance(level, Batch) and not level.batches_inputs:
            level.found = (None,) * count
        elif left:
            level.found = left.pop()
            if isinstance(level, Dual):
                count += len(level.found[1] or ())


def total_needs(program: Program, needs: PerInput) -> PerInput:
    """Return which inputs some level differentiates, inside a vmap or outside."""
    total = [*needs]
    while isinstance(program, Below):
        for i, need in enumerate(program.needs):
            total[i] = total[i] or need
        program = program.program
    return total


class BatchVjp(Program):
    """The vjp of a program under a vmap, for all examples at once.

    Its inputs are those of the program, what else a node saved of it, and cotangents.
    """

    __slots__ = ("_below", "_given", "_of", "_wanted")

    def __init__(
        self,
        below: Program,
        of: Batch,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> None:
        self._below, self._of = below, of
        self._wanted, self._given = wanted, given

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the vjp of the program on every element of the batch."""
        del mode
        in_dims, size, randomness = self._of.vmap
        given = [self._of.found[j] for j in self._given]
        end = len(inputs) - len(given)
        if self._of.batches_inputs:
            # An output that is not batched belongs to all examples together, so its
            # cotangent must count once in the sum of their gradients.
            pairs = zip(inputs[end:], given, strict=True)
            cts = [_of_first(ct, size) if d is None else ct for ct, d in pairs]
            given = [0 if d is None else d for d in given]
            inputs = (*inputs[:end], *cts)
        dims = (*in_dims, *[None] * (end - len(in_dims)), *given)
        grads, found = batch(self._below.run, dims, size, randomness)(*inputs)
        return tuple(
            None if g is None else at_dim(g, dim, in_dims[i], size)
            for g, dim, i in zip(grads, found, self._wanted, strict=True)
        )


def _of_first(ct: Tensor, size: int) -> Tensor:
    """Return a batch of cotangents, all zero but for the first one."""
    return torch.cat([ct.unsqueeze(0), ct.new_zeros((size - 1, *ct.shape))])


def at_dim(ct: Tensor, dim: int | None, to: int | None, size: int) -> Tensor:
    """Return a cotangent whose batch dimension is that of its output."""
    if to is None:
        return ct if dim is None else ct.sum(dim)
    if dim is None:
        return ct.unsqueeze(to).expand(*ct.shape[:to], size, *ct.shape[to:])
    return ct.movedim(dim, to)


_CHANGED = (
    "remat: a tangent was changed in place since the forward, and a backward needs it "
    "as it was. Change a copy, or take the backward first."
)
