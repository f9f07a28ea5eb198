"""Which holders hold one of some values, of what a call reaches and was passed.

In come the identities of values. Out come holders, each with what it holds.

Invariant: a holder is found by what was read of it, at the speed of C.
Rejected: to look into each holder. A block of a model reaches hundreds of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import compress, count
from typing import Any, NamedTuple

from remat._reach.contents import spans_of
from remat._reach.holders import HolderKind
from remat._reach.layout import Layout, Taken


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


def holding(layout: Layout, taken: Taken, ids: Any) -> Iterator[HolderNow]:
    """Yield the holders, of what was taken, that hold one of some values."""
    values, keys = len(taken.values), len(taken.keys)
    there = memoryview(taken.marks[0]).cast("Q")[: values + keys]
    places = [*compress(count(), map(ids.__contains__, there))]
    if not places:
        return
    groups = taken.groups()
    if layout.spans is None or layout.spans[0] != taken.lengths:
        sizes = [(kind, len(holders)) for kind, holders in groups]
        spans = [*spans_of(sizes, taken.lengths)]
        starts = [span.start for span in spans]
        layout.spans = taken.lengths, spans, starts, [s.first_key for s in spans]
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
            taken.keys[first : first + (end - start)] if kind.keyed else (),
            taken.values[start:end],
        )


def held_in(boxes: Iterable[tuple[Any, Any]]) -> Iterator[HolderNow]:
    """Yield what containers that were passed hold: boxes of `Given`, with these."""
    for box, value in boxes:
        for kind in (box.how, *(more.how for more in box.more)):
            yield HolderNow(kind, value, *kind.held(value))


def among(held: Iterable[HolderNow], ids: Any) -> Iterator[HolderNow]:
    """Yield those that hold one of some values."""
    for one in held:
        if True in map(ids.__contains__, map(id, one.parts())):
            yield one
