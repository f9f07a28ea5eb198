"""Streams other than torch's global ones are replayed too, wherever they are held."""

import argparse
import contextlib
import functools
import itertools
import random
import sys
import types
import weakref
from collections import defaultdict, deque
from contextvars import ContextVar
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.zoo import Evaluations
from torch import nn
from torch.func import grad, vmap

from remat import RandomnessError, remat
from remat._ambient import streams as _streams
from remat._torch import process as _process
from remat.testing import assert_same, count_ops, live_bytes


def leaf(n=64):
    return torch.randn(n, requires_grad=True)


# --- Python's and NumPy's global streams ------------------------------------------


def states():
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def set_states(states):
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw_python(x):
    return ((x * random.random()).sin() * random.gauss(0, 1)).exp()


def draw_numpy(x):
    return ((x * torch.from_numpy(np.random.rand(64))).sin() * np.random.randn()).exp()


HOST = {
    "random": draw_python,
    "shuffle": lambda x: x.sin() * torch.tensor(random.sample(range(64), 64)),
    "numpy": draw_numpy,
    "numpy permutation": lambda x: x.sin() * torch.tensor(np.random.permutation(64)),
    "second normal of a pair": lambda x: (x.sin() * np.random.randn()).exp(),
    "second gauss of a pair": lambda x: (x.sin() * random.gauss(0, 1)).exp(),
    "all": lambda x: draw_python(x) * np.random.randn() * torch.randn(()),
}
host = pytest.mark.parametrize("fn", HOST.values(), ids=HOST.keys())


@pytest.fixture(autouse=True)
def seeded():
    """Leave half of a pair of normal numbers to be drawn."""
    before = states()
    random.seed(3)
    random.gauss(0, 1)
    np.random.seed(4)
    np.random.randn()
    yield
    set_states(before)


def again(call):
    """Return what `call` gives, and the states after it, from the states now."""
    before = states()
    result = call()
    after = states()
    set_states(before)
    return result, after


def assert_same_states(got, want):
    assert got[0] == want[0]
    assert repr(got[1]) == repr(want[1])
    assert (got[1]["state"]["key"] == want[1]["state"]["key"]).all()
    assert_same(got[2], want[2])


@host
def test_a_draw_from_a_stream_of_the_host_is_replayed(fn):
    x = leaf()
    (want,), state = again(lambda: torch.autograd.grad(fn(x).sum(), x))
    with count_ops() as ops:
        (got,), ours = again(lambda: torch.autograd.grad(remat(fn)(x).sum(), x))
    assert_same(got, want)
    assert_same_states(ours, state)
    assert ops["sin"] == 2


@host
def test_draws_between_forward_and_backward_do_not_matter(fn):
    x = leaf()
    (want,), _ = again(lambda: torch.autograd.grad(fn(x).sum(), x))
    y = remat(fn)(x)
    random.random()
    np.random.rand()
    before = states()
    with count_ops() as ops:
        assert_same(torch.autograd.grad(y.sum(), x)[0], want)
    assert ops["sin"] == 1
    assert_same_states(states(), before)


@host
def test_a_stream_of_the_host_is_replayed_under_grad(fn):
    x = torch.randn(64)
    want, state = again(lambda: grad(lambda x: fn(x).sum())(x))
    with count_ops() as ops:
        got, ours = again(lambda: grad(lambda x: remat(fn)(x).sum())(x))
    assert_same(got, want)
    assert_same_states(ours, state)
    assert ops["sin"] == 2


def test_a_function_that_draws_only_later_is_replayed_then():
    x = leaf()
    training = [False]

    def fn(x):
        return (x.sin() * (random.random() if training[0] else 1.0)).exp()

    ours = remat(fn)
    for _ in range(3):
        ours(x).sum().backward()
    training[0] = True
    random.seed(5)
    y = ours(x)
    with count_ops() as ops:
        (got,) = torch.autograd.grad(y.sum(), x)
    assert ops["sin"] == 1
    random.seed(5)
    assert_same(got, torch.autograd.grad(fn(x).sum(), x)[0])


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
    assert repr(states()[index]) == repr(want)


