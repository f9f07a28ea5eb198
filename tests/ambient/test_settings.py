"""A recompute happens under the settings of its forward."""

import contextlib

import pytest
import torch
from support.runs import leaf, replayed
from support.states import STATES, autocast, default_dtype, state_of_now
from support.tables import rows
from support.zoo import Evaluations, ops_of
from torch.func import grad

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


in_each_state = pytest.mark.parametrize(
    ("change", "read"), STATES.values(), ids=STATES.keys()
)


# --- Set one, call, change it, and take the gradient -------------------------------


@in_each_state
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_recomputation_sees_the_state_of_the_forward(change, read, when):
    x, seen = leaf(), Evaluations()

    def fn(x):
        seen.note(read())
        return x.sin().exp()

    ordinary = state_of_now()
    with change() if when == "forward" else contextlib.nullcontext():
        at_forward = read()
        y = remat(fn)(x)
    with change() if when == "backward" else contextlib.nullcontext():
        at_backward, before = read(), state_of_now()
        y.sum().backward()
        assert state_of_now() == before
    assert at_forward != at_backward
    assert [*seen] == [at_forward, at_forward]
    assert state_of_now() == ordinary


@in_each_state
def test_a_recomputation_under_grad_sees_the_state_of_the_forward(change, read):
    x, seen = torch.randn(64), Evaluations()

    def fn(x):
        seen.note(read())
        return x.sin().sum()

    def loss(x):
        with change():
            return remat(fn)(x)

    grad(loss)(x)
    with change():
        assert [*seen] == [read()] * 2


@pytest.mark.skipif(
    not hasattr(torch._C, "_set_fp32_precision_setter"), reason="added in torch 2.9"
)
def test_matmul_precision_may_be_set_for_each_backend():
    x, seen = leaf(), Evaluations()

    def fn(x):
        seen.note(torch.backends.mkldnn.matmul.fp32_precision)
        return x.sin().exp()

    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        y = remat(fn)(x)
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        y.sum().backward()
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
    assert [*seen] == ["bf16", "bf16"]


# --- What the function sets itself -------------------------------------------------


def test_a_setting_that_the_function_sets_is_put_back_after_the_backward():
    x = leaf()

    def fn(x):
        torch.set_default_dtype(torch.float64)
        return x.sin().exp()

    before = torch.get_default_dtype()
    with default_dtype(before):
        y = remat(fn)(x)
        assert torch.get_default_dtype() == torch.float64
        torch.set_default_dtype(before)
        ops = ops_of(lambda: y.sum().backward())
        assert torch.get_default_dtype() == before
    assert ops["sin"] == 1


# --- A recompute casts as its forward did, and keeps nothing that it cast ---


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
@rows("first", AUTOCAST)
@replayed(sin=2)
def test_a_recomputation_casts_as_its_forward_did(wrap, first, then, square):
    with first():
        y = wrap(cast)(*square).float().sum()
    with then():
        return y, torch.autograd.grad(y, square)


# --- The cache of autocast ---------------------------------------------------------


# The recompute casts x, w, and w again.
@replayed(sin=2, _to_copy=(8, 8 + 3))
def test_autocast_with_another_setting_of_its_cache(wrap, square):
    with autocast(cache_enabled=False):
        y = wrap(cast)(*square).float().sum()
    with autocast():
        return torch.autograd.grad(y, square)


def casts_of_steps_in_one_region(wrap):
    """Return how often two steps in one region cast, and the gradients."""
    torch.manual_seed(0)
    x, w = leaf(8, 8), leaf(8, 8)
    call = wrap(cast)
    with autocast(), count_ops() as ops:
        for _ in range(2):
            call(x, w).float().sum().backward()
        casts = ops["_to_copy"], ops["sin"]
        call(x, w)
    return casts, ops["_to_copy"] - casts[0], x.grad, w.grad


def test_a_recompute_leaves_the_casts_of_the_user_s_region():
    (plain, sines), plain_later, *expected = casts_of_steps_in_one_region(lambda f: f)
    (casts, again), later, *found = casts_of_steps_in_one_region(remat)
    assert again == 2 * sines, "both steps ran again"
    # Neither the recomputes nor the calls after them cast x and w once more.
    assert (casts, later) == (plain, plain_later)
    assert later == 0
    assert_same(found, expected)


@pytest.mark.parametrize("higher_order", [False, True])
def test_a_recompute_after_the_casts_are_gone_leaves_none_in_the_region(higher_order):
    x, w = leaf(8, 8), leaf(8, 8)
    with autocast():
        y = remat(cast, higher_order=higher_order)(x, w).float().sum()
    with autocast(), count_ops() as ops:
        y.backward()
        during = ops["_to_copy"]
        with torch.no_grad():
            w.mul_(2)
        cast(x, w)
    assert ops["sin"] == 2
    # The call after it casts both: the weight has changed since the recompute.
    assert ops["_to_copy"] - during == 2


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
        found = lambda: torch.autograd.grad(y, (x, w), retain_graph=True)
        with count_ops() as ops:
            assert live_bytes(found) == x.nbytes + w.nbytes
    assert ops["sin"] == 1
