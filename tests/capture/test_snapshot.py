"""A recompute reads what the call read, and what it changes is dropped.

The forward runs on the user's own objects. A recompute runs on a snapshot of the call:
whatever the forward changed, and whatever was changed since, is as it was, or it is an
error that names it.
"""

import argparse
import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.as_plain import leaf
from support.runs import assert_replayed
from support.zoo import make
from torch import nn

from remat import RecomputeError, policies, remat


# --- State that the forward changes ---


class Cache:
    """Grows at every use, as those of language models do, and is empty at first."""

    def __init__(self):
        self.keys = None

    def update(self, key):
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        return self.keys


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_cache_that_is_empty_at_the_call(policy):
    def program(wrap):
        layer, cache = nn.Linear(4, 4).double(), Cache()

        def attend(x, cache):
            keys = cache.update(layer(x))
            return (x @ keys.T).softmax(-1) @ keys

        call = wrap(attend)
        first = call(leaf(2), cache)
        second = call(leaf(3), cache)
        (first.sum() + second.square().sum()).backward()
        assert cache.keys.shape == (8, 4)
        return cache.keys, [p.grad for p in layer.parameters()]

    def with_policy(fn):
        return remat(fn, policy=policy)

    assert_replayed(program, wrap=with_policy, _softmax=4)


def test_a_value_with_a_graph_that_is_memoised():
    def program(wrap):
        w, memo = leaf(1), {}

        def scale(w):
            if "scale" not in memo:
                memo["scale"] = w.exp().cos()
            return memo["scale"]

        def fn(x):
            return (x * scale(w)).tanh()

        call = wrap(fn)
        (call(make(4, 4, seed=2)) + call(make(4, 4, seed=3))).sum().backward()
        return w.grad, memo["scale"].detach()

    assert_replayed(program, tanh=4)


# --- Containers and variables ---


@dataclass
class Config:
    steps: list = field(default_factory=list)


def add_one(array):
    array += 1


# A container, how the function and the caller change it, and what is read of it.
KINDS = {
    "list": (lambda: [1], lambda c: c.append(2), len),
    "dict": (lambda: {"a": 1}, lambda c: c.update(b=2), len),
    "ordered dict": (lambda: OrderedDict(a=1), lambda c: c.update(b=2), len),
    "default dict": (lambda: defaultdict(list), lambda c: c["new"].append(2), len),
    "set": (lambda: {1}, lambda c: c.add(2), len),
    "deque": (lambda: deque([1]), lambda c: c.appendleft(2), len),
    "namespace": (
        lambda: argparse.Namespace(n=1),
        lambda c: setattr(c, "n", c.n + 1),
        lambda c: c.n,
    ),
    "dataclass": (
        lambda: Config([1]),
        lambda c: c.steps.append(2),
        lambda c: len(c.steps),
    ),
    "array": (lambda: np.ones(1), add_one, lambda c: int(c[0])),
    "bytes": (lambda: bytearray(b"1"), lambda c: c.append(3), len),
}


@pytest.mark.parametrize(("make", "change", "read"), KINDS.values(), ids=KINDS.keys())
def test_a_container_of_any_kind_in_an_argument_is_changed_once(make, change, read):
    def program(wrap):
        x, held = leaf(), {"c": make()}

        def fn(x, held):
            change(held["c"])
            return (x * read(held["c"])).sin().exp()

        y = wrap(fn)(x, held)
        after_the_forward = read(held["c"])
        change(held["c"])
        y.sum().backward()
        return x.grad, after_the_forward, read(held["c"])

    assert_replayed(program, sin=2)


def test_variables_that_functions_share_and_globals():
    def program(wrap):
        x, scale, calls = leaf(), 2.0, 0

        def bump():
            nonlocal calls
            calls += 1
            return calls

        def fn(x):
            nonlocal scale
            scale = scale + bump()
            GLOBAL["n"] += 1
            return (x * scale * GLOBAL["n"]).sin().exp()

        GLOBAL["n"] = 0
        y = wrap(fn)(x)
        scale = 100.0
        GLOBAL["n"] = 50
        y.sum().backward()
        assert (scale, calls, GLOBAL["n"]) == (100.0, 1, 50)
        return x.grad

    assert_replayed(program, sin=2)


GLOBAL = {"n": 0}


# --- Iterators, identities, attributes and tables ---


def test_an_iterator_that_the_forward_advances():
    def program(wrap):
        x, scales = leaf(), iter([2.0, 3.0, 5.0])

        def fn(x):
            return (x * next(scales)).sin()

        call = wrap(fn)
        (call(x) + call(x)).sum().backward()
        assert next(scales) == 5.0
        return x.grad

    assert_replayed(program, evaluations=4)


def test_a_generator_that_the_forward_advances_is_an_error_that_names_it():
    numbers = (n for n in [2.0, 3.0, 5.0])

    def fn(x):
        return (x * next(numbers)).sin()

    y = remat(fn)(leaf())
    with pytest.raises(RecomputeError, match="numbers"):
        y.sum().backward()


def test_state_that_is_kept_by_the_identity_of_a_module():
    def program(wrap):
        model, x = nn.Linear(4, 4).double(), leaf(2)
        table = weakref.WeakKeyDictionary({model: 3.0})
        by_id = {id(model): 2.0}

        def fn(x):
            return (model(x) * table[model] * by_id[id(model)]).sin().exp()

        wrap(fn)(x).sum().backward()
        return x.grad, model.weight.grad

    assert_replayed(program, sin=2)


def test_attributes_set_on_a_tensor_that_is_passed():
    def program(wrap):
        x, mask = leaf().sin(), make(4, 4, seed=2)
        x.retain_grad()
        mask.scale = 2

        def fn(x, mask):
            x.seen = getattr(x, "seen", 0) + 1
            mask.scale += 1
            return (x * mask * mask.scale * x.seen).sin()

        y = wrap(fn)(x, mask)
        mask.scale = 50
        y.sum().backward()
        assert (x.seen, mask.scale) == (1, 50)
        return x.grad

    assert_replayed(program, evaluations=2)


@functools.lru_cache(None)
def positions(n):
    return torch.arange(float(n)).double().cos()


OPTIONS = [{}, {"policy": policies.dots_saveable}, {"prune": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "dots", "prune"])
def test_a_table_that_a_cache_of_the_standard_library_holds(options):
    def program(wrap):
        positions.cache_clear()
        w, x = leaf(1), leaf(2)

        def fn(w, x):
            return ((x @ w).tanh() * positions(4)).sin()

        call = wrap(fn)
        for _ in range(3):
            call(w, x).sum().backward()
        return w.grad, x.grad

    def with_options(fn):
        return remat(fn, **options)

    # With a record, the first recompute finds the table, which does not fit, and is
    # run again as it is.
    count = 7 if options else 6
    assert_replayed(program, wrap=with_options, tanh=(3, count))
