"""Programs: a call as a flat function of tensors.

A `Request` says what is asked, and goes down the levels of torch.func to the base. An
`Evaluation` says what was found there, and comes back up. What a program learns while
it runs inside a level, and cannot return through it, stays on it (`Program.outside`).

Invariant: a program runs any number of times on the tensors given to it and holds none.
Rejected: keeping the tensors in it, which would hide them from torch's saved tensors
(freed after a backward, offloadable). One mutable object for all that is known of a
call: nobody could tell which of it was known when.
"""

import operator
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from remat._base.types import TENSORS, Outputs
from remat._torch.autograd import set_grad_enabled, without_hooks
from remat._torch.graphs import is_below_tracer


_requires_grad = operator.attrgetter("requires_grad")
# What an index counts. The results of an evaluation are, in this order, the outputs of
# the function, the values that updated inputs had before, and the residuals. Outputs
# have the same index among the results. A node saves the inputs that are kept, and then
# the residuals: once an input is dropped, those after it have other indices there.
InputIndex: TypeAlias = int
OutputIndex: TypeAlias = int
SavedIndex: TypeAlias = int
PerInput: TypeAlias = Sequence[bool]
PerResult: TypeAlias = Sequence[bool]


class Request(NamedTuple):
    """What is asked of an evaluation."""

    needs: PerInput  # which require grad, at the level where it is asked or below
    # Whether no level is around the call. Then the evaluation must tell exactly which
    # outputs require grad.
    at_base: bool
    is_jvp: bool = False  # a level, or the user, differentiates it forward
    # Whether a node further up is of values alone, which are evaluated with tangents
    # below. A record would be of both.
    is_split: bool = False
    is_batched: bool = False  # a vmap is around the call
    is_below: bool = False  # a level further in asks, whose graph the hooks are in


