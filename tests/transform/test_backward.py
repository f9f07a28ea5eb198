"""Plain autograd: `.backward()` and `autograd.grad` with all their options."""

from functools import partial

import pytest
import torch
from support.zoo import (
    BIG,
    BLOCKS,
    DEPTH,
    ZOO,
    Evaluations,
    W,
    X,
    assert_rematerialized,
    assert_zoo_rematerialized,
    block,
    blocks,
    counted,
    leaves_of,
    make,
    matmul,
    plainly,
    scalar,
)
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


# --- Every way to start a backward ---


def backward(loss, w, x):
    w, x = leaves_of(w, x)
    loss(w, x).backward()
    return w.grad, x.grad


def backward_to_one_input(loss, w, x):
    w, x = leaves_of(w, x)
    loss(w, x).backward(inputs=[w])
    assert x.grad is None
    return w.grad


def backward_twice(loss, w, x):
    w, x = leaves_of(w, x)
    value = loss(w, x)
    value.backward(retain_graph=True)
    value.backward()
    return w.grad, x.grad


def accumulate_over_two_calls(loss, w, x):
    w, x = leaves_of(w, x)
    loss(w, x).backward()
    first = w.grad
    loss(w, 2 * x).backward()
    assert w.grad is first
    return w.grad, x.grad


def grad(loss, w, x):
    w, x = leaves_of(w, x)
    return torch.autograd.grad(loss(w, x), (w, x))


def grad_create_graph(loss, w, x):
    w, x = leaves_of(w, x)
    return torch.autograd.grad(loss(w, x), (w, x), create_graph=True)


def grad_is_grads_batched(loss, w, x):
    w, x = leaves_of(w, x)
    cts = make(5, seed=9)
    return torch.autograd.grad(loss(w, x), (w, x), cts, is_grads_batched=True)


def grad_of_what_is_no_leaf(loss, w, x):
    w, x = leaves_of(w, x)
    h = w * 2
    return torch.autograd.grad(loss(h, x), (h, w))


def one_frozen_input(loss, w, x):
    (x,) = leaves_of(x)
    loss(w, x).backward()
    return x.grad


# Evaluations: the forward, and a recomputation for each backward through the call.
BACKWARDS = {
    "backward": (backward, 2),
    "inputs": (backward_to_one_input, 2),
    "twice": (backward_twice, 3),
    "frozen": (one_frozen_input, 2),
    "grad": (grad, 2),
    "create_graph": (grad_create_graph, 2),
    "is_grads_batched": (grad_is_grads_batched, 2),
    "no_leaf": (grad_of_what_is_no_leaf, 2),
}


CURVED = [case for case in ZOO if case != "linear"]


@pytest.mark.parametrize("case", CURVED)
@pytest.mark.parametrize("how", BACKWARDS)
def test_gradients_are_those_of_the_function(how, case):
    transform, evaluations = BACKWARDS[how]
    assert_zoo_rematerialized(transform, case, evaluations=evaluations)


@pytest.mark.parametrize("how", BACKWARDS)
def test_a_function_whose_graph_saves_nothing_is_not_recomputed(how):
    transform, evaluations = BACKWARDS[how]
    linear, calls = counted(ZOO["linear"][0])
    curved, others = counted(matmul)

    def both(linear, curved):
        return transform(lambda w, x: scalar(linear(w, curved(w, x))), W, X)

    expected = both(linear, curved)
    calls.clear()
    others.clear()
    assert_same(both(remat(linear), remat(curved)), expected)
    assert (len(calls), len(others)) == (1, evaluations)


@pytest.mark.parametrize("case", CURVED)
def test_gradients_accumulate_over_calls(case):
    assert_zoo_rematerialized(accumulate_over_two_calls, case, plain=2, evaluations=4)


@pytest.mark.parametrize("anomaly", [False, True], ids=["normal", "anomaly"])
def test_ops_are_those_of_plain_and_those_recomputed(anomaly):
    def step(wrap):
        w, x = leaves_of(W, X)
        with torch.autograd.set_detect_anomaly(anomaly), count_ops() as ops:
            scalar(wrap(matmul)(w, x)).backward()
        return ops["mm"], ops["tanh"], ops["sin"], ops["tanh_backward"]

    assert step(plainly) == (6, 1, 1, 1)
    # The last product saves its factors, and nobody reads what it gives.
    assert step(partial(remat, prune=False)) == (7, 2, 1, 1)


