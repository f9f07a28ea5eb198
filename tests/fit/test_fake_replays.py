"""On fake tensors a recompute follows its plan, also past the updates of buffers."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat import policies, remat
from remat.testing import count_ops


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_batch_normalization_is_replayed(policy):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        fn = remat(model, policy=policy)
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        fn(x).sum().backward()  # is recorded
        with count_ops() as ops:
            fn(x).sum().backward()
    assert ops["convolution"] == (2 if policy is None else 1)
    assert ops["native_batch_norm"] == 2
