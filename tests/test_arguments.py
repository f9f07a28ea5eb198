"""The layout of arguments is kept for the next call, which may be built otherwise."""

import threading
import weakref

import pytest
import torch
from helpers import leaves_of, make

from remat import _arguments, remat
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


def test_what_is_built_alike_is_not_flattened_again(monkeypatch):
    flattened = []

    def counted(*call):
        flattened.append(call)
        return flatten(*call)

    flatten = _arguments.flatten_arguments
    monkeypatch.setattr("remat._arguments.flatten_arguments", counted)
    fn = remat(weigh)
    for n in (1, 1, 2, 2, 3):
        w, x = leaves_of(W, X)
        order = {"a": w, "b": x} if n < 2 else {"b": x, "a": w}
        with count_ops() as ops:
            gradients(fn, order, W, power=n)
        assert ops["sin"] == 2 * 4
        assert len(flattened) == (1 if n < 2 else 2)


def test_containers_of_containers_are_flattened_each_time():
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


def test_a_changed_container_is_refused_with_the_layout_kept():
    @remat
    def grow(params):
        params["c"] = params["a"].exp()
        return params["c"].sum()

    for _ in range(2):
        (w,) = leaves_of(W)
        with pytest.raises(RuntimeError, match="changed a container"):
            grow({"a": w})


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
    fn, (w,) = remat(weigh), leaves_of(W)
    with count_ops() as ops:
        gradients(fn, {key: w})
    assert ops["sin"] == 2
    del key
    assert alive() is None
