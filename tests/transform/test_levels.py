"""Levels of torch.func and of forward_ad: opened later, gone, left as they were."""

import operator

import pytest
import torch
from support.first_order import cotangents_of, parts
from support.tables import rows
from support.zoo import (
    BIG,
    DEPTH,
    V,
    W,
    X,
    assert_rematerialized,
    block,
    counted,
    elementwise,
    leaves_of,
    matmul,
    rematerialized,
)
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, jvp, vjp

from remat import MutationError, remat
from remat.testing import assert_same, live_bytes


# --- Reverse mode ---


def test_a_pull_that_is_kept_keeps_no_more():
    def keep():
        _, pull = vjp(lambda x: remat(block)(x).sin(), BIG)
        return pull, pull(BIG), pull(BIG)

    # Both gradients, the output, and the input of the sine outside.
    assert live_bytes(keep) <= 4 * BIG.nbytes


def pull_recorded_by_base(f):
    (w,) = leaves_of(W)
    out, pull = vjp(f, w)
    (pulled,) = pull(cotangents_of(out))
    pulled.sin().sum().backward()
    return pulled, w.grad


def pull_within_a_later_level(f):
    out, pull = vjp(f, W)
    loss = lambda cts: pull(cts)[0].sin().sum()
    return vjp(loss, cotangents_of(out))[1](torch.ones((), dtype=torch.double))


@pytest.mark.parametrize(
    "transform", [pull_recorded_by_base, pull_within_a_later_level]
)
def test_a_pull_is_a_call_where_it_is_differentiated(transform):
    # Forward, vjp; then the vjp of the vjp. The value of the forward is not used again.
    assert_rematerialized(transform, lambda w: w.sin() @ w, evaluations=3)


def test_a_call_of_constants_of_the_level_is_the_function_itself():
    of_constants = lambda f: grad(lambda w: (f(X) * w.sin()).sum())(W)
    assert_rematerialized(of_constants, torch.exp, evaluations=1)
    assert_rematerialized(
        lambda f: grad(lambda w: (f(w) * w).sum())(W), torch.exp, evaluations=2
    )


# --- Forward mode ---


# Reassociated: second order.
@rematerialized(
    lambda w, y: (w.sin() * y, y.exp(), torch.ones(3)), evaluations=2, reassociated=True
)
def test_an_output_has_no_tangent_under_jvp_where_it_has_none_in_plain(f):
    (y,) = leaves_of(X)
    (a, b, c), (da, db, dc) = jvp(lambda w: f(w, y), (W,), (V,))
    (a.sum() + (da * db).sum() + b.sum()).backward()
    # Detached: a constant output of a call that is recorded may require grad.
    return a, b, c.detach(), da, db.detach(), dc.detach(), y.grad


# --- Dual levels of base ---


@rematerialized(
    lambda x, y: (x.sin(), y.exp(), x.argmax(), y.detach().cos()), evaluations=2
)
def test_outputs_have_no_tangent_within_a_dual_level_where_they_have_none_in_plain(f):
    x, y = leaves_of(W, X)
    with dual_level():
        outs = f(make_dual(x, V), y)
        first, *others = [parts(t)[1] for t in outs]
        # Where plain has none, a call may give zero.
        assert all(t is None or not t.any() for t in others)
        outs[1].sum().backward()
        # Detached: a constant output of a call that is recorded may require grad.
        return [out.detach() for out in outs], first, x.grad, y.grad


def test_after_the_forward_only_inputs_and_tangents_are_alive():
    def keep(fn):
        (x,) = leaves_of(BIG)
        with dual_level():
            return unpack_dual(fn(make_dual(x, BIG.cos())))

    one = BIG.nbytes
    assert live_bytes(lambda: keep(block)) > DEPTH * one
    # The input and its tangent, twice the primals and tangents of the output.
    assert live_bytes(lambda: keep(remat(block))) <= 5 * one


