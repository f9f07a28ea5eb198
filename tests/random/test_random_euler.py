"""Euler's identity with masks, for each source of randomness, on each path of autograd.

A path gives an input with the gradient and the value there.
"""

import functools
import itertools
import os
import random as python_random

import numpy as np
import pytest
import torch
from support.tables import crossed, rows
from support.zoo import leaves_of, plainly
from torch import nn
from torch.func import grad, grad_and_value, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from remat import random, remat
from remat.testing import count_ops


N = 64
W = torch.randn(N, N, dtype=torch.double)
XS = torch.randn(4, N, dtype=torch.double)
X = XS[0]
KEYS = random.split(random.key(7), 4)
K = KEYS[0]


def dropped(x, drop):
    """Homogeneous of degree 2: a layer between two masks, squared."""
    return drop(torch.relu(drop(x) @ W)).square().sum()


def masked(x, draw):
    return dropped(x, lambda t: t * draw())


# --- Sources: given how to wrap, functions of x and of a key that most leave alone ---


def from_key(x, key):
    keys = iter(random.split(key))
    return masked(x, lambda: random.bernoulli(next(keys), 0.5, (N,)))


def from_dropout(x, key):
    keys = iter(random.split(key))
    return dropped(x, lambda t: random.dropout(next(keys), t, 0.5))


def from_generator(x, generator):
    return masked(x, lambda: torch.rand(N, generator=generator) > 0.5)


def from_global(x):
    return dropped(x, nn.functional.dropout)


def from_python(x):
    return masked(x, lambda: torch.tensor([python_random.random() > 0.5 for _ in X]))


def from_numpy(x):
    return masked(x, lambda: torch.from_numpy(np.random.rand(N) > 0.5))


def from_nowhere(x):
    """What cannot be replayed, and so is drawn anew by a recompute."""
    return masked(x, lambda: torch.tensor([byte > 127 for byte in os.urandom(N)]))


def captured_key(wrap):
    return lambda x, key: wrap(lambda x: from_key(x, key))(x)


def generator_argument(wrap):
    generator, fn = torch.Generator().manual_seed(1), wrap(from_generator)
    return lambda x, _: fn(x, generator)


def captured_generator(wrap):
    generator = torch.Generator().manual_seed(1)
    fn = wrap(lambda x: from_generator(x, generator))
    return lambda x, _: fn(x)


def opaque_generator(wrap):
    generators = itertools.repeat(torch.Generator().manual_seed(1))
    fn = wrap(lambda x: from_generator(x, next(generators)))
    return lambda x, _: fn(x)


def bound_outside(wrap):
    fn = wrap(from_global)
    return lambda x, key: random.bind(key)(fn)(x)


def bound_inside(wrap):
    return wrap(lambda x, key: random.bind(key)(from_global)(x))


def keyless(fn):
    def source(wrap):
        wrapped = wrap(fn)
        return lambda x, _: wrapped(x)

    return source


KEYED = {
    "a key": lambda wrap: wrap(from_key),
    "dropout by a key": lambda wrap: wrap(from_dropout),
    "a captured key": captured_key,
    "bound outside": bound_outside,
    "bound inside": bound_inside,
}
GENERATORS = {
    "a generator": generator_argument,
    "a captured generator": captured_generator,
    "an opaque generator": opaque_generator,
}
GLOBAL = {"the global stream": keyless(from_global)}
HOST = {"Python's random": keyless(from_python), "NumPy": keyless(from_numpy)}
SOURCES = KEYED | GENERATORS | GLOBAL | HOST


# --- The check --------------------------------------------------------------------


def disturb():
    """Move every stream, as what runs before a backward may."""
    torch.rand(3)
    python_random.random()
    np.random.rand()


def differentiated(y, x, **options):
    disturb()
    return torch.autograd.grad(y, x, **options)[0]


def assert_euler(path, f):
    for x, g, y in path(f):
        torch.testing.assert_close(x.dot(g) / (2 * y), torch.ones_like(y))
        assert (g == 0).any()
        assert (g != 0).any()


def cross(paths, sources):
    """Every path with every source."""
    return {f"{p}-{s}": (paths[p], sources[s]) for p in paths for s in sources}


# --- Paths: from f to pairs of a value and a gradient ------------------------------


def by_backward(f):
    (x,) = leaves_of(X)
    y = f(x, K)
    disturb()
    y.backward()
    yield x, x.grad, y


