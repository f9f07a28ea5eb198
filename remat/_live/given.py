"""What a call is given: its function and its arguments, put aside and made again.

A function, a module or an object is a root, which a weak reference finds again. Passed
lists and dicts are copied, and made again from the copies: they may hold what the graph
of the call holds.

Invariant: what `put_aside` returns leads to no tensor, and to no container or object
but those that are used as they are. The walk is a queue: nesting may be deep.
Rejected: a list of leaves and a treedef. It would lose that two arguments share a list.
"""

import copy
import operator
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from remat._base.code import known_code, static_of
from remat._base.types import ATOMS, TENSORS
from remat._capture.container_kinds import (
    CONTAINERS,
    FACTORIES,
    OWNED,
    Items,
    container_kind,
)
from remat._capture.holders import PART, PARTS, SLOTS, HolderKind, dict_of, names_of
from remat._capture.objects import COPIED_ITERATORS, is_buffer, set_attributes, slots_of
from remat._capture.stream_search import (
    StreamSearch,
    has_defaults,
    has_user_code,
    is_stream,
)
from remat._live.contents import FIRST, At, Ref, at
from remat._live.making import make
from remat._live.walk import (
    has_objects,
    is_of_atoms,
    is_of_library,
    is_used_as_it_is,
)


class Copied:
    """In place of an iterator that was passed: a copy of it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = copy.copy(value)


class Box:
    """In place of a container that was passed, or of a method: what it holds.

    Attributes:
        ref: in place of the container itself.
        how: it is read and written.
        keys: of what it holds.
        items: what it holds; a range of numbers if it is tensors that nothing else is.
        attributes: of an instance of a subclass.
        is_flat: whether all that it holds is tensors and constants.
    """

    __slots__ = ("attributes", "how", "is_flat", "items", "keys", "ref")

    def __init__(self, value: Any, how: HolderKind) -> None:
        self.ref, self.how, self.is_flat = Ref(value), how, False
        self.keys: list[Any]
        self.items: Any
        self.keys, self.items = how.held(value)
        self.attributes: dict[str, Any] = {}
        if type(value) not in CONTAINERS and how is not PART and how is not SLOTS:
            self.attributes = _attributes_of(value, how)


def _attributes_of(value: Any, how: HolderKind) -> dict[str, Any]:
    held = {} if how is OWNED else {**(dict_of(value) or {})}
    held |= zip(names_of(type(value)), SLOTS.values([value]), strict=True)
    if issubclass(type(value), defaultdict):
        held["default_factory"] = value.default_factory
    return held


class Given:
    """What a call is given."""

    __slots__ = (
        *("_boxes", "_todo", "buffers", "index", "roots"),
        *("search", "tensors"),
    )

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.roots: dict[int, Any] = {}
        self.index: dict[int, int] = {}
        self.buffers: list[Any] = []
        self._boxes: dict[int, Box] = {}
        self._todo: list[Box] = []
        self.search: StreamSearch | None = None

    @property
    def streams(self) -> StreamSearch:
        """The search for random streams, which is started."""
        if self.search is None:
            self.search = StreamSearch()
        return self.search

    def put_aside(self, value: Any) -> Any:
        """Return what is held of a value."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind in TENSORS:
            number = self.index.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            return FIRST[number] if number < len(FIRST) else At(number)
        if kind is types.FunctionType:
            return self._root(value)
        kept = self._kept(value)
        if self._todo:
            for box in self._todo:  # which grows
                self._fill(box)
            self._todo.clear()
        return kept

    def _fill(self, box: Box) -> None:
        """Put aside what a container holds."""
        kinds = {*map(type, box.items)}
        keys_are_plain = ATOMS.issuperset(map(type, box.keys))
        if kinds <= TENSORS:
            numbers = self.numbers_of(box.items)
            box.items = numbers if type(numbers) is range else [*map(at, numbers)]
        elif not kinds <= ATOMS:
            box.items = [*map(self._kept, box.items)]
        if not keys_are_plain:
            box.keys = [*map(self._kept, box.keys)]
        for name, held in box.attributes.items():
            box.attributes[name] = self._kept(held)
        is_plain = kinds <= ATOMS or kinds <= TENSORS
        box.is_flat = is_plain and keys_are_plain and not box.attributes

    def _kept(self, value: Any) -> Any:
        kind = type(value)
        if kind in TENSORS or issubclass(kind, Tensor):
            return at(self._number_of(value))
        if kind in ATOMS:
            return value
        if kind is types.FunctionType or issubclass(kind, (nn.Module, type)):
            return self._root(value)
        if id(value) in self._boxes:
            return self._boxes[id(value)]
        if issubclass(kind, PARTS):
            if is_of_library(value) or is_of_atoms(value):
                return value
            return self._box(value, PART)
        if is_stream(kind):
            self.streams.add(value)
            return value
        return self._kept_other(value, kind)

    def _kept_other(self, value: Any, kind: type) -> Any:
        how = container_kind(kind)
        if how is not None:
            return self._box(value, how)
        if kind in COPIED_ITERATORS:
            return Copied(value)
        if is_buffer(kind) and not has_objects(value):
            self.buffers.append(value)
            return value
        if is_used_as_it_is(value, kind):
            self.streams.walk(value)
            return value
        if kind.__weakrefoffset__:
            return self._root(value)
        if hasattr(kind, "__del__"):  # which would run for one that was made again
            self.roots[id(kind)] = kind
            return value
        if dict_of(value) is None and slots_of(kind):
            return self._box(value, SLOTS)
        if issubclass(kind, (int, float, complex, str, bytes)):
            return value  # which cannot be made again
        return self._box(value, OWNED)

    def _box(self, value: Any, how: HolderKind) -> Box:
        kind = type(value)
        if how is not PART and has_user_code(kind):
            self.roots[id(kind)] = kind  # for what its methods refer to
        box = self._boxes[id(value)] = Box(value, how)
        self._todo.append(box)
        return box

    def _root(self, value: Any) -> Any:
        if (
            type(value) is types.FunctionType
            and not (value.__closure__ or value.__dict__ or has_defaults(value))
            and known_code(value).is_settled  # it is its code and nothing that changes
        ):
            return value
        self.roots[id(value)] = value
        return Ref(value)

    # --- Tensors ---

    def _number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor, which is added if it is new."""
        found = self.tensors
        number = self.index.setdefault(id(tensor), len(found))
        if number == len(found):
            found.append(tensor)
        return number

    def numbers_of(self, tensors: Sequence[Tensor]) -> Sequence[int]:
        """Return the numbers of many tensors; those that are new are added."""
        first, count = len(self.tensors), len(tensors)
        numbers = range(first, first + count)
        new = dict(zip(map(id, tensors), numbers))  # noqa: B905 - of one length
        if len(new) < count or not self.index.keys().isdisjoint(new):
            return [*map(self._number_of, tensors)]
        self.index.update(new)
        self.tensors += tensors
        return numbers


def structure_of(values: Sequence[Any]) -> list[Any]:
    """Return what stands for values that were put aside in a signature."""
    found: list[Any] = []
    todo, known = deque(values), dict[int, int]()
    while todo:
        kept = todo.popleft()
        kind = type(kept)
        if kind is At:
            found.append(kept.number)
        elif kind is Ref:
            found.append(kept.kind)
        elif kind is types.FunctionType:
            found.append(weakref.ref(kept.__code__))
        elif kind is not Box:
            found.append(static_of(kept))
        elif id(kept) in known:
            found.append(("again", known[id(kept)]))
        else:
            known[id(kept)] = len(known)
            found += (kept.ref.kind, len(kept.items), *kept.attributes)
            if type(kept.items) is range:
                found.append(kept.items)
            else:
                todo += kept.items
            todo += (*kept.keys, *kept.attributes.values())
    return found


_PUT_ASIDE = Ref, Box, Copied


class Building:
    """What was given, made again for one run."""

    def __init__(self, tensors: Sequence[Any], found: Any, container: Any) -> None:
        self._tensors, self._found, self._container = tensors, found, container
        # By identity: what each container is, which were looked at, and which are new.
        self._made: dict[int, Any] = {}
        self._entered: set[int] = set()
        self._new: set[int] = set()

    def value(self, kept: Any) -> Any:
        """Return a value from what was held of it."""
        kind = type(kept)
        if kind is At:
            return self._tensors[kept.number]
        if kind is Ref:
            return self._found(kept)
        if kind is Box:
            if kept.ref.id not in self._made:
                make(kept, self._enter, self._complete)
            return self._made[kept.ref.id]
        return copy.copy(kept.value) if kind is Copied else kept

    def values(self, kept: Sequence[Any]) -> list[Any]:
        """Return many values."""
        tensors, found = self._tensors, list[Any]()
        if type(kept) is range:
            return [*tensors[kept.start : kept.stop]]
        for k in kept:
            kind = type(k)
            if kind is At:
                found.append(tensors[k.number])
            else:
                found.append(self.value(k) if kind in _PUT_ASIDE else k)
        return found

    def _enter(self, box: Box) -> Sequence[Box] | None:
        """Find a container, or make it if it can be filled later."""
        key = box.ref.id
        if key in self._made or key in self._entered:
            return None
        self._entered.add(key)
        there = self._there(box)
        if there is not None:
            self._made[key] = there
            return ()
        self._new.add(key)
        if not box.how.frozen:
            self._made[key] = box.how.new(box.ref.kind(), (), box.ref.limit)
        if box.is_flat:
            return ()
        held = *box.items, *box.keys, *box.attributes.values()
        return [kept for kept in held if type(kept) is Box]

    def _complete(self, box: Box) -> bool:
        """Make a value that never changes, or fill one that was made."""
        key, made = box.ref.id, self._made
        if key not in self._new:
            return True  # it is there, or filled
        if self._are_missing(box.items) or self._are_missing(box.keys):
            return False
        if not box.how.frozen:
            keys = box.keys and self.values(box.keys)
            box.how.write(made[key], keys, self.values(box.items))
        elif key not in made:
            made[key] = box.how.new(box.ref.kind(), self.values(box.items), None)
        if self._are_missing(box.attributes.values()):
            return False
        if box.attributes:
            self._give_attributes(made[key], box)
        self._new.discard(key)
        return True

    def _are_missing(self, held: Iterable[Any]) -> bool:
        return any(type(k) is Box and k.ref.id not in self._made for k in held)

    def _there(self, box: Box) -> Any:
        """Return a container that need not be made, or None."""
        found = self._container(box.ref)
        kind: Any = box.ref.kind()
        if found is None and isinstance(box.how, Items) and issubclass(kind, set):
            found = self._unchanged(box)
        return found

    def _unchanged(self, box: Box) -> Any:
        """Return a set that is as it was: another one would have another order."""
        value = None if box.ref.ref is None else box.ref.ref()
        if value is None:
            return None
        items = self.values(box.items)
        now = [*box.how.values([value])]
        same = len(now) == len(items) and all(map(operator.is_, now, items))
        return value if same else None

    def _give_attributes(self, made: Any, box: Box) -> None:
        entries = {name: self.value(v) for name, v in box.attributes.items()}
        if "default_factory" in entries:
            FACTORIES.write(made, (), (entries.pop("default_factory"),))
        if entries:
            set_attributes(made, entries)
