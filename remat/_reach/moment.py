"""What all that a call reaches holds at one moment of its forward.

A chain looks after its first step whether steps change anything, and may look later. No
walk is needed for that: the holders that were found at the call are read again.

Invariant: no tensor stays here longer than the forward, which holds it as well.
Rejected: to note the changes themselves. Where there are some, a checkpoint notes all
that is reached from there, as a call does.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._base.tensors import versions_of
from remat._base.types import INERT
from remat._reach.before import differing, marks_of
from remat._reach.layout import LiveValues, written
from remat._reach.parts import are_same, held_in
from remat._reach.roots import Root
from remat._reach.watched import Buffer
from remat._torch.levels import base_tensor, below_all_levels
from remat._torch.modes import unseen


class Moment:
    """What holders hold at one moment."""

    __slots__ = "_attributes", "_bytes", "_held", "_live", "_of", "_roots"

    def __init__(
        self,
        roots: Sequence[Root],
        boxes: Mapping[int, tuple[Any, Any]],
        buffers: Sequence[Buffer],
        tensors: Sequence[Tensor],
    ) -> None:
        self._of = roots, boxes, buffers, tensors
        self._attributes = _attributes_of(tensors)
        self._roots = [(root, root.live) for root in roots if root.live is not None]
        self._live = [live.again() for _, live in self._roots]
        self._bytes = [_bytes_of(buffer) for buffer in buffers]
        large = [one.now() for root in roots for one in root.large.values()]
        passed = [
            (f"a {type(held.holder).__name__}", held.keys, held.values)
            for held in held_in(boxes.values())
        ]
        self._held = [*large, *passed]

    @property
    def numbers(self) -> Iterator[str]:
        """Yield the numbers and words that are held, of large holders the first."""
        held = [(live.values, live.keys) for live in self._live]
        parts = [part for one in (*held, *(h[1:] for h in self._held)) for part in one]
        values = (v for part in parts for v in itertools.islice(part, _MOST))
        return (repr(v) for v in values if type(v) in INERT)

    def changes(self) -> Iterator[str]:
        """Yield what changed since, as its author would write it."""
        yield from Moment(*self._of)._since(self)

    def _since(self, before: "Moment") -> Iterator[str]:
        """Yield what changed since, as its author would write it."""
        pairs = zip(self._roots, before._live, self._live, strict=True)
        for (root, at_call), then, now in pairs:
            if then.marks != now.marks:
                yield _name(root, at_call, then, now)
        for (name, *then), (_, *now) in zip(before._held, self._held, strict=True):
            if not all(map(are_same, then, now)):
                yield name
        if self._bytes != before._bytes:
            yield "an array"
        if not are_same(before._attributes, self._attributes):
            yield "an attribute of a tensor"


def _bytes_of(buffer: Buffer) -> bytes:
    memory = buffer.memory()
    return b"" if memory is None else bytes(memory)


_MOST = 2_000  # of the numbers of one holder


def _attributes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return all that is set on tensors: each time the tensor, a name and a value."""
    each = zip(tensors, map(vars, tensors), strict=True)
    pairs = ((t, pair) for t, held in each if held for pair in held.items())
    return [part for t, pair in pairs for part in (t, *pair)]


def _name(root: Root, at_call: LiveValues, then: LiveValues, now: LiveValues) -> str:
    """Name the first holder that holds something else, or what of it."""
    groups, first = now.groups, now.first_below
    sizes = [(kind, len(holders)) for kind, holders in groups]
    for was, span in differing(sizes, marks_of(then), marks_of(now)):
        if span.group >= first:
            place = root.layout.below[span.group - first][1][span.number]
            name = written(root.layout, at_call, place)
        else:
            values = then.values[was.start : was.end]
            found = now.values[span.start : span.end]
            same = [a is b for a, b in zip(values, found, strict=False)]
            i = same.index(False) if False in same else len(same)
            live, start = (now, span.start) if i < len(found) else (then, was.start)
            name = written(root.layout, live, start + i)
        return f"`{name}`"
    return "the class of an object"


class WatchedCall:
    """A call that runs, of which is told what it changes besides its results."""

    __slots__ = ("_before", "_buffers", "_reach", "_tensors", "_versions")

    def __init__(self, reach: Any, tensors: Sequence[Tensor]) -> None:
        self._reach, self._tensors = reach, tensors
        self._versions = versions_of(tensors)
        with unseen():
            self._buffers = [(i, tensors[i].clone()) for i in reach.buffers]
        self._before = reach.moment(tensors)

    def changed(self) -> str:
        """Return the first that it changed, as its author would write it, or ""."""
        reach, tensors = self._reach, self._tensors
        pairs = enumerate(zip(self._versions, versions_of(tensors), strict=True))
        found = [i for i, (then, now) in pairs if then != now]
        # A batch norm counts no version.
        with unseen():
            found += [i for i, t in self._buffers if not _is_equal(t, tensors[i])]
        if found:
            return f"`{reach.name_of(found[0])}`"
        return next(self._before.changes(), "")

    def done(self) -> None:
        """Let go of what only a forward needs."""
        self._reach.forward_done()


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Compare the values of two tensors below all levels, as vmap compares none."""
    return below_all_levels(torch.equal, base_tensor(a), base_tensor(b))
