"""Euler's identity with masks, where torch.compile traces one pass or both."""

import functools

import pytest
import torch
from support.euler import (
    GENERATORS,
    GLOBAL,
    HOST,
    KEYED,
    KEYS,
    XS,
    assert_euler,
    cross,
    differentiated,
)
from support.tables import rows
from support.zoo import leaves_of
from torch.func import grad_and_value, vmap

from remat import remat


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


def by_compiled_grad(f, compile):
    compiled = compile(grad_and_value(f))
    for x, key in zip(XS, KEYS, strict=True):
        yield x, *compiled(x, key)


def by_compiled_vmap(f, compile):
    yield from zip(XS, *compile(vmap(grad_and_value(f)))(XS, KEYS), strict=True)


PASSES = {"step": by_compiled_step, "loss": by_compiled_loss}
COMPILATIONS = (
    cross(PASSES, KEYED | GLOBAL)
    | cross({"grad": by_compiled_grad}, KEYED | GLOBAL)
    # For the global stream torch wants `randomness`.
    | cross({"vmap of grad": by_compiled_vmap}, KEYED)
)
# The graph breaks at a call that uses a generator or a stream of the host. Under
# torch.func Dynamo fails there.
BREAKS = cross(PASSES, GENERATORS | HOST)
BY_INDUCTOR = cross({"step": by_compiled_step}, KEYED | GLOBAL) | cross(
    {"grad": by_compiled_grad}, {"a key": KEYED["a key"]} | GLOBAL
)


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


# Dynamo and inductor warn of their own deprecations and of slow numerics.
backends = rows("backend", {"eager": "eager", "aot": "aot_eager"}, fast=("aot",))
FAST = (
    *("step-a key", "step-the global stream", "loss-bound inside"),
    *("grad-dropout by a key", "vmap of grad-bound outside"),
)
compiles = pytest.mark.filterwarnings("default")


@compiles
@backends
@rows("path, source", COMPILATIONS, fast=FAST)
def test_both_passes_of_compiled_code_have_the_same_masks(
    path, source, backend, compiler
):
    assert_euler_compiled(path, source(remat), compiler(backend))


@compiles
@backends
@rows("path, source", BREAKS, fast=("loss-a generator", "step-NumPy"))
def test_a_call_that_breaks_the_graph_recomputes_with_the_same_masks(
    path, source, backend, compiler
):
    assert_euler(functools.partial(path, compile=compiler(backend)), source(remat))


@compiles
@rows("path, source", BY_INDUCTOR, fast=("step-the global stream",))
def test_both_passes_of_inductors_code_have_the_same_masks(path, source, compiler):
    assert_euler_compiled(path, source(remat), compiler("inductor"))
