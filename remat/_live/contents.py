"""What holders held at a call, and what a forward changed of it.

Numbers and words are held themselves. A tensor is a place: the call holds it (`reach`).
Anything else is watched by a weak reference, or known by its identity. So contents keep
nothing alive, and calls between which nothing changed share them.

Invariant: contents lead to no tensor and to no object of the user's that can be held
weakly. A graph holds its calls where Python's garbage collector does not look.
Rejected: strong references to containers. A list may hold what the graph holds.
"""

import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from remat._base.types import INERT, TENSORS
from remat._capture.kinds import COPIED_ITERATORS
from remat._live.holders import FUNCTIONS, MISSING, Kind, dict_of
from remat._live.kinds import is_opaque
from remat._live.layout import Layout, Taken


Place = tuple[int, int, bool]  # level, position, whether among the keys
Holder = tuple[int, int, int]  # level, group, number


class At:
    """In place of a tensor: its number among those of a root."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Ref:
    """In place of a value that is not held.

    Attributes:
        id: its identity.
        kind: gives its class.
        ref: gives it, or None; None where there are no weak references of its class.
        limit: how long it may get: of a deque.
    """

    __slots__ = ("id", "kind", "limit", "ref")

    def __init__(self, value: Any) -> None:
        kind = type(value)
        self.id, self.kind = id(value), weakref.ref(kind)
        self.limit = value.maxlen if issubclass(kind, deque) else None
        self.ref: Any = weakref.ref(value) if kind.__weakrefoffset__ else None

    def is_of(self, value: Any) -> bool:
        """Say whether this is in place of that value."""
        if id(value) != self.id:
            return False
        return type(value) is self.kind() if self.ref is None else self.ref() is value


class _Keeper:
    """Puts values aside; numbers tensors."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.places: list[Place] = []
        self.opaque: list[tuple[int, int]] = []

    def keep(self, value: Any, place: Place) -> Any:
        """Return what is held of a value that was found at a place."""
        kind = type(value)
        if kind in _OF_CLASSES or kind in COPIED_ITERATORS:
            return Ref(value)
        if (kind in INERT and kind is not threading.Thread) or value is MISSING:
            return value
        if kind in TENSORS or issubclass(kind, Tensor):
            number = self.numbers.setdefault(id(value), len(self.places))
            if number == len(self.places):
                self.places.append(place)
            return At(number)
        if _is_number(value, kind):
            return value
        if kind is threading.Thread or is_opaque(value, kind):
            return self._opaque(value, place)
        if place[2] and issubclass(kind, weakref.ref):
            return value  # a key of a weak dictionary, which its entry goes with
        return Ref(value)

    def _opaque(self, value: Any, place: Place) -> Any:
        """Return what is held of a value that a call holds: contents outlive calls."""
        if not type(value).__weakrefoffset__ or place[2]:
            return value
        self.opaque.append(place[:2])
        return Ref(value)

    def keep_all(self, k: int, values: Sequence[Any], *, as_keys: bool) -> list[Any]:
        """Return what is held of a level."""
        keep = self.keep
        return [keep(v, (k, p, as_keys)) for p, v in enumerate(values)]


def _is_number(value: Any, kind: type) -> bool:
    """Say whether a value is a number or a word, or holds only such."""
    if issubclass(kind, (tuple, frozenset)):
        return kind in (tuple, frozenset) and INERT.issuperset(map(type, value))
    if issubclass(kind, (str, bytes, int, float, complex)):
        return not dict_of(value)
    return not (
        kind.__weakrefoffset__ or kind.__dictoffset__ or kind.__flags__ & _HAS_GC
    )


# What a class has made of itself leads to it.
_OF_CLASSES = {types.GetSetDescriptorType, types.MemberDescriptorType}
_HAS_GC = 1 << 14  # CPython: may refer to others


class Span(NamedTuple):
    """One holder: how it is read, its number in its group, and where its values are."""

    kind: Kind
    group: int
    number: int
    start: int
    end: int
    first_key: int


