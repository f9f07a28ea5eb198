"""Derivatives of derivatives, where a level is below another one of another kind."""

from functools import partial

import pytest
import torch
from support.tables import rows
from support.zoo import assert_not_vanishing, make
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from remat import policies, remat
from remat.testing import count_ops


X = make(3, seed=31)


class Sine(nn.Module):
    def forward(self, x):
        return x.sin() * x


def two_blocks(wrap):
    """Return a function of two blocks, the first of which has no parameters."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 3).double()
    first, second = wrap(Sine()), wrap(linear)
    return lambda x: second(first(x)), [*linear.parameters()]


def scalar(fn):
    return lambda x: fn(x).square().sum()


# --- A backward around levels that batch cotangents ---

OVER_BATCHED = {
    "jacrev": jacrev,
    "jacrev of jacrev": lambda fn: jacrev(jacrev(fn)),
    "jacrev of grad": lambda fn: jacrev(grad(scalar(fn))),
    "vmap of jacrev": lambda fn: lambda x: vmap(jacrev(fn))(torch.stack([x, 2 * x])),
    "hessian": lambda fn: hessian(scalar(fn)),
}


def parameter_gradients(transform, wrap):
    """Return gradients of the parameters, and how many sines were computed."""
    fn, parameters = two_blocks(wrap)
    with count_ops() as ops:
        out = transform(fn)(X).square().sum()
        found = torch.autograd.grad(out, parameters, allow_unused=True)
    return found, ops["sin"]


@rows("transform", OVER_BATCHED)
def test_a_backward_reaches_parameters_through_batched_cotangents(transform):
    expected, once = parameter_gradients(transform, lambda fn: fn)
    assert expected[0] is not None
    assert_not_vanishing(expected[:1])
    found, again = parameter_gradients(transform, remat)
    for ours, plain in zip(found, expected, strict=True):
        assert (ours is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(ours, plain)
    assert again > once


# --- Forward mode and reverse mode, one in the other ---


def push(fn):
    return lambda x: jvp(fn, (x,), (torch.cos(x).detach(),))[1]


def in_dual_level(fn):
    def run(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.cos(x).detach())
            return forward_ad.unpack_dual(fn(dual)).tangent

    return run


def tangent_inside(fn):
    """A number made of a tangent, by a dual level that is inside of other levels."""
    return lambda x: in_dual_level(fn)(x).sin().sum()


def gradient_inside(fn):
    """The same with a gradient of plain autograd, and its tangent."""

    def run(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x * 1, torch.cos(x).detach())
            out = fn(dual).sin().sum()
            (found,) = torch.autograd.grad(out, dual, create_graph=True)
            value, along = forward_ad.unpack_dual(found)
            return value.square().sum() + along.sum()

    return run


def gradient(fn):
    return grad(lambda x: fn(x).sum())


# Each with the evaluations of `sin`: of two blocks, and of a call around them.
RIGHT = {
    "jvp of grad": (lambda fn: push(gradient(fn)), 3, 4),
    "jvp of grad of grad": (lambda fn: push(gradient(gradient(fn))), 7, 11),
    "jvp of grad of jvp": (lambda fn: push(gradient(push(fn))), 7, 9),
    "jvp of grad of jvp of grad": (
        *(lambda fn: push(gradient(push(gradient(fn)))), 15, 23),
    ),
    "grad of jvp of jvp": (lambda fn: gradient(push(push(fn))), 7, 9),
    "grad of jvp of grad": (lambda fn: gradient(push(gradient(fn))), 7, 11),
    "jacrev of hessian": (lambda fn: jacrev(hessian(scalar(fn))), 9, 14),
    "jvp of vmap of grad": (
        *(lambda fn: push(lambda x: vmap(gradient(fn))(torch.stack([x, 2 * x]))), 3, 4),
    ),
    "jvp of jvp of grad": (lambda fn: push(push(gradient(fn))), 7, 9),
    "jvp of jvp of grad of grad": (
        lambda fn: push(push(gradient(gradient(fn)))),
        15,
        23,
    ),
    "jacfwd of hessian": (lambda fn: jacfwd(hessian(scalar(fn))), 6, 8),
    "jvp of jacfwd of jacrev": (lambda fn: push(jacfwd(jacrev(fn))), 6, 8),
    "jvp of vmap of jvp of grad": (
        lambda fn: push(lambda x: vmap(push(gradient(fn)))(torch.stack([x, 2 * x]))),
        *(7, 9),
    ),
    "jvp of jvp of grad of jvp": (lambda fn: push(push(gradient(push(fn)))), 15, 19),
    "jvp of jvp, around a call": (lambda fn: push(push(remat(gradient(fn)))), 7, 9),
    "jvp of jvp, one within a call": (lambda fn: push(remat(push(gradient(fn)))), 7, 9),
    "grad of a dual level": (lambda fn: grad(tangent_inside(fn)), 5, 5),
    "grad of grad of a dual level": (
        lambda fn: grad(lambda x: grad(tangent_inside(fn))(x).sum()),
        *(14, 16),
    ),
    "grad of a gradient in a dual level": (
        lambda fn: grad(gradient_inside(fn)),
        *(15, 23),
    ),
    "grad of grad of a gradient in a dual level": (
        lambda fn: grad(lambda x: grad(gradient_inside(fn))(x).sum()),
        *(40, 68),
    ),
    "a dual level around grad": (lambda fn: in_dual_level(gradient(fn)), 3, 4),
}


def nested(wrap):
    fn, _ = two_blocks(wrap)
    return wrap(fn)


def alone(wrap):
    return two_blocks(wrap)[0]


CASES = {
    f"{name}, {make_fn.__name__}": (transform, make_fn, count)
    for name, (transform, *counts) in RIGHT.items()
    for make_fn, count in zip((alone, nested), counts, strict=True)
}


@pytest.mark.one_in(2)
@rows("transform, make_fn, count", CASES)
def test_other_orders_are_those_of_plain(transform, make_fn, count):
    with count_ops() as once:
        expected = transform(make_fn(lambda fn: fn))(X)
    assert_not_vanishing(expected)
    with count_ops() as again:
        found = transform(make_fn(remat))(X)
    torch.testing.assert_close(found, expected)
    assert again["sin"] == count > once["sin"]


def test_a_policy_is_followed_where_a_tangent_is_written_inside():
    """The second level writes to a tangent of the first, which a replay has not."""

    def program(wrap):
        curve = wrap(lambda x: (x * 2).sin().exp())
        inside = lambda y: jvp(curve, (y,), (y * 2,))[1]
        return gradient(push(push(inside)))

    expected, sines = program(lambda fn: fn)(X), []
    assert_not_vanishing(expected)
    for policy in (policies.everything_saveable, policies.dots_saveable):
        with count_ops() as ops:
            found = program(partial(remat, policy=policy))(X)
        torch.testing.assert_close(found, expected)
        sines.append(ops["sin"])
    assert sines == [9, 13]