# --- Memory ---


def test_after_the_forward_only_the_inputs_are_alive():
    (x,) = leaves_of(BIG)
    one = BIG.nbytes
    assert live_bytes(lambda: block(x)) == DEPTH * one  # the output and residuals
    assert live_bytes(lambda: remat(block)(x)) == one  # the output alone


def test_at_the_peak_one_block_is_alive():
    def step(wrap):
        (x,) = leaves_of(BIG)
        return peak_bytes(lambda: blocks(wrap)(x).backward()) // BIG.nbytes

    assert step(plainly) >= BLOCKS * DEPTH
    assert step(remat) <= BLOCKS + DEPTH + 2


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
    assert_same((w.grad, x.grad), backward(lambda w, x: matmul(w * 1, x).sum(), W, X))


# --- Some of the outputs, some of the inputs ---


def branches(x, y):
    return x.sin().cos() * 2, y.exp().tanh() * 3


@pytest.mark.parametrize("held", [True, False])
def test_outputs_without_a_cotangent_are_not_differentiated(held):
    def ops_of(fn):
        x, y = leaves_of(W, X)
        first, second = fn(x, y)
        if not held:
            del second
        with count_ops() as ops:
            first.sum().backward()
        assert y.grad is None
        return x.grad, (ops["sin"], ops["cos"], ops["exp"], ops["tanh_backward"])

    expected, plain = ops_of(branches)
    grad, recomputed = ops_of(remat(branches, prune=False))
    assert_same(grad, expected)
    assert plain == (1, 1, 0, 0)
    # Each branch is recomputed as long as somebody may differentiate it. Of the cosine
    # itself, which is before what the other branch saves, nobody needs the value.
    assert recomputed == ((2, 2, 1, 0) if held else (2, 1, 0, 0))


def test_outputs_are_differentiated_one_after_the_other():
    def transform(f):
        x, y = leaves_of(W, X)
        first, second = f(x, y)
        first.sum().backward(retain_graph=True)
        second.sum().backward()
        return x.grad, y.grad

    assert_rematerialized(transform, branches, evaluations=3)


def test_a_backward_of_one_output_leaves_the_graph_of_another_alone():
    def transform(f):
        x, y = leaves_of(W, X)
        first, second = f(x, y)
        first.sum().backward()
        second.sum().backward()
        for output in first, second:
            with pytest.raises(RuntimeError, match="through the graph a second time"):
                output.sum().backward()
        return x.grad, y.grad

    assert_rematerialized(transform, branches, evaluations=3)


def test_outputs_are_differentiated_together():
    def transform(f):
        x, y = leaves_of(W, X)
        torch.autograd.backward(f(x, y), [X, W])
        return x.grad, y.grad

    assert_rematerialized(transform, branches, evaluations=2)


def test_outputs_get_batched_cotangents():
    def transform(f):
        x, y = leaves_of(W, X)
        cts = make(3, 4, 4, seed=1), make(3, 4, 4, seed=2)
        return torch.autograd.grad(f(x, y), (x, y), cts, is_grads_batched=True)

    assert_rematerialized(transform, branches, evaluations=2)


def test_a_node_that_gets_no_gradient_is_not_called():
    called = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(x, name):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.name = inputs[1]

        @staticmethod
        def backward(ctx, cotangent):
            called.append(ctx.name)
            return cotangent * 2, None

    def transform(f):
        (x,) = leaves_of(W)
        first, _ = f(x)
        first.sum().backward()
        return x.grad

    def fn(x):
        return Noted.apply(x, "first").sin(), Noted.apply(x, "second").sin()

    assert_rematerialized(transform, fn, evaluations=2)
    assert called == ["first", "first"]  # once in plain, once in remat


def test_an_unused_input_gets_no_gradient():
    def transform(f):
        w, x, unused = leaves_of(W, X, W)
        scalar(f(w, x, unused)).backward()
        assert unused.grad is None
        return w.grad, x.grad

    def fn(w, x, unused):
        return w * x.sin()

    assert_rematerialized(transform, fn, evaluations=2)


