"""Tensors that stand in for inputs: with their values, and without their graphs.

Invariant: a stand-in has the class and the attributes that the input had at the call,
and a node if the input had one. Inputs that shared memory, as a buffer and a part of
it, do so again, for a recompute writes to one and reads the other: in the memory of one
that is still there, and all of it is put back after the run.
Rejected: to ask a subclass for a copy. Its `detach` may drop the class or attributes.
One copy of a whole storage: a part of it may be all that is passed.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.code import EDGES, IDENTITY
from remat._base.types import TENSORS
from remat._partial.values import storage_of
from remat._torch.levels import is_of_torch_func
from remat._torch.modes import unseen
from remat._transform.leaves import addresses_now, in_class


_is_leaf = operator.attrgetter("is_leaf")
_requires_grad = operator.attrgetter("requires_grad")


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


class _Saving(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, t: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.save_for_backward(t)
        return t.data


class InGraph:
    """The place of a computed tensor in its graph, without the tensor.

    That is in a cycle through the graph once a result of the call is written to it.
    """

    __slots__ = "_box", "_node"

    def __init__(self, tensor: Tensor) -> None:
        box: list[Tensor] = []
        self._box = box
        # The node holds the hook, where the collector does not look.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: box, list.pop)
        with torch.enable_grad(), hooks:
            self._node: Any = _Saving.apply(tensor).grad_fn

    def of(self, value: Tensor) -> Tensor:
        """Return a tensor of a value in this place."""
        self._box.append(value)
        return self._node.saved_tensors[0]


def held_for(
    asks: frozenset[str], inputs: Sequence[Tensor], are_computed: Sequence[bool]
) -> Mapping[int, Any] | None:
    """Return what is held for what code asks: edges, or inputs if only these tell."""
    if asks <= _TOLD:
        return None
    if asks <= _TOLD | EDGES and _PLAIN.issuperset(map(type, inputs)):
        return {i: InGraph(t) for i, t in compress(enumerate(inputs), are_computed)}
    return dict(enumerate(inputs))


# What stand-ins tell as the inputs did.
_TOLD, _PLAIN = IDENTITY | {"is_leaf"}, frozenset({Tensor})


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


def as_they_were(
    refs: Sequence[Any],
    values: Sequence[Tensor],
    needs: Sequence[bool],
    had_node: Sequence[bool],
) -> list[Tensor] | None:
    """Return inputs, at the speed of C, if all are there as at the call."""
    there: list[Any] = [*map(operator.call, refs)]
    if not TENSORS.issuperset(map(type, there)):
        return None
    if [*map(operator.not_, map(_is_leaf, there))] != had_node:
        return None
    if any(map(operator.ne, map(_requires_grad, there), needs)):
        return None
    addresses = addresses_now(there)  # they may have got other memory
    is_same = addresses is not None and addresses == addresses_now(values)
    return there if is_same else None


def in_place_of_dead(tensor: Tensor) -> Tensor:
    """Return what is saved of a tensor of a vmap that has ended, or raise again.

    The user's objects may hold one. No operation takes it.
    """
    if not is_of_torch_func(tensor):
        raise
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


# --- Of inputs that share memory ---


# Where inputs are in memory, by index: first and last.
Ranges = Mapping[int, tuple[int, int]]


def overlapping(ranges: list[tuple[int, int, int]]) -> Sequence[Ranges]:
    """Return groups of inputs that share memory; of each its place, and its index."""
    ranges.sort()
    firsts, lasts, _ = zip(*ranges, strict=True) if ranges else ((), (), ())
    if not any(map(operator.lt, firsts[1:], lasts)):
        return ()
    groups: list[dict[int, tuple[int, int]]] = []
    end = -1
    for first, last, i in ranges:
        if first >= end:
            groups.append({})
        groups[-1][i] = first, last
        end = max(end, last)
    return [group for group in groups if len(group) > 1]


def together(group: Ranges, tensors: Sequence[Tensor], there: int | None) -> None:
    """Put tensors of a group, other than one that is there, in the same memory."""
    if there is None:
        start = min(first for first, _ in group.values())
        storage = torch.UntypedStorage(max(end for _, end in group.values()) - start)
    else:
        t = tensors[there]
        start = group[there][0] - int(t.storage_offset()) * t.itemsize
        storage = storage_of(t)
    with unseen():
        for i, (first, _) in group.items():
            offset, rest = divmod(first - start, tensors[i].itemsize)
            if i != there and not rest:
                t = tensors[i].detach()
                tensors[i].set_(storage, offset, t.shape, t.stride())
                if there is None:
                    tensors[i].copy_(t)
