"""What is set on the inputs of a forward under torch.func, as attributes.

Other tensors stand in for the user's, and begin with the attributes of these. When the
forward has run, the user's have those that the stand-ins have by then. What was
computed is left there as in any other holder (`left`).

Invariant: afterwards no stand-in has an attribute. Rejected: one dict for both. A graph
may hold a stand-in, and so would hold what the user sets later.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._base.types import TENSORS
from remat._capture.container_kinds import ATTRIBUTES
from remat._live.exchange import are_same
from remat._live.left import ON_INPUT, Left, LeftAt
from remat._live.lifted import LiftedForward


_OWN = "retain_grad"  # of a stand-in, which asks the input
Entries = Sequence[dict[str, Any]]


def lend(users: Sequence[Tensor], tensors: Sequence[Tensor], entries: Entries) -> None:
    """Set on stand-ins what is set on the user's tensors."""
    for user, tensor, then in zip(users, tensors, entries, strict=True):
        if then and tensor is not user:
            vars(tensor).update(then)


def give_back(
    users: Sequence[Tensor],
    tensors: Sequence[Tensor],
    entries: Entries | None,
    lifted: LiftedForward,
) -> None:
    """Set on the user's tensors what stand-ins have; note what was computed.

    Args:
        users: the user's.
        tensors: what stands in for them.
        entries: what was set on them before; None where nothing was.
        lifted: tells what is the user's, and is told what was left.
    """
    for n, (user, tensor) in enumerate(zip(users, tensors, strict=True)):
        if not (type(tensor) in TENSORS and type(user) in TENSORS):
            continue  # in attributes a subclass has the tensors that it wraps
        then: dict[str, Any] = {} if entries is None else entries[n]
        now = {k: v for k, v in vars(tensor).items() if k != _OWN or k in then}
        if tensor is not user:
            vars(tensor).clear()
        if [*now] == [*then] and are_same([*now.values()], [*then.values()]):
            continue
        values = lifted.owned([*now.values()])
        ATTRIBUTES.write(vars(user), [*now], values)
        found = [i for i, value in enumerate(values) if lifted.may_be_left(value)]
        if found:
            at = LeftAt((ON_INPUT, n), ATTRIBUTES, found)
            lifted.left.append((at, Left(at, vars(user))))
