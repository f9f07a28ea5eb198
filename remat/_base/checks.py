"""Checks that a call is what remat takes it for.

`reached_leaves` refuses tensors that were used without being inputs, and `Watch` to
read an input that changed since the forward. What changed is told by versions and
places.

Invariant: a check raises an error; none changes a value. Rejected: comparing contents,
which would cost a copy of every input.
"""

import itertools
import operator
from collections.abc import Container, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.errors import CaptureError, MutationError
from remat._base.types import TENSORS
from remat._torch import (
    NODES_ASKING_GRAD_MODE,
    AccumulateGrad,
    call_kernel,
    current_layer,
    function_mode_count,
    is_held,
    no_torch_functions,
)


def reached_leaves(
    outs: Sequence[Any], leaves: Sequence[Tensor]
) -> tuple[list[int], bool]:
    """Return the indices of the `leaves` that the graph of `outs` reaches.

    And whether its backward depends on whether grad mode is on.

    Raises:
        CaptureError: it reaches another leaf, not made inside the function.
    """
    index = dict(zip(map(id, leaves), itertools.count(), strict=False))
    nodes = [o.grad_fn for o in outs if o.requires_grad]
    accumulators: list[Any] = []
    seen = {*nodes}
    if None in seen:
        raise CaptureError(_RETURNED_LEAF)
    seen.add(None)
    for node in nodes:  # which grow
        for parent, _ in node.next_functions:
            if parent not in seen:
                seen.add(parent)
                known = accumulators if type(parent) is AccumulateGrad else nodes
                known.append(parent)
    used = []
    for node in accumulators:
        i = index.get(id(node.variable))
        if i is not None:
            used.append(i)
        elif is_held(node):
            raise CaptureError(NOT_LIFTED.format(what=describe(node.variable)))
    asks_grad_mode = not NODES_ASKING_GRAD_MODE.isdisjoint(map(_name, map(type, nodes)))
    return sorted(used), asks_grad_mode


_name = operator.attrgetter("__name__")


def describe(tensor: Tensor) -> str:
    """Write a tensor's dtype, shape and device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"


NOT_LIFTED = (
    "a tensor that is differentiated or batched is used but is no input of the call: "
    "{what}. remat finds tensors in arguments, closures, defaults, globals, bound "
    "objects and modules, but not this one. Pass it as an argument."
)
_RETURNED_LEAF = (
    "a leaf that requires grad is returned but is no input of the call. Return a "
    "tensor computed from the inputs, or pass the leaf as an argument."
)


class Watch(TorchDispatchMode):
    """Refuses any operation that reads the storages given, by name."""

    def __init__(self, storages: Mapping[int, str]) -> None:
        super().__init__()
        self._storages = storages

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        # A detached alias reads nothing.
        if func is not torch.ops.aten.detach.default:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    name = self._storages.get(leaf.untyped_storage()._cdata)
                    if name is not None:
                        raise MutationError(_CHANGED.format(name=name, func=func))
        return call_kernel(func, *args, **(kwargs or {}))


_CHANGED = (
    "remat: `{name}` was changed in place between the forward and the backward, and "
    "the recomputation reads it (in {func}). Change a copy, or change it after the "
    "backward."
)


def views_of(
    outs: Sequence[Tensor], leaves: Sequence[Tensor], copies: Container[int]
) -> dict[int, int]:
    """Return which outputs share memory: with a leaf `i`, or with an output, `~k`."""
    if True not in [o._is_view() for o in outs]:
        return {}
    index = {id(t): i for i, t in enumerate(leaves) if i not in copies}
    views: dict[int, int] = {}
    first: dict[int, int] = {}
    for j, o in enumerate(outs):
        base = id(o._base if o._is_view() else o)
        if base in index:
            views[j] = index[base]
        elif first.setdefault(base, j) != j:
            views[first[base]] = views[j] = ~first[base]
    return views


# --- Whether something changed ---


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return how often each was changed; `None` where that is not counted."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [*map(version_of, tensors)]


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed; `None` where that is not counted."""
    return None if tensor.is_inference() else tensor._version


_version = operator.attrgetter("_version")


def places_of(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[int] | None:
    """Return where those that require grad are in memory, if that can be asked of them.

    Others may share memory until one is written, for which torch takes the question.
    """
    if False in needs:
        tensors = [*compress(tensors, needs)]
    if not TENSORS.issuperset(map(type, tensors)):  # others may warn
        return None
    try:
        if not function_mode_count():
            return [*map(Tensor.data_ptr, tensors)]
        with no_torch_functions():  # a mode may note who reads memory
            return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:
        return None


def data_moved(ours: Tensor, inner: Tensor) -> bool:
    """Say whether the function assigned to `.data` of the stand-in of `ours`."""
    if type(ours) not in TENSORS or ours.layout is not torch.strided:
        return False
    return current_layer() is None and ours.data_ptr() != inner.data_ptr()
