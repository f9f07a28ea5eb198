"""References to values whose classes have no weak references: lists, dicts, tuples.

A lease is strong, and is let go of as soon as it alone holds its value. That is looked
at whenever a lease is made, and whenever Python's garbage collector runs. So a cycle
through a graph, as that of a passed list that the output is appended to, is freed no
later than a cycle of Python's own.

Invariant: there is a lease only where code asks for the identity of a value: by `id`,
or, of what is a key by its identity, by `hash` or in a cache of functools. Elsewhere
nobody can tell a list from one like it, and nothing is held. A list that holds itself,
and whose graph is kept and never run backward, is not freed.
Rejected: leases of all that is passed. A list that is let go of would keep what it
holds until the next collection. To find a value by its identity among all that the
garbage collector knows: it takes tens of milliseconds.
"""

import gc
import sys
import weakref
from collections.abc import Container
from typing import Any


class Lease:
    """A reference to a value; it is called to get the value, or None."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        """Return the value, if it was not let go of."""
        return self._value

    def count(self) -> int:
        """Return how many references there are, and one for the call."""
        return sys.getrefcount(self._value)

    def end(self) -> None:
        """Let go of the value."""
        self._value = None


_LEASES: "weakref.WeakValueDictionary[int, Lease]" = weakref.WeakValueDictionary()


def lease_of(value: Any) -> Lease:
    """Return the lease of a value: there is one for all calls."""
    lease = _LEASES.get(id(value))
    if lease is None or lease() is not value:
        lease = _LEASES[id(value)] = Lease(value)
    return lease


def is_told(value: Any, asks: Container[str]) -> bool:
    """Say whether code that asks by these may tell a value from another like it."""
    return "id" in asks or type(value).__hash__ is object.__hash__


def end_leases(*_: object) -> None:
    """End the leases of values that nobody else holds; once for each call."""
    if end_leases not in gc.callbacks:
        gc.callbacks.append(end_leases)
    for ref in _LEASES.valuerefs():
        lease = ref()
        if lease is not None and lease.count() <= _UNHELD:
            lease.end()


_UNHELD = Lease(object()).count()
