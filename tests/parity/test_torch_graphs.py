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
from support.compared import leaf, points
from support.zoo import Evaluations, counted
from torch.utils._pytree import tree_leaves

from remat import RecomputeError, remat
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


# --- 19, functions that are not the same when run again ---


CHANGES = {
    "shape": lambda x, again: x.sin().expand(4 if again else 2, 3),
    "dtype": lambda x, again: x.sin().double() if again else x.sin(),
    "fewer outputs": lambda x, again: [x.sin()] if again else [x.sin(), x.cos()],
    "more outputs": lambda x, again: [x.sin()] * (1 + again) + [x.cos()] * again,
    "other structure": lambda x, again: {"b" if again else "a": x.sin()},
    "a tuple for a list": lambda x, again: (x.sin(),) if again else [x.sin()],
    "a tensor for a number": lambda x, again: (x.sin(), x.cos() if again else 1.0),
    "nothing for a tensor": lambda x, again: (x.sin(), None if again else x.cos()),
    "an input for a computed one": lambda x, again: (x.sin(), x if again else x.cos()),
    "requires_grad lost": lambda x, again: (x.detach() if again else x).sin(),
}


@pytest.mark.parametrize("change", [k for k in CHANGES if k != "a tuple for a list"])
def test_one_node_refuses_a_recompute_with_other_outputs(change):
    """Place, shape, dtype and differentiability of the outputs."""
    runs, f = Evaluations(), CHANGES[change]

    def body(x):
        runs.note(None)
        return f(x, len(runs) > 1)

    first = tree_leaves(remat(body, higher_order=True)(leaf(3)))[0]
    with pytest.raises(RecomputeError, match=r"remat: .*recomput") as info:
        first.sum().backward()
    assert len(runs) == 2
    text = "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])
    assert "test_one_node_refuses_a_recompute" in text


@pytest.mark.parametrize("change", [k for k in CHANGES if k != "requires_grad lost"])
def test_a_recompute_may_have_other_outputs_if_it_saves_the_same(change):
    """It stops where the last value was saved that is read."""
    f = CHANGES[change]
    runs = Evaluations()

    def body(x):
        runs.note(None)
        return f(x.cos(), len(runs) > 1)

    x, y = leaf(3), leaf(3)
    first, *_ = tree_leaves(remat(body)(x))
    del _
    first.sum().backward()
    assert len(runs) == 2
    want = tree_leaves(f(y.cos(), False))[0]
    assert_same(x.grad, torch.autograd.grad(want.sum(), y)[0])


def run_with(again, x):
    """A call whose exponential is `again` when it is evaluated again."""
    count = Evaluations()

    def f(x):
        count.note(None)
        y = x.sin()
        return y.exp() if len(count) == 1 else again(y)

    return remat(f)(x).sum(), count


def test_operations_beside_what_is_saved_may_differ():
    """As by torch's checkpoint, a function is judged by what it saves."""
    x = leaf(3)
    out, count = run_with(lambda y: y.clone().exp() * 1.0, x)
    out.backward()
    assert len(count) == 2
    assert_same(x.grad, points(3).cos() * points(3).sin().exp())


def test_other_operations_that_save_are_refused():
    """And by whose operands and results they are."""
    out, count = run_with(torch.sigmoid, leaf(3))
    with pytest.raises(RecomputeError, match=r"of ExpBackward0(?s:.*)of SigmoidBack"):
        out.backward()
    assert len(count) == 2
