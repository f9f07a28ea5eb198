"""Arguments of every layout, in calls one after the other."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.runs import assert_replayed
from support.zoo import leaves_of, make
from torch.utils._pytree import tree_leaves

from remat import remat
from remat.testing import assert_same, count_ops


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


def test_containers_of_containers_in_another_order():
    fn = remat(weigh)
    for order in "ab", "ba", "ab":
        w, x = leaves_of(W, X)
        named = {"a": w, "b": x}
        assert_recomputed(fn, {"first": {k: named[k] for k in order}, "second": w})


def grow(params):
    params["c"] = params["a"].exp()
    return params["c"].sin().sum()


def test_a_container_is_changed_once_and_another_one_is_passed_next():
    def program(wrap):
        fn, found = wrap(grow), []
        for _ in range(2):
            (w,) = leaves_of(W)
            params = {"a": w}
            loss = fn(params) + params["c"].square().sum()
            found += torch.autograd.grad(loss, w)
            assert [*params] == ["a", "c"]
        return found

    assert_replayed(program, exp=2 * 2)


def test_threads_that_call_one_function_on_other_layouts():
    fn = remat(weigh)

    def repeat(call):
        args, kwargs = call
        for _ in range(50):
            assert_recomputed(fn, *args, **kwargs)

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(repeat, calls()[:6])] == [None] * 6


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
