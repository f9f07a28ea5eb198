"""`torch.func.grad` and `grad_and_value`, first order."""

import pytest
import torch
from support.zoo import (
    BIG,
    BLOCKS,
    DEPTH,
    ZOO,
    W,
    X,
    assert_rematerialized,
    assert_zoo_rematerialized,
    blocks,
    counted,
    elementwise,
    leaves_of,
    matmul,
    plainly,
    scalar,
)
from torch.func import functional_call, grad, grad_and_value, vjp

from remat import remat
from remat.testing import assert_same, count_ops, memory_timeline, peak_bytes


def by_name(loss, w, x):
    return grad(lambda tree: loss(tree["w"], tree["x"][0]))({"w": w, "x": [x]})


def with_aux(loss, w, x):
    def of_w(w):
        value = loss(w, x)
        return value, {"value": value, "aux": w.sin()}

    return grad(of_w, has_aux=True)(w)


def within_backward(loss, w, x):
    """Where the base level requires grad too: then so does the result."""
    w, x = leaves_of(w, x)
    result = grad(loss)(w, x)
    assert result.requires_grad
    return result.detach()


def without_grad_mode(loss, w, x):
    with torch.no_grad():
        return grad(loss, argnums=(0, 1))(w, x)


# Evaluations: the forward and one recomputation.
GRADS = {
    "grad": lambda loss, w, x: grad(loss)(w, x),
    "argnums_1": lambda loss, w, x: grad(loss, argnums=1)(w, x),
    "argnums_0_1": lambda loss, w, x: grad(loss, argnums=(0, 1))(w, x),
    "grad_and_value": lambda loss, w, x: grad_and_value(loss)(w, x),
    "has_aux": with_aux,
    "pytree": by_name,
    "base_requires_grad": within_backward,
    "no_grad": without_grad_mode,
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", GRADS)
def test_gradients_are_those_of_the_function(how, case):
    assert_zoo_rematerialized(GRADS[how], case, evaluations=2)


@pytest.mark.parametrize("case", ZOO)
def test_the_function_itself_may_be_wrapped(case):
    fn, call = ZOO[case]

    def loss(w, x):
        return scalar(call(fn, w, x))

    assert_rematerialized(lambda f: grad(f)(W, X), loss, evaluations=2)


def test_ops_are_those_of_plain_and_one_more_forward():
    def ops_of(fn):
        with count_ops() as ops:
            grad(lambda w: fn(w, X).sum())(W)
        return ops["mm"], ops["tanh"]

    # Not pruned: the last product, which no derivative reads, is recomputed as well.
    assert ops_of(matmul) == (5, 1)
    assert ops_of(remat(matmul, prune=False)) == (7, 2)


def test_at_the_peak_one_block_is_alive():
    def peak(wrap):
        return peak_bytes(lambda: grad(blocks(wrap))(BIG)) // BIG.nbytes

    # Plain keeps the graph of its own backward too.
    assert peak(plainly) >= 2 * BLOCKS * DEPTH
    assert peak(remat) <= 2 * BLOCKS + 3 * DEPTH


def test_nothing_stays_alive_but_the_result():
    assert memory_timeline(lambda: grad(blocks(remat))(BIG))[-1] == BIG.nbytes
    assert peak_bytes(lambda: grad(blocks(remat))(BIG)) < BLOCKS * DEPTH * BIG.nbytes


def test_the_result_is_no_part_of_a_graph():
    fn, calls = counted(elementwise)
    result, value = grad_and_value(lambda w: remat(fn)(w, X).sum())(W)
    assert not result.requires_grad
    assert not value.requires_grad
    assert result.grad_fn is None
    assert len(calls) == 2


def test_an_input_that_is_not_differentiated_is_passed_through():
    def transform(f):
        return grad(lambda w: scalar(f(w, X, torch.tensor([0, 2]), 3, flag=True)))(W)

    def fn(w, x, index, n, *, flag):
        assert flag
        return (w @ x)[index].sin() ** n

    assert_rematerialized(transform, fn, evaluations=2)


def test_nothing_differentiated_in_a_call_calls_the_function_itself():
    def transform(f):
        return grad(lambda w: (f(X) * w.sin()).sum())(W)

    assert_rematerialized(transform, lambda x: x.exp(), evaluations=1)
    assert_rematerialized(
        lambda f: grad(lambda w: (f(w) * w).sum())(W), torch.exp, evaluations=2
    )


def test_an_unused_output_gets_zero():
    def transform(f):
        def loss(w):
            first, _ = f(w)
            return first.sum()

        return grad(loss)(W)

    assert_rematerialized(
        transform, lambda w: (w.sin() * 2, (w * 0).log()), evaluations=2
    )


def test_an_output_returned_detached_gets_zero():
    def transform(f):
        def loss(w):
            a, b = f(w)
            return (a * b).sum()

        return grad(loss)(W)

    def fn(w):
        return w.sin(), w.exp().detach()

    assert_rematerialized(transform, fn, evaluations=2)


def test_an_unused_input_gets_zero():
    def transform(f):
        return grad(lambda w, x: scalar(f(w, x)), argnums=(0, 1))(W, X)

    assert_rematerialized(transform, lambda w, x: w.sin() @ w, evaluations=2)


def test_an_unused_input_of_the_base_level_leaves_no_trace():
    (unused,) = leaves_of(X)

    def transform(f):
        return grad(lambda w: f(w, unused).sum())(W)

    assert_rematerialized(transform, lambda w, unused: w.sin(), evaluations=2)


def without_grad(w):
    with torch.no_grad():
        return w.exp()


def detached(w):
    return w.exp().detach()


@pytest.mark.parametrize("constant", [without_grad, detached])
def test_what_is_constant_inside_stays_so(constant):
    def transform(f):
        return grad(lambda w: f(w).sum())(W)

    assert_rematerialized(transform, lambda w: (w @ constant(w)).tanh(), evaluations=2)


def test_grad_inside():
    def energy(w, x):
        return (w @ x).tanh().pow(2).sum()

    def transform(f):
        return grad(lambda w: scalar(f(w, X)))(W)

    def fn(w, x):
        return grad(energy, argnums=1)(w, x)

    # Reassociated: w is used twice in the call, and its gradient is of second order.
    assert_rematerialized(transform, fn, evaluations=2, reassociated=True)


def test_vjp_inside():
    def transform(f):
        return grad(lambda w: scalar(f(w, X)))(W)

    def fn(w, x):
        out, pull = vjp(torch.sin, w @ x)
        return out, pull(x)

    assert_rematerialized(transform, fn, evaluations=2)


def test_a_module_under_functional_call():
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    )
    params = {k: p.detach() for k, p in layers.named_parameters()}
    x = X.float()

    def loss(params, wrap):
        def forward(module, x):
            return wrap(functional_call)(module, params, (x,))

        return forward(layers, x).sin().sum()

    expected = grad(lambda p: loss(p, plainly))(params)
    with count_ops() as ops:
        actual = grad(lambda p: loss(p, remat))(params)
    assert_same(actual, expected)
    assert ops["tanh"] == 2
    assert all(p.grad is None for p in layers.parameters())


def test_captured_tensors_of_the_level():
    def transform(f):
        def loss(w):
            h = w.sin()
            return f(lambda x: (x @ h).tanh()).sum()

        return grad(loss)(W)

    assert_rematerialized(transform, lambda g: g(X), evaluations=2)


def test_many_calls_in_one_loss():
    def transform(f):
        def loss(w):
            h = X
            for _ in range(20):
                h = f(w, h)
            return h.sum()

        return grad(loss)(W)

    # No reassociation: each call uses w once.
    assert_rematerialized(
        transform, lambda w, h: (h @ w).sin() + h, plain=20, evaluations=40
    )


def test_one_wrapped_function_over_and_over():
    fn, calls = counted(elementwise)
    wrapped = remat(fn)
    results = [grad(lambda w, f=f: f(w, X).sum())(W) for f in [wrapped] * 3 + [fn]]
    assert_same(results[:3], results[3:] * 3)
    assert len(calls) == 7
