"""Policies by the operation: dots, operators, collectives, decisions, and sizes.

Invariant: a dot sums over a dimension, and its cost per byte of output grows with that
dimension. So convolution and attention are dots, and outer products are not. Of a
collective the tensor is saved that it fills, and not what waits for it.
Rejected: torch's FLOP registry, which lacks mv, dot and quantized products. To save
what `wait_tensor` returns: that is its argument, and a recompute would run the
collective to have one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from remat._base.op import Op
from remat.policies._functions import (
    check_offload,
    checked,
    checked_number,
    family,
    is_collective,
    name,
)
from remat.policies._policy import ACCEPTED, Policy, as_policy


# --- Dots ---

# Whether a dot has batch dimensions: it has or not, or its two operands tell. It has if
# both have some. Einsum makes a bmm of a single pair of matrices too.
Batched: TypeAlias = bool | slice
_TABLE: tuple[tuple[Batched, str], ...] = (
    (
        False,
        """
        mm addmm _addmm_activation addbmm mv addmv dot vdot inner linear tensordot
        chain_matmul linalg_multi_dot _int_mm _scaled_mm _scaled_mm_v2
        _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
        _weight_int4pack_mm_with_scales_and_zeros _dyn_quant_matmul_4bit
        _mixed_dtypes_linear mkldnn_linear _sparse_mm _sparse_addmm hspmm smm sspaddmm
        sparse_sampled_addmm _sparse_sparse_matmul _sparse_mm_reduce_impl
        _sparse_semi_structured_mm _sparse_semi_structured_addmm
        _sparse_semi_structured_linear _cslt_sparse_mm _trilinear bilinear
        linear_backward mkldnn_linear_backward mkldnn_linear_backward_input
        mkldnn_linear_backward_weights mkldnn._linear_pointwise mkl._mkl_linear
        onednn.qlinear_pointwise onednn.linear_dynamic_fp16
        """,
    ),
    (
        slice(0, 2),
        "bmm matmul linalg_matmul _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2",
    ),
    (slice(1, 3), "baddbmm"),
    (
        True,
        """
        einsum matmul_backward linalg_vecdot convolution _convolution _convolution_mode
        convolution_overrideable conv1d conv2d conv3d conv_transpose1d conv_transpose2d
        conv_transpose3d conv_tbc cudnn_convolution cudnn_convolution_transpose
        cudnn_convolution_relu cudnn_convolution_add_relu mkldnn_convolution
        miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution
        miopen_convolution_relu miopen_convolution_add_relu _mps_convolution
        _mps_convolution_transpose _nnpack_spatial_convolution thnn_conv2d
        _slow_conv2d_forward slow_conv3d slow_conv3d_forward slow_conv_transpose2d
        slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d _conv_depthwise2d
        conv_depthwise3d convolution_backward convolution_backward_overrideable
        _slow_conv2d_backward conv_tbc_backward mps_convolution_backward
        mps_convolution_transpose_backward mkldnn._convolution_pointwise
        mkldnn._convolution_transpose_pointwise onednn.qconv_pointwise
        onednn.qconv1d_pointwise onednn.qconv2d_pointwise onednn.qconv3d_pointwise
        _flash_attention_forward _flash_attention_backward
        _flash_attention_forward_no_dropout_inplace _efficient_attention_forward
        _efficient_attention_backward _cudnn_attention_forward _cudnn_attention_backward
        _triton_scaled_dot_attention _triton_multi_head_attention
        _native_multi_head_attention _transformer_encoder_layer_fwd
        scaled_dot_product_attention higher_order.flex_attention
        higher_order.flex_attention_backward
        """,
    ),
)
_DOTS = {
    called if "." in called else f"aten.{called}": how
    for how, names in _TABLE
    for called in names.split()
}
_PREFIX = "aten._scaled_dot_product_"


def batched_like(func: Any) -> Batched | None:
    """Return how to tell whether a dot has batch dimensions, or None if not a dot."""
    called = family(func)
    if called.startswith(_PREFIX):  # each version of torch adds some
        return True
    found = _DOTS.get(called)
    return _DOTS.get(called.removesuffix("_")) if found is None else found


def _is_dot(op: Op) -> bool:
    return batched_like(op.func) is not None


def _is_dot_without_batch(op: Op) -> bool:
    how = batched_like(op.func)
    if not isinstance(how, slice):
        return how is False
    return any(len(v.shape) < 3 or prod(v.shape[:-2]) <= 1 for v in op.inputs[how])


def _is_decision(op: Op) -> bool:
    """Say whether an operation makes integers or booleans of floating numbers."""
    made = {v.dtype for v in op.outputs}
    is_of_floats = any(v.dtype.is_floating_point for v in op.inputs)
    if not is_of_floats or all(t.is_floating_point or t.is_complex for t in made):
        return False
    called = family(op.func)
    return not (_is_dot(op) or any(word in called for word in _NO_DECISION))


# What they return besides is for their own backward.
_NO_DECISION = "max_pool", "dropout", "batch_norm", "rnn", "lstm", "gru", "_thnn"


@dataclass(frozen=True)
class KindPolicy(Policy):
    """Saves operations of one kind, by the public name of the policy."""

    name: str

    def decide(self, op: Op) -> bool:
        """Say whether the operation is of that kind."""
        return _KINDS[self.name](op)

    @property
    @override
    def has_decisions(self) -> bool:
        return self.name == "decisions_saveable"

    def __repr__(self) -> str:
        return self.name


_KINDS: dict[str, Callable[[Op], bool]] = {
    "dots_saveable": _is_dot,
    "dots_with_no_batch_dims_saveable": _is_dot_without_batch,
    "decisions_saveable": _is_decision,
    "save_collectives": lambda op: is_collective(op.func),
}
dots_saveable = KindPolicy("dots_saveable")
"""Saves products of matrices and vectors, convolutions and attention.

