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
    number_below,
    rounded,
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
    if isinstance(minval, (int, float)) and isinstance(maxval, (int, float)):
        return _uniform_between(key, shape, dtype, minval, maxval)
    u = draw(_ops.uniform, consumed(key), shape, dtype)
    low = as_parameter("minval", minval, u)
    high = as_parameter("maxval", maxval, u)
    to = wide(dtype)
    out = (u.to(to) * (high - low).to(to) + low.to(to)).to(dtype)
    return torch.where(out >= high, torch.maximum(below(high), low), out)


def _uniform_between(
    key: KeyLike, shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float
) -> Tensor:
    most = torch.finfo(dtype).max
    if not (0 <= high - low <= most and abs(low) <= most and abs(high) <= most):
        raise ValueError(
            f"remat: expected minval <= maxval at a finite distance in {dtype}, got "
            f"{low} and {high}."
        )
    u = draw(_ops.uniform, consumed(key), shape, dtype)
    if (low, high) == (0, 1):
        return u
    low, high = rounded(low, dtype), rounded(high, dtype)
    out = u.to(wide(dtype)).mul_(rounded(high - low, dtype)).add_(low)
    return out.to(dtype).clamp(max=max(low, number_below(high, dtype)))


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


def rademacher(
    key: KeyLike, shape: Shape = (), dtype: torch.dtype = torch.int64
) -> Tensor:
    """Draw 1 or -1, each with probability 1/2.

    Args:
        key: a key, or an array of them.
        shape: of the draws from each key.
        dtype: any dtype that has -1.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Example:
        >>> from remat import random
        >>> random.rademacher(random.key(42), (4,))
        tensor([-1, -1, -1,  1])
    """
    return bernoulli(key, 0.5, shape_of(shape)).to(dtype) * 2 - 1


_WORDS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


def _check_words(dtype: torch.dtype, no: torch.dtype | None = None) -> None:
    if dtype not in _WORDS or dtype is no:
        raise TypeError(f"remat: cannot draw integers of {dtype}. Try torch.int64.")


def bits(key: KeyLike, shape: Shape = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Draw integers, each value of the dtype being as likely as any other.

    These are the words of the stream: those of 32 bits as ``torch.func._random.bits``
    has them, or their low bits; for 64 bits two words, the first one high.

    Args:
        key: a key, or an array of them.
        shape: of the integers drawn from each key.
        dtype: signed or unsigned, of 8 to 64 bits. A signed integer has the bits that
            the unsigned one of its size would have.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        TypeError: ``dtype`` is not an integer dtype.

    Example:
        >>> from remat import random
        >>> random.bits(random.key(42), (2,))
        tensor([2632642643, 2012563771], dtype=torch.uint32)
    """
    _check_words(dtype)
    words = draw(_ops.bits, consumed(key), shape_of(shape), 8 * dtype.itemsize)
    return words.view(dtype) if dtype.itemsize == 8 else words.to(dtype)


def randint(
    key: KeyLike,
    shape: Shape,
    minval: int | Tensor,
    maxval: int | Tensor,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Draw integers from ``minval`` to ``maxval - 1``, each as likely as any other.

    They are 64 bits of the stream modulo ``maxval - minval``, so no probability is off
    by more than 2**-64 of itself times the range. As in ``torch.func._random.randint``,
    32 bits are used where the dtype has no more and the bounds are Python integers less
    than 2**28 apart: there that is 2**-32.

    Args:
        key: a key, or an array of them.
        shape: of the integers drawn from each key; None for that of the bounds.
        minval: the least integer, a number or a tensor that broadcasts to the result.
        maxval: one more than the greatest, likewise; less than 2**63 above ``minval``.
            A tensor bound not above ``minval`` gives ``minval``.
        dtype: an integer dtype, but not uint64.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``maxval`` is not above ``minval``, a bound is outside ``dtype``, or
            a tensor is of a shape that does not fit.
        TypeError: ``dtype`` is not an integer dtype or is uint64, or a bound is not an
            integer.

    Example:
        >>> from remat import random
        >>> random.randint(random.key(42), (6,), 0, 10)
        tensor([9, 9, 3, 5, 7, 9])
    """
    _check_words(dtype, no=torch.uint64)
    _check_integer("minval", minval)
    _check_integer("maxval", maxval)
    shape = shape_of(shape, minval, maxval)
    if isinstance(minval, Tensor) or isinstance(maxval, Tensor):
        words = draw(_ops.bits, consumed(key), shape, 64)
        low = as_parameter("minval", minval, words)
        span = as_parameter("maxval", maxval, words) - low
        return (low + _modulo(words, span.clamp(min=1))).to(dtype)
    _check_range(minval, maxval, dtype)
    span = maxval - minval
    if dtype.itemsize <= 4 and span < 2**28:
        return (draw(_ops.bits, consumed(key), shape, 32) % span + minval).to(dtype)
    words = draw(_ops.bits, consumed(key), shape, 64)
    return (_modulo(words, span) + minval).to(dtype)


def _check_integer(name: str, value: Value) -> None:
    fractional = isinstance(value, Tensor) and value.is_floating_point()
    if fractional or isinstance(value, float):
        raise TypeError(f"remat: `{name}` is {value}; it must be an integer.")


def _check_range(low: int, high: int, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    if not info.min <= low < high <= info.max + 1:
        raise ValueError(
            f"remat: expected minval < maxval in the range of {dtype}, got {low} and "
            f"{high}."
        )
    if high - low >= 2**63:
        raise ValueError(
            f"remat: {low} and {high} are 2**63 or more apart. For integers of all 64 "
            "bits use remat.random.bits(key, shape, torch.int64)."
        )


def _modulo(words: Tensor, span: int | Tensor) -> Tensor:
    """Return 64 bits, taken as unsigned, modulo a positive integer below 2**63."""
    if isinstance(span, int) and span <= 2**62:
        return (words % span + (words < 0) * (2**64 % span)) % span
    half = ((words >> 1) & (2**63 - 1)) % span
    # Twice that, but never as much as 2**63.
    twice = torch.where(half >= span - half, half - (span - half), half + half)
    odd = words & 1
    return torch.where(twice + odd == span, 0, twice + odd)
