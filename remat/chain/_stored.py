"""The carries that a chain stores, in memory and on disk.

Invariant: a carry that is let go of is freed, and its file with it. Files have no
names, so that nothing is left behind, whatever ends the process.
Rejected: tensors that autograd saves for the node of the chain. They would live until
the node is done, and a schedule lets go of them one by one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from remat._offload.offload import Fetched, Origin, in_file, origin_of
from remat.chain._actions import Storage
from remat.chain._steps import Live


class _OnDisk(NamedTuple):
    """A carry in files.

    Attributes:
        live: the carry, its tensors mapped from files.
        origins: what each tensor was.
    """

    live: Live
    origins: Sequence[Origin]


class Stored:
    """The stored carries of one chain."""

    __slots__ = ("_carries",)

    def __init__(self) -> None:
        self._carries: dict[int, Live | _OnDisk] = {}

    def save(self, step: int, live: Live, storage: Storage) -> None:
        """Store a carry.

        Raises:
            OffloadError: there is no room on the disk.
        """
        if storage is Storage.MEMORY:
            self._carries[step] = live
            return
        origins = [*map(origin_of, live.tensors)]
        away = live._replace(tensors=[*map(_in_file, live.tensors)])
        self._carries[step] = _OnDisk(away, origins)

    def load(self, step: int) -> Live:
        """Return a stored carry."""
        found = self._carries[step]
        if isinstance(found, Live):
            return found
        live, origins = found
        fetched = Fetched(live.tensors, origins)
        # Copies: a mapped file is not to be written to, and goes with its tensor.
        tensors = [fetched.take(k).clone() for k in range(len(origins))]
        return live._replace(tensors=tensors)

    def drop(self, step: int) -> None:
        """Let go of a carry."""
        del self._carries[step]

    def without_streams(self) -> None:
        """Forget the states of random streams, from which nothing was drawn."""
        for step, found in self._carries.items():
            if isinstance(found, Live):
                self._carries[step] = found._replace(ambient=None)
            else:
                live = found.live._replace(ambient=None)
                self._carries[step] = found._replace(live=live)


def _in_file(tensor: Tensor) -> Tensor:
    return in_file(tensor.detach())
