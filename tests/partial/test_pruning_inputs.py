"""Inputs that no backward reads are let go, and nothing else is.

From the call on that follows a recompute which went well, a call keeps the inputs
that it needs. Its graph saves some of them itself, as in plain code; what a call keeps
besides, it keeps for the sake of what it will recompute. What is let go is checked by
weak references to storages.
"""

import pytest
import torch
from support.letting_go import Held, activation, called, gradients, warmed
from support.pruning import W, X, of_backward
from support.zoo import V, leaves_of, make, ops_of, scalar
from torch import nn

from remat import policies, remat
from remat._graph.graph import handles_at
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


def test_a_chain_of_blocks_keeps_what_a_policy_says_and_no_more():
    weights = [make(4, 4, seed=k) for k in range(4)]

    @remat(prune=True)
    def block(x, w):
        return x + torch.tanh(x @ w) * 2

    def chain(x):
        held = []
        for w in weights:
            x = block(x, w)
            held.append(Held(x))
        return x, held

    for _ in range(3):
        scalar(chain(*leaves_of(X))[0]).backward()
    out, held = chain(*leaves_of(X))
    # Each block keeps its input, which is the result of the one before.
    assert [*map(bool, held)] == [True] * 4
    assert ops_of(lambda: scalar(out).backward())["tanh"] == 4
    assert [*map(bool, held)] == [False] * 3 + [True]


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
