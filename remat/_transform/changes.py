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
from remat._capture.snapshot import Snapshot
from remat._partial.effects import written_by
from remat._torch import LeanDispatchMode, call_kernel, storage_id


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
    copies = [t.detach().clone() for t in inputs]
    ambient = Ambient(snapshot.streams, True)
    ambient.forward_done()
    mode = _NoteChanges({storage_id(t): i for i, t in enumerate(copies)})
    with (
        contextlib.suppress(Exception),  # the error to raise is another one
        torch.no_grad(),
        ambient.restored(),
        mode,
    ):
        run(copies)
    return mode.found


class _NoteChanges(LeanDispatchMode):
    """Notes the first operation that writes to each of some storages."""

    def __init__(self, index: dict[int, int]) -> None:
        super().__init__()
        self._index = index
        self.found: dict[int, str] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            i = self._index.get(storage_id(tensor))
            if i is not None:
                self.found.setdefault(i, f"{func} at {user_line()}")
        return call_kernel(func, *args, **kwargs)
