"""Results of fake kernels are as large as real ones, but where `fit` knows better.

`test_opinfo_storages.py` compares all operations of torch's database.
"""

from types import SimpleNamespace

import pytest
import torch
from support.storages import Sample, bytes_not_known, compared
from torch.nn import functional


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


MASK = torch.arange(128 * 64).view(128, 64) % 3 > 0
ROWS = MASK[:, 1].clone()
# Larger than those of the database.
LARGE = {
    "a mask": (lambda x: x[MASK], (leaf(128, 64),)),
    "rows of a mask": (lambda x: x[ROWS], (leaf(128, 64),)),
    "what a mask fills": (
        lambda x: x.clone().index_put((MASK,), torch.zeros(())),
        (leaf(128, 64),),
    ),
    "var_mean": (lambda x: torch.var_mean(x, -1), (leaf(128, 64),)),
}


TARGET = torch.full((8, 4), 0.5)
# Each computes all terms, and a scalar in a storage of their size.
LOSSES = {
    "mse_loss": leaf(8, 4),
    "binary_cross_entropy": leaf(8, 4).detach().sigmoid().requires_grad_(),
    "smooth_l1_loss": leaf(8, 4),
    "soft_margin_loss": leaf(8, 4),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_losses_are_as_large_as_fit_knows(name, reduction):
    loss = lambda *args: getattr(functional, name)(*args, reduction=reduction)
    comparing = compared(SimpleNamespace(op=loss), [Sample(LOSSES[name], TARGET)])
    assert not comparing.differ
    assert any(name in seen for seen in comparing.seen)


@pytest.mark.parametrize("name", LARGE)
def test_what_large_operations_hold_is_known(name):
    fn, leaves = LARGE[name]
    assert abs(bytes_not_known(SimpleNamespace(op=fn), Sample(*leaves))) <= 200


def test_an_empty_batch_holds_nothing():
    layer = Sample(leaf(0, 4, 4), leaf(0, 4, 4))
    assert bytes_not_known(SimpleNamespace(op=torch.bmm), layer) == 0
