"""Numbers that differ, of any shape, and leaves that hold them."""

import torch
from torch import Tensor


def points(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that differ, none of which is zero."""
    size = torch.Size(shape).numel()
    return torch.linspace(0.2, 1.3, size, dtype=dtype).reshape(shape)


def leaf(*shape: int) -> Tensor:
    return points(*shape).requires_grad_()
