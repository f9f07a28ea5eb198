"""What JAX's tests say of loops, nesting and environments under `jax.checkpoint`.

Numbers are items of the survey of JAX's tests: see `test_jax_transforms.py`.
"""

import functools

import pytest
import torch
from support.compared import compared, points
from support.zoo import counted
from torch.func import grad, vjp

from remat import remat
from remat.testing import assert_same, count_ops


# --- 12-19: loops, redundant work, nesting, zeros, environments ---


def scan(body, carry, xs):
    """`lax.scan` in Python."""
    outs = []
    for x in xs:
        carry, out = body(carry, x)
        outs.append(out)
    return carry, torch.stack(outs)


# Each carry has uses in two bodies' outputs (promise 1).
@compared(evaluations=8, plain=4, reassociated=True, sin=2 * 4 + 4, cos=2 * 4 + 4)
def test_a_loop_of_remat_bodies_recomputes_each_once(wrap, counting):
    """12, 52: only the carries are kept."""
    body = wrap(counting(lambda c, x: ((c * x).sin(), (c + x).cos())))

    def loss(c, xs):
        carry, outs = scan(body, c, xs)
        return (carry * outs).sum()

    return grad(loss, argnums=(0, 1))(points(3), points(4, 3))


def binomial(fns, wrap):
    if len(fns) == 1:
        return fns[0]
    half = len(fns) // 2
    first, second = binomial(fns[:half], wrap), binomial(fns[half:], wrap)
    return wrap(lambda x: second(first(x)))


@compared(evaluations=4 * 3, plain=4)
def test_binomial_nesting_changes_no_value(wrap, counting):
    """14."""
    bodies = [counting(f) for f in (torch.sin, torch.exp, torch.cos, torch.tanh)]
    return grad(lambda x: binomial(bodies, wrap)(x).sum())(points(3))


@pytest.mark.parametrize("used", [0, 1], ids=["carry", "outputs"])
# In the last body, and with only the outputs used, the carry is not wanted. c has two
# uses in each body (promise 1).
@compared(evaluations=6, plain=3, reassociated=True)
def test_outputs_without_a_cotangent_cost_nothing(wrap, counting, used):
    """15, 45, 53: a part of what the body returns is not used."""
    body = wrap(counting(lambda c, x: ((c * x).sin(), (x.exp(), c.cos().exp()))))

    def loss(c):
        out, kept = 0, c
        for x in points(3, 2):
            c, outs = body(c, x)
            out = out + outs[1].sum()
        return (c.sum() + 0 * kept.sum(), out)[used]

    return grad(loss)(points(2))


# The first step only adds `bias` to constants: nothing of it is recomputed.
@compared(evaluations=4 + 3, plain=4)
def test_defaults_and_tuples_in_the_environment(wrap, counting):
    """17: default keywords and tuple state, in a loop."""
    state = (points(3), {"scale": points(3) + 1})
    bias = points(3).requires_grad_()
    body = counting(torch.sin)

    def step(c, x, *, power=2, bias=bias):
        return body(c * state[0] + x) ** power * state[1]["scale"] + bias, c.sum()

    carry, outs = scan(wrap(step), points(3), points(4, 3))
    return torch.autograd.grad(carry.sum() + outs.sum(), bias)


@compared(_softmax=2, bmm=2 + 2 + 4)
def test_attention_by_einsum(wrap, counting):
    """18."""

    def attention(q, k, v):
        weights = torch.einsum("hqd,hkd->hqk", q, k).softmax(-1)
        return torch.einsum("hqk,hkd->hqd", weights, v).square().sum()

    args = points(2, 3, 4), points(2, 5, 4).sin(), points(2, 5, 4).cos()
    return grad(wrap(attention), argnums=(0, 1, 2))(*args)


# --- 21, 22: how often ---


def both_ways(fn, body_calls):
    """The evaluations of a body in a forward and in a backward, and what they gave."""
    out, pull = vjp(fn, points(3))
    forward = len(body_calls)
    got = pull(torch.ones(3))
    return forward, len(body_calls) - forward, (out, got)


def test_a_wrapper_that_is_not_remat_adds_no_evaluation():
    """21."""
    add_one, calls = counted(lambda x: x.sin() + 1)

    def call(fn, x):
        return fn(x)

    *counts, got = both_ways(remat(lambda x: add_one(call(add_one, x))), calls)
    assert counts == [2, 2]
    assert_same(got, both_ways(lambda x: add_one(add_one(x)), calls)[2])


# --- equinox ---


# w is used by each step, several times (promise 1).
@compared(evaluations=8, plain=4, reassociated=True)
def test_values_closed_over_by_a_loop_body_get_gradients(wrap, counting):
    """equinox: the body's closure is differentiated, through every step."""
    body = counting(torch.sin)

    def f(w):
        step = wrap(lambda c: body(c * w) + w)
        c = points(3)
        for _ in range(4):
            c = step(c)
        return c.sum()

    return grad(f)(points(3) + 1)


def test_a_constant_is_computed_again_with_the_rest():
    """13: with pruning the sine of the constant would run in the forward only."""

    def f(c, x):
        return c.sin() * x

    with count_ops() as ops:
        got = grad(lambda x: remat(f)(torch.tensor(2.0), x))(points())
    assert ops["sin"] == 2
    assert_same(got, torch.tensor(2.0).sin())
    with count_ops() as ops:
        remat(f)(torch.tensor(2.0), points())
    assert ops["sin"] == 1, "nothing to differentiate: nothing to do again"


@compared(evaluations=12, plain=6, reassociated=True)  # uses of c
def test_a_loop_inside_a_loop(wrap, counting):
    """19."""
    inner = counting(lambda c, x: ((c * x).sin(), c.exp()))

    def outer(c, xs):
        carry, outs = scan(inner, c, xs)
        return carry, outs.sum()

    def loss(c):
        carry, outs = scan(wrap(outer), c, points(2, 3, 4))
        return carry.sum() + outs.sum()

    return grad(loss)(points(4))


def test_a_call_in_a_call_evaluates_twice_forward_and_three_times_in_vjp():
    """21."""
    add_one, calls = counted(lambda x: x.sin().exp() + 1)
    fn = remat(lambda x: add_one(remat(add_one)(x)))
    *counts, got = both_ways(fn, calls)
    assert counts == [2, 3]
    assert_same(got, both_ways(lambda x: add_one(add_one(x)), calls)[2])


@pytest.mark.parametrize(("count", "extra"), [(4, 2), (8, 8), (16, 24)])
def test_recursive_checkpointing_costs_a_logarithmic_factor(count, extra):
    """22: the same counts with pruning and without."""

    def recursive(fns):
        if len(fns) == 1:
            return fns[0]
        half = len(fns) // 2
        first, second = recursive(fns[:half]), recursive(fns[half:])
        if len(fns) == 2:
            return lambda x: first(second(x))
        return lambda x: first(remat(second)(x))

    def chain(fns):
        return lambda x: functools.reduce(lambda y, f: f(y), fns, x)

    body, calls = counted(lambda x: x.sin() + x)
    *counts, got = both_ways(recursive([body] * count), calls)
    assert counts == [count, extra]
    assert_same(got, both_ways(chain([body] * count), calls)[2])
