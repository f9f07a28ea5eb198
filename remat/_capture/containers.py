"""Nodes of containers, iterators, buffers of numbers, and registered classes.

Invariant: that of `nodes`, with one exception. A container that is too large to be
copied in each call is held by its node, which compares it.
Rejected: a node for each item. A list of numbers is copied in one piece.
"""

import copy
import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.errors import CaptureError, RecomputeError
from remat._base.pytree import Registered
from remat._base.tensors import versions_of
from remat._base.types import INERT
from remat._capture.kinds import COPIED_ITERATORS, SEQUENCES
from remat._capture.nodes import (
    Composite,
    MadeNode,
    Node,
    Part,
    Rebuilding,
    TensorNode,
    filled,
    named,
)
from remat._capture.objects import attributes, set_attributes


class ContainerNode(Composite):
    """A container, or an instance of a subclass of one.

    Attributes:
        items: what it holds, with None for tensors and children. Children are keyed
            by position, and attributes among them by name.
        tensors: the positions of tensors, and their indices among those found.
        entries: the attributes of an instance of a subclass.
    """

    __slots__ = ("_base", "_kind", "entries", "items", "tensors")

    def __init__(self, value: Any, bases: Sequence[type], items: list[Any]) -> None:
        super().__init__()
        self._kind: Any = type(value)
        self._base: Any = _base_of(self._kind, bases)
        self.items = items
        self.tensors: list[tuple[int, int]] = []
        self.entries = {} if self._kind is self._base else attributes(value)

    @override
    def parts(self) -> Iterator[Part]:
        yield from named(self.entries)

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self.entries[key] = None

    def hold_item(self, i: int, node: Node) -> None:
        """Hold a node in place of an item."""
        self.items[i] = None
        if type(node) is TensorNode:
            self.tensors.append((i, node.index))
        else:
            self.children[i] = node

    @override
    def settle(self) -> None:
        super().settle()
        self.live = self.live or bool(self.tensors)

    def _filled(self, run: Rebuilding) -> list[Any]:
        """Return the items around a run's tensors."""
        items, tensors = self.items.copy(), run.tensors
        for i, index in self.tensors:
            items[i] = tensors[index]
        for key, child in self.children.items():
            if isinstance(key, int):
                items[key] = child.build(run)
        return items

    def _give_entries(self, new: Any, run: Rebuilding) -> None:
        entries = self.entries
        if not entries:
            return
        entries = filled(entries, self.children, run)
        if FACTORY in entries:
            new.default_factory = entries.pop(FACTORY)
        if entries:
            set_attributes(new, entries)


class SequenceNode(ContainerNode):
    """A list, tuple, set, frozenset or deque."""

    __slots__ = ("_rest",)

    def __init__(self, value: Any) -> None:
        super().__init__(value, SEQUENCES, [*value])
        self._rest = (value.maxlen,) if self._base is deque else ()

    @override
    def new(self, run: Rebuilding) -> Any:
        base, kind = self._base, self._kind
        if base in (tuple, frozenset):
            is_struct = hasattr(kind, "n_sequence_fields")
            make: Any = kind if is_struct else functools.partial(base.__new__, kind)
            new = run.built[self.identity] = make(self._filled(run))
        else:
            new = base.__new__(kind)
            run.built[self.identity] = new  # it may hold itself
            base.__init__(new, self._filled(run), *self._rest)
        self._give_entries(new, run)
        return new


class DictNode(ContainerNode):
    """A dict.

    Attributes:
        keys: its keys, which are children by `~position`.
    """

    __slots__ = ("keys",)

    def __init__(self, value: Any) -> None:
        super().__init__(value, (OrderedDict, dict), [*value.values()])
        self.keys = [*value]
        factory = getattr(value, FACTORY, None)
        if factory is not None:
            self.entries[FACTORY] = factory

    def hold_key(self, i: int, node: Node) -> None:
        """Hold a node in place of a key."""
        self.keys[i] = None
        self.children[str(i)] = node

    @override
    def new(self, run: Rebuilding) -> Any:
        new = self._base.__new__(self._kind)
        run.built[self.identity] = new  # it may hold itself
        keys, values = self.keys, self._filled(run)
        if None in keys:
            built = ((k, self.children.get(str(i))) for i, k in enumerate(keys))
            keys = [key if child is None else child.build(run) for key, child in built]
        if self._base is dict:
            dict.update(new, zip(keys, values, strict=True))
        else:
            for key, value in zip(keys, values, strict=True):
                OrderedDict.__setitem__(new, key, value)
        self._give_entries(new, run)
        return new


FACTORY = "default_factory"


def _base_of(kind: type, bases: Sequence[type]) -> type:
    return kind if kind in bases else next(b for b in bases if issubclass(kind, b))


