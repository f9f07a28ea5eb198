"""A recompute casts as its forward did, and keeps nothing that it cast."""

import contextlib

import pytest
import torch
from support.runs import assert_replayed, gradients, leaf
from support.states import autocast
from torch.func import grad

from remat import remat
from remat.testing import count_ops, live_bytes


AUTOCAST = {
    "off": contextlib.nullcontext,
    "bfloat16": autocast,
    "float16": lambda: autocast(torch.float16),
}


def cast(x, w):
    return (x @ w).sin() @ w


@pytest.fixture
def square():
    """Two matrices that require grad."""
    return leaf(8, 8), leaf(8, 8)


@pytest.mark.parametrize("then", AUTOCAST.values(), ids=[f"then {s}" for s in AUTOCAST])
@pytest.mark.parametrize("first", AUTOCAST.values(), ids=AUTOCAST.keys())
def test_a_recomputation_casts_as_its_forward_did(first, then, square):
    def program(wrap):
        with first():
            y = wrap(cast)(*square).float().sum()
        with then():
            return y, torch.autograd.grad(y, square)

    assert_replayed(program, sin=2)


def test_autocast_entered_inside_is_entered_again(square):
    def fn(x, w):
        with autocast():
            y = cast(x, w)
            with autocast(enabled=False):
                return cast(y.float(), w)

    assert_replayed(gradients(fn, *square), sin=2 * 2)


# --- The cache of autocast ---------------------------------------------------------


def test_autocast_casts_a_weight_once_for_two_calls(square):
    def program(wrap):
        call, (x, w) = wrap(cast), square
        with autocast():
            y = call(call(x, w), w).float().sum()
        return torch.autograd.grad(y, square)

    assert_replayed(program, sin=2 * 2)


def test_autocast_with_another_setting_of_its_cache(square):
    def program(wrap):
        with autocast(cache_enabled=False):
            y = wrap(cast)(*square).float().sum()
        with autocast():
            return torch.autograd.grad(y, square)

    # The recompute casts x, w, and w again.
    assert_replayed(program, sin=2, _to_copy=(8, 8 + 3))


def test_autocast_under_grad():
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def program(wrap):
        def loss(w):
            with autocast():
                return wrap(cast)(x, w).float().sum()

        return grad(loss)(w)

    assert_replayed(program, sin=2)


def test_what_was_cast_is_freed_when_autocast_ends():
    x, w = leaf(4, 64), leaf(64, 64)

    def two(call):
        with autocast():
            return call(call(x, w), w)

    one = 4 * 64 * 2
    # The results alone. Plain keeps the weight in half the bytes, too.
    assert live_bytes(lambda: two(remat(cast))) == 2 * one
    assert live_bytes(lambda: two(cast)) > 2 * one + 64 * 64 * 2


def test_what_a_recomputation_casts_is_freed_when_it_ends():
    x, w = leaf(4, 64), leaf(64, 64)
    with autocast():
        y = remat(cast)(x, w).sum()
        torch.clear_autocast_cache()

        def found():
            return torch.autograd.grad(y, (x, w), retain_graph=True)

        with count_ops() as ops:
            assert live_bytes(found) == x.nbytes + w.nbytes
    assert ops["sin"] == 1
