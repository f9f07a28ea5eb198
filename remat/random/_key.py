"""Keys. Every draw is a function of a key.

A key is 128 bits: a seed, and an offset into the stream of the seed. A tensor holds
them, so a key can be batched, traced and sent to a device.

Invariant: a key never changes. Drawing twice from one gives the same numbers twice.
Rejected: a tensor subclass. Operations unwrap it unless each one is refused, so that
`key + 1` would be a tensor. And torch.func's transforms are fragile with subclasses.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from remat._base import pytree
from remat._torch.levels import base_tensor
from remat.random import _ops


@dataclass(frozen=True, eq=False, repr=False)
class Key:
    """A key, or an array of keys. Random numbers are functions of a key.

    Make one with :func:`key`, :func:`split` or :func:`fold_in`. It can be indexed and
    iterated over like an array of shape ``shape``. Two keys are equal if they draw the
    same numbers. A key is a pytree, so it can be an argument or a result under
    ``vmap``, ``grad``, ``make_fx`` and ``torch.compile``.

    Args:
        data: uint64 of shape ``[*shape, 2]``: the seed and the offset of each key, as
            in ``torch.func._random``. The generator is Philox4x32-10.

    Raises:
        TypeError: ``data`` is not a tensor of uint64.
        ValueError: the last dimension of ``data`` does not have length 2.

    Example:
        >>> key(42)
        Key(seed=42, offset=0)
        >>> split(key(42), 3).shape
        torch.Size([3])
    """

    data: Tensor

    def __post_init__(self) -> None:
        _check_data(self.data)

    @property
    def shape(self) -> torch.Size:
        """The shape of the array of keys, ``()`` for one key."""
        return self.data.shape[:-1]

    @property
    def ndim(self) -> int:
        """The number of dimensions of ``shape``."""
        return self.data.ndim - 1

    @property
    def device(self) -> torch.device:
        """The device of the key, and of what is drawn from it."""
        return self.data.device

    def to(self, device: torch.device | str | int) -> "Key":
        """Return the same key on a device."""
        return Key(self.data.to(device))

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(
                "remat: len() of one key is not defined. An array of keys has a length."
            )
        return self.data.shape[0]

    def __iter__(self) -> Iterator["Key"]:
        if not self.ndim:
            raise TypeError(
                "remat: one key cannot be iterated over. To get several, write "
                "`k1, k2 = remat.random.split(key)`."
            )
        return map(Key, self.data.unbind(0))

    def __getitem__(self, index: Any) -> "Key":
        parts = index if isinstance(index, tuple) else (index,)
        used = sum(map(_dims_used, parts))
        if used > self.ndim:
            raise IndexError(
                f"remat: {used} indices for keys of shape {tuple(self.shape)}. To get "
                "several keys from one, use remat.random.split."
            )
        # The last dimension, seed and offset, must stay, wherever an ellipsis is.
        rest = slice(None) if any(p is Ellipsis for p in parts) else Ellipsis
        return Key(self.data[(*parts, rest)])

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        same = self.shape == other.shape
        return same and torch.equal(self.data, other.data.to(self.device))

    @override
    def __hash__(self) -> NoReturn:
        raise TypeError(
            "remat: a key cannot be hashed, because a tensor holds its values. In a "
            "set or as a dictionary's key, use `tuple(key.data.tolist())`."
        )

    @override
    def __repr__(self) -> str:
        data = self.data
        if type(data) is not Tensor or base_tensor(data) is not data or data.is_meta:
            return f"Key({data!r})"
        if self.ndim:
            return f"Key(shape={tuple(self.shape)}, device={str(self.device)!r})"
        seed, offset = data.tolist()
        return f"Key(seed={seed}, offset={offset})"

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # As int64: torch 2.13 pickles a tensor of uint64 and cannot load it again.
        return _unpickle, (self.data.view(torch.int64),)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "remat: a key is neither true nor false. Write `key is not None`, or "
            "`remat.random.bernoulli(key)` for a random bool."
        )


def _unpickle(data: Tensor) -> Key:
    return Key(data.view(torch.uint64))


# `_unpickle` only makes a key, so `torch.load(weights_only=True)` may call it.
torch.serialization.add_safe_globals([_unpickle])

pytree.register_attributes(Key, "remat.random.Key", children=["data"])
# A Key, or its data. (torch.func._random calls the data a key.)
KeyLike: TypeAlias = Key | Tensor
AnyKey = TypeVar("AnyKey", bound=KeyLike)


def _dims_used(part: Any) -> int:
    """Return how many dimensions one part of an index consumes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, (int, torch.SymInt, slice)):
        return 1
    # A mask may also be a list, or an array of NumPy.
    index = torch.as_tensor(part)
    return index.ndim if index.dtype is torch.bool else 1


def _check_data(data: Any) -> None:
    if not isinstance(data, Tensor) or data.dtype is not torch.uint64:
        got = data.dtype if isinstance(data, Tensor) else type(data).__name__
        raise TypeError(
            f"remat: expected a key or a tensor of torch.uint64, got {got}. To make a "
            "key, use remat.random.key(seed)."
        )
    if not data.ndim or data.shape[-1] != 2:
        raise ValueError(
            "remat: a key's data has shape [*batch, 2], a seed and an offset; got "
            f"{list(data.shape)}. To make a key, use remat.random.key(seed)."
        )


