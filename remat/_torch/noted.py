"""What a run does to torch's state that torch tells nobody, noted to be done again.

`torch.seed()` takes a seed from the machine. A recompute has to draw the numbers of its
forward, so it takes the same one. And `max_norm=` scales rows of an embedding's weight
in place, without a graph, in each forward. To do it again may scale them again, by the
rounding of the first time, so a recompute has to start from the rows before.

Invariant: who notes nothing sees torch's own functions, and graphs are made of these.
Rejected: a copy of the weight before each forward that has such an embedding. To put
the stream back after the run: the function seeds it before it draws.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.jit import _builtins

from remat._torch.modes import unseen
from remat._torch.tensors import storage_id


class Renorm(NamedTuple):
    """One change of a weight: which rows of which storage, and what these held."""

    storage: int
    rows: Tensor
    before: Tensor


class Noted:
    """What one run does."""

    __slots__ = ("_around", "_next", "renorms", "seeds")

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        self.seeds, self._next = [*seeds], 0
        self.renorms: list[Renorm] = []

    def start(self) -> None:
        """Have what this thread does noted here."""
        self._around, _NOTES.current = _NOTES.current, self

    def end(self) -> None:
        """Have it noted where it was before."""
        around = _NOTES.current = self._around
        del self._around
        if around is not None and self.renorms:
            around.renorms += self.renorms

    def seed(self) -> int:
        """Seed torch's global streams; return the seed."""
        if self._next == len(self.seeds):
            # The run around may be repeated, and this one with it.
            around = self._around
            self.seeds.append(_seed_of_torch() if around is None else around.seed())
        else:
            torch.manual_seed(self.seeds[self._next])
        self._next += 1
        return self.seeds[self._next - 1]


class _NotesOfThread(threading.local):
    """What one thread notes: by its innermost run, and whether for other calls, too."""

    current: Noted | None = None
    later = True


_NOTES = _NotesOfThread()
_functional: Any = torch.nn.functional
_seed_of_torch = torch.random.seed
_renorm_of_torch = _functional._no_grad_embedding_renorm_


def seed() -> int:
    """Seed the global streams from the machine, as torch does, and note the seed."""
    if torch.compiler.is_compiling() or _NOTES.current is None:
        return _seed_of_torch()
    return _NOTES.current.seed()


class Renorms:
    """Changes of one weight, to which later ones are added while this is held."""

    __slots__ = ("__weakref__", "changes")

    def __init__(self) -> None:
        self.changes: list[Renorm] = []


# By the number of the storage of a weight.
_LOGS: dict[int, weakref.WeakSet[Renorms]] = {}


def later_renorms(storage: int) -> Renorms:
    """Return what each later change of the weight on a storage is added to."""
    log = Renorms()
    _LOGS.setdefault(storage, weakref.WeakSet()).add(log)
    return log


@contextmanager
def renorms_taken_back() -> Iterator[None]:
    """Run a body whose changes are taken back: they are not added anywhere."""
    before, _NOTES.later = _NOTES.later, False
    try:
        yield
    finally:
        _NOTES.later = before


def _logs_of(storage: int) -> list[list[Renorm]]:
    """Return what a change that this thread makes now is added to."""
    current = _NOTES.current
    logs: list[list[Renorm]] = [] if current is None else [current.renorms]
    if _NOTES.later and storage in _LOGS:
        logs += [log.changes for log in _LOGS[storage]]
        if not _LOGS[storage]:
            _LOGS.pop(storage, None)
    return logs


def renorm(weight: Any, indices: Any, max_norm: float, norm_type: float) -> None:
    """Scale rows of a weight, as torch does, and note them."""
    logs: list[list[Renorm]] = []
    if not torch.compiler.is_compiling() and (_NOTES.current is not None or _LOGS):
        logs = _logs_of(storage_id(weight))
    if not logs:
        _renorm_of_torch(weight, indices, max_norm, norm_type)
        return
    with unseen(), torch.no_grad():
        rows = indices.reshape(-1)
        rows = rows.unique() if rows.is_cpu else rows
        before = weight.detach()[rows]
    _renorm_of_torch(weight, indices, max_norm, norm_type)
    with unseen(), torch.no_grad():
        if rows.is_cpu:  # on a device, to compare is to wait for it
            changed = (weight.detach()[rows] != before).any(1)
            rows, before = rows[changed], before[changed]
    change = Renorm(storage_id(weight), rows, before)
    for log in logs:
        log.append(change)


# Deleted by: public hooks for the seeds that torch takes from the machine, and for what
# `max_norm=` does to a weight.
seed.__doc__ = _seed_of_torch.__doc__
torch.seed = torch.random.seed = seed
_functional._no_grad_embedding_renorm_ = renorm
# TorchScript tells torch's function by identity.
if _builtins._builtin_table is not None:
    _builtins._register_builtin(renorm, "aten::_no_grad_embedding_renorm_")
