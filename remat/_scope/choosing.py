"""Asks the policy of a block about each result, and stores what it says.

Called by `recording`.

Invariant: a result that the policy saves is no value of the block. Graphs save it as
they would without one. A result that it offloads is a value that is brought back.
Rejected: to hold saved results here. They are freed with the graphs that hold them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from remat._base.absent import tensors_of
from remat._base.op import Op
from remat._base.types import CONSTANTS
from remat._graph.residual import OFFLOAD, Offloads
from remat._partial.values import value_of
from remat._scope.values import Given, Made, Operand
from remat._torch import is_lazy, storage_id
from remat.policies import Decision, Policy


def choose(
    policy: Policy,
    makes: Sequence[tuple[Made, Tensor]],
    result: Any,
) -> list[tuple[Made, Tensor]]:
    """Ask about the results of an operation; return those that graphs do not store."""
    if not makes:
        return []
    operation = makes[0][0].operation
    assert operation is not None
    new = {id(tensor): made.layout.value() for made, tensor in makes}
    op = Op(
        operation.func,
        _described(operation.args),
        tuple((name, _described(arg)) for name, arg in operation.kwargs.items()),
        tuple(new.get(id(t)) or value_of(t) for t in tensors_of(result)),
        source=operation.line,
    )
    decision = policy(op) if operation.operands else Decision.RECOMPUTE
    for made, _ in makes:
        made.op = op
    return [(m, t) for m, t in makes if not _is_stored(m, t, decision)]


def _described(arg: Any) -> Any:
    """Return an argument of an operation as an `Op` holds it."""
    kind = type(arg)
    if kind is Operand:
        return arg.value()
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple(map(_described, arg))
    return arg if kind in CONSTANTS else kind


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
    made.stored, made.operation = Given(tensor, made.layout), None
    return True
