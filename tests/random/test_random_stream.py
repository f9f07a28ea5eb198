"""The stream of a key is torch's, bit for bit, however it is asked for."""

import pytest
import torch
from support.draws import (
    DIGITS,
    FLOATS,
    FOLDED,
    LAST,
    MANY,
    NORMAL,
    NORMAL_64,
    ONE,
    RAW_DRAWS,
    SPLIT,
    UNIFORM,
    integers_of,
    raw,
)
from support.tables import rows
from torch.func import vmap

from remat.random import _ops, _philox
from remat.testing import assert_same, peak_bytes


@pytest.fixture(params=["integers", "tensors", "small chunks"])
def way(request, monkeypatch):
    """The three ways to the same blocks."""
    few, chunk = {
        "integers": (10**9, _philox.CHUNK),
        "tensors": (0, _philox.CHUNK),
        "small chunks": (0, (7, 13)),
    }[request.param]
    monkeypatch.setattr(_philox, "FEW", few)
    monkeypatch.setattr(_philox, "CHUNK", chunk)


every_way = pytest.mark.usefixtures("way")
every_draw = rows("draw", RAW_DRAWS)


# --- Known answers ----------------------------------------------------------------


CIPHER = {
    "zeros": ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}


@rows("counter, cipher_key, want", CIPHER)
def test_the_cipher_gives_the_answers_published_with_random123(
    counter, cipher_key, want
):
    words = [[int(w, 16) for w in text.split()] for text in (counter, cipher_key, want)]
    assert list(_philox.philox(*words[:2])) == words[2]


def test_the_cipher_takes_a_word_in_every_128_bits():
    counters = [(1, 2, 3, 4), (LAST >> 32, 0, LAST >> 32, 9)]
    packed = [a | b << 128 for a, b in zip(*counters, strict=True)]
    lanes = 1 | 1 << 128
    got = _philox.philox(packed, (5 * lanes, 6 * lanes), lanes)
    first, second = (_philox.philox(c, (5, 6)) for c in counters)
    assert got == tuple(a | b << 128 for a, b in zip(first, second, strict=True))


KNOWN = {
    "split": (lambda: _ops.split(ONE, 3), SPLIT),
    "fold_in": (lambda: _ops.fold_in(ONE, 7), FOLDED),
    "bits 32": (lambda: _ops.bits(ONE, 8, 32), integers_of(torch.uint32).long()),
    "bits 16": (lambda: _ops.bits(ONE, 8, 16), integers_of(torch.uint16).long()),
    "bits 8": (lambda: _ops.bits(ONE, 8, 8), integers_of(torch.uint8).long()),
    "bits 64": (lambda: _ops.bits(ONE, 4, 64), integers_of(torch.int64)),
    **{
        f"uniform {dtype}": (
            lambda d=dtype: _ops.uniform(ONE, len(UNIFORM[d]), d),
            torch.tensor(numbers, dtype=dtype),
        )
        for dtype, numbers in UNIFORM.items()
    },
}


@every_way
@rows("draw, want", KNOWN)
def test_the_numbers_are_those_of_torch(draw, want):
    assert_same(draw(), want)


@every_way
@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_numbers_are_those_of_torch_to_rounding(dtype):
    numbers = NORMAL_64 if dtype == torch.float64 else NORMAL
    want = torch.tensor(numbers, dtype=dtype)
    torch.testing.assert_close(_ops.normal(ONE, 4, dtype), want)


# --- One stream -------------------------------------------------------------------


@every_way
@every_draw
def test_fewer_numbers_are_the_first_of_more(draw):
    k = raw(3, 2**32 - 5)
    more = draw(k, 300)
    for n in (*range(1, 20), 31, 32, 33, 127, 128, 129, 299):
        got = draw(k, n)
        assert torch.equal(got, more[: got.numel()]), n


FEW = "uniform torch.float32", "normal torch.float64", "bits 64", "split"
few_draws = rows("draw", RAW_DRAWS, fast=FEW)


@few_draws
def test_chunks_and_the_change_from_integers_leave_no_seam(draw):
    k = raw(9, 0)
    more = draw(k, 4 * 140_000)
    few, (low, high) = 4 * _philox.FEW, _philox.CHUNK
    for edge in (few // 4, few // 2, few, 2 * low, 4 * low, 4 * high):
        for n in (edge - 1, edge, edge + 1):
            got = draw(k, n)
            assert torch.equal(got, more[: got.numel()]), n


@pytest.mark.one_in(3)
@few_draws
def test_numbers_do_not_depend_on_the_threads(draw):
    k = raw(5, 0)
    one = draw(k, 200_001)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(draw(k, 200_001), one)
    finally:
        torch.set_num_threads(1)


@every_way
@every_draw
@pytest.mark.parametrize("n", [1, 7, 33])
def test_a_batch_of_keys_draws_what_each_key_draws(draw, n):
    each = torch.stack([draw(k, n) for k in MANY])
    assert torch.equal(draw(MANY, n), each)
    assert torch.equal(draw(MANY.view(2, 3, 2), n), each.view(2, 3, -1))
    assert torch.equal(vmap(lambda k: draw(k, n), randomness="error")(MANY), each)


@every_way
def test_more_keys_than_fit_a_chunk_draw_what_each_draws():
    many = _ops.split(ONE, 41)
    for n in (1, 2, 5, 50):
        each = torch.stack([_ops.normal(k, n, torch.float32) for k in many])
        assert torch.equal(_ops.normal(many, n, torch.float32), each)


@every_way
@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, LAST])
def test_offsets_wrap_around(seed):
    whole = _ops.bits(raw(seed, LAST - 1), 16, 32)
    assert torch.equal(whole[4:], _ops.bits(raw(seed, LAST), 12, 32))
    assert torch.equal(whole[8:], _ops.bits(raw(seed, 0), 8, 32))
    low = _ops.bits(raw(seed, 2**32 - 1), 8, 32)
    assert torch.equal(low[4:], _ops.bits(raw(seed, 2**32), 4, 32))


