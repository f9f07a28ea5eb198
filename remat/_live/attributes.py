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

from remat._capture.container_kinds import ATTRIBUTES
from remat._live.exchange import are_same
from remat._live.left import ON_INPUT, Left, LeftAt
from remat._live.lifted import LiftedForward


_OWN = "retain_grad"  # of a stand-in, which asks the input


Attributes = dict[str, Any]


def given_attributes(
    users: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Attributes]:
    """Return the attributes of the user's tensors, which those in their place get."""
    held = [{**vars(user)} for user in users]
    for user, tensor, then in zip(users, tensors, held, strict=True):
        if then and tensor is not user:
            vars(tensor).update(then)
    return held


def give_back(
    lifted: LiftedForward,
    users: Sequence[Tensor],
    tensors: Sequence[Tensor],
    held: Sequence[Attributes],
) -> None:
    """Have the user's tensors have those there are now, and note what was computed."""
    for n, (user, tensor, then) in enumerate(zip(users, tensors, held, strict=True)):
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
