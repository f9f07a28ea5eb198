"""Torch's operators as names, which pickle and compare where the objects do not.

Invariant: `name` of an overload and of its packet never coincide, and `torch.ops.` in
front of either is an expression for it.
Rejected: names as users' input, `"aten::mm"` say. A slip of the pen would be a policy
that does nothing, while a slip in `torch.ops.aten.nm` is an AttributeError.
"""

from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

# Deleted by: public names for the classes of what `torch.ops` holds.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.library import CustomOpDef
from typing_extensions import override

from remat._op import Op, Value


def is_operator(obj: object) -> TypeGuard[Any]:
    """Say whether `obj` is what `torch.ops` holds, or `torch.library.custom_op` made.

    Example:
        >>> is_operator(torch.ops.aten.mm), is_operator(torch.mm)
        (True, False)
    """
    kinds = OpOverload, OpOverloadPacket, HigherOrderOperator, CustomOpDef
    return isinstance(obj, kinds)


@cache
def name(operator: Any) -> str:
    """Return where `operator` is under `torch.ops`.

    Example:
        >>> name(torch.ops.aten.mm), name(torch.ops.aten.mm.default)
        ('aten.mm', 'aten.mm.default')
    """
    if isinstance(operator, CustomOpDef):
        # Deleted by: a public way from a custom_op's function to its overload.
        operator = operator._opoverload
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
    if isinstance(operator, CustomOpDef):
        operator = operator._opoverload
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


class StandIn(Tensor):
    """A tensor of which only the metadata exists, on whatever device it says."""

    @classmethod
    @override
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, *call: Any
    ) -> Any:
        """Refuse every operation."""
        del call  # there is nothing to compute with
        raise TypeError(
            "remat: a policy may read what a tensor is (shape, dtype, device), not "
            f"what it holds; it called {func}"
        )


def stand_in(value: Value) -> Tensor:
    """Return a tensor with the metadata of `value` and no data.

    Example:
        >>> value = Value((2, 3), torch.half, torch.device("cuda", 0))
        >>> x = stand_in(value)
        >>> x.shape, x.numel(), x.device
        (torch.Size([2, 3]), 6, device(type='cuda', index=0))
    """
    stride = value.stride if len(value.stride) == len(value.shape) else None
    # Deleted by: a public fake tensor that needs no mode.
    return Tensor._make_wrapper_subclass(
        StandIn,
        value.shape,
        stride,
        storage_offset=None if stride is None else value.offset,
        dtype=value.dtype,
        device=value.device,
    )


def call_of(op: Op) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that `op` was called with, stand-ins for its tensors.

    Its constants are read as: the positional arguments in order, then a dict of the
    keyword ones if there were any. Where the schema allows a tensor to be None and the
    next constant is None, None it is.

    Example:
        >>> x = Value((2,), torch.float32, torch.device("cpu"))
        >>> op = Op(torch.ops.aten.mul.Scalar, (x,), (x,), (3.0,))
        >>> (tensor, scalar), _ = call_of(op)
        >>> tensor.shape, scalar
        (torch.Size([2]), 3.0)
    """
    tensors = [stand_in(v) for v in op.inputs]
    constants = list(op.constants)
    kwargs = constants.pop() if constants and isinstance(constants[-1], dict) else {}
    # Deleted by: a public schema of an operator.
    schema = getattr(op.func, "_schema", None)
    if schema is None:
        return [*tensors, *constants], dict(kwargs)
    positional = [str(a.type) for a in schema.arguments if not a.kwarg_only]
    args = _interleaved(positional, tensors, constants)
    keywords = [
        a.name for a in schema.arguments if a.kwarg_only and "Tensor" in str(a.type)
    ]
    left = [k for k in keywords if k not in kwargs]
    return args, {**kwargs, **dict(zip(left, tensors, strict=False))}


def _interleaved(
    types: list[str], tensors: list[Any], constants: list[Any]
) -> list[Any]:
    """Take tensors and constants off the two lists, as a schema's types ask for."""
    args: list[Any] = []
    for i, kind in enumerate(types):
        is_none = "Optional" in kind and constants[:1] == [None]
        source = tensors if "Tensor" in kind and not is_none else constants
        if "List" in kind and "Tensor" in kind and not is_none:
            later = sum("Tensor" in t for t in types[i + 1 :])
            args.append([tensors.pop(0) for _ in range(len(tensors) - later)])
        elif source:
            args.append(source.pop(0))
        else:  # the rest was left to its defaults
            break
    return args
