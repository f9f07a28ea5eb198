"""Refuses tensors and graphs of levels that a function is run below.

Under `torch.func` a function runs below the levels that it was called in, on tensors
without the graphs of those levels. A tensor of such a level cannot be used there. And
where one input was computed from another, code that differentiates the one by the other
would find no path between them, and give zeros.

`primal` runs the forward under `RefuseOuterLevels`. `call` asks `holds_graph` first.

Invariant: what plain code does is done here as well, or is an error.
Rejected: to run such a function again at its own level once that shows. Its effects
would happen twice.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from remat._base.absent import inputs_of
from remat._base.errors import CaptureError
from remat._base.tensors import describe
from remat._graph.edges import Edge, edge_of, edges_behind
from remat._torch import current_layer, is_of_level_above, is_of_torch_func
from remat._transform.reached import NOT_LIFTED


class RefuseOuterLevels(TorchFunctionMode):
    """A mode that refuses them.

    Args:
        wrapped: the inputs of the call, as they were passed.
        inner: those that the function runs on.
        name_of: writes where an input comes from.
    """

    is_remats_check = True

    def __init__(
        self,
        wrapped: Sequence[Tensor],
        inner: Sequence[Tensor],
        name_of: Callable[[int], str],
    ) -> None:
        super().__init__()
        self._wrapped, self._inner, self._name_of = wrapped, inner, name_of

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        tensors = inputs_of(args, kwargs)
        if True in map(is_of_torch_func, tensors):
            self._check_levels(tensors)
        if func is torch.autograd.grad:
            self._check_graph(*args, **(kwargs or {}))
        elif func is Tensor.requires_grad_ and current_layer() is None:
            raise RuntimeError(_REQUIRES_GRAD)  # as torch does within a level
        return func(*args, **(kwargs or {}))

    def _check_levels(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if is_of_level_above(tensor):
                raise CaptureError(NOT_LIFTED.format(what=describe(tensor)))

    def _check_graph(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> None:
        """Refuse a gradient along a path that leads through an outer level."""
        reached = edges_behind(map(edge_of, _listed(outputs)))
        asked = {*map(edge_of, _listed(inputs))}
        inner, wrapped = map(edge_of, self._inner), map(edge_of, self._wrapped)
        edges = [*zip(inner, wrapped, itertools.count(), strict=False)]
        outside = {up for down, up, _ in edges if down in asked and down != up}
        for down, up, i in edges:
            behind = edges_behind([up]) - {up} if down in reached else set[Edge]()
            if not behind.isdisjoint(outside | asked):
                raise CaptureError(_COMPUTED.format(name=f"`{self._name_of(i)}`"))
        if not reached.isdisjoint(outside):
            raise CaptureError(_COMPUTED.format(name="a GradientEdge"))


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, (Tensor, GradientEdge)) else [*value]


def holds_graph(passed: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Say whether an input was computed from another, in a level that is gone by now.

    Only the pullback of `torch.func.vjp` holds both.

    Args:
        passed: the inputs as they were passed.
        inputs: the same, without wrappers of levels that are gone.
    """
    dead = compress(passed, map(operator.is_not, passed, inputs))
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
