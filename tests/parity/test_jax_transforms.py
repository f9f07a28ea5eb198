"""What JAX's tests of `jax.checkpoint` say of transforms and loops, for eager PyTorch.

Numbers are items of the survey of JAX's tests (`RematTest` 1 to 80, then other files by
name). `test_jax_effects.py`, `test_jax_rules.py` and `test_jax_modules.py` have others.
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
