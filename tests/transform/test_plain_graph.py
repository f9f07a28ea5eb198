"""Base autograd keeps its own graph: what works in plain code works in a call.

The programs are those of `support.runs`.
"""

import copy

import pytest
import torch
from support.zoo import make, ops_of, plainly
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from remat import remat
from remat.testing import assert_same, count_ops


def leaf(seed=1, shape=(4, 4)):
    return make(*shape, seed=seed).requires_grad_()


# --- The graph ---


def test_the_graph_is_that_of_plain():
    fn = lambda w, x: (x @ w).tanh().sum(0)

    def nodes(out):
        found = [out.grad_fn]
        for node in found:
            found += [p for p, _ in node.next_functions if p is not None]
        return [node.name() for node in found]

    w, x = leaf(1), leaf(2).sin()
    assert nodes(remat(fn)(w, x)) == nodes(fn(w, x))
    assert ops_of(lambda: remat(fn)(w, x).sum().backward())["mm"] == 1 + 1 + 2


def test_a_backward_of_a_part_recomputes_up_to_what_it_reads():
    """Handles of nodes that are gone need no value."""

    def fn(w):
        a = w.sin().exp()
        return a, a.tanh().cos().sum()

    w = leaf()
    a, b = remat(fn)(w)
    del b
    ops = ops_of(lambda: a.sum().backward())
    # The cosine is that of the derivative.
    assert (ops["exp"], ops["tanh"], ops["cos"]) == (1, 0, 1)
    assert torch.equal(w.grad, w.cos() * w.sin().exp())


# --- What is kept, and what is changed ---


def test_a_result_that_the_backward_reads_may_be_changed():
    def changed(wrap):
        y = wrap(lambda x: x.sin().exp())(leaf())
        return y.mul_(2).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace"):
        changed(plainly).backward()
    # With a handle, the value is not that of `y`: it is computed again.
    y = changed(remat)
    assert ops_of(y.backward)["exp"] == 1


# --- Modules ---


def test_an_update_of_large_statistics_after_calls_that_left_them_alone():
    norm = nn.BatchNorm1d(2**14 + 1).double()
    recomputed, x = remat(norm), leaf(shape=(3, 2**14 + 1))
    norm.eval()
    recomputed(x).sum().backward()
    norm.train()
    plain = copy.deepcopy(norm)
    with count_ops() as ops:
        recomputed(x).square().sum().backward()
    assert ops["native_batch_norm"] == 2
    plain(x)
    assert_same([*norm.buffers()], [*plain.buffers()])


def test_parametrizations_are_computed_in_a_recomputation_if_they_were():
    """Though the backward runs where others are cached."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parametrizations.weight_norm(layer[0])
    x, weights = torch.randn(2, 4), [*layer.parameters()]
    want = torch.autograd.grad(layer(x).sum(), weights)
    y = remat(layer)(x).sum()
    with parametrize.cached(), count_ops() as ops:
        layer(x)
        got = torch.autograd.grad(y, weights)
    assert_same(got, want)
    assert ops["_weight_norm_interface"] == 1 + 1