class LargeNode(Composite):
    """A container of many numbers, words and tensors: not copied, only compared.

    It holds the container, since nothing else would find it again. It also holds the
    items that there were, so that their identities are not used again.
    """

    __slots__ = ("_entries", "_name", "_value", "_versions")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__()
        self._value, self._name, self.live = value, name, False
        self._entries = _entries_of(value)
        self._versions = _versions_in(self._entries)

    @override
    def new(self, run: Rebuilding) -> Any:
        """Return the container, without what was added to its end since.

        Raises:
            RecomputeError: it changed in another way.
        """
        value, then, now = self._value, self._entries, _entries_of(self._value)
        added = len(now[0]) - len(then[0])
        pairs = zip(now, then, strict=True)
        is_same = added >= 0 and all(all(map(operator.is_, a, b)) for a, b in pairs)
        can_be_cut = not added or type(value) in _GROWING
        if not (is_same and can_be_cut and _versions_in(then) == self._versions):
            count = f"{len(value):,}"
            raise RecomputeError(_LARGE.format(name=self._name, count=count))
        if added:
            value = _cut(value, len(then[0]))
        run.built[self.identity] = value
        return value


def _entries_of(value: Any) -> tuple[tuple[Any, ...], ...]:
    keys = tuple(value)
    return (keys, tuple(value.values())) if isinstance(value, dict) else (keys,)


def _versions_in(entries: Sequence[tuple[Any, ...]]) -> list[int | None]:
    return versions_of([v for v in entries[-1] if isinstance(v, Tensor)])


def _cut(value: Any, count: int) -> Any:
    """Return a copy of the first entries of a container."""
    new = copy.copy(value)
    take = new.popitem if isinstance(new, dict) else new.pop
    for _ in range(len(new) - count):
        take()
    return new


_GROWING = (list, deque, dict, OrderedDict, defaultdict)


_LARGE = (
    "remat: `{name}` changed since the call. It has {count} entries, too many to be "
    "copied in each call, and a recompute would read it as it is now. Pass what is "
    "needed of it as an argument, or change it after the backward; if the function "
    "changes it, outside of the function."
)


class CopyNode(Composite):
    """A value that only `copy.copy` copies: an iterator, or a buffer of numbers."""

    __slots__ = ("_copy",)

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._copy, self.live = copy.copy(value), False

    @override
    def new(self, run: Rebuilding) -> Any:
        new = run.built[self.identity] = copy.copy(self._copy)
        return new


class IteratorNode(Composite):
    """An iterator that cannot be copied: used as it is, unless it was read since.

    It holds the iterator: of most of them there are no weak references.
    """

    __slots__ = ("_then", "_value", "_what")

    def __init__(self, value: Any, what: str) -> None:
        super().__init__()
        self._value, self._what, self.live = value, what, False
        self._then = _progress_of(value)

    @override
    def new(self, run: Rebuilding) -> Any:
        """Return the iterator, or what raises an error as soon as it is read."""
        is_same = _progress_of(self._value) == self._then
        new = self._value if is_same else _spent(self._what)
        run.built[self.identity] = new
        return new


def _progress_of(value: Any) -> Any:
    """Return what tells how far an iterator was read, where that can be told."""
    kind = type(value)
    if kind is types.GeneratorType:
        frame = value.gi_frame
        # A generator that runs is around this call, which cannot read it.
        if frame is None or value.gi_running:
            return frame is None
        return frame.f_lasti, [*map(_progress_of, frame.f_locals.values())]
    if kind in COPIED_ITERATORS:
        return operator.length_hint(value)
    if kind in _ADAPTERS:
        return [*map(_progress_of, value.__reduce__()[1])]
    return value if kind in INERT else id(value)


_ADAPTERS = (zip, map, filter, enumerate)


def _spent(what: str) -> Iterator[None]:
    raise RecomputeError(_SPENT.format(what=what))
    yield  # a generator, then


_SPENT = (
    "remat: a recompute reads {what}, which the forward has read already. Pass "
    "what was read as an argument, or make the iterator inside the function."
)


# --- Values that only their own class can take apart ---


class RegisteredNode(MadeNode):
    """An instance of a class that is registered as a pytree.

    What it is rebuilt from besides its children is a part like them: it may change, and
    may hold tensors.
    """

    __slots__ = ("_how",)

    def __init__(self, value: Any, how: Registered) -> None:
        self._how = how
        items, context = taken_apart(value, how)
        texts = [*(f"<child {i}>" for i in range(len(items))), "<rest>"]
        make = functools.partial(_put_together, how)
        super().__init__(make, [*items, context], texts)

    @property
    def items(self) -> Sequence[Any]:
        """Its children, without those that are held as nodes."""
        return self._parts[:-1]

    def now(self, value: Any) -> list[Any]:
        """Return the children that an instance has now."""
        return taken_apart(value, self._how)[0]


def _put_together(how: Registered, *parts: Any) -> Any:
    return how.unflatten(parts[-1], [*parts[:-1]])


def taken_apart(value: Any, how: Registered) -> tuple[list[Any], Any]:
    """Return the children of an instance, and what else it is rebuilt from.

    Raises:
        CaptureError: its class is registered with a function that returns no such pair.
    """
    found: Any = how.flatten(value)
    try:
        children, context = found[:2]
        return [*children], context
    except (KeyError, TypeError, ValueError) as error:
        name, kind = type(value).__qualname__, type(found).__name__
        raise CaptureError(_NO_PAIR.format(name=name, kind=kind)) from error


_NO_PAIR = (
    "remat: the function that {name} is registered with returned a {kind}. It must "
    "return a pair: a list of what holds tensors, and what else is needed to rebuild."
)
