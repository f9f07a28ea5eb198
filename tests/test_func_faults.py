"""What once went wrong under `torch.func`, and in calls that are recorded and replayed."""

import pytest
import torch
from helpers import assert_not_vanishing, make
from torch.func import grad

from remat import policies, remat
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
