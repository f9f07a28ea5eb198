"""Asks the policy of a block about each result, and stores what it says.

Called by `recording`.

Invariant: a result that the policy saves is no value of the block. Graphs save it as
they would without one. A result that it offloads is a value that is brought back.
Rejected: to hold saved results here. They are freed with the graphs that hold them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from remat._base.op import Op
from remat._graph.residual import OFFLOAD, Offloads
from remat._partial.values import Arguments, Results
from remat._scope.values import Given, Made
from remat._torch import is_lazy, storage_id
from remat.policies import Decision, Policy


def choose(
    policy: Policy,
    makes: Sequence[tuple[Made, Tensor]],
    args: Any,
    kwargs: dict[str, Any],
    result: Any,
) -> list[tuple[Made, Tensor]]:
    """Ask about the results of an operation; return those that graphs do not store."""
    if not makes:
        return []
    arguments = Arguments(args, kwargs)
    values = tuple(Results(result, arguments).values)
    operation = makes[0][0].operation
    assert operation is not None
    op = Op(operation.func, *arguments.described, values, source=operation.line)
    decision = policy(op) if arguments.tensors else Decision.RECOMPUTE
    for made, _ in makes:
        made.op = op
    return [(m, t) for m, t in makes if not _is_stored(m, t, decision)]


def choose_named(made: Made, tensor: Tensor, name: str) -> bool:
    """Ask again about a result that got a name; say whether graphs store it.

    Args:
        made: the result.
        tensor: the result, or a view of it.
        name: the name.
    """
    policy: Policy | None = made.part.block.policy
    if policy is None or made.op is None or made.stored is not None:
        return False
    made.op = replace(made.op, names=made.op.names | {name})
    whole = made.layout.view_of(tensor.detach())
    return _is_stored(made, whole, policy(made.op))


def _is_stored(made: Made, tensor: Tensor, decision: Decision) -> bool:
    """Do with a result what a policy says; say whether graphs store it."""
    if not decision:
        return False
    if decision in OFFLOAD and not (made.layout.offset or is_lazy(tensor)):
        assert made.op is not None
        offloads = Offloads()
        stored = offloads.put(tensor.detach(), made.op, decision)
        if storage_id(offloads.stored[0]) != storage_id(tensor):
            made.stored, made.operation = stored, None
            return False
    # What was made of it meanwhile reads it here.
    made.stored, made.operation = Given(tensor), None
    return True
