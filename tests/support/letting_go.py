"""What tests of inputs that are let go share: warm calls, and what a graph holds."""

import torch
from support.pruning import of_backward
from support.zoo import leaves_of, scalar
from torch.multiprocessing.reductions import StorageWeakRef

from remat import remat


def warmed(fn, *args, **options):
    """`fn` pruned, and differentiated a few times, so that inputs may be let go."""
    ours = remat(fn, prune=True, **options)
    for _ in range(3):
        of_backward(ours, args)
    return ours


class Held:
    """A tensor that a graph may hold, by a reference to its storage."""

    def __init__(self, t):
        self.storage = StorageWeakRef(t.untyped_storage())

    def __bool__(self):
        return not self.storage.expired()


def activation(t):
    """A tensor that only a graph will hold, and whether it does."""
    tensor = leaves_of(t)[0] * 1
    return tensor, Held(tensor)


def called(ours, *args):
    """A result, and whether the call keeps each of its inputs."""
    pairs = [activation(t) for t in args]
    return ours(*(t for t, _ in pairs)), [held for _, held in pairs]


def gradients(fn, x, w, factor=1):
    """Those of two leaves, of which intermediate values go in."""
    x, w = leaves_of(x, w)
    loss = scalar(fn(x * factor, w * factor))
    return torch.autograd.grad(loss, (x, w), allow_unused=True)
