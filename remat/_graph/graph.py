"""The graph of a tensor: its nodes, what they saved, and what it was computed from.

An edge is a node and which of its outputs, or a leaf.

Invariant: two tensors have the same edge if and only if they have the same gradient.
Nothing that a hook packed is unpacked, and nothing of a graph is held.
Rejected: to compare nodes: two outputs of one may depend on different inputs. To ask
autograd for gradients of zeros, or saved-tensor hooks for what is saved: the one runs
the backward, and torch.func refuses the others.
"""

import itertools
import operator
from collections import Counter
from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Sequence,
    Set as AbstractSet,
)
from itertools import chain, compress
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from remat._base import pytree
from remat._base.absent import tensors_of
from remat._base.errors import CaptureError
from remat._base.program import (
    Evaluation,
    InputIndex,
    OutputIndex,
    Program,
    Reached,
    Request,
)
from remat._base.tensors import describe
from remat._graph.handles import (
    Handle,
    PackedOutside,
    VersionedTensor,
    innermost,
    stored_by,
    unpack,
)
from remat._reach.names import NamedSearch
from remat._reach.reach import Reach
from remat._torch.autograd import (
    NODES_ASKING_GRAD_MODE,
    AccumulateGrad,
    is_for_transforms,
    is_held,
    once_differentiable_function,
    saved_by,
    unpack_hooks_of,
)
from remat._torch.modes import unseen


Edge: TypeAlias = tuple[Any, int]


def edge_of(value: Any) -> Edge:
    """Return where the graph of a tensor begins; a GradientEdge as that."""
    if isinstance(value, Tensor):
        node = value.grad_fn
        return (id(value), 0) if node is None else (node, value.output_nr)
    node, number = value[:2]  # of an OutputEdge, too
    return (id(node.variable), 0) if type(node) is AccumulateGrad else (node, number)


class OutputEdge(NamedTuple):
    """Where the graph of an output begins. It does not hold the value of the output."""

    grad_fn: Any
    output_nr: int
    requires_grad: bool = True

    @property
    def edge(self) -> GradientEdge:
        """The same, for autograd."""
        return GradientEdge(self.grad_fn, self.output_nr)


def root_of(output: Tensor | None) -> Tensor | OutputEdge | None:
    """Return where the graph of an output begins; the output if it has no node."""
    if output is None or output.grad_fn is None:
        return output
    return OutputEdge(output.grad_fn, output.output_nr)


def leads_to(edge: Edge, ends: AbstractSet[Edge], others: set[Edge]) -> bool:
    """Say whether an edge leads to one of `ends`, in a graph that may be large.

    Of edges that lead to none, `others` are known, and those found are added: so a
    graph is walked once for all edges that are asked about.
    """
    todo = [edge]
    seen: set[Edge] = set()
    while todo:
        now = todo.pop()
        if now in ends:
            return True
        if now in seen or now in others:
            continue
        seen.add(now)
        node = now[0]
        if not isinstance(node, int) and type(node) is not AccumulateGrad:
            todo += [edge_of(e) for e in node.next_functions if e[0] is not None]
    others |= seen
    return False


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


# --- What the graph of a call's outputs reaches ---


_name = operator.attrgetter("__name__")


def reached_by(
    reach: Reach,
    request: Request,
    outs: Sequence[Any],
    inner: Sequence[Tensor],
    outside: Sequence[Reached],
) -> Reached:
    """Return what the outputs of a forward reach, also outside of vmaps."""
    # A call that is contained refers to nothing else that a graph could reach.
    if reach.is_contained and request.at_base:
        nodes = [o.grad_fn for o in outs if o.requires_grad]
        if None not in nodes:
            # To look costs a tenth of a call. The backward finds out which they are.
            return Reached([*compress(itertools.count(), request.needs)])
    reached = reached_inputs(outs, inner)
    if not outside:
        return reached
    all_of = (reached, *outside)
    used = {*chain.from_iterable(each.inputs for each in all_of)}
    certain = {*chain.from_iterable(each.certain for each in all_of)}
    asks = any(each.asks_grad_mode for each in all_of)
    return Reached(sorted(used), asks, certain)


