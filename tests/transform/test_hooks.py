"""Hooks around a call, in it, on its inputs and on its node: as in plain code, once."""

import pytest
import torch
from support.tables import rows
from support.zoo import W, X, leaves_of, matmul, ops_of, plainly, scalar
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from remat import policies, remat
from remat.testing import assert_same, count_ops


# --- Hooks on tensors, modules and nodes ---


def log_of_hooks(wrap):
    """The order in which hooks of all kinds fire, with what they see."""
    log = []

    def note(name):
        return lambda grad: log.append((name, grad.clone()))

    layer = nn.Linear(4, 4, dtype=torch.double)
    with torch.no_grad():
        layer.weight.copy_(W)
        layer.bias.copy_(W[0])
    captured, x = leaves_of(W, X)
    layer.weight.register_hook(note("parameter"))
    layer.bias.register_post_accumulate_grad_hook(lambda p: note("bias")(p.grad))
    captured.register_hook(note("captured"))
    x.register_hook(note("leaf"))
    h = 2 * x
    h.register_hook(note("input"))
    h.retain_grad()
    register_multi_grad_hook((x, captured), lambda grads: log.append("multi"))
    out = wrap(lambda h: layer(h @ captured).tanh())(h)
    out.register_hook(note("output"))
    ops = ops_of(lambda: out.sum().backward())
    log.append(("retained", h.grad))
    return log, ops["tanh"]


def test_hooks_fire_in_the_order_of_plain():
    expected, none = log_of_hooks(plainly)
    log, recomputed = log_of_hooks(remat)

    assert_same(log, expected)  # in this order
    assert len(log) == 8
    assert (none, recomputed) == (0, 1)


# --- Hooks for saved tensors ---


def test_only_the_inputs_are_packed_by_hooks_around_a_call():
    packed, unpacked = [], []
    w, x = leaves_of(W, X)
    h = w * 1
    with saved_tensors_hooks(
        lambda t: packed.append(t.data_ptr()) or t,
        lambda t: unpacked.append(t.data_ptr()) or t,
    ):
        value = remat(matmul)(h, x)
    # A leaf that requires grad is saved as it is: it lives as long as its owner.
    assert packed == [h.data_ptr()]
    value.sum().backward()
    assert packed == [h.data_ptr()]
    assert {*unpacked} == {h.data_ptr()}
    v, u = leaves_of(W, X)
    matmul(v * 1, u).sum().backward()
    assert_same((w.grad, x.grad), (v.grad, u.grad))


@pytest.mark.parametrize("policy", [None, policies.save_ops(torch.ops.aten.sin)])
def test_a_hook_around_a_call_reads_what_its_graph_saved(policy):
    """At the end of the forward, while the call takes note of what it left behind."""
    kept, read = [], []

    def fn(x, scale):
        kept.append(x.sin().exp())
        return (kept[-1] * 2).cos() * scale

    def pack(t):
        read.extend(h.grad_fn._saved_result.detach() for h in kept)
        return t

    ours = remat(fn, policy=policy)
    for again in range(3):  # recorded, then along a plan
        kept.clear()
        read.clear()
        (x,), scale = leaves_of(X), torch.ones(4, dtype=torch.double)
        with saved_tensors_hooks(pack, lambda t: t):
            y = ours(x, scale)
        assert read, again
        assert_same(read, [x.detach().sin().exp()] * len(read))
        y.sum().backward()
        assert_same(x.grad, torch.autograd.grad(fn(x, scale).sum(), x)[0])


# --- Under torch.func, a hook sees the gradients of its own level ---


def double(grad):
    return 2 * grad


# What sets hooks on `u`, and may keep a handle that is removed later.
SET_INSIDE = {
    "one": (lambda u, kept: u.register_hook(double), False),
    "two": (lambda u, kept: (u.register_hook(double), u.register_hook(double)), False),
    "removed inside": (lambda u, kept: u.register_hook(double).remove(), False),
    "removed later": (lambda u, kept: kept.append(u.register_hook(double)), True),
}
AROUND = {
    "grad": lambda f: grad(f)(X),
    "vmap(grad)": lambda f: vmap(grad(f))(X),
    "grad(grad)": lambda f: grad(lambda x: scalar(grad(f)(x)))(X),
    "jvp(grad)": lambda f: jvp(grad(f), (X,), (X.cos(),)),
}


