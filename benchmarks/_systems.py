"""The systems that the benchmarks compare, each as a wrapper of one function or module.

A wrapper takes what computes tensors and returns what a user of that system would call
instead. What a system cannot do raises, and the tables say so. Those that save dots
save the results of the same operators: ``DOTS``, and on a GPU ``DOTS_ON_CUDA``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from remat import compat, policies, remat


TensorFn = Callable[..., Tensor]
Wrapper = Callable[[TensorFn], TensorFn]

PLAIN, REENTRANT, BASELINE = "plain", "torch reentrant", "torch non-reentrant"
SELECTIVE, TORCH_REMAT = "torch SAC, dots", "torch_remat 0.2.2"
DEFAULT, PRUNED, SAVING = "remat", "remat, prune=True", "remat, dots"
COMPAT, COMPAT_SELECTIVE = "remat.compat", "remat.compat SAC, dots"

_aten = torch.ops.aten
_PRODUCTS = _aten.mm, _aten.addmm, _aten.bmm
DOTS = (*_PRODUCTS, _aten._scaled_dot_product_flash_attention_for_cpu)
DOTS_ON_CUDA = (
    *_PRODUCTS,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
)


def _torch_checkpoint(
    checkpoint: Callable[..., Any] = checkpoint, **options: Any
) -> Wrapper:
    def wrap(fn: TensorFn) -> TensorFn:
        return functools.partial(checkpoint, fn, **options)

    return wrap


def _contexts(dots: Sequence[Any]) -> Callable[..., Any]:
    return functools.partial(
        create_selective_checkpoint_contexts, [packet.default for packet in dots]
    )


def selective(dots: Sequence[Any]) -> Wrapper:
    """Return torch's selective checkpoint, which saves the results of operators."""
    return _torch_checkpoint(use_reentrant=False, context_fn=_contexts(dots))


def _torch_remat(fn: TensorFn) -> TensorFn:
    import torch_remat

    return torch_remat.checkpoint()(fn)


SYSTEMS: dict[str, Wrapper] = {
    PLAIN: lambda fn: fn,
    REENTRANT: _torch_checkpoint(use_reentrant=True),
    BASELINE: _torch_checkpoint(use_reentrant=False),
    SELECTIVE: selective(DOTS),
    TORCH_REMAT: _torch_remat,
    DEFAULT: remat,
    PRUNED: functools.partial(remat, prune=True),
    SAVING: functools.partial(remat, policy=policies.dots_saveable),
    COMPAT: _torch_checkpoint(compat.checkpoint, use_reentrant=False),
    COMPAT_SELECTIVE: _torch_checkpoint(
        compat.checkpoint, use_reentrant=False, context_fn=_contexts(DOTS)
    ),
}


def brief(error: Exception) -> str:
    """What a table cell says about a system that raised."""
    return f"n/a ({type(error).__name__})"
