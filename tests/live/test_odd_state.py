"""Objects in C, iterators that are more than that, NumPy's arrays, hooks of leaves."""

import csv
import sqlite3
import types
import weakref

import numpy as np
import pytest
import torch
from support.tables import rows
from support.zoo import ops_of
from torch.utils.checkpoint import checkpoint

from remat import RecomputeError, policies, remat
from remat.testing import assert_same


def curve(x, factor):
    """Needs a recompute, and a right one: its slope depends on the factor."""
    return (x * factor).sin().exp()


class Held:
    """What a program refers to weakly."""

    factor = 3

    def apply(self, x):
        return curve(x, self.factor)


HELD = Held()


class Numbers:
    """An iterator without a dict."""

    __slots__ = ("n",)

    def __init__(self):
        self.n = 1

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return self.n


def proxy():
    held = weakref.proxy(HELD)
    return lambda x: curve(x, held.factor)


def weak_method():
    method = weakref.WeakMethod(HELD.apply)
    return lambda x: method()(x)


def slots_of_an_iterator():
    numbers = Numbers()
    return lambda x: curve(x, numbers.n)


def reader_of_a_file():
    reader = csv.reader(["a", "b"])
    return lambda x: curve(x, 2 + reader.line_num)


def cursor_of_a_database():
    connection = sqlite3.connect(":memory:")
    cursor = connection.cursor()
    cursor.execute("create table calls (n)")

    def fn(x):
        cursor.execute("insert into calls values (1)")
        return curve(x, 2)

    weakref.finalize(fn, connection.close)
    return fn


def class_of_an_iterator():
    numbers = map(int, "123")
    return lambda x: curve(x, 2 if isinstance(numbers, map) else 3)


def hook_set_on_a_leaf_once():
    w = torch.full((2,), 0.7, requires_grad=True)
    held = types.SimpleNamespace(factor=1)

    def fn(x):
        if not w._backward_hooks:
            w.register_hook(lambda g: g * 2)
            held.factor += 1
        return curve(x * w, held.factor)

    return fn


# As with torch's checkpoint. What follows it gets wrong.
AS_TORCH = (
    *(proxy, weak_method, slots_of_an_iterator, reader_of_a_file),
    *(cursor_of_a_database, class_of_an_iterator, hook_set_on_a_leaf_once),
)


def iterator_of_the_users():
    numbers = Numbers()
    return lambda x: curve(x, next(numbers))


def record_array():
    held = np.recarray(2, dtype=[("n", "f8")])
    held.n = 1.0

    def fn(x):
        held.n[0] += 1
        return curve(x, float(held.n.sum()))

    return fn


def matrix():
    held = np.ones((2, 2)).view(np.matrix)

    def fn(x):
        held[0, 0] += 1
        return curve(x, float(held.sum()))

    return fn


CONFIGURATIONS = {
    "default": remat,
    "prune": lambda fn: remat(fn, prune=True),
    "dots": lambda fn: remat(fn, policy=policies.dots_saveable),
}


def gradient(fn):
    x = torch.linspace(0.1, 0.4, 2, requires_grad=True)
    ops = ops_of(lambda: fn(x).sum().backward())
    return x.grad, ops["sin"]


@rows("wrap", CONFIGURATIONS)
@pytest.mark.parametrize(
    "program", [*AS_TORCH, iterator_of_the_users, record_array, matrix]
)
def test_the_gradient_is_that_of_plain(program, wrap):
    expected, once = gradient(program())
    assert once == 1
    found, evaluations = gradient(wrap(program()))
    assert evaluations == 2
    assert_same(found, expected)


@pytest.mark.parametrize("program", AS_TORCH)
def test_torchs_checkpoint_is_right_there(program):
    fn = program()
    found, _ = gradient(lambda x: checkpoint(fn, x, use_reentrant=False))
    assert_same(found, gradient(program())[0])


@rows("wrap", CONFIGURATIONS)
@pytest.mark.parametrize("read", [next, list, iter, lambda rows: rows.__next__()])
def test_a_reader_that_a_recompute_reads_is_an_error(read, wrap):
    rows = csv.reader(["1", "2", "3"])
    fn = lambda x: curve(x, len([*read(rows)]))
    with pytest.raises(RecomputeError, match="reads the reader `rows`"):
        gradient(wrap(fn))


def test_a_proxy_may_be_an_argument():
    held = weakref.proxy(HELD)
    found, evaluations = gradient(lambda x: remat(lambda x, h: h.apply(x))(x, held))
    assert evaluations == 2
    assert_same(found, gradient(HELD.apply)[0])


def test_a_leaf_has_its_hooks_after_a_recompute():
    w, calls = torch.ones(2, requires_grad=True), []

    def fn(x):
        w.register_hook(calls.append)
        return curve(x * w, 2)

    _, evaluations = gradient(remat(fn))
    assert evaluations == 2
    assert len(calls) == 1
    assert len(w._backward_hooks) == 1


def test_a_buffer_that_is_resized_inside_has_its_size_again():
    held = torch.zeros(4)

    def fn(x):
        held.resize_(8).fill_(2)
        y = curve(x, held.sum())
        held.resize_(4)
        return y

    found, evaluations = gradient(lambda x: fn(x) + remat(fn)(x))
    assert evaluations == 3
    expected, _ = gradient(lambda x: fn(x) + fn(x))
    assert_same(found, expected)
    assert held.shape == (4,)


def test_arrays_of_objects_are_read_as_they_are():
    held = np.array([1, [2]], dtype=object)

    def fn(x):
        held[0] = 3
        return curve(x, held[0])

    found, evaluations = gradient(remat(fn))
    assert evaluations == 2
    assert_same(found, gradient(lambda x: curve(x, 3))[0])
