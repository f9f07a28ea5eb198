"""What JAX's tests of `jax.checkpoint` say, restated for eager PyTorch.

Numbers are items of the survey of JAX's tests (`RematTest` 1 to 80, then `Remat3Test`
and other files by name). Left out for now: policies, names and offload (26-34, 36,
38-42, 54-57, 59-62, 65-71), pruning and lists of residuals (37, 43, 44, 72, dead code
in 46 and `Remat3Test`), XLA and jaxprs (20, 24, 25, 31, 76-79), and reuse of keys.

Where JAX prunes the recomputation, the count here is that of full recomputation, and
the test says what pruning would make of it.
"""

import dataclasses
import functools
import traceback
from queue import SimpleQueue

import pytest
import torch
from support.zoo import Evaluations
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from remat import CaptureError, RecomputeError, remat
from remat.testing import assert_same, count_ops, live_bytes


def points(*shape, dtype=torch.float32):
    size = torch.Size(shape).numel()
    return torch.linspace(0.2, 1.3, size, dtype=dtype).reshape(shape)


class Counted:
    """A function that counts the evaluations of its body."""

    def __init__(self, fn):
        self.fn, self.evaluations = fn, Evaluations()

    def __call__(self, *args, **kwargs):
        self.evaluations.note(None)
        return self.fn(*args, **kwargs)

    def take(self):
        count = len(self.evaluations)
        self.evaluations.clear()
        return count


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
def test_a_linearized_function_is_differentiable_in_its_tangent():
    """1: the linear function is its own derivative, seen from its argument too."""
    x, v = points(3).requires_grad_(), points(3).requires_grad_()
    body = Counted(sin_sin)
    out, push = linearize(remat(body), x)
    tangent = push(v)
    (got,) = torch.autograd.grad(tangent.sum(), v)
    want, plain_push = linearize(sin_sin, x)
    assert_same((out, tangent), (want, plain_push(v)))
    assert_same(got, torch.autograd.grad(plain_push(v).sum(), v)[0])
    (of_out,) = torch.autograd.grad(out.sum(), x)
    assert body.take() > 2
    assert_same(of_out, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.filterwarnings(IGNORE)
def test_linearization_inside_a_gradient():
    """1, 7: the value of a linearized function is differentiated."""
    body = Counted(sin_sin)
    x = points(3)
    got = grad(lambda x: linearize(remat(body), x)[0].sum())(x)
    assert body.take() > 2
    assert_same(got, grad(lambda x: linearize(sin_sin, x)[0].sum())(x))


@pytest.mark.parametrize(
    "transform", [grad, grad_and_value, jacrev], ids=lambda t: t.__name__
)
def test_a_closure_over_a_differentiated_value_is_differentiated_to(transform):
    """2: free variables of a lambda are inputs like any other."""
    body = Counted(lambda x, y: (x * y.sin()).sin().sum())

    def f(ckpt):
        return lambda y: ckpt(lambda x: body(x, y))(points(3)) * y.sum()

    got = transform(f(remat))(points(3))
    assert body.take() == 2
    assert_same(got, transform(f(lambda g: g))(points(3)))


# --- 3-7: Python, control flow, orders of transforms ---


@pytest.mark.parametrize("flag", [True, False])
def test_python_branches_on_an_argument(flag):
    """3: a bool is a bool in the body, in the recomputation too."""
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


def test_an_unhashable_argument_needs_no_declaration():
    """4, and the static arguments of `Remat3Test`: no hash is asked for."""
    body = Counted(lambda x, how, *, table: (x.sin() ** how.power * table["k"]).sum())
    got = grad(remat(body))(points(3), Unhashable(), table={"k": 2, "l": [None]})
    assert body.take() == 2
    assert_same(got, grad(body)(points(3), Unhashable(), table={"k": 2, "l": [None]}))


def test_the_body_runs_once_for_a_call_and_once_for_its_backward():
    """5, 6, 47-51: ten calls cost ten times one call; nothing accumulates."""
    body = Counted(lambda x: x.sin().exp().sum())
    f = remat(body)
    for _ in range(10):
        out = f(points(3).requires_grad_())
        assert body.take() == 1
        out.backward()
        assert body.take() == 1
    assert_same(grad(f)(points(3)), grad(body.fn)(points(3)))


# --- 8-10: Jacobians, batching axes, second order ---


@pytest.mark.parametrize(
    ("transform", "evaluations"),
    [(jacrev, 2), (lambda f: vmap(grad(lambda x: f(x).sum())), 2)],
    ids=["jacrev", "vmap(grad)"],
)
def test_jacobians_are_the_analytic_diagonals(transform, evaluations):
    """8: also of a function that brings in new constants while batched."""
    body = Counted(lambda x: (x * torch.arange(1, x.numel() + 1)).sin().sin())
    x = points(5)
    scale = torch.arange(1, 6)
    if transform is not jacrev:
        x = x[:, None]
        scale = 1
    got = transform(remat(body))(x).squeeze()
    assert body.take() == evaluations
    want = (scale * x.squeeze()).sin().cos() * (scale * x.squeeze()).cos() * scale
    assert_same(got.diagonal() if transform is jacrev else got, want, reassociated=True)


def test_forward_mode_inside_reverse_mode():
    """8: jacfwd of remat, differentiated. The sum of a Jacobian's rows is its own."""
    body = Counted(lambda x: x.sin().sin())
    got = grad(lambda x: jacfwd(remat(body))(x).sum())(points(4))
    assert body.take() > 1
    want = grad(lambda x: jacfwd(body.fn)(x).sum())(points(4))
    # Two uses of x inside, in the value and in the tangent (promise 1).
    assert_same(got, want, reassociated=True)


@pytest.mark.parametrize("out_dim", [0, 1])
@pytest.mark.parametrize("in_dim", [0, 1])
def test_batching_along_any_axis(in_dim, out_dim):
    """9."""
    body = Counted(lambda x: x.sin().cumsum(0).sin())

    def loss(ckpt):
        batched = vmap(ckpt(body), in_dims=in_dim, out_dims=out_dim)
        return lambda x: (batched(x) * points(*batched(x.detach()).shape)).sum()

    got = grad(loss(remat))(points(3, 4))
    assert body.take() == 2 + 1  # and once for the shape
    assert_same(got, grad(loss(lambda f: f))(points(3, 4)))


ORDERS = {
    "grad(grad(remat))": lambda ckpt, f: grad(grad(ckpt(f))),
    "grad(remat(grad))": lambda ckpt, f: grad(ckpt(grad(f))),
    "remat(grad(grad))": lambda ckpt, f: grad(ckpt(grad(grad(f)))),
    "grad(grad(grad(remat)))": lambda ckpt, f: grad(grad(grad(ckpt(f)))),
    "grad(remat(grad(remat)))": lambda ckpt, f: grad(ckpt(grad(ckpt(f)))),
    "hessian(remat)": lambda ckpt, f: hessian(ckpt(f)),
    "jacrev(jacrev(remat))": lambda ckpt, f: jacrev(jacrev(ckpt(f))),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_higher_orders(order):
    """7, 10: grad of grad in every order of nesting."""
    body = Counted(lambda x: (x.sin() * x).sin())
    want = order(lambda f: f, body)(points())
    plain_evaluations = body.take()
    got = order(remat, body)(points())
    assert body.take() > plain_evaluations
    # x has two uses inside, and more outside from the second order on (promise 1).
    assert_same(got, want, reassociated=True)


def test_the_backward_of_a_backward_rematerializes_too():
    """11: what a gradient's graph holds does not grow with the depth of the body."""
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


# --- 12-19: loops, redundant work, nesting, zeros, environments ---


def scan(body, carry, xs):
    """`lax.scan` in Python."""
    outs = []
    for x in xs:
        carry, out = body(carry, x)
        outs.append(out)
    return carry, torch.stack(outs)


def test_a_loop_of_remat_bodies_recomputes_each_once():
    """12, 52: only the carries are kept."""
    body = Counted(lambda c, x: ((c * x).sin(), (c + x).cos()))

    def loss(ckpt):
        def f(c, xs):
            carry, outs = scan(ckpt(body), c, xs)
            return (carry * outs).sum()

        return f

    with count_ops() as ops:
        got = grad(loss(remat), argnums=(0, 1))(points(3), points(4, 3))
    assert body.take() == 8
    assert (ops["sin"], ops["cos"]) == (2 * 4 + 4, 2 * 4 + 4)
    # Each carry has uses in two bodies' outputs (promise 1).
    want = grad(loss(lambda f: f), argnums=(0, 1))(points(3), points(4, 3))
    assert_same(got, want, reassociated=True)


def test_no_redundant_work_for_what_is_not_differentiated():
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


def binomial(fns, ckpt=remat):
    if len(fns) == 1:
        return fns[0]
    half = len(fns) // 2
    first, second = binomial(fns[:half], ckpt), binomial(fns[half:], ckpt)
    return ckpt(lambda x: second(first(x)))


def test_binomial_nesting_changes_no_value():
    """14."""
    bodies = [
        Counted(torch.sin),
        Counted(torch.exp),
        Counted(torch.cos),
        Counted(torch.tanh),
    ]
    got = grad(lambda x: binomial(bodies)(x).sum())(points(3))
    assert [b.take() for b in bodies] == [3, 3, 3, 3]
    want = grad(lambda x: binomial(bodies, lambda f: f)(x).sum())(points(3))
    assert_same(got, want)


@pytest.mark.parametrize("used", [0, 1], ids=["carry", "outputs"])
def test_outputs_without_a_cotangent_are_no_trouble(used):
    """15, 45, 53: a part of what the body returns is not used."""
    body = Counted(lambda c, x: ((c * x).sin(), (x.exp(), c.cos().exp())))

    def loss(ckpt):
        def f(c):
            out, kept = 0, c
            for x in points(3, 2):
                c, outs = ckpt(body)(c, x)
                out = out + outs[1].sum()
            return (c.sum() + 0 * kept.sum(), out)[used]

        return f

    got = grad(loss(remat))(points(2))
    # In the last body, and with only the outputs used, the carry is not wanted.
    assert body.take() == 6
    # c has two uses in each body (promise 1).
    assert_same(got, grad(loss(lambda f: f))(points(2)), reassociated=True)


def test_a_closure_without_arguments():
    """16."""
    body = Counted(lambda x: x.sin().sin().sum())
    got = grad(lambda x: remat(lambda: body(x))())(points(3))
    assert body.take() == 2
    assert_same(got, grad(body)(points(3)))


def test_defaults_and_tuples_in_the_environment():
    """17: default keywords and tuple state, in a loop."""
    state = (points(3), {"scale": points(3) + 1})
    bias = points(3).requires_grad_()
    body = Counted(torch.sin)

    def step(c, x, *, power=2, bias=bias):
        return body(c * state[0] + x) ** power * state[1]["scale"] + bias, c.sum()

    def run(ckpt):
        carry, outs = scan(ckpt(step), points(3), points(4, 3))
        return torch.autograd.grad(carry.sum() + outs.sum(), bias)

    got = run(remat)
    # The first step only adds `bias` to constants: nothing of it is recomputed.
    assert body.take() == 4 + 3
    assert_same(got, run(lambda f: f))


def test_attention_by_einsum():
    """18."""

    def attention(q, k, v):
        weights = torch.einsum("hqd,hkd->hqk", q, k).softmax(-1)
        return torch.einsum("hqk,hkd->hqd", weights, v).square().sum()

    args = points(2, 3, 4), points(2, 5, 4).sin(), points(2, 5, 4).cos()
    with count_ops() as ops:
        got = grad(remat(attention), argnums=(0, 1, 2))(*args)
    assert (ops["_softmax"], ops["bmm"]) == (2, 2 + 2 + 4)
    assert_same(got, grad(attention, argnums=(0, 1, 2))(*args))


def test_a_loop_inside_a_loop():
    """19."""
    inner = Counted(lambda c, x: ((c * x).sin(), c.exp()))

    def outer(c, xs):
        carry, outs = scan(inner, c, xs)
        return carry, outs.sum()

    def loss(ckpt):
        def f(c):
            carry, outs = scan(ckpt(outer), c, points(2, 3, 4))
            return carry.sum() + outs.sum()

        return f

    got = grad(loss(remat))(points(4))
    assert inner.take() == 12
    assert_same(got, grad(loss(lambda f: f))(points(4)), reassociated=True)  # uses of c


# --- 21, 22: how often ---


def test_nested_evaluations():
    """21: two in the forward and three in the backward."""
    add_one = Counted(lambda x: x.sin().exp() + 1)
    g = remat(lambda x: add_one(remat(add_one)(x)))
    out, pull = vjp(g, points(3))
    assert add_one.take() == 2
    got = pull(torch.ones(3))
    assert add_one.take() == 3
    want, plain_pull = vjp(lambda x: add_one(add_one(x)), points(3))
    assert_same((out, got), (want, plain_pull(torch.ones(3))))


def test_a_wrapper_that_is_not_remat_adds_no_evaluation():
    """21."""
    add_one = Counted(lambda x: x.sin() + 1)

    def call(fn, x):
        return fn(x)

    out, pull = vjp(remat(lambda x: add_one(call(add_one, x))), points(3))
    assert add_one.take() == 2
    pull(torch.ones(3))
    assert add_one.take() == 2
    assert_same(out, (points(3).sin() + 1).sin() + 1)


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

    body = Counted(lambda x: x.sin() + x)
    out, pull = vjp(recursive([body] * count), points())
    assert body.take() == count
    got = pull(torch.ones(()))
    assert body.take() == extra
    want, plain_pull = vjp(
        functools.reduce(lambda f, g: lambda x: g(f(x)), [body] * count), points()
    )
    assert_same((out, got), (want, plain_pull(torch.ones(()))))


# --- 23: what escapes or differs ---


def escaping(escaped):
    def f(x):
        y = x.sin().sin()
        escaped.append(y)
        return y.exp().sum()

    return f


def test_an_intermediate_that_escapes_has_its_gradient_at_base():
    """23: it leaves through a list, and is used there."""
    results = []
    for ckpt, sines in ((remat, 2 + 1), (lambda f: f, 2)):
        escaped, x = [], points(3).requires_grad_()
        with count_ops() as ops:
            ckpt(escaping(escaped))(x)
            escaped[0].sum().backward()
        assert (len(escaped), ops["sin"]) == (1, sines)
        results.append(x.grad)
    assert_same(*results)


def test_an_intermediate_that_escapes_is_refused_under_torch_func():
    """23."""

    def loss(x):
        escaped = []
        return remat(escaping(escaped))(x) + escaped[0].sum()

    with pytest.raises(CaptureError, match="other than by being returned"):
        grad(loss)(points(3))


def test_a_recomputation_sees_the_state_of_the_call():
    """23: the state that decides changed in between."""
    state = {"rows": 2}

    def f(x):
        return x.sin().expand(state["rows"], 3).exp()

    x = points(3).requires_grad_()
    out = remat(f)(x)
    state["rows"] = 4
    with count_ops() as ops:
        (got,) = torch.autograd.grad(out.sum(), x)
    assert (ops["sin"], state["rows"]) == (1, 4)
    state["rows"] = 2
    assert_same(got, torch.autograd.grad(f(x).sum(), x)[0])


def test_a_recomputation_that_differs_is_refused():
    """23: what decides is state that no snapshot can hold."""
    rows = SimpleQueue()
    rows.put(2)
    rows.put(4)
    next_rows = rows.get

    def f(x):
        return x.sin().expand(next_rows(), 3).exp()

    out = remat(f)(points(3).requires_grad_())
    with pytest.raises(RecomputeError, match=r"(?s)recomputation:\n.*\[4, 3\]"):
        out.sum().backward()


# --- 35: grad inside ---


def test_a_gradient_inside_with_an_output_that_is_dropped():
    """35."""
    body = Counted(lambda x: (x.sin() * x).sin())

    def f(x):
        g, (value, _unused) = (
            grad_and_value(
                lambda y: (lambda v: (v, (v, y.exp())))(body(y).sum()), has_aux=True
            )(x)[0],
            (body(x), x.exp()),
        )
        return (g * value).sum()

    got = grad(remat(f))(points(3))
    assert body.take() == 4
    # x has several uses inside the inner gradient (promise 1).
    assert_same(got, grad(f)(points(3)), reassociated=True)


def test_constants_made_inside_are_made_again():
    """46: an op whose result is used, but which uses no input."""

    def f(x):
        return (x * torch.ones(3).cumsum(0).exp()).sin().sum()

    with count_ops() as ops:
        got = grad(remat(f))(points(3))
    assert (ops["cumsum"], ops["sin"]) == (2, 2)
    assert_same(got, grad(f)(points(3)))


# --- 33, 58, 64, and custom_api_test: custom derivatives ---


class WrongSin(Function):
    """A sine whose derivative is deliberately four times the cosine."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 4 * cotangent * x.cos()

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 4 * tangent * x.cos()


CUSTOM = {
    "grad(remat)": (lambda ckpt: grad(ckpt(WrongSin.apply)), 4.0, torch.cos),
    "grad(grad(remat))": (
        lambda ckpt: grad(grad(ckpt(WrongSin.apply))),
        -4.0,
        torch.sin,
    ),
    "grad(remat(grad))": (
        lambda ckpt: grad(ckpt(grad(WrongSin.apply))),
        -4.0,
        torch.sin,
    ),
    "grad(grad(grad(remat)))": (
        lambda ckpt: grad(grad(grad(ckpt(WrongSin.apply)))),
        -4.0,
        torch.cos,
    ),
    "vmap(grad(remat))": (
        lambda ckpt: lambda x: vmap(grad(ckpt(WrongSin.apply)))(x[None])[0],
        4.0,
        torch.cos,
    ),
    "jvp(grad(remat))": (
        lambda ckpt: (
            lambda x: jvp(grad(ckpt(WrongSin.apply)), (x,), (torch.ones_like(x),))[1]
        ),
        -4.0,
        torch.sin,
    ),
}


@pytest.mark.parametrize(
    ("derivative", "factor", "true"), CUSTOM.values(), ids=list(CUSTOM)
)
def test_custom_derivatives_are_used_though_they_are_wrong(derivative, factor, true):
    """custom_api_test: the rule is what counts, to every order."""
    x = points()
    with count_ops() as plain_ops:
        want = derivative(lambda f: f)(x)
    with count_ops() as ops:
        got = derivative(remat)(x)
    assert ops["sin"] > plain_ops["sin"]
    assert_same(got, want)
    assert_same(got, factor * true(x))


def test_a_custom_derivative_by_forward_mode():
    """58, 64: inside a loop, under remat, differentiated again."""

    def f(x):
        for _ in range(3):
            x = WrongSin.apply(x) * 2.0
        return x.sum()

    def directional(ckpt):
        return grad(lambda x: jvp(ckpt(f), (x,), (points(3),))[1])

    with count_ops() as ops:
        got = directional(remat)(points(3))
    with count_ops() as plain_ops:
        want = directional(lambda f: f)(points(3))
    assert ops["sin"] > plain_ops["sin"]
    assert_same(got, want, reassociated=True)  # x in value and tangent (promise 1)


class ScaledByDict(Function):
    """Takes its tensors in a dict, and a flag that has no derivative."""

    @staticmethod
    def forward(x, scale, negative):
        return x * scale * (-1 if negative else 1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        del output
        x, scale, ctx.negative = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx, cotangent):
        x, scale = ctx.saved_tensors
        return 7 * cotangent * scale.exp(), cotangent * x.exp(), None


def test_a_custom_rule_with_a_dict_and_a_flag():
    """custom_api_test: dictionaries and arguments that are not differentiated."""
    body = Counted(lambda d, flag: ScaledByDict.apply(d["x"], d["s"], flag).sin().sum())
    args = {"x": points(3), "s": points(3) + 1}, True
    got = grad(remat(body))(*args)
    assert body.take() == 2
    assert_same(got, grad(body)(*args))


class TwoOutputs(Function):
    """Its backward is told which cotangent is missing."""

    missing: list[tuple[bool, bool]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.exp()

    @staticmethod
    def backward(ctx, of_sin, of_exp):
        TwoOutputs.missing.append((of_sin is None, of_exp is None))
        (x,) = ctx.saved_tensors
        return of_sin * x.cos()


def test_a_custom_rule_sees_which_cotangents_do_not_exist():
    """custom_api_test: symbolic zeros."""
    TwoOutputs.missing.clear()
    x = points(3).requires_grad_()
    with count_ops() as ops:
        remat(lambda x: TwoOutputs.apply(x.sin()))(x)[0].sum().backward()
    assert TwoOutputs.missing == [(False, True)]
    assert ops["sin"] == 2 + 2
    assert_same(x.grad, x.detach().sin().cos() * x.detach().cos())


class ImplicitSolve(Function):
    """Solve A y = b; the derivative is another solve (custom_linear_solve)."""

    @staticmethod
    def forward(a, b):
        return torch.linalg.solve(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, cotangent):
        a, y = ctx.saved_tensors
        of_b = ImplicitSolve.apply(a.mT, cotangent)
        return -of_b @ y.mT, of_b


def test_an_implicit_derivative():
    """custom_linear_solve: first and second order."""
    a = (points(3, 3).sin() + 2 * torch.eye(3)).double()
    b = points(3, 1).double()

    def f(a, b):
        return ImplicitSolve.apply(a * 1.0, b.sin()).square().sum()

    with count_ops() as ops:
        got = grad(remat(f), argnums=(0, 1))(a, b)
    assert ops["sin"] == 2
    assert_same(got, grad(f, argnums=(0, 1))(a, b))
    leaves = a.requires_grad_(), b.requires_grad_()
    assert gradcheck(remat(f), leaves)
    assert gradgradcheck(remat(f), leaves)


# --- 73-75, 80: precision, errors, accumulation ---


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


def test_an_error_in_the_recomputation_shows_the_users_line():
    """74, 75."""
    count = Evaluations()

    def f(x):
        count.note(None)
        if len(count) == 2:
            raise ValueError("on the second evaluation")
        return x.sin().exp().sum()

    out = remat(f)(points(3).requires_grad_())
    with pytest.raises(ValueError, match="on the second evaluation") as info:
        out.backward()
    text = "".join(traceback.format_exception(info.value))
    assert 'raise ValueError("on the second evaluation")' in text
    assert "raised while recomputing" in text
    assert f"{__file__}:" in "".join(info.value.__notes__)


def test_gradients_accumulate_into_a_users_buffer():
    """80: by a hook of the user's, over several calls."""
    buffer = torch.zeros(3)
    body = Counted(lambda x: x.sin().exp().sum())
    x = points(3).requires_grad_()
    x.register_hook(lambda g: buffer.add_(g))
    for _ in range(3):
        remat(body)(x).backward()
    assert body.take() == 6
    assert_same(buffer, sum(grad(body)(points(3)) for _ in range(3)))


# --- Remat3Test and other files ---


def test_a_residual_that_is_also_an_output_is_not_kept_twice():
    """Remat3Test: exp's result is its own residual; the output is all there is."""
    x = points(1000).requires_grad_()

    def f(x):
        y = x.sin().exp()
        return y, y.exp()

    assert live_bytes(lambda: remat(f)(x)) == 2 * x.nbytes
    assert live_bytes(lambda: f(x)) == 2 * x.nbytes  # sin keeps x, exp its result
    with count_ops() as ops:
        got = torch.autograd.grad(sum(remat(f)(x)).sum(), x)
    assert ops["exp"] == 4
    assert_same(got, torch.autograd.grad(sum(f(x)).sum(), x))


def test_inputs_forwarded_to_outputs_are_the_inputs():
    """Remat3Test, scan's forwarded residuals: the same object, never a copy."""
    x, n = points(3).requires_grad_(), points(3)
    with count_ops() as ops:
        a, b, c = remat(lambda x, n: (x, x.sin().sin(), n))(x, n)
        assert a is x
        assert c is n
        (got,) = torch.autograd.grad((a * b).sum(), x)
    assert ops["sin"] == 2 + 1
    assert_same(got, torch.autograd.grad((x * sin_sin(x)).sum(), x)[0])


def test_what_is_saved_for_the_backward_is_the_input_itself():
    """lax_control_flow: the residual for `xs` is forwarded, not copied."""
    x = points(3).requires_grad_()
    second = remat(sin_sin)(x).grad_fn
    (first, _), *_ = second.next_functions
    with count_ops() as ops:
        assert first._saved_self.data_ptr() == x.data_ptr()
    assert ops["sin"] == 0
    with count_ops() as ops:
        saved = second._saved_self
    assert ops["sin"] == 1
    assert_same(saved.detach(), x.detach().sin())


def test_effects_are_repeated_as_often_as_the_body_runs(capsys):
    """debugging_primitives: a print runs in the forward and in the recomputation."""

    def f(x):
        print("here")  # noqa: T201
        return x.sin().sum()

    assert_same(grad(remat(f))(points(3)), points(3).cos())
    assert capsys.readouterr().out.split() == ["here", "here"]


def test_effects_in_triple_nesting_run_four_times(capsys):
    """mutable_array: nesting is not free for effects: each level runs the next."""

    def f(x):
        print("here")  # noqa: T201
        return x.sin().sum()

    assert_same(grad(remat(remat(remat(f))))(points(3)), points(3).cos())
    assert capsys.readouterr().out.split() == ["here"] * 4


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(points(3))
        self.calls = Counted(torch.sin)

    def forward(self, x):
        self.count += 1
        return self.calls(x * self.weight) * self.count


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_state_is_updated_once_however_deep(depth):
    """mutable_array, flax BatchStat, haiku: a counter is 1 after a remat call."""
    module = Counter()
    fn = module
    for _ in range(depth):
        fn = remat(fn)
    fn(points(3)).sum().backward()
    # Two evaluations at any depth: only the innermost call has anything to recompute.
    assert (module.count, module.calls.take()) == (1, 2)
    assert_same(module.weight.grad, points(3) * (points(3) * points(3)).cos())


@pytest.mark.parametrize("number", [2.0, torch.tensor(2.0)], ids=["python", "tensor"])
def test_the_hessian_of_a_dot_with_a_number(number):
    """lax_test: a Python number is no tensor, and no trouble."""
    body = Counted(lambda x, k: torch.dot(x, x) * k)
    got = hessian(remat(body))(points(3), number)
    assert body.take() > 2
    assert_same(got, 4 * torch.eye(3))


def test_a_check_at_run_time_is_still_reported():
    """checkify: `torch._assert` inside, in the forward and in the recomputation."""
    limits = SimpleQueue()
    for limit in (0.0, 10.0, 0.0):
        limits.put(limit)
    next_limit = limits.get

    def f(x):
        torch._assert(bool((x < next_limit()).all()), "x is too large")
        return x.sin().exp().sum()

    with pytest.raises(AssertionError, match="x is too large"):
        remat(f)(points(3).requires_grad_())
    out = remat(f)(points(3).requires_grad_())
    with pytest.raises(AssertionError, match="x is too large") as info:
        out.backward()
    assert "raised while recomputing" in "".join(info.value.__notes__)


def test_an_output_without_tangent_stays_so():
    """api_test: `stop_gradient(x) * 2` returned from remat is not differentiated."""
    x = points(3).requires_grad_()
    a, b = remat(lambda x: (x.detach() * 2, sin_sin(x)))(x)
    assert (a.requires_grad, b.requires_grad) == (False, True)
    with count_ops() as ops:
        b.sum().backward()
    assert ops["sin"] == 1
    assert_same(x.grad, x.detach().sin().cos() * x.detach().cos())


@pytest.mark.parametrize("seed", range(6))
def test_random_permutations_of_forwarded_and_computed_leaves(seed):
    """api_test: inputs and outputs in any order, some passed through."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(6, generator=generator).tolist()
    ops_run = Counted(torch.sin)

    def f(*xs):
        made = [ops_run(xs[0] * xs[1]), xs[2].exp() * xs[0], xs[1].cos()]
        pool = [*xs, *made]
        return [pool[i] for i in order]

    xs = [points(3).double() + k for k in range(3)]
    leaves = [x.requires_grad_() for x in xs]
    fn = remat(f)

    def loss(g, *xs):
        return sum((k + 1) * o.sin().sum() for k, o in enumerate(g(*xs)))

    got = torch.autograd.grad(loss(fn, *leaves), leaves)
    assert ops_run.take() == 2
    assert_same(got, torch.autograd.grad(loss(f, *leaves), leaves))
    assert gradcheck(functools.partial(loss, fn), leaves)


# --- Equinox, flax, haiku ---


def test_values_closed_over_by_a_loop_body_get_gradients():
    """equinox: the body's closure is differentiated, through every step."""
    body = Counted(torch.sin)

    def loop(ckpt):
        def f(w):
            step = ckpt(lambda c: body(c * w) + w)
            c = points(3)
            for _ in range(4):
                c = step(c)
            return c.sum()

        return f

    got = grad(loop(remat))(points(3) + 1)
    assert body.take() == 8
    # w is used by each step, several times (promise 1).
    assert_same(got, grad(loop(lambda f: f))(points(3) + 1), reassociated=True)


def test_zero_size_buffers_and_integer_carries():
    """equinox: zero-size arrays and values without a derivative in the carry."""
    body = Counted(lambda x: x.sin().exp())

    def step(carry):
        x, empty, n = carry["x"], carry["empty"], carry["n"]
        return {"x": body(x), "empty": empty * 2.0, "n": n + 1}

    def f(ckpt, x, empty):
        carry = {"x": x, "empty": empty, "n": torch.tensor(0)}
        for _ in range(3):
            carry = ckpt(step)(carry)
        return carry

    x, empty = points(3).requires_grad_(), torch.zeros(0, requires_grad=True)
    out = f(remat, x, empty)
    assert (out["n"], out["n"].requires_grad, out["empty"].shape) == (3, False, (0,))
    got = torch.autograd.grad(out["x"].sum() + out["empty"].sum(), (x, empty))
    assert body.take() == 6
    want = f(lambda g: g, x, empty)
    assert_same(
        got,
        torch.autograd.grad(want["x"].sum() + want["empty"].sum(), (x, empty)),
    )


def test_a_backward_of_nothing_costs_nothing():
    """equinox: with no cotangent for the call the body is not evaluated again."""
    body = Counted(lambda x: x.sin().exp().sum())
    x = points(3).requires_grad_()
    out = remat(body)(x)
    (got,) = torch.autograd.grad(x.cos().sum() + 0 * out.detach(), x)
    assert body.take() == 1
    assert_same(got, -x.detach().sin())
    (out + x.cos().sum()).backward()
    assert body.take() == 1


@pytest.mark.parametrize("what", ["primal", "cotangent", "both"])
def test_vmap_of_primal_and_of_cotangent(what):
    """equinox: vmap of the primal, of the cotangent, and of both."""
    body = Counted(lambda x: x.sin().cumsum(0).exp())
    in_dims = {"primal": (0, None), "cotangent": (None, 0), "both": (0, 0)}[what]
    args = [points(2, 3) if d == 0 else points(3) for d in in_dims]

    def pulled(ckpt):
        return vmap(lambda x, ct: vjp(ckpt(body), x)[1](ct), in_dims=in_dims)(*args)

    got = pulled(remat)
    assert body.take() == 2
    assert_same(got, pulled(lambda f: f))


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "Bilinear": (lambda: Both(nn.Bilinear(4, 4, 3)), (2, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 2), (2, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), (2, 2, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 4, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (2, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "PReLU": (lambda: nn.PReLU(), (2, 4)),
    "GELU MLP": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        (2, 4),
    ),
    "Dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (2, 4)),
    "GRU": (lambda: First(nn.GRU(4, 3, num_layers=2)), (5, 2, 4)),
    "LSTM": (lambda: First(nn.LSTM(4, 3)), (5, 2, 4)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), (2, 4)),
    "MultiheadAttention": (
        lambda: Self(nn.MultiheadAttention(4, 2, batch_first=True)),
        (2, 3, 4),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        (2, 3, 4),
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (2, 4),
    ),
    "Embedding": (lambda: Indexed(nn.Embedding(5, 4)), (2, 4)),
}


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


class Both(First):
    def forward(self, x):
        return self.inner(x, x)


class Self(First):
    def forward(self, x):
        return self.inner(x, x, x)[0]


class Indexed(First):
    def forward(self, x):
        return self.inner(torch.tensor([[1, 2, 3, 1], [4, 0, 1, 1]])) * x[..., None]


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_every_kind_of_layer(make, shape):
    """haiku, flax: all library modules, values, gradients, buffers and names."""
    torch.manual_seed(1)
    # The sine saves the result of the layer, which is therefore recomputed whole.
    module = nn.Sequential(make(), Sine()).train()
    calls = Evaluations()
    module[0].register_forward_hook(lambda *_: calls.note(None))
    x = torch.randn(shape).requires_grad_()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    results = []
    for fn in (remat(module), module):
        module.load_state_dict(state)
        torch.manual_seed(2)
        out = fn(x)
        leaves = {"x": x, **dict(module.named_parameters())}
        grads = torch.autograd.grad((out * out.cos()).sum(), list(leaves.values()))
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        stream = torch.get_rng_state()
        named = dict(zip(leaves, grads, strict=True))
        results.append((out.detach(), named, buffers, stream))
    assert len(calls) == 2 + 1
    assert_same(results[0], results[1])


def test_parameters_of_a_deep_stack_by_functional_call():
    """equinox's MLP, flax's remat_scan: a stack called with other parameters."""
    blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))
    )
    params = {k: v.detach() * 1.5 for k, v in blocks.named_parameters()}

    class Stack(nn.Module):
        def __init__(self, ckpt):
            super().__init__()
            self.blocks, self.ckpt = blocks, ckpt

        def forward(self, x):
            for block in self.blocks:
                x = self.ckpt(block)(x)
            return x.square().sum()

    def loss(ckpt):
        def f(params):
            named = {f"blocks.{k}": v for k, v in params.items()}
            return functional_call(Stack(ckpt), named, (points(2, 4),))

        return f

    with count_ops() as ops:
        got = grad(loss(remat))(params)
    assert ops["tanh"] == 24
    assert_same(got, grad(loss(lambda f: f))(params))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = Counted(torch.tanh)

    @remat
    def decorated(self, x, *, train):
        assert train is True
        return self.calls(self.linear(x))


def test_a_decorated_method_and_its_static_flag():
    """flax: methods, and a flag that arrives as a Python bool."""
    block = Block()
    got = torch.autograd.grad(
        block.decorated(points(2, 3), train=True).sum(), block.linear.weight
    )
    assert block.calls.take() == 2
    want = torch.autograd.grad(
        block.linear(points(2, 3)).tanh().sum(), block.linear.weight
    )
    assert_same(got, want)


@dataclasses.dataclass(frozen=True)
class State:
    x: torch.Tensor
    name: str
    hidden: dict


def test_a_carry_may_be_any_pytree():
    """equinox: filtered transforms, where what is no array is static."""
    body = Counted(lambda x, h: (x * h).sin())

    def step(state):
        hidden = {"h": state.hidden["h"] + 1, "n": None}
        return dataclasses.replace(
            state, x=body(state.x, state.hidden["h"]), hidden=hidden
        )

    def f(ckpt):
        def loss(x):
            state = State(x, "run", {"h": points(3), "n": None})
            for _ in range(3):
                state = ckpt(step)(state)
            assert state.name == "run"
            return state.x.sum()

        return loss

    got = grad(f(remat))(points(3))
    assert body.take() == 6
    assert_same(got, grad(f(lambda g: g))(points(3)))
