"""State that a function changes is changed once under torch.func, wherever it is.

Under base autograd it is a theme of `support.adversarial`.
"""

import functools
from collections import OrderedDict

import pytest
import torch
from support.zoo import ops_of
from torch.func import grad

from remat import remat
from remat._reach.holders import _dicts
from remat.testing import assert_same, count_ops


# --- What a forward deletes, and new lists -----------------------------------------


def test_an_entry_that_a_forward_deletes_is_gone_for_the_user():
    scale = torch.tensor([2.0, 3.0])
    table = {"scale": scale, "other": scale}
    f = lambda x: (x * table.pop("scale")).sin().sum()
    x = torch.ones(2)
    with count_ops() as ops:
        found = grad(remat(f))(x)
    assert {*table} == {"other"}
    assert torch.equal(found, scale * scale.cos())
    assert ops["mul"] > 2  # one forward, one recompute, and the backward


def test_a_new_list_that_a_forward_assigns_holds_the_users_own_tensors():
    class Holder:
        def __init__(self):
            self.scale, self.seen = torch.tensor([2.0, 3.0]), None

        def __call__(self, x):
            self.seen = [self.scale]
            return (x * self.scale).sin().sum()

    holder = Holder()
    ops = ops_of(lambda: grad(remat(holder))(torch.ones(2)))
    assert holder.seen[0] is holder.scale
    assert ops["mul"] > 2


# --- What a run under torch.func is given in place of containers ---


def func_gradient(fn):
    x = torch.linspace(0.1, 1, 4)
    with count_ops() as ops:
        ours = torch.func.grad(lambda x: remat(fn)(x).sum())(x)
    return ours, torch.func.grad(lambda x: fn(x).sum())(x), ops


class ByAttribute(dict):
    def __getattr__(self, name):
        return self[name]


class Growing(dict):
    def __getattr__(self, name):
        return self.setdefault(name, Growing())


class Configured:
    options = ByAttribute(scale=2.0), Growing(scale=3.0)


def test_a_search_asks_dicts_for_no_attribute():
    def fn(x):
        first, second = Configured.options
        return (x * first["scale"] * second["scale"]).sin().exp()

    ours, plain, ops = func_gradient(fn)
    assert_same(ours, plain)
    assert ops["sin"] == 2
    assert [*Configured.options[1]] == ["scale"]


class Noisy(property):
    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)


def with_attribute(seed):
    fn = functools.partial(torch.sin)
    fn.generator = torch.Generator().manual_seed(seed)
    return fn


class Streams:
    noisy, part = Noisy(1), with_attribute(2)


@pytest.mark.parametrize("name", ["noisy", "part"])
def test_streams_of_attributes_of_what_classes_hold_are_set_back(name):
    generator = vars(Streams)[name].generator
    fn = lambda x: (x * torch.rand(4, generator=generator)).sin().exp()
    before = generator.get_state()
    x = torch.linspace(0.1, 1, 4)
    plain = torch.func.grad(lambda x: fn(x).sum())(x)
    generator.set_state(before)
    found = lambda x: (x * torch.rand(4, generator=vars(Streams)[name].generator)).sin()
    with count_ops() as ops:
        ours = torch.func.grad(lambda x: remat(lambda x: found(x).exp())(x).sum())(x)
    assert_same(ours, plain)
    assert ops["sin"] == 2


def test_a_dict_that_gets_a_key_is_never_empty():
    table = OrderedDict((f"key {i}", 2.0) for i in range(5))
    cleared = []

    class Watched(OrderedDict):
        def clear(self):
            cleared.append(1)
            super().clear()

    watched, how = Watched(table), _dicts(Watched)
    keys, values = how.held(watched)
    how.write(watched, [*keys, "new"], [*values, 3.0])
    assert [*watched.items()][-1] == ("new", 3.0)
    how.write(watched, keys[1:], values[1:])  # one is gone
    assert [*watched] == keys[1:]
    assert not cleared
    how.write(watched, keys[::-1], values)
    assert [*watched] == keys[::-1]
    assert cleared == [1]


def test_a_generator_that_was_at_its_end_gives_nothing_again():
    numbers = (n for n in [2.0])
    assert [*numbers] == [2.0]

    def fn(x):
        for n in numbers:
            x = x * n
        return x.sin().exp()

    ours, plain, ops = func_gradient(fn)
    assert_same(ours, plain)
    assert ops["sin"] == 2


def test_what_a_forward_adds_to_a_set_holds_the_users_tensor():
    pairs, given = set(), []

    def fn(x):
        pairs.add((x, 1))
        return x.sin().sum()

    def outer(x):
        given.append(x)
        return remat(fn)(x)

    torch.func.grad(outer)(torch.ones(3))
    assert [(kept is given[0], n) for kept, n in pairs] == [(True, 1)]
