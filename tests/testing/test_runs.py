"""The runner of programs fails on what is wrong."""

import random

import pytest
import torch
from support.runs import assert_replayed, gradients, leaf
from support.zoo import plainly

from remat import remat


def noisy(x):
    return (x * torch.rand(64)).sin().exp()


def program(wrap):
    return torch.autograd.grad(wrap(noisy)(X).sum(), X)


X = leaf()


def scaled(fn):
    """A remat whose values are off by the last bits."""
    return lambda x: remat(fn)(x) * (1 + 1e-6)


def drawing(fn):
    """A remat that moves a stream."""
    return lambda x: (remat(fn)(x), random.random())[0]


def test_a_remat_passes():
    assert_replayed(program, sin=(1, 2), evaluations=(1, 2))
    assert_replayed(gradients(noisy, X), sin=2)


WRONG = {
    "identity": (plainly, "ran .* not"),
    "values": (scaled, "differs in value"),
    "streams": (drawing, "differs|expected"),
}


@pytest.mark.parametrize(("wrap", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_remat_fails(wrap, message):
    with pytest.raises(AssertionError, match=message):
        assert_replayed(program, wrap=wrap, sin=2)


@pytest.mark.parametrize(
    "counts", [{"sin": 3}, {"sin": (2, 2)}, {"evaluations": 1}, {"cos": 0}]
)
def test_other_counts_fail(counts):
    with pytest.raises(AssertionError, match="plain and rematerialized ran"):
        assert_replayed(program, **counts)


def test_gradients_that_vanish_fail():
    with pytest.raises(AssertionError, match="only zeros"):
        assert_replayed(gradients(lambda x: (x * 0).sin(), X), sin=2)
