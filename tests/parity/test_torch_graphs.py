"""What PyTorch's tests of `torch.utils.checkpoint` say of graphs, hooks and nesting.

Numbers are items of the survey of those tests: see `test_torch_calls.py`. torch's
checkpoint inside and around (26) is in `whole/test_interop_checkpoint.py`.
"""

import gc
import weakref

import pytest
import torch
from support.checkpoints import ReadsTwice, derivative, sin_exp, slope_of_sin_exp
from support.compared import compared, leaf, points
from support.zoo import Evaluations, counted, plainly
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from remat import remat
from remat.testing import assert_same, assert_same_gradients


# --- 15: custom Functions ---


@compared(exp=2)
def test_a_custom_function_may_read_what_it_saved_twice(wrap, counting):
    """15: torch's checkpoint refuses a second look."""
    x = leaf(3)
    wrap(lambda x: ReadsTwice.apply(x.sin()))(x).sum().backward()
    return x.grad


# --- 20-22: reading the graph, errors ---


def test_reading_what_a_node_saved_recomputes_it():
    """20: until it is freed."""
    body, calls = counted(sin_exp)
    x = leaf(3)
    out = remat(body)(x)
    (sin,) = [node for node, _ in out.grad_fn.next_functions]
    assert_same(sin._saved_self.detach(), x.detach())
    assert len(calls) == 1
    for count in range(2, 5):
        assert_same(out.grad_fn._saved_result.detach(), out.detach())
        assert len(calls) == count
    out.sum().backward()
    assert len(calls) == 5
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = out.grad_fn._saved_result
    assert_same(x.grad, slope_of_sin_exp())


def test_reading_what_one_node_saved_recomputes_nothing():
    """20: a call saves its inputs, so they can be read at any time until freed."""
    body, calls = counted(lambda x: x.exp())
    x = leaf(3)
    y = x * 2.0
    out = remat(body, higher_order=True)(y)
    for _ in range(3):
        assert_same(out.grad_fn.saved_tensors[0].detach(), y.detach())
    assert len(calls) == 1
    out.sum().backward()
    assert len(calls) == 2
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = out.grad_fn.saved_tensors
    assert_same(x.grad, 2 * (points(3) * 2).exp())


def test_a_failed_backward_does_not_poison_the_next():
    """22: the first asks for a gradient that does not exist."""
    body, calls = counted(sin_exp)
    x, other = leaf(3), leaf(3)
    out = remat(body)(x).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(out, (x, other), retain_graph=True)
    calls.clear()
    (got,) = torch.autograd.grad(out, x)
    assert len(calls) == 1
    assert_same(got, slope_of_sin_exp())


def test_a_backward_that_raised_in_a_hook_can_be_done_again():
    """22."""
    body, calls = counted(sin_exp)
    x = leaf(3)
    fail = [True]

    def hook(grad):
        if fail:
            raise ValueError(f"a hook, at {grad.shape[0]}")
        return grad

    middle = x * 1.0
    middle.register_hook(hook)
    out = remat(body)(middle).sum()
    with pytest.raises(ValueError, match="a hook, at 3"):
        out.backward(retain_graph=True)
    fail.clear()
    out.backward()
    assert len(calls) == 3
    assert_same(x.grad, slope_of_sin_exp())


# --- 23, 24: nothing recorded, and identity ---


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_a_call_where_nothing_is_recorded(grad_mode):
    """23: it is the function itself; a part of it without recording is as in plain."""
    body, calls = counted(lambda x: x.sin())
    x = leaf(3)
    with grad_mode():
        out = remat(body)(x)
    assert (out.requires_grad, len(calls)) == (False, 1)

    def partly(x):
        with torch.no_grad():
            scale = body(x)
        return scale * x.exp()

    assert_same_gradients(remat(partly), partly, x)
    assert len(calls) == 1 + 3


