"""Random choices: permutations, samples with and without replacement, categories.

Invariant: an entry of probability 0 is never chosen while a likelier one is left.
Rejected: the alias method and rejection sampling, whose work depends on the values.

Sources: the argmax of logits plus Gumbel noise is a sample of the categories: Gumbel,
"Statistical theory of extreme values", 1954. The largest few are a sample without
replacement: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
"""

import math

import torch
from torch import Tensor

from remat.random import _draw, _ops
from remat.random._continuous import gumbel
from remat.random._draw import Shape
from remat.random._key import Key, KeyLike, consumed, data_of
from remat.random._samplers import randint


def permutation(
    key: KeyLike, x: int | Tensor, axis: int = 0, independent: bool = False
) -> Tensor:
    """Return entries in a random order. Every order is equally likely.

    Each entry gets 64 random bits, and the entries are sorted by them. Derivatives flow
    to ``x``.

    Args:
        key: a key, or an array of them.
        x: a tensor, or an integer n for ``torch.arange(n)``.
        axis: the dimension of ``x`` to permute.
        independent: whether every row along it gets an order of its own.

    Returns:
        A tensor of shape ``(*key.shape, *x.shape)``.

    Raises:
        TypeError: ``x`` is an array of keys.
        ValueError: ``x`` is a negative integer, or a tensor without dimensions.
        IndexError: ``x`` has no such axis.

    Example:
        >>> from remat import random
        >>> random.permutation(random.key(42), 6)
        tensor([3, 5, 0, 4, 2, 1])
    """
    if isinstance(x, Tensor) and independent:
        axis = _axis(axis, x)
        order = _order(consumed(key), tuple(x.shape), axis)
        return x.expand(order.shape).gather(axis - x.ndim, order)
    order = _order(consumed(key), (_length(x, axis),), 0)
    return _take(x, order, axis, data_of(key).ndim - 1)


def _order(data: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    words = _draw.draw(_ops.bits, data, shape, 64)
    return words.argsort(dim=axis - len(shape), stable=True)


def _axis(axis: int, x: Tensor) -> int:
    if not x.ndim:
        raise ValueError("remat: cannot choose from a tensor without dimensions.")
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"remat: no axis {axis} in a tensor of shape {list(x.shape)}.")
    return axis % x.ndim


def _length(x: int | Tensor, axis: int) -> int:
    if isinstance(x, Tensor):
        return x.shape[_axis(axis, x)]
    if isinstance(x, Key):
        raise TypeError(
            "remat: cannot choose from keys. Choose indices and index the keys, as in "
            "keys[remat.random.permutation(key, len(keys))]."
        )
    if x < 0:
        raise ValueError(f"remat: cannot choose from {x} entries.")
    return x


def _take(x: int | Tensor, index: Tensor, axis: int, batch: int) -> Tensor:
    """Index `x` along one axis. The index's first `batch` dimensions come first."""
    if not isinstance(x, Tensor):
        return index
    axis = _axis(axis, x)
    taken = x[(*[slice(None)] * axis, index)]
    return taken.movedim([*range(axis, axis + batch)], [*range(batch)])


def choice(
    key: KeyLike,
    a: int | Tensor,
    shape: Shape = (),
    replace: bool = True,
    p: Tensor | None = None,
    axis: int = 0,
) -> Tensor:
    """Draw from the entries of a tensor along one axis.

    With replacement, the draws are those of :func:`randint`. With ``p``, a uniform
    number is looked up in the cumulative sums of ``p`` instead, in the dtype of ``p``
    but at least float32. Without replacement, the draws are the first entries of a
    :func:`permutation`. With ``p``, they are the entries with the largest sum of
    ``log(p)`` and :func:`gumbel` noise. Derivatives flow to ``a`` and not to ``p``.

    Args:
        key: a key, or an array of them.
        a: a tensor, or an integer n for ``torch.arange(n)``.
        shape: the shape of the draws from each key.
        replace: whether an entry may be drawn twice by one key.
        p: the weight of each entry, of shape ``[n]`` and not negative. The weights need
            not sum to 1. By default all entries are equally likely. Without
            replacement, at least as many weights must be above 0 as entries are drawn.
            Values are checked on the CPU, outside traces and transforms.
        axis: the dimension of ``a`` to draw from.

    Returns:
        A tensor of shape ``key.shape`` and then ``a.shape``, with ``shape`` in place of
        the axis.

    Raises:
        ValueError: there are no entries, or too few without replacement, or ``p`` has
            another shape or is not a tensor of weights.
        IndexError: ``a`` has no such axis.

    Example:
        >>> from remat import random
        >>> random.choice(random.key(42), torch.tensor([10, 20, 30]), (4,))
        tensor([10, 20, 10, 20])
    """
    shape, n = _draw.as_shape(shape), _length(a, axis)
    count = math.prod(shape)
    _check_choice(n, count, replace)
    if p is not None:
        _check_weights(p, n, min(count, 1) if replace else count)
    batch = data_of(key).ndim - 1
    if replace and n:
        index = randint(key, shape, 0, n) if p is None else inverted(key, shape, p)
    elif p is None or not n:
        index = permutation(key, n)[..., :count]
    else:
        index = noisy(key, (n,), p.detach().log()).topk(count).indices
    return _take(a, index.reshape((*index.shape[:batch], *shape)), axis, batch)