def by_two_backwards(f):
    (x,) = leaves_of(X)
    y = f(x, K)
    for retain in (True, False):
        yield x, differentiated(y, x, retain_graph=retain), y


def by_two_calls(f):
    """The one called first is differentiated last."""
    (x,) = leaves_of(X)
    y, z = f(x, K), f(x, KEYS[1])
    for value in (z, y):
        yield x, differentiated(value, x), value


def by_grad(f):
    yield X, *grad_and_value(f)(X, K)


def by_vjp(f):
    y, pull = vjp(lambda x: f(x, K), X)
    for _ in "ab":
        disturb()
        yield X, pull(torch.ones_like(y))[0], y


def by_vmap(f, randomness="error"):
    g, y = vmap(grad_and_value(f), randomness=randomness)(XS, KEYS)
    yield from zip(XS, g, y, strict=True)


def by_grad_of_vmap(f, randomness="error"):
    def total(xs):
        y = vmap(f, randomness=randomness)(xs, KEYS)
        return y.sum(), y

    g, (_, y) = grad_and_value(total, has_aux=True)(XS)
    yield from zip(XS, g, y, strict=True)


def by_hvp(f):
    """The Hessian is of degree 0: H x is the gradient."""
    gradient, h = jvp(lambda x: grad(f)(x, K), (X,), (X,))
    yield X, h, X.dot(gradient) / 2


def by_double_backward(f):
    (x,) = leaves_of(X)
    y = f(x, K)
    g = differentiated(y, x, create_graph=True)
    yield x, g.detach(), y
    yield x, differentiated(g.dot(X), x), y


TAPE = {
    "backward": by_backward,
    "two backwards": by_two_backwards,
    "two calls": by_two_calls,
    "double backward": by_double_backward,
}
LEVELS = {"grad": by_grad, "vjp": by_vjp, "hvp": by_hvp}
BATCHED = {"vmap of grad": by_vmap, "grad of vmap": by_grad_of_vmap}


# --- Eager -------------------------------------------------------------------------


def nested(fn):
    return remat(remat(fn))


def checkpointed(fn):
    return functools.partial(checkpoint, fn, use_reentrant=False)


def evaluations(path, f):
    """How often the masked layer runs, where the identity holds."""
    with count_ops() as ops:
        assert_euler(path, f)
    return ops["relu"]


wraps = rows("wrap", {"remat": remat, "nested": nested}, fast=("remat",))


@wraps
@rows("path, source", cross(TAPE | LEVELS, SOURCES))
def test_a_recomputation_draws_the_masks_of_its_forward(path, source, wrap):
    once = evaluations(path, source(plainly))
    assert evaluations(path, source(wrap)) > once


@wraps
@rows("path, source", cross(BATCHED, KEYED))
def test_each_example_has_the_masks_of_its_key(path, source, wrap):
    assert evaluations(path, source(wrap)) == 1 + (1 if wrap is remat else 2)
    assert differ(g == 0 for _, g, _ in path(source(wrap)))


@wraps
@rows("path, source", cross(BATCHED, GENERATORS | GLOBAL))
def test_each_example_has_the_masks_that_torch_draws_for_it(path, source, wrap):
    path = functools.partial(path, randomness="different")
    assert evaluations(path, source(wrap)) > evaluations(path, source(plainly))
    assert differ(g == 0 for _, g, _ in path(source(wrap)))


@wraps
@rows("path, source", cross(BATCHED, HOST))
def test_all_examples_have_the_mask_that_the_host_draws(path, source, wrap):
    assert evaluations(path, source(wrap)) > evaluations(path, source(plainly))
    assert not differ(g == 0 for _, g, _ in path(source(wrap)))


def differ(masks):
    return len({tuple(mask.tolist()) for mask in masks}) == len(XS)


# --- With torch's checkpoint, which torch.func refuses -----------------------------

# A draw in torch's checkpoint of a key bound outside of it is refused by `bind`.
UNBOUND = {name: s for name, s in SOURCES.items() if s is not bound_outside}
# Of what it runs itself, torch's checkpoint replays its global streams alone.
REPLAYED_BY_TORCH = {n: s for n, s in UNBOUND.items() if n in KEYED | GLOBAL}