def test_what_is_unpacked_is_the_original_object():
    """24: an input that needs no grad, seen by saved-tensor hooks around the call.

    A leaf that does is kept as it is.
    """
    packed, unpacked = [], []

    def noted(seen):
        return lambda t: seen.append(t) or t

    body, calls = counted(lambda x, n: (x * n).sin())
    x, n = leaf(3), points(3)
    with saved_tensors_hooks(noted(packed), noted(unpacked)):
        out = remat(body)(x, n)
    assert [t is n for t in packed] == [True]
    out.sum().backward()
    assert len(calls) == 2
    assert [t is n for t in unpacked] == [True]
    assert_same(x.grad, n * (n * n).cos())


def test_the_body_sees_the_original_object_where_it_needs_no_grad():
    """24: in the forward and in the recompute."""
    seen = Evaluations()

    def f(x, n):
        seen.note(n.data_ptr())
        return (x * n).sin()

    n, x = points(3, 1), leaf(3, 1)
    remat(f)(x, n).sum().backward()
    assert [*seen] == [n.data_ptr()] * 2
    assert_same(x.grad, n * (n * n).cos())


# --- 25, 26: gradients, hooks, structures, offloading ---


@compared(evaluations=2)
def test_a_parameter_used_inside_and_outside_fires_its_hook_once(wrap, counting):
    """25."""
    weight, fired = nn.Parameter(points(3)), []
    weight.register_hook(lambda g: fired.append(g.clone()))
    body = counting(lambda x: (x * weight).sin() * weight)
    (wrap(body)(points(3)) + weight.exp()).sum().backward()
    (once,) = fired
    return once, weight.grad


@compared(evaluations=4, plain=2)
def test_save_on_cpu_around_a_call(wrap, counting):
    """26: the inputs go through it; the gradients are right."""
    body = counting(lambda x, w: (x @ w).tanh())
    x, w = leaf(2, 3), leaf(3, 3)
    with save_on_cpu():
        wrap(lambda x, w: body(body(x, w), w))(x, w).sum().backward()
    return x.grad, w.grad


@compared(evaluations=2)
def test_save_on_cpu_inside_a_call(wrap, counting):
    """26: around a part of it."""
    tanh = counting(torch.tanh)

    def inside(x, w):
        with save_on_cpu():
            y = tanh(x @ w)
        return y.sin()

    x, w = leaf(2, 3), leaf(3, 3)
    wrap(inside)(x, w).sum().backward()
    return x.grad, w.grad


# --- 27, 28: nesting, orders, hooks ---


# What is applied, from the outside in: c is remat, g a derivative.
MIXES = ["c", "cg", "gc", "gcg", "cgc", "ggc", "cgg", "gcgc", "cgcgc", "gggc"]


@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_of_gradients_and_remat(mix):
    """27: to third order; all of it is freed by reference counting."""
    refs = Evaluations()

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
        got = run(remat)
        made = [*refs]
        left = [ref for ref in made if ref() is not None]
    finally:
        gc.enable()
    assert_same(got, run(plainly))
    assert left == []
    assert len(made) > len(refs)


@compared(evaluations=3)
def test_hooks_on_the_graph_around_fire_once(wrap, counting):
    """28: on an argument, on an output, and on a node."""
    fired, body, x = [], counting(sin_exp), leaf(3)
    y = x * 1.0
    y.register_hook(lambda g: fired.append("y"))
    y.grad_fn.register_hook(lambda *_: fired.append("node"))
    out = wrap(lambda y: wrap(body)(y).cos())(y)
    out.register_hook(lambda g: fired.append("out"))
    out.sum().backward()
    assert fired == ["out", "y", "node"]
    return x.grad


@compared(sin=2)
def test_a_hook_inside_fires_once(wrap, counting):
    """28: on a value made inside, as often as a gradient passes there."""
    fired, x = [], leaf(3)

    def f(x):
        y = x.sin()
        y.register_hook(lambda g: fired.append(g.clone()) or 3 * g)
        return y.exp()

    wrap(f)(x).sum().backward()
    (once,) = fired
    return once, x.grad


@compared(sin=2)
def test_a_backward_started_inside_the_body(wrap, counting):
    """28: `backward` within the function, on tensors of its own."""

    def f(x):
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            own.sin().sum().backward()
        return own.grad * x.exp()

    x = leaf(3)
    wrap(f)(x).sum().backward()
    return x.grad
