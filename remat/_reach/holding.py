"""Which holders hold one of some values, of what a call reaches and was passed.

In come the identities of values. Out come holders, each with what it holds.

Invariant: a holder is found by what was read of it, at the speed of C.
Rejected: to look into each holder. A block of a model reaches hundreds of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import compress, count
from typing import Any, NamedTuple

from remat._reach.before import spans_of
from remat._reach.holders import HolderKind
from remat._reach.layout import Layout, LiveValues


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
    groups = live.groups()
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
        kind, group, number, start, end, first = spans[i]
        yield HolderNow(
            kind,
            groups[group][1][number],
            live.keys[first : first + (end - start)] if kind.keyed else (),
            live.values[start:end],
        )


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
