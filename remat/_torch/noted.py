"""What a run does to torch's state that torch tells nobody: seeds, and scaled rows.

`renorms` and `seeds` note it here, for the innermost run of each thread.

Invariant: who notes nothing sees torch's own functions.
Rejected: one list for each, in a place of its own. A run starts and ends them together.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch


class Noted:
    """What one run does.

    Args:
        seeds: those that it is to take first: of the forward that it repeats.

    Attributes:
        seeds: those that it takes, in order.
        renorms: the changes of weights of embeddings, in order.
    """

    __slots__ = ("_around", "_next", "renorms", "seeds")

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        self.seeds, self._next = [*seeds], 0
        self.renorms: list[Any] = []

    def start(self) -> None:
        """Have what this thread does noted here."""
        self._around, NOTES.current = NOTES.current, self

    def end(self) -> None:
        """Have it noted where it was before."""
        around = NOTES.current = self._around
        del self._around
        if around is not None and self.renorms:
            around.renorms += self.renorms

    def seed(self) -> int:
        """Seed torch's global streams; return the seed."""
        if self._next == len(self.seeds):
            # The run around may be repeated, and this one with it.
            around = self._around
            self.seeds.append(seed_of_torch() if around is None else around.seed())
        else:
            torch.manual_seed(self.seeds[self._next])
        self._next += 1
        return self.seeds[self._next - 1]


class Notes(threading.local):
    """What one thread notes.

    Attributes:
        current: by the innermost run; None outside of all.
        later: whether logs of other calls are added to.
    """

    current: Noted | None = None
    later = True


NOTES = Notes()
seed_of_torch = torch.random.seed
