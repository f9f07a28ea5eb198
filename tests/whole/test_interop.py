"""remat among the other things that torch programs do with autograd."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def gradients(fn, *inputs):
    """Take them by `.backward()`: reentrant checkpoints refuse `autograd.grad`."""
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


# --- torch.utils.checkpoint ------------------------------------------------------


def theirs(fn, reentrant):
    return lambda *args: checkpoint(fn, *args, use_reentrant=reentrant)


def body(x, w):
    return nn.functional.dropout(torch.tanh(x * w), 0.5).sin()


variants = pytest.mark.parametrize(
    "reentrant", [False, True], ids=["non-reentrant", "reentrant"]
)


@variants
def test_remat_inside_checkpoint(reentrant):
    def fn(call):
        return lambda x, w: call(call(x, w) * x, w)

    x, w = leaf(8), leaf(8)
    want = gradients(fn(body), x, w)
    with count_ops() as ops:
        got = gradients(theirs(fn(remat(body)), reentrant), x, w)
    assert_same(got, want)
    # Forward, theirs, and remat's. Theirs stops where the second call has its input.
    assert ops["tanh"] == 2 + (2 if reentrant else 1) + 2


@variants
def test_remat_inside_checkpoint_with_the_graph_retained(reentrant):
    x, w = leaf(8), leaf(8)

    def run(call):
        torch.manual_seed(1)
        inputs = [t.detach().clone().requires_grad_() for t in (x, w)]
        fn = theirs(lambda x, w: call(x.sin(), w) * x, reentrant)
        with count_ops() as ops:
            y = fn(*inputs).sum()
            y.backward(retain_graph=True)
            y.backward()
        return [t.grad for t in inputs], ops["tanh"]

    want, plain = run(body)
    got, more = run(remat(body))
    assert_same(got, want)
    assert more == plain + 2


def test_checkpoint_inside_remat():
    def fn(call):
        return lambda x, w: call(call(x, w) * x, w)

    x, w = leaf(8), leaf(8)
    want = gradients(fn(body), x, w)
    with count_ops() as ops:
        got = gradients(remat(fn(theirs(body, False))), x, w)
    assert_same(got, want)
    # Forward, 2. remat's recomputation, 1: it stops where the product has been saved.
    # Theirs, which stop before sin, 2.
    assert (ops["tanh"], ops["sin"]) == (2 + 1 + 2, 2 + 1)


def test_reentrant_checkpoint_inside_remat():
    def fn(x, w):
        return body(theirs(body, True)(x, w) * x, w)

    x, w = leaf(8), leaf(8)
    want = gradients(fn, x, w)
    with count_ops() as ops:
        got = gradients(remat(fn), x, w)
    assert_same(got, want)
    # Forward, remat's recomputation, and theirs of what is in it.
    assert ops["tanh"] == 2 + 2 + 1


def test_reentrant_checkpoint_inside_one_node_is_refused_by_torch():
    """A recomputation asks for the gradients of its inputs, which it can't give."""
    x, w = leaf(8), leaf(8)
    fn = remat(theirs(body, True), higher_order=True)
    with pytest.raises(RuntimeError, match=r"use_reentrant=True.* is incompatible"):
        fn(x, w).sum().backward()


@variants
def test_remat_and_checkpoint_in_a_row(reentrant):
    x, w = leaf(8), leaf(8)

    def fn(a, b):
        def run(x, w):
            return b(a(x, w) * x, w)

        return run

    for calls in (
        (remat(body), theirs(body, reentrant)),
        (theirs(body, reentrant), remat(body)),
    ):
        want = gradients(fn(body, body), x, w)
        with count_ops() as ops:
            got = gradients(fn(*calls), x, w)
        assert_same(got, want)
        assert ops["tanh"] == 2 * 2


# --- no_grad, detach, other derivatives inside -----------------------------------


