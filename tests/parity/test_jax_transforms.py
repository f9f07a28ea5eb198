"""What JAX's tests of `jax.checkpoint` say of transforms and loops, for eager PyTorch.

Numbers are items of the survey of JAX's tests (`RematTest` 1 to 80, then other files by
name). `test_jax_modules.py` has others.
Left out: policies, names and offload (`test_policy_behaviours.py`), pruning and lists
of residuals (37, 43, 44, 72), XLA and jaxprs (20, 24, 25, 31, 76-79), reuse of keys.

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
    hessian,
    jacfwd,
    jacrev,
    linearize,
    vjp,
    vmap,
)

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


ORDERS = {
    "grad(grad(remat))": lambda wrap, f: grad(grad(wrap(f))),
    "grad(remat(grad))": lambda wrap, f: grad(wrap(grad(f))),
    "remat(grad(grad))": lambda wrap, f: grad(wrap(grad(grad(f)))),
    "grad(grad(grad(remat)))": lambda wrap, f: grad(grad(grad(wrap(f)))),
    "grad(remat(grad(remat)))": lambda wrap, f: grad(wrap(grad(wrap(f)))),
    "hessian(remat)": lambda wrap, f: hessian(wrap(f)),
    "jacrev(jacrev(remat))": lambda wrap, f: jacrev(jacrev(wrap(f))),
}


def sin_sin(x):
    return x.sin().sin()


# --- 1, 2: basics ---


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


# torch's own, of any function under linearize.
IGNORE = "ignore:Attempted to insert a get_attr Node:UserWarning"


@pytest.mark.filterwarnings(IGNORE)
@compared(evaluations=3, plain=2)
def test_a_linearized_function_is_differentiable_in_its_tangent(wrap, counting):
    """1: the linear function is its own derivative, seen from its argument too."""
    x, v = points(3).requires_grad_(), points(3).requires_grad_()
    out, push = linearize(wrap(counting(sin_sin)), x)
    tangent = push(v)
    of_v = torch.autograd.grad(tangent.sum(), v)
    return out, tangent, of_v, torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize(
    "transform", [grad, grad_and_value, jacrev], ids=lambda t: t.__name__
)
@compared(evaluations=2)
def test_a_closure_over_a_differentiated_value_gets_its_gradient(
    wrap, counting, transform
):
    """2: free variables of a lambda are inputs like any other."""
    body = counting(lambda x, y: (x * y.sin()).sin().sum())
    return transform(lambda y: wrap(lambda x: body(x, y))(points(3)) * y.sum())(
        points(3)
    )


# --- 3-7: Python, control flow ---


@pytest.mark.parametrize("flag", [True, False])
def test_an_argument_that_a_branch_reads_stays_a_bool(flag):
    """3: in the recompute too."""
    seen = Evaluations()

    def f(x, flag):
        seen.note(flag)
        return (x.sin() if flag else x.cos()).exp().sum()

    got = grad(remat(f))(points(3), flag)
    assert [*seen] == [flag, flag]
    assert_same(got, grad(f)(points(3), flag))


class Unhashable:
    __hash__ = None
    power = 3


@compared(evaluations=2)
def test_an_unhashable_argument_needs_no_declaration(wrap, counting):
    """4, and the static arguments of `Remat3Test`: no hash is asked for."""
    body = counting(lambda x, how, *, table: (x.sin() ** how.power * table["k"]).sum())
    return grad(wrap(body))(points(3), Unhashable(), table={"k": 2, "l": [None]})


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


# --- 8-10: Jacobians, batching axes, second order ---


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


@pytest.mark.parametrize("number", [2.0, torch.tensor(2.0)], ids=["python", "tensor"])
@compared(evaluations=2)
def test_the_hessian_of_a_dot_with_a_number(wrap, counting, number):
    """lax_test: a Python number is no tensor, and no trouble."""
    body = counting(lambda x, k: torch.dot(x, x) * k)
    got = hessian(wrap(body))(points(3), number)
    assert_same(got, 4 * torch.eye(3))
    return got


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


@compared(cumsum=2, sin=2)
def test_constants_made_inside_are_made_again(wrap, counting):
    """46: an op whose result is used, but which uses no input."""
    f = wrap(lambda x: (x * torch.ones(3).cumsum(0).exp()).sin().sum())
    return grad(f)(points(3))


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


@pytest.mark.filterwarnings(IGNORE)
@compared(evaluations=3, plain=2)
def test_a_linearized_value_is_differentiated(wrap, counting):
    """1, 7."""
    body = counting(sin_sin)
    return grad(lambda x: linearize(wrap(body), x)[0].sum())(points(3))


@pytest.mark.parametrize("transform", ["jacrev", "vmap(grad)"])
@compared(evaluations=2)
def test_jacobians_are_the_analytic_diagonals(wrap, counting, transform):
    """8: also of a function that brings in new constants while batched."""
    body = wrap(counting(lambda x: (x * torch.arange(1, x.numel() + 1)).sin().sin()))
    x, scale = points(5), torch.arange(1, 6)
    if transform == "jacrev":
        got = jacrev(body)(x).diagonal()
    else:
        scale = torch.ones(())
        got = vmap(grad(lambda x: body(x).sum()))(x[:, None]).squeeze()
    true = (scale * x).sin().cos() * (scale * x).cos() * scale
    assert_same(got, true, reassociated=True)
    return got


@compared(evaluations=2, reassociated=True)  # x in value and tangent (promise 1)
def test_forward_mode_inside_reverse_mode(wrap, counting):
    """8: jacfwd of remat, differentiated. The sum of a Jacobian's rows is its own."""
    body = counting(sin_sin)
    return grad(lambda x: jacfwd(wrap(body))(x).sum())(points(4))


