"""Draws from the global streams of torch, Python and NumPy are replayed."""

import functools
import gc
import random
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.runs import (
    assert_replayed,
    gradients,
    leaf,
    replayed,
    seed_streams,
    states,
)
from support.tables import rows
from support.zoo import ops_of
from torch import nn
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from remat import RandomnessError, remat
from remat._ambient import streams as _streams
from remat._ambient.draws import Guard
from remat._torch import process as _process
from remat._transform.saved import Saved
from remat.testing import assert_same, count_ops, live_bytes


def noisy(x):
    return nn.functional.dropout(x, 0.5).sin().square().sum()


def draw_python(x):
    return ((x * random.random()).sin() * random.gauss(0, 1)).exp()


def draw_numpy(x):
    return ((x * torch.from_numpy(np.random.rand(64))).sin() * np.random.randn()).exp()


def draw_all(x):
    return draw_python(x) * np.random.randn() * torch.randn(())


OF_TORCH = {
    "noisy": noisy,
    "dropout": lambda x: nn.functional.dropout(x, 0.5).sin(),
    "rand": lambda x: (x * torch.rand(64)).sin(),
    "randn_like": lambda x: (x * torch.randn_like(x)).sin(),
    "bernoulli": lambda x: (x * torch.full((64,), 0.5).bernoulli()).sin(),
    "in place": lambda x: (x * torch.empty(64).normal_()).sin(),
    "permutation": lambda x: x.sin() * torch.arange(64.0)[torch.randperm(64)],
    "several": lambda x: (x * torch.rand(64) + torch.randn(64)).sin() * torch.rand(1),
    "after what is saved": lambda x: (x * torch.rand(64)).sin() + torch.rand(64),
}
OF_THE_HOST = {
    "random": draw_python,
    "shuffle": lambda x: x.sin() * torch.tensor(random.sample(range(64), 64)),
    "numpy": draw_numpy,
    "numpy permutation": lambda x: x.sin() * torch.tensor(np.random.permutation(64)),
    "second normal of a pair": lambda x: (x.sin() * np.random.randn()).exp(),
    "second gauss of a pair": lambda x: (x.sin() * random.gauss(0, 1)).exp(),
    "all": draw_all,
}
DRAWS = OF_TORCH | OF_THE_HOST


# --- They are replayed, however the function is differentiated -------------------


def by_backward(call, x):
    y = call(x).sum()
    return torch.autograd.grad(y, x), states()


def after_other_draws(call, x):
    y = call(x).sum()
    seed_streams()
    torch.rand(5), random.random(), np.random.rand()
    return torch.autograd.grad(y, x)


def by_two_backwards(call, x):
    y = call(x).sum()
    return [torch.autograd.grad(y, x, retain_graph=True) for _ in "ab"]


def by_an_error_and_another_backward(call, x):
    y = call(x).sum()
    handle = x.register_hook(_fail)
    with pytest.raises(ZeroDivisionError, match="planted"):
        torch.autograd.grad(y, x, retain_graph=True)
    handle.remove()
    return states(), torch.autograd.grad(y, x)


def _fail(_):
    raise ZeroDivisionError("planted")


def by_a_backward_in_a_thread(call, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.autograd.grad, call(x).sum(), x).result()


def by_calls_in_a_row(call, x):
    return torch.autograd.grad((call(x) + 2 * call(x) + 3 * call(x)).sum(), x)


def by_a_second_derivative(call, x):
    (g,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
    return g.detach(), torch.autograd.grad(g.square().sum(), x)


def by_a_pullback(call, x):
    y, pull = vjp(call, x.detach())
    torch.rand(5), random.random(), np.random.rand()
    return pull(y), pull(y)


def by_forward_over_reverse(call, x):
    x = x.detach()
    return jvp(grad(lambda x: call(x).sum()), (x,), (x,))


# What is computed, and how often it evaluates the function, plain and rematerialized.
WAYS = {
    "backward": (by_backward, (1, 2)),
    "other draws before the backward": (after_other_draws, (1, 2)),
    "two backwards": (by_two_backwards, (1, 3)),
    "an error, and another backward": (by_an_error_and_another_backward, (1, 3)),
    "a backward in a thread": (by_a_backward_in_a_thread, (1, 2)),
    "calls in a row": (by_calls_in_a_row, (3, 6)),
    "second derivative": (by_a_second_derivative, (1, 3)),
    "grad": (lambda call, x: grad(lambda x: call(x).sum())(x.detach()), (1, 2)),
    "a pullback, twice": (by_a_pullback, (1, 3)),
    "forward over reverse": (by_forward_over_reverse, (1, 2)),
}


@rows("way, evaluations", WAYS)
@rows("fn", DRAWS)
def test_draws_from_global_streams_are_replayed(fn, way, evaluations):
    x = leaf()
    assert_replayed(lambda wrap: way(wrap(fn), x), evaluations=evaluations)


BATCHED = {
    "vmap(grad), same": lambda f: vmap(grad(f), randomness="same"),
    "vmap(grad), different": lambda f: vmap(grad(f), randomness="different"),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f, randomness="different")(x).sum()),
}


