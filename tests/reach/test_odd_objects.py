"""Odd objects that a call reaches are no obstacle, and long ones are not walked."""

import collections
import threading

import pytest
import torch
from support.runs import assert_replayed, gradients, leaf
from support.tables import rows
from support.zoo import ops_of
from torch import nn

from remat import RecomputeError, remat
from remat._reach import walk as _walk
from remat._reach.names import NamedSearch
from remat.testing import count_ops


class Proxy:
    """As web frameworks have them: outside of a request everything raises."""

    @property
    def __class__(self):
        raise RuntimeError("outside of a request")

    def __getattr__(self, name):
        raise RuntimeError("outside of a request")


class Slotted:
    __slots__ = ("set", "unset")

    def __init__(self):
        self.set = 1

    def __getattr__(self, name):
        return getattr(self.unset, name)


class Permissive(type):
    def __getattr__(cls, name):
        return 3


class HasPermissiveClass(metaclass=Permissive):
    pass


class PretendsNoDict:
    @property
    def __dict__(self):
        raise RuntimeError("outside of a request")


class FromNowhere:
    __module__ = None


ODD = {
    "namespace of operators": lambda: torch.ops.aten,
    "all operators": lambda: torch.ops,
    "operator": lambda: torch.ops.aten.sin,
    "overload": lambda: torch.ops.aten.sin.default,
    "proxy": lambda: Proxy(),
    "slots": lambda: Slotted(),
    "metaclass": lambda: HasPermissiveClass(),
    "no dict": lambda: PretendsNoDict(),
    "no module": lambda: FromNowhere(),
    "lock": lambda: threading.Lock(),
    "class": lambda: Slotted,
}


@rows("make", ODD)
def test_an_odd_object_is_no_obstacle(make):
    odd = make()

    def fn(x):
        assert odd is not None
        return torch.ops.aten.exp(x)

    assert_replayed(gradients(fn, leaf(3)), exp=2)


# --- What is long ---


LONG = {
    "list": list(range(10**5)),
    "dict": dict.fromkeys(range(10**5), "word"),
    "deque": collections.deque(range(10**5)),
    "counter": collections.Counter(range(10**5)),
}


@rows("words", LONG)
def test_a_long_list_of_words_is_not_walked_one_by_one(words, monkeypatch):
    visited, reach = [], _walk.Walk._reach
    monkeypatch.setattr(
        _walk.Walk,
        "_reach",
        lambda self, value, **how: visited.append(value) or reach(self, value, **how),
    )
    assert_replayed(gradients(lambda x: x.exp() * len(words), leaf(3)), exp=2)
    assert any(value is words for value in visited)
    assert len(visited) < 10


def test_names_are_not_looked_for_in_hooks():
    """The hook leads to fifty layers, and the call is about one."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50))).double()
    model[0].register_forward_hook(lambda *_: model and None)
    search = NamedSearch()
    search.walk(model[0])
    assert len(search.tensors) == 2
    with count_ops() as ops:
        remat(model[0])(torch.randn(3, 4).double()).tanh().sum().backward()
    assert ops["addmm"] == 1  # its graph saves inputs only


def test_a_container_of_very_many_entries_that_changes_is_an_error_that_names_it():
    table = {n: n for n in range(5000)}
    fn = lambda x: (x * table[1]).sin().exp()
    x = leaf(3)
    assert ops_of(lambda: remat(fn)(x).sum().backward())["sin"] == 2
    y = remat(fn)(x)
    table[1] = 2
    with pytest.raises(RecomputeError, match=r"`table` changed since the call"):
        y.sum().backward()


def test_entries_of_a_large_container_that_use_the_memory_of_others_are_told_apart():
    table = [float(n) + 0.5 for n in range(2000)]
    y = remat(lambda x: (x * table[5]).sin().exp())(leaf(3))
    before = id(table[5])
    for n in range(100):
        table[5] = n + 0.25
        if id(table[5]) == before:
            break
    with pytest.raises(RecomputeError, match=r"`table` changed since the call"):
        y.sum().backward()
