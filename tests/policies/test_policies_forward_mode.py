"""Policies and pruning where forward mode is inside of reverse mode, and around it."""

import pytest
import torch
from support.tables import rows
from support.zoo import assert_not_vanishing, leaves_of, make
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap

from remat import checkpoint_name, policies, remat
from remat.testing import assert_same, count_ops


W, X = (make(4, 4, seed=5), make(4, 4, seed=6)), make(3, 4, seed=7)
PRODUCTS = "mm", "bmm", "addmm"


def block(w, x):
    """The second product is read by no derivative, nor is its tangent."""
    return x + checkpoint_name(torch.tanh(x @ w[0]), "inner") @ w[1]


def network(wrap):
    wrapped = wrap(block)
    return lambda w, x: wrapped(w, wrapped(w, x)).sin()


def push(fn, v):
    return lambda x: jvp(fn, (x,), (v,))[1]


def score(f):
    """A gradient of a value and of a tangent."""

    def loss(w):
        value, along = jvp(lambda x: f(w, x), (X,), (X.cos(),))
        return value.square().sum() + (along * X).sum()

    return grad(loss)(W)


def score_of_each(f):
    def loss(w, x):
        value, along = jvp(lambda x: f(w, x), (x,), (x.cos(),))
        return value.square().sum() + along.sin().sum()

    return vmap(grad(loss), (None, 0))(W, torch.stack([X, 2 * X]))


def gradient_of_each_tangent(f):
    def loss(w):
        tangents = vmap(push(lambda x: f(w, x[None]), X[0]))
        return tangents(X).sin().sum()

    return grad(loss)(W)


def backward_of_jvp(f):
    w = leaves_of(*W)
    value, along = jvp(lambda x: f(w, x), (X,), (X.cos(),))
    (value.square().sum() + along.sin().sum()).backward()
    return [t.grad for t in w]


def grad_of_jacfwd(f):
    return grad(lambda w: jacfwd(lambda x: f(w, x))(X[:1]).sin().sum())(W)


# What recomputes values and tangents has a record of both.
INSIDE = {
    "score": score,
    "vmap of score": score_of_each,
    "grad of vmap of jvp": gradient_of_each_tangent,
    "backward of jvp": backward_of_jvp,
    "grad of jacfwd": grad_of_jacfwd,
    "grad of jvp of jvp": lambda f: grad(
        lambda w: push(push(lambda x: f(w, x), X), X.cos())(X).sum()
    )(W),
}


def dual_around_backward(f):
    w = leaves_of(*W)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w[0], w[0].detach().cos())
        out = f((dual, w[1]), X).square().sum()
        return forward_ad.unpack_dual(torch.autograd.grad(out, w[1])[0]).tangent


# A node of values alone is recomputed with tangents that its record does not have.
AROUND = {
    "jvp of grad": lambda f: push(grad(lambda x: f(W, x).sum()), X.cos())(X),
    "hessian": lambda f: hessian(lambda x: f(W, x).sum())(X),
    "jvp of grad of jvp": lambda f: push(
        grad(lambda x: push(lambda x: f(W, x), X)(x).sum()), X.cos()
    )(X),
    "a dual level around a backward": dual_around_backward,
}
SAVES = {
    "dots": {"policy": policies.dots_saveable},
    "everything": {"policy": policies.everything_saveable},
    "names": {"policy": policies.save_only_these_names("inner")},
}


def run(transform, **options):
    """Return derivatives of the second call of its kind, and what it evaluated."""
    f = network(lambda fn: remat(fn, **options))
    transform(f)
    with count_ops() as ops:
        found = transform(f)
    return found, ops["tanh"], sum(ops[name] for name in PRODUCTS)


def plain(transform):
    with count_ops() as ops:
        found = transform(network(lambda fn: fn))
    assert_not_vanishing(found)
    return found, ops["tanh"], sum(ops[name] for name in PRODUCTS)


@pytest.mark.one_in(3)
@rows("transform", INSIDE)
def test_inside_of_reverse_mode_policies_save_values_and_tangents(transform):
    want, tanhs, products = plain(transform)
    _, again, more = run(transform)
    assert again == 2 * tanhs
    assert more > products
    for name, options in SAVES.items():
        found, ours, ours_products = run(transform, **options)
        assert_same(found, want, reassociated=True)
        assert ours == (2 * tanhs if name == "dots" else tanhs), name
        assert (ours_products == products) == (name != "names"), name


@rows("transform", INSIDE)
def test_inside_of_reverse_mode_dead_products_are_left_out(transform):
    want, tanhs, products = plain(transform)
    _, _, all_products = run(transform)
    found, again, ours = run(transform, prune=True)
    assert_same(found, want, reassociated=True)
    assert again == 2 * tanhs
    assert products < ours < all_products


@rows("transform", AROUND)
@pytest.mark.parametrize("options", [*SAVES.values(), {"prune": True}], ids=str)
def test_around_reverse_mode_all_is_recomputed(transform, options):
    want, tanhs, _ = plain(transform)
    found, again, _ = run(transform, **options)
    assert_same(found, want, reassociated=True)
    assert again >= 2 * tanhs
