"""Dropout whose mask is a function of a key, and so is computed again, never stored.

Invariant: the graph holds the key, 16 bytes, and no mask; and the backward, which is
dropout of the cotangent, drops what the forward dropped.
Rejected: leaving that to remat, which saves the mask's memory only where it recomputes
the whole function.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

from remat._torch import current_layer, must_inline
from remat.random import _ops
from remat.random._draw import Value, consumed, fits, is_number
from remat.random._key import KeyLike, data_of
from remat.random._samplers import check_probability


def dropout(key: KeyLike, x: Tensor, p: Value, training: bool = True) -> Tensor:
    """Zero each element with probability ``p``, and scale the others by 1 / (1 - p).

    What is dropped is where ``bernoulli(key, p, x.shape)`` is true. The backward draws
    that again from the key: no mask is stored. (Under ``torch.func`` and in a trace
    there is a mask, with the same numbers; :func:`remat.remat` or the compiler decide
    what is kept.) What is dropped is 0, were it NaN or infinite.

    Args:
        key: a key, or an array of them whose shape ``x.shape`` begins with: each for
            its own part of ``x``. Not looked at where nothing is dropped.
        x: a tensor of floating-point or complex numbers.
        p: the probability, a number or a tensor that broadcasts to ``x``; derivatives
            flow to the scale factor in it. For 0 ``x`` is returned as it is.
        training: False to return ``x`` as it is.

    Returns:
        A tensor like ``x``; outside ``torch.func`` and traces of its memory format too.

    Raises:
        ValueError: ``p`` is a number outside [0, 1], or ``x`` is not of a shape that
            begins with the key's, or on another device.
        TypeError: ``x`` has integers.

    Example:
        >>> from remat import random
        >>> random.dropout(random.key(42), torch.ones(6), 0.8)
        tensor([5.0000, 5.0000, 0.0000, 0.0000, 5.0000, 0.0000])
    """
    check_probability(p)
    if not training or is_number(p, 0):
        return x
    _check(data_of(key), x, p)
    data = consumed(key)
    return _drop_tensor(x, data, p) if isinstance(p, Tensor) else _drop(x, data, p)


def _check(data: Tensor, x: Tensor, p: Value) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"remat: dropout of {x.dtype}; convert it to floating point.")
    shape = data.shape[:-1]
    if x.shape[: len(shape)] != shape:
        raise ValueError(
            f"remat: keys of shape {list(shape)} for an `x` of shape {list(x.shape)}, "
            "which does not begin with it. Pass one key, or one for each part of `x`."
        )
    if x.device != data.device:
        raise ValueError(
            f"remat: `x` is on {x.device} and the key on {data.device}. Use "
            "key.to(x.device)."
        )
    if isinstance(p, Tensor) and not fits(p.shape, x.shape):
        raise ValueError(
            f"remat: `p` has shape {list(p.shape)}, which does not broadcast to that "
            f"of `x`, {list(x.shape)}."
        )


def _drop(x: Tensor, data: Tensor, p: float) -> Tensor:
    # There a graph would be made of the rules below, and hold what they make.
    if not x.requires_grad or current_layer() is not None or must_inline():
        return _masked(x, data, p)
    return _Dropout.apply(x, data, p)


def _numbers_for(x: Tensor, data: Tensor) -> Tensor:
    n = math.prod(x.shape[data.ndim - 1 :])
    return _ops.uniform(data, n, torch.float32).reshape(x.shape)


def _masked(x: Tensor, data: Tensor, p: float) -> Tensor:
    # With all dropped, 1 keeps the derivative of nothing from being NaN.
    scale = 1 / (1 - p) if p < 1 else 1.0
    drop = _numbers_for(x, data) < p
    # In place the product keeps the memory format of `x`. Not under vmap: there `drop`
    # alone may be a batch.
    if current_layer() is None:
        return (x * scale).masked_fill_(drop, 0)
    return torch.where(drop, 0.0, x * scale)


def _drop_tensor(x: Tensor, data: Tensor, p: Tensor) -> Tensor:
    some = p < 1
    scale = (1 / torch.where(some, 1 - p, 1.0)).to(x.dtype)
    drop = _numbers_for(x, data) < p
    if current_layer() is None:
        # The result has the memory format of the mask, and so has the gradient.
        drop = torch.empty_like(x, dtype=torch.bool).copy_(drop)
    return torch.where(drop, 0.0, x * scale)


class _Dropout(Function):
    """Its rules are itself, of another tensor, so every derivative is right."""

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
