"""Collectives: those under way, what they return besides tensors, those in a graph.

Invariant: nothing here imports `torch.distributed`, which takes long. Where it was not
imported, there is no collective. Rejected: a class of our own in place of a `Work`.
torch's operators return theirs.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot


_WORK = "__torch__.torch.classes.c10d.Work"


# Deleted by: a public way to tell a `Work`, and to make one that is done.
def finished(result: Any) -> Any:
    """Return a `Work` that is done and holds no tensor in place of a `Work`."""
    if not isinstance(result, torch.ScriptObject):
        return result
    kind: Any = result._type()
    if kind.qualified_name() != _WORK:
        return result
    return vars(torch._C)["_distributed_c10d"].FakeWork().boxed()


# Deleted by: a public function that waits for what functional collectives returned.
def wait_for(tensor: Tensor) -> None:
    """Wait for the collective that fills a tensor, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.ops._c10d_functional.wait_tensor(tensor)


# Deleted by: fx not taking `wait_tensor` for an operation that has an effect.
class CollectivesInGraph:
    """The collectives that operations from here on add to the graph that is made.

    To be made where there is such a graph.
    """

    def __init__(self) -> None:
        mode: Any = get_proxy_mode()
        self._tracer = mode.tracer
        self._last = self._tracer.graph._root.prev

    def drop_unread(self, results: Iterable[Tensor]) -> None:
        """Take those out of the graph that none of these results needs.

        What was computed from them alone goes as well. A size that was read stays.
        """
        kept = {self._node_of(t) for t in results}
        added = [*self._added()]
        behind = set[Any]()  # collectives, and what was computed from them
        for node in reversed(added):
            if _is_collective(node) or not behind.isdisjoint(_read(node)):
                behind.add(node)
        for node in added:  # from the last to the first
            if node in behind and node not in kept and not node.users:
                self._tracer.graph.erase_node(node)

    def _added(self) -> Iterator[Any]:
        node = self._tracer.graph._root.prev
        while node is not self._last:
            yield node
            node = node.prev

    def _node_of(self, tensor: Any) -> Any:
        if isinstance(tensor, FunctionalTensor):
            torch._sync(tensor)
            tensor = torch._from_functional_tensor(tensor.elem)
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        return None if slot is None else slot.proxy.node


def _read(node: Any) -> Sequence[Any]:
    """Return the nodes that an operation reads; none if it gives more than tensors."""
    is_pure = isinstance(node.meta.get("val"), _TENSORS) and not node.is_impure()
    return node.all_input_nodes if is_pure else ()


_TENSORS = Tensor, list, tuple


def _is_collective(node: Any) -> bool:
    target = node.target
    if target is operator.getitem:
        return _is_collective(node.args[0])
    is_functional = getattr(target, "namespace", None) == "_c10d_functional"
    return is_functional and target._schema.name.partition("::")[2] in _PURE


# Their results are all that they give to a rank. In place, and to one other rank, it is
# something else.
_PURE = frozenset(
    (
        *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce"),
        *("all_reduce_coalesced", "all_to_all_single", "broadcast"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "wait_tensor"),
    )
)
