"""Arguments and results are pytrees; what is no tensor passes through."""

import weakref

import pytest
import torch
from support.runs import leaf
from support.zoo import Evaluations, leaves_of, make, ops_of
from torch.utils._pytree import tree_leaves

from remat import MutationError, remat
from remat.testing import assert_same, assert_same_gradients, count_ops


def check(fn, *args, **kwargs):
    """Assert that remat equals `fn`, and takes its one sine again in the backward.

    Which the backward has to read: an exponential function of it is recomputed with it.
    """
    ops = ops_of(lambda: assert_same_gradients(remat(fn), fn, *args, **kwargs))
    assert ops["sin"] == 1 + 2


# --- Arguments -------------------------------------------------------------------


def test_what_is_no_tensor_passes_through_in_both_runs():
    seen = Evaluations()

    def fn(x, none, text, number, flag, dtype, *rest, axis, **options):
        seen.note((none, text, number, flag, dtype, rest, axis, options))
        return (x.to(dtype) ** number).sin().exp().sum(axis)

    check(fn, leaf(2, 3), None, "mean", 2, True, torch.float64, (), [1j], axis=1, k=...)
    static = (None, "mean", 2, True, torch.float64, ((), [1j]), 1, {"k": ...})
    seen = [*seen]
    assert seen == [static] * 3
    assert all(s[3] is True for s in seen)


# --- Results ---------------------------------------------------------------------


VIEWS = {
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:, ::2],
    "transpose": lambda x: x.t(),
    "expand": lambda x: x[:, :1].expand(2, 5),
    "view of a view": lambda x: x[1].view(1, -1)[:, :2],
}


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "expand"])
def test_a_view_of_an_input_may_be_changed_in_place(name):
    """Unless the input is to be recomputed from: plain code would not notice."""

    def changed(fn, alone):
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        h = x.clone()
        out, other = fn(h)
        out.mul_(3)
        loss = h.cos().sum() + (0 if alone else other.sum())
        return torch.autograd.grad(loss, x)

    fn = lambda x: (VIEWS[name](x), x.exp().sin().exp())
    assert_same(changed(remat(fn), alone=True), changed(fn, alone=True))
    with pytest.raises(MutationError, match="`x` was changed in place"):
        changed(remat(fn), alone=False)


# --- Arguments of every layout, in calls one after the other ---


W, X = make(3, 3, seed=1), make(3, 3, seed=2)


def weigh(*args, **kwargs):
    """Reads what it is passed in the order in which it is passed."""
    total = torch.zeros((), dtype=torch.double)
    for k, value in enumerate((*args, *kwargs.values())):
        parts = value.items() if type(value) is dict else [(k, value)]
        for j, (_, part) in enumerate(parts):
            factor = 1 + j + 3 * k
            if type(part) in (int, float, bool):
                total = total + (total * part).sin()
            elif type(part) is dict:
                total = total + sum((t * factor).cos().sum() for t in part.values())
            elif type(part) in (list, tuple):
                tensors = [t for t in part if isinstance(t, torch.Tensor)]
                total = total + sum((t * factor).exp().sum() for t in tensors)
            elif part is not None:
                total = total + (part * factor).sin().sum()
    return total


def calls():
    """Calls that differ each from the one before, in one thing."""
    w, x = leaves_of(W, X)
    return [
        (({"a": w, "b": x},), {}),
        (({"a": w, "b": x},), {}),
        (({"b": x, "a": w},), {}),
        (({"b": x, "c": w},), {}),
        (({"b": x},), {}),
        (({"b": x}, w), {}),
        (({"b": x}, None, w), {}),
        (({"b": x}, w, None), {}),
        (({"b": x}, [w, x]), {}),
        (({"b": x}, (w, x)), {}),
        (({"b": x}, (w,)), {}),
        (({"b": x}, {"w": w}), {}),
        (({"b": {"w": w}, "c": x},), {}),
        (({1: w, 2: x},), {}),
        (({2: w, 1: x},), {}),
        ((w, 3), {}),
        ((w, 4), {}),
        ((w, 3.0), {}),
        ((w, True), {}),
        ((w, X), {}),
        ((w, x), {}),
        ((x, w), {}),
        ((w, w), {}),
        ((w, x), {"power": 3}),
        ((w,), {"x": x, "power": 3}),
        ((w,), {"power": 3, "x": x}),
        ((w, X), {"u": x, "v": w}),
        ((w, X), {"v": x, "u": w}),
        ((w, X), {"v": {"a": x}, "u": w}),
        ((torch.nn.Parameter(W), x), {"power": 2}),
        ((torch.nn.Parameter(W), w), {"power": 2}),
    ]


def counted_gradients(fn, args, kwargs):
    """The gradients of the leaves among the arguments, and how many products ran."""
    leaves = [t for t in tree_leaves((args, kwargs)) if is_leaf(t)]
    with count_ops() as ops:
        found = torch.autograd.grad(fn(*args, **kwargs), leaves)
    return found, ops["mul"]


def is_leaf(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


def assert_recomputed(fn, *args, **kwargs):
    expected, once = counted_gradients(weigh, args, kwargs)
    found, twice = counted_gradients(fn, args, kwargs)
    assert_same(found, expected)
    assert twice > once, f"{twice} products, and {once} plain"


@pytest.mark.parametrize("prune", [False, True])
def test_calls_in_a_row_that_are_built_otherwise(prune):
    fn = remat(weigh, prune=prune)
    for args, kwargs in calls() + calls()[::-1]:
        assert_recomputed(fn, *args, **kwargs)


class Key:
    pass


def test_keys_that_are_no_names_are_not_held():
    key = Key()
    alive = weakref.ref(key)
    assert_recomputed(remat(weigh), {key: leaves_of(W)[0]})
    del key
    assert alive() is None


def test_the_comparison_fails_on_an_identity():
    with pytest.raises(AssertionError, match="3 products, and 3 plain"):
        assert_recomputed(weigh, *leaves_of(W))
