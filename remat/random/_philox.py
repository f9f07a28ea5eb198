"""The random stream: Philox4x32-10, laid out as torch lays it out.

A key is a row (seed, offset) of 64-bit words. Block `i` of its stream is the cipher of
the counter (offset + i) mod 2**64 under the seed: four 32-bit words, kept here in two
64-bit ones. Few blocks are computed by Python's integers, with one in every 128 bits of
a number; many by int64 tensors, in chunks that stay in the cache.

Invariant: element e of a draw depends on the key, the dtype and e alone: not on how
many are drawn, with which other keys, nor on which of the two ways.
Rejected: Threefry, which takes twice the operations and has no kernels in torch.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011; the layout of `torch.func._random`, experimental in torch since 2.12.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF

FEW = 256  # blocks, above which tensors are faster than Python's integers
# Blocks in a chunk: two threads of torch have work, and 5 buffers fit the cache.
CHUNK = 49_152, 131_072
# Kernels of a logarithm, say, may end on other code than they run on before. It is kept
# away from values by padding to a multiple of these blocks.
PAD = 32


def philox(counter: Any, key: Any, lanes: int = 1) -> Any:
    """Encrypt a counter of four 32-bit words under a key of two.

    Args:
        counter: Four integers. Or four integers with a word in every 128 bits.
        key: Two of the same.
        lanes: The integer that has the lowest bit of each of its words set.

    Returns:
        Four of the same.
    """
    (a, b, c, d), (k, m) = counter, key
    low = MASK * lanes
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (q >> 32) & low ^ b ^ k, q & low
        c, d = (p >> 32) & low ^ d ^ m, p & low
        k, m = k + WEYL[0] * lanes & low, m + WEYL[1] * lanes & low
    return a, b, c, d


# --- A few blocks -----------------------------------------------------------------


def _by_integers(keys: list[list[int]], count: int) -> Tensor:
    """Return `count` blocks of each stream, padded: int64[:]."""
    total = len(keys) * count
    lanes, index = _pattern(len(keys), count)
    seed, offset = (
        _packed([key[i].to_bytes(16, "little") * count for key in keys]) for i in (0, 1)
    )
    offset += index
    low = MASK * lanes
    counter = offset & low, offset >> 32 & low, 0, 0
    a, b, c, d = philox(counter, (seed & low, seed >> 32 & low), lanes)
    words = a | b << 32 | c << 64 | d << 96
    data = bytearray(words.to_bytes(16 * _padded(total), "little"))
    return torch.frombuffer(data, dtype=torch.int64)


def _packed(blocks: list[bytes]) -> int:
    return int.from_bytes(b"".join(blocks), "little")


def _padded(blocks: int) -> int:
    return -(-blocks // PAD) * PAD


@functools.lru_cache(64)
def _pattern(rows: int, count: int) -> tuple[int, int]:
    """Return the integers with 1, and with its place in the row, in every block."""
    places = [i.to_bytes(16, "little") for i in range(count)]
    return _packed([(1).to_bytes(16, "little")] * count * rows), _packed(places * rows)


# --- Many blocks ------------------------------------------------------------------


def _by_tensors(
    seed: Tensor, offset: Tensor, index: Tensor, scratch: Tensor
) -> Tensor:
    """Return the blocks at `offset + index`, padded, in the scratch: int64[:].

    Args:
        seed: int64, broadcasts with the next two.
        offset: int64.
        index: int64.
        scratch: int64[:], room for five of the padded size.
    """
    shape = torch.broadcast_shapes(offset.shape, index.shape)
    size = _padded(shape.numel())
    buffers = scratch[: 5 * size].view(5, size)
    a, c, b, d, p = buffers[:, : shape.numel()].view(5, *shape)
    k, m = seed & MASK, seed >> 32
    torch.add(offset, index, out=a)
    torch.bitwise_right_shift(a, 32, out=b)
    a.bitwise_and_(MASK)
    c.zero_()
    d.zero_()
    for _ in range(ROUNDS):
        # `b` and `d` are whole products, of which the low words count.
        torch.mul(a, MULTIPLIERS[0], out=p)
        c.mul_(MULTIPLIERS[1])
        _next_word(c, b, k, out=a)
        _next_word(p, d, m, out=b)
        b, c, d, p = c, b, p, d
        k, m = k + WEYL[0], m + WEYL[1]
    torch.add(c, d, alpha=1 << 32, out=c)
    words = buffers[3:].view(size, 2)
    pairs = words[: shape.numel()].view(*shape, 2)
    torch.add(a, b, alpha=1 << 32, out=pairs[..., 0])
    pairs[..., 1].copy_(c)
    return words.view(-1)


def _next_word(product: Tensor, last: Tensor, key: Tensor, *, out: Tensor) -> None:
    torch.bitwise_right_shift(product, 32, out=out)
    out.bitwise_xor_(last).bitwise_xor_(key).bitwise_and_(MASK)


def _chunks(keys: Tensor, count: int) -> Iterator[tuple[slice, slice, bool, Tensor]]:
    """Yield the blocks in chunks, padded: int64[:].

    With which keys and which of their blocks these are, and whether they are in the
    order of the blocks: the longer of the two dimensions is the last, for speed.
    """
    few, many = CHUNK
    total = len(keys) * count
    size = min(total, many, max(few, total // 8))
    height, width = max(1, size // count), min(size, count)
    scratch = keys.new_empty(5 * _padded(height * width))
    for top in range(0, len(keys), height):
        seed, offset = keys[top : top + height].unsqueeze(1).unbind(-1)
        for left in range(0, count, width):
            right = min(left + width, count)
            index = torch.arange(left, right, device=keys.device)
            flipped = len(offset) > len(index)
            if flipped:
                words = _by_tensors(seed.T, offset.T, index.unsqueeze(1), scratch)
            else:
                words = _by_tensors(seed, offset, index, scratch)
            yield slice(top, top + height), slice(left, right), flipped, words


# --- Blocks as values -------------------------------------------------------------


class Reading(NamedTuple):
    """How blocks become values.

    `read` may destroy the blocks. What it returns is copied to the output, and so
    converted; then `finish` changes that in place.
    """

    per_block: int
    read: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], object]


def fill(out: Tensor, keys: Tensor, reading: Reading) -> Tensor:
    """Write the first values of every stream, and return `out`.

    Args:
        out: [k, n].
        keys: uint64[k, 2].
        reading: Which values these are.
    """
    per_block, read, finish = reading
    count = -(-out.shape[1] // per_block)
    if not out.numel():
        return out
    if out.is_cpu and len(keys) * count <= FEW:
        values = read(_by_integers(keys.tolist(), count))
        _write(out, values, False, reading)
        return out
    for rows, i, flipped, words in _chunks(keys.view(torch.int64), count):
        part = out[rows, i.start * per_block : i.stop * per_block]
        _write(part, read(words), flipped, reading)
    return out


def _write(out: Tensor, values: Tensor, flipped: bool, reading: Reading) -> None:
    """Write the values of some blocks of some keys, which have padding at the end."""
    rows, n = out.shape
    per_block, _, finish = reading
    count = -(-n // per_block)
    values = values[: rows * count * per_block]
    if flipped:
        values = values.view(count, rows, per_block).transpose(0, 1)
    out.copy_(values.reshape(rows, count * per_block)[:, :n])
    finish(out)


# --- Keys -------------------------------------------------------------------------


def _same(values: Tensor) -> Tensor:
    return values


KEYS = Reading(2, _same, _same)


def split(keys: Tensor, num: int) -> Tensor:
    """Return a key for each of the first `num` blocks: uint64[num, k, 2]."""
    words = torch.empty(len(keys), 2 * num, dtype=torch.int64, device=keys.device)
    words = fill(words, keys, KEYS).view(len(keys), num, 2)
    return words.transpose(0, 1).contiguous().view(torch.uint64)


def fold_in(keys: Tensor, values: int | Tensor) -> Tensor:
    """Return the key that `split` would give at each of the values: uint64[k, 2].

    Args:
        keys: uint64[k, 2].
        values: An int64 or int64[k], modulo 2**64.
    """
    seed, offset = keys.view(torch.int64).unbind(-1)
    moved = torch.stack((seed, offset + values), -1).view(torch.uint64)
    return split(moved, 1)[0]


# --- Numbers ----------------------------------------------------------------------


def _halves(words: Tensor) -> Tensor:
    return words.view(torch.int32)


def _first_word_high(words: Tensor) -> Tensor:
    return (words << 32) + (words >> 32 & MASK)


def bits(keys: Tensor, n: int, width: int) -> Tensor:
    """Return words of a width, from the low bits of one of 32 or of 64: int64[k, n]."""
    out = torch.empty(len(keys), n, dtype=torch.int64, device=keys.device)
    if width == 64:
        return fill(out, keys, Reading(2, _first_word_high, _same))
    low = (1 << width) - 1
    return fill(out, keys, Reading(4, _halves, lambda x: x.bitwise_and_(low)))


PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(keys: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return multiples of 2**-precision in [0, 1), from low bits: dtype[k, n]."""
    low = (1 << PRECISION[dtype]) - 1
    step = 2.0 ** -PRECISION[dtype]
    out = torch.empty(len(keys), n, dtype=dtype, device=keys.device)
    reading = Reading(
        2 if dtype == torch.float64 else 4,
        lambda words: _words[dtype == torch.float64](words).bitwise_and_(low),
        lambda x: x.mul_(step),
    )
    return fill(out, keys, reading)


