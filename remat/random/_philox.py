"""The random stream: Philox4x32-10, laid out as torch lays it out.

A key is a row (seed, offset) of 64-bit words. Block `i` of its stream is the cipher of
the counter (offset + i) mod 2**64 under the seed: four 32-bit words, here as two 64-bit
ones. Small draws run on Python's integers, with a block in every 128 bits of one
number; larger ones on int64 tensors in chunks that stay in the cache.

Invariant: element e of a draw depends on the key, the dtype and e alone: not on how
many are drawn, with which other keys, nor on which of the two ways.
Rejected: Threefry, which takes twice the operations and has no kernels in torch.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
the layout of `torch.func._random`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF
SMALL = 256  # blocks; above, tensors are faster than Python's integers


def philox(counter: Any, key: Any, lanes: int = 1) -> Any:
    """Encrypt a counter of four 32-bit words under a key of two.

    Args:
        counter: Four integers, or int64 tensors. Or four integers with one word in the
            low quarter of every 128 bits.
        key: Two of the same.
        lanes: Has the lowest bit of every word set that the integers hold.
    """
    (a, b, c, d), (k, l) = counter, key
    low = MASK * lanes
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (q >> 32) & low ^ b ^ k, q & low
        c, d = (p >> 32) & low ^ d ^ l, p & low
        k, l = k + WEYL[0] * lanes & low, l + WEYL[1] * lanes & low
    return a, b, c, d


# --- Blocks -----------------------------------------------------------------------


def blocks(keys: Tensor, count: int) -> Tensor:
    """Return blocks 0 to `count` of the streams of `keys`.

    Args:
        keys: uint64[k, 2].
        count: Blocks of each.

    Returns:
        int64[k, count, 2]: the first word of a block is the low half of the first.
    """
    if keys.device.type == "cpu" and len(keys) * count <= SMALL:
        return _by_integers(keys.tolist(), count)
    return _by_tensors(keys.view(torch.int64), count)


@functools.lru_cache(64)
def _pattern(rows: int, count: int) -> tuple[int, int]:
    """Return the integers with 1, and with its index in the row, in every block."""
    index = b"".join(i.to_bytes(16, "little") for i in range(count))
    ones = (1).to_bytes(16, "little") * count
    return _integer(ones * rows), _integer(index * rows)


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _by_integers(keys: list[list[int]], count: int) -> Tensor:
    if not keys or not count:
        return torch.empty(len(keys), count, 2, dtype=torch.int64, device="cpu")
    lanes, index = _pattern(len(keys), count)
    seed, offset = (
        _integer(b"".join([key[i].to_bytes(16, "little") * count for key in keys]))
        for i in (0, 1)
    )
    offset += index
    low = MASK * lanes
    counter = offset & low, offset >> 32 & low, 0, 0
    a, b, c, d = philox(counter, (seed & low, seed >> 32 & low), lanes)
    words = a | b << 32 | c << 64 | d << 96
    data = bytearray(words.to_bytes(16 * len(keys) * count, "little"))
    return torch.frombuffer(data, dtype=torch.int64).view(len(keys), count, 2)


def _by_tensors(keys: Tensor, count: int) -> Tensor:
    seed, offset = keys.unsqueeze(1).unbind(-1)
    offset = offset + torch.arange(count, device=keys.device)
    zero = torch.zeros_like(offset)
    counter = offset & MASK, offset >> 32 & MASK, zero, zero
    a, b, c, d = philox(counter, (seed & MASK, seed >> 32 & MASK))
    return torch.stack((a | b << 32, c | d << 32), -1)


# --- What a block is read as --------------------------------------------------------


def split(keys: Tensor, num: int) -> Tensor:
    """Return a key for each of the first `num` blocks: uint64[num, k, 2]."""
    return blocks(keys, num).transpose(0, 1).contiguous().view(torch.uint64)


def fold_in(keys: Tensor, values: Tensor) -> Tensor:
    """Return the keys that `split` gives at the index in `values`: uint64[k, 2]."""
    seed, offset = keys.view(torch.int64).unbind(-1)
    moved = torch.stack((seed, offset + values), -1).view(torch.uint64)
    return blocks(moved, 1).squeeze(1).view(torch.uint64)


def bits(keys: Tensor, n: int, width: int) -> Tensor:
    """Return the words, from their low bits, as non-negative numbers: int64[k, n]."""
    if width == 64:
        pairs = blocks(keys, -(-n // 2)).view(torch.int32)
        swapped = pairs.unflatten(-1, (2, 2)).flip(-1).flatten(-2).view(torch.int64)
        return swapped.flatten(1)[:, :n].contiguous()
    words = blocks(keys, -(-n // 4)).view(torch.int32).flatten(1)[:, :n]
    return words.to(torch.int64) & (1 << width) - 1


PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(keys: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return multiples of 2**-precision in [0, 1): dtype[k, n]."""
    width = 64 if dtype == torch.float64 else 32
    words = bits(keys, n, width)
    precision = PRECISION[dtype]
    return (words & (1 << precision) - 1).to(dtype) * 2.0**-precision


def normal(keys: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers, by Box and Muller: dtype[k, n]."""
    if dtype == torch.float64:
        words = blocks(keys, -(-n // 2))
        low, high = (words & MASK).double(), (words >> 32 & MASK).double()
        step = 2.0**-32
        u = low * step + (high * step**2 + step**2 / 2)
        u, v = u.unbind(-1)
    else:
        words = blocks(keys, -(-n // 4))
        u = (words & MASK).float() * 2.0**-32 + 2.0**-33
        v = (words >> 32 & MASK).float() * 2.0**-32 + 2.0**-33
    radius, angle = (u.log() * -2).sqrt(), v * (2 * math.pi)
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), -1)
    return pairs.flatten(1)[:, :n].to(dtype)