@rows("transform", BATCHED)
@rows(
    "fn", {"torch": noisy, "the host": lambda x: draw_numpy(x * random.random()).sum()}
)
def test_draws_are_replayed_under_vmap(transform, fn):
    x = torch.randn(4, 64)
    assert_replayed(lambda wrap: transform(wrap(fn))(x), sin=2)


def checkpointed(fn):
    return functools.partial(checkpoint, fn, use_reentrant=False)


# What is saved after a call has torch's checkpoint run it to its end.
BESIDE = {
    "within": lambda wrap: checkpointed(lambda x: wrap(noisy)(x).exp()),
    "around": lambda wrap: wrap(lambda x: checkpointed(noisy)(x * 1).exp()),
}


@rows("beside", BESIDE)
def test_draws_are_replayed_beside_torchs_checkpoint(beside):
    x = leaf()
    program = lambda wrap: torch.autograd.grad(beside(wrap)(x), x)
    assert_replayed(program, sin=(2, 3))


# --- What is stashed -------------------------------------------------------------


def saved_calls():
    """The calls whose graphs are alive."""
    gc.collect()
    return [call for call in gc.get_objects() if type(call) is Saved]


STASHED = {
    "nothing drawn": (lambda x: x.sin().sin(), 0),
    "a draw": (lambda x: nn.functional.dropout(x.sin(), 0.5).sin(), 1),
}


@rows("fn, streams", STASHED)
def test_only_the_states_of_streams_that_moved_are_stashed(fn, streams):
    x, fn = leaf(1024), remat(fn)
    assert live_bytes(lambda: fn(x)) == 4096  # a state is no tensor
    before = {*map(id, saved_calls())}
    y = fn(x)
    (call,) = (call for call in saved_calls() if id(call) not in before)
    states = [state for _, state in call.ambient.moved]
    assert len(states) == streams
    assert all(len(state) <= 624 * 4 + 64 for state in states)  # words of 32 bits
    ops = ops_of(lambda: y.sum().backward())
    assert ops["sin"] == 1  # what the second sine makes is not needed


@pytest.fixture
def fresh_memory():
    _process._start_of_state.cache_clear()
    return _process._start_of_state


def test_the_state_is_found_in_memory_within_a_vmap(fresh_memory):
    x = torch.randn(3, 4)
    found = []

    def fn(x):
        found.append(fresh_memory())
        return x.sin()

    vmap(fn)(x)
    assert found != [None]


# --- rng="error" -----------------------------------------------------------------


@rows("fn", OF_TORCH)
def test_a_draw_from_torchs_stream_is_refused_on_demand(fn):
    x, state = leaf(), torch.get_rng_state()
    with pytest.raises(
        RandomnessError, match=r"random stream in aten\..*test_global_streams"
    ):
        remat(fn, rng="error")(x)
    assert_same(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("fn", "name"), [(draw_python, "Python's random"), (draw_numpy, "numpy.random")]
)
def test_a_draw_from_a_stream_of_the_host_is_refused_on_demand(fn, name):
    with pytest.raises(RandomnessError, match=f"random stream of: {name}"):
        remat(fn, rng="error")(leaf())


def test_a_draw_from_a_generator_is_not_refused():
    fn = lambda x, generator: (x * torch.rand(64, generator=generator)).sin().exp()
    with count_ops() as ops:
        remat(fn, rng="error")(leaf(), torch.Generator()).sum().backward()
    assert ops["sin"] == 2


# --- The state of a stream of the host, read out of memory ------------------------


@pytest.mark.parametrize("index", [0, 1], ids=["python", "numpy"])
def test_a_reading_is_the_state_and_cheap(index):
    stream = _streams.global_streams().streams[1 + index]
    assert isinstance(stream.read()[0], bytes), "read out of memory"
    state, want = stream.read(), states()[index]
    draws = [
        (random.random, random.gauss),
        (np.random.rand, np.random.randn, np.random.randn),
    ]
    for draw in draws[index]:
        before = stream.read()
        assert stream.read() == before
        draw()
        assert stream.read() != before
    stream.write(state)
    assert states()[index] == want


def without_memory(monkeypatch):
    for name in "_python_memory", "_numpy_memory":
        monkeypatch.setattr(_streams, name, lambda _: None)


def without_numpy(monkeypatch, numpy=None):
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    monkeypatch.setitem(sys.modules, "numpy.random", numpy)


