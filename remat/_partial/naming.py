"""Tells recorders and reports which names a program gives to values.

`checkpoint_name` (`names`) gives names here; a `recorder` and reports listen.

Invariant: a listener hears the names that its own thread gives, and no others.
Rejected: to write names on tensors. A view or an alias would not have them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from remat._base.context import here
from remat._base.operators import LIBRARY


class Listener(Protocol):
    """An object that is told of names."""

    def name(self, tensor: Tensor, name: str) -> None:
        """Be told that the value of a tensor has a name."""


_NAMES: set[str] = set()


def tell_of_names(listener: Listener) -> None:
    """Tell a listener of the names that this thread gives from now on."""
    here().listeners.append(listener)


def tell_no_more(listener: Listener) -> None:
    """Undo `tell_of_names`."""
    here().listeners.remove(listener)


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
    for listener in here().listeners:
        for t in tensors:
            listener.name(t, name)


# An operation gives the name where code is compiled for no graph of AOTAutograd.
@torch.library.impl(LIBRARY, "named", "CompositeExplicitAutograd")
def _named(x: Tensor, name: str) -> None:
    give_name([x], name)


def names_given() -> frozenset[str]:
    """Return every name that was ever given to a value."""
    return frozenset(_NAMES)