def test_an_unused_input_is_an_error_unless_allowed():
    fn, calls = counted(lambda x, unused: x.sin().sin().sum())
    x, unused = leaves_of(W, X)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(remat(fn)(x, unused), unused)
    value = remat(fn)(x, unused)
    assert torch.autograd.grad(value, (x, unused), allow_unused=True)[1] is None
    assert len(calls) == 3  # nothing is recomputed for what has no edge


def test_an_input_given_twice_gets_the_sum():
    def transform(f):
        (x,) = leaves_of(W)
        scalar(f(x, x)).backward()
        return x.grad

    assert_rematerialized(transform, matmul, evaluations=2)


def test_an_output_used_twice_is_recomputed_once():
    def transform(f):
        (x,) = leaves_of(W)
        h = f(x, x)
        (h * h.sin()).sum().backward()
        return x.grad

    assert_rematerialized(transform, matmul, evaluations=2)


# --- What a backward frees ---


def test_a_second_backward_needs_retain_graph():
    fn, calls = counted(matmul)
    w, x = leaves_of(W, X)
    value = remat(fn)(w, x).sum()
    value.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()
    assert len(calls) == 2


def test_gradients_share_no_memory():
    fn, calls = counted(lambda w, x: (w + x, w.exp()))
    w, x = leaves_of(W, X)
    cotangent = torch.ones_like(W)
    total, other = remat(fn)(w, x)
    total.backward(cotangent)
    w.grad.mul_(2)
    x.grad.mul_(3)
    assert (w.grad == 2).all()
    assert (x.grad == 3).all()
    assert (cotangent == 1).all()
    other.backward(cotangent)
    assert_same(w.grad, 2 + W.exp())
    assert (cotangent == 1).all()
    assert len(calls) == 2


# --- Hooks ---


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

    def fn(h):
        return layer(h @ captured).tanh()

    out = wrap(fn)(h)
    out.register_hook(note("output"))
    with count_ops() as ops:
        out.sum().backward()
    log.append(("retained", h.grad))
    return log, ops["tanh"]


def test_hooks_fire_as_in_plain():
    expected, none = log_of_hooks(plainly)
    log, recomputed = log_of_hooks(remat)

    assert_same(log, expected)  # in this order
    assert len(log) == 8
    assert (none, recomputed) == (0, 1)


def test_hooks_on_a_module_fire_as_in_plain():
    def transform(f):
        log = []
        layer = nn.Linear(4, 4, bias=False, dtype=torch.double)
        layer.weight = nn.Parameter(W.clone())
        layer.register_full_backward_pre_hook(lambda m, out: log.append(out))
        layer.register_full_backward_hook(lambda m, *grads: log.append(grads))
        (x,) = leaves_of(X)
        f(layer, x).sum().backward()
        assert len(log) == 2
        return log, x.grad, layer.weight.grad

    assert_rematerialized(transform, lambda m, x: m(x.sin()).exp(), evaluations=2)


def test_hooks_change_gradients():
    def transform(f):
        x, w = leaves_of(X, W)
        w.register_hook(lambda grad: grad + 1)
        h = x.sin()
        h.register_hook(lambda grad: grad * 2)
        out = f(w, h)
        out.register_hook(lambda grad: grad * 3)
        out.sum().backward()
        return x.grad, w.grad

    assert_rematerialized(transform, matmul, evaluations=2)


def test_hooks_set_inside_fire_once():
    fired = []

    def fn(x):
        h = x.sin()
        h.register_hook(lambda grad: fired.append(float(grad[0, 0])) or grad * 2)
        return h.exp()

    def transform(f):
        (x,) = leaves_of(W)
        f(x).sum().backward()
        return x.grad

    assert_rematerialized(transform, fn, evaluations=2)
    plain, recomputed = fired
    assert recomputed == plain


def test_hooks_on_the_node_fire_once():
    def transform(f):
        log = []
        w, x = leaves_of(W, X)
        out = f(w, x)
        out.grad_fn.register_prehook(log.append)
        out.sum().backward()
        assert len(log) == 1
        return log, w.grad

    assert_rematerialized(transform, matmul, evaluations=2)


