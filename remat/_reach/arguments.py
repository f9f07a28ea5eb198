"""What a call is given: its function and its arguments, put aside and found again.

A function, a module or an object is a root, which a weak reference finds again. Of a
passed container there is a copy, as it may hold what the graph of the call holds. A
recompute gets the container itself, with what it held, if one of these finds it:

    a holder that a root leads to, also as a key there
    a weak reference, as to a deque, a partial or an instance of a subclass
    a container that is found and holds it still, as a partial around a list
    a lease, where code asks for identities (`leases`)

Else it is made again from the copy. Then nobody can tell it from the one of the call,
but code of an installed package, which is not searched for `id`.

Invariant: what `put_aside` returns leads to no tensor, and to no container or object
but those that are used as they are. The walk is a queue: nesting may be deep.
Rejected: a list of leaves and a treedef. It would lose that two arguments share a list.
"""

import contextlib
import types
import weakref
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from remat._base.code import known_code, static_of
from remat._base.types import ATOMS, INERT, TENSORS
from remat._reach.before import FIRST, At, Ref, at
from remat._reach.holders import (
    MISSING,
    PART,
    PARTS,
    VARIABLES,
    container_kind,
    kinds_of,
)
from remat._reach.names import CallNames
from remat._reach.objects import dict_of, is_spent_by_use
from remat._reach.parts import Box, HolderParts, Watched
from remat._reach.stream_search import CodeFacts, StreamSearch, is_stream, user_bases
from remat._reach.walk import is_of_atoms, is_of_library, is_used_as_it_is
from remat._reach.watched import (
    PASSED,
    HeldBuffer,
    Iterated,
    has_objects,
    is_bare_buffer,
    is_buffer,
)


class CallArguments:
    """What a call is given."""

    __slots__ = (
        *("_called", "_search", "_todo", "are_found", "boxes", "buffers", "facts"),
        *("index", "roots", "tensors"),
    )

    def __init__(
        self, fn: Any, args: Any, kwargs: dict[str, Any], facts: CodeFacts
    ) -> None:
        self._called = fn, args, kwargs
        self.facts = facts  # to which those of what is used as it is are added
        # Whether a recompute may find some of what was passed.
        self.are_found = False
        self.tensors: list[Tensor] = []
        self.roots: dict[int, Any] = {}
        self.index: dict[int, int] = {}
        self.buffers: list[HeldBuffer] = []
        self.boxes: dict[int, tuple[Box, Any]] = {}  # with the values
        self._todo: list[Box] = []
        self._search: StreamSearch | None = None

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
                are_flat = [*map(self._fill, box.held)]
                box.is_flat = are_flat[0] and len(are_flat) == 1
                # A method has nothing in it that may be written.
                if box.ref is not None and not (box.is_flat and box.is_frozen):
                    self.are_found = True
            self._todo.clear()
        return kept

    def _fill(self, held: HolderParts) -> bool:
        """Put aside what a holder holds; say whether no container is among that."""
        kinds, is_flat = {*map(type, held.items)}, True
        if kinds <= TENSORS:
            numbers = self.numbers_of(held.items)
            held.items = numbers if type(numbers) is range else [*map(at, numbers)]
        elif not kinds <= ATOMS:
            held.items = [*map(self._kept, held.items)]
            is_flat = Box not in map(type, held.items)
        if not ATOMS.issuperset(map(type, held.keys)):
            held.keys = [*map(self._kept, held.keys)]
            is_flat = is_flat and Box not in map(type, held.keys)
        return is_flat

    def _kept(self, value: Any) -> Any:
        kind = type(value)
        if kind in TENSORS or issubclass(kind, Tensor):
            return at(self._number_of(value))
        if kind in ATOMS or value is MISSING:
            return value
        if kind is types.FunctionType or issubclass(kind, (nn.Module, type)):
            return self._root(value)
        if id(value) in self.boxes:
            return self.boxes[id(value)][0]
        if issubclass(kind, PARTS):
            if is_of_library(value) or is_of_atoms(value):
                return value
            return self._box(value)
        if is_stream(kind):
            self.facts.add_stream(value)
            return value
        return self._kept_other(value, kind)

    def _kept_other(self, value: Any, kind: type) -> Any:
        if kind is ContextVar or container_kind(kind) is not None:
            return self._box(value)
        if is_spent_by_use(kind):
            self.facts.has_iterators = True
            return Iterated(value, self._name_of(value))
        if is_buffer(kind) and not has_objects(value):
            self.buffers.append((value, "", PASSED))
            if is_bare_buffer(kind):  # others may have attributes
                return value
        if is_used_as_it_is(value, kind):
            self._search = self._search or StreamSearch(self.facts)
            self._search.walk(value)
            return value
        if kind.__weakrefoffset__:
            return self._root(value)
        if hasattr(kind, "__del__"):  # which would run for one that was made again
            self.roots[id(kind)] = kind
            return value
        is_number = issubclass(kind, (int, float, complex, str, bytes))
        if is_number and dict_of(value) is not None:
            return value  # which cannot be made again
        return self._box(value)

    def _name_of(self, value: Any) -> str:
        with contextlib.suppress(ValueError):  # a mode has it
            return CallNames(*self._called, value).name_of(value)
        return type(value).__name__

    def _box(self, value: Any) -> Box:
        kind = type(value)
        kinds = kinds_of(value, kind)
        if kinds[0] is not PART and user_bases(kind):
            self.roots[id(kind)] = kind  # for what its methods refer to
        # A variable does not hold its value: a context does.
        box = Box(value, kinds, is_held=kinds[0] is VARIABLES)
        self.boxes[id(value)] = box, value
        self._todo.append(box)
        return box

    def _root(self, value: Any) -> Any:
        if (
            type(value) is types.FunctionType
            and not (value.__closure__ or value.__dict__ or value.__kwdefaults__)
            and (
                (held := value.__defaults__) is None
                or INERT.issuperset(map(type, held))
            )
            and (known := known_code(value)).is_settled
        ):  # it is its code and nothing that changes, or holds a tensor
            if known.names.writes:
                self.facts.writes = True
            return value
        self.roots[id(value)] = value
        return Ref(value)

    def watched(self) -> "list[Watched]":
        """Return what a recompute may find again and write, before the forward."""
        each = ((part, v) for box, v in self.boxes.values() for part in box.held)
        return [Watched(part, value) for part, value in each if not part.kind.frozen]

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
    todo = deque(values)
    known: dict[int, int] = {}
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
            found.append(kept.kind)
            for held in kept.held:
                found.append(len(held.items))
                if type(held.items) is range:
                    found.append(held.items)
                else:
                    todo += held.items
                todo += held.keys
    return found
