"""Faults of `torch.func`, and of calls that are recorded and replayed."""

import pytest
import torch
from helpers import assert_not_vanishing, leaves_of, make
from torch.func import grad
from torch.utils.flop_counter import FlopCounterMode

from remat import explain, policies, remat
from remat._match import constants_of
from remat.testing import count_ops


A = make(6, 3, seed=21)
Z = torch.complex(make(6, 3, seed=22), make(6, 3, seed=23))
B = torch.complex(make(6, 2, seed=24), make(6, 2, seed=25))


# --- Kernels that conjugate lazily, below a dispatch mode ---


def pinv(z):
    return torch.linalg.pinv(z).abs().square().sum()


def residuals(z):
    return torch.linalg.lstsq(z, B, driver="gelsd").residuals.sum() * z.abs().sum()


@pytest.mark.parametrize("fn", [pinv, residuals])
@pytest.mark.parametrize(
    "policy", [None, policies.dots_saveable, policies.everything_saveable]
)
def test_complex_kernels_are_right_below_our_modes(fn, policy):
    expected = grad(fn)(Z)
    wrapped = remat(fn, policy=policy, prune=True)
    # The first call is recorded, the others follow the record.
    for _ in range(3):
        with count_ops() as ops:
            actual = grad(wrapped)(Z)
        assert torch.equal(actual, expected)
        again = policy is not policies.everything_saveable or fn is residuals
        assert ops["linalg_pinv"] + ops["linalg_lstsq"] == 1 + again
    assert_not_vanishing(expected)


def test_counting_does_not_change_complex_kernels():
    with count_ops() as ops:
        counted = torch.linalg.pinv(Z)
    assert torch.equal(counted, torch.linalg.pinv(Z))
    assert ops["linalg_pinv"] == 1


# --- Constants that were left to their defaults when the call was recorded ---


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_an_argument_may_be_given_that_was_left_to_its_default(policy):
    over: list[int] = []

    def fn(x):
        h = x.sin()
        return h.exp(), torch.amax(h, over)

    def gradient(f):
        return grad(lambda x: f(x)[0].sum())(A)

    wrapped = remat(fn, policy=policy, prune=True)
    expected = gradient(fn)
    for over[:] in [], [0], [], [1], [0, 1]:
        with count_ops() as ops:
            assert torch.equal(gradient(wrapped), expected)
        # It is recomputed only where the record turns out not to fit.
        assert ops["amax"] == (2 if over in ([0], [1]) else 1)
    assert_not_vanishing(expected)


def test_constants_are_told_apart_by_name():
    assert constants_of((A,), {"alpha": 2}) != constants_of((A,), {"beta": 2})
    assert constants_of((A, [A, None]), None) == []


# --- A result that is None is a place among the results ---


def test_the_cost_of_a_convolutions_backward_without_an_input_gradient():
    x, bias = make(2, 3, 80, 80, seed=26), make(4, seed=27)

    def fn(w):
        def loss(w):
            return torch.nn.functional.conv2d(x, w, bias).tanh().sum()

        return grad(loss)(w)

    def gradient(f):
        return grad(lambda w: f(w).square().sum())(w)

    w = make(4, 3, 3, 3, seed=28)
    expected = gradient(fn)
    assert_not_vanishing(expected)
    wrapped = remat(fn)  # "auto" asks what is saved by leaving it out
    for _ in range(2):
        with count_ops() as ops:
            assert torch.equal(gradient(wrapped), expected)
        # That of the forward, and that of the second order: none is recomputed.
        assert ops["convolution_backward"] == 2
        assert ops["tanh"] == 2
    with FlopCounterMode(display=False) as counter:
        fn(w)
    report = explain(wrapped, w.requires_grad_())
    assert report.flops == counter.get_total_flops() > 0


# --- Kernels that read memory past operations ---


def test_a_read_in_cpp_of_what_was_left_out_is_noticed():
    def fn(x):
        # Where to split is read without an operation, and no derivative reads it.
        where = torch.ones(2, dtype=torch.long).cumsum(0)
        first, _, rest = x.sin().tensor_split(where)
        return first.exp().sum() * rest.square().sum()

    def gradient(f):
        (x,) = leaves_of(A)
        # Not by torch.func, under which plain torch refuses this read.
        return torch.autograd.grad(f(x), x)[0]

    wrapped = remat(fn, prune=True)
    expected = gradient(fn)
    sines = []
    for _ in range(6):
        with count_ops() as ops:
            assert torch.equal(gradient(wrapped), expected)
        assert ops["cumsum"] == 2
        sines.append(ops["sin"])
    # Nobody knows which value was read: the replay begins anew, and is given up then.
    assert sines[0] == 3
    assert sines[-1] == 2
    assert_not_vanishing(expected)


# --- A backward in which nothing is differentiated at its level ---


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_dropout_whose_input_is_let_go(policy):
    x = make(300, 300, seed=29)

    def fn(x):
        return torch.nn.functional.dropout(x, 0.5) * 2

    def gradient(f, call):
        torch.manual_seed(call)
        return grad(lambda x: f(x.sin()).sum())(x)

    wrapped = remat(fn, policy=policy, prune=True)
    for call in range(5):
        expected = gradient(fn, call)
        with count_ops() as ops:
            actual = gradient(wrapped, call)
        assert torch.equal(actual, expected)
        assert_not_vanishing(expected)
        # The mask is drawn again; what it is multiplied with is not read, nor kept.
        assert (ops["bernoulli_"], ops["mul"]) == (2, 5)


def test_what_has_no_edge_at_a_level_is_evaluated_below_it():
    """As the forward was, and not in a level of its own."""
    levels = []

    def fn(x):
        levels.append(torch._C._functorch.maybe_current_level())
        return x * 2

    expected = torch.full_like(A, 2.0)
    for _ in range(3):
        wrapped = remat(fn, prune=True)
        assert torch.equal(grad(lambda x: wrapped(x.sin()).sum())(A), expected * A.cos())
    assert levels == [None] * len(levels)
    assert len(levels) == 6
