"""remat among the other things that torch programs do with autograd.

Each function here is run by `.backward()` as it is and with remat: see `check`.
"""

import pytest
import torch
from support.runs import replayed
from support.zoo import plainly
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def gradients(fn, *inputs):
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    fn(*inputs).sum().backward()
    return [x.grad for x in inputs]


# --- Equations: a derivative inside, everything outside --------------------------


def second(out, ws):
    gs = torch.autograd.grad(out, ws, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gs), ws)


# --- Custom Functions: the wrong gradients tell who differentiates through them ---


@replayed(sin=2)
def test_a_custom_function_outside_calls_remat_in_its_backward(wrap):
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                return g * torch.autograd.grad(inner(y).sum(), y)[0]

    inner = wrap(lambda x: (x * x).sin().exp())
    return gradients(Outer.apply, leaf(5))


# --- Inside, around and beside torch's checkpoint ---


def body(x, w):
    return nn.functional.dropout(torch.tanh(x * w), 0.5).sin()


def theirs(fn, reentrant):
    return lambda *args: checkpoint(fn, *args, use_reentrant=reentrant)


def twice(call):
    return lambda x, w: call(call(x, w) * x, w)


def backwards(fn, *, retained=False):
    """Take them by `.backward()`: reentrant checkpoints refuse `autograd.grad`."""
    torch.manual_seed(1)
    x, w = leaf(8), leaf(8)
    y = fn(x, w).sum()
    for _ in range(retained):
        y.backward(retain_graph=True)
    y.backward()
    return x.grad, w.grad


def assert_tanh(fn, plain, count, **options):
    """`fn` has the backwards of `plain`, and runs so many tanhs."""
    with count_ops() as ops:
        got = backwards(fn, **options)
    want = backwards(plain, **options)
    assert_same(got, want)
    assert all(g.any() for g in want)
    assert ops["tanh"] == count


variants = pytest.mark.parametrize(
    "reentrant", [False, True], ids=["non-reentrant", "reentrant"]
)


@variants
def test_remat_inside_checkpoint(reentrant):
    fn = theirs(twice(remat(body)), reentrant)
    # Forward, theirs, and remat's. Theirs stops where the second call has its input.
    assert_tanh(fn, twice(body), 2 + (2 if reentrant else 1) + 2)


@variants
def test_remat_inside_checkpoint_with_the_graph_retained(reentrant):
    def fn(call):
        return theirs(lambda x, w: call(x.sin(), w) * x, reentrant)

    with count_ops() as ops:
        backwards(fn(body), retained=True)
    assert_tanh(fn(remat(body)), fn(body), ops["tanh"] + 2, retained=True)


@replayed(tanh=2 + 1 + 2, sin=2 + 1)
def test_checkpoint_inside_remat(wrap):
    """Forward, 2. remat's recompute, 1: it stops where the product has been saved.

    Theirs, which stop before sin, 2.
    """
    inner = body if wrap is plainly else theirs(body, False)
    return backwards(wrap(twice(inner)))


def test_reentrant_checkpoint_inside_remat():
    def fn(x, w):
        return body(theirs(body, True)(x, w) * x, w)

    # Forward, remat's recompute, and theirs of what is in it.
    assert_tanh(remat(fn), fn, 2 + 2 + 1)


def test_reentrant_checkpoint_inside_one_node_is_refused_by_torch():
    """A recompute asks for the backwards of its inputs, which it can't give."""
    fn = remat(theirs(body, True), higher_order=True)
    with pytest.raises(RuntimeError, match=r"use_reentrant=True.* is incompatible"):
        fn(leaf(8), leaf(8)).sum().backward()


@variants
@pytest.mark.parametrize("ours", ["first", "second"])
def test_remat_and_checkpoint_in_a_row(reentrant, ours):
    calls = [remat(body), theirs(body, reentrant)]
    one, other = calls if ours == "first" else calls[::-1]
    assert_tanh(lambda x, w: other(one(x, w) * x, w), twice(body), 2 * 2)


def test_memory_with_checkpoint_inside_is_the_same():
    x = leaf(1024)

    def fn(x):
        return x.sin().sin().sin().sin()

    assert live_bytes(lambda: fn(x)) == 4 * 4096
    assert live_bytes(lambda: remat(fn)(x)) == 4096
    inside = remat(lambda x: checkpoint(fn, x, use_reentrant=False).sin())
    # Theirs keeps the state of the generator.
    assert live_bytes(lambda: inside(x)) == 4096 + torch.get_rng_state().nbytes