Example:
    >>> import torch
    >>> from remat.policies import Op, dots_saveable
    >>> dots_saveable(Op(torch.ops.aten.mm.default))
    <Decision.SAVE: 3>
    >>> dots_saveable(Op(torch.ops.aten.sin.default))
    <Decision.RECOMPUTE: 0>
"""
dots_with_no_batch_dims_saveable = KindPolicy("dots_with_no_batch_dims_saveable")
"""Saves products of matrices and vectors without batch dimensions.

Example:
    >>> import torch
    >>> from remat.policies import Op, Value, dots_with_no_batch_dims_saveable
    >>> dots_with_no_batch_dims_saveable(Op(torch.ops.aten.mm.default))
    <Decision.SAVE: 3>
    >>> x = Value((8, 4, 4), torch.float32, torch.device("cpu"))
    >>> dots_with_no_batch_dims_saveable(Op(torch.ops.aten.bmm.default, (x, x)))
    <Decision.RECOMPUTE: 0>
"""
decisions_saveable = KindPolicy("decisions_saveable")
"""Saves what integers and booleans are computed to be of floating numbers.

Those are the results of topk, argmax, sort, multinomial, comparisons and casts, a few
bytes each. A recompute then takes the branches, and has the shapes, of the forward,
even where a device computes the floating numbers a little differently each time: a
router sends each token where it went. If such a call reads them, to choose what runs,
each one is recorded anew.

Example:
    >>> import torch
    >>> from remat.policies import Op, Value, decisions_saveable
    >>> x, found = (Value((4,), t, "cpu") for t in (torch.float32, torch.int64))
    >>> decisions_saveable(Op(torch.ops.aten.argmax.default, (x,), outputs=(found,)))
    <Decision.SAVE: 3>
"""
save_collectives = KindPolicy("save_collectives")
"""Saves what collectives return, so that no backward repeats one.

Collectives are the operations of ``torch.distributed``: functional ones, those of a
DTensor that is redistributed, and those that write in place, such as ``all_reduce``.

Source: JAX has no such policy. There, names are given to what collectives return.

