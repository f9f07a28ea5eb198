"""Dots: products of matrices and vectors, convolutions and attention.

Invariant: a dot sums over a dimension, and its cost per byte of output grows with that
dimension. So convolution and attention are dots, and outer products are not.
Rejected: torch's FLOP registry. It lacks mv, dot and quantized products.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from remat._base.op import Op
from remat.policies._decision import check_offload
from remat.policies._functions import checked, family
from remat.policies._policy import Policy


# Whether a dot has batch dimensions: it has or not, or its two operands tell. It has if
# both have some. Einsum makes a bmm of a single pair of matrices too.
Batched: TypeAlias = bool | slice
_first, _second = slice(0, 2), slice(1, 3)

_TABLE: tuple[tuple[Batched, str, str], ...] = (
    (
        False,
        "aten",
        """
        mm addmm _addmm_activation addbmm mv addmv dot vdot inner linear tensordot
        chain_matmul linalg_multi_dot _int_mm _scaled_mm _scaled_mm_v2
        _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
        _weight_int4pack_mm_with_scales_and_zeros _dyn_quant_matmul_4bit
        _mixed_dtypes_linear mkldnn_linear _sparse_mm _sparse_addmm hspmm smm
        sspaddmm sparse_sampled_addmm _sparse_sparse_matmul _sparse_mm_reduce_impl
        _sparse_semi_structured_mm _sparse_semi_structured_addmm
        _sparse_semi_structured_linear _cslt_sparse_mm _trilinear bilinear
        linear_backward mkldnn_linear_backward mkldnn_linear_backward_input
        mkldnn_linear_backward_weights
        """,
    ),
    (False, "mkldnn", "_linear_pointwise"),
    (False, "mkl", "_mkl_linear"),
    (False, "onednn", "qlinear_pointwise linear_dynamic_fp16"),
    (
        _first,
        "aten",
        """
        bmm matmul linalg_matmul _grouped_mm _scaled_grouped_mm
        _scaled_grouped_mm_v2
        """,
    ),
    (_second, "aten", "baddbmm"),
    (
        True,
        "aten",
        """
        einsum matmul_backward linalg_vecdot convolution _convolution
        _convolution_mode convolution_overrideable conv1d conv2d conv3d
        conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
        cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu
        cudnn_convolution_add_relu mkldnn_convolution miopen_convolution
        miopen_convolution_transpose miopen_depthwise_convolution
        miopen_convolution_relu miopen_convolution_add_relu _mps_convolution
        _mps_convolution_transpose _nnpack_spatial_convolution thnn_conv2d
        _slow_conv2d_forward slow_conv3d slow_conv3d_forward slow_conv_transpose2d
        slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d
        _conv_depthwise2d conv_depthwise3d convolution_backward
        convolution_backward_overrideable _slow_conv2d_backward conv_tbc_backward
        mps_convolution_backward mps_convolution_transpose_backward
        _flash_attention_forward _flash_attention_backward
        _flash_attention_forward_no_dropout_inplace _efficient_attention_forward
        _efficient_attention_backward _cudnn_attention_forward
        _cudnn_attention_backward _triton_scaled_dot_attention
        _triton_multi_head_attention _native_multi_head_attention
        _transformer_encoder_layer_fwd scaled_dot_product_attention
        """,
    ),
    (True, "mkldnn", "_convolution_pointwise _convolution_transpose_pointwise"),
    (
        True,
        "onednn",
        "qconv_pointwise qconv1d_pointwise qconv2d_pointwise qconv3d_pointwise",
    ),
    (True, "higher_order", "flex_attention flex_attention_backward"),
)
_DOTS = {f"{ns}.{base}": how for how, ns, bases in _TABLE for base in bases.split()}
_PREFIX = "aten._scaled_dot_product_"


def batched_like(func: Any) -> Batched | None:
    """Return how to tell whether a dot has batch dimensions, or None if not a dot."""
    called = family(func)
    if called.startswith(_PREFIX):  # each version of torch adds some
        return True
    found = _DOTS.get(called)
    return _DOTS.get(called.removesuffix("_")) if found is None else found


def _has_batch(how: Batched, op: Op) -> bool:
    if isinstance(how, bool):
        return how
    return all(len(v.shape) > 2 and prod(v.shape[:-2]) > 1 for v in op.inputs[how])


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


# --- Policies ---


@dataclass(frozen=True)
class Dots(Policy):
    """Saves dots, with or without those that have batch dimensions."""

    batched: bool

    def decide(self, op: Op) -> bool:
        """Say whether the operation is such a dot."""
        how = batched_like(op.func)
        return how is not None and (self.batched or not _has_batch(how, op))

    def __repr__(self) -> str:
        return f"dots_{'' if self.batched else 'with_no_batch_dims_'}saveable"


dots_saveable = Dots(batched=True)
"""Saves products of matrices and vectors, convolutions and attention.

Example:
    >>> import torch
    >>> from remat.policies import Op, dots_saveable
    >>> dots_saveable(Op(torch.ops.aten.mm.default))
    <Decision.SAVE: 3>
    >>> dots_saveable(Op(torch.ops.aten.sin.default))
    <Decision.RECOMPUTE: 0>
"""
dots_with_no_batch_dims_saveable = Dots(batched=False)
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
    check_offload(offload_src, offload_dst, "offload_dot_with_no_batch_dims")
    return dots_with_no_batch_dims_saveable.but_offload(to=offload_dst)
