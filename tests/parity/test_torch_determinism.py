"""What PyTorch's tests say of functions that are not the same when run again.

Item 19 of the survey of those tests: see `test_torch_graphs.py`.
"""

import pytest
import torch
from support.compared import leaf, points
from support.zoo import Evaluations
from torch.utils._pytree import tree_leaves

from remat import RecomputeError, remat
from remat.testing import assert_same


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
