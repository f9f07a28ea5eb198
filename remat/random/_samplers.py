"""The basic distributions: bits, integers, coins, uniform and normal numbers.

Invariant: in every dtype, no value is at an excluded bound. An event of probability 0
never happens, and an event of probability 1 always does.
Rejected: rejection sampling. The number of its draws depends on the values, so it works
neither under vmap nor under torch.compile.
"""

from typing import Any

import torch
from torch import Tensor

from remat.random import _draw, _ops
from remat.random._draw import Number, Shape
from remat.random._key import KeyLike, consumed


def uniform(
    key: KeyLike,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    minval: Number = 0.0,
    maxval: Number = 1.0,
) -> Tensor:
    """Draw from the uniform distribution on ``[minval, maxval)``.

    The numbers are ``u * (maxval - minval) + minval``. The bounds and their difference
    are rounded to ``dtype``; float16 and bfloat16 compute in float32. The numbers are
    those of ``torch.func._random.uniform`` bit for bit, with one exception: a number
    that rounds to ``maxval`` becomes the largest value below it. ``u`` is a multiple of
    2**-24 in float32, 2**-53 in float64, 2**-11 in float16 and 2**-8 in bfloat16.
    Derivatives flow to the bounds.

    Args:
        key: a key, or an array of them.
        shape: of the numbers drawn from each key; None for that of the bounds.
        dtype: a floating-point dtype, by default torch's default.
        minval: lower bound, a number or a tensor that broadcasts to the result.
        maxval: upper bound, likewise. If it is a tensor and not above ``minval``, the
            result is ``minval``.

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
    dtype = _draw.float_dtype(dtype)
    shape = _draw.shape_for(key, shape, minval=minval, maxval=maxval)
    if isinstance(minval, (int, float)) and isinstance(maxval, (int, float)):
        most, span = torch.finfo(dtype).max, maxval - minval
        if not (0 <= span <= most and abs(minval) <= most and abs(maxval) <= most):
            raise ValueError(_BOUNDS.format(dtype=dtype, low=minval, high=maxval))
        # While compiling, compute with tensors: `rounded` would make the number a
        # constant of the graph. Not for small dtypes, which the compiler rounds less
        # often than we.
        if not torch.compiler.is_compiling() or dtype.itemsize <= 2:
            u = _draw.draw(_ops.uniform, consumed(key), shape, dtype)
            if (minval, maxval) == (0, 1):
                return u
            low, high = (_draw.rounded(number, dtype) for number in (minval, maxval))
            u = u.to(_draw.wide(dtype)).mul_(_draw.rounded(high - low, dtype)).add_(low)
            return u.to(dtype).clamp(max=max(low, _draw.number_below(high, dtype)))
    u = _draw.draw(_ops.uniform, consumed(key), shape, dtype)
    if _draw.is_number(minval, 0) and _draw.is_number(maxval, 1):
        return u
    low, high = _draw.as_parameter(minval, u), _draw.as_parameter(maxval, u)
    to = _draw.wide(dtype)
    out = (u.to(to) * (high - low).to(to) + low.to(to)).to(dtype)
    return torch.where(out >= high, torch.maximum(_draw.below(high), low), out)


_BOUNDS = (
    "remat: expected minval <= maxval at a finite distance in {dtype}, got {low} and "
    "{high}."
)


def normal(
    key: KeyLike,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    mean: Number = 0.0,
    std: Number = 1.0,
) -> Tensor:
    """Draw from the normal distribution.

    The numbers are ``z * std + mean``; float16 and bfloat16 compute in float32. ``z``
    equals that of ``torch.func._random.normal`` up to rounding: logarithm and cosine
    differ between devices. Derivatives flow to the parameters.

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
    dtype = _draw.float_dtype(dtype)
    _draw.check_scale("std", std)
    shape = _draw.shape_for(key, shape, mean=mean, std=std)
    standard = _draw.is_number(mean, 0) and _draw.is_number(std, 1)
    z = _draw.draw(
        _ops.normal, consumed(key), shape, dtype if standard else _draw.wide(dtype)
    )
    return z if standard else _draw.moved(z, mean, std).to(dtype)


def bernoulli(key: KeyLike, p: Number = 0.5, shape: Shape = None) -> Tensor:
    """Draw True with probability ``p``.

    A draw is True if a uniform number in float32 is below ``p``: never for 0, always
    for 1, and otherwise with probability ``p`` to within 2**-24. No derivative flows to
    ``p``.

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
    shape = _draw.shape_for(key, shape, p=p)
    u = _draw.draw(_ops.uniform, consumed(key), shape, torch.float32)
    if isinstance(p, Tensor):
        u = u.to(torch.promote_types(p.dtype, u.dtype))
        return u < _draw.as_parameter(p, u)
    return u < p


def check_probability(p: Number) -> None:
    """Raise if a number is not a probability."""
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

    Raises:
        TypeError: ``dtype`` has no -1.

    Example:
        >>> from remat import random
        >>> random.rademacher(random.key(42), (4,))
        tensor([-1, -1, -1,  1])
    """
    if not dtype.is_signed:
        raise TypeError(f"remat: there is no -1 in {dtype}. Use torch.int64.")
    return bernoulli(key, 0.5, _draw.as_shape(shape)).to(dtype) * 2 - 1


_WORDS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


def _check_words(dtype: torch.dtype, no: torch.dtype | None = None) -> None:
    if dtype not in _WORDS or dtype is no:
        raise TypeError(f"remat: cannot draw integers of {dtype}. Use torch.int64.")


