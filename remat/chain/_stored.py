"""The carries that a chain stores, in memory and on disk.

Invariant: a carry that is let go of is freed, and its file with it. Files have no
names, so that nothing is left behind, whatever ends the process. A carry in memory
shares it with what steps return, so it knows how often that was changed.
Rejected: tensors that autograd saves for the node of the chain. They would live until
the node is done, and a schedule lets go of them one by one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from remat._base.tensors import versions_of
from remat._offload.offload import Fetched, Origin, in_file, origin_of
from remat._torch import batched_here, unbatched
from remat.chain._actions import Storage
from remat.chain._steps import Live


class _OnDisk(NamedTuple):
    """A carry in files.

    Attributes:
        live: the carry, its tensors mapped from files.
        origins: what each tensor was.
        hows: how they were batched, by each vmap around.
    """

    live: Live
    origins: Sequence[Origin]
    hows: Sequence[Any]


class Stored:
    """The stored carries of one chain."""

    __slots__ = ("_carries", "_versions")

    def __init__(self) -> None:
        self._carries: dict[int, Live | _OnDisk] = {}
        self._versions: dict[int, Sequence[int | None]] = {}

    def save(self, step: int, live: Live, storage: Storage) -> None:
        """Store a carry."""
        if storage is Storage.MEMORY:
            self._carries[step] = live
            self._versions[step] = versions_of(live.tensors)
            return
        below, hows = unbatched(live.tensors)
        away = live._replace(tensors=[in_file(t.detach()) for t in below])
        self._carries[step] = _OnDisk(away, [*map(origin_of, below)], hows)

    def load(self, step: int) -> Live:
        """Return a stored carry."""
        found = self._carries[step]
        if isinstance(found, Live):
            return found
        live, origins, hows = found
        fetched = Fetched(live.tensors, origins)
        # Copies: a mapped file is not to be written to, and goes with its tensor.
        tensors = [fetched.take(k).clone() for k in range(len(origins))]
        # The forward stores below all levels, whatever is around its backward.
        return live._replace(tensors=batched_here(tensors, hows) if hows else tensors)

    def changed(self, step: int) -> list[Tensor]:
        """Return the tensors of a carry that were changed since it was stored."""
        found = self._carries[step]
        if not isinstance(found, Live):
            return []
        now = versions_of(found.tensors)
        pairs = zip(found.tensors, now, self._versions[step], strict=True)
        return [t for t, version, then in pairs if version != then]

    def drop(self, step: int) -> None:
        """Let go of a carry."""
        del self._carries[step]
        self._versions.pop(step, None)

    def without_streams(self) -> None:
        """Forget the states of random streams, from which nothing was drawn."""
        for step, found in self._carries.items():
            if isinstance(found, Live):
                self._carries[step] = found._replace(ambient=None)
            else:
                live = found.live._replace(ambient=None)
                self._carries[step] = found._replace(live=live)
