"""Euler's identity with masks, for each source of randomness, on each path of autograd.

A path gives an input with the gradient and the value there.
"""

import functools

import pytest
import torch
from support.euler import (
    GENERATORS,
    GLOBAL,
    HOST,
    KEYED,
    KEYS,
    SOURCES,
    XS,
    K,
    X,
    assert_euler,
    bound_outside,
    cross,
    differentiated,
    disturb,
    from_nowhere,
    generator_argument,
    keyless,
)
from support.tables import rows
from support.zoo import leaves_of, plainly
from torch.func import grad, grad_and_value, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from remat import random, remat
from remat.testing import count_ops


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
    with count_ops() as alone:  # with whichever masks
        [*path(source(checkpointed))]
    both = evaluations(path, source(lambda f: checkpointed(remat(f))))
    assert both > alone["relu"]


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


@pytest.mark.parametrize("path", [by_trace, by_trace_of_vmap])
@rows("source", KEYED)
def test_a_traced_gradient_is_of_the_masks_of_the_key_it_is_given(path, source):
    assert evaluations(path, source(remat)) == 2 * evaluations(path, source(plainly))
    assert differ(g == 0 for _, g, _ in [*path(source(remat))][:4])
