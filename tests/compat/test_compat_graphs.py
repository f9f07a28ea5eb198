"""`compat.checkpoint`: graphs, hooks and nesting. Items 15, 20 to 28 and 30.

See `test_compat_calls.py` for the numbers.
"""

import functools
import gc
import weakref
from collections import OrderedDict

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
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from remat import compat
from remat.testing import assert_same, assert_same_gradients, count_ops


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
@pytest.mark.parametrize("wanted", [True, False])
def test_inputs_that_need_grad_and_that_do_not(checkpoint, wanted):
    """21: keyword arguments too."""
    body, calls = counted(lambda x, *, scale, power=2: (x.sin() * scale) ** power)
    x = points(3).requires_grad_(wanted)
    wrap = wrapped(checkpoint)
    assert_same_gradients(wrap(body), body, x, scale=leaf(3), power=3)
    assert len(calls) == 3


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


# --- 23, 24: nothing recorded, and identity ---


@both
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_a_call_where_nothing_is_recorded(checkpoint, grad_mode):
    """23: it is the function itself; a part of it without recording is as in plain."""
    body, calls = counted(lambda x: x.sin())
    x = leaf(3)
    with grad_mode():
        out = checkpoint(body, x)
    assert (out.requires_grad, len(calls)) == (False, 1)

    def partly(x):
        with torch.no_grad():
            scale = body(x)
        return scale * x.exp()

    assert_same_gradients(wrapped(checkpoint)(partly), partly, x)
    assert len(calls) == 1 + 3


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
    assert any(t is n for t in unpacked)
    assert_same(x.grad, n * (n * n).cos())


# --- 25, 26: gradients, hooks, structures, offloading ---


@both
def test_a_parameter_used_inside_and_outside_fires_its_hook_once(checkpoint):
    """25."""

    def program(wrap, counting):
        weight, fired = nn.Parameter(points(3)), []
        weight.register_hook(lambda g: fired.append(g.clone()))
        body = counting(lambda x: (x * weight).sin() * weight)
        (wrap(body)(points(3)) + weight.exp()).sum().backward()
        (once,) = fired
        return once, weight.grad

    assert_compared(program, 2, wrap=wrapped(checkpoint))


@both
def test_dictionaries_in_and_out(checkpoint):
    """25: ordered ones keep their order, outputs their structure."""
    seen = Evaluations()

    def f(named):
        seen.note(list(named))
        out = OrderedDict(
            (k, v.sin() * (i + 1)) for i, (k, v) in enumerate(named.items())
        )
        return {"out": out, "sum": sum(out.values()).exp()}

    wrap = wrapped(checkpoint)
    assert_same_gradients(wrap(f), f, OrderedDict(b=leaf(3), a=leaf(3)))
    assert [*seen] == [["b", "a"]] * 3
    assert list(wrap(f)(OrderedDict(b=leaf(3), a=leaf(3)))["out"]) == ["b", "a"]


@both
def test_replicas_in_threads(checkpoint):
    """25: as `DataParallel` calls its replicas, each in a thread of its own."""
    body, calls = counted(sin_exp)
    xs = [leaf(3) for _ in range(4)]

    def replica(_, x):
        return checkpoint(body, x)

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        outs = [*pool.map(replica, range(4), xs)]
    sum(outs).sum().backward()
    assert len(calls) == 8
    for x in xs:
        assert_same(x.grad, slope_of_sin_exp())


@both
def test_save_on_cpu_around_a_call(checkpoint):
    """26: the inputs go through it; the gradients are right."""

    def program(wrap, counting):
        body = counting(lambda x, w: (x @ w).tanh())
        x, w = leaf(2, 3), leaf(3, 3)
        with save_on_cpu():
            wrap(lambda x, w: body(body(x, w), w))(x, w).sum().backward()
        return x.grad, w.grad

    assert_compared(program, 4, plain=2, wrap=wrapped(checkpoint))


@both
def test_save_on_cpu_inside_a_call(checkpoint):
    """26: around a part of it."""

    def program(wrap, counting):
        tanh = counting(torch.tanh)

        def inside(x, w):
            with save_on_cpu():
                y = tanh(x @ w)
            return y.sin()

        x, w = leaf(2, 3), leaf(3, 3)
        wrap(inside)(x, w).sum().backward()
        return x.grad, w.grad

    assert_compared(program, 2, wrap=wrapped(checkpoint))


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


@both
def test_two_children_in_one_parent(checkpoint):
    """28: with arguments that are no tensors, and keywords with gradients."""

    def program(wrap, counting):
        left = counting(lambda x, flag, *, scale: x.sin() * scale if flag else x)
        right = counting(lambda x, name: {"name": name, "y": x.exp()})

        def parent(x, *, scale):
            a = wrap(left)(x, True, scale=scale)
            b = wrap(right)(a, "b")
            assert b["name"] == "b"
            return a * b["y"], b["name"]

        x, scale = leaf(3), leaf(3)
        out, name = wrap(parent)(x, scale=scale)
        assert name == "b"
        return torch.autograd.grad(out.sum(), (x, scale))

    wrap = wrapped(checkpoint)
    assert_compared(program, 6, plain=2, reassociated=True, wrap=wrap)


@both
def test_hooks_on_the_graph_around_fire_once(checkpoint):
    """28: on an argument, on an output, and on a node."""

    def program(wrap, counting):
        fired, body, x = [], counting(sin_exp), leaf(3)
        y = x * 1.0
        y.register_hook(lambda g: fired.append("y"))
        y.grad_fn.register_hook(lambda *_: fired.append("node"))
        out = wrap(lambda y: wrap(body)(y).cos())(y)
        out.register_hook(lambda g: fired.append("out"))
        out.sum().backward()
        assert fired == ["out", "y", "node"]
        return x.grad

    assert_compared(program, 3, wrap=wrapped(checkpoint))


@both
def test_a_backward_started_by_a_hook(checkpoint):
    """28: of another checkpoint, while the first one's backward runs."""

    def program(wrap, counting):
        inner, x = leaf(3), leaf(3)
        body = counting(sin_exp)
        other = wrap(body)(inner).sum()
        out = wrap(body)(x)
        out.register_hook(lambda g: other.backward())
        out.sum().backward()
        return inner.grad, x.grad

    assert_compared(program, 4, plain=2, wrap=wrapped(checkpoint))


# --- 30: what needs no recompute ---


@both
def test_a_function_that_saves_only_its_input(checkpoint):
    """30: the op does not run again."""
    x = leaf(3)
    with count_ops() as ops:
        (checkpoint(torch.sin, x) + checkpoint(torch.exp, x)).sum().backward()
    assert (ops["sin"], ops["cos"], ops["exp"]) == (1, 1, 2)
    assert_same(x.grad, points(3).cos() + points(3).exp())