@pytest.mark.parametrize("out_dim", [0, 1])
@pytest.mark.parametrize("in_dim", [0, 1])
@compared(evaluations=2 + 1, plain=2)  # and once for the shape
def test_batching_along_any_axis(wrap, counting, in_dim, out_dim):
    """9."""
    body = wrap(counting(lambda x: x.sin().cumsum(0).sin()))
    batched = vmap(body, in_dims=in_dim, out_dims=out_dim)

    def loss(x):
        return (batched(x) * points(*batched(x.detach()).shape)).sum()

    return grad(loss)(points(3, 4))


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_higher_orders(order):
    """7, 10: grad of grad in every order of nesting."""
    body, calls = counted(lambda x: (x.sin() * x).sin())
    want = order(plainly, body)(points())
    plain_evaluations = len(calls)
    calls.clear()
    got = order(remat, body)(points())
    assert len(calls) > plain_evaluations
    # x has two uses inside, and more outside from the second order on (promise 1).
    assert_same(got, want, reassociated=True)


@pytest.mark.parametrize("what", ["primal", "cotangent", "both"])
@compared(evaluations=2)
def test_vmap_of_primal_and_of_cotangent(wrap, counting, what):
    """equinox: vmap of the primal, of the cotangent, and of both."""
    body = wrap(counting(lambda x: x.sin().cumsum(0).exp()))
    in_dims = {"primal": (0, None), "cotangent": (None, 0), "both": (0, 0)}[what]
    args = [points(2, 3) if d == 0 else points(3) for d in in_dims]
    return vmap(lambda x, ct: vjp(body, x)[1](ct), in_dims=in_dims)(*args)


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


@pytest.mark.parametrize(("wrap", "backward"), [(plainly, 2), (remat, 3)])
def test_a_call_in_a_call_evaluates_twice_forward_and_three_times_in_vjp(
    wrap, backward
):
    """21: a wrapper that is not remat adds no evaluation."""
    add_one, calls = counted(lambda x: x.sin().exp() + 1)
    *counts, got = both_ways(remat(lambda x: add_one(wrap(add_one)(x))), calls)
    assert counts == [2, backward]
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
