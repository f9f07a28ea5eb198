"""Arguments of every layout, in calls one after the other."""

import threading
import weakref

import pytest
import torch
from support.zoo import leaves_of, make

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


def gradients(fn, *args, **kwargs):
    leaves = [
        t
        for t in torch.utils._pytree.tree_leaves((args, kwargs))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    return torch.autograd.grad(fn(*args, **kwargs), leaves)


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


@pytest.mark.parametrize("prune", [False, True])
def test_calls_in_a_row_that_are_built_otherwise(prune):
    fn = remat(weigh, prune=prune)
    for args, kwargs in calls() + calls()[::-1]:
        with count_ops() as once:
            expected = gradients(weigh, *args, **kwargs)
        with count_ops() as twice:
            found = gradients(fn, *args, **kwargs)
        assert twice["mul"] > once["mul"]
        assert_same(found, expected)


def test_containers_of_containers_in_another_order():
    fn = remat(weigh)
    for order in "ab", "ba", "ab":
        w, x = leaves_of(W, X)
        named = {"a": w, "b": x}
        nested = {"first": {k: named[k] for k in order}, "second": w}
        with count_ops() as once:
            expected = gradients(weigh, nested)
        with count_ops() as twice:
            found = gradients(fn, nested)
        assert twice["mul"] > once["mul"]
        assert_same(found, expected)


def grow(params):
    params["c"] = params["a"].exp()
    return params["c"].sin().sum()


def test_a_container_is_changed_once_and_another_one_is_passed_next():
    fn = remat(grow)
    for _ in range(2):
        (w,) = leaves_of(W)
        params = {"a": w}
        with count_ops() as ops:
            loss = fn(params) + params["c"].square().sum()
            (found,) = torch.autograd.grad(loss, w)
        assert [*params] == ["a", "c"]
        params = {"a": w}
        loss = grow(params) + params["c"].square().sum()
        assert_same(found, torch.autograd.grad(loss, w)[0])
        assert ops["exp"] == 2


def test_threads_that_call_one_function_on_other_layouts():
    fn, failures = remat(weigh), []

    def repeat(call):
        args, kwargs = call
        with count_ops() as once:
            expected = gradients(weigh, *args, **kwargs)
        for _ in range(50):
            with count_ops() as twice:
                found = gradients(fn, *args, **kwargs)
            same = all(map(torch.equal, found, expected))
            if not same or twice["mul"] <= once["mul"]:
                failures.append(call)

    threads = [threading.Thread(target=repeat, args=(call,)) for call in calls()[:6]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_keys_that_are_no_names_are_not_held():
    class Key:
        pass

    key = Key()
    alive = weakref.ref(key)
    (w,) = leaves_of(W)
    with count_ops() as once:
        gradients(weigh, {key: w})
    with count_ops() as twice:
        gradients(remat(weigh), {key: w})
    assert twice["mul"] > once["mul"]
    del key
    assert alive() is None