def _check_choice(n: int, count: int, replace: bool) -> None:
    if count and (not n or (not replace and count > n)):
        raise ValueError(
            f"remat: cannot choose {count} of {n}" + " without replacement." * bool(n)
        )


def _check_weights(p: Tensor, n: int, least: int) -> None:
    if tuple(p.shape) != (n,):
        raise ValueError(
            f"remat: `p` has shape {list(p.shape)}; it must be [{n}], one weight for "
            "each entry."
        )
    if not _draw.is_readable(p):
        return
    if not ((p >= 0) & p.isfinite()).all() or (p > 0).sum() < least:
        raise ValueError(
            "remat: `p` must be finite and not negative, with at least "
            f"{least} weights above 0; got {p.tolist()}."
        )


def inverted(key: KeyLike, shape: tuple[int, ...], p: Tensor) -> Tensor:
    """Look uniform numbers up in the cumulative sums of weights, of rows of these."""
    sums = _scaled(p.detach().to(_draw.wide(p.dtype))).cumsum(-1)
    u = _draw.draw(_ops.uniform, consumed(key), shape, sums.dtype)
    # Right of equal sums, so that entries of probability 0 are skipped.
    index = torch.searchsorted(sums, u * sums[..., -1:], right=True)
    return index.clamp(max=p.shape[-1] - 1)


_EXPONENT = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


def _scaled(p: Tensor) -> Tensor:
    """Return the weights times the power of two that makes the largest about 1."""
    # A power of two is exact, so no draw changes. Sums cannot overflow any more, and
    # products cannot underflow.
    bits, mask = _EXPONENT[p.dtype]
    power = (p.amax(-1, keepdim=True).view(bits) & mask).view(p.dtype)
    return p / power.clamp(min=torch.finfo(p.dtype).tiny)


def noisy(key: KeyLike, shape: tuple[int, ...], logits: Tensor) -> Tensor:
    """Add Gumbel noise to logits. The largest of a row is a draw of its categories."""
    dtype = _draw.wide(logits.dtype)
    noise = gumbel(key, _draw.shape_like(logits, shape), dtype)
    return noise + logits.detach().to(dtype)


def categorical(
    key: KeyLike,
    logits: Tensor,
    axis: int = -1,
    shape: Shape = None,
    replace: bool = True,
) -> Tensor:
    """Draw categories whose probabilities are ``softmax(logits, axis)``.

    A draw is the argmax of ``logits`` plus :func:`gumbel` noise, in float32 or float64.
    A logit of -inf is never drawn while another is left. No derivative flows to
    ``logits``.

    Args:
        key: a key, or an array of them.
        logits: logarithms of probabilities; each row may be shifted by a constant.
        axis: the dimension of ``logits`` that holds the categories.
        shape: the shape of the draws from each key. By default it is ``logits.shape``
            without the axis, which must broadcast to ``shape``.
        replace: whether a category may be drawn twice for one row. If False, ``shape``
            must end in the default shape.

    Returns:
        A tensor of int64 of shape ``(*key.shape, *shape)``.

    Raises:
        ValueError: ``shape`` does not fit ``logits``, or asks for more categories than
            there are.
        IndexError: ``logits`` has no such axis.

    Example:
        >>> from remat import random
        >>> random.categorical(random.key(42), torch.zeros(3, 5))
        tensor([1, 0, 2])
    """
    logits = logits.movedim(_axis(axis, logits), -1)
    rows, n = tuple(logits.shape[:-1]), logits.shape[-1]
    shape = rows if shape is None else _draw.as_shape(shape)
    prefix = shape[: max(0, len(shape) - len(rows))]
    if not (_draw.fits(rows, shape) if replace else (*prefix, *rows) == shape):
        raise ValueError(
            f"remat: the shape of the draws is {list(shape)}, but the rows of `logits` "
            f"have shape {list(rows)}. The draws' shape must end in the rows' shape; "
            "with replacement the rows may also broadcast to it."
        )
    if replace:
        return noisy(key, (*shape, n), logits).argmax(-1)
    count = math.prod(prefix)
    _check_choice(n, count, replace)
    index = noisy(key, (*rows, n), logits).topk(count).indices
    batch = tuple(data_of(key).shape[:-1])
    return index.movedim(-1, len(batch)).reshape((*batch, *shape))
