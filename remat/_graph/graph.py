"""Reads the graph of an output: its nodes, and what they saved.

`remat._partial` asks which outputs need a value, and reports ask what is saved.

Invariant: nothing that a hook packed is unpacked, and no node is changed.
Rejected: saved-tensor hooks, to learn what autograd saves. torch.func refuses to run
under them, and they do not say for which outputs a value is saved.
"""

from collections.abc import Container, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from remat._base import pytree
from remat._base.absent import tensors_of
from remat._base.program import Program
from remat._graph.handles import (
    Handle,
    PackedOutside,
    VersionedTensor,
    innermost,
    stored_by,
    unpack,
)
from remat._reach.names import NamedSearch
from remat._torch import AccumulateGrad, saved_by, unpack_hooks_of


def nodes_of(
    outs: Iterable[Any], ends: Container[Any] = ()
) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield the nodes that outputs lead to, each with the tensors that it saved."""
    roots = {o.grad_fn for o in outs if o is not None and o.requires_grad}
    todo = [node for node in roots if node is not None]
    seen = {*todo}
    while todo:
        here = todo.pop()
        if type(here) is AccumulateGrad or here in ends:
            continue
        tensors = tensors_at(here)
        yield here, tensors
        # A saved tensor has a graph of its own, which differs once it was changed.
        parents = [node for node, _ in here.next_functions]
        parents += [t.grad_fn for t in tensors if t.requires_grad]
        for node in parents:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)


def tensors_at(node: Any) -> list[Tensor]:
    """Return the tensors that a node saved, or that its Function keeps on its ctx."""
    packed = saved_by(node)
    found = [*tensors_of(packed), *chain.from_iterable(map(stored_by, _flat(packed)))]
    is_function = isinstance(node, FunctionCtx)
    # The node of a program saves all its tensors.
    if is_function and not isinstance(getattr(node, "program", None), Program):
        found += tensors_reached([*vars(node).values()])
    return found


def residuals_at(node: Any) -> list[Tensor]:
    """Return the tensors that a node holds as residuals of a call."""
    if isinstance(getattr(node, "program", None), Program):
        saved, count = tensors_of(saved_by(node)), node.evaluation.residuals
        return saved[len(saved) - count :]
    return [t for h in handles_at(node) if h.residual for t in h.residual.stored()]


def handles_at(node: Any) -> list[Handle]:
    """Return the handles that a node holds in place of tensors."""
    found = (innermost(packed) for packed in _flat(saved_by(node)))
    return [packed for packed in found if isinstance(packed, Handle)]


def foreign_tensors_at(node: Any) -> list[Tensor]:
    """Return the tensors that other hooks for saved tensors may keep at a node.

    What remat's hooks keep is not searched: a call refers to its function, and so to
    nearly everything.
    """
    hooks = unpack_hooks_of(node)
    found: list[Any] = []
    for packed in _flat(saved_by(node)):
        while isinstance(packed, PackedOutside):
            hooks.append(packed.unpack)
            packed = packed.packed
        if not isinstance(packed, Handle | VersionedTensor):
            found.append(packed)
    return tensors_reached((found, [h for h in hooks if h is not unpack]))


def _flat(tree: Any) -> list[Any]:
    return pytree.flatten(tree)[0]


def tensors_reached(tree: Any) -> list[Tensor]:
    """Return the tensors of a pytree, and those in objects that are its leaves."""
    search = NamedSearch()
    for leaf in pytree.flatten(tree)[0]:
        search.walk(leaf)
    return search.tensors
