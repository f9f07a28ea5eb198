"""Notes which rows of an embedding's weight torch scales in place, as `max_norm=` asks.

torch does so without a graph, in each forward. To do it again may scale them again, by
the rounding of the first time. So a recompute has to start from the rows before.

Invariant: as of `noted`. Graphs are made of torch's own function.
Rejected: a copy of the weight before each forward that has such an embedding.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.jit import _builtins

from remat._torch.modes import unseen
from remat._torch.noted import NOTES
from remat._torch.storages import storage_id


class Renorm(NamedTuple):
    """One change of a weight.

    Attributes:
        storage: the number of the storage of the weight.
        rows: the indices of the rows that changed.
        before: what these rows held.
    """

    storage: int
    rows: Tensor
    before: Tensor


class Renorms:
    """Changes of one weight, to which later ones are added while this is held."""

    __slots__ = ("__weakref__", "changes")

    def __init__(self) -> None:
        self.changes: list[Renorm] = []


# By the number of the storage of a weight.
_LOGS: dict[int, weakref.WeakSet[Renorms]] = {}


def later_renorms(storage: int) -> Renorms:
    """Return what each later change of a weight is added to.

    Args:
        storage: the number of the storage of the weight.
    """
    log = Renorms()
    _LOGS.setdefault(storage, weakref.WeakSet()).add(log)
    return log


@contextmanager
def renorms_taken_back() -> Iterator[None]:
    """Run a body whose changes are taken back: they are not added anywhere."""
    before, NOTES.later = NOTES.later, False
    try:
        yield
    finally:
        NOTES.later = before


def _logs_of(storage: int) -> list[list[Renorm]]:
    """Return what a change that this thread makes now is added to."""
    logs: list[list[Renorm]] = [] if NOTES.current is None else [NOTES.current.renorms]
    if NOTES.later and storage in _LOGS:
        logs += [log.changes for log in _LOGS[storage]]
        if not _LOGS[storage]:
            _LOGS.pop(storage, None)
    return logs


# Deleted by: a public hook for what `max_norm=` does to a weight.
_functional: Any = torch.nn.functional
_renorm_of_torch = _functional._no_grad_embedding_renorm_


def renorm(weight: Any, indices: Any, max_norm: float, norm_type: float) -> None:
    """Scale rows of a weight, as torch does, and note them."""
    logs: list[list[Renorm]] = []
    if not torch.compiler.is_compiling() and (NOTES.current is not None or _LOGS):
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


def _install() -> None:
    _functional._no_grad_embedding_renorm_ = renorm
    # TorchScript tells torch's function by identity.
    if _builtins._builtin_table is not None:
        _builtins._register_builtin(renorm, "aten::_no_grad_embedding_renorm_")


_install()
