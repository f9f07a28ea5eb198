"""The order in which values are made again: each after what it holds.

A value that never changes is made around what it holds, and what is hashed is hashed
by that. So both come after what they hold.

Invariant: what can be changed is there as soon as it is entered, and may lead back to
itself. It is filled after what it holds, as far as that is there by then.
Rejected: to make all that can be changed, and to fill it last. A frozenset of objects
hashes these.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from remat._base.errors import RecomputeError


Value = TypeVar("Value")


def make(
    value: Value,
    enter: Callable[[Value], Iterable[Value] | None],
    complete: Callable[[Value], bool],
) -> None:
    """Make a value, after what it holds.

    Args:
        value: what stands for it.
        enter: notes that a value is looked at, and returns what it holds that is to be
            made; None if it was entered before.
        complete: makes or fills a value. Returns false if what it is made around is not
            there yet.
    """
    left: list[Value] = _in_order(value, enter)
    while left:
        again = [v for v in left if not complete(v)]
        if len(again) == len(left):
            raise RecomputeError(_AROUND_ITSELF)
        left = again


def make_all(
    values: Iterable[Value],
    parts: Callable[[Value], Iterable[Value]],
    complete: Callable[[Value], bool],
) -> None:
    """Make values, each after its parts; `complete` as for `make`."""
    entered: set[int] = set()

    def enter(value: Value) -> Iterable[Value] | None:
        is_new = id(value) not in entered
        entered.add(id(value))
        return parts(value) if is_new else None

    for value in values:
        make(value, enter, complete)


def _in_order(
    value: Value, enter: Callable[[Value], Iterable[Value] | None]
) -> list[Value]:
    """Return what a value leads to, each after what it holds, without recursion."""
    parts = enter(value)
    todo = [(value, iter(parts or ()))]
    order: list[Value] = []
    while todo:
        above, left = todo[-1]
        for part in left:
            parts = enter(part)
            if parts is not None:
                todo.append((part, iter(parts)))
                break
        else:
            todo.pop()
            order.append(above)
    return order


_AROUND_ITSELF = (
    "remat: a value that never changes, and that the function reached at the call, is "
    "gone, and holds itself. It cannot be made again for the recompute. Keep it alive "
    "until the backward."
)