@rows("path, source", cross(TAPE, UNBOUND))
def test_every_source_is_replayed_inside_torchs_checkpoint(path, source):
    """What it saves after the call needs the call to run to its end, and again."""

    def around(f):
        return checkpointed(lambda x, *rest: f(x * 1, *rest).square().sqrt())

    with count_ops() as alone:  # with whichever masks
        [*path(source(around))]
    assert evaluations(path, source(lambda f: around(remat(f)))) > alone["relu"]


@rows("path, source", cross(TAPE, REPLAYED_BY_TORCH))
def test_torchs_checkpoint_inside_replays_what_it_replays_alone(path, source):
    """What it saves itself needs no handle; a root of its result does."""

    def within(fn):
        return lambda *args: checkpointed(fn)(*args).square().sqrt()

    once = evaluations(path, source(within))
    assert evaluations(path, source(lambda f: remat(within(f)))) > once


# --- The check has teeth -----------------------------------------------------------

nowhere = keyless(from_nowhere)

# Under "hvp" one recompute, with one mask, gives the gradient and its tangent.
AGAIN = {name: path for name, path in LEVELS.items() if name != "hvp"}


@wraps
@rows("path", TAPE | AGAIN | BATCHED)
def test_the_check_fails_for_masks_that_cannot_be_replayed(path, wrap):
    assert_euler(path, nowhere(plainly))
    with pytest.raises(AssertionError, match="Scalars are not close"):
        assert_euler(path, nowhere(wrap))


@rows("path", TAPE)
def test_the_check_fails_for_a_generator_in_torchs_own_checkpoint(path):
    with pytest.raises(AssertionError, match="Scalars are not close"):
        assert_euler(path, generator_argument(checkpointed))


# --- Traced: the graph holds the recompute -------------------------------------------


def by_trace(f):
    traced = make_fx(grad_and_value(f))(X, K)
    for key in KEYS:
        yield X, *traced(X, key)


def by_trace_of_vmap(f):
    traced = make_fx(vmap(grad_and_value(f)))(XS, KEYS)
    for keys in KEYS, random.split(KEYS[1], 4):
        yield from zip(XS, *traced(XS, keys), strict=True)


@crossed("path, name", [by_trace, by_trace_of_vmap], KEYED)
def test_a_traced_gradient_is_of_the_masks_of_the_key_it_is_given(path, name):
    source = KEYED[name]
    assert evaluations(path, source(remat)) == 2 * evaluations(path, source(plainly))
    assert differ(g == 0 for _, g, _ in [*path(source(remat))][:4])


# --- In compiled code ---


def by_compiled_step(f, compile):
    """A step of training: the backward is in the compiled code."""

    @compile
    def step(x, key):
        y = f(x, key)
        y.backward()
        return y

    for x, key in zip(leaves_of(*XS), KEYS, strict=True):
        y = step(x, key).detach()
        yield x, x.grad, y


def by_compiled_loss(f, compile):
    compiled = compile(f)
    for x, key in zip(leaves_of(*XS), KEYS, strict=True):
        y = compiled(x, key)
        yield x, differentiated(y, x), y


# Other paths, and other backends: transform/test_traced_draws.py.
PASSES = {"step": by_compiled_step, "loss": by_compiled_loss}
COMPILATIONS = cross(PASSES, KEYED | GLOBAL)
# The graph breaks at a call that uses a generator or a stream of the host. Under
# torch.func Dynamo fails there.
BREAKS = cross(PASSES, GENERATORS | HOST)


@pytest.fixture
def compiler():
    """How to compile for a backend, from a clean slate."""
    torch._dynamo.reset()
    yield lambda backend: functools.partial(torch.compile, backend=backend)
    torch._dynamo.reset()


def assert_euler_compiled(path, f, compile):
    """The same without a mode that counts, in which Dynamo would compile nothing."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert_euler(functools.partial(path, compile=compile), f)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


# Dynamo warns of its own deprecations.
@pytest.mark.filterwarnings("default")
@rows("path, source", COMPILATIONS, fast=("step-the global stream",))
def test_both_passes_of_compiled_code_have_the_same_masks(path, source, compiler):
    assert_euler_compiled(path, source(remat), compiler("aot_eager"))


@pytest.mark.filterwarnings("default")
@rows("path, source", BREAKS, fast=("loss-a generator", "step-NumPy"))
def test_a_call_that_breaks_the_graph_recomputes_with_the_same_masks(
    path, source, compiler
):
    assert_euler(functools.partial(path, compile=compiler("aot_eager")), source(remat))
