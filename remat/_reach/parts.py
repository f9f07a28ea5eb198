"""What holders hold, one by one: put aside, found by what it is, written for a run.

A `Box` holds what a passed container held, put aside in turn (`arguments`), or what
holds tensors in a result (`result_walk`). While the forward runs, `Watched` holds the
containers that a recompute may find again. `holding` finds the holders of some values
by what was read of all, at the speed of C. `Written` puts back what a holder held.

Invariant: once the forward has ended no box of an argument leads to its container. A
container may hold what the graph of the call holds.
Rejected: to write each container for a recompute. What signal handlers and other
threads put there meanwhile would be lost.
"""

import contextlib
import operator
import threading
from bisect import bisect_right
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Sequence,
)
from itertools import compress, count
from typing import Any, NamedTuple

from remat._base.interpreter import identities
from remat._reach.before import At, HolderIndex, Ref, Span, spans_of
from remat._reach.copies import without_copies
from remat._reach.holders import SCOPES, HolderKind
from remat._reach.layout import Layout, LiveValues


class HolderParts:
    """What one holder held: how it is read and written, its keys, and its items.

    `items` is a range of numbers if it is tensors that nothing else is. `is_changed`
    says whether the forward has changed it, once that is known.
    """

    __slots__ = ("is_changed", "items", "keys", "kind")

    def __init__(self, kind: HolderKind, keys: list[Any], items: Any) -> None:
        self.kind, self.keys, self.items = kind, keys, items
        self.is_changed = True


class Box(Ref):
    """In place of a container that was passed, or of a method: what it holds.

    Also of a value that holds tensors of a result. That is held (`ref`) until the
    tensors are taken out, and made again if it never changes.

    Attributes:
        held: what it holds, by kinds.
        is_flat: whether it holds no other container.
    """

    __slots__ = ("held", "is_flat")

    def __init__(
        self, value: Any, kinds: Iterable[HolderKind], *, is_held: bool = False
    ) -> None:
        super().__init__(value)
        if is_held:
            self.ref = lambda: value
        self.held: list[HolderParts] = []
        for kind in kinds:
            self.held.append(HolderParts(kind, *kind.held(value)))
        self.is_flat = False

    @property
    def is_frozen(self) -> bool:
        """Whether it can never be changed, and may have to be made again."""
        return self.held[0].kind.frozen

    def parts(self) -> list[Any]:
        """Return all that it holds."""
        return [k for part in self.held for k in (*part.items, *part.keys)]

    def boxes(self) -> "list[Box]":
        """Return the containers that it holds."""
        return [k for k in self.parts() if type(k) is Box]

    def put_aside(self, kept: Callable[[Any], Any]) -> None:
        """Have what is kept of each value in its place."""
        for part in self.held:
            part.keys, part.items = [*map(kept, part.keys)], [*map(kept, part.items)]
        if self.is_frozen:
            self.ref = None

    def empty(self) -> None:
        """Take out of the value what was put aside."""
        value = self.ref and self.ref()
        for part in self.held:
            if not (value is None or part.kind.frozen):
                each = part.keys, part.items
                left = ([None if type(k) in (At, Box) else k for k in h] for h in each)
                part.kind.write(value, *left)


class Watched:
    """A holder that was passed, until the forward has ended."""

    __slots__ = "_marks", "_parts", "_value"

    def __init__(self, parts: HolderParts, value: Any) -> None:
        self._parts, self._value = parts, value
        self._marks = self._now()

    def _now(self) -> tuple[bytes, int]:
        keys, items = self._parts.kind.held(self._value)
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


# How a holder is read, and it itself.
KindAndHolder = tuple[HolderKind, Any]
# Given identities of values, yields the holders that hold one of them.
FindHolders = Callable[[Container[int]], Iterable[KindAndHolder]]


def holding(layout: Layout, live: LiveValues, ids: Any) -> Iterator[KindAndHolder]:
    """Yield the holders, of what is live, that hold one of some values."""
    values, keys = len(live.values), len(live.keys)
    there = memoryview(live.marks[0]).cast("Q")[: values + keys]
    places = [*compress(count(), map(ids.__contains__, there))]
    if not places:
        return
    groups = live.groups
    for span in spans_at(layout, live, places):
        yield span.kind, groups[span.group][1][span.number]


