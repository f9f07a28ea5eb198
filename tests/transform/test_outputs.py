"""Inputs and outputs of all kinds, and derivatives inside, under each transform."""

import pytest
import torch
from support.compositions import assert_derivatives
from support.tables import rows
from support.zoo import W, X, leaves_of, positional
from torch.func import grad, jvp, vjp, vmap

from remat import remat
from remat.testing import assert_same, count_ops


HOWS = [
    "backward", "twice", "backward_vmap", "grad", "vjp", "jvp",
    "backward_jvp_both", "jacrev", "vmap_grad", "vmap_vmap_grad", "grad_vmap",
    "forward_ad_of_one", "forward_over_reverse", "grad_grad", "hessian",
    "jacrev_jacrev",
]  # fmt: skip
(UNUSED,) = leaves_of(X)


def product_of_outputs(fn, w, x):
    a, b = fn(w, x)
    return a * b


def output_used_twice(fn, w, x):
    h = fn(w, x)
    return h * h.sin()


def indexed(w, x, index, n, *, flag):
    assert flag
    return (w @ x)[index].sin() ** n


def without_grad(w, x):
    with torch.no_grad():
        constant = w.exp()
    return (x @ w @ constant).tanh()


def with_captured(fn, w, x):
    h = w.sin()
    return fn(lambda y: (y @ h).tanh() @ w, x)


# Where a leaf of base is an input, forward mode is recorded after all.
RECORDED = ("jvp", "forward_ad_of_one", "hessian")
# What plain torch refuses, or what is another case.
LEFT_OUT = {
    "unused_input": ("forward_over_reverse",),
    "unused_leaf": RECORDED,
    "captured_leaf": RECORDED,
    "jvp": ("forward_ad_of_one", "forward_over_reverse"),
    "jvp_jvp": ("forward_ad_of_one", "forward_over_reverse"),
}


def each(programs):
    """Each program under each transform; fast are those under a third of them."""
    rows = []
    for i, program in enumerate(programs):
        hows = [how for how in HOWS if how not in LEFT_OUT.get(program, ())]
        for k, how in enumerate(hows):
            marks = () if (k - i) % 3 == 0 else pytest.mark.slow
            rows.append(pytest.param(program, how, marks=marks))
    return pytest.mark.parametrize(("program", "how"), rows)


# The function that is wrapped, and how its results are used.
PROGRAMS = {
    "unused_output": (
        lambda w, x: (w.sin() * x, (w * 0).log()),
        lambda fn, w, x: fn(w, x)[0],
    ),
    "detached_output": (
        lambda w, x: (x.sin() * w, w.exp().detach()),
        product_of_outputs,
    ),
    "constant_output": (
        lambda w, x: (w.sin() * x, w.detach().exp(), torch.ones(3).double()),
        positional,
    ),
    "integer_output": (lambda w, x: ((w @ x).sin(), w.argmax()), product_of_outputs),
    "input_returned": (lambda w, x: (w, w.sin() * x, x), positional),
    "view_returned": (lambda w, x: (x[0], w.T, (w * x).exp().diagonal()), positional),
    "unused_input": (lambda w, x: w.sin() @ w, positional),
    "unused_leaf": (
        lambda w, x, unused: (w * x).sin(),
        lambda fn, w, x: fn(w, x, UNUSED),
    ),
    "input_twice": (lambda w, x: torch.tanh(x @ w) @ w, lambda fn, w, x: fn(w, w) * x),
    "output_used_twice": (lambda w, x: torch.tanh(x @ w) @ w, output_used_twice),
    "other_arguments": (
        indexed,
        lambda fn, w, x: fn(w, x, torch.tensor([0, 2]), 3, flag=True),
    ),
    "no_grad_inside": (without_grad, positional),
    "detach_inside": (lambda w, x: (x @ w @ w.exp().detach()).tanh(), positional),
    "captured": (lambda g, x: g(x), with_captured),
    "captured_alone": (lambda g: g().exp(), lambda fn, w, x: fn(lambda: w.sin() @ x)),
    "captured_leaf": (
        lambda g, x: g(x),
        lambda fn, w, x: fn(lambda y: (y @ UNUSED).tanh() @ w, x),
    ),
}


@each(PROGRAMS)
def test_inputs_and_outputs_of_all_kinds(program, how):
    assert_derivatives(how, *PROGRAMS[program])


def energy(w, x):
    return (w @ x).tanh().pow(2).sum()


def vjp_inside(w, x):
    out, pull = vjp(torch.sin, w @ x)
    return out, pull(x)


def nested_jvp_inside(w, x):
    return jvp(lambda w: jvp(torch.sin, (w @ x,), (w,))[1], (w,), (x,))


INSIDE = {
    "grad": lambda w, x: grad(energy, argnums=1)(w, x),
    "vjp": vjp_inside,
    "jvp": lambda w, x: jvp(torch.sin, (w @ x,), (w,)),
    "jvp_jvp": nested_jvp_inside,
    "vmap": lambda w, x: vmap(lambda x: (x @ w).tanh())(x),
}


@each(INSIDE)
def test_derivatives_inside(program, how):
    # Reassociated: w is used twice in the call, and its gradient is of second order.
    assert_derivatives(how, INSIDE[program], positional, reassociated=True)


SHARED = {
    "a result and its transpose": lambda w: ((y := (w @ w).tanh()), y.t()),
    "a result and the input's": lambda w: (w.tanh(), w.t()),
    "two rows": lambda w: (w @ w).tanh().unbind()[:2],
}


@rows("fn", SHARED)
def test_results_that_share_memory_have_graphs_at_all_levels(fn):
    def twice(fn):
        def loss(w):
            first, second = fn(w)
            return (first.sin() * second).sum()

        return grad(lambda w: grad(loss)(w).square().sum())

    with count_ops() as ops:
        ours = twice(remat(fn))(W)
    assert_same(ours, twice(fn)(W), reassociated=True)
    assert ops["tanh"] == 2 * 2
