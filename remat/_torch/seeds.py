"""Notes the seeds that `torch.seed()` takes from the machine, to take them again.

A function that seeds so draws other numbers each time it runs. Its recompute has to
draw those of its forward.

Invariant: who notes nothing sees torch's own function.
Rejected: to put the stream back after the run. The function reseeds it before it draws.
"""

import threading
from collections.abc import Sequence

import torch


class Seeds:
    """The seeds that one run takes, in order.

    Args:
        taken: those that the run is to take first: of the forward that it repeats.

    Attributes:
        taken: see above; those that it takes from the machine are added.
    """

    __slots__ = ("_around", "_next", "taken")

    def __init__(self, taken: Sequence[int] = ()) -> None:
        self.taken, self._next = [*taken], 0

    def start(self) -> None:
        """Have `torch.seed()` of this thread take its seeds here."""
        self._around, _NOTES.current = _NOTES.current, self

    def end(self) -> None:
        """Have it take them where it did before."""
        _NOTES.current = self._around
        del self._around

    def seed(self) -> int:
        """Seed torch's global streams; return the seed."""
        if self._next == len(self.taken):
            # The run around may be repeated, and this one with it.
            around = self._around
            self.taken.append(_seed_of_torch() if around is None else around.seed())
        else:
            torch.manual_seed(self.taken[self._next])
        self._next += 1
        return self.taken[self._next - 1]


class _Notes(threading.local):
    current: Seeds | None = None


_NOTES = _Notes()


# Deleted by: a public hook for the seeds that torch takes from the machine.
_seed_of_torch = torch.random.seed


def seed() -> int:
    """Seed the global streams from the machine, as torch does, and note the seed."""
    if torch.compiler.is_compiling() or _NOTES.current is None:
        return _seed_of_torch()
    return _NOTES.current.seed()


seed.__doc__ = _seed_of_torch.__doc__
torch.seed = torch.random.seed = seed
