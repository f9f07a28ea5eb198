"""Inputs that were let go, or changed, and are read after all.

What is let go is checked by weak references to storages.
"""

import functools
from unittest.mock import Mock

import pytest
import torch
from support.letting_go import called, gradients, warmed
from support.pruning import (
    W,
    X,
    assert_like_plain,
    call_caches,
    given_up,
    last_call_cache,
    nothing_or_everything,
    of_backward,
)
from support.zoo import leaves_of, scalar

from remat import RecomputeError, remat
from remat._base.absent import like
from remat._partial.follow import Collect
from remat._partial.values import key_of
from remat.policies import dots_saveable, everything_saveable
from remat.testing import assert_same, count_ops


# --- Mutation between forward and backward ---


def sum_and(x, w):
    return x.sin().exp() + w


@pytest.mark.parametrize("calls", [3, 0], ids=["later", "first"])
def test_an_input_that_is_not_read_may_change(calls):
    ours = remat(sum_and, prune=True)
    for _ in range(calls):
        of_backward(ours, (X, W))
    x, w = leaves_of(X, W)
    h = w * 1
    out = ours(x, h)
    with torch.no_grad():
        h.zero_()
    with count_ops() as ops:
        got = torch.autograd.grad(scalar(out), (x, w))
    assert ops["exp"] == 1
    assert_same(got, gradients(sum_and, X, W))


# --- Needed after all ---


def branching(x, w, flag):
    return (x.exp() if flag["on"] else x * 2) + w.sin().exp()


class Hidden:
    """A flag that no call knows of: an attribute of a package's module."""

    def __getitem__(self, name):
        return getattr(functools, f"_of_a_test_{name}", False)


@nothing_or_everything
def test_an_input_let_go_is_needed_on_another_branch(policy):
    flag = {"on": False}
    fn = lambda x, w: branching(x, w, flag)
    ours = remat(fn, prune=True, policy=policy)
    for on in [False, False, False, True, True, False, True, False, False]:
        flag["on"] = on
        assert_same(gradients(ours, X, W), gradients(fn, X, W))


def test_a_branch_taken_in_the_recomputation_only_is_an_error(monkeypatch):
    ours = warmed(lambda x, w: branching(x, w, Hidden()), X, W)
    x, w = leaves_of(X, W)
    loss = scalar(ours(x * 1, w * 1))
    monkeypatch.setattr(functools, "_of_a_test_on", True, raising=False)
    with pytest.raises(RecomputeError, match="prune=False"):
        torch.autograd.grad(loss, (x, w))


def reading_now_and_then():
    """A function, and the flag that has Python read its input."""
    flag = {"on": False}

    def fn(x, w):
        factor = float(x.detach().numpy()[0, 0]) if flag["on"] else 1.5
        return (w * factor).sin() + x

    return fn, flag


def test_a_read_by_python_now_and_then_is_an_error_once():
    """No operation shows it. The input is kept ever after."""
    fn, flag = reading_now_and_then()
    ours = warmed(fn, X, W)
    flag["on"] = True
    with pytest.raises(
        RecomputeError, match=r"(?s)inputs that were dropped.*prune=False"
    ):
        gradients(ours, X, W)
    for _ in range(3):
        assert_same(gradients(ours, X, W), gradients(fn, X, W))
    assert not last_call_cache().reason


@given_up
def test_nothing_is_let_go_until_a_recomputation_went_well():
    """A function whose record never fits keeps its inputs."""
    flag = {"on": False}
    ours = remat(lambda x, w: branching(x, w, flag), prune=True)
    for call in range(10):
        flag["on"] = call % 2 == 0
        out, (held, _) = called(ours, X, W)
        assert held
        scalar(out).backward()
    assert last_call_cache().reason


def test_a_read_by_python_of_a_leaf_is_no_error():
    """A leaf is never let go."""
    fn, flag = reading_now_and_then()
    ours = warmed(fn, X, W)
    flag["on"] = True
    for _ in range(2):
        assert_like_plain(ours, fn, X, W)


