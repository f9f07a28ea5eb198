"""What holders hold, one by one: put aside, found by what it is, made again in order.

A `Box` holds what a passed container held, put aside in turn (`arguments`). While the
forward runs, `Watched` holds the containers that a recompute may find again. `holding`
finds the holders of some values by what was read of all, at the speed of C. `make`
makes values again: what never changes is made around what it holds, and what is hashed
is hashed by that. So both come after what they hold.

Invariant: once the forward has ended no box leads to its container. A container may
hold what the graph of the call holds.
Rejected: to write each container for a recompute. What signal handlers and other
threads put there meanwhile would be lost. To make all that can be changed, and to fill
it last: a frozenset of objects hashes these.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import compress, count
from typing import Any, NamedTuple, TypeVar

from remat._base.errors import RecomputeError
from remat._base.interpreter import identities
from remat._reach.before import Ref, spans_of
from remat._reach.holders import VARIABLES, HolderKind, kinds_of
from remat._reach.layout import Layout, LiveValues


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

    def __init__(self, value: Any) -> None:
        kinds = kinds_of(value, type(value))
        super().__init__(value, kinds[0])
        self.ref, self.is_flat = Ref(value), False
        self.more: Sequence[HolderParts] = ()
        if len(kinds) > 1:
            self.more = [HolderParts(value, kind) for kind in kinds[1:]]
        if self.how is VARIABLES:  # which does not hold its value: a context does
            self.ref.ref = lambda: value

    def parts(self) -> "list[Box]":
        """Return the containers that it holds."""
        held = [k for h in (self, *self.more) for k in (*h.items, *h.keys)]
        return [k for k in held if type(k) is Box]


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


# --- The holders of some values ---


class HolderNow(NamedTuple):
    """What one holder holds at one moment."""

    kind: HolderKind
    holder: Any
    keys: Sequence[Any]
    values: Sequence[Any]

    def parts(self) -> tuple[Any, ...]:
        """Return all that it holds."""
        return *self.values, *self.keys


# Given identities of values, yields the holders that hold one of them.
FindHolders = Callable[[Container[int]], Iterable[HolderNow]]


def holding(layout: Layout, live: LiveValues, ids: Any) -> Iterator[HolderNow]:
    """Yield the holders, of what is live, that hold one of some values."""
    values, keys = len(live.values), len(live.keys)
    there = memoryview(live.marks[0]).cast("Q")[: values + keys]
    places = [*compress(count(), map(ids.__contains__, there))]
    if not places:
        return
    groups = live.groups
    if layout.spans is None or layout.spans[0] != live.lengths:
        sizes = [(kind, len(holders)) for kind, holders in groups]
        spans = [*spans_of(sizes, live.lengths)]
        starts = [span.start for span in spans]
        layout.spans = live.lengths, spans, starts, [s.first_key for s in spans]
    _, spans, starts, first_keys = layout.spans
    found = [
        bisect_right(starts, p) - 1
        if p < values
        else bisect_right(first_keys, p - values) - 1
        for p in places
    ]
    for i in dict.fromkeys(found):
        span = spans[i]
        holder = groups[span.group][1][span.number]
        yield HolderNow(span.kind, holder, *span.of(live.keys, live.values))


def held_in(boxes: Iterable[tuple[Any, Any]]) -> Iterator[HolderNow]:
    """Yield what passed containers hold: boxes of `CallArguments`, with these."""
    for box, value in boxes:
        for kind in (box.how, *(more.how for more in box.more)):
            yield HolderNow(kind, value, *kind.held(value))


def among(held: Iterable[HolderNow], ids: Any) -> Iterator[HolderNow]:
    """Yield those that hold one of some values."""
    for one in held:
        if True in map(ids.__contains__, map(id, one.parts())):
            yield one


# --- The order in which values are made again ---


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
