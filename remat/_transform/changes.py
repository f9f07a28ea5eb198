"""Finds the operation that changes an input of a call in place, for an error to name.

`saved` and `forward` ask, when they refuse such a call.

Invariant: it runs only for an error, on copies, and what it does to objects is undone.
Rejected: to watch every forward. That would cost each call a dispatch mode.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._ambient.ambient import Ambient
from remat._base.source import user_line
from remat._base.types import TENSORS
from remat._capture.snapshot import Snapshot
from remat._partial.effects import written_by
from remat._torch import (
    LeanDispatchMode,
    base_tensor,
    call_kernel,
    eager_only,
    storage_id,
)


def changes_of(
    snapshot: Snapshot,
    inputs: Sequence[Tensor],
    run: Callable[[Sequence[Tensor]], object],
) -> dict[int, str]:
    """Run a function once more; return what changes each input, the first one first.

    Args:
        snapshot: of the call.
        inputs: what it runs on copies of.
        run: runs it.

    Returns:
        For the index of each input that is changed, the operation and the user's line.
    """
    if not all(map(_can_be_copied, inputs)):
        return {}
    found: dict[int, str] = {}
    with contextlib.suppress(Exception), torch.no_grad():  # the error is another one
        copies = [t.detach().clone() for t in inputs]
        index = {storage_id(t): i for i, t in enumerate(copies)}
        ambient = Ambient(snapshot.streams, True)
        ambient.forward_done()
        with ambient.restored(), _NoteChanges(index, found):
            run(copies)
    return found


def _can_be_copied(tensor: Tensor) -> bool:
    """Say whether a tensor is strided and its memory is there. FSDP frees memory."""
    if tensor.layout is not torch.strided or type(tensor) not in TENSORS:
        return False
    storage = base_tensor(tensor).untyped_storage()
    return storage.nbytes() >= base_tensor(tensor).nbytes or tensor.is_meta


class _NoteChanges(LeanDispatchMode):
    """Notes the first operation that writes to each of some storages."""

    def __init__(self, index: dict[int, int], found: dict[int, str]) -> None:
        super().__init__()
        self._index, self._found = index, found

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            i = self._index.get(storage_id(tensor))
            if i is not None:
                self._found.setdefault(i, f"{func} at {user_line()}")
        return call_kernel(func, *args, **kwargs)
