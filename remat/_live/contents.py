"""What holders held at a call, and what a forward changed of it.

Numbers and words are held themselves. In place of a tensor is its number: the call
holds it (`_transform/inputs.py`). Anything else is watched by a weak reference, or
known by its identity. So contents keep nothing alive, and calls between which nothing
changed share them.

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

from remat._base.interpreter import may_refer_to_others
from remat._base.types import INERT, TENSORS
from remat._capture.container_kinds import CONTAINERS
from remat._capture.holders import FUNCTIONS, MISSING, HolderKind, dict_of
from remat._capture.objects import COPIED_ITERATORS
from remat._live.layout import Layout, Taken
from remat._live.walk import is_opaque


Place = tuple[int, bool]  # position, whether among the keys
HolderIndex = tuple[int, int]  # of its group among all, and of it in that


class At:
    """In place of a tensor: its number.

    Among those of a root, in contents; among those of the call, in what was given.
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

    def is_of(self, value: Any) -> bool:
        """Say whether this is in place of that value."""
        if id(value) != self.id:
            return False
        return type(value) is self.kind() if self.ref is None else self.ref() is value


class KeyRef(Ref):
    """In place of a tuple or frozenset that is a key: what it holds, kept in turn.

    It may be made again: another one that is equal is the same key.
    """

    __slots__ = ("how", "parts")

    def __init__(self, value: Any, how: HolderKind, parts: list[Any]) -> None:
        super().__init__(value)
        self.how, self.parts = how, parts


