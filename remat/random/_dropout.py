"""Dropout whose mask is a function of a key. It is recomputed and never stored.

Invariant: the graph holds the key, 16 bytes, and no mask. The backward is dropout of
the cotangent, and drops the same elements as the forward.
Rejected: leaving the mask to remat. That saves its memory only when the whole function
is recomputed.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

from remat._torch.levels import current_layer
from remat._torch.tracing import must_inline
from remat.random import _draw, _ops
from remat.random._draw import Number
from remat.random._key import KeyLike, consumed, data_of
from remat.random._samplers import check_probability


def dropout(key: KeyLike, x: Tensor, p: Number, training: bool = True) -> Tensor:
    """Zero each element with probability ``p``, and scale the others by 1 / (1 - p).

    An element is dropped where ``bernoulli(key, p, x.shape)`` is True. The backward
    draws the mask again from the key, so no mask is stored. (Under ``torch.func`` and
    in a trace there is a mask, with the same values; :func:`remat.remat` or the
    compiler decides what is saved.) A dropped element is 0, even if it was NaN or
    infinite.

    Args:
        key: a key, or an array of keys. ``x.shape`` must begin with the shape of the
            array: each key is for its own part of ``x``. If nothing can be dropped, the
            key is ignored.
        x: a tensor of floating-point or complex numbers.
        p: the probability, a number or a tensor that broadcasts to ``x``. Derivatives
            flow to it through the scale factor. For the number 0, ``x`` is returned as
            it is.
        training: False to return ``x`` as it is.

    Returns:
        A tensor like ``x``. Outside ``torch.func`` and traces it also has the memory
        format of ``x``.

    Raises:
        ValueError: ``p`` is a number outside [0, 1], or ``x.shape`` does not begin with
            the key's shape, or ``x`` is on another device.
        TypeError: ``x`` has an integer dtype.

    Example:
        >>> from remat import random
        >>> random.dropout(random.key(42), torch.ones(6), 0.8)
        tensor([5.0000, 5.0000, 0.0000, 0.0000, 5.0000, 0.0000])
    """
    check_probability(p)
    if not training or _draw.is_number(p, 0):
        return x
    _check(data_of(key), x, p)
    data = consumed(key)
    return _masked(x, data, p) if isinstance(p, Tensor) else _drop(x, data, p)


def _check(data: Tensor, x: Tensor, p: Number) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"remat: dropout of {x.dtype} is not possible. Convert `x` to floating "
            "point."
        )
    shape = data.shape[:-1]
    if x.shape[: len(shape)] != shape:
        raise ValueError(
            f"remat: keys of shape {list(shape)} for an `x` of shape {list(x.shape)}: "
            "the shape of `x` must begin with the shape of the keys. Pass one key, or "
            "one for each part of `x`."
        )
    if x.device != data.device:
        raise ValueError(
            f"remat: `x` is on {x.device} and the key is on {data.device}. Pass "
            "key.to(x.device)."
        )
    if isinstance(p, Tensor) and not _draw.fits(p.shape, x.shape):
        raise ValueError(
            f"remat: `p` has shape {list(p.shape)}, which does not broadcast to the "
            f"shape of `x`, {list(x.shape)}."
        )


def _drop(x: Tensor, data: Tensor, p: float) -> Tensor:
    # Transforms and traces would build a graph of the rules below, and save the mask.
    if not x.requires_grad or current_layer() is not None or must_inline():
        return _masked(x, data, p)
    return _Dropout.apply(x, data, p)


def _numbers_for(x: Tensor, data: Tensor) -> Tensor:
    if _draw.is_dtensor(x):
        shape: Any = _draw.shape_like(x)
        return _draw.draw_each(_ops.uniform, data, shape, torch.float32)
    n = math.prod(x.shape[data.ndim - 1 :])
    return _ops.uniform(data, n, torch.float32).reshape(x.shape)


def _masked(x: Tensor, data: Tensor, p: Number) -> Tensor:
    # When everything is dropped, a scale of 1 keeps derivatives from being NaN.
    if isinstance(p, Tensor):
        scale = (1 / torch.where(p < 1, 1 - p, 1.0)).to(x.dtype)
    else:
        scale = 1 / (1 - p) if p < 1 else 1.0
    drop = _numbers_for(x, data) < p
    # So that the product keeps the memory format of `x`, and a gradient too. Not under
    # vmap, where `drop` may be batched and `x` not, nor where `x` is to be added up.
    if current_layer() is None and not _draw.is_dtensor(x):
        if not isinstance(p, Tensor):
            return (x * scale).masked_fill_(drop, 0)
        drop = torch.empty_like(x, dtype=torch.bool).copy_(drop)
    return torch.where(drop, 0.0, x * scale)


class _Dropout(Function):
    """Dropout is linear: its backward and jvp are dropout with the same mask."""

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, data: Tensor, p: float
    ) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(data)
        ctx.save_for_forward(data)
        return _masked(x, data, p)

    @staticmethod
    @override
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (data,) = ctx.saved_tensors
        return _drop(cotangents[0], data, ctx.p), None, None

    @staticmethod
    @override
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (data,) = ctx.saved_tensors
        return _drop(tangents[0], data, ctx.p)