class Contents:
    """What the holders of a layout held.

    Attributes:
        kept: for each level, the values, with `At` and `Ref` among them.
        keys: for each level, the keys.
        places: of the tensors, each once, in order.
        parameters: the identities of those that are parameters.
        others: the indices of the other tensors.
        refs: weak references to the parameters.
        opaque: those of values that are neither walked nor made again.
        classes: of the owners.
    """

    __slots__ = (
        *("_containers", "_marks", "_sizes", "_tensors_at", "classes", "keys", "kept"),
        *("opaque", "others", "parameters", "places", "refs"),
    )

    def __init__(self, taken: Taken) -> None:
        self._marks = taken.marks
        self._containers: dict[int, tuple[int, int, Span]] | None = None
        self._sizes = [[(kind, len(h)) for kind, h in g] for g in taken.groups]
        keeper = _Keeper()
        each = [*enumerate(taken.values)]
        self.kept = [keeper.keep_all(k, v, as_keys=False) for k, v in each]
        self.keys = [
            keys
            if INERT.issuperset(map(type, keys))
            else keeper.keep_all(k, keys, as_keys=True)
            for k, keys in enumerate(taken.keys)
        ]
        self.places, self.opaque = keeper.places, keeper.opaque
        groups = itertools.groupby(self.places, lambda place: (place[0], place[2]))
        self._tensors_at = [(at, [p for _, p, _ in each]) for at, each in groups]
        self.classes = [*map(weakref.ref, map(type, taken.owners))]
        tensors = self.tensors_in(taken)
        are = [kind is nn.Parameter for kind in map(type, tensors)]
        self.others = [i for i, is_parameter in enumerate(are) if not is_parameter]
        parameters = [*itertools.compress(tensors, are)]
        self.parameters = frozenset(map(id, parameters))
        self.refs = [*map(weakref.ref, parameters)]

    # --- Compared with another moment ---

    def are_in(self, taken: Taken) -> bool:
        """Say whether the same is held now."""
        return self._marks == taken.marks

    def has_form_of(self, taken: Taken) -> bool:
        """Say whether only numbers and tensors are others now."""
        if [ref() for ref in self.classes] != [*map(type, taken.owners)]:
            return False
        for k, then in enumerate(self._marks):
            now = taken.marks[k]
            if then[1] != now[1] or not _are_alike(self.keys[k], taken.keys[k]):
                return False
            if then != now and not all(map(_alike, self.kept[k], taken.values[k])):
                return False
        return True

    def tensors_in(self, taken: Taken) -> list[Tensor]:
        """Return the tensors, of what is held now."""
        found: list[Tensor] = []
        for (k, as_keys), places in self._tensors_at:
            held = (taken.keys if as_keys else taken.values)[k]
            found += map(held.__getitem__, places)
        return found

    def parameters_in(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return those of the tensors that are parameters."""
        if not self.others:
            return tensors
        others = {*self.others}
        return [t for i, t in enumerate(tensors) if i not in others]

    def changed_in(self, now: Taken) -> set[Holder]:
        """Return the holders that hold something else now."""
        return {
            holder
            for k, marks in enumerate(self._marks)
            if marks != now.marks[k]
            for holder in self._changed_at(k, now)
        }

    def _changed_at(self, k: int, now: Taken) -> Iterator[Holder]:
        (ids, _), (ids_now, lengths) = self._marks[k], now.marks[k]
        keys, keys_now = len(self.kept[k]), len(now.values[k])
        present = _spans(self._sizes[k], lengths)
        for then, span in zip(self.spans(k), present, strict=True):
            if _slices(ids, then, keys) != _slices(ids_now, span, keys_now):
                yield k, then.group, then.number

    # --- One by one ---

    def code_of(self, i: int) -> Any:
        """Return the code of a function, by its index."""
        spans = [span for span in self.spans(0) if span.kind is FUNCTIONS]
        return self.kept[0][spans[i].start]

    def containers(self, layout: Layout) -> dict[int, tuple[int, int, Span]]:
        """Return where each container is, by its identity.

        Returns:
            Its level, its position there, and its span in the level below.
        """
        if self._containers is None:
            found: dict[int, tuple[int, int, Span]] = {}
            self._containers = found
            for k, groups in enumerate(layout.levels):
                for span in self.spans(k + 1):
                    p = groups[span.group][1][span.number]
                    kept = self.kept[k][p]
                    if type(kept) is not Ref:
                        continue
                    known = found.get(kept.id)
                    if known is None or (known[2].kind.adds and not span.kind.adds):
                        found[kept.id] = k, p, span
        return self._containers

    def spans(self, k: int) -> Iterator[Span]:
        """Yield the holders of a level."""
        return _spans(self._sizes[k], self._marks[k][1])


def _spans(sizes: Sequence[tuple[Kind, int]], lengths: Sequence[int]) -> Iterator[Span]:
    start = key = 0
    left = iter(lengths)
    for g, (kind, count) in enumerate(sizes):
        for i in range(count):
            length = kind.fixed or next(left)
            yield Span(kind, g, i, start, start + length, key)
            start, key = start + length, key + length * kind.keyed


def _slices(ids: bytes, span: Span, keys: int) -> tuple[bytes, bytes]:
    """Return the identities of the values and of the keys of a holder.

    Args:
        ids: of a level.
        span: where the values are.
        keys: where the keys of the level begin.
    """
    first = keys + span.first_key
    last = first + (span.end - span.start) * span.kind.keyed
    return ids[span.start * 8 : span.end * 8], ids[first * 8 : last * 8]


def _are_alike(kept: Sequence[Any], keys: Sequence[Any]) -> bool:
    """Say whether keys are the same; no `__eq__` of the user's runs."""
    if len(kept) != len(keys):
        return False
    pairs = zip(kept, keys, strict=True)
    return all(
        a.is_of(b) if type(a) is Ref else a is b or (type(b) in INERT and a == b)
        for a, b in pairs
    )


def _alike(kept: Any, value: Any) -> bool:
    """Say whether a value leads to what the one before led to."""
    if type(kept) is Ref:
        return kept.is_of(value)
    if type(kept) is At:
        return issubclass(type(value), Tensor)
    return kept is value or (_is_plain(kept) and _is_plain(value))


def _is_plain(value: Any) -> bool:
    """Say whether a value leads nowhere. Other code may lead elsewhere."""
    kind = type(value)
    return (kind in INERT and kind is not types.CodeType) or value is MISSING
