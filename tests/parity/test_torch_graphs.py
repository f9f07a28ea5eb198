"""What PyTorch's tests of `torch.utils.checkpoint` say of calls, graphs and hooks.

Numbers are items of the survey of those tests. Most of them are in `tests/compat`,
which runs each with `compat.checkpoint` and with torch's own. Here is the rest.
Left out, because there is nothing in `remat` they could be about: the reentrant
variant (2 in part, 8 in part, 17, 23 in part), the argument checks of
`checkpoint_sequential` (4), `preserve_rng_state=False` (6: there is no way to switch
replay off), `context_fn` (16), execution groups (18), messages of `debug=` (19 in
part), a switch for early stop (29: there is none), and `DataParallel` (25 in part),
which needs several devices.
"""

import weakref

import pytest
import torch
from support.checkpoints import sin_exp, slope_of_sin_exp
from support.compared import compared, leaf, points
from support.zoo import Evaluations, counted

from remat import remat
from remat.testing import assert_same


# --- 20-22: reading the graph, errors ---


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


# --- 27, 28: nesting, orders, hooks ---


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


# --- 9: memory during the backward ---


def living(refs):
    """How many of the objects that were noted are alive."""
    taken = [*refs]
    for ref in taken:
        refs.note(ref)
    return sum(ref() is not None for ref in taken)


def test_inputs_are_freed_as_the_backward_proceeds():
    """9: after a block's backward its input is gone, unless the graph is retained."""
    refs, alive = Evaluations(), Evaluations()

    def block(x):
        alive.note(living(refs))
        return x.sin().exp()

    def run(**options):
        refs.clear()
        alive.clear()
        out = leaf(3) * 1.0
        for _ in range(4):
            refs.note(weakref.ref(out))
            out = remat(block)(out)
        out.sum().backward(**options)
        return [*alive][4:]

    assert run() == [4, 3, 2, 1]
    assert run(retain_graph=True) == [4, 4, 4, 4]


# --- 10, 11: devices ---


def test_a_draw_is_replayed_where_no_argument_tells_of_its_device():
    """10: no argument at all, only a captured tensor inside an object."""

    class Holder:
        value = None

    holder = Holder()
    holder.value = leaf(50)
    draws = Evaluations()

    def f():
        mask = torch.rand(50)
        draws.note(mask)
        return (holder.value * mask).sin()

    remat(f)().sum().backward()
    first, second = draws
    assert_same(first, second)
    assert_same(holder.value.grad, first * (points(50) * first).cos())
