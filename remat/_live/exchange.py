"""Has holders hold what they held at a call, for one run, and puts them back.

Depth by depth, from the owners down: a holder that differs is written in place. What is
gone is revived from the contents. After the run all that was written, and what the
forward wrote, gets back what it held just before. No other holder is written.

Invariant: no lock is held while the function runs. Where two runs write one holder, the
one that ends first hands what was there before it to the other.
Rejected: a lock. A recompute may wait for a thread whose backward recomputes, too.
"""

import contextlib
import itertools
import operator
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from remat._base.code import VIEWED
from remat._base.errors import RecomputeError
from remat._capture.container_kinds import container_kind
from remat._capture.holders import GONE, SCOPES, HolderKind, without_contents
from remat._capture.objects import check_class, is_view
from remat._live.contents import At, Contents, HolderIndex, KeyRef, Ref, Span
from remat._live.layout import Layout, groups_of


class Exchange:
    """What the holders of one layout are given for one run."""

    def __init__(
        self,
        layout: Layout,
        contents: Contents,
        effects: set[HolderIndex] | None,
        namespaces: Sequence[dict[str, Any]],
        tensors: Sequence[Any],
        special: dict[int, Any],
        made: dict[int, Any],
        *,
        on_other_tensors: bool,
    ) -> None:
        self._layout, self._contents, self._effects = layout, contents, effects
        self._namespaces = namespaces
        self._tensors, self._special, self._made = tensors, special, made
        # Whether tuples, and other values that never change, may have to hold others.
        self._may_differ_inside = bool(special) or on_other_tensors
        self._owners: list[Any] = []  # found by `revive_owners`, for all roots first
        self._views: list[Any] = []  # those that were made again
        self._alive: dict[int, Any] = {}
        self._written: list[Written] = []
        self._tokens: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Have all holders hold what they held."""
        layout = self._layout
        groups = [held for _, held in groups_of(layout.holders(self._owners))]
        spans = deque(self._contents.spans())
        # One depth is written before the next one is looked up in it.
        values = self._start_depth(spans, groups)
        for first, last in itertools.pairwise((*layout.depths, len(layout.below))):
            for _, places in layout.below[first:last]:
                groups.append([values[p] for p in places])
            values += self._start_depth(spans, groups)
        self._fill_views()

    def _fill_views(self) -> None:
        """Give the views that were made again the dicts of their modules."""
        for view in self._views:
            module = view
            while is_view(type(module)):
                module = getattr(module, VIEWED)
            object.__setattr__(view, "__dict__", vars(module))

    def _start_depth(
        self, spans: deque[Span], groups: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Write the next holders, those of the groups so far; return what they hold."""
        found: list[tuple[Span, Any, list[Any], list[Any]]] = []
        while spans and spans[0].group < len(groups):
            span = spans.popleft()
            holder = groups[span.group][span.number]
            keys, values = span.kind.held(holder)
            found.append((span, holder, keys, values))
            self._alive.update(zip(map(id, values), values, strict=True))
            self._alive.update(zip(map(id, keys), keys, strict=True))
        held: list[Any] = []
        for span, holder, now_keys, now in found:
            then, keys = self._then(span, now), self._keys(span)
            held += then
            if span.kind.frozen:
                continue
            is_same = _are_same(now, then) and _are_same(now_keys, keys)
            # What the forward wrote, the run may write: it is put back in any case.
            if is_same and self._effects is not None and span[1:3] not in self._effects:
                continue
            for written in written_to(span.kind, holder, now_keys, now):
                self._written.append(written)
                written.start()
            if not is_same:
                token = span.kind.write(holder, keys, then)
                if token is not None:  # of a context variable
                    self._tokens.append((holder, token))
        return held

    def container(self, key: int) -> Any:
        """Return a container that an owner leads to, by its identity; None if none."""
        if key not in self._contents.containers(self._layout):
            return None
        return self.value(key)

    def value(self, key: int) -> Any:
        """Return a value that holders hold, or held before, by its identity."""
        return self._made.get(key, self._alive.get(key))

    def end(self) -> None:
        """Give back what was there just before the run."""
        for variable, token in reversed(self._tokens):
            with contextlib.suppress(ValueError):  # in another context
                variable.reset(token)
        for written in reversed(self._written):
            written.end()

    # --- What was there ---

    def _then(self, span: Span, now: Sequence[Any]) -> list[Any]:
        then = self._contents.kept[span.start : span.end]
        for i, kept in enumerate(then):
            if type(kept) is At:
                then[i] = self._tensors[kept.number]
            elif type(kept) is Ref:
                here = now[i] if i < len(now) else None
                special = self._special.get(span.start + i)
                then[i] = self.found(kept, here) if special is None else special
        return then

    def _keys(self, span: Span) -> list[Any]:
        if not span.kind.keyed:
            return []
        last = span.first_key + span.end - span.start
        keys = self._contents.keys[span.first_key : last]
        for i, kept in enumerate(keys):
            if type(kept) is At:
                keys[i] = self._tensors[kept.number]
            elif type(kept) is Ref:
                keys[i] = self.found(kept, None)
            elif type(kept) is KeyRef:
                keys[i] = self._key(kept)
        return keys

    def _key(self, kept: KeyRef) -> Any:
        """Return a tuple or frozenset that is a key, made again if it is gone."""
        if kept.id in self._made:
            return self._made[kept.id]
        parts = kept.parts.copy()
        for i, part in enumerate(parts):
            if isinstance(part, Ref):
                is_key = type(part) is KeyRef
                parts[i] = self._key(part) if is_key else self.found(part, None)
        value, how = self._alive.get(kept.id), kept.how
        if not (kept.is_of(value) and _are_same([*how.values([value])], parts)):
            value = self._made[kept.id] = how.new(kept.kind(), parts, None)
        return value

    def found(self, kept: Ref, here: Any) -> Any:
        """Return a value that was not held: itself, or what was revived."""
        if kept.is_of(here) and not self._may_differ_inside:
            return here
        made = self._made.get(kept.id)
        if made is None and self._may_differ_inside:
            made = self._around_others(kept)
        if made is not None:
            return made
        value = self._alive.get(kept.id) if kept.ref is None else kept.ref()
        if value is None or not kept.is_of(value):
            value = self._made[kept.id] = self._new(kept.id, kept.kind(), kept.limit)
        return value

    def _around_others(self, kept: Ref) -> Any:
        """Return a tuple, or another value that never changes, around other tensors.

        None if this is none, or what it holds is the same.
        """
        kind, span = kept.kind(), self._span_of(kept.id)
        if span is None or kind is None or not span.kind.frozen:
            return None
        value = self._alive.get(kept.id) if kept.ref is None else kept.ref()
        then = self._then(span, ())
        if value is not None and _are_same(then, span.kind.held(value)[1]):
            return None
        made = self._made[kept.id] = span.kind.new(kind, then, kept.limit)
        return made

    # --- What is gone ---

    def revive_owners(self) -> None:
        """Find the owners; those that are gone are made again."""
        layout = self._layout
        self._owners = owners = [ref() for ref in layout.owners]
        if self._gone(layout.classes):
            raise RecomputeError(GONE.format(name="A class"))
        self._check_classes(layout.objects)
        self._check_classes(layout.slotted)
        for i in self._gone(layout.slotted):
            owners[i] = self._made[layout.births[i]]
            if is_view(type(owners[i])):
                self._views.append(owners[i])
        for i in self._gone(layout.functions):
            fn = self._function(i - layout.functions.start)
            owners[i] = self._made.setdefault(layout.births[i], fn)
        for i in self._gone(layout.objects):
            key = layout.births[i]
            if key not in self._made:
                self._made[key] = self._new(key, self._class_of(i), None)
            owners[i] = self._made[key]

    def _gone(self, section: slice) -> list[int]:
        """Return which owners of a section are gone."""
        indices = range(len(self._owners))[section]
        return [i for i in indices if self._owners[i] is None]

    def _check_classes(self, section: slice) -> None:
        """Check the classes of objects; make those again that are gone."""
        for i in range(len(self._owners))[section]:
            owner, key = self._owners[i], self._layout.births[i]
            if owner is not None:
                check_class(self._contents.classes[i](), type(owner))
                continue
            if key in self._made:
                continue
            kind = self._class_of(i)
            if kind is None:
                raise RecomputeError(GONE.format(name="An object"))
            if container_kind(kind) is None:
                if hasattr(kind, "__del__"):
                    name = f"A {kind.__qualname__}, which has `__del__`,"
                    raise RecomputeError(GONE.format(name=name))
                self._made[key] = without_contents(kind)

    def _class_of(self, i: int) -> Any:
        """Return the class of an owner, made again if it is one of remat's, or None."""
        kind, remade = self._contents.classes[i](), self._layout.remade
        return remade[i]() if kind is None and i in remade else kind

    def _function(self, i: int) -> types.FunctionType:
        """Return a function like one that is gone, with the variables that are left."""
        cells: dict[int, Any] = {}
        functions, layout = self._owners[self._layout.functions], self._layout
        for fn, keys in zip(functions, layout.cells, strict=True):
            if fn is not None:
                cells.update(zip(keys, fn.__closure__ or (), strict=True))
        for key in layout.cells[i]:
            if key not in cells:
                cells[key] = self._made.setdefault(key, types.CellType())
        closure = tuple(cells[key] for key in layout.cells[i]) or None
        code = self._contents.code_of(i)
        namespace = self._namespaces[i]
        return types.FunctionType(code, namespace, code.co_name, None, closure)

    def _span_of(self, key: int) -> Span | None:
        """Return where what a container holds is, by its identity."""
        found = self._contents.containers(self._layout).get(key)
        return None if found is None else found[1]

    def _new(self, key: int, kind: Any, limit: int | None) -> Any:
        """Return a container like one that is gone."""
        span = self._span_of(key)
        if span is not None and kind is not None:
            values = self._then(span, ()) if span.kind.frozen else ()
            return span.kind.new(kind, values, limit)
        if kind in (dict, set, OrderedDict):
            return kind()  # of a module, and always empty
        name = "An object" if kind is None else f"A value of {kind.__qualname__}"
        if kind is types.FunctionType:
            name = "A hook, or another function,"
        raise RecomputeError(GONE.format(name=name))


