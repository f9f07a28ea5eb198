"""The systems that the benchmarks compare, each as a wrapper of one function.

A wrapper takes a function of tensors and returns what a user of that system would call
instead. What a system cannot do raises, and the tables say so.
"""

import functools
from collections.abc import Callable

import torch_remat
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remat import remat


TensorFn = Callable[..., Tensor]
Wrapper = Callable[[TensorFn], TensorFn]

BASELINE = "torch non-reentrant"


def _torch_checkpoint(use_reentrant: bool) -> Wrapper:
    def wrap(fn: TensorFn) -> TensorFn:
        return functools.partial(checkpoint, fn, use_reentrant=use_reentrant)

    return wrap


SYSTEMS: dict[str, Wrapper] = {
    "plain": lambda fn: fn,
    "torch reentrant": _torch_checkpoint(use_reentrant=True),
    BASELINE: _torch_checkpoint(use_reentrant=False),
    "torch_remat 0.2.2": torch_remat.checkpoint(),
    "remat": functools.partial(remat, prune=False),
}


def brief(error: Exception) -> str:
    """What a table cell says about a system that raised."""
    return f"n/a ({type(error).__name__})"