def test_what_leaves_showed_holds_for_inputs_that_were_computed():
    """A call within packs its inputs in their order, be they leaves or not."""

    @remat
    def within(x, y, z):
        x, y, z = remat(lambda *ts: tuple(t * 1.0 for t in ts))(z, z, x)
        return z.tanh() + 0.5 * y

    def fn(x, z):
        return x + 0.5 * within(x, x.tanh(), z)

    def gradient(fn, scale):
        (x,) = leaves_of(X)
        out = fn(x * scale if scale else x, W * 2)
        return torch.autograd.grad(scalar(out), x)

    ours = remat(fn, prune=True)
    for scale in (None, 1.5, 1.5):
        got, expected = (gradient(f, scale) for f in (ours, fn))
        assert_same(got, expected)


def test_what_a_call_within_hands_on_leads_to_no_graph():
    """It got its node after it was handed on: absent tensors in it look as if read."""

    def made(wrap):
        both = wrap(lambda x, y, z: (x * 1.0, y.tanh() * 1.0, z * 1.0), prune=True)
        kept = wrap(lambda y: y.tanh() + 0.5 * y, policy=everything_saveable)

        def fn(x, y, z):
            x, y, z = both(x, y, z)
            kept(y)
            x, y, _ = both(kept(y), y, z)
            return x + 0.5 * y

        return wrap(fn, prune=True)

    ours, plain = made(remat), made(lambda fn, **_: fn)
    for _ in range(3):
        got, expected = (
            gradients(lambda x, y, f=f: f(x, y, W * 2), X, W) for f in (ours, plain)
        )
        assert_same(got, expected)


def test_what_calls_within_hand_on_keeps_its_place():
    """In a replay around, autograd makes views of absent tensors again."""

    def made(wrap):
        def dots(x, y, w):
            y = y @ w
            (x * 1.1).view(-1)[2:5].mul_(2.0)  # which nobody reads
            return y * 1.5, (y @ w).sin()

        within = wrap(dots, policy=dots_saveable)

        def fn(x, w):
            y, _ = within(x, x, w)
            return y.tanh(), x.sin()

        middle = wrap(fn, policy=dots_saveable)
        return wrap(lambda x, w: middle(x.sin(), w), policy=dots_saveable)

    ours, plain = made(remat), made(lambda fn, **_: fn)
    for _ in range(3):
        got, expected = (
            gradients(lambda x, w, f=f: f(x, w)[0], X, W) for f in (ours, plain)
        )
        assert_same(got, expected)


def test_a_record_of_absent_tensors_is_for_no_call_after_it():
    """Autograd makes a view of one again, which is an operation that none has."""

    def waves(x):
        y = x.cos()
        y[0] = x[1].tanh()
        return (y * 1.2).tanh() * 1.0

    within = remat(waves, policy=everything_saveable)
    middle = remat(lambda x: within(x) + 1)
    ours = remat(lambda x: (middle(x), x.tanh())[1], prune=True)
    (x,) = leaves_of(X)
    out = ours(x)
    caches = call_caches()
    for cache in caches:
        cache.plans = None
    out.sum().backward()
    middle(x)  # keeps what `within` does, or finds that its record does not fit
    assert len(call_caches()) == len(caches)
    assert not any(cache.misfits for cache in caches)


def test_what_stands_for_a_view_is_not_taken_for_what_was_freed():
    """Each absent tensor is a storage of its own, where another may have been."""
    of_backward(remat(lambda x: x.sin().exp(), prune=True), (X,))
    mode = Collect(last_call_cache().plans.full, [X])
    view = like(X)
    view.__class__ = torch.Tensor  # as in a replay around
    mode._numbers[key_of(view)] = -1  # of what was freed
    made_again = Mock(is_view=True, return_value=view)
    assert mode.unexpected(0, made_again, (view,), None) is view
    assert key_of(view) not in mode._numbers
    assert mode._fits
