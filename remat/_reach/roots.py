"""One root of a call: what it reached at the call, and what the forward changed of it.

The layout of a root is remembered while the root lives. A call reads what the holders
hold now. If that is what they held at the last call, it shares what is kept of that.

Invariant: as in `before`, it leads to no tensor and to nothing that can be held
weakly, except what cannot be made again (`_held`). Until the end of the forward it
holds the holders themselves, too: the forward may put others in their places.
Rejected: to compare along the paths again. A path may lead elsewhere by then.
"""

import contextlib
import operator
import weakref
from collections.abc import Container, Iterable, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from remat._reach.before import Before, HolderIndex
from remat._reach.holders import VARIABLES, HolderKind, MovedError, container_kind
from remat._reach.identities import Lease, is_told, lease_of
from remat._reach.layout import Layout, LiveValues, lay_out, live_in
from remat._reach.parts import spans_at
from remat._reach.watched import HeldBuffer, Iterated, Large, is_buffer


# How a holder is read, it itself, and the numbers that it is to hold, by their places.
Numbers = tuple[HolderKind, Any, dict[int, Any]]


class Root:
    """What one root reached at a call."""

    __slots__ = (
        *("_held", "_iterators", "buffers", "effects", "live", "namespaces"),
        *("before", "entries", "first", "large", "layout", "leases"),
    )

    def __init__(self, layout: Layout, before: Before, live: LiveValues) -> None:
        self.layout, self.before = layout, before
        self.live: LiveValues | None = live
        self.effects: set[HolderIndex] | None = None
        # The numbers in the call of its tensors, or of those that are no parameters,
        # and the number of the first parameter, if those have numbers of their own.
        self.entries: Sequence[int] = ()
        self.first: int | None = None
        owners = live.owners
        # Held for functions that have to be made again.
        self.namespaces = [fn.__globals__ for fn in owners[layout.functions]]
        self.leases: Sequence[Lease] = ()
        self._iterators: dict[int, Iterated] = {}
        self.buffers: list[HeldBuffer] = []
        self.large: dict[int, Large] = {}
        for p, (name, most) in layout.special.items():
            value = live.values[p]
            if is_buffer(type(value)):
                self.buffers.append((value, name, most))
            elif container_kind(type(value)) is not None:
                self.large[p] = Large(value, name)
            else:
                self._iterators[p] = Iterated(value, name)
        # As long as the call, as its caller would have held it.
        self._held: list[Any] = [type(owners[i]) for i in layout.local]
        if layout.odd or before.opaque:
            self._held += map(owners.__getitem__, layout.odd)
            self._held += map(live.values.__getitem__, before.opaque)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the root reaches, each once, before the forward."""
        assert self.live is not None
        return self.before.tensors_in(self.live)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its tensors in the call."""
        if self.first is None:
            return [*self.entries]
        first, count = self.first, len(self.before.refs)
        numbers = [*range(first, first + count)]
        for i, number in zip(self.before.others, self.entries, strict=True):
            numbers.insert(i, number)
        return numbers

    def among(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return its tensors, of those of the call."""
        numbers: Sequence[int] = self.entries
        if self.first is not None:
            count, are_all = len(self.before.refs), not self.before.others
            last = self.first + count
            numbers = range(self.first, last) if are_all else self.numbers
        if type(numbers) is range:
            return tensors[numbers.start : numbers.stop]
        return [tensors[number] for number in numbers]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is the same in each call of the same code, before the forward."""
        modes = [held.get("training") for held in self.layout.modules()]
        return (*self.numbers, *modes, *self.layout.signature)

    def lease(self, asks: Container[str]) -> None:
        """Refer to containers below that code may tell from others like them."""
        assert self.live is not None
        self.leases = [
            lease_of(value)
            for _, holders in self.live.groups[self.live.first_below :]
            for value in holders
            if not type(value).__weakrefoffset__ and is_told(value, asks)
        ]

    def lease_all(self, live: LiveValues) -> None:
        """Refer to all containers and variables: hooks that the forward set have them.

        What such a hook changes, in the graph of a recompute, is the user's.
        """
        (_, cells), below = live.groups[1], live.groups[live.first_below :]
        held = [*cells, *(value for _, holders in below for value in holders)]
        self.leases = [lease_of(v) for v in held if not type(v).__weakrefoffset__]

    def forward_done(self) -> None:
        """Note what the forward changed."""
        live, self.live = self.live, None
        if live is not None:
            # Unless other threads change it meanwhile: then the effects are not known.
            with contextlib.suppress(MovedError, RuntimeError):
                self.effects = self.before.changed_in(live.again())

    # --- For a recompute ---

    def now(self) -> LiveValues | None:
        """Return what the holders hold now; None if some are not there any more."""
        if not self._iterators:
            with contextlib.suppress(MovedError):
                return live_in(self.layout)
        return None

    def but_for_values(
        self, live: LiveValues, tensors: Sequence[Any]
    ) -> tuple[Iterable[tuple[Any, Any]], Sequence[Numbers]] | None:
        """Return what is to be exchanged, if that is tensors, numbers and words alone.

        Pairs of tensors: that is there now, and that is to be there. And holders that
        hold other numbers, or that the forward wrote. None if there is more.
        """
        before, effects = self.before, self.effects
        places: Any = ()
        if not before.are_in(live):
            places = before.others_in(live)
            if places is None:
                return None
            if not all(before.is_number(p, live) for p in places):
                found = before.tensors_instead(live)
                if found is None or effects is None or effects:
                    return None
                numbers = self.numbers
                return [(there, tensors[numbers[n]]) for there, n in found], ()
        pairs: Iterable[tuple[Any, Any]] = ()
        if before.has_tensors:
            there, ours = before.tensors_in(live), self.among(tensors)
            if not all(map(operator.is_, there, ours)):
                if effects is None:  # the run may write any holder of these
                    return None
                pairs = zip(there, ours, strict=True)
        holders = self._numbers_at(places, live) if places or effects else ()
        return None if holders is None else (pairs, holders)

    def _numbers_at(
        self, places: Sequence[int], live: LiveValues
    ) -> Sequence[Numbers] | None:
        found: list[Numbers] = []
        groups, kept = live.groups, self.before.kept
        for span in spans_at(self.layout, live, places, self.effects or ()):
            kind, held = groups[span.group]
            if kind.frozen or kind is VARIABLES:  # made again, or reset
                return None
            own = [p for p in places if span.start <= p < span.end]
            then = {p - span.start: kept[p] for p in own}
            found.append((kind, held[span.number], then))
        return found

    def instead(self) -> dict[int, Any]:
        """Return, by identity, what a run finds in place of what is not copied."""
        kept = self.before.kept
        found = {kept[p].id: it.again() for p, it in self._iterators.items()}
        return found | {id(large.value): large.value for large in self.large.values()}


# --- Roots ---

# By the identity of a root: the root, and its layout.
_LAYOUTS: dict[int, tuple[Any, Layout]] = {}


def roots_of(values: Iterable[Any]) -> list[Root]:
    """Return what each value reached, and each module that they lead to."""
    found: list[Root] = []
    todo = [*values]
    known: set[int] = set()
    for value in todo:  # which grow
        if value is not None and id(value) not in known:
            known.add(id(value))
            root = _root_of(value)
            found.append(root)
            if root.layout.linked:
                todo += [ref() for ref in root.layout.linked]
    return found


def _root_of(value: Any) -> Root:
    ref, layout = _LAYOUTS.get(id(value), _NO_LAYOUT)
    if layout is not None and ref() is value:
        try:
            root = _root_with(layout)
        except MovedError:
            root = None
        if root is not None:
            return root
    layout, live = lay_out(value)
    layout.last = last = Before(live)
    if not layout.facts.is_lazy:
        key = id(value)
        forget = weakref.ref(value, lambda _: _LAYOUTS.pop(key, None))
        _LAYOUTS[key] = forget, layout
    return Root(layout, last, live)


def _root_with(layout: Layout) -> Root | None:
    """Return what a root reached, by its layout; None if that fits no more."""
    live, last = live_in(layout), layout.last  # which other threads may replace
    layout.hooks_known = RemovableHandle.next_id
    if not last.are_in(live):
        new = last.with_tensors_of(live) or last.in_form_of(live)
        if new is None:
            return None
        layout.last = last = new
    return Root(layout, last, live)


_NO_LAYOUT: Any = None, None


# --- The numbers of their tensors in a call ---


_PARAMETERS = frozenset({nn.Parameter})
_requires_grad = attrgetter("requires_grad")


def number_all(
    passed: Any,
    roots: Sequence[Root],
    each: Sequence[list[Tensor]],
    buffers: dict[int, bool],
) -> list[Tensor]:
    """Give each tensor that the roots reach a number; return the parameters.

    Parameters get the last numbers, a block for each root (`root.first`). Others are
    added to `passed`, and what may be updated in place to `buffers`. If a parameter is
    found twice there are no blocks, and all are added to `passed`.
    """
    parameters = _parameters(passed, roots, each)
    count = len(passed.tensors)
    for root, tensors in zip(roots, each, strict=True):
        before = root.before
        if parameters and len(before.others) < len(tensors):
            tensors = [*map(tensors.__getitem__, before.others)]
        if not tensors:
            continue
        root.entries, is_module = passed.numbers_of(tensors), root.layout.is_module
        frozen = compress(root.entries, map(not_, map(_requires_grad, tensors)))
        if is_module or type(root.entries) is range:  # then none was passed
            buffers.update(dict.fromkeys(frozen, is_module))
        else:
            for i in frozen:
                if i >= count:
                    buffers.setdefault(i, False)
    if parameters:
        first = len(passed.tensors)
        for root in roots:
            root.first, first = first, first + len(root.before.refs)
    return parameters


def _parameters(
    passed: Any, roots: Sequence[Root], each: Sequence[list[Tensor]]
) -> list[Tensor]:
    """Return the parameters that the roots reach, or none if one is found twice."""
    found = [root.before.parameters for root in roots]
    if len(found) == 1:
        are_apart = passed.index.keys().isdisjoint(found[0])
    else:
        known = {*passed.index}.union(*found)
        are_apart = len(known) == len(passed.index) + sum(map(len, found))
    parameters: list[Tensor] = []
    if are_apart:
        for root, tensors in zip(roots, each, strict=True):
            others = {*root.before.others}
            if root.before.refs:
                are = (i not in others for i in range(len(tensors)))
                parameters += compress(tensors, are) if others else tensors
    # Another tensor may have the identity of one that is gone.
    return parameters if _PARAMETERS.issuperset(map(type, parameters)) else []
