"""Continuous distributions that are functions of a uniform number.

Invariant: a result is finite, and derivatives flow from it to every parameter.
Rejected: the logarithm of a uniform number in float16 or bfloat16. These dtypes have
only 2048 or 256 uniform numbers, so they compute in float32.
"""

import math

import torch
from torch import Tensor

from remat.random import _draw, _ops
from remat.random._draw import Number, Shape
from remat.random._key import KeyLike, consumed


def _wide_uniform(
    key: KeyLike, shape: Shape, dtype: torch.dtype | None, **parameters: Number
) -> tuple[Tensor, torch.dtype]:
    """Return uniform numbers to compute with, and the dtype of what comes of them."""
    dtype = _draw.float_dtype(dtype)
    _draw.check_scale("scale", parameters.get("scale", 1))
    shape = _draw.shape_for(key, shape, **parameters)
    return _draw.draw(_ops.uniform, consumed(key), shape, _draw.wide(dtype)), dtype


def gumbel(
    key: KeyLike,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    loc: Number = 0.0,
    scale: Number = 1.0,
) -> Tensor:
    """Draw from the Gumbel distribution, ``loc - scale * log(-log(u))``.

    ``u`` is drawn by :func:`uniform` in float32, or in float64 for float64. A ``u`` of
    0 is replaced by the smallest normal number. So values are at most 16.7 scales above
    ``loc`` (36.8 in float64). Derivatives flow to the parameters.

    Args:
        key: a key, or an array of them.
        shape: of the numbers drawn from each key; None for that of the parameters.
        dtype: a floating-point dtype, by default torch's default.
        loc: a number or a tensor that broadcasts to the result.
        scale: likewise.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``scale`` is negative, or a tensor is of a shape that does not fit.
        TypeError: ``dtype`` is not a floating-point dtype.

    Example:
        >>> from remat import random
        >>> random.gumbel(random.key(42), (3,))
        tensor([2.4551, 3.1523, 1.2336])
    """
    u, dtype = _wide_uniform(key, shape, dtype, loc=loc, scale=scale)
    g = -(-u.clamp(min=torch.finfo(u.dtype).tiny).log()).log()
    return _draw.moved(g, loc, scale).to(dtype)


def exponential(
    key: KeyLike,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    scale: Number = 1.0,
) -> Tensor:
    """Draw from the exponential distribution, ``-scale * log(1 - u)``.

    ``u`` is drawn by :func:`uniform` in float32, or in float64 for float64. So values
    are from 0 to 16.7 scales (36.8 in float64). Derivatives flow to ``scale``.

    Args:
        key: a key, or an array of them.
        shape: of the numbers drawn from each key; None for that of ``scale``.
        dtype: a floating-point dtype, by default torch's default.
        scale: one over the rate, a number or a tensor that broadcasts to the result.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``scale`` is negative, or a tensor is of a shape that does not fit.
        TypeError: ``dtype`` is not a floating-point dtype.

    Example:
        >>> from remat import random
        >>> random.exponential(random.key(42), (3,))
        tensor([2.4977, 3.1736, 1.3757])
    """
    u, dtype = _wide_uniform(key, shape, dtype, scale=scale)
    return _draw.moved(-(-u).log1p(), 0, scale).to(dtype)


def laplace(
    key: KeyLike,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    loc: Number = 0.0,
    scale: Number = 1.0,
) -> Tensor:
    """Draw from the Laplace distribution, of density ``exp(-|x - loc| / scale)``.

    It is computed from a number that :func:`uniform` draws in float32, or in float64
    for float64. So values are at most 16 scales from ``loc`` (36.1 in float64).
    Derivatives flow to the parameters.

    Args:
        key: a key, or an array of them.
        shape: of the numbers drawn from each key; None for that of the parameters.
        dtype: a floating-point dtype, by default torch's default.
        loc: a number or a tensor that broadcasts to the result.
        scale: likewise.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``scale`` is negative, or a tensor is of a shape that does not fit.
        TypeError: ``dtype`` is not a floating-point dtype.

    Example:
        >>> from remat import random
        >>> random.laplace(random.key(42), (3,))
        tensor([1.8045, 2.4805, 0.6826])
    """
    u, dtype = _wide_uniform(key, shape, dtype, loc=loc, scale=scale)
    # On [-1, 1). At -1 the logarithm is infinite, so -1 moves to its neighbour.
    u = (2 * u - 1).clamp(min=torch.finfo(u.dtype).eps - 1)
    return _draw.moved(-u.sign() * (-u.abs()).log1p(), loc, scale).to(dtype)


def truncated_normal(
    key: KeyLike,
    lower: Number,
    upper: Number,
    shape: Shape = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Draw from the standard normal distribution between two bounds, both excluded.

    The inverse of the distribution function is applied to a number that :func:`uniform`
    draws, on the side where the function is accurate. So far tails are right too: up to
    12 standard deviations in float32, and 37 in float64. Beyond that, every value is
    next to the nearer bound. Derivatives flow to the bounds.

    Args:
        key: a key, or an array of them.
        lower: a number (-inf is allowed), or a tensor that broadcasts to the result.
        upper: likewise, above ``lower``.
        shape: of the numbers drawn from each key; None for that of the bounds.
        dtype: a floating-point dtype, by default torch's default.

    Returns:
        A tensor of shape ``(*key.shape, *shape)``, on the key's device.

    Raises:
        ValueError: ``upper`` is not above ``lower``, or ``dtype`` has no value between
            them; or a tensor is of a shape that does not fit.
        TypeError: ``dtype`` is not a floating-point dtype.

    Example:
        >>> from remat import random
        >>> random.truncated_normal(random.key(42), -1.0, 1.0, (3,))
        tensor([0.7898, 0.8882, 0.4367])
    """
    dtype = _draw.float_dtype(dtype)
    if not (isinstance(lower, Tensor) or isinstance(upper, Tensor)):
        _check_between(lower, upper, dtype)
    u, dtype = _wide_uniform(key, shape, dtype, lower=lower, upper=upper)
    # Rounded first: the result must lie within the bounds as its dtype rounds them.
    low = _draw.as_parameter(lower, u.to(dtype))
    high = _draw.as_parameter(upper, u.to(dtype))
    # The distribution function is accurate near 0 and loses its digits near 1. And not
    # torch.special.ndtr, which is not accurate near 0 either.
    left, right, flips = low.to(u.dtype), high.to(u.dtype), low > 0
    a, b = torch.where(flips, -right, left), torch.where(flips, -left, right)
    below_a, below_b = (0.5 * (-math.sqrt(0.5) * end).erfc() for end in (a, b))
    p = below_a + u * (below_b - below_a)
    x = torch.special.ndtri(p.clamp(min=torch.finfo(p.dtype).tiny))
    x = torch.where(flips, -x, x).to(dtype)
    most = torch.finfo(dtype).max
    x = torch.minimum(x, _draw.below(high.clamp(max=most)))
    return torch.maximum(x, -_draw.below((-low).clamp(max=most)))


def _check_between(lower: float, upper: float, dtype: torch.dtype) -> None:
    some = lower < upper
    # While compiling, `rounded` would make the number a constant of the graph.
    if some and not torch.compiler.is_compiling():
        most = torch.finfo(dtype).max
        low = _draw.rounded(max(lower, -most), dtype)
        high = _draw.rounded(min(upper, most), dtype)
        some = low < _draw.number_below(high, dtype)
    if not some:
        raise ValueError(
            f"remat: expected lower < upper with a value of {dtype} between them, got "
            f"{lower} and {upper}."
        )
