"""Programs: a call as a flat function of tensors.

Invariant: a program runs any number of times on the tensors given to it and holds none.
Rejected: keeping the tensors in it, which would hide them from torch's saved tensors
(freed after a backward, offloadable).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from remat._base.types import Outputs
from remat._torch import (
    detach_dual,
    dual_level_active,
    function_mode_count,
    set_grad_enabled,
    without_hooks,
)


class Facts:
    """What is known of a call of a program, at whichever level it is looked at.

    Attributes:
        needs: which leaves require grad, at any level.
        exact: whether evaluating it must tell which outputs require grad.
        used: the leaves that some output may depend on differentiably.
        differentiable: which outputs do.
        kept: the leaves that the forward updated in place; their values from before
            follow the outputs.
        views: the outputs that share memory, see `views_of`.
        asks_grad_mode: whether its backward depends on whether grad mode is on.
        untracked: whether some leaf is an inference tensor.
        batched: whether a vmap lies between here and the base.
        above: what was found at the levels above each such vmap.
        in_forward_mode: whether a level, or the user, differentiates it forward.
        residuals: how many tensors, besides, follow the outputs.
        recomputation: how it is recomputed; None for as it is.
    """

    differentiable: Sequence[bool] = ()
    kept: Sequence[int] = ()
    views: Mapping[int, int] = {}  # never changed, only replaced
    asks_grad_mode: bool = False
    untracked: bool = False
    batched: bool = False
    above: Sequence["Above"] = ()
    in_forward_mode: bool = False
    residuals: int = 0
    recomputation: Any = None

    def __init__(self, needs: list[bool], used: Sequence[int], *, exact: bool) -> None:
        self.needs = needs
        self.used = used
        self.exact = exact


class Above(NamedTuple):
    """What the levels above a vmap differentiate: leaves used, and outputs by index."""

    used: Sequence[int]
    differentiable: Sequence[int]


class Program:
    """A flat function of tensors.

    Attributes:
        facts: of this call.
        once: the outputs that torch does not differentiate, with the Function that says
            so, and whether torch leaves it at that.
    """

    __slots__ = ("facts",)
    facts: Facts
    once: Mapping[int, Any] = {}  # never changed, only replaced

    def run(self, *leaves: Tensor, mode: Any = None) -> Outputs:
        """Evaluate in the ambient modes: recorded exactly if the caller records.

        Args:
            *leaves: to run on.
            mode: what follows the user's function, if this is a call of one.
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

    def uses(self, count: int) -> Sequence[int]:
        """Return which of `count` leaves the outputs may depend on differentiably."""
        return range(count)

    def forward(self, program: "Program", leaves: Sequence[Tensor]) -> Sequence[Any]:
        """Be the forward of a user's call, evaluated as `program`."""
        raise NotImplementedError

    def stand_ins(
        self, leaves: Sequence[Tensor], needs: Sequence[bool]
    ) -> list[Tensor]:
        """Return what a run that autograd records is on, where `needs` says so."""
        return detached(leaves, needs)

    def is_as_recorded(self, outs: Sequence[Any]) -> bool:
        """Say whether the outputs that the forward found differentiable surely are."""
        del outs
        return False

    def check_reached(
        self, outs: Sequence[Any], inner: Sequence[Tensor], missing: Sequence[int]
    ) -> None:
        """Check that a recomputation reaches the leaves that the forward reached.

        Args:
            outs: of the recomputation.
            inner: what it was on.
            missing: the leaves that no gradient came to.
        """
        del outs, inner, missing

    def evaluate(self, leaves: Sequence[Tensor]) -> Sequence[Any]:
        """Evaluate at the base, note which outputs are differentiable, drop the graph.

        To be called with grad mode off, which it may turn on.
        """
        if self.is_forward:
            return self.forward(self, leaves)
        facts = self.facts
        if not facts.exact:
            outs = self.run(*leaves)
            facts.differentiable = [has_derivatives(o) for o in outs]
            return outs
        set_grad_enabled(True)
        outs = without_hooks(self.run, *self.stand_ins(leaves, facts.needs))
        set_grad_enabled(False)
        facts.differentiable = [o is not None and o.requires_grad for o in outs]
        return [None if o is None else o.detach() for o in outs]


def has_derivatives(tensor: Tensor | None) -> bool:
    """Say whether a tensor is of a dtype that has derivatives."""
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def detached(leaves: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Return fresh autograd leaves for those that `needs` marks, others as they are."""
    if dual_level_active():
        pairs = zip(leaves, needs, strict=True)
        return [_leaf(detach_dual(t)) if need else t for t, need in pairs]
    if function_mode_count():
        pairs = zip(leaves, needs, strict=True)
        return [_stand_in(t) if need else t for t, need in pairs]
    return [
        t
        if not need
        else t.detach().requires_grad_()
        if type(t) is Tensor
        else _stand_in(t)
        for t, need in zip(leaves, needs, strict=True)
    ]


def _leaf(tensor: Tensor) -> Tensor:
    # Not by `requires_grad_`, which a call around this may refuse to its function.
    tensor.requires_grad = True
    return tensor


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a fresh leaf of the same class with the same attributes."""
    if type(tensor) is nn.Parameter:
        new: Tensor = Tensor._make_subclass(nn.Parameter, tensor, True)
    else:
        new = _leaf(tensor.detach())
    held = tensor.__dict__
    if held:
        new.__dict__.update(held)
    return new
