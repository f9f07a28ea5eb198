"""Inputs that no backward reads are let go, and nothing else is.

From the call on that follows a recompute which went well, a call keeps the inputs
that it needs. Its graph saves some of them itself, as in plain code; what a call keeps
besides, it keeps for the sake of what it will recompute. What is let go is checked by
weak references to storages.
"""

import functools
from unittest.mock import Mock

import pytest
import torch
from support.letting_go import Held, activation, called, gradients, warmed
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
from support.zoo import V, leaves_of, make, ops_of, scalar
from torch import nn

from remat import RecomputeError, policies, remat
from remat._base.absent import like
from remat._graph.graph import handles_at
from remat._partial.follow import Collect
from remat._partial.values import key_of
from remat.policies import dots_saveable, everything_saveable
from remat.testing import assert_same, count_ops


everything = policies.everything_saveable


pytestmark = pytest.mark.usefixtures("_no_collector")


# What is computed, and which of two inputs are kept for it.
FUNCTIONS = {
    "2x + 1": (lambda x, w: 2 * x + 1 + w, ()),
    "sin(x) + w": (lambda x, w: x.sin() + w, (0,)),
    "x + sin(w)": (lambda x, w: x + w.sin(), (1,)),
    "a product": (lambda x, w: x * w, (0, 1)),
    "views": (lambda x, w: torch.cat([x.t().reshape(-1), w.flatten()]) * 2, ()),
    "sums": (lambda x, w: x.mean(0) + w.sum(), ()),
    "a matrix product": (lambda x, w: x @ w, (0, 1)),
    "shapes": (lambda x, w: x.sin() * w.shape[0] + w.expand(4, 4), (0,)),
    "detached": (lambda x, w: x.detach().sin().sum() * w + x * 2, (0,)),
    "zeros": (lambda x, w: torch.zeros_like(x) + w.new_ones(4, 4) * w + x, ()),
    "constant": (lambda x, w: x.exp().detach() + w * 3, ()),
    "one in the end": (lambda x, w: (x * 2 + w * 3).sin(), (0, 1)),
    "half": (lambda x, w: (x[:2] * w[:2]) + x[2:].mean(), (0, 1)),
    "in place": (lambda x, w: (x * 2).add_(w).mul_(3), ()),
}


def with_more(fn):
    """A function, and something beside it that is to be recomputed."""
    return lambda x, w, more: (fn(x, w), more.sin().exp())


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_the_inputs_kept_are_those_needed(case, prune):
    fn, needed = FUNCTIONS[case]
    ours = remat(with_more(fn), prune=prune)
    for _ in range(3):
        of_backward(ours, (X, W, V))
    out, held = called(ours, X, W, V)
    assert [*map(bool, held[:2])] == [i in needed or not prune for i in (0, 1)]
    ops = ops_of(lambda: scalar(out).backward())
    # Without pruning, also that of which only a constant is made.
    assert ops["exp"] == (2 if case == "constant" and not prune else 1)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_gradients_without_inputs_that_are_let_go(case):
    fn = lambda x, w: with_more(FUNCTIONS[case][0])(x, w, V * 1)
    ours = warmed(fn, X, W)
    for seed in range(3):
        x, w = make(4, 4, seed=seed), make(4, 4, seed=seed + 1)
        assert_same(gradients(ours, x, w, 1.5), gradients(fn, x, w, 1.5))


def two_and(x, w):
    return 2 * x + w.exp()


BIG = make(1 << 13, seed=1)


@pytest.mark.parametrize(
    ("options", "x", "kept"),
    [
        ({"prune": True}, X, [True, False, False]),
        ({"prune": False}, X, [True, True, True]),
        ({"prune": False, "policy": policies.dots_saveable}, X, [True, True, True]),
        ({"policy": policies.dots_saveable}, BIG, [True, True, True]),
    ],
    ids=["pruned", "in full", "in full by a policy", "by a policy"],
)
def test_a_call_keeps_an_input_that_it_does_not_need(options, x, kept):
    """The first call does; later ones do without prune=True."""
    ours = remat(two_and, **options)
    for expected in kept:
        out, (held, _) = called(ours, x, x)
        assert bool(held) == expected
        with count_ops() as ops:
            scalar(out).backward()
        assert not held
        assert ops["exp"] == 1


def test_inputs_are_let_go_once_all_results_were_recomputed():
    ours = remat(lambda x, w: (x * 2, w.sin().exp()), prune=True)

    def kept(used):
        outs, held = called(ours, X, W)
        count = sum(map(bool, held))
        scalar(outs[used]).backward()
        return count

    assert [kept(slice(1)) for _ in range(3)] == [2, 2, 2]
    assert [kept(slice(2)) for _ in range(2)] == [2, 1]


def test_an_input_is_not_needed_if_what_is_computed_of_it_is_kept():
    fn = lambda x, w: (w * x.exp()).sin()
    ours = remat(fn, prune=True, policy=everything)
    for _ in range(3):
        scalar(ours(X.clone(), leaves_of(W)[0])).backward()
    x = X.clone()
    held = Held(x)
    out = ours(x, leaves_of(W)[0])
    del x
    assert not held
    assert ops_of(lambda: scalar(out).backward())["exp"] == 0


@pytest.mark.parametrize("higher_order", [False, True])
def test_an_input_that_a_residual_depends_on(higher_order):
    """It is let go where plain's graph is there to differentiate the gradient by.

    Without that graph, the gradient itself could not be differentiated.
    """
    fn = lambda x: (x @ W).tanh().tanh()
    ours = warmed(fn, X, policy=everything, higher_order=higher_order)
    out, (held,) = called(ours, X)
    assert bool(held) == higher_order
    ops = ops_of(lambda: scalar(out).backward())
    assert (ops["mm"], ops["tanh"]) == (1, 0)

    def second(fn):
        (x,) = leaves_of(X)
        (first,) = torch.autograd.grad(scalar(fn(x * 1)), x, create_graph=True)
        return torch.autograd.grad(scalar(first), x)

    assert_same(second(ours), second(fn), reassociated=higher_order)


# --- Parameters, and what is not an activation ---


def test_parameters_are_never_let_go():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    out = warmed(module, X)(leaves_of(X)[0])
    (handle,) = handles_at(out.grad_fn)
    kept = {t.data_ptr() for _, t in handle.call.inputs.stored()}
    assert {p.data_ptr() for p in module.parameters()} <= kept


def test_captured_activations_are_let_go_as_arguments_are():
    """The graph does not hold the function, only a snapshot without tensors."""
    call = lambda h, x: remat(lambda x: x.sin().exp() + h, prune=True)(x)
    for kept in (True, False):
        h, held = activation(W)
        out = call(h, leaves_of(X)[0])
        del h
        assert bool(held) == kept
        scalar(out).backward()
        assert not held


# --- Chains and nesting ---


def test_an_outer_call_leaves_out_what_the_inner_one_let_go():
    """Also if it was recorded when the inner call still kept all of its inputs."""
    plain = lambda h, y: 2 * h + y.exp().tanh()
    inner = remat(plain, prune=True)
    ours = remat(lambda x: inner(x.sinh(), x.abs()) * 3, prune=True)
    expected = of_backward(lambda x: plain(x.sinh(), x.abs()) * 3, (X,))
    counts = []
    for _ in range(4):
        with count_ops() as ops:
            got = of_backward(ours, (X,))
        assert_same(got, expected)
        counts.append((ops["sinh"], ops["abs"]))
    assert counts[0] == (2, 2)
    assert counts[-1] == (1, 2)


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