Example:
    >>> import torch
    >>> from remat.policies import Op, dots_saveable, save_collectives
    >>> save_collectives(Op(torch.ops._c10d_functional.all_reduce.default))
    <Decision.SAVE: 3>
    >>> save_collectives(Op(torch.ops._c10d_functional.wait_tensor.default))
    <Decision.RECOMPUTE: 0>
    >>> dots_saveable | save_collectives
    (dots_saveable | save_collectives)
"""
checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(
    offload_src: str = "device", offload_dst: str = "pinned_host"
) -> Policy:
    """Offload what `dots_with_no_batch_dims_saveable` saves, and recompute the rest.

    Args:
        offload_src: must be "device".
        offload_dst: "pinned_host" or "disk". JAX does not have "disk".

    Returns:
        The policy.

    Raises:
        ValueError: `offload_src` or `offload_dst` is something else.

    Source: `jax.checkpoint_policies.offload_dot_with_no_batch_dims`.

    Example:
        >>> offload_dot_with_no_batch_dims("device", "disk")
        dots_with_no_batch_dims_saveable.but_offload(to='disk')
    """
    check_offload(offload_dst, "offload_dot_with_no_batch_dims", offload_src)
    return dots_with_no_batch_dims_saveable.but_offload(to=offload_dst)


def register_dot(operator: Any, *, batched: bool = False) -> None:
    """Register an operator as a dot, such as a GEMM of your own.

    The policies about dots then treat it as a dot. Functions that were recorded before
    do not change, so register the operator next to its definition. A repeated
    registration has no effect. You can call this from any thread.

    Args:
        operator: the operator: `torch.ops.mine.gemm`, or the function that
            `torch.library.custom_op` made. All its overloads count.
        batched: whether it has batch dimensions. If it has, `dots_saveable` saves its
            results, and `dots_with_no_batch_dims_saveable` does not.

    Raises:
        TypeError: `operator` is not an operator.
        ValueError: the operator is a dot already, with another `batched`.

    Source: JAX has no such function. Libraries with their own GEMMs copy its policies.

    Example:
        >>> import torch
        >>> @torch.library.custom_op("remat_doctest::gemm", mutates_args=())
        ... def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ...     return a @ b
        >>> register_dot(gemm)
        >>> dots_saveable(Op(torch.ops.remat_doctest.gemm.default))
        <Decision.SAVE: 3>
    """
    checked(operator, "register_dot")
    batched = bool(batched)
    have = batched_like(operator)
    if have is None:
        # It is atomic, so threads that register need no lock.
        have = _DOTS.setdefault(family(operator), batched)
    if have is (not batched):
        raise ValueError(
            f"remat: register_dot: torch.ops.{family(operator)} is a dot already, and "
            f"batched={not batched}; got batched={batched}. Pass the same value in "
            "each call, or remove this call."
        )


@dataclass(frozen=True)
class Operators(Policy):
    """Saves the results of some operators. It holds them by name."""

    operators: frozenset[str]

    def decide(self, op: Op) -> bool:
        """Say whether the operation calls one of the operators."""
        return name(op.func) in self.operators or family(op.func) in self.operators

    def __repr__(self) -> str:
        shown = (f"torch.ops.{each}" for each in sorted(self.operators))
        return f"save_ops({', '.join(shown)})"


def save_ops(*operators: Any) -> Policy:
    """Save the results of these operators.

    Args:
        *operators: each is an overload (`torch.ops.aten.mm.default`), a packet for all
            overloads (`torch.ops.aten.mm`), a higher-order operator
            (`torch.ops.higher_order.flex_attention`) or a function that
            `torch.library.custom_op` made. Policies see the operators that run below
            autograd: often `aten.addmm`, and never `aten.linear`.

    Returns:
        The policy. Without operators it saves nothing.

    Raises:
        TypeError: an argument is not an operator (such as a string, or `torch.mm`).

    Source: torch's selective checkpointing, which takes a list of overloads.

    Example:
        >>> import torch
        >>> policy = save_ops(torch.ops.aten.mm, torch.ops.aten.bmm.default)
        >>> policy(Op(torch.ops.aten.mm.default))
        <Decision.SAVE: 3>
        >>> policy
        save_ops(torch.ops.aten.bmm.default, torch.ops.aten.mm)
    """
    # Dynamo warns of functions that remember results.
    name_of = name.__wrapped__ if torch.compiler.is_compiling() else name
    return Operators(frozenset([name_of(checked(o, "save_ops")) for o in operators]))


def save_from_both_policies(policy_1: object, policy_2: object) -> Policy:
    """Save what either policy saves, in the nearer of the two places: `p | q`.

    Args:
        policy_1: a policy, or anything that `as_policy` accepts.
        policy_2: another one.

    Returns:
        The policy.

    Raises:
        TypeError: an argument is not a policy.

    Source: `jax.checkpoint_policies.save_from_both_policies`, which refuses policies
    that offload.

    Example:
        >>> from remat.policies import dots_saveable, save_only_these_names
        >>> save_from_both_policies(dots_saveable, save_only_these_names("a"))
        (dots_saveable | save_only_these_names('a'))
    """
    return as_policy(policy_1) | policy_2


ACCEPTED.append(((list, tuple, set, frozenset), lambda several: save_ops(*several)))


def register_cost(operator: Any, flops: Callable[[Op], float]) -> None:
    """Register what an operator costs, such as a GEMM of your own.

    Budgets, plans and reports count it, instead of torch's formula for FLOPs. A Triton
    kernel is an operator once `torch.library.triton_op` wraps it.

    Args:
        operator: the operator, as for `register_dot`.
        flops: returns the FLOPs of an operation. The last that is registered counts.

    Example:
        >>> import torch
        >>> @torch.library.custom_op("remat_doctest::scale", mutates_args=())
        ... def scale(a: torch.Tensor) -> torch.Tensor:
        ...     return a * 2
        >>> register_cost(scale, lambda op: op.outputs[0].nbytes / 4)
    """
    checked(operator, "register_cost")
    if not callable(flops):
        raise TypeError(f"remat: register_cost takes a function; got {flops!r}")
    COSTS[family(operator)] = flops


COSTS: dict[str, Callable[[Op], float]] = {}


@dataclass(frozen=True)
class Size(Policy):
    """Saves results by the total bytes of an operation's outputs.

    Ranks may have other sizes. A collective that one of them left out of its recompute
    would have the others wait forever, so none is saved for its size.
    """

    larger: bool
    than: float

    def decide(self, op: Op) -> bool:
        """Compare the bytes."""
        if is_collective(op.func):
            return False
        return op.nbytes > self.than if self.larger else op.nbytes < self.than

    def __repr__(self) -> str:
        return f"save_{'larg' if self.larger else 'small'}er_than({self.than!r})"


def save_larger_than(nbytes: float) -> Policy:
    """Save the results of operations whose outputs have more than `nbytes` bytes.

    Args:
        nbytes: the total bytes of all outputs of one operation.

    Returns:
        The policy.

    Raises:
        TypeError: `nbytes` is not a number.
        ValueError: `nbytes` is negative.

    Source: Keras' `RematScope(mode="larger_than")`, which counts elements.

    Example:
        >>> import torch
        >>> from remat.policies import Value
        >>> out = Value((256,), torch.float32, torch.device("cpu"))
        >>> save_larger_than(1000)(Op(torch.ops.aten.sin.default, outputs=(out,)))
        <Decision.SAVE: 3>
    """
    return Size(
        True, checked_number(nbytes, "save_larger_than takes a number of bytes")
    )


def save_smaller_than(nbytes: float) -> Policy:
    """Save the results of operations whose outputs have fewer than `nbytes` bytes.

    Args:
        nbytes: the total bytes of all outputs of one operation.

    Returns:
        The policy.

    Raises:
        TypeError: `nbytes` is not a number.
        ValueError: `nbytes` is negative.

    Example:
        >>> from remat.policies import dots_saveable
        >>> dots_saveable & save_smaller_than(2**20)
        (dots_saveable & save_smaller_than(1048576))
    """
    return Size(
        False, checked_number(nbytes, "save_smaller_than takes a number of bytes")
    )
