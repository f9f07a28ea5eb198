"""Copies of large buffers, which a forward under torch.func has in their places.

In comes a copy, with the buffer of the user's. Out comes the buffer, for a thread that
finds the copy in a holder: to that thread it is the buffer, and it may be taken away at
any time. As that thread may write the buffer, what it holds by then is noted for the
forward of the copy, whose recomputes start from there.

Invariant: a copy is kept alive by the forward that made it, and by nothing here.
Rejected: a lock while the function runs. It may wait for another thread's call.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._torch.levels import below_all_levels


class _CopyInPlace:
    """A copy, while it is there: its thread, its buffer, and what that held."""

    def __init__(self, copy: Tensor, buffer: Tensor) -> None:
        key = id(copy)
        self.ref = weakref.ref(copy, lambda _: _COPIES.pop(key, None))
        self.thread, self.buffer = threading.get_ident(), buffer
        self.then: Tensor | None = None


_COPIES: dict[int, _CopyInPlace] = {}  # by the identity of the copy


def note_copy(copy: Tensor, buffer: Tensor) -> None:
    """Note that a forward of this thread has a copy in place of a buffer."""
    _COPIES[id(copy)] = _CopyInPlace(copy, buffer)


def value_at_copy(copy: Tensor, buffer: Tensor) -> Tensor:
    """Return what a buffer held when its copy was made, which was not written since.

    By this thread, that is.
    """
    before, noted = buffer.clone(), _COPIES.get(id(copy))
    # Asked afterwards: another thread writes after it has noted this.
    return before if noted is None or noted.then is None else noted.then


def without_copies(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return tensors with the user's buffers in place of other threads' copies."""
    return [*map(_buffer_of, tensors)] if _COPIES else tensors


def _buffer_of(tensor: Any) -> Any:
    noted = _COPIES.get(id(tensor))
    if noted is None or noted.ref() is not tensor:
        return tensor
    if noted.thread == threading.get_ident():
        return tensor
    if noted.then is None:
        noted.then = below_all_levels(Tensor.clone, noted.buffer)
    return noted.buffer
