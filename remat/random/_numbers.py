"""Keyed versions of torch's own random functions, with torch's dtypes and defaults.

Each function takes a key, and a shape or the tensor to fill. It returns the numbers.

Invariant: parameters that torch refuses are refused, if their values can be read at no
cost.
Rejected: using this package's samplers as they are. They draw only floating-point
numbers and have other defaults.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from remat._torch import current_layer, must_inline
from remat.random._key import Key
from remat.random._samplers import bernoulli, bits, normal, randint, uniform
from remat.random._sharded import shape_like


# Not `dtype.to_real()`, which Dynamo does not trace.
_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def uniform_of(key: Key, shape: Any, dtype: Any, low: Any = 0, high: Any = 1) -> Tensor:
    if not dtype.is_complex:
        return uniform(key, shape, dtype, low, high)
    return torch.view_as_complex(uniform(key, (*shape, 2), _REAL[dtype], low, high))


def gaussian(key: Key, shape: Any, dtype: Any, mean: Any = 0, std: Any = 1) -> Tensor:
    if not dtype.is_complex:
        return normal(key, shape, dtype, mean, std)
    # Half of the variance in each part.
    parts = normal(key, (*shape, 2), _REAL[dtype]) * math.sqrt(0.5)
    return torch.view_as_complex(parts) * std + mean


def integers(key: Key, shape: Any, low: Any, high: Any, dtype: Any) -> Tensor:
    check(low < high, "integers from [low, high) need low < high", (low, high))
    if dtype in _DRAWN:
        return randint(key, shape, low, high, dtype)
    if high - low < 2**63:
        return randint(key, shape, low, high, torch.int64).to(dtype)
    return _wide_integers(key, shape, low, high - low).to(dtype)


_DRAWN = {
    *(torch.int8, torch.int16, torch.int32),
    *(torch.uint8, torch.uint16, torch.uint32),
}


def _wide_integers(key: Key, shape: Any, low: int, span: int) -> Tensor:
    """Return `low` plus words modulo a span from 2**63 to 2**64, as int64 patterns."""
    words = bits(key, shape, torch.uint64).view(torch.int64)
    if span < 2**64:
        # As an int64 the span is negative, and so are the words that reach it.
        span -= 2**64
        words = torch.where((words < 0) & (words >= span), words - span, words)
    return words + low


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype to draw in for a distribution with tails."""
    exact = x.dtype is torch.float64 or not x.is_floating_point()
    return torch.float64 if exact else torch.float32


def check(is_valid: bool, what: str, got: Any) -> None:
    if not is_valid:
        raise ValueError(f"remat: {what}, got {got}.")


def check_all(holds: Callable[[], Tensor], t: Tensor, what: str) -> None:
    """Check values if reading them is free: not on a GPU and not in a trace."""
    unread = t.device.type != "cpu" or type(t) not in (Tensor, Parameter)
    if unread or current_layer() is not None or must_inline():
        return
    check(bool(holds().all()), what, t.detach())


def uniform_(key: Key, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return uniform_of(key, shape_like(x), x.dtype, low, high)


def normal_(key: Key, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return gaussian(key, shape_like(x), x.dtype, mean, std)


def bernoulli_(key: Key, x: Tensor, p: Any = 0.5) -> Tensor:
    return coin(key, p, shape_like(x)).to(x.dtype)


def coin(key: Key, p: Any, shape: Any) -> Tensor:
    if isinstance(p, Tensor):
        check_all(lambda: (p >= 0) & (p <= 1), p, "probabilities are between 0 and 1")
    return bernoulli(key, p, shape)


def check_floats(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"remat: {name} draws floating-point numbers, got {x.dtype}.")


def exponential_(key: Key, x: Tensor, lambd: float = 1.0) -> Tensor:
    check_floats("exponential_", x)
    check(lambd > 0, "exponential_ needs lambd > 0", lambd)
    u = uniform(key, shape_like(x), wide(x))
    # Never zero: callers take its logarithm.
    least = torch.finfo(u.dtype).eps / 2
    return (-torch.log1p(-u)).clamp_min(least) / lambd


def log_normal_(key: Key, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    check_floats("log_normal_", x)
    return normal(key, shape_like(x), wide(x), mean, std).exp()


def cauchy_(key: Key, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    check_floats("cauchy_", x)
    check(sigma > 0, "cauchy_ needs sigma > 0", sigma)
    u = uniform(key, shape_like(x), wide(x))
    return torch.tan(math.pi * (u - 0.5)) * sigma + median


def geometric_(key: Key, x: Tensor, p: float) -> Tensor:
    check(0 < p < 1, "geometric_ needs 0 < p < 1", p)
    u = uniform(key, shape_like(x), wide(x))
    return (torch.log1p(-u) / math.log1p(-p)).ceil().clamp_min(1)


# `random_` fills a floating dtype with integers of this many bits, as torch does.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def random_(key: Key, x: Tensor, *bounds: int, **named: int) -> Tensor:
    low, high = _bounds(x.dtype, *bounds, **named)
    return integers(key, shape_like(x), low, high, torch.int64).to(x.dtype)


def _bounds(
    dtype: torch.dtype, *bounds: int | None, low: int = 0, high: int | None = None
) -> tuple[int, int]:
    if len(bounds) == 1:
        high = bounds[0]
    elif bounds:
        low, high = bounds[0] or 0, bounds[1]
    return low, _largest(dtype) + 1 if high is None else high


def _largest(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 1
    return 2 ** _DIGITS[dtype] if dtype in _DIGITS else torch.iinfo(dtype).max