def data_of(key: KeyLike) -> Tensor:
    """Return the data of a key. A raw tensor is returned as it is."""
    if isinstance(key, Key):
        return key.data
    _check_data(key)
    return key


# While somebody checks keys, `_reuse` has an entry here for each block that is open.
checks: list[Callable[..., None]] = []


def consumed(key: KeyLike) -> Tensor:
    """Return the data of a key, and count the key as consumed."""
    data = data_of(key)
    if checks:
        checks[-1](data)
    return data


def _like(key: AnyKey, data: Tensor) -> AnyKey:
    found: Any = Key(data) if isinstance(key, Key) else data
    return found


def key(seed: int, *, device: torch.device | str | int | None = None) -> Key:
    """Make a key from a seed.

    Args:
        seed: any integer of 64 bits, signed or unsigned: -1 is 2**64 - 1.
        device: the device of the key, and of what is drawn from it. By default it is
            torch's default device.

    Returns:
        A key of shape ``()``.

    Raises:
        OverflowError: the seed has more than 64 bits.
        TypeError: the seed is not an integer.

    Example:
        >>> key(42)
        Key(seed=42, offset=0)
        >>> key(-1) == key(2**64 - 1)
        True
    """
    seed = integer(seed)
    if not -(2**63) <= seed < 2**64:
        raise OverflowError(
            f"remat: the seed {seed} has more than 64 bits. Take it modulo 2**64."
        )
    word = _ops.as_int64(seed)
    if not (isinstance(word, torch.SymInt) or torch.compiler.is_compiling()):
        return Key(torch.tensor([word, 0], device=device).view(torch.uint64))
    # A product, because a symbol of a trace is not a constant.
    return Key((torch.tensor([1, 0], device=device) * word).view(torch.uint64))


def integer(number: Any) -> int:
    """Return a number as an integer. A symbol of a trace is returned as it is."""
    if isinstance(number, (int, torch.SymInt)):
        return number  # pyrefly: ignore[bad-return]
    return operator.index(number)


def split(key: AnyKey, num: int | tuple[int, ...] = 2) -> AnyKey:
    """Return new keys, independent of one another and of draws from the key.

    This consumes the key. Draw from the new keys, not from it.

    Args:
        key: a key, or an array of keys. Each key of an array is split.
        num: the number of new keys, or their shape.

    Returns:
        Keys of shape ``(num, *key.shape)``; a raw tensor for a raw tensor.

    Raises:
        ValueError: ``num`` is negative.

    Example:
        >>> k1, k2 = split(key(42))
        >>> k1
        Key(seed=8643895580192075859, offset=6287785766076502189)
        >>> split(key(42), (2, 3)).shape
        torch.Size([2, 3])
    """
    shape = tuple(map(integer, num)) if isinstance(num, Iterable) else (integer(num),)
    if any(n < 0 for n in shape):
        raise ValueError(f"remat: cannot split a key into {num} keys.")
    data = consumed(key)
    new = _ops.split(data, math.prod(shape))
    return _like(key, new.reshape(*shape, *data.shape))


def fold_in(key: AnyKey, data: int | Tensor) -> AnyKey:
    """Return the key for a number, such as that of a step, a layer or an example.

    Distinct numbers give independent keys. This does not consume the key. But do not
    split the same key: ``fold_in(key, i)`` is ``split(key, n)[i]``.

    Args:
        key: a key, or an array of them.
        data: an integer from 0 to 2**64 - 1, or a tensor of integers. Signed integers
            count modulo 2**64.

    Returns:
        A key of the shape that ``key.shape`` and ``data.shape`` broadcast to; a raw
        tensor for a raw tensor.

    Raises:
        ValueError: ``data`` is negative or has more than 64 bits.
        TypeError: ``data`` is not an integer.

    Example:
        >>> fold_in(key(42), 7)
        Key(seed=7527850912803292081, offset=3344896577480189866)
        >>> fold_in(key(42), 1) == split(key(42))[1]
        True
    """
    number = data if isinstance(data, Tensor) else integer(data)
    return _like(key, _ops.fold_in(data_of(key), number))


def clone(key: AnyKey) -> AnyKey:
    """Return the same key, to consume it once more on purpose.

    The clone draws the same numbers. :func:`check_key_reuse` then allows one more
    consumption of the key.

    Args:
        key: a key, or an array of them.

    Returns:
        An equal key; a raw tensor for a raw tensor.

    Example:
        >>> clone(key(42)) == key(42)
        True
    """
    data = data_of(key)
    if checks:
        checks[-1](data, is_cloned=True)
    return _like(key, data.clone())


def key_data(key: KeyLike) -> Tensor:
    """Return the bits of a key, in the form that ``torch.func._random`` takes.

    Args:
        key: a key, or an array of them.

    Returns:
        A uint64 tensor of shape ``[*key.shape, 2]``, with seeds and offsets.

    Example:
        >>> key_data(key(42))
        tensor([42,  0], dtype=torch.uint64)
    """
    return data_of(key)


def wrap_key_data(data: Tensor) -> Key:
    """Return the key with these bits. This is the inverse of :func:`key_data`.

    Args:
        data: uint64 of shape ``[*shape, 2]``.

    Returns:
        A key of shape ``shape``.

    Raises:
        TypeError: ``data`` is not a tensor of uint64.
        ValueError: the last dimension of ``data`` does not have length 2.

    Example:
        >>> wrap_key_data(torch.tensor([42, 0], dtype=torch.uint64)) == key(42)
        True
    """
    return Key(data)
