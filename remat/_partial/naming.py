"""Tells recorders and reports which names a program gives to values.

`checkpoint_name` (`names`) gives names here; a `recorder` and reports listen.

Invariant: a listener hears the names that its own thread gives, and no others.
Rejected: to write names on tensors. A view or an alias would not have them.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class Listener(Protocol):
    """An object that is told of names."""

    def name(self, tensor: Tensor, name: str) -> None:
        """Be told that the value of a tensor has a name."""


class _Listeners(threading.local):
    """The listeners of one thread."""

    def __init__(self) -> None:
        self.active: list[Listener] = []


_LISTENERS = _Listeners()
_NAMES: set[str] = set()


def tell_of_names(listener: Listener) -> None:
    """Tell a listener of the names that this thread gives from now on."""
    _LISTENERS.active.append(listener)


def tell_no_more(listener: Listener) -> None:
    """Undo `tell_of_names`."""
    _LISTENERS.active.remove(listener)


@contextmanager
def told_of_names(listener: Listener) -> Iterator[None]:
    """Tell a listener of the names that this thread gives in the body."""
    tell_of_names(listener)
    try:
        yield
    finally:
        tell_no_more(listener)


def give_name(tensors: Iterable[Tensor], name: str) -> None:
    """Tell the listeners of this thread of a name."""
    _NAMES.add(name)
    for listener in _LISTENERS.active:
        for t in tensors:
            listener.name(t, name)


def names_given() -> frozenset[str]:
    """Return every name that was ever given to a value."""
    return frozenset(_NAMES)
