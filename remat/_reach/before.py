"""What holders held at a call, and what a forward changed of it.

Numbers and words are held themselves. In place of a tensor is its number: the call
holds it (`_transform/inputs.py`). Anything else is watched by a weak reference, or
known by its identity. So a `Before` keeps nothing alive, and calls between which
nothing changed share one.

Invariant: it leads to no tensor and to no object of the user's that can be held
weakly. A graph holds its calls where Python's garbage collector does not look.
Rejected: strong references to containers. A list may hold what the graph holds.
"""

import copy
import itertools
import operator
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from remat._base.interpreter import may_refer_to_others
from remat._base.types import ATOMS, TENSORS
from remat._reach.holders import (
    ATTRIBUTES,
    FUNCTIONS,
    MISSING,
    SLOTS,
    HolderKind,
)
from remat._reach.layout import Layout, LiveValues, taking
from remat._reach.objects import dict_of, is_spent_by_use
from remat._reach.walk import is_of_atoms, is_opaque


Place = tuple[int, bool]  # position, whether among the keys
HolderIndex = tuple[int, int]  # of its group among all, and of it in that


class At:
    """In place of a tensor: its number.

    Among those of a root, in `Before`; among those of the call, in what was passed.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


FIRST = tuple(map(At, range(64)))


def at(number: int) -> At:
    """Return what is in place of the tensor with a number."""
    return FIRST[number] if number < len(FIRST) else At(number)


class Ref:
    """In place of a value that is not held.

    `ref` is None where its class has no weak references, `limit` is of a deque.
    """

    __slots__ = ("id", "kind", "limit", "ref")

    def __init__(self, value: Any) -> None:
        kind = type(value)
        self.id, self.kind = id(value), weakref.ref(kind)
        self.limit = value.maxlen if issubclass(kind, deque) else None
        self.ref: Any = weakref.ref(value) if kind.__weakrefoffset__ else None


class _Keeper:
    """Puts values aside; numbers tensors."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.places: list[Place] = []  # the first of each tensor
        self.every: list[Place] = []
        self.opaque: list[int] = []

    def keep_all(self, values: Sequence[Any], *, as_keys: bool) -> list[Any]:
        """Return what is held of all values, or of all keys."""
        keep = self._keep
        return [keep(v, (p, as_keys)) for p, v in enumerate(values)]

    def _keep(self, value: Any, place: Place) -> Any:
        kind = type(value)
        if kind in _OF_CLASSES:
            return Ref(value)
        if (kind in ATOMS and kind is not threading.Thread) or value is MISSING:
            return value
        if kind in TENSORS or issubclass(kind, Tensor):
            self.every.append(place)
            number = self.numbers.setdefault(id(value), len(self.places))
            if number == len(self.places):
                self.places.append(place)
            return at(number)
        if _is_number(value, kind):
            return value
        if kind is threading.Thread or is_opaque(value, kind):
            # The call holds it: a `Before` outlives calls.
            if not kind.__weakrefoffset__ or place[1]:
                return value
            self.opaque.append(place[0])
            return Ref(value)
        if place[1] and issubclass(kind, weakref.ref):
            return value  # a key of a weak dictionary, which its entry goes with
        return Ref(value)


def _is_number(value: Any, kind: type) -> bool:
    """Say whether a value is a number or a word, or holds only such."""
    if issubclass(kind, (tuple, frozenset)):
        return kind in (tuple, frozenset) and ATOMS.issuperset(map(type, value))
    if kind is slice:
        return is_of_atoms(value)
    if issubclass(kind, (str, bytes, int, float, complex)):
        return not dict_of(value)
    is_other = kind.__weakrefoffset__ or kind.__dictoffset__ or is_spent_by_use(kind)
    return not (is_other or may_refer_to_others(kind))


# What a class has made of itself leads to it.
_OF_CLASSES = {types.GetSetDescriptorType, types.MemberDescriptorType}


