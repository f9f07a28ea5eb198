"""A function's result: its tensors, what holds them, and others put in their places.

Under torch.func the forward computes tensors of the level below. What it returns stays
those very objects and containers: their tensors are taken out, and those of the level
are put in. So nobody's constructor runs, and an object that the user passed, and that
the function changed and returned, is that object.

Invariant: whatever holds a tensor of the run is walked or refused. Between the two
nothing holds one. What cannot be changed, such as a tuple, is made again.
Rejected: copies of objects. Weak references and tables by identity would know another
one. Pytrees: they know few classes, take no cycle, and say nothing of identity.
"""

import enum
import gc
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Container,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
)
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from remat._base.code import has_marks
from remat._base.pytree import REGISTERED, registration_of
from remat._base.types import INERT
from remat._reach.before import at
from remat._reach.holders import (
    PART,
    PARTS,
    HolderKind,
    container_kind,
    flatten,
    kinds_of,
)
from remat._reach.left import Left, filled, is_exchanged
from remat._reach.names import (
    NamedSearch,
    Path,
    RegisteredKind,
    held_with_paths,
    kinds_seen,
    written,
)
from remat._reach.objects import (
    by_class,
    can_be_made_anew,
    defines,
    is_left_alone,
    is_spent_by_use,
)
from remat._reach.parts import Box
from remat._reach.stream_search import is_stream
from remat._reach.watched import is_bare_buffer
from remat._torch.levels import is_of_torch_func


class Own(NamedTuple):
    """What the user had before the run.

    Attributes:
        originals: the user's own value for each replica, by the replica's identity.
        tensors: for each input, its slot, by the identity of the user's own tensor.
        known: the identities of what the function could reach.
    """

    originals: Mapping[int, Any]
    tensors: Mapping[int, int]
    known: Container[int]


_NOTHING = Own({}, {}, ())


class Hidden(NamedTuple):
    """A value in a result, in which remat cannot see."""

    kind: type
    where: str
    why: str

    def told(self, message: str, label: str) -> str:
        """Return a message that names the value, and what to do instead."""
        kind, where, remedy = self.kind.__qualname__, self.where, "Return a list"
        if self.kind.__module__ not in ("builtins", "itertools"):
            remedy = (
                f"Register the class: `remat.register({kind}, lambda value: "
                f"([value.tensor, ...], None), lambda rest, tensors: {kind}(*tensors))`"
            )
        why = self.why.format(remedy=remedy)
        return message.format(
            label=label, kind=kind, where=where, why=why, remedy=remedy
        )