def test_streams_whose_memory_is_not_as_expected_are_replayed_all_the_same(monkeypatch):
    for name in "_python_memory", "_numpy_memory":
        monkeypatch.setattr(_streams, name, lambda _: None)
    monkeypatch.setattr(_streams, "_global", None)
    x = leaf()
    fn = HOST["all"]
    (want,), state = again(lambda: torch.autograd.grad(fn(x).sum(), x))
    with count_ops() as ops:
        (got,), ours = again(lambda: torch.autograd.grad(remat(fn)(x).sum(), x))
    assert_same(got, want)
    assert_same_states(ours, state)
    assert ops["sin"] == 2


def test_another_layout_in_memory_is_noticed(monkeypatch):
    zeros = types.SimpleNamespace(raw=bytes(4 * 625))
    monkeypatch.setattr(_streams, "_memory", lambda _address, _size: zeros)
    assert _streams._python_memory(random.Random(0)) is None
    assert _streams._numpy_memory(np.random.MT19937(0)) is None
    assert _streams._gauss_offset(np.random) is None


def test_another_bit_generator_may_be_the_global_one():
    before = np.random.get_bit_generator()
    x = leaf()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        (want,) = torch.autograd.grad(draw_numpy(x).sum(), x)
        np.random.set_bit_generator(np.random.PCG64(7))
        with count_ops() as ops:
            (got,) = torch.autograd.grad(remat(draw_numpy)(x).sum(), x)
    finally:
        np.random.set_bit_generator(before)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_nothing_of_the_host_is_stashed_for_a_function_that_draws_nothing():
    x = leaf(1024)
    fn = remat(lambda x: x.sin().sin())
    y = fn(x)
    assert y.grad_fn._raw_saved_self.data.call.ambient.moved == []
    assert live_bytes(lambda: fn(x)) == 4096
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1


@pytest.mark.parametrize(
    ("fn", "name"),
    [(draw_python, "Python's random"), (draw_numpy, "numpy.random")],
)
def test_a_draw_from_a_stream_of_the_host_is_refused_on_demand(fn, name):
    with pytest.raises(RandomnessError, match=f"random stream of: {name}"):
        remat(fn, rng="error")(leaf())


# --- Streams that are objects ------------------------------------------------------


class Attribute:
    def __init__(self, stream):
        self.stream = stream


class Slots:
    __slots__ = ("stream",)

    def __init__(self, stream):
        self.stream = stream


MODULE = types.ModuleType("settings_of_the_user")
STREAM = None


class OfClass(nn.Module):
    stream = None

    def forward(self, x):
        return use(x, self.stream)


class OfGlobal(nn.Module):
    def forward(self, x):
        return use(x, STREAM)


class OfPythonModule(nn.Module):
    def forward(self, x):
        return use(x, MODULE.stream)


def helper(x):
    return use(x, STREAM)


class OfHelper(nn.Module):
    def forward(self, x):
        return helper(x)


class OfProperty(nn.Module):
    @property
    def stream(self):
        return STREAM

    def forward(self, x):
        return use(x, self.stream)


def endless(stream):
    while True:
        yield stream


def in_global(make):
    def with_stream(stream):
        global STREAM
        STREAM = MODULE.stream = OfClass.stream = stream
        return make()

    return with_stream


def reading(make, read):
    """Return what makes, of a stream, a function that reads it from a holder."""

    def of_stream(stream):
        holder = make(stream)
        return lambda x: use(x, read(holder))

    return of_stream


def weak(stream):
    """Refer weakly to a torch.Generator; others do not allow it."""
    return weakref.ref(stream) if isinstance(stream, torch.Generator) else [stream]


def target(reference):
    return reference[0] if isinstance(reference, list) else reference()


def method(stream, make):
    """Return a module whose forward reads the stream as `make` has it."""
    return type("Local", (nn.Module,), {"forward": make(stream)})()


def of_default(stream):
    return lambda self, x, s=stream: use(x, s)


def of_keyword(stream):
    def forward(self, x, *, s=stream):
        return use(x, s)

    return forward


def decorated(stream):
    @functools.wraps(use)
    def forward(self, x):
        return use(x, stream)

    return forward


def of_attribute(stream):
    def fn(x):
        return use(x, fn.stream)

    fn.stream = stream
    return fn


class Words(dict):
    pass


class Names(tuple):
    pass


def with_attribute(container, stream):
    container.stream = stream
    return container


CONTEXT = ContextVar("context")


def in_context(stream):
    CONTEXT.set(stream)
    return CONTEXT


class Later(nn.Module):
    def forward(self, x):
        return use(x, self.stream)


