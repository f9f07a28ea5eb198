"""torch's operators as names. Names pickle and compare, and operator objects do not.

Invariant: `name` of an overload differs from `name` of its packet. Each name with
`torch.ops.` in front is an expression for the operator.
Rejected: names from users, such as `"aten::mm"`. A typo would make a policy that does
nothing. A typo in `torch.ops.aten.nm` is an AttributeError.
"""

from functools import cache
from typing import Any

import torch

from remat._torch import HigherOrderOperator, is_operator, overload_of


@cache
def name(operator: Any) -> str:
    """Return the path of `operator` under `torch.ops`.

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
    """Return `operator`, which was passed to the function called `taker`.

    Raises:
        TypeError: `operator` is not an operator.
    """
    if is_operator(operator):
        return operator
    said = operator if isinstance(operator, str) else getattr(operator, "__name__", "")
    base = said.split("::")[-1].split(".")[0]
    known = base.isidentifier() and hasattr(torch.ops.aten, base)
    raise TypeError(
        f"remat: {taker} takes operators, such as torch.ops.aten.mm (all overloads) or "
        f"torch.ops.aten.mm.default (one overload); got {operator!r}, a "
        f"{type(operator).__name__}."
        + (f" Do you mean torch.ops.aten.{base}?" if known else "")
    )