def test_no_grad_inside():
    def fn(x, w):
        with torch.no_grad():
            scale = (x * w).sin().abs().max()
        return (x * w / scale).sin()

    check(fn, leaf(5), leaf(5))


def test_no_grad_as_a_decorator_inside():
    @torch.no_grad()
    def scale(x):
        return x.sin().norm()

    check(lambda x: x.sin() / scale(x), leaf(5), again=2)


def test_inference_mode_inside():
    def fn(x):
        with torch.inference_mode():
            n = int(x.abs().sum())
        return x.sin().exp() * (n + 1)

    check(fn, leaf(5))


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


def test_detach_inside_stops_the_gradient():
    check(lambda x, w: x.detach().sin() * w + x, leaf(5), leaf(5))


def test_a_straight_through_estimator():
    def fn(x):
        soft = x.sin().exp()
        return soft + (soft.round() - soft).detach()

    check(fn, leaf(5))


def test_func_grad_inside():
    def fn(x, w):
        return grad(lambda x: ((x * w).sin() ** 2).sum())(x)

    check(fn, leaf(5), leaf(5))


def test_func_hessian_and_vmap_inside():
    def f(row, w):
        return ((row * w).sin() ** 3).sum()

    def fn(x, w):
        return vmap(hessian(f), in_dims=(0, None))(x, w)

    check(fn, leaf(2, 3), leaf(3), again=2)


def test_func_grad_inside_under_func_grad_outside():
    def fn(x):
        return grad(lambda x: x.sin().prod())(x).sum()

    x = torch.randn(4)
    with count_ops() as plain:
        want = grad(fn)(x)
    with count_ops() as ops:
        got = grad(remat(fn))(x)
    assert_same(got, want)
    assert ops["sin"] > plain["sin"]


def test_gradients_accumulated_into_leaves_made_inside():
    def fn(x):
        w = torch.ones(5, requires_grad=True)
        (w * x.detach()).sin().sum().backward()
        return x * w.grad

    check(fn, leaf(5))


def test_a_hook_on_an_intermediate_changes_its_gradient_once():
    calls = []

    def fn(x):
        y = x.sin()
        y.register_hook(lambda g: calls.append(1) or 3 * g)
        return y.exp()

    check(fn, leaf(5))
    assert len(calls) == 2


# --- Equations: a derivative inside, everything outside --------------------------

W = [torch.randn(1, 8), torch.randn(8, 1)]


def residual(x, *ws):
    """Of u'' + u, with u a small network."""
    u = (x @ ws[0]).sin() @ ws[1]
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return (ddu + u).square().mean()


def outside_backward(fn, x, ws):
    ws = [w.clone().requires_grad_() for w in ws]
    fn(x.clone().requires_grad_(), *ws).backward()
    return [w.grad for w in ws]


def outside_grad(fn, x, ws):
    return torch.autograd.grad(
        fn(
            x.clone().requires_grad_(),
            *(ws := [w.clone().requires_grad_() for w in ws]),
        ),
        ws,
    )


def outside_second(fn, x, ws):
    ws = [w.clone().requires_grad_() for w in ws]
    y = fn(x.clone().requires_grad_(), *ws)
    gs = torch.autograd.grad(y, ws, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gs), ws)


@pytest.mark.parametrize(
    "outside",
    [outside_backward, outside_grad, outside_second],
    ids=["backward", "autograd.grad", "second derivative"],
)
def test_a_derivative_by_autograd_inside(outside):
    x = torch.randn(6, 1)
    with count_ops() as plain:
        want = outside(residual, x, W)
    with count_ops() as ops:
        got = outside(remat(residual), x, W)
    assert_same(got, want)
    assert ops["sin"] > plain["sin"]
    assert all(g.abs().max() > 0 for g in want)


def test_a_derivative_by_autograd_inside_of_what_only_needs_grad_inside():
    def fn(w):
        x = torch.linspace(0, 1, 6).unsqueeze(1).requires_grad_()
        u = (x * w).sin()
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (du + u).square()

    check(fn, leaf(1))


