"""What is held of containers that were passed to a call.

A `Box` holds what its container held, put aside in turn (`arguments`). While the
forward runs, `Watched` holds the containers that a recompute may find again.

Invariant: once the forward has ended no box leads to its container. A container may
hold what the graph of the call holds.
Rejected: to write each container for a recompute. What signal handlers and other
threads put there meanwhile would be lost.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from remat._base.interpreter import identities
from remat._reach.before import Ref
from remat._reach.holders import (
    CONTAINERS,
    FACTORIES,
    OWNED,
    PART,
    SLOTS,
    VARIABLES,
    HolderKind,
)
from remat._reach.objects import dict_of, slots_of


class HolderParts:
    """What one holder holds: how it is read and written, its keys, and its items.

    `items` is a range of numbers if it is tensors that nothing else is. `is_changed`
    says whether the forward has changed it, once that is known.
    """

    __slots__ = ("how", "is_changed", "items", "keys")

    def __init__(self, value: Any, how: HolderKind) -> None:
        self.how, self.is_changed = how, True
        self.keys: list[Any]
        self.items: Any
        self.keys, self.items = how.held(value)


class Box(HolderParts):
    """In place of a container that was passed, or of a method: what it holds.

    Attributes:
        ref: in place of the container itself.
        more: what an instance of a subclass holds besides.
        is_flat: whether it holds no other container.
    """

    __slots__ = ("is_flat", "more", "ref")

    def __init__(self, value: Any, how: HolderKind) -> None:
        super().__init__(value, how)
        self.ref, self.is_flat = Ref(value), False
        self.more: Sequence[HolderParts] = ()
        if how is VARIABLES:  # which does not hold its value: a context does
            self.ref.ref = lambda: value
        if type(value) not in CONTAINERS and how is not SLOTS:
            self.more = [HolderParts(value, kind) for kind in kinds_besides(value, how)]

    def parts(self) -> "list[Box]":
        """Return the containers that it holds."""
        held = [k for h in (self, *self.more) for k in (*h.items, *h.keys)]
        return [k for k in held if type(k) is Box]


def kinds_besides(value: Any, how: HolderKind) -> Iterator[HolderKind]:
    """Yield how what an instance of a subclass holds besides is read."""
    kind = type(value)
    if how is PART and not issubclass(kind, partial):
        return
    if how not in (OWNED, PART) and dict_of(value) is not None:
        yield OWNED
    if slots_of(kind):
        yield SLOTS
    if issubclass(kind, defaultdict):
        yield FACTORIES


class Watched:
    """A holder that was passed, until the forward has ended."""

    __slots__ = "_marks", "_parts", "_value"

    def __init__(self, parts: HolderParts, value: Any) -> None:
        self._parts, self._value = parts, value
        self._marks = self._now()

    def _now(self) -> tuple[bytes, int]:
        keys, items = self._parts.how.held(self._value)
        return identities((*items, *keys)), len(keys)

    def forward_done(self) -> None:
        """Note whether the forward changed it."""
        with contextlib.suppress(RuntimeError):  # another thread changes it
            self._parts.is_changed = self._now() != self._marks
