"""Torch's operators as names, which pickle and compare where the objects do not.

Invariant: `name` of an overload and of its packet never coincide, and `torch.ops.` in
front of either is an expression for it.
Rejected: names as users' input, `"aten::mm"` say. A slip of the pen would be a policy
that does nothing, while a slip in `torch.ops.aten.nm` is an AttributeError.
"""

from functools import cache
from typing import Any

import torch

from remat._torch import HigherOrderOperator, is_operator, overload_of


@cache
def name(operator: Any) -> str:
    """Return where `operator` is under `torch.ops`.

    Example:
        >>> name(torch.ops.aten.mm), name(torch.ops.aten.mm.default)
        ('aten.mm', 'aten.mm.default')
    """
    operator = overload_of(operator)
    if isinstance(operator, HigherOrderOperator):
        return f"higher_order.{operator.name()}"
    return str(operator)


@cache
def family(operator: Any) -> str:
    """Return the name of an operator without its overload.

    Example:
        >>> family(torch.ops.aten.add.Tensor)
        'aten.add'
    """
    operator = overload_of(operator)
    return name(getattr(operator, "overloadpacket", operator))


def checked(operator: object, taker: str) -> Any:
    """Return `operator`, which the function called `taker` was given.

    Raises:
        TypeError: it is no operator.
    """
    if is_operator(operator):
        return operator
    said = operator if isinstance(operator, str) else getattr(operator, "__name__", "")
    base = said.split("::")[-1].split(".")[0]
    known = base.isidentifier() and hasattr(torch.ops.aten, base)
    raise TypeError(
        f"remat: {taker} takes operators, as torch.ops.aten.mm (all its overloads) or "
        f"torch.ops.aten.mm.default (one); got {operator!r}, a "
        f"{type(operator).__name__}."
        + (f" Do you mean torch.ops.aten.{base}?" if known else "")
    )
