"""remat among the other things that torch programs do with autograd.

Each function here is run by `.backward()` as it is and with remat: see `check`.
"""

import pytest
import torch
from support.compared import compared
from support.rules import StashedSin, TripledSin, TripledSinForFunc
from support.zoo import plainly
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, jacrev, jvp, vmap
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


def check(fn, *inputs, again=1):
    """Assert that gradients are those of plain, with so many sines recomputed."""
    with count_ops() as plain:
        want = gradients(fn, *inputs)
    with count_ops() as ops:
        got = gradients(remat(fn), *inputs)
    assert_same(got, want)
    assert all(g.abs().max() > 0 for g in want)
    assert ops["sin"] == plain["sin"] + again


def assert_more_sines(run, *, reassociated=False):
    """`run(wrap)` gives the same with remat as without, and sines run again."""
    with count_ops() as plain:
        want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert_same(got, want, reassociated=reassociated)
    assert ops["sin"] > plain["sin"]
    return want


# --- detach, custom rules, other derivatives inside -------------------------------

# Grad modes and derivatives inside are also cases of `partial/test_pruning_calls.py`.


def straight_through(x):
    soft = x.sin().exp()
    return soft + (soft.round() - soft).detach()


def wrong(function):
    return lambda x: function.apply(x * 2).square()


# The function, the shapes of its inputs, and how many sines run again.
INSIDE = {
    "detach": (lambda x, w: x.detach().sin() * w + x, [(5,), (5,)], 1),
    "a straight-through estimator": (straight_through, [(5,)], 1),
    "a sparse constant": (lambda x: (SPARSE @ x).sin().exp(), [(5, 2)], 1),
    "TripledSin": (wrong(TripledSin), [(5,)], 1),
    "TripledSinForFunc": (wrong(TripledSinForFunc), [(5,)], 1),
    "StashedSin": (wrong(StashedSin), [(5,)], 1),
}
SPARSE = torch.eye(5).to_sparse()


@pytest.mark.parametrize(("fn", "shapes", "again"), INSIDE.values(), ids=list(INSIDE))
def test_what_a_function_does_inside_is_done_again(fn, shapes, again):
    check(fn, *(leaf(*shape) for shape in shapes), again=again)


def test_enable_grad_inside_where_it_is_off_outside():
    def fn(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(y.sin().sum(), y)
        return g

    x = leaf(5)
    with torch.no_grad():
        assert_same(remat(fn)(x), fn(x))
    with count_ops() as ops:
        (remat(fn)(x) * remat(lambda x: x.sin().exp())(x)).sum().backward()
    assert ops["sin"] == 1 + 2


def test_func_grad_inside_under_func_grad_outside():
    x = torch.randn(4)
    assert_more_sines(
        lambda wrap: grad(wrap(lambda x: grad(lambda x: x.sin().prod())(x).sum()))(x)
    )


# --- Equations: a derivative inside, everything outside --------------------------

W = [torch.randn(1, 8), torch.randn(8, 1)]


def residual(x, *ws):
    """Of u'' + u, with u a small network."""
    u = (x @ ws[0]).sin() @ ws[1]
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return (ddu + u).square().mean()


def second(out, ws):
    gs = torch.autograd.grad(out, ws, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gs), ws)


OUTSIDE = {
    "backward": lambda out, ws: out.backward() or [w.grad for w in ws],
    "autograd.grad": torch.autograd.grad,
    "second derivative": second,
}


@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_derivative_by_autograd_inside(outside):
    x = torch.randn(6, 1)

    def run(wrap):
        ws = [w.clone().requires_grad_() for w in W]
        out = wrap(residual)(x.clone().requires_grad_(), *ws)
        return OUTSIDE[outside](out, ws)

    assert all(g.any() for g in assert_more_sines(run))


def inner_derivative(x, w):
    return grad(lambda x: (x * w).sin().square().sum())(x)


OF_INNER = {
    "grad": lambda f: lambda x, w: grad(lambda w: f(x, w).sum())(w),
    "jacrev": lambda f: lambda x, w: jacrev(f, argnums=1)(x, w),
    "jvp(grad)": lambda f: lambda x, w: jvp(grad(lambda w: f(x, w).sum()), (w,), (x,)),
    "vmap(grad)": lambda f: (
        lambda x, w: vmap(grad(lambda x: f(x, w).sum()))(x.expand(2, 5))
    ),
}


@pytest.mark.parametrize("outside", OF_INNER)
def test_a_derivative_by_func_inside(outside):
    x, w = torch.randn(5), torch.randn(5)
    transform = OF_INNER[outside]
    # Tangents of w flow into the call and into its derivative.
    assert_more_sines(
        lambda wrap: transform(wrap(inner_derivative))(x, w), reassociated=True
    )


# --- Custom Functions: the wrong gradients tell who differentiates through them ---


@pytest.mark.parametrize("function", [TripledSin, TripledSinForFunc, StashedSin])
def test_the_gradient_of_a_custom_function_is_used(function):
    x = leaf(5)
    (right,) = gradients(lambda x: (x * 2).sin().square(), x)
    with count_ops() as ops:
        (got,) = gradients(remat(wrong(function)), x)
    assert ops["sin"] == 2
    torch.testing.assert_close(got, 3 * right)


def test_the_second_derivative_of_a_custom_function():
    x = leaf(5)

    def run(wrap):
        out = wrap(wrong(TripledSin))(x).sum()
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        return torch.autograd.grad(g.sin().sum(), x)

    assert_more_sines(run)


@compared(sin=2)
def test_a_custom_function_outside_calls_remat_in_its_backward(wrap, counting):
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


# --- Saved-tensor hooks ----------------------------------------------------------


def test_hooks_inside_pack_what_is_saved_within_them():
    packed, unpacked = [], []

    def fn(x):
        def unpack(t):
            unpacked.append(1)
            return t

        with saved_tensors_hooks(lambda t: packed.append(1) or t, unpack):
            y = x.sin().exp()
        return y.cos().exp()

    check(fn, leaf(5))
    # In plain and in the forward. A recompute packs what nobody reads.
    assert len(packed) == 2 * 2
    assert len(unpacked) == 2 * 2


# --- Subclasses and other tensors ------------------------------------------------


@compared(sin=2)
def test_non_contiguous_inputs_and_gradients(wrap, counting):
    x = leaf(4, 3).t()
    out = wrap(lambda x: x.sin().exp().t())(x)
    return torch.autograd.grad(out.expand(4, 3)[::2].sum(), x)


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


@compared(tanh=2 + 1 + 2, sin=2 + 1)
def test_checkpoint_inside_remat(wrap, counting):
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
