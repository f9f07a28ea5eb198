"""Notes which rows of an embedding's weight torch scales in place, as `max_norm=` asks.

torch does so without a graph, in each forward. To do it again may scale them again, by
the rounding of the first time. So a recompute has to start from the rows before.

Invariant: who notes nothing sees torch's own function. Graphs are made of that one.
Rejected: a copy of the weight before each forward that has such an embedding.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.jit import _builtins

from remat._torch.modes import unseen
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


class _Notes(threading.local):
    current: list[Renorm] | None = None


_NOTES = _Notes()


def exchange_renorms(notes: list[Renorm] | None) -> list[Renorm] | None:
    """Have changes that this thread makes noted in a list; return the one before."""
    before, _NOTES.current = _NOTES.current, notes
    return before


# Deleted by: a public hook for what `max_norm=` does to a weight.
_functional: Any = torch.nn.functional
_renorm_of_torch = _functional._no_grad_embedding_renorm_


def renorm(weight: Any, indices: Any, max_norm: float, norm_type: float) -> None:
    """Scale rows of a weight, as torch does, and note them."""
    if torch.compiler.is_compiling() or _NOTES.current is None:
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
    _NOTES.current.append(Renorm(storage_id(weight), rows, before))


def _install() -> None:
    _functional._no_grad_embedding_renorm_ = renorm
    # TorchScript tells torch's function by identity.
    if _builtins._builtin_table is not None:
        _builtins._register_builtin(renorm, "aten::_no_grad_embedding_renorm_")


_install()
