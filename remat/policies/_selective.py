"""Policy functions of torch's selective checkpointing, as functions of an `Op`.

Invariant: such a function is called as torch would call it. Its tensors have metadata
and no data.
Rejected: tensors on the meta device. A function that reads the device would decide
differently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, SelectiveCheckpointContext
from typing_extensions import override

from remat._base.op import Op, Value
from remat._torch import HigherOrderOperator, tensor_without_data
from remat.policies._decision import Answer, Decision


@dataclass(frozen=True)
class Selective:
    """A policy function of torch's selective checkpointing, as a function of an `Op`.

    As in torch, it is not asked about `detach` and metadata operations, and
    `ctx.is_recompute` is False. MUST and PREFER mean the same here; only a compiler
    distinguishes them.
    """

    fn: Callable[..., Answer]

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
    """Return a tensor with the metadata of `value` and no data.

    Example:
        >>> import torch
        >>> value = Value((2, 3), torch.half, torch.device("cuda", 0))
        >>> x = stand_in(value)
        >>> x.shape, x.numel(), x.device
        (torch.Size([2, 3]), 6, device(type='cuda', index=0))
    """
    told = len(value.stride) == len(value.shape)
    return tensor_without_data(
        StandIn,
        value.shape,
        value.stride if told else None,
        storage_offset=value.offset if told else None,
        dtype=value.dtype,
        device=value.device,
    )


def call_of(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `op`, with metadata-only tensors for its tensors.

    Example:
        >>> import torch
        >>> x = Value((2,), torch.float32, torch.device("cpu"))
        >>> args, kwargs = call_of(Op(torch.ops.aten.cat.default, ((x, x), 0)))
        >>> len(args[0]), args[1], kwargs
        (2, 0, {})
    """
    # Operators take lists. Higher-order operators take what they were passed.
    kind = tuple if isinstance(op.func, HigherOrderOperator) else list

    def argument(arg: Any) -> Any:
        if isinstance(arg, Value):
            return stand_in(arg)
        return kind(map(argument, arg)) if isinstance(arg, tuple) else arg

    kwargs = {name: argument(arg) for name, arg in op.kwargs}
    return tuple(map(argument, op.args)), kwargs
