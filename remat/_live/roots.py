"""One root of a call: what it reached at the call, and what the forward changed of it.

The layout of a root is remembered while the root lives. A call reads what the holders
hold now. If that is what they held at the last call, it shares the contents of that.

Invariant: as in `contents`, it leads to no tensor and to nothing that can be held
weakly. Only until the end of the forward it holds the holders themselves: the forward
may put others in their places.
Rejected: to compare along the paths again. A path may lead elsewhere by then.
"""

import ast
import contextlib
import copy
import itertools
import operator
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._base.interpreter import repeated_by
from remat._base.tensors import versions_of
from remat._base.types import INERT
from remat._capture.kinds import COPIED_ITERATORS, is_buffer
from remat._capture.objects import by_class
from remat._capture.stream_search import StreamSearch
from remat._live.containers import container_kind
from remat._live.contents import Contents, Holder
from remat._live.exchange import Exchange
from remat._live.holders import MISSING, MovedError
from remat._live.layout import Layout, Taken, lay_out, take


class Root:
    """What one root reached at a call.

    Attributes:
        layout: of the root.
        contents: what the holders held.
        entries: the numbers in the call of its tensors, or of those that are no
            parameters.
        first: the number of its first parameter; None if `entries` are of all tensors.
        buffers: the buffers of numbers that it reaches.
        large: the large containers, by position.
    """

    __slots__ = (
        *("_effects", "_held", "_iterators", "_namespaces", "_taken", "buffers"),
        *("contents", "entries", "first", "large", "layout"),
    )

    def __init__(self, layout: Layout, contents: Contents, taken: Taken) -> None:
        self.layout, self.contents = layout, contents
        self._taken: Taken | None = taken
        self._effects: set[Holder] | None = None
        self.entries: Sequence[int] = ()
        self.first: int | None = None
        owners = taken.owners
        # Held for functions that have to be made again.
        self._namespaces = [fn.__globals__ for fn in owners[layout.functions]]
        self._iterators: dict[int, Iterated] = {}
        self.buffers: list[Any] = []
        self.large: dict[int, Large] = {}
        for p, name in layout.special.items():
            value = taken.values[p]
            if is_buffer(type(value)):
                self.buffers.append(value)
            elif container_kind(type(value)) is not None:
                self.large[p] = Large(value, name)
            else:
                self._iterators[p] = Iterated(value, name)
        # As long as the call, as its caller would have held it.
        self._held = owners[layout.scripted]
        if layout.odd or contents.opaque:
            self._held += map(owners.__getitem__, layout.odd)
            self._held += map(taken.values.__getitem__, contents.opaque)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the root reaches, each once, before the forward."""
        assert self._taken is not None
        return self.contents.tensors_in(self._taken)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its tensors in the call."""
        if self.first is None:
            return [*self.entries]
        first, count = self.first, len(self.contents.refs)
        numbers = [*range(first, first + count)]
        for i, number in zip(self.contents.others, self.entries, strict=True):
            numbers.insert(i, number)
        return numbers

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is the same in each call of the same code, before the forward."""
        modes = [held.get("training") for held in self.layout.modules()]
        return (*self.numbers, *modes, *self.layout.signature)

    def forward_done(self) -> None:
        """Note what the forward changed."""
        taken, self._taken = self._taken, None
        if taken is not None:
            # Unless other threads change it meanwhile: then the effects are not known.
            with contextlib.suppress(MovedError, RuntimeError):
                self._effects = self.contents.changed_in(taken.again())

    # --- For a recompute ---

    def as_it_was(self, tensors: Sequence[Any]) -> Taken | None:
        """Return what is held now, if a run needs no exchange; else None.

        Args:
            tensors: that the run is on: all of the call.
        """
        if self._effects is None or self._effects or self._iterators:
            return None
        try:
            taken = take(self.layout)
        except MovedError:
            return None
        if not self.contents.are_in(taken):
            return None
        ours = map(tensors.__getitem__, self.numbers)
        is_same = all(map(operator.is_, self.contents.tensors_in(taken), ours))
        return taken if is_same else None

    def exchange(
        self, tensors: Sequence[Any], made: dict[int, Any], *, exchanges: bool
    ) -> Exchange:
        """Return what has all that the root reaches hold what it held.

        Args:
            tensors: see above.
            made: what was revived so far.
            exchanges: whether some tensors are others than at the call.
        """
        return Exchange(
            self.layout,
            self.contents,
            self._effects,
            self._namespaces,
            [*map(tensors.__getitem__, self.numbers)],
            {place: it.again() for place, it in self._iterators.items()}
            | {place: large.value for place, large in self.large.items()},
            made,
            exchanges=exchanges,
        )


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
    layout, taken = lay_out(value)
    layout.last = last = Contents(taken)
    if not layout.is_lazy:
        key = id(value)
        forget = weakref.ref(value, lambda _: _LAYOUTS.pop(key, None))
        _LAYOUTS[key] = forget, layout
    return Root(layout, last, taken)


def _root_with(layout: Layout) -> Root | None:
    """Return what a root reached, by its layout; None if that fits no more.

    Raises:
        MovedError: it does not fit.
    """
    taken, last = take(layout), layout.last  # which other threads may replace
    layout.hooks_known = RemovableHandle.next_id
    if not last.are_in(taken):
        if not last.has_form_of(taken):
            return None
        layout.last = last = Contents(taken)
    return Root(layout, last, taken)


_NO_LAYOUT: Any = None, None


# --- Iterators and large containers, which are not put back like other values ---

# To copy them in each call would cost what they hold. A recompute that would read one
# in another state gets an error.


class Iterated:
    """An iterator, as far as it was read at a call."""

    __slots__ = ("_copy", "_name", "_spent", "_stays")

    def __init__(self, value: Any, name: str) -> None:
        self._name = f"the {type(value).__name__} `{name}`"
        self._stays = _gives_streams(value)
        self._copy = value if self._stays else _copy_of(value)
        self._spent = _Spent(value, self._name)

    def again(self) -> Any:
        """Return an iterator that was read as far, or one that must not be read."""
        if self._stays:
            return self._copy
        if self._copy is MISSING:
            return self._spent
        return _copy_of(self._copy)


def _gives_streams(value: Any) -> bool:
    """Say whether an iterator gives streams: the same one again, most often.

    That is put back, so the iterator may stay as it is.
    """
    search = StreamSearch()
    search.walk(value)
    return bool(search.streams) and type(value) is not itertools.cycle


def _copy_of(value: Any) -> Any:
    """Return an iterator that gives what this one gives; MISSING if that cannot be."""
    kind = type(value)
    if kind in COPIED_ITERATORS:
        return copy.copy(value)
    if kind is itertools.count:
        # Python 3.14 cannot copy it.
        try:
            start = ast.literal_eval(repr(value).removeprefix("count"))
        except (SyntaxError, ValueError):
            return MISSING
        return itertools.count(*start if isinstance(start, tuple) else (start,))
    if kind is itertools.repeat:
        left = operator.length_hint(value, -1)
        if left < 0:
            return value
        item = repeated_by(value)
        if type(item) in INERT:
            return itertools.repeat(item, left)
    return MISSING


class _Spent:
    """In place of an iterator: an error where that is read, and else like it.

    A cursor of a database, or a reader of a file, has other methods, too. Such a one is
    held. Any other may hold a graph.
    """

    __slots__ = ("_kind", "_name", "_value")

    def __init__(self, value: Any, name: str) -> None:
        self._kind, self._name = type(value), name
        self._value = value if _has_methods(self._kind) else None

    @property
    @override
    def __class__(self) -> Any:  # pyrefly: ignore[bad-override]
        return self._kind

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise RecomputeError(_SPENT.format(name=self._name))

    def send(self, _: Any) -> Any:
        return next(self)

    def throw(self, *_: Any) -> Any:
        return next(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


@by_class
def _has_methods(kind: type) -> bool:
    """Say whether a class has attributes that iterators and generators do not have."""
    names = {name for cls in kind.__mro__ for name in cls.__dict__}
    return any(not name.startswith("_") for name in names - _OF_GENERATORS)


_OF_GENERATORS = {*dir(types.GeneratorType)}


class Large:
    """A container of many numbers, words and tensors: not copied, only compared."""

    __slots__ = ("_name", "_versions", "keys", "kind", "value", "values")

    def __init__(self, value: Any, name: str) -> None:
        kind = container_kind(type(value))
        assert kind is not None
        self.value, self.kind, self._name = value, kind, name
        self.keys, self.values = tuple(kind.keys([value])), tuple(kind.values([value]))
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int | None]:
        return versions_of([v for v in self.values if isinstance(v, Tensor)])

    def has_grown(self) -> bool:
        """Say whether something was added to its end since.

        Raises:
            RecomputeError: it changed in another way.
        """
        keys, values = self.kind.keys([self.value]), [*self.kind.values([self.value])]
        added = len(values) - len(self.values)
        is_same = added >= 0 and all(map(operator.is_, values, self.values))
        is_same = is_same and all(map(operator.is_, keys, self.keys))
        is_set = isinstance(self.value, (set, frozenset))
        if not is_same or (added and is_set) or self._versions_now() != self._versions:
            count = f"{len(values):,}"
            raise RecomputeError(_LARGE.format(name=self._name, count=count))
        return added > 0


_SPENT = (
    "remat: a recompute reads {name}, which the forward may have read already. Pass "
    "what was read as an argument, or make the iterator inside the function."
)
_LARGE = (
    "remat: `{name}` changed since the call. It has {count} entries, too many to be "
    "copied in each call, and a recompute would read it as it is now. Pass what is "
    "needed of it as an argument, or change it after the backward; if the function "
    "changes it, outside of the function."
)
