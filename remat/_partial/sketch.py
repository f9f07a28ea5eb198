"""A sketch of a forward in a graph, by which a budget is spent.

Invariant: what is not known of a graph leads to fewer results being kept, never to more
bytes than the budget.
Rejected: the record of eager code. A graph has sizes that vary, and drops what nobody
reads.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from remat._base.op import Op, Value
from remat._graph.graph import nodes_of
from remat._partial.budget import spent_by
from remat._partial.plan import Record, Step
from remat._partial.recorder import SILENT
from remat._torch import base_tensor, is_symbolic, is_view_op, size_hint, storage_id
from remat.policies import Decision, Policy


class Sketch:
    """The operations of a forward, and what may be kept of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._steps: list[Step] = []
        self._may: list[Decision] = []
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # so that no storage gets the number of another

    def note(
        self,
        op: Op,
        decision: Decision,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        written: Sequence[Tensor] = (),
    ) -> int:
        """Note an operation; return its index."""
        self._held += [*inputs, *outputs]
        tensors = inputs, outputs, written
        reads, makes, writes = (tuple(map(self._number, each)) for each in tensors)
        is_view = bool(makes) and {*makes} <= {*reads}
        known = is_view or not is_view_op(op.func)
        step = Step(_hinted(op), reads, makes, writes, always_runs=not known)
        self._steps.append(step)
        has_sizes = all(size_hint(n) is not None for v in op.outputs for n in v.shape)
        self._may.append(decision if has_sizes else Decision.RECOMPUTE)
        return len(self._steps) - 1

    def _number(self, tensor: Tensor) -> int:
        key = storage_id(base_tensor(tensor))
        return self._numbers.setdefault(key, len(self._numbers))

    def rename(self, index: int, op: Op, decision: Decision) -> None:
        """Note that an operation got a name, and what is decided by that."""
        self._steps[index] = self._steps[index]._replace(op=_hinted(op))
        self._may[index] = decision

    def chosen(self, outs: Iterable[Any]) -> frozenset[int]:
        """Return the operations whose results the budget keeps."""
        roots = frozenset(self._saved([o for o in outs if isinstance(o, Tensor)]))
        record = Record(tuple(self._steps), (), (roots,))
        found = spent_by(self._policy, record, self._may, (), prune=True)
        self._held.clear()
        assert found is not None
        return found.solution.saved

    def _saved(self, outs: Sequence[Tensor]) -> Iterable[int]:
        """Return the storages that the graph of the outputs saved."""
        found: set[int] = set()
        for node, tensors in nodes_of(outs):
            if type(node).__name__ in SILENT:
                return self._numbers.values()
            keys = (storage_id(base_tensor(t)) for t in tensors)
            found.update(self._numbers[k] for k in keys if k in self._numbers)
        return found


def _hinted(op: Op) -> Op:
    """Return an operation with the sizes that a trace has for those that vary."""
    args, kwargs = _part(op.args), _part(op.kwargs)
    return Op(op.func, args, kwargs, _part(op.outputs), op.names, op.source)


def _part(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(map(_part, part))
    if isinstance(part, Value):
        shape, stride = _part(part.shape), _part(part.stride)
        return Value(shape, part.dtype, part.device, stride, _part(part.offset))
    return size_hint(part) or 0 if is_symbolic(part) else part