@every_way
def test_a_draw_of_nothing_is_empty():
    none = MANY[:0]
    assert _ops.uniform(ONE, 0, torch.float32).shape == (0,)
    assert _ops.normal(none, 3, torch.float64).shape == (0, 3)
    assert _ops.split(none, 2).shape == (2, 0, 2)
    assert _ops.split(ONE, 0).shape == (0, 2)
    assert _ops.fold_in(none, 5).shape == (0, 2)


def test_keys_may_be_views():
    apart = torch.zeros(6, 2, 2, dtype=torch.uint64)
    apart[:, :, 1] = MANY
    for few in (apart[:, :, 1], MANY[2].expand(3, 2)):
        assert not few.is_contiguous()
        same = few.contiguous()
        assert torch.equal(_ops.bits(few, 9, 32), _ops.bits(same, 9, 32))
        assert torch.equal(_ops.split(few, 3), _ops.split(same, 3))
        assert torch.equal(_ops.fold_in(few, 3), _ops.fold_in(same, 3))


@every_draw
def test_a_draw_changes_neither_its_key_nor_a_global_stream(draw):
    k, state = MANY.clone(), torch.get_rng_state()
    draw(k, 2_000)
    assert torch.equal(k, MANY)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", [_ops.uniform, _ops.normal])
def test_a_draw_holds_little_more_than_its_result(draw):
    n = 2**20
    draw(ONE, n, torch.float32)
    extra = peak_bytes(lambda: draw(ONE, n, torch.float32)) / (4 * n) - 1
    # 48 bytes for each block of a chunk, which is 3/16 of them, and 48 for logarithms.
    assert extra < (0.57 if draw is _ops.uniform else 1.13)
    more = peak_bytes(lambda: draw(ONE, 16 * n, torch.float32)) / (64 * n) - 1
    assert more <= extra / 3


# --- Ranges -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_are_low_bits_and_never_one(dtype):
    u = _ops.uniform(ONE, 200_000, dtype)
    words = _ops.bits(ONE, 200_000, 64 if dtype == torch.float64 else 32)
    multiple = u.double() * 2.0 ** DIGITS[dtype]
    assert torch.equal(multiple.long(), words & (1 << DIGITS[dtype]) - 1)
    assert u.min() >= 0
    assert u.max() < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_number_of_a_short_dtype_is_not_rounded_to_one(dtype):
    u = _ops.uniform(ONE, 200_000, dtype)
    assert u.max() == 1 - 2.0 ** -DIGITS[dtype]
    assert u.min() == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("word", [0, -1])
def test_normal_numbers_are_finite_for_any_block(word, dtype):
    words = torch.full((64,), word)
    assert _philox.NORMAL[dtype].read(words).isfinite().all()


# --- Folding in -------------------------------------------------------------------


@every_way
def test_folding_in_is_taking_that_key_of_a_split():
    assert torch.equal(
        _ops.split(MANY, 9), torch.stack([_ops.fold_in(MANY, i) for i in range(9)])
    )


@every_way
@pytest.mark.parametrize("value", [2**32, 2**63 - 1, 2**63, LAST])
def test_any_word_can_be_folded_in(value):
    moved = [raw(s, (o + value) % 2**64) for s, o in MANY.tolist()]
    want = torch.stack([_ops.split(k, 1)[0] for k in moved])
    assert torch.equal(_ops.fold_in(MANY, value), want)
    word = torch.tensor(value, dtype=torch.uint64)
    assert torch.equal(_ops.fold_in(MANY, word), want)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint64],
)
@every_way
def test_a_tensor_of_integers_folds_in_each(dtype):
    values = torch.tensor([0, 3, 100], dtype=dtype)
    want = torch.stack([_ops.fold_in(ONE, v) for v in (0, 3, 100)])
    assert torch.equal(_ops.fold_in(ONE, values), want)
    assert torch.equal(_ops.fold_in(ONE, values[1]), want[1])
    table = _ops.fold_in(MANY[:, None], values)
    assert table.shape == (6, 3, 2)
    assert torch.equal(table[0], want)
    assert torch.equal(table[:, 2], _ops.fold_in(MANY, 100))


def test_negative_integers_in_tensors_are_read_modulo_a_word():
    got = _ops.fold_in(ONE, torch.tensor([-1, -7], dtype=torch.int16))
    want = torch.stack([_ops.fold_in(ONE, v) for v in (LAST, LAST - 6)])
    assert torch.equal(got, want)
