"""What all that the roots of a call reach holds in one run: what it held at the call.

First all that is there by now is noted: what one holder held may be in another. Then,
from the owners down, a holder that differs is written in place, and what is gone is
made again (`exchange`).

Invariant: a holder that holds what it held, and that the forward did not change, is not
written.
Rejected: to look for what differs along the paths of the walk. What is gone is there no
more, and a path may lead elsewhere by now.
"""

import types
from collections.abc import Iterator, Sequence
from typing import Any

from remat._base.code import VIEWED, class_without_us
from remat._base.errors import RecomputeError
from remat._reach.before import Ref
from remat._reach.exchange import Exchange
from remat._reach.holders import (
    ATTRIBUTES,
    GONE,
    OWNED,
    HolderKind,
    container_kind,
    without_contents,
)
from remat._reach.objects import is_view
from remat._reach.parts import HolderParts
from remat._reach.roots import Root


# The class of an object.
CLASS_OF = HolderKind(
    lambda value: (type(value),),
    lambda value, _, kinds: object.__setattr__(value, "__class__", kinds[0]),
    fixed=1,
)


class Restored(Exchange):
    """What everything that roots reach is in one run."""

    __slots__ = ("_holders",)

    def __init__(self, tensors: Sequence[Any], are_there: bool) -> None:
        super().__init__(tensors, are_there)
        # By the number of the root and the index: how it is read, and it itself.
        self._holders: dict[Any, tuple[HolderKind, Any]] = {}

    def exchange(self, roots: Sequence[tuple[int, Root, Sequence[Any]]]) -> None:
        """Have all that roots reach hold what it held.

        Of each root its number, and its tensors. All are looked at first: what one held
        may be somewhere else by now.
        """
        views: list[Any] = []
        each = [
            (number, root, tensors, self._owners(root, views))
            for number, root, tensors in roots
        ]
        found = [one for root in each for one in self._look(*root)]
        for index, part, kept, holder, now in found:
            if kept is not None and not part.kind.frozen:
                there, holder = holder, self.found(kept)
                now = now if there is holder else None
            if index is not None:
                self._holders[index] = part.kind, holder
            if not part.kind.frozen:
                self.write(part, holder, now)
        for view in views:  # these get the dicts of their modules
            module = view
            while is_view(type(module)):
                module = getattr(module, VIEWED)
            object.__setattr__(view, "__dict__", vars(module))

    def _look(
        self, number: int, root: Root, tensors: Sequence[Any], owners: list[Any]
    ) -> Iterator[tuple[Any, HolderParts, Ref | None, Any, Any]]:
        """Yield the holders of a root: index, what each held, and how it is found.

        Also the holder itself, if it is there, and what it holds by now.
        """
        layout, before, effects = root.layout, root.before, root.effects
        found, alive = self._found, self._alive
        alive.update((id(v), v) for v in layout.variables)
        found.update(root.instead())
        yield from self._classes(root, owners)
        groups = [held for _, held in layout.holders(owners)]
        then = before.with_tensors(tensors)
        for span, place in before.holders(layout):
            index, kind, kept = span[1:3], span.kind, None
            part = HolderParts(kind, *span.of(*then))
            part.is_changed = effects is None or index in effects
            if place is None:
                holder = groups[span.group][span.number]
                # Of an owner that is there nothing has to be made.
                key = before.key_of(layout, span) if self._made else 0
            else:
                kept = before.at(place)
                holder, key = self._there(kept), kept.id
            if key:
                # What a value is made of comes first, and then its attributes.
                here, own = self._held.setdefault(key, []), part
                if kind is ATTRIBUTES:  # read through the object itself
                    own = HolderParts(OWNED, part.keys, part.items)
                here.insert(len(here) * own.kind.adds, own)
            now = None
            if holder is not None:
                now = self._note_alive(kind, holder)
                is_known = kept is None or kind.frozen or key in self._made
                if not (is_known or kind.adds):  # of a tuple with attributes, say
                    found[key] = holder
            yield (number, index), part, kept, holder, now

    def _classes(self, root: Root, owners: list[Any]) -> Iterator[Any]:
        """Yield the objects that are of other classes by now, with those that were."""
        layout = root.layout
        for section in (layout.objects, layout.slotted):
            for i, owner in enumerate(owners[section], section.start):
                then, now = _class_then(root, i), type(owner)
                if then is not now and class_without_us(then) is class_without_us(now):
                    then = now  # remat itself changed it
                if then is not now or root.effects is None:
                    yield None, HolderParts(CLASS_OF, [], [then]), None, owner, None

    def _owners(self, root: Root, views: list[Any]) -> list[Any]:
        """Return the owners; those that are gone are made again, without contents."""
        layout = root.layout
        owners: list[Any] = [ref() for ref in layout.owners]
        gone = [i for i, owner in enumerate(owners) if owner is None]
        for i in gone:
            if layout.classes.start <= i < layout.classes.stop:
                name = layout.class_names[i - layout.classes.start]
                raise RecomputeError(GONE.format(name=f"The class {name}"))
        for i in gone:
            key = layout.births[i]
            if key not in self._made:
                is_function = layout.functions.start <= i < layout.functions.stop
                revive = self._function if is_function else self._object
                self._made[key] = revive(root, owners, i)
            owners[i] = self._made[key]
            if is_view(type(owners[i])):
                views.append(owners[i])
        return owners

    def _object(self, root: Root, _: Any, i: int) -> Any:
        """Return an object like one that is gone, without contents."""
        kind, before = _class_then(root, i), root.before
        how = container_kind(kind)
        if how is not None:
            place = before.places(root.layout)[root.layout.births[i]]
            return how.new(kind, (), before.at(place).limit)
        if hasattr(kind, "__del__"):
            name = f"A {kind.__qualname__}, which has `__del__`,"
            raise RecomputeError(GONE.format(name=name))
        return without_contents(kind)

    def _function(self, root: Root, owners: list[Any], i: int) -> types.FunctionType:
        """Return a function like one that is gone, with the variables that are left."""
        layout, made = root.layout, self._made
        functions, i = owners[layout.functions], i - layout.functions.start
        cells = {key: self._alive.get(key) for key in layout.cells[i]}
        cells = {k: c for k, c in cells.items() if type(c) is types.CellType}
        for fn, keys in zip(functions, layout.cells, strict=True):
            if fn is not None:
                cells.update(zip(keys, fn.__closure__ or (), strict=True))
        for key in layout.cells[i]:
            if key not in cells:
                cells[key] = made.setdefault(key, types.CellType())
        closure = tuple(cells[key] for key in layout.cells[i]) or None
        code, scope = root.before.code_of(i), root.namespaces[i]
        return types.FunctionType(code, scope, code.co_name, None, closure)


def _class_then(root: Root, i: int) -> Any:
    kind = root.before.classes[i]()
    if kind is None:
        raise RecomputeError(GONE.format(name="The class of an object"))
    return kind