class Result(NamedSearch):
    """A result, taken apart, with what the function left in holders.

    It is walked in the order in which a reader meets what it holds.

    Attributes:
        tensors: each once.
        places: where each is, with its index: one may be in several places.
        own: what the user had before.
    """

    def __init__(
        self, value: Any, own: Own = _NOTHING, left: Sequence[Left] = ()
    ) -> None:
        super().__init__()
        self._value, self.own, self._left = value, own, left
        self.places: dict[Path, int] = {}
        self._index: dict[int, int] = {}
        self._parts: dict[int, Box] = {}
        self._hidden: list[Hidden] = []
        # Where tensors are in what was left in holders, which is walked last.
        self._places: set[Path] = set()
        self._in_holders = False
        # To walk a tensor would cost as much as a small call.
        self._is_tensor = type(value) is Tensor and not (left or value.__dict__)
        if self._is_tensor:
            self.places[None] = 0
            self.tensors.append(value)
            return
        self._later: list[tuple[Any, Path]] = []  # functions and modules
        # What was set on tensors that the run computed, by their indices.
        self._attributes: dict[int, dict[str, Any]] = {}
        self.walk(value)
        self._in_holders = True
        for number, each in enumerate(left):
            for n, held in enumerate(each.values()):
                self.walk(held, ((_IN_HOLDERS, number, None), n, None))
        self._in_holders = False

    @property
    def is_left(self) -> bool:
        """Whether tensors of the run are in holders."""
        return bool(self._places)

    def places_like(self, slots: Mapping[Path, int]) -> Collection[Path]:
        """Return its places, but for others than those of a forward in holders."""
        left = self._places
        if not left:
            return self.places.keys()
        return {p for p in self.places if p in slots or p not in left}

    def hidden(self) -> Sequence[Hidden]:
        """Return the values in which a tensor may be hidden."""
        if not self._is_tensor:
            for value, path in self._later:
                if self._leads_to_others(_apart_from_module(value)):
                    self._hide(value, path, _CLOSED)
        return self._hidden

    def without_tensors(self) -> Callable[[Sequence[Any]], Any]:
        """Take the tensors out of what holds them.

        Returns:
            A function that puts others in, also in holders, and returns the result.
        """
        if self._is_tensor:
            return operator.itemgetter(0)
        live = {key: self._parts[key] for key in self._live()}

        def put_aside(value: Any) -> Any:
            index = self._index_in(value)
            if index is not None:
                return at(index)
            value = self._original(value)
            return live.get(id(value), value)

        parts, attributes = [*live.values()], self._attributes
        for part in parts:
            part.put_aside(put_aside)
            part.empty()
        left = [(held, [*map(put_aside, held.values())]) for held in self._left]
        for held, kept in left:
            held.take_out([n for n, k in enumerate(kept) if is_exchanged(k)])
        return partial(filled, put_aside(self._value), parts, left, attributes)

    # --- The walk ---

    @override
    def visit(self, value: Any, kind: type, path: Path) -> Iterable[tuple[Any, Path]]:
        if self._in_holders and self._is_others(value):
            return ()
        if issubclass(kind, Tensor):
            is_marked = self._note(value, path) and value.__dict__ and has_marks(kind)
            return self._attributes_of(value, path) if is_marked else ()
        value = self._original(value)
        if id(value) in self.seen:
            return ()
        self.seen[id(value)] = value
        kind = type(value)
        kinds = self._kinds_at(value, kind, path)
        if not kinds:
            return ()
        box = self._parts[id(value)] = Box(value, kinds, is_held=True)
        return flatten(
            held_with_paths(part.kind, kind, part.keys, part.items, path)
            for part in box.held
        )

    def _is_others(self, value: Any) -> bool:
        """Say whether a value in a holder is no part of the result, nor leads there."""
        if not issubclass(type(value), Tensor):
            return id(value) in self.own.known  # it is a holder itself
        if id(value) in self.own.tensors:
            return True
        return not (value.requires_grad or is_of_torch_func(value))

    def _attributes_of(self, tensor: Tensor, path: Path) -> list[tuple[Any, Path]]:
        """Return what was set on a tensor: it will be on the tensor of its level."""
        index = self._index_in(tensor)
        if index is None:
            return []
        self._attributes[index] = vars(tensor)
        return [(vars(tensor), (path, ".__dict__"))]

    def _note(self, tensor: Tensor, path: Path) -> bool:
        """Note a tensor; say whether it was not met before."""
        index = self._index.setdefault(id(tensor), len(self.tensors))
        is_new = index == len(self.tensors)
        if is_new:
            self.tensors.append(tensor)
        while path in self.places:  # two keys of a dict may be alike
            path = path, "'"
        self.places[path] = index
        if self._in_holders:
            self._places.add(path)
        return is_new

    def _kinds_at(self, value: Any, kind: type, path: Path) -> Sequence[HolderKind]:
        """Return how what a value holds is read; nothing if it stays as it is."""
        treated = _treatment(kind)
        if treated == "instance":
            return self._kinds_of_instance(value, kind, path)
        if treated == "later":  # once the rest is known; a leak is found by its graph
            if not self._in_holders and id(value) not in self.own.known:
                self._later.append((value, path))
        elif treated == "lazy":
            self._hide(value, path, _LAZY)
        elif treated == "iterated":
            gives = self._leads_to_tensors(value, into=object)
            self._hide(value, path, _GIVES if gives else "")
        elif treated == "weak":
            # One to what the result holds is made again, as in a weak dictionary.
            there: Any = weakref.ref.__call__(value)
            return [PART] if self._has_met(there) else ()
        elif treated != "as it is":
            if treated == "set" and self._has_tensors_in_an_order(value):
                self._hide(value, path, _SET)
            return kinds_seen(value, kind)
        return ()

    def _kinds_of_instance(
        self, value: Any, kind: type, path: Path
    ) -> Sequence[HolderKind]:
        if kind not in REGISTERED and is_left_alone(kind):
            holds = self._leads_to_tensors(value, into=_PLAIN)
            self._hide(value, path, _HOLDS if holds else "")
            return ()
        how = registration_of(kind)
        is_plain = can_be_made_anew(kind)
        if how is not None and (kind in REGISTERED or not is_plain):
            return [RegisteredKind(how)]
        kinds = kinds_of(value, kind)
        entries = [v for how in kinds for v in how.items(value)]
        if not is_plain and self._leads_to_tensors(value, apart=entries, into=_PLAIN):
            self._hide(value, path, _HOLDS)
        elif not (is_plain or entries):
            self._hide(value, path)
        return kinds

    def _has_met(self, value: Any) -> bool:
        return issubclass(type(value), Tensor) and id(value) in self._index

    def _has_tensors_in_an_order(self, values: Any) -> bool:
        search = NamedSearch()
        for one in values:
            search.walk(one)
        return sum(not self._has_met(t) for t in search.tensors) > 1

    def _index_in(self, value: Any) -> int | None:
        """Return the index of a tensor of the run; None of what is the user's."""
        return None if id(value) in self.own.tensors else self._index.get(id(value))

    def _original(self, value: Any) -> Any:
        return self.own.originals.get(id(value), value)

    def _live(self) -> set[int]:
        """Return the identities of what leads to what is exchanged."""
        above: dict[int, list[int]] = {}
        found: set[int] = set()
        for key, part in self._parts.items():
            for held in part.parts():
                if self._index_in(held) is not None or self._original(held) is not held:
                    found.add(key)
                above.setdefault(id(held), []).append(key)
        todo = [*found]
        for key in todo:  # which grows
            # Only what is made again is another value to what holds it.
            if self._parts[key].is_frozen:
                new = {*above.get(key, ())} - found
                found |= new
                todo += new
        return found

    # --- What it cannot see into ---

    def _hide(self, value: Any, path: Path, why: str = "") -> None:
        if self._in_holders or id(value) in self.own.known:
            why = ""
        self._hidden.append(Hidden(type(value), written(path)[1], why))

    def _leads_to_tensors(
        self, value: Any, *, apart: Iterable[Any] = (), into: type | tuple[type, ...]
    ) -> bool:
        """Say whether an object leads to a tensor, or to a replica, in C or in Python.

        Args:
            value: the object.
            apart: what is no such tensor.
            into: the classes of what is looked into besides.
        """
        seen, pending = {id(v): v for v in (value, *apart)}, [value]
        while pending:
            value = pending.pop()
            if type(value) is types.FunctionType:
                seen[id(value.__globals__)] = value.__globals__
            for part in gc.get_referents(value):
                kind = type(part)
                if kind in INERT or issubclass(kind, _TYPES) or id(part) in seen:
                    continue
                if issubclass(kind, Tensor) or len(seen) > _MANY:
                    return True
                is_original = self._original(part) is part
                if not (is_original or issubclass(kind, (list, dict, set, deque))):
                    return True
                seen[id(part)] = part  # which keeps its identity
                if issubclass(kind, into):
                    pending.append(part)
        return False

    def _leads_to_others(self, value: Any) -> bool:
        """Say whether a function or module leads to tensors besides the user's own.

        What the result holds anyway, and stays that very value, is not looked at again.
        """
        search, own = NamedSearch(), self.own
        parts = self._parts.items()
        search.seen.update((k, box.ref()) for k, box in parts if not box.is_frozen)
        search.walk(value)
        if not own.originals.keys().isdisjoint(search.seen):
            return True  # to a replica, in place of the user's own object
        return any(id(t) not in own.tensors for t in search.tensors)


