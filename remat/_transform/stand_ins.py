"""Tensors that stand in for inputs: with their values, and without their graphs.

Invariant: a stand-in has the class and the attributes that the input had at the call,
and a node if the input had one.
Rejected: to ask a subclass for a copy. Its `detach` may drop the class or attributes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._torch import is_of_torch_func
from remat._transform.leaves import in_class


class Computed(torch.autograd.Function):
    """Gives a tensor a node, as an input that was computed has one."""

    @staticmethod
    @override
    def forward(ctx: Any, t: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return t.data

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor with the memory of another, without its graph.

    A view stays one of its base, by which a function may know it, if that has no graph
    and nothing was set on it that could lead to one.
    """
    if tensor._is_view():
        base: Any = tensor._base
        if not (base.requires_grad or base.__dict__ or is_of_torch_func(tensor)):
            with torch.no_grad():
                return tensor.view_as(tensor)
    return tensor.detach()


def stand_in(
    value: Tensor,
    kind: type,
    attributes: dict[str, Any] | None,
    *,
    need: bool,
    is_computed: bool,
) -> Tensor:
    """Return a tensor like an input, without its graph and its hooks."""
    t = in_class(value, kind)
    if type(t) is nn.Parameter:
        new = Tensor._make_subclass(nn.Parameter, t, need)
    else:
        new = without_graph(t) if t is value else t
        if attributes and type(new) is not Tensor:
            new.__dict__.update(attributes)  # its operations may read them
        if need:
            new.requires_grad_()
            if is_computed:
                with torch.enable_grad():
                    new = Computed.apply(new)
    if attributes:
        new.__dict__.update(attributes)
    return new


def in_place_of_dead(tensor: Tensor) -> Tensor:
    """Return what is saved of a tensor of a vmap that has ended, or raise again.

    The user's objects may hold one. No operation takes it.
    """
    if not is_of_torch_func(tensor):
        raise
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