@rows("set_hooks, is_removed", SET_INSIDE)
@rows("transform", AROUND)
def test_a_hook_set_inside_on_what_was_computed_sees_all_of_its_gradient(
    transform, set_hooks, is_removed
):
    def run(wrap):
        kept = []

        def fn(u):
            set_hooks(u, kept)
            return (u.sin() * u).sum()

        def outer(x):
            u = 3 * x
            out = wrap(fn)(u) + (u * u).sum()
            if is_removed:
                kept.pop(0).remove()
            return out

        with count_ops() as ops:
            return transform(outer), ops["sin"]

    (plain, sines), (ours, more) = run(lambda fn: fn), run(remat)
    torch.testing.assert_close(ours, plain)
    assert more > sines


# --- Of more than one level: a hook sees the gradients of the level it was set in ---

WEIGHT = torch.eye(4, dtype=torch.double) + 0.5
CAPTURED = (WEIGHT * 2).requires_grad_()


FIRED = []  # of which a recompute takes back what it adds


def doubled(g):
    FIRED.append(1)
    return g * 2


def on_a_result(x):
    y = (x @ WEIGHT).tanh()
    y.register_hook(doubled)
    return y.sin()


def on_a_node(x):
    y = (x @ WEIGHT).tanh()
    y.grad_fn.register_hook(lambda grads, _: tuple(map(doubled, grads)))
    return y.sin()


def on_an_input(x):
    x.register_hook(doubled)
    return (x @ WEIGHT).tanh().sin()


def beside_a_captured_leaf(x):
    y = (x @ CAPTURED).tanh()
    y.register_hook(doubled)
    return y.sin()


def of(fn):
    return grad(lambda x: fn(x).square().sum())


def backward_of(fn):
    def run(x):
        x = x.clone().requires_grad_()
        fn(x).square().sum().backward()
        return x.grad

    return run


LEVELS = {
    "grad": of,
    "grad(grad)": lambda fn: of(of(fn)),
    "grad(grad(grad))": lambda fn: of(of(of(fn))),
    "grad(vmap(grad))": lambda fn: of(vmap(of(fn))),
    "hessian": lambda fn: hessian(lambda x: fn(x).square().sum()),
    "jacrev(jacrev)": lambda fn: jacrev(jacrev(fn)),
    "backward of grad": lambda fn: backward_of(of(fn)),
    "backward of vmap(grad)": lambda fn: backward_of(vmap(of(fn))),
}


@pytest.mark.parametrize("order", LEVELS)
@pytest.mark.parametrize(
    "hooked", [on_a_result, on_a_node, on_an_input, beside_a_captured_leaf]
)
def test_a_hook_acts_in_the_level_it_was_set_in_alone(hooked, order):
    x = torch.linspace(-1, 1, 16, dtype=torch.double).view(4, 4)

    def differentiated(fn):
        FIRED.clear()
        with count_ops() as ops:
            return LEVELS[order](fn)(x), len(FIRED), ops["tanh"]

    expected, times, plain = differentiated(hooked)
    for run in remat(hooked), remat(remat(hooked)):
        found, fired, tanhs = differentiated(run)
        torch.testing.assert_close(found, expected)
        assert (fired, tanhs > plain) == (times, True)


BELOW = {
    "vmap(grad)": lambda fn: vmap(grad(fn)),
    "jacrev(vmap)": lambda fn: jacrev(vmap(fn)),
    "vmap(grad(grad))": lambda fn: vmap(grad(lambda x: grad(fn)(x).square().sum())),
    "jvp(grad)": lambda fn: lambda x: jvp(grad(fn), (x,), (x.cos(),))[1],
    "jacfwd(grad)": lambda fn: jacfwd(grad(fn)),
}


@rows("derivative", BELOW)
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_hook_that_calls_in_one_another_set_on_a_leaf_of_the_users_stays(
    derivative, depth, other
):
    def run(count):
        w = torch.linspace(0.5, 1, 3, dtype=torch.double).requires_grad_()
        turns = [0]
        if other:  # then another leaf stands in for it
            w.register_hook(lambda g: g * 2)

        def fn(x):
            turns[0] += other  # code that writes in place may write to vectors
            w.register_hook(lambda g: g * 3)
            return (x * w).sin().sum() * (w * w).sum()

        for _ in range(count):
            fn = remat(fn)
        x = torch.linspace(0, 1, 6, dtype=torch.double).view(2, 3)
        with count_ops() as ops:
            derivative(fn)(x).sum().backward()
        return (w.grad, len(w._backward_hooks)), ops["sin"]

    (expected, sines), (found, more) = run(0), run(depth)
    torch.testing.assert_close(found, expected)
    assert more > sines