# --- How a value is treated ---


@by_class
def _treatment(kind: type) -> str:
    """Return what is done at the instances of a class."""
    if kind in (types.FunctionType, types.BuiltinFunctionType):
        return "later"
    if issubclass(kind, nn.Module) or defines(kind, "__remat_options__"):
        return "later"
    if issubclass(kind, (Generator, Coroutine, AsyncGenerator)):
        return "lazy"  # it computes when it is read
    if issubclass(kind, (set, frozenset)):
        return "set"
    if issubclass(kind, weakref.ref) and not issubclass(kind, weakref.WeakMethod):
        return "weak"
    if issubclass(kind, _AS_THEY_ARE) or is_stream(kind) or is_bare_buffer(kind):
        return "as it is"
    # Iterators and views that are not walked.
    is_view = issubclass(kind, MappingView) and is_left_alone(kind)
    is_spent = is_spent_by_use(kind) or not can_be_made_anew(kind)
    if is_view or (issubclass(kind, Iterator) and is_spent):
        return "iterated"
    is_walked = container_kind(kind) is not None or issubclass(kind, PARTS)
    return "walked" if is_walked and kind not in REGISTERED else "instance"


def _apart_from_module(value: Any) -> Any:
    """Return what to look at: of a function of a Python module, its defaults alone."""
    if type(value) is not types.FunctionType or value.__closure__ or value.__dict__:
        return value
    module = sys.modules.get(value.__module__)
    if module is None or module.__dict__ is not value.__globals__:
        return value
    return value.__defaults__, value.__kwdefaults__


_AS_THEY_ARE = (types.ModuleType, type, enum.Enum, weakref.ref, *weakref.ProxyTypes)
_IN_HOLDERS = (None, " left in a holder")
_MANY = 10_000  # objects: what leads to more is taken to lead to a tensor
_TYPES = (type, types.ModuleType)
_PLAIN = (dict, list, tuple)
_CLOSED = (
    "leads to a tensor that the function computed. Return that tensor, and make the "
    "rest outside"
)
_LAZY = "computes when it is read. Return a list"
_GIVES = "holds a tensor, or computes one when it is read. Return a list"
_SET = "has several tensors in an order that is by chance. Return a list"
_HOLDS = "holds a tensor where remat cannot see it. {remedy}"
