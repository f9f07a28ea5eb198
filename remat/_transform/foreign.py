"""What a function cannot do below the levels that it was called in: refused by name.

Under `torch.func` a function is run below the level, on stand-ins that nothing leads
to. Code that differentiates would find no way from one input to another where there is
one above, and give zeros. And tensors of the level are none that can be used there.

Invariant: what plain code does is done here as well, or is an error.
Rejected: to run such a function at its own level once that shows. What it had done by
then would be done twice.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from remat._base.absent import inputs_of
from remat._base.checks import NOT_LIFTED, describe
from remat._base.errors import CaptureError
from remat._torch import AccumulateGrad, current_layer, is_of_level_above


# A node and which of its outputs, or a leaf.
Edge: TypeAlias = tuple[Any, int]


class Foreign(TorchFunctionMode):
    """Refuses tensors and graphs of the levels that a function is run below.

    Args:
        above: the inputs of the call, as they were passed.
        inner: those that the function is run on.
        name_of: writes where an input comes from.
    """

    is_remats_check = True

    def __init__(
        self,
        above: Sequence[Tensor],
        inner: Sequence[Tensor],
        name_of: Callable[[int], str],
    ) -> None:
        super().__init__()
        self._above, self._inner, self._name_of = above, inner, name_of

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        for leaf in inputs_of(args, kwargs):
            if is_of_level_above(leaf):
                raise CaptureError(NOT_LIFTED.format(what=describe(leaf)))
        if func is torch.autograd.grad:
            self._check_graph(*args, **(kwargs or {}))
        elif func is Tensor.requires_grad_ and current_layer() is None:
            raise RuntimeError(_REQUIRES_GRAD)  # as torch does within a level
        return func(*args, **(kwargs or {}))

    def _check_graph(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> None:
        """Refuse a gradient whose way leads through what is above."""
        reached = edges_behind(map(edge_of, _listed(outputs)))
        asked = {*map(edge_of, _listed(inputs))}
        inner, above = map(edge_of, self._inner), map(edge_of, self._above)
        ours = [*zip(inner, above, itertools.count(), strict=False)]
        outside = {up for down, up, _ in ours if down in asked and down != up}
        for down, up, i in ours:
            behind = edges_behind([up]) - {up} if down in reached else set[Edge]()
            if not behind.isdisjoint(outside | asked):
                raise CaptureError(_COMPUTED.format(name=f"`{self._name_of(i)}`"))
        if not reached.isdisjoint(outside):
            raise CaptureError(_COMPUTED.format(name="a GradientEdge"))


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, (Tensor, GradientEdge)) else [*value]


def edge_of(value: Any) -> Edge:
    """Return where the graph of a tensor begins; a GradientEdge as that."""
    if isinstance(value, Tensor):
        node = value.grad_fn
        return (id(value), 0) if node is None else (node, value.output_nr)
    node, number = value[:2]
    return (id(node.variable), 0) if type(node) is AccumulateGrad else (node, number)


def edges_behind(edges: Iterable[Edge]) -> set[Edge]:
    """Return the edges of a graph that some edges lead to, and those."""
    found = {*edges}
    todo = [node for node, _ in found if not isinstance(node, int)]
    seen = {*todo}
    for node in todo:  # which grow
        parents = [edge for edge in node.next_functions if edge[0] is not None]
        found.update(map(edge_of, parents))
        new = {parent for parent, _ in parents}.difference(seen)
        todo += [parent for parent in new if type(parent) is not AccumulateGrad]
        seen |= new
    return found


def holds_graph(above: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Say whether an input was computed from another, in a level that is gone by now.

    Only the pullback of `torch.func.vjp` holds both.

    Args:
        above: the inputs as they were passed.
        leaves: the same, without wrappers of levels that are gone.
    """
    dead = compress(above, map(operator.is_not, above, leaves))
    edges = {*map(edge_of, dead)}
    return any(len(edges & edges_behind([edge])) > 1 for edge in edges)


_COMPUTED = (
    "{name} was computed outside of the function from what it is differentiated by "
    "in it. Between the two there is no graph where the function runs: compute it "
    "inside."
)
_REQUIRES_GRAD = (
    "remat: Tensor.requires_grad_() is called, perhaps by torch.autograd.functional, "
    "in a function that torch.func transforms. As without remat, that is refused: use "
    "the transforms of torch.func inside, or create_graph=True."
)
