"""torch's checkpoint and that of `remat.compat`, for tests that say the same of both.

A test that takes `checkpoint` runs with each. With torch's it shows that the test says
what torch does; with ours, that we do the same.
"""

import functools

import pytest
from torch.utils import checkpoint as torchs

from remat import compat


theirs = functools.partial(torchs.checkpoint, use_reentrant=False)
ours = functools.partial(compat.checkpoint, use_reentrant=False)
both = pytest.mark.parametrize("checkpoint", [theirs, ours], ids=["torch", "remat"])

their_sequential = functools.partial(torchs.checkpoint_sequential, use_reentrant=False)
both_sequential = pytest.mark.parametrize(
    "sequential",
    [their_sequential, compat.checkpoint_sequential],
    ids=["torch", "remat"],
)
both_modules = pytest.mark.parametrize("api", [torchs, compat], ids=["torch", "remat"])


def wrapped(checkpoint):
    """The checkpoint as a transform of functions, for `compared`."""
    return lambda fn: functools.partial(checkpoint, fn)
