"""The basic distributions: bits, integers, coins, uniform and normal numbers.

Invariant: no value is at a bound that is excluded, in any dtype; an event of
probability 0 does not happen, and one of probability 1 does.
Rejected: rejection sampling, which draws a number of times that depends on the values,
so that neither vmap nor torch.compile could have it.
"""

import torch
from torch import Tensor

from remat.random import _ops
from remat.random._draw import (
    Shape,
    Value,
    as_parameter,
    below,
    check_scale,
    consumed,
    draw,
    float_dtype,
    is_number,
    moved,
    shape_of,
    wide,
)
from remat.random._key import KeyLike


def uniform(
    key: KeyLike,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    minval: Value = 0.0,
    maxval: Value = 1.0,
) -> Tensor:
    """Draw from the uniform distribution on ``[minval, maxval)``.

    The numbers are ``u * (maxval - minval) + minval`` with the bounds and their
    difference rounded to ``dtype``; float16 and bfloat16 compute in float32. They are
    those of ``torch.func._random.uniform`` bit for bit, except that a number which
    rounds to ``maxval`` becomes the largest one below. ``u`` is a multiple of
    2**-24 in float32, of 2**-11, 2**-8 and 2**-53 in float16, bfloat16 and float64.
    Derivatives flow to the bounds.

    Args:
        key: a key, or an array of them.
        shape: of the numbers drawn from each key; None for that of the bounds.
        dtype: a floating-point dtype, by default torch's default.
        minval: lower bound, a number or a tensor that broadcasts to the result.
        maxval: upper bound, likewise. A tensor bound not above ``minval`` gives
            ``minval``.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``minval`` is above ``maxval``, or their distance is not finite in
            ``dtype``; or a tensor is of a shape that does not fit.
        TypeError: ``dtype`` is not a floating-point dtype.

    Example:
        >>> from remat import random
        >>> random.uniform(random.key(42), (3,))
        tensor([0.9177, 0.9581, 0.7473])
    """
    dtype = float_dtype(dtype)
    shape = shape_of(shape, minval, maxval)
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor):
        _check_bounds(minval, maxval, dtype)
    u = draw(_ops.uniform, consumed(key), shape, dtype)
    if is_number(minval, 0) and is_number(maxval, 1):
        return u
    low = as_parameter("minval", minval, u)
    high = as_parameter("maxval", maxval, u)
    to = wide(dtype)
    out = (u.to(to) * (high - low).to(to) + low.to(to)).to(dtype)
    return torch.where(out >= high, torch.maximum(below(high), low), out)


def _check_bounds(low: float, high: float, dtype: torch.dtype) -> None:
    if not 0 <= high - low <= torch.finfo(dtype).max:
        raise ValueError(
            f"remat: expected minval <= maxval at a finite distance in {dtype}, got "
            f"{low} and {high}."
        )


def normal(
    key: KeyLike,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    mean: Value = 0.0,
    std: Value = 1.0,
) -> Tensor:
    """Draw from the normal distribution.

    The numbers are ``z * std + mean``, computed in float32 for float16 and bfloat16,
    with the ``z`` of ``torch.func._random.normal``: equal to rounding, since logarithm
    and cosine are not the same on every device. Derivatives flow to the parameters.

    Args:
        key: a key, or an array of them.
        shape: of the numbers drawn from each key; None for that of the parameters.
        dtype: a floating-point dtype, by default torch's default.
        mean: a number or a tensor that broadcasts to the result.
        std: standard deviation, likewise.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``std`` is negative, or a tensor is of a shape that does not fit.
        TypeError: ``dtype`` is not a floating-point dtype.

    Example:
        >>> from remat import random
        >>> random.normal(random.key(42), (3,))
        tensor([-0.9702,  0.1940, -1.2356])
    """
    dtype = float_dtype(dtype)
    shape = shape_of(shape, mean, std)
    check_scale("std", std)
    standard = is_number(mean, 0) and is_number(std, 1)
    z = draw(_ops.normal, consumed(key), shape, dtype if standard else wide(dtype))
    return z if standard else moved(z, "mean", mean, "std", std).to(dtype)


def bernoulli(key: KeyLike, p: Value = 0.5, shape: Shape = None) -> Tensor:
    """Draw True with probability ``p``.

    True is where a uniform number in float32 is below ``p``: never for 0, always for 1,
    and otherwise right to 2**-24. No derivative flows to ``p``.

    Args:
        key: a key, or an array of them.
        p: probability of True, a number or a tensor that broadcasts to the result.
        shape: of the draws from each key; None for that of ``p``.

    Returns:
        A tensor of bool of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``p`` is a number outside [0, 1], or a tensor of a shape that does
            not fit.

    Example:
        >>> from remat import random
        >>> random.bernoulli(random.key(42), 0.9, (3,))
        tensor([False, False,  True])
    """
    check_probability(p)
    u = draw(_ops.uniform, consumed(key), shape_of(shape, p), torch.float32)
    if isinstance(p, Tensor):
        u = u.to(torch.promote_types(p.dtype, u.dtype))
        return u < as_parameter("p", p, u)
    return u < p


def check_probability(p: Value) -> None:
    """Raise if a number is no probability."""
    if not isinstance(p, Tensor) and not 0 <= p <= 1:
        raise ValueError(f"remat: the probability `p` is {p}, outside [0, 1].")
