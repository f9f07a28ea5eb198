"""Edges of a graph: a node and which of its outputs, or a leaf.

Invariant: two tensors have the same edge exactly if they have the same gradient.
Rejected: nodes alone. The outputs of one node may depend on different inputs.

`remat._transform` asks with these how one tensor was computed from another.
"""

from collections.abc import Iterable, Set as AbstractSet
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

from remat._torch import AccumulateGrad


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
    """Say whether an edge leads to one of others, in a graph that may be large.

    Args:
        edge: the edge.
        ends: where it may lead to.
        others: edges that lead to none of these. Those that are found are added: so a
            graph is walked once for all edges that are asked about.
    """
    todo, seen = [edge], set[Edge]()
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