class _Keeper:
    """Puts values aside; numbers tensors."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.places: list[Place] = []
        self.opaque: list[int] = []

    def keep_all(self, values: Sequence[Any], *, as_keys: bool) -> list[Any]:
        """Return what is held of all values, or of all keys."""
        keep = self._keep
        return [keep(v, (p, as_keys)) for p, v in enumerate(values)]

    def _keep(self, value: Any, place: Place) -> Any:
        kind = type(value)
        if kind in _OF_CLASSES or kind in COPIED_ITERATORS:
            return Ref(value)
        if (kind in INERT and kind is not threading.Thread) or value is MISSING:
            return value
        if kind in TENSORS or issubclass(kind, Tensor):
            number = self.numbers.setdefault(id(value), len(self.places))
            if number == len(self.places):
                self.places.append(place)
            return at(number)
        if _is_number(value, kind):
            return value
        if kind is threading.Thread or is_opaque(value, kind):
            # The call holds it: contents outlive calls.
            if not kind.__weakrefoffset__ or place[1]:
                return value
            self.opaque.append(place[0])
            return Ref(value)
        if place[1] and issubclass(kind, weakref.ref):
            return value  # a key of a weak dictionary, which its entry goes with
        if place[1] and issubclass(kind, (tuple, frozenset)):
            return self._keep_key(value, place)
        return Ref(value)

    def _keep_key(self, value: Any, place: Place) -> Any:
        how = CONTAINERS[tuple if isinstance(value, tuple) else frozenset]
        held = [*how.values([value])]
        if any(issubclass(type(v), Tensor) for v in held):
            return Ref(value)
        return KeyRef(value, how, [self._keep(v, place) for v in held])


def _is_number(value: Any, kind: type) -> bool:
    """Say whether a value is a number or a word, or holds only such."""
    if issubclass(kind, (tuple, frozenset)):
        return kind in (tuple, frozenset) and INERT.issuperset(map(type, value))
    if issubclass(kind, (str, bytes, int, float, complex)):
        return not dict_of(value)
    has_attributes = kind.__weakrefoffset__ or kind.__dictoffset__
    return not (has_attributes or may_refer_to_others(kind))


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


class Contents:
    """What the holders of a layout held.

    Attributes:
        kept: the values, with `At` and `Ref` among them.
        keys: the keys.
        places: of the tensors, each once, in order.
        parameters: the identities of those that are parameters.
        others: the indices of the other tensors.
        refs: weak references to the parameters.
        opaque: those of values that are neither walked nor made again.
        classes: of the owners.
    """

    __slots__ = (
        *("_as_keys", "_as_values", "_containers", "_key_places", "_marks", "_sizes"),
        *("classes", "keys", "kept", "opaque", "others", "parameters", "places"),
        "refs",
    )

    def __init__(self, taken: Taken) -> None:
        self._marks = taken.marks
        self._containers: dict[int, tuple[int, Span]] | None = None
        self._key_places: dict[int, int] | None = None
        self._sizes = [(kind, len(holders)) for kind, holders in taken.groups()]
        keeper, keys = _Keeper(), taken.keys
        self.kept = keeper.keep_all(taken.values, as_keys=False)
        if not INERT.issuperset(map(type, keys)):
            keys = keeper.keep_all(keys, as_keys=True)
        self.keys = keys
        self.places, self.opaque = keeper.places, keeper.opaque
        # Those among the values come first.
        self._as_values = [p for p, as_key in self.places if not as_key]
        self._as_keys = [p for p, as_key in self.places if as_key]
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
        if self._marks[1] != taken.lengths or not _are_alike(self.keys, taken.keys):
            return False
        return all(map(_alike, self.kept, taken.values))

    def tensors_in(self, taken: Taken) -> list[Tensor]:
        """Return the tensors, of what is held now."""
        found = [*map(taken.values.__getitem__, self._as_values)]
        if self._as_keys:
            found += map(taken.keys.__getitem__, self._as_keys)
        return found

    def parameters_in(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return those of the tensors that are parameters."""
        if not self.others:
            return tensors
        others = {*self.others}
        return [t for i, t in enumerate(tensors) if i not in others]

    def changed_in(self, now: Taken) -> set[HolderIndex]:
        """Return the holders that hold something else now."""
        ids, marks = self._marks[0], now.marks
        if self._marks == marks:
            return set()
        keys, keys_now = len(self.kept), len(now.values)
        pairs = zip(self.spans(), _spans(self._sizes, now.lengths), strict=True)
        return {
            (then.group, then.number)
            for then, span in pairs
            if _slices(ids, then, keys) != _slices(marks[0], span, keys_now)
        }

    # --- One by one ---

    def code_of(self, i: int) -> Any:
        """Return the code of a function, by its index."""
        spans = [span for span in self.spans() if span.kind is FUNCTIONS]
        return self.kept[spans[i].start]

    def containers(self, layout: Layout) -> dict[int, tuple[int, Span]]:
        """Return where each container is, and what it holds, by its identity."""
        if self._containers is None:
            found: dict[int, tuple[int, Span]] = {}
            self._containers = found
            first = len(self._sizes) - len(layout.below)
            for span in self.spans():
                if span.group < first:
                    continue
                p = layout.below[span.group - first][1][span.number]
                kept = self.kept[p]
                if type(kept) is not Ref:
                    continue
                known = found.get(kept.id)
                if known is None or (known[1].kind.adds and not span.kind.adds):
                    found[kept.id] = p, span
        return self._containers

    def key_place(self, key: int) -> int | None:
        """Return where an object is among the keys, by its identity."""
        if self._key_places is None:
            pairs = enumerate(self.keys)
            self._key_places = {k.id: i for i, k in pairs if isinstance(k, Ref)}
        return self._key_places.get(key)

    def spans(self) -> Iterator[Span]:
        """Yield the holders."""
        return _spans(self._sizes, self._marks[1])


def _spans(
    sizes: Sequence[tuple[HolderKind, int]], lengths: Sequence[int]
) -> Iterator[Span]:
    start = key = 0
    left = iter(lengths)
    for g, (kind, count) in enumerate(sizes):
        for i in range(count):
            length = kind.fixed or next(left)
            yield Span(kind, g, i, start, start + length, key)
            start, key = start + length, key + length * kind.keyed


def _slices(ids: bytes, span: Span, keys: int) -> tuple[bytes, bytes]:
    """Return the identities of the values and of the keys of a holder."""
    first = keys + span.first_key
    last = first + (span.end - span.start) * span.kind.keyed
    return ids[span.start * 8 : span.end * 8], ids[first * 8 : last * 8]


def _are_alike(kept: Sequence[Any], keys: Sequence[Any]) -> bool:
    """Say whether keys are the same; no `__eq__` of the user's runs."""
    if len(kept) != len(keys):
        return False
    pairs = zip(kept, keys, strict=True)
    return all(
        a.is_of(b) if isinstance(a, Ref) else a is b or (type(b) in INERT and a == b)
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
