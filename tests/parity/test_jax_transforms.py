"""What JAX's tests of `jax.checkpoint` say of transforms and loops, for eager PyTorch.

Numbers are items of the survey of JAX's tests (`RematTest` 1 to 80, then other files by
name). `test_jax_modules.py` has others.
Left out: policies, names and offload (`test_policy_behaviours.py`), pruning and lists
of residuals (37, 43, 44, 72), XLA and jaxprs (20, 24, 25, 31, 76-79), reuse of keys.
Orders of transforms, axes and arguments (2, 3, 4, 7 to 10, 17 to 19) are those of
`test_nestings.py`, `transform/test_vmap.py` and `transform/test_every_transform.py`.

Where JAX prunes the recompute, the count here is that of a full recompute, and the test
says what pruning would make of it.
"""

import functools

import pytest
import torch
from support.compared import compared, points
from support.zoo import Evaluations, counted, plainly
from torch.func import (
    grad,
    grad_and_value,
    vjp,
)

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


def sin_sin(x):
    return x.sin().sin()


# --- 1: basics ---


def test_basic_vjp_recomputes_what_it_needs():
    """1, with an output that is not differentiated. Pruned, it would run one sine."""
    x = points(3)
    with count_ops() as forward:
        out, pull, aux = vjp(
            remat(lambda x: (sin_sin(x), torch.tensor(3))), x, has_aux=True
        )
    with count_ops() as backward:
        got = pull(torch.ones(3))
    want, plain_pull = vjp(sin_sin, x)
    assert_same((out, got, aux), (want, plain_pull(torch.ones(3)), torch.tensor(3)))
    assert (forward["sin"], forward["cos"]) == (2, 0)
    assert (backward["sin"], backward["cos"]) == (2, 2)


# --- 5, 6: how often ---


def test_the_body_runs_once_for_a_call_and_once_for_its_backward():
    """5, 6, 47-51: ten calls cost ten times one call; nothing accumulates."""
    body, calls = counted(lambda x: x.sin().exp().sum())
    f = remat(body)
    for call in range(10):
        out = f(points(3).requires_grad_())
        assert len(calls) == 2 * call + 1
        out.backward()
        assert len(calls) == 2 * call + 2
    assert_same(grad(f)(points(3)), grad(body)(points(3)))


# --- 11: second order ---


def test_the_graph_of_a_backward_does_not_grow_with_the_depth():
    """11: the backward of a backward rematerializes too."""
    x = points(1000).requires_grad_()

    def deep(count):
        def f(x):
            for _ in range(count):
                x = x.sin()
            return x.sum()

        return f

    def kept(f):
        return live_bytes(lambda: torch.autograd.grad(f(x), x, create_graph=True))

    ckpt = functools.partial(remat, higher_order=True)
    assert kept(ckpt(deep(4))) == kept(ckpt(deep(16))) < kept(deep(4))
    # Without `higher_order` the graph of a backward is plain's.
    assert kept(remat(deep(4))) == kept(deep(4))


# --- Of other files ---


# x has several uses inside the inner gradient (promise 1).
@compared(evaluations=4, plain=2, reassociated=True)
def test_a_gradient_inside_a_call_with_an_output_that_is_dropped(wrap, counting):
    """35."""
    body = counting(lambda x: (x.sin() * x).sin())

    def energy(y):
        value = body(y).sum()
        return value, (value, y.exp())

    def f(x):
        force, _ = grad_and_value(energy, has_aux=True)(x)
        return (force * body(x)).sum()

    return grad(wrap(f))(points(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_value_recomputed_is_the_value_used(dtype):
    """73: bit for bit, at low precision."""
    values = Evaluations()

    def f(x):
        y = (x.sin() * 3).exp()
        values.note(y.detach())
        return (y * y).sum()

    got = grad(remat(f))(points(5, dtype=dtype))
    first, second = values
    assert_same(grad(f)(points(5, dtype=dtype)), got)
    assert_same(first, second)


# --- 12-15: loops, redundant work, nesting, zeros ---


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


# --- 21, 22: how often ---


def both_ways(fn, body_calls):
    """The evaluations of a body in a forward and in a backward, and what they gave."""
    out, pull = vjp(fn, points(3))
    forward = len(body_calls)
    got = pull(torch.ones(3))
    return forward, len(body_calls) - forward, (out, got)


@pytest.mark.parametrize(("wrap", "backward"), [(plainly, 2), (remat, 3)])
def test_a_call_in_a_call_evaluates_twice_forward_and_three_times_in_vjp(
    wrap, backward
):
    """21: a wrapper that is not remat adds no evaluation."""
    add_one, calls = counted(lambda x: x.sin().exp() + 1)
    *counts, got = both_ways(remat(lambda x: add_one(wrap(add_one)(x))), calls)
    assert counts == [2, backward]
    assert_same(got, both_ways(lambda x: add_one(add_one(x)), calls)[2])


# --- 13, 22: recursion ---


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
