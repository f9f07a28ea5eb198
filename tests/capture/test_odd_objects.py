"""Odd objects that a call reaches are no obstacle, and long ones are not walked."""

import collections
import threading

import pytest
import torch
from support.runs import assert_replayed, gradients, leaf

from remat._capture.search import Search


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


@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_an_odd_object_is_no_obstacle(make):
    odd = make()

    def fn(x):
        assert odd is not None
        return torch.ops.aten.exp(x)

    assert_replayed(gradients(fn, leaf(3)), exp=2)


LONG = {
    "list": list(range(10**5)),
    "dict": dict.fromkeys(range(10**5), "word"),
    "deque": collections.deque(range(10**5)),
    "counter": collections.Counter(range(10**5)),
}


@pytest.mark.parametrize("words", LONG.values(), ids=LONG.keys())
def test_a_long_list_of_words_is_not_walked_one_by_one(words, monkeypatch):
    visited, visit = [], Search.visit
    monkeypatch.setattr(
        Search, "visit", lambda *args: visited.append(args[1]) or visit(*args)
    )
    assert_replayed(gradients(lambda x: x.exp() * len(words), leaf(3)), exp=2)
    assert any(value is words for value in visited)
    assert len(visited) < 10