def inner_derivative(x, w):
    return grad(lambda x: (x * w).sin().square().sum())(x)


@pytest.mark.parametrize(
    "outside",
    [
        lambda f: lambda x, w: grad(lambda w: f(x, w).sum())(w),
        lambda f: lambda x, w: jacrev(f, argnums=1)(x, w),
        lambda f: lambda x, w: jvp(grad(lambda w: f(x, w).sum()), (w,), (x,)),
        lambda f: lambda x, w: vmap(grad(lambda x: f(x, w).sum()))(x.expand(2, 5)),
    ],
    ids=["grad", "jacrev", "jvp(grad)", "vmap(grad)"],
)
def test_a_derivative_by_func_inside(outside):
    x, w = torch.randn(5), torch.randn(5)
    with count_ops() as plain:
        want = outside(inner_derivative)(x, w)
    with count_ops() as ops:
        got = outside(remat(inner_derivative))(x, w)
    # Tangents of w flow into the call and into its derivative.
    assert_same(got, want, reassociated=True)
    assert ops["sin"] > plain["sin"]


# --- Custom Functions: the wrong gradients tell who differentiates through them ---


class TripledSin(Function):
    """Its gradient is three times too large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x.cos()


class TripledSinForFunc(Function):
    """The same, in the style that torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x.cos()

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * t * x.cos()


