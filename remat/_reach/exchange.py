"""Has holders hold what they held at a call, for one run, and puts them back.

First all that is there by now is noted. Then, from the owners down, a holder that
differs is written in place. What is gone is made again from what was kept, after what
it held; so is a value that never changes, if it holds something else by now. After the
run all that was written, and what the forward wrote, gets back what it held just
before. No other holder is written.

Invariant: no lock is held while the function runs. Where two runs write one holder, the
one that ends first hands what was there before it to the other.
Rejected: a lock. A recompute may wait for a thread whose backward recomputes, too.
"""

import contextlib
import operator
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from remat._base.code import VIEWED, class_without_us
from remat._base.errors import RecomputeError
from remat._reach.before import At, Before, HolderIndex, Place, Ref, Span
from remat._reach.holders import (
    GONE,
    MISSING,
    SCOPES,
    SLOTS,
    HolderKind,
    container_kind,
    without_contents,
)
from remat._reach.layout import Layout
from remat._reach.objects import dict_of, is_view
from remat._reach.parts import make


# The class of an object.
CLASS_OF = HolderKind(
    lambda value: (type(value),),
    lambda value, _, kinds: object.__setattr__(value, "__class__", kinds[0]),
    fixed=1,
)


class Exchange:
    """What the holders of one layout are given for one run."""

    def __init__(
        self,
        layout: Layout,
        before: Before,
        effects: set[HolderIndex] | None,
        namespaces: Sequence[dict[str, Any]],
        tensors: Sequence[Any],
        special: dict[int, Any],
        made: dict[int, Any],
        alive: dict[int, Any],
    ) -> None:
        self._layout, self._before, self._effects = layout, before, effects
        self._namespaces = namespaces
        self._tensors, self._special = tensors, special
        # By identity: what is made again, and what holders hold by now, of all roots.
        self._made, self._alive = made, alive
        self._owners: list[Any] = []  # found by `revive_owners`, for all roots first
        self._views: list[Any] = []  # those that were made again
        self._others: list[tuple[Any, Any]] = []  # of another class, and of which then
        self._frozen: set[int] = set()  # the identities of values that never change
        self._now: list[tuple[Span, Place | None, Any, list[Any], list[Any]]] = []
        self._holders: dict[Any, tuple[HolderKind, Any]] = {}  # by `HolderIndex`
        # By identity, what each value is in this run, and which were looked at.
        self._found: dict[int, Any] = {}
        self._entered: set[int] = set()
        self._written: list[Written] = []
        self._tokens: list[tuple[Any, Any]] = []

    def look(self) -> None:
        """Note what is there by now, for all roots first: it may be somewhere else."""
        groups = [held for _, held in self._layout.holders(self._owners)]
        alive = self._alive
        alive.update((id(v), v) for v in self._layout.variables)
        for span, place in self._before.holders(self._layout):
            if place is None:
                holder = groups[span.group][span.number]
            else:
                holder = self._there(self._before.at(place))
                if span.kind.frozen:
                    self._frozen.add(self._before.at(place).id)
            if holder is None:
                self._now.append((span, place, None, [], []))
                continue
            keys, now = span.kind.held(holder)
            self._now.append((span, place, holder, keys, now))
            alive.update(zip(map(id, now), now, strict=True))
            alive.update(zip(map(id, keys), keys, strict=True))

    def start(self) -> None:
        """Have all holders hold what they held."""
        self._give_classes()
        self._keep_frozen()
        for span, place, holder, now_keys, now in self._now:
            if span.kind.frozen:
                self._holders[span[1:3]] = span.kind, holder
                continue
            if place is not None and (holder is None or self._frozen):
                found = self.found(self._before.at(place))
                if found is not holder:
                    holder, (now_keys, now) = found, span.kind.held(found)
            self._holders[span[1:3]] = span.kind, holder
            keys, then = self._then(span, self.found, self._special)
            is_same = are_same(now, then) and are_same(now_keys, keys)
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
        self._now.clear()
        self._fill_views()

    def _give_classes(self) -> None:
        """Have all objects be of the classes that they had."""
        others, known = self._others, {id(owner) for owner, _ in self._others}
        if self._effects is None:  # the run may give any object another one
            objects, slotted = self._layout.objects, self._layout.slotted
            each = (*self._owners[objects], *self._owners[slotted])
            others = others + [(o, type(o)) for o in each if id(o) not in known]
        for owner, kind in others:
            (written,) = written_to(CLASS_OF, owner, [], [type(owner)])
            self._written.append(written)
            written.start()
            if kind is not type(owner):
                CLASS_OF.write(owner, [], [kind])

    def _keep_frozen(self) -> None:
        """Note which values that never change hold what they held, from within."""

        def find(kept: Ref) -> Any:
            if kept.id in self._frozen or kept.id in self._made:
                return self._found.get(kept.id)
            return self._there(kept)

        for span, place, holder, _, now in reversed(self._now):
            if span.kind.frozen and place is not None and holder is not None:
                key = self._before.at(place).id
                if key not in self._made and are_same(
                    self._then(span, find, {})[1], now
                ):
                    self._found[key] = holder

    def _fill_views(self) -> None:
        """Give the views that were made again the dicts of their modules."""
        for view in self._views:
            module = view
            while is_view(type(module)):
                module = getattr(module, VIEWED)
            object.__setattr__(view, "__dict__", vars(module))

    def container(self, key: int) -> Any:
        """Return a container that an owner leads to, by its identity; None if none."""
        if key not in self._before.places(self._layout):
            return None
        return self._found.get(key)

    def holders(self) -> list[tuple[HolderKind, Any]]:
        """Return the holders that are there, and how each is read."""
        each = self._holders.values()
        return [(kind, holder) for kind, holder in each if holder is not None]

    def holder(self, index: HolderIndex) -> Any:
        """Return a holder, as it is in this run."""
        return self._holders[index][1]

    def set_aside(self, made: Collection[Any]) -> "list[Written]":
        """Return what was written of values that the run has made, which stays."""
        own = {id(part) for value in made for part in (value, dict_of(value))}
        kept = [written for written in self._written if id(written.holder) in own]
        self._written = [one for one in self._written if id(one.holder) not in own]
        return kept

    def end(self) -> None:
        """Give back what was there just before the run."""
        for variable, token in reversed(self._tokens):
            with contextlib.suppress(ValueError):  # in another context
                variable.reset(token)
        for written in reversed(self._written):
            written.end()

    # --- What was there ---

    def _then(
        self, span: Span, find: Callable[[Ref], Any], special: Mapping[int, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the keys and the values that a holder held, as they are in the run."""
        tensors = self._tensors
        keys, then = span.of(self._before.keys, self._before.kept)
        for held, first in ((keys, None), (then, span.start)):
            for i, kept in enumerate(held):
                if type(kept) is At:
                    held[i] = tensors[kept.number]
                elif type(kept) is Ref:
                    instead = None if first is None else special.get(first + i)
                    held[i] = find(kept) if instead is None else instead
        return keys, then

    def found(self, kept: Ref) -> Any:
        """Return a value that was not held: itself, or what was made again."""
        key = kept.id
        value = self._found.get(key)
        if value is None:
            if key not in self._frozen and key not in self._made:
                value = self._there(kept)
            if value is None:
                make(kept, self._enter, self._complete)
                return self._found[key]
            self._found[key] = value
        return value

    def _there(self, kept: Ref) -> Any:
        """Return a value that is there, as it is by now, or None."""
        value = self._made.get(kept.id)
        if value is not None:
            return value
        if kept.ref is not None:
            return kept.ref()
        value = self._alive.get(kept.id)
        return value if type(value) is kept.kind() else None

    def _enter(self, kept: Ref) -> Sequence[Ref] | None:
        """Find a value, or make it if it can be filled later."""
        key = kept.id
        if key in self._found or key in self._entered:
            return None
        self._entered.add(key)
        value, spans = self._there(kept), self._spans_of(key)
        is_frozen = bool(spans) and spans[0].kind.frozen
        if not is_frozen:
            is_there = value is not None and key not in self._made
            if value is None:
                value = self._made[key] = self._new(kept, ())
            self._found[key] = value
            if is_there:
                return ()  # its contents are written in turn
        return [ref for span in spans for ref in self._missing(span)]

    def _spans_of(self, key: int) -> list[Span]:
        return self._before.spans_by_id(self._layout).get(key, [])

    def _missing(self, span: Span) -> list[Ref]:
        """Return what a holder held that is not found yet."""
        keys, kept = span.of(self._before.keys, self._before.kept)
        return [k for k in kept + keys if type(k) is Ref and k.id not in self._found]

    def _complete(self, kept: Ref) -> bool:
        """Make a value that never changes, or fill one that was made."""
        key, spans = kept.id, self._spans_of(kept.id)
        if key not in self._found:
            first = spans[0]
            if self._missing(first):
                return False
            value, (_, then) = (
                self._there(kept),
                self._then(first, self.found, self._special),
            )
            if value is None or not are_same(first.kind.held(value)[1], then):
                value = self._made[key] = self._new(kept, then)
            self._found[key] = value
        if key in self._made:
            for span in spans:
                if not span.kind.frozen:
                    self._fill(span, self._made[key])
        return True

    def _fill(self, span: Span, holder: Any) -> None:
        """Give a holder that was made what is found of what it held, for its hash.

        What leads back to it may be missing; `start` writes all.
        """

        def find(kept: Ref) -> Any:
            return self._found.get(kept.id, MISSING)

        keys, then = self._then(span, find, self._special)
        if span.kind.keyed:
            pairs = [*zip(keys, then, strict=True)]
            pairs = [(k, v) for k, v in pairs if k is not MISSING and v is not MISSING]
            keys, then = [k for k, _ in pairs], [v for _, v in pairs]
        if span.kind is SLOTS or all(v is not MISSING for v in then):
            span.kind.write(holder, keys, then)

    # --- What is gone ---

    def revive_owners(self) -> None:
        """Find the owners; those that are gone are made again."""
        layout = self._layout
        self._owners = owners = [ref() for ref in layout.owners]
        for i in self._gone(layout.classes):
            name = layout.class_names[i - layout.classes.start]
            raise RecomputeError(GONE.format(name=f"The class {name}"))
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
            owners[i] = self._made[layout.births[i]]

    def _gone(self, section: slice) -> list[int]:
        """Return which owners of a section are gone."""
        indices = range(len(self._owners))[section]
        return [i for i in indices if self._owners[i] is None]

    def _check_classes(self, section: slice) -> None:
        """Check the classes of objects; make those again that are gone."""
        for i in range(len(self._owners))[section]:
            owner, key = self._owners[i], self._layout.births[i]
            if owner is not None:
                now, then = type(owner), self._class_of(i)
                if then is not now and class_without_us(now) is not class_without_us(
                    then
                ):
                    self._others.append((owner, then))  # changed other than by remat
                continue
            if key in self._made:
                continue
            kind = self._class_of(i)
            if container_kind(kind) is not None:
                place = self._before.places(self._layout)[key]
                self._made[key] = self._new(self._before.at(place), ())
                continue
            if hasattr(kind, "__del__"):
                name = f"A {kind.__qualname__}, which has `__del__`,"
                raise RecomputeError(GONE.format(name=name))
            self._made[key] = without_contents(kind)

    def _class_of(self, i: int) -> Any:
        kind = self._before.classes[i]()
        if kind is None:
            raise RecomputeError(GONE.format(name="The class of an object"))
        return kind

    def _function(self, i: int) -> types.FunctionType:
        """Return a function like one that is gone, with the variables that are left."""
        functions, layout = self._owners[self._layout.functions], self._layout
        alive, kind = self._alive, types.CellType
        cells = {k: c for k in layout.cells[i] if type(c := alive.get(k)) is kind}
        for fn, keys in zip(functions, layout.cells, strict=True):
            if fn is not None:
                cells.update(zip(keys, fn.__closure__ or (), strict=True))
        for key in layout.cells[i]:
            if key not in cells:
                cells[key] = self._made.setdefault(key, kind())
        closure = tuple(cells[key] for key in layout.cells[i]) or None
        code, namespace = self._before.code_of(i), self._namespaces[i]
        return types.FunctionType(code, namespace, code.co_name, None, closure)

    def _new(self, kept: Ref, values: Sequence[Any]) -> Any:
        """Return a value like one that is gone."""
        kind, spans = kept.kind(), self._spans_of(kept.id)
        if spans and kind is not None:
            return spans[0].kind.new(kind, values, kept.limit)
        if kind in (dict, set, OrderedDict):
            return kind()  # of a module, and always empty
        name = "An object" if kind is None else f"A value of {kind.__qualname__}"
        if kind is types.FunctionType:
            name = "A hook, or another function,"
        raise RecomputeError(GONE.format(name=name))


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Say whether two sequences hold the same objects."""
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
        with LOCK:
            RUNNING.setdefault(self.key, []).append(self)
            # Another run may have ended since it was read.
            self.keys, self.values = self.kind.held(self.holder)

    def end(self) -> None:
        """Give back what was there, or hand it to a run that began later."""
        with LOCK:
            runs = RUNNING[self.key]
            i = runs.index(self)
            del runs[i]
            if i < len(runs):
                runs[i].keys, runs[i].values = self.keys, self.values
                return
            if not runs:
                del RUNNING[self.key]
            keys, values = self.kind.held(self.holder)
            if not (are_same(keys, self.keys) and are_same(values, self.values)):
                self.kind.put_back(self.holder, self.keys, self.values)


# A value that is let go of may run the user's code, which may recompute.
LOCK = threading.RLock()
# By what is written, the runs that wrote it, in order.
RUNNING: dict[Any, list[Written]] = {}


AnyWritten = TypeVar("AnyWritten", bound=Written)


def written_to(
    kind: HolderKind,
    holder: Any,
    keys: list[Any],
    values: list[Any],
    noted_as: type[AnyWritten] = Written,
) -> list[AnyWritten]:
    """Return what is to be put back: each global variable by itself."""
    if kind is not SCOPES:
        return [noted_as(kind, holder, keys, values, (id(holder), id(kind)))]
    scope, names = holder
    return [
        noted_as(kind, (scope, (name,)), [], [value], (id(scope), name))
        for name, value in zip(names, values, strict=True)
    ]