def added_later(stream):
    """Add an attribute to a class that was walked before."""
    if hasattr(Later, "stream"):
        del Later.stream
    later, x = Later(), torch.ones(64, requires_grad=True)
    with contextlib.suppress(AttributeError):
        remat(later)(x)
    Later.stream = stream
    return later


SOURCE = np.random


class Rebound(nn.Module):
    def forward(self, x):
        return x.cos() if SOURCE is np.random else use(x, SOURCE)


def rebound(stream):
    """Name a stream what was a module of a package in a first call."""
    global SOURCE
    SOURCE, module = np.random, Rebound()
    remat(module)(torch.ones(64, requires_grad=True))
    SOURCE = stream
    return module


def unregistered(stream):
    """Make a class in a module that is not in sys.modules."""
    module = types.ModuleType("not_registered")
    module.__dict__.update(use=use, nn=nn, STREAM=stream)
    source = "class M(nn.Module):\n    forward = lambda self, x: use(x, STREAM)"
    exec(source, module.__dict__)
    return module.M()


HOLDERS = {
    "closure": reading(lambda s: s, lambda s: s),
    "partial": lambda s: functools.partial(use, stream=s),
    "attribute": reading(Attribute, lambda a: a.stream),
    "slot": reading(Slots, lambda a: a.stream),
    "namespace": reading(lambda s: types.SimpleNamespace(s=s), lambda a: a.s),
    "deque": reading(lambda s: deque([s]), lambda a: a[0]),
    "iterator": reading(itertools.repeat, next),
    "map": reading(lambda s: map(lambda _: s, itertools.count()), next),  # noqa: C417
    "generator": reading(endless, next),
    "proxy": reading(lambda s: types.MappingProxyType({"s": s}), lambda a: a["s"]),
    "weak reference": reading(weak, target),
    "class": in_global(OfClass),
    "global of a module's forward": in_global(OfGlobal),
    "attribute of a Python module": in_global(OfPythonModule),
    "global of a function that forward calls": in_global(OfHelper),
    "property": in_global(OfProperty),
    "bound method": lambda s: HasMethod(s).call,
    "closure of a method": lambda s: method(s, lambda s: lambda self, x: use(x, s)),
    "default of a method": lambda s: method(s, of_default),
    "keyword default of a method": lambda s: method(s, of_keyword),
    "wrapper of a method": lambda s: method(s, decorated),
    "attribute of a function": of_attribute,
    "attribute of a helper": lambda s: functools.partial(
        lambda f, x: f(x), of_attribute(s)
    ),
    "attribute of a dict": reading(
        lambda s: with_attribute(Words(a=1), s), lambda a: a.stream
    ),
    "dict with an attribute": reading(
        lambda s: with_attribute(Words(a=s), None), lambda a: a["a"]
    ),
    "attribute of a tuple": reading(
        lambda s: with_attribute(Names("ab"), s), lambda a: a.stream
    ),
    "context variable": reading(in_context, lambda a: a.get()),
    "weak dictionary": reading(
        lambda s: (weakref.WeakValueDictionary(a=(held := Attribute(s))), held)[0:2],
        lambda pair: pair[0]["a"].stream,
    ),
    "key of a dictionary": reading(lambda s: (s, {s: 1}), lambda p: next(iter(p[1]))),
    "closure and iterator": reading(
        lambda s: (s, itertools.cycle([s])), lambda p: (next(p[1]), p[0])[0]
    ),
    "class, later than a first call": added_later,
    "default factory": reading(
        lambda s: defaultdict(lambda: s), lambda a: a["missing"]
    ),
    "arguments of a program": reading(lambda s: argparse.Namespace(s=s), lambda a: a.s),
    "global that was a package's": rebound,
    "module that is not registered": unregistered,
}


class HasMethod:
    def __init__(self, stream):
        self.stream = stream

    def call(self, x):
        return use(x, self.stream)


def use(x, stream):
    if isinstance(stream, torch.Generator):
        noise = torch.rand(64, generator=stream)
    elif isinstance(stream, random.Random):
        noise = torch.tensor([stream.random() for _ in range(64)])
    else:
        noise = torch.from_numpy(stream.uniform(size=64))
    return (x * noise).sin() * noise


STREAMS = {
    "torch.Generator": lambda: torch.Generator().manual_seed(5),
    "random.Random": lambda: random.Random(5),
    "numpy Generator": lambda: np.random.default_rng(5),
    "numpy RandomState": lambda: np.random.RandomState(5),
}
held = pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
streams = pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())