def test_the_dual_level_of_the_caller_is_left_as_it_was():
    fn, calls = counted(matmul)
    w, x = leaves_of(W, X)
    with dual_level():
        dual = make_dual(w, V)
        remat(fn)(dual, x).sum().backward()
        assert unpack_dual(dual).tangent is V
        with pytest.raises(RuntimeError, match="Nested forward mode AD is not supp"):
            dual_level().__enter__()
    assert len(calls) == 2
    assert torch.autograd.forward_ad._current_level == -1


# --- What the function sees ---


def by_requiring_grad(x):
    return (x * x).exp() if x.requires_grad else x.exp() * 3


def with_a_gradient_inside(x):
    y = x.sin().exp()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return first * y


def dual_around_backward(f):
    (w,) = leaves_of(W)
    with dual_level():
        out = f(make_dual(w, V)).square().sum()
        (found,) = torch.autograd.grad(out, w)
        return out.detach(), found, unpack_dual(found).tangent


def dual_of_tangent(f):
    (w,) = leaves_of(W)
    with dual_level():
        tangent = unpack_dual(f(make_dual(w, V))).tangent
        (found,) = torch.autograd.grad(tangent.sum(), w)
        return tangent.detach(), unpack_dual(found).primal


SEEING = {
    "jvp of grad": lambda f: jvp(grad(lambda w: f(w).square().sum()), (W,), (V,)),
    "jvp of jvp of grad": lambda f: jvp(
        lambda w: jvp(grad(lambda w: f(w).square().sum()), (w,), (V,))[1], (W,), (V,)
    ),
    "a dual level around a backward": dual_around_backward,
    "a gradient of a tangent": dual_of_tangent,
}


@rows("transform", SEEING)
@pytest.mark.parametrize("fn", [by_requiring_grad, with_a_gradient_inside])
def test_a_function_sees_what_requires_grad_in_plain_code(transform, fn):
    assert_rematerialized(transform, fn, evaluations=2, reassociated=True)


def test_the_tangent_of_a_gradient_of_a_tangent_is_a_third_derivative():
    """In plain code it is not: a formula there saves values without their tangents."""
    fn, calls = counted(by_requiring_grad)
    (w,) = leaves_of(W)
    with dual_level():
        tangent = unpack_dual(remat(fn)(make_dual(w, V))).tangent
        (found,) = torch.autograd.grad(tangent.sum(), w)
        along = unpack_dual(found).tangent
    assert len(calls) == 2
    curve = lambda w: (w * w).exp()
    slope = grad(lambda w: jvp(curve, (w,), (V,))[1].sum())
    assert_same(along, jvp(slope, (W,), (V,))[1], reassociated=True)


def test_a_tangent_that_was_changed_is_refused():
    (w,), tangent = leaves_of(W), V.clone()
    with dual_level():
        out = remat(elementwise)(make_dual(w * 1, tangent), X)
        tangent.mul_(2)
        with pytest.raises(MutationError, match="a tangent was changed in place"):
            torch.autograd.grad(unpack_dual(out).tangent.sum(), w)


# --- A constant of a level, which code writes ---

INPLACE = torch.nn.Hardtanh(-0.5, 0.5, inplace=True)
WRITES = {
    "operator": lambda c: operator.iadd(c, 1),
    "method": lambda c: c.__imul__(2),
    "item": lambda c: operator.setitem(c, 0, 3),
    "option": lambda c: torch.nn.functional.hardtanh(c, -0.5, 0.5, inplace=True),
    "module": lambda c: INPLACE(c),
}


@rows("write", WRITES)
def test_a_constant_made_in_forward_mode_is_written(write):
    def run(transform):
        (x,), seen = leaves_of(X), []

        def loss(x):
            c = x.detach().flatten() * 1
            fn, calls = counted(lambda x: (write(c), (x.flatten() * c).sin())[1])
            seen.append(calls)
            return transform(fn)(x).sum()

        tangent = jvp(loss, (x,), (torch.ones_like(x),))[1]
        return torch.autograd.grad(tangent, x)[0], len(seen[0])

    (found, calls), (want, once) = run(remat), run(lambda f: f)
    assert calls > once
    torch.testing.assert_close(found, want)
