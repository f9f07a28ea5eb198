"""Something of several operations as one, for the modes that record or replay.

Invariant: the user's modes, autograd and transforms see what is in it, as without us.
Rejected: a kernel that is called as one. It runs below all of these.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._base.context import here
from remat._base.operators import LIBRARY
from remat._torch import as_one_operation


LIBRARY.define("unit(Tensor[] inputs, str name) -> Tensor[]")
unit: Any = torch.ops.remat.unit.default


class _Entered(threading.local):
    def __init__(self) -> None:
        self.runs: list[Callable[..., Any]] = []


_ENTERED = _Entered()


@torch.library.impl(LIBRARY, "unit", "CompositeExplicitAutograd")
def _unit(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    del name
    return [*_ENTERED.runs[-1](*inputs)]


torch.library.register_fake("remat::unit", _unit, lib=LIBRARY)


def as_unit(
    fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor], name: str
) -> Any:
    """Run something as one operation, if remat's modes see the operations here."""
    if not (here().modes or here().reporter):
        return fn(*inputs)

    def call(inside: Callable[..., Any]) -> Any:
        _ENTERED.runs.append(inside)
        try:
            return unit([*inputs], name)
        finally:
            _ENTERED.runs.pop()

    return as_one_operation(call, fn)
