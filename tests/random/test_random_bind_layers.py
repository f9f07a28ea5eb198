"""Attention, recurrent layers and dropout of torch inside of bind."""

import functools

import pytest
import torch
from support.binding import (
    KEYS,
    SEQUENCE,
    Q,
    X,
    attended,
    bound,
    flat,
    make,
    per_example,
)
from support.tables import rows
from torch import nn
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat import random
from remat.random import fold_in, key
from remat.testing import count_ops


MASK = make(6, 6, seed=3)
HOW = {
    "plain": {},
    "causal": {"is_causal": True},
    "a scale": {"scale": 0.3},
    "a negative scale": {"scale": -0.3},
    "a bias": {"attn_mask": MASK},
    "a mask": {"attn_mask": MASK > 0},
    "a mask of nothing": {"attn_mask": torch.zeros(6, 6, dtype=torch.bool)},
    "few heads": {"enable_gqa": True},
}


@rows("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_happens_to_drop_nothing_is_torchs(how, dtype):
    q = Q.to(dtype).requires_grad_()
    kv = q[:, :2] if how.get("enable_gqa") else q
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, kv, kv, **how)
    # Of 1e-9 nothing is dropped; but it is written out.
    dropping = functools.partial(F.scaled_dot_product_attention, dropout_p=1e-9, **how)
    with count_ops() as ops:
        got = bound(0, dropping, q, kv, kv)
    assert ops["remat::uniform"] == 1
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.float().square().sum(), q)[0] for y in (got, want)]
    torch.testing.assert_close(*grads)


def test_attention_is_autocast_as_torchs():
    attend = functools.partial(attended, Q, attn_mask=MASK)
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        got, want = bound(0, attend, 1e-9), attend(0.0)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want)


def test_attention_with_a_mask_and_causal_is_refused():
    with pytest.raises(ValueError, match=r"either attn_mask or is_causal"):
        bound(0, lambda: attended(Q, attn_mask=MASK, is_causal=True))


RECURRENT = {
    "LSTM": lambda p: nn.LSTM(8, 6, 3, dropout=p),
    "LSTM, both ways": lambda p: nn.LSTM(8, 6, 2, dropout=p, bidirectional=True),
    "LSTM, batch first": lambda p: nn.LSTM(8, 6, 2, dropout=p, batch_first=True),
    "GRU": lambda p: nn.GRU(8, 6, 3, dropout=p, bidirectional=True),
    "GRU, no bias": lambda p: nn.GRU(8, 6, 3, dropout=p, bias=False),
    "RNN": lambda p: nn.RNN(8, 6, 3, dropout=p),
}


@pytest.mark.parametrize("packed", [False, True])
@rows("build", RECURRENT)
def test_recurrent_layers_that_happen_to_drop_nothing_are_torchs(build, packed):
    model, x = build(1e-9), SEQUENCE
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2])
    got = flat(bound(0, model, x))
    model.dropout = 0.0
    for a, b in zip(got, flat(model(x)), strict=True):
        torch.testing.assert_close(a, b)


def test_recurrent_layers_drop_between_them_as_dropout_by_the_key_does():
    model = nn.GRU(8, 6, 2, dropout=0.5)
    lower, upper = nn.GRU(8, 6), nn.GRU(6, 6)
    weights = [*model.parameters()]
    for layer, own in ((lower, weights[:4]), (upper, weights[4:])):
        for p, q in zip(layer.parameters(), own, strict=True):
            p.data = q.data
    got, _ = bound(0, model, SEQUENCE)
    between = random.dropout(fold_in(fold_in(key(0), 0), 0), lower(SEQUENCE)[0], 0.5)
    torch.testing.assert_close(got, upper(between)[0])


def test_a_transformer_in_training_takes_no_fused_path():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    with torch.no_grad(), count_ops() as ops:
        bound(0, model, SEQUENCE)
        bound(0, model.eval(), SEQUENCE)
    assert not {op for op in ops if "_transformer_encoder" in str(op)}
    # In training only: in the attention, and after it, the middle and the end.
    assert ops["remat::uniform"] == 4


def test_a_function_of_torch_that_was_patched_later_is_called(monkeypatch):
    model = nn.MultiheadAttention(8, 2, dropout=0.0)
    calls = []

    def attention(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    bound(0, lambda: model(SEQUENCE, SEQUENCE, SEQUENCE, need_weights=False))
    assert len(calls) == 1


# --- Memory ---------------------------------------------------------------------------


LAID_OUT = {
    "channels last": X.to(memory_format=torch.channels_last),
    "transposed": X.transpose(1, 3),
    "features first": X.permute(2, 0, 1, 3),
    "a slice": X[:, 1:3, ::2],
    "expanded": X[:1, :, :1].expand(2, 4, 16, 16),
}
LIKE = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "rand_like, channels last": lambda x: torch.rand_like(
        x, memory_format=torch.channels_last
    ),
    "rand_like, contiguous": lambda x: torch.rand_like(
        x, memory_format=torch.contiguous_format
    ),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout2d": F.dropout2d,
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "dropout": F.dropout,
}


@rows("x", LAID_OUT)
@rows("fn", LIKE)
def test_a_draw_has_the_strides_of_torchs_and_the_numbers_of_a_contiguous_one(fn, x):
    got = bound(0, fn, x)
    assert got.stride() == fn(x).stride()
    assert torch.equal(got, bound(0, fn, x.contiguous()))


def test_a_draw_under_vmap_has_the_strides_of_a_transposed_tensor():
    x = make(4, 5).T
    got = vmap(per_example(torch.randn_like), (0, None))(KEYS, x)
    assert got.stride() == (20, *x.stride())
    assert torch.equal(got[1], per_example(torch.randn_like)(KEYS[1], x))