class Span(NamedTuple):
    """One holder: how it is read, its number in its group, and where its values are."""

    kind: HolderKind
    group: int
    number: int
    start: int
    end: int
    first_key: int

    def of(self, keys: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return its keys and its values, of all."""
        start, end, first = self.start, self.end, self.first_key
        own = keys[first : first + end - start] if self.kind.keyed else []
        return own, values[start:end]


class Before:
    """What the holders of a layout held.

    Attributes:
        kept: the values, with `At` and `Ref` among them.
        keys: the keys.
        parameters: the identities of those that are parameters.
        others: the indices of the other tensors.
        refs: weak references to the parameters.
        opaque: those of values that are neither walked nor made again.
        classes: of the owners.
    """

    __slots__ = (
        *("_at", "_held", "_in_keys", "_in_values", "_marks", "_places"),
        *("_sizes", "classes"),
        *("keys", "kept", "opaque", "others", "parameters", "refs"),
    )

    def __init__(self, live: LiveValues) -> None:
        self._marks = live.marks
        self._places: dict[int, Place] | None = None
        self._held: Sequence[tuple[Span, Place | None]] | None = None
        self._sizes = [(kind, len(holders)) for kind, holders in live.groups]
        keeper, keys = _Keeper(), live.keys
        self.kept = keeper.keep_all(live.values, as_keys=False)
        if not ATOMS.issuperset(map(type, keys)):
            keys = keeper.keep_all(keys, as_keys=True)
        self.keys = keys
        self.opaque = keeper.opaque
        # Where tensors are, among the values and then the keys.
        self._at = [p + as_key * len(self.kept) for p, as_key in keeper.every]
        # Those among the values come first.
        self._in_values = taking([p for p, as_key in keeper.places if not as_key])
        in_keys = [p for p, as_key in keeper.places if as_key]
        self._in_keys = taking(in_keys) if in_keys else None
        self.classes = [*map(weakref.ref, map(type, live.owners))]
        self._note_tensors(live)

    def _note_tensors(self, live: LiveValues) -> None:
        tensors = self.tensors_in(live)
        are = [kind is nn.Parameter for kind in map(type, tensors)]
        self.others = [i for i, is_parameter in enumerate(are) if not is_parameter]
        parameters = [*itertools.compress(tensors, are)]
        self.parameters = frozenset(map(id, parameters))
        self.refs = [*map(weakref.ref, parameters)]

    # --- Compared with another moment ---

    def are_in(self, live: LiveValues) -> bool:
        """Say whether the same is held now."""
        return self._marks == live.marks

    def tensors_instead(self, now: LiveValues) -> list[tuple[Any, int]] | None:
        """Return what is where tensors were, with their numbers; None if more differs.

        Where each tensor was, in order.
        """
        places, kept = self.others_in(now), [*self.kept, *self.keys]
        there = [*now.values, *now.keys]
        if places is None or (places and places[-1] >= len(kept)):
            return None  # an owner is of another class
        if not all(type(kept[p]) is At and _is_tensor(type(there[p])) for p in places):
            return None
        return [(there[p], kept[p].number) for p in self._at]

    def with_tensors_of(self, now: LiveValues) -> "Before | None":
        """Return what is held now, if only tensors are others; else None."""
        pairs = self.tensors_instead(now)
        if not pairs:
            return None
        ids = {(id(t), number) for t, number in pairs}
        if not len(ids) == len({i for i, _ in ids}) == len({n for _, n in ids}):
            return None  # what was one is two now, or the other way round
        new = copy.copy(self)
        new._marks = now.marks
        new._note_tensors(now)
        return new

    def in_form_of(self, now: LiveValues) -> "Before | None":
        """Return what is held now, if only numbers, words and tensors are others."""
        places = self.others_in(now)
        if places is None or not all(self._is_alike(p, now) for p in places):
            return None
        if any(p < len(self.kept) and type(self.kept[p]) is At for p in places):
            return Before(now)
        new = copy.copy(self)
        new._marks = now.marks
        new.kept, new.keys = self.kept.copy(), self.keys.copy()
        for p in places:
            if p < len(new.kept):
                new.kept[p] = now.values[p]
            else:
                new.keys[p - len(new.kept)] = now.keys[p - len(new.kept)]
        return new

    def others_in(self, now: LiveValues) -> list[int] | None:
        """Return where something else is held now: at values, keys, and classes.

        None if holders hold more or less than they did.
        """
        if now.lengths != self._marks[1]:
            return None
        ids = (memoryview(marks).cast("Q") for marks in (self._marks[0], now.marks[0]))
        return [*itertools.compress(itertools.count(), map(operator.ne, *ids))]

    def is_number(self, p: int, now: LiveValues) -> bool:
        """Say whether a value is another number or word now."""
        if p >= len(self.kept):
            return False
        return _is_plain(self.kept[p]) and _is_plain(now.values[p])

    def _is_alike(self, p: int, now: LiveValues) -> bool:
        """Say whether another value leads to what the one before led to."""
        count = len(self.kept)
        if p < count and type(self.kept[p]) is At:
            return issubclass(type(now.values[p]), Tensor)
        if p < count:
            return self.is_number(p, now)
        if p - count >= len(self.keys):
            return False  # the class of an owner
        key = now.keys[p - count]
        return type(key) in ATOMS and self.keys[p - count] == key

    def tensors_in(self, live: LiveValues) -> list[Tensor]:
        """Return the tensors, of what is held now."""
        found = [*self._in_values(live.values)]
        return found if self._in_keys is None else [*found, *self._in_keys(live.keys)]

    @property
    def has_tensors(self) -> bool:
        """Whether there are tensors."""
        return bool(self.refs or self.others)

    def changed_in(self, now: LiveValues) -> set[HolderIndex]:
        """Return the holders that hold something else now."""
        if self.are_in(now):
            return set()
        pairs = differing(self._sizes, (self._marks, len(self.kept)), marks_of(now))
        return {(span.group, span.number) for span, _ in pairs}

    # --- One by one ---

    def with_tensors(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the keys and the values, with tensors in place of their numbers."""
        count, keys, kept = len(self.kept), self.keys.copy(), self.kept.copy()
        for p in self._at:
            held, i = (kept, p) if p < count else (keys, p - count)
            held[i] = tensors[held[i].number]
        return keys, kept

    def code_of(self, i: int) -> Any:
        """Return the code of a function, by its index."""
        spans = [span for span in self.spans() if span.kind is FUNCTIONS]
        return self.kept[spans[i].start]

    def at(self, place: Place) -> Any:
        """Return what is held of a value, or of a key."""
        position, as_key = place
        return self.keys[position] if as_key else self.kept[position]

    def holders(self, layout: Layout) -> Sequence[tuple[Span, Place | None]]:
        """Return the holders, and where each one is that is no owner."""
        if self._held is None:
            self._held = [*self._find_holders(layout)]
        return self._held

    def _find_holders(self, layout: Layout) -> Iterator[tuple[Span, Place | None]]:
        first = len(self._sizes) - len(layout.below)
        for span in self.spans():
            if span.group < first:
                yield span, None
                continue
            _, places, as_keys = layout.below[span.group - first]
            place = places[span.number], as_keys
            if type(self.at(place)) is Ref:
                yield span, place

    def places(self, layout: Layout) -> dict[int, Place]:
        """Return where each holder that is no owner is, by its identity."""
        if self._places is None:
            self._places = {}
            for _, found, as_keys in layout.below:
                held = self.keys if as_keys else self.kept
                for p in found:
                    if type(held[p]) is Ref:  # else there is a number by now
                        self._places.setdefault(held[p].id, (p, as_keys))
        return self._places

    def key_of(self, layout: Layout, span: Span) -> int:
        """Return the identity of an owner; 0 of one that values do not lead to."""
        if span.kind is SLOTS:
            return layout.births[layout.slotted.start + span.number]
        return layout.births[span.number] if span.kind is ATTRIBUTES else 0

    def spans(self) -> Iterator[Span]:
        """Yield the holders."""
        return spans_of(self._sizes, self._marks[1])


def _is_tensor(kind: type) -> bool:
    return kind in TENSORS or issubclass(kind, Tensor)


def spans_of(
    sizes: Sequence[tuple[HolderKind, int]], lengths: Sequence[int]
) -> Iterator[Span]:
    """Yield the holders of some kinds, how many of each, with so many values."""
    start = key = 0
    left = iter(lengths)
    for g, (kind, count) in enumerate(sizes):
        for i in range(count):
            length = kind.fixed or next(left)
            yield Span(kind, g, i, start, start + length, key)
            start, key = start + length, key + length * kind.keyed


# What `LiveValues` or a `Before` say of what they hold: `marks`, and how many values.
Marks = tuple[tuple[bytes, list[int]], int]


def marks_of(live: LiveValues) -> Marks:
    """Return what is compared of what is live."""
    return live.marks, len(live.values)


def differing(
    sizes: Sequence[tuple[HolderKind, int]], then: Marks, now: Marks
) -> list[tuple[Span, Span]]:
    """Return the holders that hold something else at one moment than at another."""
    ((ids, lengths), keys), ((ids_now, lengths_now), keys_now) = then, now
    if ids == ids_now and lengths == lengths_now:
        return []
    spans = spans_of(sizes, lengths), spans_of(sizes, lengths_now)
    return [
        (a, b)
        for a, b in zip(*spans, strict=True)
        if _slices(ids, a, keys) != _slices(ids_now, b, keys_now)
    ]


def _slices(ids: bytes, span: Span, keys: int) -> tuple[bytes, bytes]:
    """Return the identities of the values and of the keys of a holder."""
    kind, _, _, start, end, first_key = span
    first = (keys + first_key) * 8
    last = first + (end - start) * 8 * kind.keyed
    return ids[start * 8 : end * 8], ids[first:last]


def _is_plain(value: Any) -> bool:
    """Say whether a value leads nowhere. Other code may lead elsewhere."""
    kind = type(value)
    return (kind in ATOMS and kind is not types.CodeType) or value is MISSING
