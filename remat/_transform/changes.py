"""Finds which inputs are changed in place, and by what: by running on copies.

`saved` and `function` ask about a call, when they refuse it. `traced` asks about the
body of a node, once.

Invariant: what it does to objects is undone.
Rejected: to watch every forward. That would cost each call a dispatch mode.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._ambient.ambient import Ambient
from remat._base.observer import Observer
from remat._base.source import user_line
from remat._base.tensors import taken_apart
from remat._base.types import TENSORS
from remat._partial.effects import written_by
from remat._reach.reach import Reach
from remat._torch import (
    base_tensor,
    faking,
    inputs_of_body,
    run_body,
    storage_id,
)


def changes_of(
    origin: Reach,
    inputs: Sequence[Tensor],
    run: Callable[[Sequence[Tensor]], object],
) -> dict[int, str]:
    """Run a function once more, on copies; return what changes each input.

    By its index: the operation and the user's line, the first change first.
    """
    if not all(map(_can_be_copied, inputs)):
        return {}
    found: dict[int, str] = {}
    with contextlib.suppress(Exception), torch.no_grad():  # the error is another one
        copies = [t.detach().clone() for t in inputs]
        index = {storage_id(t): i for i, t in enumerate(copies)}
        ambient = Ambient(origin.streams, True)
        ambient.forward_done()
        with ambient.restored(), _NoteChanges(index, found):
            run(copies)
    return found


class Changes(NamedTuple):
    """What the body of a node changes in place."""

    inputs: Sequence[int] = ()
    is_shared: bool = False


def changed_by(body: Any) -> Changes:
    """Return what the body of a node changes, which is remembered with it."""
    known = body.meta.get(_CHANGES)
    if known is None:
        known = body.meta[_CHANGES] = _changes_of_body(body)
    return known


_CHANGES = "remat_changes"


def _changes_of_body(body: Any) -> Changes:
    examples = inputs_of_body(body)
    found: dict[int, str] = {}
    with faking(examples) as copies:
        if copies is None:
            return Changes()
        index = {_memory(c): i for i, c in enumerate(copies) if isinstance(c, Tensor)}
        with _NoteChanges(index, found):
            outs = run_body(body, *copies)
    inputs = sorted(found)
    changed = [_memory(examples[i]) for i in inputs]
    others = [e for i, e in enumerate(examples) if i not in found]
    others = {_memory(e) for e in others if isinstance(e, Tensor)}
    results = {_memory(o) for o in tree_leaves(outs) if isinstance(o, Tensor)}
    is_shared = len({*changed}) < len(changed) or not others.isdisjoint(changed)
    written = {_memory(copies[i]) for i in inputs}
    return Changes(inputs, is_shared or not results.isdisjoint(written))


def _memory(tensor: Tensor) -> int:
    """Return the number of the storage of a tensor, inside of all wrappers."""
    return storage_id(taken_apart(base_tensor(tensor))[0])


def _can_be_copied(tensor: Tensor) -> bool:
    """Say whether a tensor is strided and its memory is there. FSDP frees memory."""
    if tensor.layout is not torch.strided or type(tensor) not in TENSORS:
        return False
    storage = base_tensor(tensor).untyped_storage()
    return storage.nbytes() >= base_tensor(tensor).nbytes or tensor.is_meta


class _NoteChanges(Observer):
    """Notes the first operation that writes to each of some storages."""

    unseen = frozenset()

    def __init__(self, index: dict[int, int], found: dict[int, str]) -> None:
        super().__init__()
        self._index, self._found = index, found

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Before it runs: it may give a tensor other memory.
        for tensor in written_by(func, args, kwargs):
            i = self._index.get(_memory(tensor))
            if i is not None:
                self._found.setdefault(i, f"{func} at {user_line()}")
        return super().run(func, args, kwargs)
