"""Objects with `__del__`, which may close what others still use."""

import gc

import torch

from remat import remat
from remat.testing import count_ops


class Resource:
    closed: list[bool] = []  # noqa: RUF012

    def __init__(self):
        self.scale = torch.full((3,), 2.0)

    def __del__(self):
        Resource.closed.append(hasattr(self, "scale"))


def test_a_recompute_finalizes_nothing():
    """No instance is made of a class, be it to see whether one can be."""
    Resource.closed.clear()
    resource, x = Resource(), torch.ones(3, requires_grad=True)
    with count_ops() as ops:
        y = remat(lambda x: (x * resource.scale).exp())(x)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert ops["exp"] == 2
    assert torch.equal(got, 2 * (2 * x).exp())
    gc.collect()
    assert Resource.closed == []
    resource = y = None
    gc.collect()
    assert Resource.closed == [True]