def _are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


# --- What was there just before ---


class Written:
    """A holder that is written for a run, and what it held just before."""

    __slots__ = ("holder", "key", "keys", "kind", "values")

    def __init__(
        self,
        kind: HolderKind,
        holder: Any,
        keys: list[Any],
        values: list[Any],
        key: Any,
    ) -> None:
        self.kind, self.holder, self.key = kind, holder, key
        self.keys, self.values = keys, values

    def start(self) -> None:
        """Note that a run writes this holder."""
        with _LOCK:
            _RUNNING.setdefault(self.key, []).append(self)
            # Another run may have ended since it was read.
            self.keys, self.values = self.kind.held(self.holder)

    def end(self) -> None:
        """Give back what was there, or hand it to a run that began later."""
        with _LOCK:
            runs = _RUNNING[self.key]
            i = runs.index(self)
            del runs[i]
            if i < len(runs):
                runs[i].keys, runs[i].values = self.keys, self.values
                return
            if not runs:
                del _RUNNING[self.key]
            keys, values = self.kind.held(self.holder)
            if not (_are_same(keys, self.keys) and _are_same(values, self.values)):
                self.kind.put_back(self.holder, self.keys, self.values)


# A value that is let go of may run the user's code, which may recompute.
_LOCK = threading.RLock()
# By what is written, the runs that wrote it, in order.
_RUNNING: dict[Any, list[Written]] = {}


def written_to(
    kind: HolderKind, holder: Any, keys: list[Any], values: list[Any]
) -> list[Written]:
    """Return what is to be put back: each global variable by itself."""
    if kind is not SCOPES:
        return [Written(kind, holder, keys, values, (id(holder), id(kind)))]
    scope, names = holder
    return [
        Written(kind, (scope, (name,)), [], [value], (id(scope), name))
        for name, value in zip(names, values, strict=True)
    ]