def spans_at(
    layout: Layout,
    live: LiveValues,
    places: Iterable[int],
    indices: Collection[HolderIndex] = (),
) -> list[Span]:
    """Return the holders of what is in some places, and others by their indices.

    Places are among the values, and then among the keys.
    """
    if layout.spans is None or layout.spans[0] != live.lengths:
        sizes = [(kind, len(holders)) for kind, holders in live.groups]
        spans = [*spans_of(sizes, live.lengths)]
        starts = [span.start for span in spans]
        layout.spans = live.lengths, spans, starts, [s.first_key for s in spans]
    _, spans, starts, first_keys = layout.spans
    count = len(live.values)
    found = [
        bisect_right(starts, p) - 1
        if p < count
        else bisect_right(first_keys, p - count) - 1
        for p in places
    ]
    if indices:
        found += [i for i, s in enumerate(spans) if (s.group, s.number) in indices]
    return [spans[i] for i in dict.fromkeys(found)]


def held_in(boxes: Iterable[tuple[Any, Any]]) -> Iterator[HolderNow]:
    """Yield what passed containers hold: boxes of `CallArguments`, with these."""
    for box, value in boxes:
        for part in box.held:
            yield HolderNow(part.kind, value, *part.kind.held(value))


def among(held: Iterable[HolderNow], ids: Any) -> Iterator[KindAndHolder]:
    """Yield those that hold one of some values."""
    for one in held:
        if True in map(ids.__contains__, map(id, one.parts())):
            yield one.kind, one.holder


# --- What was there just before ---


class Written:
    """A holder that is written for a run, and what it held just before.

    Where something stands in for what is the user's, `own` says what that is. Then what
    is changed meanwhile stays, and the user's own is put back in it.
    """

    __slots__ = ("_meanwhile", "_own", "holder", "key", "keys", "kind", "values")

    def __init__(
        self,
        kind: HolderKind,
        holder: Any,
        keys: list[Any],
        values: list[Any],
        key: Any,
    ) -> None:
        self.kind, self.holder, self.key = kind, holder, key
        self.keys, self.values = keys, values
        self._own: Callable[[Any], Any] | None = None
        RUNNING.setdefault(key, []).append(self)

    def replace(self, of: Callable[[Any], Any], own: Callable[[Any], Any]) -> None:
        """Have it hold what stands in for what it holds."""
        keys, values = [*map(of, self.keys)], [*map(of, without_copies(self.values))]
        self._meanwhile, self._own = (keys, values), own
        self.kind.write(self.holder, keys, values)

    def end(self) -> None:
        """Give back what was there, or hand it to a run that began later."""
        with LOCK:
            runs, (keys, values) = RUNNING[self.key], self.kind.held(self.holder)
            if self._own is not None and runs[-1] is self:
                then_keys, then = self._meanwhile
                if not (are_same(keys, then_keys) and are_same(values, then)):
                    self.keys = self._owned(keys, then_keys, self.keys)
                    self.values = self._owned(values, then, self.values)
            i = runs.index(self)
            del runs[i]
            if i < len(runs):
                runs[i].keys, runs[i].values = self.keys, self.values
                return
            if not runs:
                del RUNNING[self.key]
            if not (are_same(keys, self.keys) and are_same(values, self.values)):
                self.kind.put_back(self.holder, self.keys, self.values)

    def _owned(
        self, now: list[Any], then: Sequence[Any], before: Sequence[Any]
    ) -> list[Any]:
        own: Any = self._own
        if len(now) != len(then):
            return [*map(own, now)]
        each = zip(now, then, before, strict=True)
        return [was if value is there else own(value) for value, there, was in each]


# A value that is let go of may run the user's code, which may recompute.
LOCK = threading.RLock()
# By what is written, the runs that wrote it, in order.
RUNNING: dict[Any, list[Written]] = {}


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Say whether two sequences hold the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def written_to(
    kind: HolderKind, holder: Any, keys: list[Any], values: list[Any]
) -> list[Written]:
    """Note that a run writes a holder, which holds these: each variable by itself."""
    if kind is not SCOPES:
        return [Written(kind, holder, keys, values, (id(holder), id(kind)))]
    scope, names = holder
    each = zip(names, values, strict=True)
    return [Written(kind, (scope, (n,)), [], [v], (id(scope), n)) for n, v in each]
