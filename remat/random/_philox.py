"""The random stream: Philox4x32-10, laid out as torch lays it out.

A key is a row (seed, offset) of 64-bit words. Block `i` of its stream is the counter
(offset + i) mod 2**64, encrypted under the seed: four 32-bit words, held here in two
64-bit words. Python's integers compute a few blocks, int64 tensors many, in chunks.

Invariant: element e of a draw depends only on the key, the dtype and e.
Rejected: Threefry. It takes twice the operations and has no kernels in torch.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011; the layout of `torch.func._random`, experimental in torch since 2.12; Box and
Muller, "A note on the generation of random normal deviates", 1958.
"""

import functools
import math
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor


MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF

FEW = 640  # with more blocks, tensors are faster than Python's integers
# The least and the most blocks in a chunk. Within these bounds a chunk is an eighth of
# a draw: enough work for two of torch's threads, and five buffers fit in the cache.
CHUNK = 49_152, 131_072
# A kernel (such as the logarithm) may compute the end of a tensor by other code, with
# other bits. So blocks are padded to multiples of this, and the end holds no values.
PAD = 32


def philox(counter: Any, key: Any, lanes: int = 1) -> Any:
    """Encrypt a counter of four 32-bit words under a key of two."""
    (a, b, c, d), (k, m) = counter, key
    low, step, other = MASK * lanes, WEYL[0] * lanes, WEYL[1] * lanes
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (q >> 32) & low ^ b ^ k, q & low
        c, d = (p >> 32) & low ^ d ^ m, p & low
        k, m = k + step & low, m + other & low
    return a, b, c, d


# --- A few blocks -----------------------------------------------------------------


def _by_integers(keys: list[list[int]], start: int, count: int) -> Tensor:
    """Return blocks of each stream, padded: int64[:]."""
    total = len(keys) * count
    lanes, index = _pattern(len(keys), count)
    seed, offset = (
        _packed([key[i].to_bytes(16, "little") * count for key in keys]) for i in (0, 1)
    )
    offset += index + (start % 2**64) * lanes
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
    """Return two integers: one has 1 in every block, one its position in the row."""
    places = [i.to_bytes(16, "little") for i in range(count)]
    return _packed([(1).to_bytes(16, "little")] * count * rows), _packed(places * rows)


# --- Many blocks ------------------------------------------------------------------