def next_of(stream):
    return use(torch.ones(64), stream)


@streams
@held
def test_a_stream_is_replayed_wherever_it_is_held(hold, make):
    x = leaf()
    theirs, ours = make(), make()
    (want,) = torch.autograd.grad(hold(theirs)(x).sum(), x)
    fn = hold(ours)
    with count_ops() as ops:
        y = remat(fn)(x)
        (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.sum(), x)
    assert ops["sin"] == 3
    assert_same([got, second], [want, want])
    assert_same(next_of(ours), next_of(theirs))


@streams
@held
def test_a_stream_is_replayed_under_transforms_wherever_it_is_held(hold, make):
    x = torch.randn(3, 64)
    theirs, ours = make(), make()

    def gradients(wrap, stream):
        fn = wrap(hold(stream))
        return vmap(grad(lambda x: fn(x).sum()), randomness="same")(x)

    want = gradients(lambda f: f, theirs)
    with count_ops() as ops:
        got = gradients(remat, ours)
    assert_same(got, want)
    assert ops["sin"] == 2
    assert_same(next_of(ours), next_of(theirs))


@streams
def test_calls_that_share_a_stream_replay_independently(make):
    x = leaf()

    def gradients(wrap):
        fn = wrap(HOLDERS["iterator"](make()))
        first, second = fn(x), fn(x)
        return [torch.autograd.grad(y.sum(), x) for y in (second, first)]

    want = gradients(lambda f: f)
    with count_ops() as ops:
        got = gradients(remat)
    assert_same(got, want)
    assert ops["sin"] == 4


@streams
def test_a_failed_recomputation_leaves_the_stream_alone(make):
    x, stream = leaf(), make()
    calls = Evaluations()

    source = itertools.repeat(stream)

    def fn(x):
        calls.note(None)
        y = use(x, next(source))
        if len(calls) == 2:
            raise ValueError("the second time")
        return y.exp()

    y = remat(fn)(x)
    with pytest.raises(ValueError, match="the second time"):
        y.sum().backward()
    plain = make()
    use(x, plain)
    assert_same(next_of(stream), next_of(plain))


@pytest.mark.parametrize("method", ["random", "uniform", "normal"])
def test_a_bound_builtin_method_leads_to_its_stream(method):
    x = leaf()

    def gradient(wrap):
        draw = getattr(np.random.default_rng(5), method)
        fn = wrap(lambda x: (x.sin() * draw()).exp())
        return torch.autograd.grad(fn(x).sum(), x)

    want = gradient(lambda f: f)
    with count_ops() as ops:
        got = gradient(remat)
    assert_same(got, want)
    assert ops["sin"] == 2


class Labelled(torch.Generator):
    label = "ours"


def test_a_subclass_of_a_generator_stays_one():
    x = leaf()

    def gradient(wrap):
        generator = Labelled()
        generator.manual_seed(5)
        labels = Evaluations()

        def fn(x):
            labels.note(generator.label)
            return use(x, generator)

        return torch.autograd.grad(wrap(fn)(x).sum(), x), [*labels]

    (want, _), (got, labels) = gradient(lambda f: f), gradient(remat)
    assert_same(got, want)
    assert labels == ["ours", "ours"]


# --- Streams that the function puts back or sets itself -----------------------------


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return (x * torch.rand(64)).sin().exp()


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
    return (x * torch.rand(64)).sin().exp()


class Forked(nn.Module):
    def forward(self, x):
        return forked(x)


aliased_fork = torch.random.fork_rng
partial_fork = functools.partial(torch.random.fork_rng, devices=[])
get, put = random.getstate, random.setstate


def aliased(x):
    with aliased_fork(devices=[]):
        return (x * torch.rand(64)).sin().exp()


def by_partial(x):
    with partial_fork():
        return (x * torch.rand(64)).sin().exp()


@torch.random.fork_rng(devices=[])
def decorated_by_fork(x):
    return (x * torch.rand(64)).sin().exp()


def put_back_by_alias(x):
    state = get()
    y = (x * random.random()).sin().exp()
    put(state)
    return y


class ForkedForward(nn.Module):
    @torch.random.fork_rng(devices=[])
    def forward(self, x):
        return (x * torch.rand(64)).sin().exp()


