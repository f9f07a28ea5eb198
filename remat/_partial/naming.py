"""The names that a program gives to values, and who is told of them.

Invariant: who listens hears of the names that its own thread gives, and no others.
Rejected: to write names on the tensors. A view or an alias of one would not have it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from remat._base.context import here


class Listener(Protocol):
    """Who wants to know what values are called."""

    def name(self, tensor: Tensor, name: str) -> None:
        """Be told that the value of a tensor has a name."""


_NAMES: set[str] = set()


def tell_of_names(listener: Listener) -> None:
    """Tell a listener of the names given from now on, by this thread."""
    here().listeners.append(listener)


def tell_no_more(listener: Listener) -> None:
    """Undo `tell_of_names`."""
    here().listeners.remove(listener)


@contextmanager
def told_of_names(listener: Listener) -> Iterator[None]:
    """Tell a listener of the names given in the body, by this thread."""
    tell_of_names(listener)
    try:
        yield
    finally:
        tell_no_more(listener)


def give_name(tensors: Iterable[Tensor], name: str) -> None:
    """Tell the listeners of this thread of a name."""
    _NAMES.add(name)
    for listener in here().listeners:
        for t in tensors:
            listener.name(t, name)


def names_given() -> frozenset[str]:
    """Return every name that was ever given to a value."""
    return frozenset(_NAMES)