def bits(key: KeyLike, shape: Shape = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Draw integers. Every value of the dtype is equally likely.

    The integers are the words of the stream. Those of 32 bits are the words that
    ``torch.func._random.bits`` gives. Those of 8 and 16 bits are their low bits. Those
    of 64 bits are two words; the first word is the high half.

    Args:
        key: a key, or an array of them.
        shape: of the integers drawn from each key.
        dtype: an integer dtype of 8 to 64 bits, signed or unsigned. A signed draw has
            the same bits as the unsigned one.

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
    shape = _draw.as_shape(shape)
    words = _draw.draw(_ops.bits, consumed(key), shape, 8 * dtype.itemsize)
    return words.view(dtype) if dtype.itemsize == 8 else words.to(dtype)


def randint(
    key: KeyLike,
    shape: Shape,
    minval: int | Tensor,
    maxval: int | Tensor,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Draw integers from ``minval`` to ``maxval - 1``. All are equally likely.

    The integers are 64 bits of the stream modulo ``maxval - minval``. So the relative
    error of a probability is at most 2**-64 times ``maxval - minval``. 32 bits are used
    if the dtype has no more and the bounds are Python integers less than 2**28 apart,
    as in ``torch.func._random.randint``. Then 2**-32 takes the place of 2**-64.

    Args:
        key: a key, or an array of them.
        shape: of the integers drawn from each key; None for that of the bounds.
        minval: the least integer, a number or a tensor that broadcasts to the result.
        maxval: one more than the greatest, likewise. If it is a tensor and not above
            ``minval``, the result is ``minval``.
        dtype: an integer dtype, but not uint64.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``maxval`` is not above ``minval``, a bound is outside ``dtype``, or
            a tensor is of a shape that does not fit. Values of tensors are checked only
            on the CPU, outside traces and transforms.
        TypeError: ``dtype`` is not an integer dtype or is uint64, or a bound is not an
            integer.

    Example:
        >>> from remat import random
        >>> random.randint(random.key(42), (6,), 0, 10)
        tensor([9, 9, 3, 5, 7, 9])
    """
    _check_words(dtype, no=torch.uint64)
    _check_bound("minval", minval, dtype, 0)
    _check_bound("maxval", maxval, dtype, 1)
    shape = _draw.shape_for(key, shape, minval=minval, maxval=maxval)
    if isinstance(minval, Tensor) or isinstance(maxval, Tensor):
        words = words_of(key, shape)
        low, high = _draw.as_parameter(minval, words), _draw.as_parameter(maxval, words)
        return (low + _modulo_each(words, low, high)).to(dtype)
    info, span = torch.iinfo(dtype), maxval - minval
    if not info.min <= minval < maxval <= info.max + 1:
        raise ValueError(
            f"remat: expected minval < maxval within the range of {dtype}, got "
            f"{minval} and {maxval}."
        )
    if dtype.itemsize <= 4 and span < 2**28:
        words = _draw.draw(_ops.bits, consumed(key), shape, 32)
        return (words % span + minval).to(dtype)
    return (modulo(words_of(key, shape), span) + minval).to(dtype)


def _check_bound(name: str, value: Any, dtype: torch.dtype, above: int) -> None:
    """Raise if a bound is not an integer, or is a tensor with values out of range."""
    tensor = isinstance(value, Tensor)
    if value.dtype not in _WORDS if tensor else isinstance(value, (float, complex)):
        raise TypeError(f"remat: `{name}` is {value}; it must be an integer.")
    if not tensor or not _draw.is_readable(value):
        return
    info, number = torch.iinfo(dtype), value.to(torch.int64)
    wrong = (number < info.min) | (number - above > info.max)
    if value.dtype is torch.uint64:
        wrong |= number < 0
    if wrong.any():
        raise ValueError(f"remat: `{name}` is {value}, outside the range of {dtype}.")


def words_of(key: KeyLike, shape: tuple[int, ...]) -> Tensor:
    """Return words of 64 bits: int64."""
    return _draw.draw(_ops.bits, consumed(key), shape, 64)


def modulo(words: Tensor, span: int) -> Tensor:
    """Return 64 bits, taken as unsigned, modulo an integer up to 2**64."""
    if span <= 2**31:
        # One remainder is enough: its argument is below 2**63.
        high, low = _shifted(words, 32).bitwise_and_(_LOW), words & _LOW
        return high.mul_(2**32 % span).add_(low) % span
    if span <= 2**62:
        return (words % span + (words < 0) * (2**64 % span)) % span
    if span < 2**63:
        return _modulo_wide(words, span)
    return words if span == 2**64 else _less(words, span - 2**64)


_LOW = 2**32 - 1

# Not `words >> n`: that of a DTensor returns the words as they are, also in torch 2.14.
_shifted = torch.bitwise_right_shift


def _modulo_each(words: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return 64 bits modulo each distance between bounds, which is at least 1."""
    # From 2**63 on, the span wraps to the int64 with the same bits.
    span = torch.where(low < high, high - low, 1)
    return torch.where(
        span > 0, _modulo_wide(words, span.clamp(min=1)), _less(words, span)
    )


def _less(words: Tensor, span: int | Tensor) -> Tensor:
    """Return 64 bits modulo a distance of at least 2**63, given by its bits."""
    least = torch.iinfo(torch.int64).min
    return torch.where(words ^ least >= span ^ least, words - span, words)


def _modulo_wide(words: Tensor, span: int | Tensor) -> Tensor:
    """Return 64 bits modulo a positive integer below 2**63."""
    half = (_shifted(words, 1) & (2**63 - 1)) % span
    # Twice `half` modulo `span`, without reaching 2**63.
    twice = torch.where(half >= span - half, half - (span - half), half + half)
    odd = words & 1
    return torch.where(twice + odd == span, 0, twice + odd)