RESETS = {
    "another name": aliased,
    "partial": by_partial,
    "decorator": decorated_by_fork,
    "put back by another name": put_back_by_alias,
    "decorator of a method": ForkedForward(),
    "fork": forked,
    "put back": put_back,
    "derived": derived,
    "seeded": reseeded,
    "in a module": Forked(),
}


@pytest.mark.parametrize("fn", RESETS.values(), ids=RESETS.keys())
def test_a_stream_that_the_function_puts_back_is_replayed(fn):
    x = leaf()

    def gradients(wrap):
        torch.manual_seed(1)
        random.seed(1)
        found = []
        # The last of several: a first call may leave traces in memory.
        for _ in range(3):
            ys = [wrap(fn)(x) for _ in range(3)]
            torch.rand(3)
            random.random()
            found += torch.autograd.grad(ys[-1].sum(), x)
        return found, torch.rand(2), random.random()

    want = gradients(lambda f: f)
    with count_ops() as ops:
        got = gradients(remat)
    assert_same(got[:2], want[:2])
    assert got[2] == want[2]
    assert ops["sin"] == 3 * (3 + 1)


def test_numpys_generator_may_be_exchanged_between_forward_and_backward():
    before = np.random.get_bit_generator()
    x = leaf()
    try:
        kinds = np.random.PCG64, np.random.MT19937
        for first, make in itertools.product(kinds, kinds):
            np.random.set_bit_generator(first(7))
            (want,) = torch.autograd.grad(draw_numpy(x).sum(), x)
            old = first(7)
            np.random.set_bit_generator(old)
            y = remat(draw_numpy)(x)
            state = repr(old.state)
            other = make(3)
            np.random.set_bit_generator(other)
            with count_ops() as ops:
                assert_same(torch.autograd.grad(y.sum(), x)[0], want)
            assert ops["sin"] == 1
            assert np.random.get_bit_generator() is other
            assert repr(other.state) == repr(make(3).state)
            assert repr(old.state) == state
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("name", ["random.random", "numpy.random.random_sample"])
def test_the_functions_of_a_stream_may_be_patched(monkeypatch, name):
    monkeypatch.setattr(_streams, "_global", None)
    monkeypatch.setattr(name, lambda: 0.5)
    x = leaf()
    fn = HOST["all"]
    with count_ops() as ops:
        (got,), _ = again(lambda: torch.autograd.grad(remat(fn)(x).sum(), x))
    (want,), _ = again(lambda: torch.autograd.grad(fn(x).sum(), x))
    assert_same(got, want)
    assert ops["sin"] == 2


# --- Devices ------------------------------------------------------------------------


def device_draw(generator):
    """Draw as from the global stream of a device, for which `generator` stands in."""
    return lambda x: (x * torch.rand(64, generator=generator[0])).sin().exp()


@pytest.mark.parametrize("initialized", ["before", "in the forward"])
def test_the_stream_of_every_initialized_device_is_replayed(monkeypatch, initialized):
    x = leaf()
    device = [torch.Generator().manual_seed(5)]
    (want,) = torch.autograd.grad(device_draw(device)(x).sum(), x)
    device[0].manual_seed(5)
    found = device if initialized == "before" else []
    monkeypatch.setattr(_process, "_STREAMS", [lambda: found])
    # The search is not to find it: only the registry knows of it.
    monkeypatch.setattr("remat._capture.stream_search.is_stream", lambda _: False)
    monkeypatch.setattr("remat._capture.search.is_stream", lambda _: False)

    def fn(x):
        found[:] = device
        return device_draw(device)(x)

    y = remat(fn)(x)
    state = device[0].get_state()
    with count_ops() as ops:
        (got,) = torch.autograd.grad(y.sum(), x)
    assert ops["sin"] == 1
    assert_same(got, want)
    assert_same(device[0].get_state(), state)


@pytest.mark.parametrize("numpy", [None, SimpleNamespace()], ids=["blocked", "mocked"])
def test_numpy_may_be_blocked_or_mocked(monkeypatch, numpy):
    monkeypatch.setattr(_streams, "_global", None)
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    monkeypatch.setitem(sys.modules, "numpy.random", numpy)
    x = leaf()
    with count_ops() as ops:
        (got,), _ = again(lambda: torch.autograd.grad(remat(draw_python)(x).sum(), x))
    (want,), _ = again(lambda: torch.autograd.grad(draw_python(x).sum(), x))
    assert_same(got, want)
    assert ops["sin"] == 2
    before = _streams.global_streams()
    assert _streams.global_streams() is before
