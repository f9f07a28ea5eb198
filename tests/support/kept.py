"""What the tests of reports share: the bytes that a graph keeps, measured."""

import torch
from support.zoo import make
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from remat import saved_residuals
from remat.testing import live_bytes


def leaves(*sizes, seed=0):
    """Tensors of these sizes that require grad."""
    return [make(*s, seed=seed + i).requires_grad_() for i, s in enumerate(sizes)]


def fresh(args):
    """Copies of which the caller holds none, that require grad where the others do."""
    return tree_map_only(Tensor, Tensor.clone, args)


def total(residuals):
    """The bytes of all tensors; the states of random streams are none."""
    return sum(r.nbytes for r in residuals if r.dtype is not None)


def origins(fn, *args, **kwargs):
    return [r.origin for r in saved_residuals(fn, *args, **kwargs)]


def measured(fn, *args, **kwargs):
    """The bytes that the graph of a call holds, when it alone holds the arguments."""

    def run():
        copies, options = fresh((args, kwargs))
        result = fn(*copies, **options)
        torch.clear_autocast_cache()
        return [t.grad_fn for t in tree_leaves(result) if isinstance(t, Tensor)]

    torch.manual_seed(0)
    run()
    return live_bytes(run)
