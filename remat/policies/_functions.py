"""What users give in place of a policy: operators, functions, and likely mistakes.

Operators are held by name: names pickle and compare, and operator objects do not. A
function of torch's selective checkpointing is called as torch would call it, with
tensors that have metadata and no data.

Invariant: `name` of an overload differs from `name` of its packet. Each name with
`torch.ops.` in front is an expression for the operator.
Rejected: names from users, such as `"aten::mm"`. A typo would make a policy that does
nothing. And tensors on the meta device: a function that reads the device would decide
differently.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from typing_extensions import override

from remat._base.op import Op, Value
from remat._torch import (
    HigherOrderOperator,
    is_operator,
    overload_of,
    refuse_data_ptr,
    tensor_without_data,
)
from remat.policies._decision import Answer, Decision


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


@cache
def is_collective(operator: Any) -> bool:
    """Say whether an operator returns what other processes sent."""
    space, _, base = family(operator).partition(".")
    return space in _SPACES and base not in _OTHERS


_SPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d"}
_OTHERS = {"wait_tensor", "_wrap_tensor_autograd", "isend", "send", "barrier"}


def checked(operator: object, taker: str) -> Any:
    """Return an operator that was passed to `taker`, or raise a TypeError."""
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
        + (" Join policies with `|`: p | q." if hasattr(operator, "decide") else "")
    )


@dataclass(frozen=True)
class Selective:
    """A policy function of torch's selective checkpointing, as a function of an `Op`.

    As in torch, it is not asked about `detach` and metadata operations.
    """

    fn: Callable[..., Answer]
    is_new: bool = False  # for this call, as contexts are: it may count

    def __call__(self, op: Op) -> Answer:
        """Return what the function says."""
        if op.func in SAC_IGNORED_OPS:
            return Decision.RECOMPUTE
        outputs = tuple(map(stand_in, op.outputs))
        ctx = SelectiveCheckpointContext(is_recompute=False)
        ctx.op_output = outputs[0] if len(outputs) == 1 else outputs
        args, kwargs = call_of(op)
        return self.fn(ctx, op.func, *args, **kwargs)


class StandIn(Tensor):
    """A tensor that has only metadata, on any device."""

    @classmethod
    @override
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, *call: Any
    ) -> Any:
        """Refuse every operation."""
        del call  # there is nothing to compute with
        raise TypeError(
            "remat: a policy may read the shape, dtype and device of a tensor, but not "
            f"its values; it called {func}"
        )


def stand_in(value: Value) -> Tensor:
    """Return a tensor with the metadata of `value` and no data."""
    told = len(value.stride) == len(value.shape)
    made: Tensor = tensor_without_data(
        StandIn,
        value.shape,
        value.stride if told else None,
        storage_offset=value.offset if told else None,
        dtype=value.dtype,
        device=value.device,
    )
    refuse_data_ptr(made)
    return made


def call_of(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `op`, with metadata-only tensors for its tensors."""
    # Operators take lists. Higher-order operators take what they were passed.
    kind = tuple if isinstance(op.func, HigherOrderOperator) else list

    def argument(arg: Any) -> Any:
        if isinstance(arg, Value):
            return stand_in(arg)
        return kind(map(argument, arg)) if isinstance(arg, tuple) else arg

    kwargs = {name: argument(arg) for name, arg in op.kwargs}
    return tuple(map(argument, op.args)), kwargs


Ask: TypeAlias = Callable[[Op], Answer]
_F = TypeVar("_F", bound=Callable[..., Any])


def asked(fn: object) -> Ask:
    """Return a policy function of ours or of torch's kind as a function of an `Op`."""
    hint = advice(fn)
    if hint or not callable(fn):
        raise TypeError(
            f"remat: not a policy: {fn!r}, a {type(fn).__name__}. {hint}A policy "
            "is one of remat.policies, None, a list of operators, a dict, a function "
            "(op) -> bool or Decision, or a function of torch's kind, "
            "(ctx, op, *args, **kwargs) -> CheckpointPolicy."
        )
    checked_hash(fn)
    if _is_of_jax(fn):
        raise TypeError(_OF_JAX.format(fn=fn))
    if _takes(fn, 1):
        return fn
    if _takes(fn, 3):
        return Selective(fn)
    raise TypeError(
        f"remat: policy {fn!r} can be called neither as policy(op) nor as "
        "policy(ctx, op, *args, **kwargs), as in torch's selective checkpointing"
    )


def _is_of_jax(fn: Callable[..., Any]) -> bool:
    """Say whether a function is written as `policy(prim, *avals, **params)`."""
    try:
        first, *others = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = [p.kind for p in others]
    return first.name != "op" and kinds == [first.VAR_POSITIONAL, first.VAR_KEYWORD]


_OF_JAX = (
    "remat: policy {fn!r} is written for JAX, as policy(prim, *avals, **params). Here "
    "it is asked policy(op). op.packet is the operator, to be compared with "
    "torch.ops.aten.mm, op.inputs and op.outputs have shape and dtype, op.kwargs, "
    "op.names, op.module and op.nth tell more. Write def policy(op)."
)


def checked_hash(fn: _F) -> _F:
    """Return a policy function that can be hashed, or raise a TypeError."""
    try:
        hash(fn)
    except TypeError:
        raise TypeError(
            f"remat: policy {fn!r} is not hashable, but remat compares policies. Make "
            "its class a frozen dataclass, or remove __eq__ from it."
        ) from None
    return fn


def _takes(fn: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(count))
    except (TypeError, ValueError):  # ValueError: a builtin that has no signature
        return False
    return True


def printed(ask: Ask) -> str:
    """Return the name of a function as its author wrote it."""
    fn = ask.fn if isinstance(ask, Selective) else ask
    return getattr(fn, "__qualname__", repr(fn))


# --- Advice on likely mistakes ------------------------------------------------------


PUBLIC = (
    *("nothing_saveable", "everything_saveable", "dots_saveable", "checkpoint_dots"),
    *("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"),
    *("offload_dot_with_no_batch_dims", "save_only_these_names"),
    *("save_any_names_but_these", "save_anything_except_these_names"),
    *("save_and_offload_only_these_names", "save_from_both_policies"),
    *("save_names_matching", "save_ops", "save_larger_than", "save_smaller_than"),
    *("save_collectives", "decisions_saveable", "every_other"),
)
_MAKERS = *PUBLIC, "within"
_CONSTANTS = "nothing_saveable", "everything_saveable"


def advice(obj: object) -> str:
    """Return what to do about a likely mistake; "" for none."""
    if isinstance(obj, str):
        near = [p for p in PUBLIC if obj and obj.lower() in p]
        near = near or get_close_matches(obj.lower(), PUBLIC, 1, 0.5)
        return f"Do you mean remat.policies.{near[0]}? " if near else ""
    if isinstance(obj, bool):
        return f"Do you mean remat.policies.{_CONSTANTS[obj]}? "
    if is_operator(obj):
        return "Do you mean a list with this operator, [...]? "
    if isinstance(obj, type):
        return "It is a class: pass an instance. "
    if isinstance(obj, nn.Module):
        return "It is a module, to which remat itself is applied: remat(module). "
    if str(getattr(obj, "__module__", "")).startswith("remat."):
        made = getattr(obj, "__name__", "")
        return f"It makes policies: pass {made}(...). " if made in _MAKERS else ""
    if getattr(obj, "func", obj) is create_selective_checkpoint_contexts:
        return "Pass its argument instead: the function or the list. "
    return ""