class StashedSin(Function):
    """Keeps a tensor on its context past torch's saved tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.x.cos()


def wrong(function):
    def fn(x):
        return function.apply(x * 2).square()

    return fn


@pytest.mark.parametrize("function", [TripledSin, TripledSinForFunc, StashedSin])
def test_the_gradient_of_a_custom_function_is_used(function):
    x = leaf(5)
    check(wrong(function), x)
    (right,) = gradients(lambda x: (x * 2).sin().square(), x)
    (got,) = gradients(remat(wrong(function)), x)
    torch.testing.assert_close(got, 3 * right)


@pytest.mark.parametrize(
    ("transform", "factor"),
    [
        (grad, 3),
        (lambda f: lambda x: vmap(grad(f))(torch.stack([x, x]))[0], 3),
        (jacrev, 3),
        (lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1], 3),
    ],
    ids=["grad", "vmap(grad)", "jacrev", "jvp"],
)
def test_the_gradient_of_a_custom_function_is_used_under_transforms(transform, factor):
    def fn(x):
        return wrong(TripledSinForFunc)(x).sum()

    x = torch.randn(5)
    assert_same(transform(remat(fn))(x), transform(fn)(x))
    right = transform(lambda x: (x * 2).sin().square().sum())(x)
    torch.testing.assert_close(transform(remat(fn))(x), factor * right)
    with count_ops() as ops:
        grad(remat(fn))(x)
    assert ops["sin"] == 2


def test_the_second_derivative_of_a_custom_function():
    def second(fn, x):
        (g,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sin().sum(), x)

    x = leaf(5)
    fn = wrong(TripledSin)
    with count_ops() as plain:
        want = second(fn, x)
    with count_ops() as ops:
        got = second(remat(fn), x)
    assert_same(got, want)
    assert ops["sin"] > plain["sin"]


def test_a_custom_function_outside_calls_remat_in_its_backward():
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

    def run(call):
        nonlocal inner
        inner = call
        return gradients(Outer.apply, x)

    inner, x = None, leaf(5)
    want = run(lambda x: (x * x).sin().exp())
    with count_ops() as ops:
        got = run(remat(lambda x: (x * x).sin().exp()))
    assert_same(got, want)
    assert ops["sin"] == 2


def test_a_call_within_the_hook_of_another_backward():
    x = leaf(5)
    inner, fn = [], remat(lambda x: (x * x).sin().exp())

    def hook(g):
        with torch.enable_grad():
            inner.extend(gradients(fn, x))

    y = fn(x)
    y.register_hook(hook)
    with count_ops() as ops:
        got = torch.autograd.grad(y.sum(), x)
    assert_same(inner, gradients(lambda x: (x * x).sin().exp(), x))
    assert_same(list(got), inner)
    assert ops["sin"] == 1 + 2


# --- Saved-tensor hooks ----------------------------------------------------------


def test_save_on_cpu_outside():
    x, w = leaf(5), leaf(5)

    def fn(x, w):
        return (x * w).sin().exp()

    want = gradients(fn, x, w)
    with count_ops() as ops, save_on_cpu():
        got = gradients(remat(fn), x, w)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_hooks_outside_see_only_the_inputs_that_were_computed():
    x, w = leaf(5), leaf(5)
    h = x * 1
    packed = []

    def pack(t):
        packed.append(t.detach().clone())
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = remat(lambda x, w: (x * w).sin().exp())(h, w)
    assert_same(packed, [h.detach()])
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1


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
    # In plain and in the forward. A recomputation packs what nobody reads.
    assert len(packed) == 2 * 2
    assert len(unpacked) == 2 * 2


# --- Graphs ----------------------------------------------------------------------


def op_names(graph):
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("transform", "x"),
    [
        (grad, torch.randn(5)),
        (lambda f: vmap(grad(f), in_dims=(0, None)), torch.randn(3, 5)),
        (lambda f: jvp_of(grad(f)), torch.randn(5)),
    ],
    ids=["grad", "vmap(grad)", "jvp(grad)"],
)
def test_make_fx_traces_the_function_itself(transform, x):
    """A trace has no memory to save: it holds each operation once."""
    w = torch.randn(5)

    def loss(x, w):
        return (x * w).sin().square().sum()

    plain = make_fx(transform(loss))(x, w)
    graph = make_fx(transform(remat(loss)))(x, w)
    assert op_names(graph) == op_names(plain)
    other = torch.randn_like(x)
    assert_same(graph(other, w), transform(loss)(other, w))
    with count_ops() as ops:
        transform(loss)(x, w)
    with count_ops() as more:
        assert_same(transform(remat(loss))(x, w), transform(loss)(x, w))
    assert more["sin"] > 2 * ops["sin"]  # outside of a trace, it recomputes


def jvp_of(f):
    return lambda x, w: jvp(lambda x: f(x, w), (x,), (w,))


# --- Subclasses and other tensors ------------------------------------------------


def test_parameters_buffers_and_views_as_arguments():
    def fn(p, b, v):
        return (p * b * v).sin().exp()

    p, b = nn.Parameter(torch.randn(5)), nn.Buffer(torch.randn(5))
    v = leaf(2, 5)
    want = torch.autograd.grad(fn(p, b, v[1]).sum(), (p, v))
    with count_ops() as ops:
        got = torch.autograd.grad(remat(fn)(p, b, v[1]).sum(), (p, v))
    assert_same(got, want)
    assert ops["sin"] == 2


def test_sparse_tensors_as_constants():
    s = torch.eye(5).to_sparse()
    check(lambda x: (s @ x).sin().exp(), leaf(5, 2))


def test_non_contiguous_inputs_and_gradients():
    def fn(x):
        return x.sin().exp().t()

    x = leaf(4, 3).t()
    want = torch.autograd.grad(fn(x).expand(4, 3)[::2].sum(), x)
    with count_ops() as ops:
        got = torch.autograd.grad(remat(fn)(x).expand(4, 3)[::2].sum(), x)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_memory_between_remat_and_checkpoint_is_the_same():
    x = leaf(1024)

    def fn(x):
        return x.sin().sin().sin().sin()

    assert live_bytes(lambda: fn(x)) == 4 * 4096
    assert live_bytes(lambda: remat(fn)(x)) == 4096
    inside = remat(lambda x: checkpoint(fn, x, use_reentrant=False).sin())
    # Theirs keeps the state of the generator.
    assert live_bytes(lambda: inside(x)) == 4096 + torch.get_rng_state().nbytes