def test_a_call_in_a_hook_of_another_backward():
    def transform(f):
        log = []

        def hook(grad):
            z, x = leaves_of(W, X)
            with torch.enable_grad():
                value = scalar(f(z, x * grad))
            log.extend(torch.autograd.grad(value, (z, x)))

        (x,) = leaves_of(X)
        h = x.sin()
        h.register_hook(hook)
        scalar(f(h, h)).backward()
        return x.grad, log

    assert_rematerialized(transform, matmul, plain=2, evaluations=4)


# --- Checkers ---


def check_first_order(fn):
    return torch.autograd.gradcheck(
        fn, leaves_of(W, X), check_batched_grad=True, check_forward_ad=True,
        check_batched_forward_grad=True, check_undefined_grad=True,
    )  # fmt: skip


def check_second_order(fn):
    return torch.autograd.gradgradcheck(
        fn, leaves_of(W[:2, :2], X[:2, :2]), check_batched_grad=True,
        check_fwd_over_rev=True, check_rev_over_rev=True,
    )  # fmt: skip


@pytest.mark.parametrize("check", [check_first_order, check_second_order])
@pytest.mark.parametrize("fn", [matmul, branches], ids=["matmul", "branches"])
def test_gradcheck(check, fn):
    evaluated, calls = counted(fn)
    assert check(evaluated)
    plain = len(calls)
    assert check(remat(evaluated))
    assert len(calls) - plain > plain


def test_anomaly_mode_names_the_op():
    def evaluations(wrap):
        fn, calls = counted(lambda x: (x * 0).sqrt() * 0)
        value = wrap(fn)(*leaves_of(W)).sum()
        with (
            pytest.warns(UserWarning, match=r"Error detected|Previous calc") as caught,
            pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan values"),
        ):
            value.backward()
        assert any("detected in SqrtBackward0" in str(w.message) for w in caught)
        return len(calls)

    with torch.autograd.set_detect_anomaly(True):
        assert evaluations(plainly) == 1
        assert evaluations(remat) == 2


# --- Many calls ---


def test_two_thousand_calls_in_a_row():
    def transform(f):
        w, x = leaves_of(W, X)
        h = x
        for _ in range(2000):
            h = f(w, h)
        h.sum().backward()
        return w.grad, x.grad

    # No reassociation: each call uses w once.
    assert_rematerialized(
        transform, lambda w, h: (h @ w).sin() + h, plain=2000, evaluations=4000
    )


# --- Nothing to differentiate: the function itself ---


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": partial(torch.set_grad_enabled, False),
}


@pytest.mark.parametrize("mode", MODES)
def test_without_grad_mode_the_function_itself_is_called(mode):
    seen = Evaluations()
    fn = remat(lambda x: seen.note(id(x)) or x.sin().sin())
    (x,) = leaves_of(BIG)
    with MODES[mode]():
        out = fn(x)
        assert live_bytes(lambda: fn(x)) == BIG.nbytes
    assert not out.requires_grad
    out = fn(x)
    assert out.requires_grad
    assert len(seen) == 3
    out.sum().backward()
    assert [*seen] == [id(x)] * 4  # in the recomputation, too


def test_without_an_input_that_requires_grad_the_function_itself_is_called():
    seen = Evaluations()
    fn = remat(lambda x: seen.note(id(x)) or x.sin().sin())
    assert fn(X).grad_fn is None
    (x,) = leaves_of(X)
    fn(x).sum().backward()
    assert [*seen] == [id(X), id(x), id(x)]


def test_an_output_that_depends_on_no_input_requires_no_grad():
    def transform(f):
        (x,) = leaves_of(X)
        out = f(x)
        assert [t.requires_grad for t in out] == [True, False, False]
        out[0].sum().backward()
        return out, x.grad

    def fn(x):
        return x.sin().sin(), x.detach().cos(), torch.ones(3)

    assert_rematerialized(transform, fn, evaluations=2)


def test_backward_without_grad_mode():
    def transform(f):
        w, x = leaves_of(W, X)
        value = scalar(f(w, x))
        with torch.no_grad():
            value.backward()
        return w.grad, x.grad

    assert_rematerialized(transform, matmul, evaluations=2)
