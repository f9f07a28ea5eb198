"""The runner of the pruning cases fails where it should."""

import pytest
import torch
from support.pruning import (
    X,
    assert_exact,
    assert_like_plain,
    assert_not_zero,
    dead_end,
    of_func_grad,
)
from support.zoo import leaves_of, plainly, scalar

from remat import remat


def exp(x):
    return dead_end(x.exp())


def tanh(x, **options):
    return lambda x: dead_end(x.tanh())


def drawn(fn, **options):
    def wrapped(x):
        torch.rand(1)
        return fn(x)

    return wrapped


def in_full(fn, policy, prune):
    return remat(fn, prune=False)


@pytest.mark.parametrize(
    ("wrap", "match"),
    [(tanh, "differs in value"), (drawn, "differs in value"), (in_full, "not pruned")],
)
def test_a_wrong_result_a_moved_stream_or_unpruned_work_is_noticed(wrap, match):
    with pytest.raises(AssertionError, match=match):
        assert_exact(exp, X, pruned=True, wrap=wrap)


def test_a_call_that_is_pruned_is_not_off():
    with pytest.raises(AssertionError, match="not off"):
        assert_exact(exp, X, pruned=False)


def test_more_work_than_a_full_recomputation_is_noticed():
    twice = lambda fn, **options: lambda x: (remat(fn)(x), remat(fn)(x))[0]
    with pytest.raises(AssertionError, match="more than a full recompute"):
        assert_exact(exp, X, wrap=twice, way=of_func_grad)


def test_a_result_that_is_not_plains_is_noticed():
    with pytest.raises(AssertionError, match="differs in value"):
        assert_like_plain(tanh(exp), plainly(exp), X)


def test_zeros_are_noticed():
    with pytest.raises(AssertionError, match="all is zero"):
        assert_not_zero([torch.zeros(2), "text"])


def test_the_loss_of_the_cases_is_curved():
    (x,) = leaves_of(X)
    assert torch.autograd.grad(scalar(x), x)[0].count_nonzero() == x.numel()