def reached_inputs(outs: Sequence[Any], inputs: Sequence[Tensor]) -> Reached:
    """Return what the graph of `outs` reaches."""
    index = dict(zip(map(id, inputs), itertools.count(), strict=False))
    nodes = [o.grad_fn for o in outs if o.requires_grad]
    accumulators: list[Any] = []
    seen = {*nodes}
    if None in seen:
        raise CaptureError(_RETURNED_LEAF)
    seen.add(None)
    calls = [n for n in nodes if _name(type(n)) == _CALL and _is_uncertain(n)]
    if calls:
        nodes = [node for node in nodes if node not in calls]
    _walk(nodes, seen, accumulators, calls)
    certain = [*accumulators]
    if calls:
        _walk(calls, seen, accumulators, calls)
    at: dict[Any, InputIndex] = {}  # by accumulator
    for node in accumulators:
        i = index.get(id(node.variable))
        if i is None and is_held(node):
            # Hooks for saved tensors give a leaf back as another tensor.
            i = _accumulators_of(inputs).get(node)
            if i is None:
                raise CaptureError(NOT_LIFTED.format(what=describe(node.variable)))
        if i is not None:
            at[node] = i
    used = sorted({*at.values()})
    names = {*map(_name, map(type, (*nodes, *calls)))}
    asks_grad_mode = not NODES_ASKING_GRAD_MODE.isdisjoint(names)
    if len(certain) == len(accumulators):
        return Reached(used, asks_grad_mode, used)
    return Reached(used, asks_grad_mode, {*map(at.get, certain)})


def _accumulators_of(inputs: Sequence[Tensor]) -> dict[Any, InputIndex]:
    """Return where gradients of inputs are accumulated, for those that are leaves."""
    leaves = [(i, t) for i, t in enumerate(inputs) if t.requires_grad and t.is_leaf]
    with unseen():  # it makes a view
        return {get_gradient_edge(t).node: i for i, t in leaves}


def _walk(
    nodes: list[Any], seen: set[Any], accumulators: list[Any], calls: list[Any]
) -> None:
    """Add what is behind nodes: other nodes, leaves, and calls that are uncertain."""
    for node in nodes:  # which grow
        for parent, _ in node.next_functions:
            if parent not in seen:
                seen.add(parent)
                kind = type(parent)
                if kind is AccumulateGrad:
                    accumulators.append(parent)
                elif kind.__name__ == _CALL and _is_uncertain(parent):
                    calls.append(parent)
                else:
                    nodes.append(parent)


_CALL = "RematBackward"  # the name of a call's nodes, see `function`


def _is_uncertain(node: Any) -> bool:
    """Say whether an output of the call that a node is of may not depend on its inputs.

    One with several outputs may be used for some; others may have edges to too much.
    """
    found = getattr(node, "evaluation", None)  # a user's class may have that name
    if not isinstance(found, Evaluation):
        return False
    return sum(found.differentiable) > 1 or not {*found.used} <= {*found.certain}


def once_differentiable(
    roots: Sequence[Any], inputs: Sequence[Tensor], *, at_base: bool
) -> dict[int, tuple[Any, bool]]:
    """Return which inputs lead to a Function that is marked `once_differentiable`."""
    found: dict[int, tuple[Any, bool]] = {}
    for node, number in edges_behind(map(edge_of, roots)):
        function = once_differentiable_function(node)
        if function is not None:
            behind = edges_behind([(node, number)])
            known = function, not at_base and is_for_transforms(function)
            found |= {j: known for j, t in enumerate(inputs) if edge_of(t) in behind}
    return found


def sharing_memory(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], copies: Container[InputIndex]
) -> Collection[OutputIndex]:
    """Return the outputs that share memory with an input or with another output.

    The memory of inputs that are `copies` is nobody else's.
    """
    if True not in map(Tensor._is_view, outs):
        return ()
    bases = [id(o._base if o._is_view() else o) for o in outs]
    known = {id(t) for i, t in enumerate(inputs) if i not in copies}
    times = Counter(bases)
    return {j for j, base in enumerate(bases) if base in known or times[base] > 1}


# --- What the nodes of a graph saved ---


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


_RETURNED_LEAF = (
    "a leaf that requires grad is returned but is no input of the call. Return a "
    "tensor computed from the inputs, or pass the leaf as an argument."
)
NOT_LIFTED = (
    "a tensor that is differentiated or batched is used but is no input of the call: "
    "{what}. remat finds tensors in arguments, closures, defaults, globals, bound "
    "objects and modules, but not this one. Pass it as an argument."
)