class Evaluation(NamedTuple):
    """What an evaluation found, besides the results."""

    request: Request  # as it arrived at the base
    used: Sequence[InputIndex]  # that some output may depend on differentiably
    differentiable: PerResult = ()  # which results do
    updated: Sequence[InputIndex] = ()  # in place, by the function
    residuals: int = 0  # how many there are
    # By what it is recomputed: `SavedInNode` of `_partial/planned_call.py`, or the
    # like; None to run it as it is.
    planned: Any = None
    shared: Collection[OutputIndex] = ()  # outputs that share memory with others
    # Whether its backward depends on whether grad mode is on. Where nobody looked, as
    # for rules, it may.
    asks_grad_mode: bool = False
    certain: Collection[InputIndex | None] = ()  # that the outputs did depend on
    has_inference: bool = False  # some input is an inference tensor
    is_below: bool = False  # for a node: as in its `Request`

    def ends(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the inputs that a node has edges to; none if it is not to be."""
        if len(self.used) < len(inputs):
            inputs = [inputs[i] for i in self.used]
        return inputs if True in map(_requires_grad, inputs) else ()


class Reached(NamedTuple):
    """What the graph of a run's outputs reaches."""

    inputs: Sequence[InputIndex]
    # Whether its backward depends on whether grad mode is on.
    asks_grad_mode: bool = True
    # Those that the outputs depend on. The node of a call inside has edges to what any
    # of its outputs may depend on, also to one that is not used.
    certain: Collection[InputIndex | None] = ()
    # Outputs that require grad, where only levels outside a vmap tell.
    differentiable: Sequence[OutputIndex] = ()


class Program:
    __slots__ = ()
    # The outputs that torch does not differentiate twice, with the Function that says
    # so, and whether torch drops their derivatives without an error. Never changed,
    # only replaced.
    once: Mapping[int, Any] = {}
    # What the forward found outside each vmap around the user's call.
    outside: tuple[Reached, ...] = ()
    # The `Reach` of a call whose forward set hooks, on tensors inside or on inputs.
    hooked: Any = None
    # What sends inputs of its nodes away (`offload_inputs=`).
    offloading: Any = None

    @property
    def passed(self) -> Sequence[Tensor]:
        """The inputs of a forward as they were passed, in levels; else empty."""
        return ()

    @property
    def own(self) -> Container[InputIndex]:
        """The inputs of which a run may be given the user's own leaves."""
        return ()

    def may_write(self, i: InputIndex, tensor: Tensor) -> bool:
        """Say whether a run may write to an input that is not differentiated."""
        del i, tensor
        return False

    def may_read_early(self, tensor: Tensor) -> bool:
        """Say whether a recompute in a graph may read an input before cotangents."""
        del tensor
        return False

    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Run in the ambient modes: autograd records exactly if it does for the caller.

        The user's function, if this calls one, runs under `mode`.
        """
        raise NotImplementedError

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is equal for programs that do the same operations, most likely."""
        raise NotImplementedError

    @property
    def is_forward(self) -> bool:
        """Whether the next run is the forward of a user's call."""
        return False

    def uses(self, count: int) -> Sequence[InputIndex]:
        """Return which of `count` inputs the outputs may depend on differentiably."""
        return range(count)

    def evaluate_first(
        self, program: "Program", inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate the forward of a user's call: its first run, at all levels.

        `program` is run: this, or this under vmap or in forward mode.
        """
        raise NotImplementedError

    def own_vjp(
        self,
        seen_as: "Program",
        evaluation: Evaluation,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> "Program | None":
        """Return the vjp of a program that has one of its own, otherwise None.

        It gives gradients of the `wanted` inputs for cotangents of the `given` outputs.
        `seen_as` is what is differentiated: this, or this below levels.
        """
        del seen_as, evaluation, wanted, given

    def check_outputs(self, outs: Sequence[Any]) -> bool:
        """Check that outputs of a recompute are differentiable as in the forward.

        False if that is not known.
        """
        del outs
        return False

    def refuse_leaks(self, leaves: Sequence[Tensor]) -> None:
        """Refuse a forward after which something leads to its leaves, in any level."""

    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        """Before a barrier, refuse inputs that changed since the forward."""
        del inputs

    def check_reached(
        self,
        outs: Sequence[Any],
        inputs: Sequence[Tensor],
        missing: Sequence[InputIndex],
    ) -> None:
        """Check that a recompute reaches the inputs that the forward reached.

        The `missing` ones have no gradient.
        """
        del outs, inputs, missing

    def evaluate(
        self, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate at the base, with grad mode off, and drop the graph.

        Called by `without_grad_mode`, which puts grad mode back, also after an error.
        """
        if self.is_forward:
            return self.evaluate_first(self, inputs, request)
        used = self.uses(len(inputs))
        if not request.at_base:
            # A rule may have had to turn grad mode on.
            outs = self.run(*inputs)
            outs = [
                o.detach() if o is not None and o.requires_grad else o for o in outs
            ]
            differentiable = [*map(has_derivatives, outs)]
            return outs, Evaluation(request, used, differentiable, asks_grad_mode=True)
        set_grad_enabled(True)
        leaves = leaves_for(inputs, request.needs, self.own)
        outs = without_hooks(self.run, *leaves)
        set_grad_enabled(False)
        differentiable = [*map(requires_grad, outs)]
        results = [None if o is None else o.detach() for o in outs]
        return results, Evaluation(request, used, differentiable, asks_grad_mode=True)


def requires_grad(output: Tensor | None) -> bool:
    return output is not None and output.requires_grad


def has_derivatives(tensor: Tensor | None) -> bool:
    """Say whether a tensor is of a dtype that has derivatives."""
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def replaced_at(
    values: Sequence[Any], where: Sequence[int], by: Sequence[Any]
) -> list[Any]:
    replaced = list(values)
    for i, value in zip(where, by, strict=True):
        replaced[i] = value
    return replaced


def leaves_for(
    inputs: Sequence[Tensor], needs: PerInput, own: Container[InputIndex]
) -> list[Tensor]:
    """Return leaves in place of the inputs that `needs` marks, for a run at the base.

    Leaves that require grad and are among the user's `own` stay themselves, unless they
    have hooks, which would see the gradients of the run. So they are found by identity,
    and no holder is written for them.
    """
    if not own or is_below_tracer() or len({*map(id, inputs)}) < len(inputs):
        return fresh_leaves(inputs, needs)
    needs = [
        need and not (is_own_leaf(t) and i in own)
        for i, (t, need) in enumerate(zip(inputs, needs, strict=True))
    ]
    return fresh_leaves(inputs, needs) if True in needs else [*inputs]


def is_own_leaf(tensor: Tensor) -> bool:
    """Say whether a run at the base may run on a leaf itself."""
    return (
        tensor.requires_grad
        and tensor.grad_fn is None
        and type(tensor) in TENSORS
        and not tensor._backward_hooks
    )


def fresh_leaves(inputs: Sequence[Tensor], needs: PerInput) -> list[Tensor]:
    """Return new leaves in place of the inputs that `needs` marks, others as they are.

    A run on them makes a graph of its own, which ends at them.
    """
    pairs = zip(inputs, needs, strict=True)
    return [_fresh_leaf(t) if need else t for t, need in pairs]


def _fresh_leaf(tensor: Tensor) -> Tensor:
    """Return a fresh leaf of the same class. A subclass may need its attributes."""
    kind = type(tensor)
    if kind is nn.Parameter:
        new: Tensor = Tensor._make_subclass(nn.Parameter, tensor, True)
    else:
        new = tensor.detach()
        # Not by `requires_grad_`, which a call around may refuse to its function.
        new.requires_grad = True
    if kind is not Tensor and tensor.__dict__:
        new.__dict__.update(tensor.__dict__)
    return new