def _constant(number: float, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a number as a tensor. Operations take that at half the cost."""
    return torch.tensor(number, dtype=dtype, device="cpu")


_WORD, _LOW = _constant(32), _constant(MASK)
_MULTIPLIERS = [_constant(number) for number in MULTIPLIERS]
_WEYL = [_constant(number) for number in WEYL]


def _by_tensors(seed: Tensor, offset: Tensor, index: Tensor, scratch: Tensor) -> Tensor:
    """Compute the blocks at `offset + index` in the scratch, padded: int64[:]."""
    shape = torch.broadcast_shapes(offset.shape, index.shape)
    size = _padded(shape.numel())
    buffers = scratch[: 5 * size].view(5, size)
    a, c, b, d, p = buffers[:, : shape.numel()].view(5, *shape)
    # Keys and products may overflow: only the low 32 bits of `b`, `d`, `k`, `m` count.
    k, m = seed.clone(), seed >> _WORD
    torch.add(offset, index, out=a)
    torch.bitwise_right_shift(a, _WORD, out=b)
    a.bitwise_and_(_LOW)
    c.zero_()
    d.zero_()
    for _ in range(ROUNDS):
        torch.mul(a, _MULTIPLIERS[0], out=p)
        c.mul_(_MULTIPLIERS[1])
        _next_word(c, b, k, out=a)
        _next_word(p, d, m, out=b)
        b, c, d, p = c, b, p, d
        k.add_(_WEYL[0])
        m.add_(_WEYL[1])
    torch.add(c, d, alpha=1 << 32, out=c)
    words = buffers[3:].view(size, 2)
    pairs = words[: shape.numel()].view(*shape, 2)
    torch.add(a, b, alpha=1 << 32, out=pairs[..., 0])
    pairs[..., 1].copy_(c)
    return words.view(-1)


def _next_word(product: Tensor, last: Tensor, key: Tensor, *, out: Tensor) -> None:
    torch.bitwise_right_shift(product, _WORD, out=out)
    out.bitwise_xor_(last).bitwise_xor_(key).bitwise_and_(_LOW)


def _chunks(
    keys: Tensor, start: int, count: int
) -> Iterator[tuple[slice, slice, bool, Tensor]]:
    """Yield chunks: a slice of keys, a slice of blocks, whether flipped, padded blocks.

    A chunk with more keys than blocks of each key is flipped: the keys vary fastest,
    because operations are faster along the longer dimension.
    """
    few, many = CHUNK
    total = len(keys) * count
    size = min(total, many, max(few, total // 8))
    height, width = max(1, size // count), min(size, count)
    scratch = keys.new_empty(5 * _padded(height * width))
    places = torch.arange(width, device=keys.device)
    for top in range(0, len(keys), height):
        seed, offset = keys[top : top + height].unsqueeze(1).unbind(-1)
        offset = offset + start
        for left in range(0, count, width):
            right = min(left + width, count)
            index = places[: right - left]
            flipped = len(offset) > len(index)
            if flipped:
                words = _by_tensors(seed.T, offset.T, index.unsqueeze(1), scratch)
            else:
                words = _by_tensors(seed, offset, index, scratch)
            offset = offset + width
            yield slice(top, top + height), slice(left, right), flipped, words


# --- Blocks as values -------------------------------------------------------------


class BlockReading(NamedTuple):
    """How blocks become values.

    `read` may overwrite the blocks. `low` is a mask of the bits to keep of each value,
    and `step` a factor, applied when values have the dtype of the result.
    """

    per_block: int
    read: Callable[[Tensor], Tensor]
    low: Tensor | None = None
    step: Tensor | None = None


def draw(
    keys: Tensor, n: int, dtype: torch.dtype, reading: BlockReading, start: int = 0
) -> Tensor:
    """Return the first values of every stream: dtype[k, n]."""
    per_block = reading.per_block
    count = -(-n // per_block)
    out = torch.empty(len(keys), n, dtype=dtype, device=keys.device)
    if not out.numel():
        return out
    if keys.is_cpu and len(keys) * count <= FEW:
        _write(out, _by_integers(keys.tolist(), start, count), False, reading)
        return out
    for rows, i, flipped, words in _chunks(keys.view(torch.int64), start, count):
        part = out[rows, i.start * per_block : i.stop * per_block]
        _write(part, words, flipped, reading)
    return out


def _write(out: Tensor, words: Tensor, flipped: bool, reading: BlockReading) -> None:
    """Write the values of some padded blocks of some keys."""
    rows, n = out.shape
    per_block, read, low, step = reading
    count = -(-n // per_block)
    values = read(words)
    if low is not None:
        values.bitwise_and_(low)
    if flipped:
        strides = per_block, rows * per_block, 1
        values = values.as_strided((rows, count, per_block), strides).reshape(-1)
    out.copy_(values.as_strided((rows, n), (count * per_block, 1)))
    if step is not None:
        out.mul_(step)


# --- Keys -------------------------------------------------------------------------


KEYS = BlockReading(2, methodcaller("view", torch.int64))


def split(keys: Tensor, num: int, start: int = 0) -> Tensor:
    """Return one key for each of the next `num` blocks: uint64[num, k, 2]."""
    words = draw(keys, 2 * num, torch.int64, KEYS, start).view(len(keys), num, 2)
    return words.transpose(0, 1).contiguous().view(torch.uint64)


# --- Bits and uniform numbers -----------------------------------------------------


_quarters = methodcaller("view", torch.int32)


def _halves(words: Tensor) -> Tensor:
    """Join each two words to one. The first word becomes the high half."""
    first = words.bitwise_left_shift(_WORD)
    return first.add_(words.bitwise_right_shift_(_WORD).bitwise_and_(_LOW))


BITS = {
    8: BlockReading(4, _quarters, _constant(0xFF, torch.int32)),
    16: BlockReading(4, _quarters, _constant(0xFFFF, torch.int32)),
    32: BlockReading(4, methodcaller("view", torch.uint32)),
    64: BlockReading(2, _halves),
}


def _uniform(precision: int, dtype: torch.dtype) -> BlockReading:
    low, step = (1 << precision) - 1, _constant(2.0**-precision, dtype)
    if precision > 32:
        return BlockReading(2, _halves, _constant(low), step)
    return BlockReading(4, _quarters, _constant(low, torch.int32), step)


# Uniform numbers in [0, 1) are the low bits, times 2**-precision.
_PRECISION = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}
UNIFORM = {dtype: _uniform(bits, dtype) for dtype, bits in _PRECISION.items()}


# --- Normal numbers, by the method of Box and Muller ------------------------------


# By dtype: what words and halves of words are multiplied with, minus two, and a turn.
_CONSTANTS = {
    dtype: [_constant(n, dtype) for n in (2.0**-32, 2.0**-33, -2.0, 2 * math.pi)]
    for dtype in (torch.float32, torch.float64)
}


def _pairs(uniform: Tensor) -> Tensor:
    """Turn pairs of uniform numbers in (0, 1] into pairs of normal numbers."""
    _, _, minus_two, turn = _CONSTANTS[uniform.dtype]
    u, v = uniform.view(-1, 2).unbind(-1)
    radius = u.log().mul_(minus_two).sqrt_()
    return torch.polar(radius, v * turn).view(uniform.dtype)


def _narrow(words: Tensor) -> Tensor:
    """Turn the two halves of each 64 bits into two normal numbers: float32."""
    step, half_step = _CONSTANTS[torch.float32][:2]
    u = words.view(torch.uint32).to(torch.float32)
    return _pairs(u.mul_(step).add_(half_step))


def _wide(words: Tensor) -> Tensor:
    """Turn the two halves of each 128 bits into two normal numbers: float64."""
    step, half_step = _CONSTANTS[torch.float64][:2]
    high, low = words.view(torch.uint32).to(torch.float64).view(-1, 2).unbind(-1)
    return _pairs((low * step).add_(half_step).add_(high).mul_(step))


NORMAL = dict.fromkeys(UNIFORM, BlockReading(4, _narrow))
NORMAL[torch.float64] = BlockReading(2, _wide)
