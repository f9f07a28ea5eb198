"""Streams that are objects are replayed, wherever they are held."""

import random

import numpy as np
import pytest
import torch
from support.holders import HOLDERS_OF_STREAMS, WAYS_OF_STREAMS, use
from support.runs import CONFIGURATIONS, assert_replayed, leaf, replayed
from support.tables import crossed, rows
from support.zoo import Evaluations
from torch.func import grad, vmap

from remat import remat
from remat.testing import assert_same


STREAMS = {
    "torch.Generator": lambda: torch.Generator().manual_seed(5),
    "random.Random": lambda: random.Random(5),
    "numpy Generator": lambda: np.random.default_rng(5),
    "numpy RandomState": lambda: np.random.RandomState(5),
}
streams = pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)


def next_of(stream):
    return use(torch.ones(64), stream)


@crossed("way, make, ours", WAYS_OF_STREAMS, STREAMS, CONFIGURATIONS)
def test_a_stream_is_replayed_for_each_call_wherever_it_is_held(way, make, ours):
    def program(wrap):
        stream = STREAMS[make]()
        fn = WAYS_OF_STREAMS[way](wrap, stream)
        first, second = fn(x).sum(), fn(x).sum()
        drawn = next_of(stream)
        found = [
            torch.autograd.grad(y, x, retain_graph=True)
            for y in (second, first, second)
        ]
        return found, drawn, next_of(stream)

    x = leaf()
    assert_replayed(program, wrap=CONFIGURATIONS[ours], sin=2 + 3 + 2)


@crossed("way, make", WAYS_OF_STREAMS, STREAMS)
@replayed(sin=2 + 1)
def test_a_stream_is_replayed_under_vmap_of_grad_wherever_it_is_held(wrap, way, make):
    xs = torch.randn(3, 64)
    stream = STREAMS[make]()
    fn = WAYS_OF_STREAMS[way](wrap, stream)
    found = vmap(grad(lambda x: fn(x).sum()), randomness="different")(xs)
    return found, next_of(stream)


@streams
def test_a_failed_recomputation_leaves_the_stream_alone(make):
    x, stream, plain = leaf(), make(), make()
    calls = Evaluations()
    read = HOLDERS_OF_STREAMS["iterator"](stream)

    def fn(x):
        calls.note(None)
        y = read(x)
        if len(calls) == 2:
            raise ValueError("the second time")
        return y.exp()

    y = remat(fn)(x)
    with pytest.raises(ValueError, match="the second time"):
        y.sum().backward()
    use(x, plain)
    assert_same(next_of(stream), next_of(plain))


@pytest.mark.parametrize("method", ["random", "uniform", "normal"])
@replayed(sin=2)
def test_a_bound_builtin_method_leads_to_its_stream(wrap, method):
    x = leaf()
    draw = getattr(np.random.default_rng(5), method)
    return torch.autograd.grad(wrap(lambda x: (x.sin() * draw()).exp())(x).sum(), x)


# --- Streams that the function puts back or sets itself -----------------------------


def drawn(x):
    return (x * torch.rand(64)).sin().exp()


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return drawn(x)


@torch.random.fork_rng(devices=[])
def forked_by_decorator(x):
    return drawn(x)


def put_back(x):
    state = random.getstate()
    y = (x * random.random()).sin().exp()
    random.setstate(state)
    return y


def derived(x):
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return (x * torch.rand(64, generator=generator)).sin().exp()


def reseeded(x):
    torch.manual_seed(0)
    return drawn(x)


RESETS = {
    "fork": forked,
    "fork by a decorator": forked_by_decorator,
    "put back": put_back,
    "derived": derived,
    "seeded": reseeded,
}


@rows("fn", RESETS)
@replayed(sin=3 * (3 + 1))
def test_a_stream_that_the_function_puts_back_is_replayed(wrap, fn):
    x = leaf()
    found = []
    # The last of several: a first call may leave traces in memory.
    for _ in range(3):
        ys = [wrap(fn)(x) for _ in range(3)]
        torch.rand(3)
        random.random()
        found += torch.autograd.grad(ys[-1].sum(), x)
    return found