# What is odd about the process, and the function that draws nevertheless.
ODD = {
    "memory not as expected": (without_memory, draw_all),
    "numpy blocked": (without_numpy, draw_python),
    "numpy mocked": (lambda mp: without_numpy(mp, SimpleNamespace()), draw_python),
    "random.random patched": (
        lambda mp: mp.setattr("random.random", lambda: 0.5),
        draw_all,
    ),
    "numpy.random.random_sample patched": (
        lambda mp: mp.setattr("numpy.random.random_sample", lambda: 0.5),
        draw_all,
    ),
}


@rows("change, fn", ODD)
def test_draws_are_replayed_in_an_odd_process(monkeypatch, change, fn):
    monkeypatch.setattr(_streams, "_global", None)
    change(monkeypatch)
    assert_replayed(gradients(fn, leaf()), sin=2)
    before = _streams.global_streams()
    assert _streams.global_streams() is before


def test_another_layout_in_memory_is_noticed(monkeypatch):
    zeros = types.SimpleNamespace(raw=bytes(4 * 625))
    monkeypatch.setattr(_streams, "_memory", lambda _address, _size: zeros)
    assert _streams._python_memory(random.Random(0)) is None
    assert _streams._numpy_memory(np.random.MT19937(0)) is None
    assert _streams._gauss_offset(np.random) is None


# --- Other global streams --------------------------------------------------------


@pytest.fixture
def bit_generator():
    """A setter of NumPy's global generator."""
    before = np.random.get_bit_generator()
    yield np.random.set_bit_generator
    np.random.set_bit_generator(before)


@replayed(sin=2)
def test_another_bit_generator_may_be_the_global_one(wrap, bit_generator):
    x = leaf()
    bit_generator(np.random.PCG64(7))
    return torch.autograd.grad(wrap(draw_numpy)(x).sum(), x)


@pytest.mark.parametrize("initialized", ["before", "in the forward"])
def test_the_stream_of_every_initialized_device_is_replayed(monkeypatch, initialized):
    """A generator stands in for the global stream of a device."""
    found = []
    monkeypatch.setattr(_process, "_STREAMS", [lambda: found])
    # The search is not to find it: only the registry knows of it.
    for search in ("_reach.stream_search", "_reach.walk"):
        monkeypatch.setattr(f"remat.{search}.is_stream", lambda _: False)

    def program(wrap):
        device = [torch.Generator().manual_seed(5)]
        found[:] = device if initialized == "before" else []

        def fn(x):
            found[:] = device
            return (x * torch.rand(64, generator=device[0])).sin().exp()

        gradients = torch.autograd.grad(wrap(fn)(x).sum(), x)
        return gradients, device[0].get_state()

    x = leaf()
    assert_replayed(program, sin=2)


# --- The guard refuses what moves a global stream, and nothing else ---


ONES = torch.ones(3)
LIBRARY = torch.library.Library("remat_test_draws", "DEF")
LIBRARY.define("noisy(Tensor x) -> Tensor")
LIBRARY.define("quiet(Tensor x) -> Tensor")
LIBRARY.impl("noisy", lambda x: x + torch.rand(3), "CompositeExplicitAutograd")
LIBRARY.impl("quiet", lambda x: x + 1, "CompositeExplicitAutograd")


def guarded(fn, *args):
    with Guard("no {op} at {where}"):
        return fn(*args)


@pytest.mark.parametrize(
    ("op", "draw"),
    {
        "aten.rand.default": lambda: torch.rand(3),
        "aten.bernoulli_.float": lambda: nn.functional.dropout(ONES),
        "aten.normal_.default": lambda: torch.empty(3).normal_(),
        "remat_test_draws.noisy.default": lambda: torch.ops.remat_test_draws.noisy(
            ONES
        ),
    }.items(),
)
def test_a_draw_is_refused_with_its_name_and_line_and_the_stream_is_put_back(op, draw):
    before = torch.get_rng_state()
    message = rf"^no {re.escape(op)} at {re.escape(__file__)}:\d+, in \S+$"
    with pytest.raises(RandomnessError, match=message):
        guarded(draw)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_draws_nothing_passes_though_torch_calls_it_random():
    heads = torch.ones(1, 1, 4, 8)
    guarded(nn.functional.scaled_dot_product_attention, heads, heads, heads)
    guarded(nn.functional.dropout, ONES, 0.5, False)
    guarded(torch.ops.remat_test_draws.quiet, ONES)
    guarded(torch.sin, ONES)


def test_operators_of_higher_order_pass():
    branch = lambda: torch.cond(ONES.sum() > 2, torch.sin, torch.cos, (ONES,))
    assert torch.equal(guarded(branch), ONES.sin())
