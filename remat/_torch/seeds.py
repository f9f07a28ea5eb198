"""Notes the seeds that `torch.seed()` takes from the machine, to take them again.

A function that seeds so draws other numbers each time it runs. Its recompute has to
draw those of its forward.

Invariant: as of `noted`.
Rejected: to put the stream back after the run. The function reseeds it before it draws.
"""

import torch

from remat._torch.noted import NOTES, seed_of_torch


def seed() -> int:
    """Seed the global streams from the machine, as torch does, and note the seed."""
    if torch.compiler.is_compiling() or NOTES.current is None:
        return seed_of_torch()
    return NOTES.current.seed()


# Deleted by: a public hook for the seeds that torch takes from the machine.
seed.__doc__ = seed_of_torch.__doc__
torch.seed = torch.random.seed = seed
