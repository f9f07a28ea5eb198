"""Embeddings that scale their weight in each forward.

Other layers of torch are in `parity/test_jax_modules.py`.
"""

import pytest
import torch
from support.runs import assert_replayed, configurations, leaf
from torch import nn

from remat import MutationError, remat
from remat.testing import assert_same, count_ops


# --- Embeddings that scale their weight in each forward ------------------------------


def weight_of(rows=50):
    """Rows that are longer than one, and stay so now and then by rounding."""
    return (3 * torch.randn(rows, 4)).requires_grad_()


def embedded(x, weight, indices):
    y = nn.functional.embedding(indices, weight, max_norm=1.0)
    return (y * x).sin().exp()


def embedded_twice(x, weight, indices):
    y = nn.functional.embedding(indices, weight, max_norm=1.0).sin()
    return (y * x * nn.functional.embedding(indices + 1, weight, max_norm=0.5)).exp()


def read_before(x, weight, indices):
    # The length, before the rows are scaled.
    y = (x * weight.detach().norm()).sin()
    return (y * nn.functional.embedding(indices, weight, max_norm=1.0)).exp()


def in_a_bag(x, weight, indices):
    y = nn.functional.embedding_bag(
        indices.view(2, -1), weight, max_norm=1.0, mode="sum"
    )
    return (y * x).sin().exp()


def in_another_call(x, weight, indices):
    inner = remat(lambda x: embedded(x, weight, indices))
    return inner(x.cos()).tanh()


@configurations
@pytest.mark.parametrize(
    "fn", [embedded, embedded_twice, read_before, in_a_bag, in_another_call]
)
def test_an_embedding_that_scales_its_weight_does_so_once(fn, ours):
    indices = torch.randint(0, 49, (20,))

    def program(wrap):
        weight, found = weight_of(), []
        for _ in range(4):
            x = torch.randn(4, requires_grad=True)
            y = wrap(fn)(x, weight, indices)
            scaled = weight.detach().clone()
            found += torch.autograd.grad(y.sum(), (x, weight))
            assert_same(weight.detach(), scaled)  # a recompute leaves no trace
            with torch.no_grad():
                weight -= 0.5 * found[-1]
        return found, weight.detach()

    with count_ops() as ops:
        assert_replayed(program, wrap=ours)
    # Plain does it four times, and each recompute once more.
    calls = 2 if fn is embedded_twice else 1
    assert ops["embedding_renorm_"] >= (4 + 4 + 4) * calls


def test_other_changes_of_such_a_weight_are_refused():
    def fn(x, weight, indices):
        y = embedded(x, weight, indices)
        with torch.no_grad():
            weight.mul_(0.5)
        return y

    args = leaf(4), weight_of(), torch.tensor([0, 1])
    with pytest.raises(MutationError, match="`weight` was changed in place inside"):
        remat(fn)(*args)


def test_an_embedding_that_scales_its_weight_can_be_scripted():
    scripted = torch.jit.script(nn.Embedding(4, 3, max_norm=1.0))
    assert scripted(torch.tensor([1])).shape == (1, 3)
