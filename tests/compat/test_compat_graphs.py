"""`compat.checkpoint`: graphs, hooks and nesting. Items 15, 20 to 28 and 30.

See `test_compat_calls.py` for the numbers, and for what is missing (21, 23, 25, 26).
"""

import functools
import gc
import weakref

import pytest
import torch
from support.checkpoints import (
    ReadsTwice,
    both,
    derivative,
    ours,
    sin_exp,
    slope_of_sin_exp,
    theirs,
    wrapped,
)
from support.compared import assert_compared, leaf, points
from support.zoo import Evaluations, counted, plainly
from torch.autograd.graph import saved_tensors_hooks

from remat import compat
from remat.testing import assert_same, count_ops


# --- 15: custom Functions ---


def test_a_custom_function_may_read_what_it_saved_twice():
    """15: torch's checkpoint refuses a second look."""

    def program(wrap, counting):
        x = leaf(3)
        wrap(lambda x: ReadsTwice.apply(x.sin()))(x).sum().backward()
        return x.grad

    with pytest.raises(compat.CheckpointError, match="already unpacked once"):
        program(wrapped(theirs), None)
    assert_compared(program, wrap=wrapped(ours), exp=2)


# --- 20-22: reading the graph, errors ---


@both
def test_reading_what_a_node_saved_recomputes_it(checkpoint):
    """20: each time, until it is freed."""
    body, calls = counted(sin_exp)
    x = leaf(3)
    out = checkpoint(body, x)
    for count in range(2, 5):
        assert_same(out.grad_fn._saved_result.detach(), out.detach())
        assert len(calls) == count
    out.sum().backward()
    assert len(calls) == 5
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = out.grad_fn._saved_result
    assert_same(x.grad, slope_of_sin_exp())


@both
def test_a_failed_backward_does_not_poison_the_next(checkpoint):
    """22: the first asks for a gradient that does not exist."""
    body, calls = counted(sin_exp)
    x, other = leaf(3), leaf(3)
    out = checkpoint(body, x).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(out, (x, other), retain_graph=True)
    calls.clear()
    (got,) = torch.autograd.grad(out, x)
    assert len(calls) == 1
    assert_same(got, slope_of_sin_exp())


# --- 23, 24: a detached result, and identity ---


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_a_detached_result_is_fine_whatever_the_variant(use_reentrant):
    """23: torch's reentrant variant raises in the backward."""
    body, calls = counted(lambda x: (x.sin().detach(), x.sin().exp()))
    x = leaf(3)
    outs = compat.checkpoint(body, x, use_reentrant=use_reentrant)
    sum(outs).sum().backward()
    assert len(calls) == 2
    assert_same(x.grad, slope_of_sin_exp())


@both
def test_what_is_unpacked_is_the_original_object(checkpoint):
    """24: an input that needs no grad, seen by saved-tensor hooks around the call."""
    packed, unpacked = [], []

    def noted(seen):
        return lambda t: seen.append(t) or t

    body, calls = counted(lambda x, n: (x * n).sin())
    x, n = leaf(3), points(3)
    with saved_tensors_hooks(noted(packed), noted(unpacked)):
        out = checkpoint(body, x, n)
    out.sum().backward()
    assert len(calls) == 2
    assert any(t is n for t in packed)
    # While it is there, remat takes it itself, and unpacks no other one for it.
    if checkpoint is ours:
        assert all(t is n for t in unpacked if torch.equal(t, n))
    else:
        assert any(t is n for t in unpacked)
    assert_same(x.grad, n * (n * n).cos())


# --- 27, 28: nesting, orders, hooks ---


# What is applied, from the outside in: c is the checkpoint, g a derivative.
MIXES = ["c", "cc", "cg", "gc", "gcg", "cgc", "ggc", "cgg", "gcgc", "cgcgc", "gggc"]


@both
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_of_gradients_and_checkpoints(checkpoint, early_stop, mix):
    """27: to third order; all of it is freed by reference counting."""
    refs = Evaluations()
    wrap = wrapped(functools.partial(checkpoint, early_stop=early_stop))

    def body(x):
        y = (x * x).sin()
        refs.note(weakref.ref(y))
        return y.exp()

    def run(wrap):
        refs.clear()
        f = body
        for step in reversed(mix):
            f = wrap(f) if step == "c" else derivative(f)
        x = leaf(3)
        out = f(x)
        (first,) = torch.autograd.grad(out.sum(), x)
        return out.detach(), first

    gc.collect()
    gc.disable()
    try:
        got = run(wrap)
        made = [*refs]
        left = [ref for ref in made if ref() is not None]
    finally:
        gc.enable()
    want = run(plainly)
    assert_same(got, want, reassociated=checkpoint is not ours)
    if checkpoint is ours:
        assert left == []
    assert len(made) > len(refs)


# --- 30: what needs no recompute ---


@both
def test_a_function_that_saves_only_its_input(checkpoint):
    """30: the op does not run again."""
    x = leaf(3)
    with count_ops() as ops:
        (checkpoint(torch.sin, x) + checkpoint(torch.exp, x)).sum().backward()
    assert (ops["sin"], ops["cos"], ops["exp"]) == (1, 1, 2)
    assert_same(x.grad, points(3).cos() + points(3).exp())
