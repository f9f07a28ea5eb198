"""What is set on the inputs of a forward under torch.func, as attributes.

Other tensors stand in for the user's, and begin with the attributes of these. When the
forward has run, the user's have those that the stand-ins have by then. What was
computed is left there as in any other holder (`left`).

Invariant: afterwards no stand-in has an attribute. Rejected: one dict for both. A graph
may hold a stand-in, and so would hold what the user sets later.
"""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._capture.container_kinds import ATTRIBUTES
from remat._live.exchange import are_same
from remat._live.left import ON_INPUT, Left, LeftAt
from remat._live.lifted import LiftedForward


_attributes = operator.attrgetter("__dict__")
_OWN = "retain_grad"  # of a stand-in, which asks the input


class SetOnInputs:
    """The attributes of the inputs of one forward."""

    __slots__ = "_tensors", "_then", "_users"

    def __init__(
        self, users: Sequence[Tensor], tensors: Sequence[Tensor], *, are_plain: bool
    ) -> None:
        self._users, self._tensors = users, tensors
        held = [] if are_plain else [*map(_attributes, users)]  # nothing was set
        self._then = [*map(dict[str, Any].copy, held)] if any(held) else None
        if self._then is not None:
            for user, tensor, then in zip(users, tensors, self._then, strict=True):
                if then and tensor is not user:
                    vars(tensor).update(then)

    @property
    def may_have_changed(self) -> bool:
        """Whether there are any by now, or were."""
        return self._then is not None or any(map(_attributes, self._tensors))

    def give_back(self, lifted: LiftedForward) -> None:
        """Have the user's tensors have them, and note those that were computed."""
        pairs = zip(self._users, self._tensors, strict=True)
        for n, (user, tensor) in enumerate(pairs):
            then: dict[str, Any] = {} if self._then is None else self._then[n]
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
