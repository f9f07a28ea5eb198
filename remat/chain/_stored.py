"""What a chain holds: stored carries, in memory and on disk, and what it collects.

Invariant: a carry that is let go of is freed, and its file with it, which has no name.
A carry in memory shares it with what steps return, so it knows how often that was
changed. No collected row is held longer than its step: a view of a carry would keep it
alive.
Rejected: tensors that autograd saves for the node of the chain. They would live until
the node is done. Rejected: a list of rows that is stacked at the end, which holds all
of them twice.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._base.tensors import versions_of
from remat._offload.offload import Fetched, Origin, in_file, origin_of
from remat._torch import (
    batched_here,
    current_layer,
    is_fake,
    is_legacy_batch,
    unbatched,
)
from remat.chain._steps import (
    COLLECTED,
    Live,
    Steps,
    form_of,
    refuse_other_form,
    tensors_and_frame,
)


class _OnDisk(NamedTuple):
    """A carry in files: what its tensors were, and how they were batched."""

    live: Live
    origins: Sequence[Origin]
    hows: Sequence[Any]


class Stored:
    """The stored carries of one chain; on disk all but the first, which is given."""

    __slots__ = ("_carries", "_on_disk", "_versions")

    def __init__(self, on_disk: bool) -> None:
        self._on_disk = on_disk
        self._carries: dict[int, Live | _OnDisk] = {}
        self._versions: dict[int, Sequence[int | None]] = {}

    def save(self, step: int, live: Live) -> None:
        """Store a carry."""
        if not (self._on_disk and step):
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


# --- What is collected of all steps ---


class Columns:
    """What is collected of all steps, each tensor of it stacked.

    A tensor is written to its place at once. A row that is a view of a carry would keep
    the carry alive.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._length = steps, steps.length or 0
        self._columns: list[Any] = []
        self._count = 0
        self._frame = tensors_and_frame(None)[1]
        self._form: Any = None  # of the first row
        self._needs: list[bool] = []

    def add(self, row: Live) -> None:
        """Add what was collected of the next step."""
        if not self._count:
            self._frame, self._needs = row.frame, [*row.needs]
            self._form = form_of(row)
            self._columns = [*map(self._column, row.tensors)]
        else:
            label = self._steps.label
            refuse_other_form(row, self._form, self._count, label, COLLECTED)
        self._needs = [*map(operator.or_, self._needs, row.needs)]
        for column, t in zip(self._columns, row.tensors, strict=True):
            if isinstance(column, list):
                column.append(t)
            else:
                column[self._steps.place(self._count)] = t
        self._count += 1

    def _column(self, first: Tensor) -> Any:
        if not can_be_written(first):
            return list[Tensor]()
        return first.new_empty((self._length, *first.shape))

    def stacked(self) -> Live:
        """Return what was collected, stacked, and forget it."""
        columns, self._columns = self._columns, list[Any]()
        turn = -1 if self._steps.is_reversed else 1
        stacked = [
            torch.stack(c[::turn]) if isinstance(c, list) else c for c in columns
        ]
        return Live(stacked, self._frame, self._needs)


def can_be_written(row: Tensor) -> bool:
    """Say whether a tensor of such rows can be written to; not below a vmap."""
    if current_layer() is not None or is_legacy_batch(row):
        return False
    return row.layout is torch.strided and (type(row) is Tensor or is_fake(row))
