"""What users give in place of a policy, and what policies answer: decisions.

Operators are held by name: names pickle and compare, and operator objects do not. A
function of torch's selective checkpointing is called as torch would call it, with
tensors that have metadata and no data.

Invariant: decisions are ordered by how near the result stays. `name` of an overload
differs from `name` of its packet.
Rejected: a destination as a field of OFFLOAD, as in JAX. Two destinations would have no
order, so policies could not be combined. Tensors on the meta device, for functions that
read the device.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from typing_extensions import override

from remat._base.op import Op, Value
from remat._torch.operators import HigherOrderOperator, is_operator, overload_of
from remat._torch.tensors import refuse_data_ptr, tensor_without_data


class Decision(Enum):
    """What to do with the result of an operation, from farthest to nearest.

    `bool(decision)` is False for RECOMPUTE and True for the others. `a | b` is the
    nearer of two decisions, and `a & b` is the farther.

    Example:
        >>> Decision.SAVE & Decision.OFFLOAD
        <Decision.OFFLOAD: 2>
        >>> bool(Decision.RECOMPUTE)
        False
    """

    RECOMPUTE = 0
    """Recompute the result if the backward reads it."""
    OFFLOAD_TO_DISK = 1
    """Save the result in a file."""
    OFFLOAD = 2
    """Save the result in pinned memory of the host."""
    SAVE = 3
    """Save the result where it is."""

    def __bool__(self) -> bool:
        return self is not Decision.RECOMPUTE

    def __or__(self, other: "Decision") -> "Decision":
        return self if self.value >= other.value else other

    def __and__(self, other: "Decision") -> "Decision":
        return self if self.value <= other.value else other

    def __invert__(self) -> "Decision":
        return Decision.RECOMPUTE if self else Decision.SAVE

    @property
    def offloads(self) -> bool:
        """Whether the result is offloaded."""
        return self in DESTINATIONS.values()


Answer: TypeAlias = bool | Decision | CheckpointPolicy
DESTINATIONS = {"pinned_host": Decision.OFFLOAD, "disk": Decision.OFFLOAD_TO_DISK}


def decision_of(answer: object) -> Decision | None:
    """Return the decision that an answer means, or None if it is not an answer."""
    if isinstance(answer, Decision):
        return answer
    if isinstance(answer, bool):
        return Decision.SAVE if answer else Decision.RECOMPUTE
    if isinstance(answer, CheckpointPolicy):  # MUST_SAVE, PREFER_CPU_OFFLOAD, ...
        return Decision[answer.name.rpartition("_")[2]]
    return None


def check_offload(dst: object, taker: str, src: object = "device") -> None:
    """Check where a policy offloads to, and the `offload_src` of one of JAX's."""
    if src != "device":
        raise ValueError(f"remat: {taker} offloads from 'device'; got {src!r}")
    if not (isinstance(dst, str) and dst in DESTINATIONS):
        known = ", ".join(map(repr, DESTINATIONS))
        raise ValueError(f"remat: {taker} offloads to one of {known}; got {dst!r}")


def checked_number(number: object, says: str) -> float:
    """Return a number that is not negative, or raise an error that says what fits."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        kind = type(number).__name__
        raise TypeError(f"remat: {says}; got {number!r}, a {kind}")
    if not number >= 0:
        raise ValueError(f"remat: {says}, at least 0; got {number!r}")
    return number


# --- Operators ---


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
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin may have none
        signature = inspect.Signature()
    parameters = [*signature.parameters.values()]
    rest = [p.kind for p in parameters[1:]]
    is_of_jax = rest == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]
    if is_of_jax and parameters[0].name != "op":
        raise TypeError(_OF_JAX.format(fn=fn))
    if _takes(signature, 1):
        return fn
    if _takes(signature, 3):
        return Selective(fn)
    raise TypeError(
        f"remat: policy {fn!r} can be called neither as policy(op) nor as "
        "policy(ctx, op, *args, **kwargs), as in torch's selective checkpointing"
    )


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


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def printed(ask: Ask) -> str:
    """Return the name of a function as its author wrote it."""
    fn = ask.fn if isinstance(ask, Selective) else ask
    return getattr(fn, "__qualname__", repr(fn))


def public() -> list[str]:
    """Return the names of all policies, and of what makes policies."""
    found = vars(sys.modules[__package__ or ""])
    return [
        name
        for name, value in found.items()
        if name.startswith(("save_", "offload_", "every_"))
        or (hasattr(value, "decide") and not isinstance(value, type))
    ]


def advice(obj: object) -> str:
    """Return what to do about a likely mistake; "" for none."""
    if isinstance(obj, str):
        known = sorted(public(), key=lambda name: not name.endswith("_saveable"))
        near = [p for p in known if obj and obj.lower() in p]
        near = near or get_close_matches(obj.lower(), known, 1, 0.5)
        return f"Do you mean remat.policies.{near[0]}? " if near else ""
    if isinstance(obj, bool):
        kind = "everything" if obj else "nothing"
        return f"Do you mean remat.policies.{kind}_saveable? "
    if is_operator(obj):
        return "Do you mean a list with this operator, [...]? "
    if isinstance(obj, type):
        return "It is a class: pass an instance. "
    if isinstance(obj, nn.Module):
        return "It is a module, to which remat itself is applied: remat(module). "
    made = getattr(obj, "__name__", "")
    if made and made in (*public(), "within"):
        is_ours = str(getattr(obj, "__module__", "")).startswith("remat.")
        return f"It makes policies: pass {made}(...). " if is_ours else ""
    if getattr(obj, "func", obj) is create_selective_checkpoint_contexts:
        return "Pass its argument instead: the function or the list. "
    return ""