_words = _halves, _first_word_high


def normal(keys: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers, by the method of Box and Muller: dtype[k, n]."""
    out = torch.empty(len(keys), n, dtype=dtype, device=keys.device)
    wide = dtype == torch.float64
    return fill(out, keys, Reading(2, _wide, _same) if wide else Reading(4, _narrow, _same))


def _narrow(words: Tensor) -> Tensor:
    """Return two numbers for each 64 bits, the halves of which are a pair: float32."""
    pairs = words.view(torch.uint32).to(torch.float32)
    pairs = pairs.mul_(2.0**-32).add_(2.0**-33).view(-1, 2)
    return _box_muller(*pairs.unbind(-1), out=pairs)


def _wide(words: Tensor) -> Tensor:
    """Return two numbers for each 128 bits, the halves of which are a pair: float64."""
    high, low = words.view(torch.uint32).to(torch.float64).view(-1, 2, 2).unbind(-1)
    pairs = high * 2.0**-32 + (low * 2.0**-64 + 2.0**-65)
    return _box_muller(*pairs.unbind(-1), out=pairs)


def _box_muller(u: Tensor, v: Tensor, *, out: Tensor) -> Tensor:
    radius, angle = u.log().mul_(-2).sqrt_(), v * (2 * math.pi)
    torch.mul(radius, angle.cos(), out=out[:, 0])
    torch.mul(radius, angle.sin(), out=out[:, 1])
    return out.view(-1)
