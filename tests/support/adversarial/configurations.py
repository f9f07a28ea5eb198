"""The ways to run a program: what its functions are wrapped by."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from remat import compat, policies, remat


def plain(fn):
    return fn


def torchs(fn):
    return partial(checkpoint, fn, use_reentrant=False)


def drop_in(fn):
    return partial(compat.checkpoint, fn, use_reentrant=False)


# Its inputs are of 128 bytes: what is smaller is a loss, a flag, a row.
SMALL = policies.save_smaller_than(100)

OURS = {
    "default": remat,
    "prune": partial(remat, prune=True),
    "dots": partial(remat, policy=policies.dots_saveable),
    "small": partial(remat, policy=SMALL, prune=False),
    "compat": drop_in,
}
CONFIGURATIONS = {"plain": plain, "torch": torchs, **OURS}
