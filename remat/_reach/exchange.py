"""What each value is in one run, and what holders are given for it.

In comes what was kept of a value: its number among the tensors, a reference to it, or
what it held. Out comes the value. One that is there is itself, and is written in place
if it holds something else by now. One that is gone is made again, after what it held,
and so is one that never changes, if it holds something else. After the run all that
was written, and what the forward wrote, gets back what it held just before.

    Exchange            of what a call was given
    restored.Restored   and of what its roots reach
    running.Running     all for one recompute, as a context
    lifted.Lifted       other tensors in place of the user's
    Refilled            other tensors in a result, which stay
    ForNames            to look for names in errors, and to write nothing

Invariant: no lock is held while the function runs. Where two runs write one holder, the
one that ends first hands what was there before it to the other.
Rejected: a lock. A recompute may wait for a thread whose backward recomputes, too. To
make all that can be changed, and to fill it last: a frozenset of objects hashes these.
"""

import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._reach.before import At, Ref
from remat._reach.holders import (
    GONE,
    MISSING,
    SLOTS,
    HolderKind,
)
from remat._reach.parts import LOCK, Box, HolderParts, are_same, written_to
from remat._reach.watched import Iterated


class Exchange:
    """What everything is in one run.

    Attributes:
        tensors: of the call, to run on.
        are_there: whether some containers that were passed may still be there.
        undo: what puts back what was there just before.
    """

    __slots__ = ("_alive", "_found", "_held", "_made", "are_there", "tensors", "undo")

    def __init__(self, tensors: Sequence[Any], are_there: bool = False) -> None:
        self.tensors: Sequence[Any] = tensors
        self.are_there = are_there
        self.undo: list[Callable[[], object]] = []
        # By identity at the call: what each value is in this run, what was made again,
        # what holders hold by now, and what those held that roots reach.
        self._found: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._alive: dict[int, Any] = {}
        self._held: dict[int, list[HolderParts]] = {}

    # --- What each value is ---

    def values(self, kept: Sequence[Any]) -> list[Any]:
        """Return values, from what was kept of them."""
        tensors = self.tensors
        if type(kept) is range:
            return [*tensors[kept.start : kept.stop]]
        if _KEPT.isdisjoint(map(type, kept)):
            return [*kept]  # as names are
        values: list[Any] = []
        for k in kept:
            kind = type(k)
            if kind is At:
                values.append(tensors[k.number])
            elif kind is Ref:
                is_known = self._found or self._held or k.ref is None
                value = None if is_known else k.ref()
                values.append(self.found(k) if value is None else value)
            elif kind is Box:
                if self.are_there and k.id not in self._found:
                    self._look_at([box for box in kept if type(box) is Box])
                values.append(self.found(k))
            else:
                values.append(k.again() if kind is Iterated else k)
        return values

    def found(self, kept: Ref) -> Any:
        """Return a value: itself, or what was made again."""
        key = kept.id
        value = self._found.get(key)
        if value is None and type(kept) is Ref and key not in self._made:
            held = self._held.get(key)
            if held is None or not held[0].kind.frozen:
                value = self._there(kept)
        if value is None:
            todo: set[int] = set()  # still to be made or filled
            left = self._in_order(kept, todo)
            while left:
                again = [k for k in left if k.id in todo and not self._complete(k)]
                if len(again) == len(left):
                    raise RecomputeError(_AROUND_ITSELF)
                left = again
            value = self._found[key]
        return value

    def _in_order(self, kept: Ref, entered: set[int]) -> list[Ref]:
        """Return what a value leads to, each after what it holds, without recursion."""
        todo = [(kept, iter(self._enter(kept, entered) or ()))]
        order: list[Ref] = []
        while todo:
            above, left = todo[-1]
            for part in left:
                parts = self._enter(part, entered)
                if parts is not None:
                    todo.append((part, iter(parts)))
                    break
            else:
                todo.pop()
                order.append(above)
        return order

    def _there(self, kept: Ref) -> Any:
        """Return a value that is there, as it is by now, or None."""
        value = self._made.get(kept.id)
        if value is not None:
            return value
        if kept.ref is not None:
            return kept.ref()
        value = self._alive.get(kept.id)
        return value if type(value) is kept.kind() else None

    def _look_at(self, boxes: list[Box]) -> None:
        """Note what containers that were passed, and are there, hold by now."""
        looked: set[int] = set()
        absent: set[int] = set()
        for box in boxes:  # which grow
            if box.ref is None and box.is_flat:
                continue
            value, key = self._there(box), box.id
            known = absent if value is None else looked
            if key in known:
                continue
            known.add(key)
            if value is not None:
                for part in box.held:
                    self._note_alive(part.kind, value)
            boxes += box.boxes()

    def _note_alive(self, kind: HolderKind, holder: Any) -> tuple[list[Any], list[Any]]:
        """Note what a holder holds by now, and return its keys and its values."""
        keys, now = held = kind.held(holder)
        self._alive.update(zip(map(id, now), now, strict=True))
        self._alive.update(zip(map(id, keys), keys, strict=True))
        return held

    def _held_by(self, kept: Ref) -> Sequence[HolderParts]:
        """Return what a value held."""
        return kept.held if type(kept) is Box else self._held.get(kept.id, ())

    def _enter(self, kept: Ref, todo: set[int]) -> Sequence[Ref] | None:
        """Find a value, or make it if it can be filled later; return what it lacks."""
        key, is_passed = kept.id, type(kept) is Box
        if key in self._found or key in todo:
            return None
        if is_passed and (value := self._as_it_was(key)) is not None:
            self._found[key] = value
            return None
        held, value = self._held_by(kept), self._there(kept)
        if not (held and held[0].kind.frozen):
            is_there = value is not None and key not in self._made
            if value is None:
                value = self._made[key] = self._new(kept, ())
            self._found[key] = value
            if is_there and not is_passed:
                return ()  # its contents are written in turn
        todo.add(key)
        return [k for part in held for k in self._missing(kept, part)]

    def _as_it_was(self, key: int) -> Any:
        """Return a container that is there and holds all that it held; None if none."""

    def _missing(self, kept: Any, part: HolderParts) -> list[Ref]:
        """Return what a value held that is not found yet."""
        if type(kept) is Box and kept.is_flat:
            return []
        found = self._found
        return [
            k
            for k in (*part.items, *part.keys)
            if type(k) in _REFS and k.id not in found
        ]

    def _complete(self, kept: Ref) -> bool:
        """Make a value that never changes, or fill another; say whether it is whole."""
        key, is_whole = kept.id, True
        for part in self._held_by(kept):
            is_missing = bool(self._missing(kept, part))
            if part.kind.frozen:
                if is_missing:
                    return False
                if key not in self._found:
                    self._found[key] = self._frozen(kept, part)
            elif key in self._made:
                self._fill(part, self._made[key], is_whole=not is_missing)
            elif is_missing:
                return False
            elif type(kept) is Box:
                self.write(part, self._found[key])
            is_whole = is_whole and not is_missing
        return is_whole

    def _frozen(self, kept: Ref, part: HolderParts) -> Any:
        """Return a value that never changes: itself, if it holds what it held."""
        value, items = self._there(kept), self.values(part.items)
        if value is None or not are_same(part.kind.held(value)[1], items):
            value = self._made[kept.id] = self._new(kept, items)
        return value

    def _fill(self, part: HolderParts, holder: Any, *, is_whole: bool) -> None:
        """Fill a value that was made with what is found of what it held, for its hash.

        What leads back to it may be missing.
        """
        kind, keys, items = part.kind, part.keys, part.items
        if not is_whole:
            keys, items = ([*map(self._or_missing, held)] for held in (keys, items))
            if kind.keyed:
                pairs = [*zip(keys, items, strict=True)]
                pairs = [p for p in pairs if not any(v is MISSING for v in p)]
                keys, items = [k for k, _ in pairs], [v for _, v in pairs]
            elif kind is not SLOTS:
                return
        kind.write(holder, keys and self.values(keys), self.values(items))

    def _or_missing(self, kept: Any) -> Any:
        is_missing = type(kept) in _REFS and kept.id not in self._found
        return MISSING if is_missing else kept

    def _new(self, kept: Ref, values: Sequence[Any]) -> Any:
        """Return a value like one that is gone."""
        kind, held = kept.kind(), self._held_by(kept)
        if held and kind is not None:
            return held[0].kind.new(kind, values, kept.limit)
        if kind in (dict, set, OrderedDict):
            return kind()  # of a module, and always empty
        name = "An object" if kind is None else f"A value of {kind.__qualname__}"
        if kind is types.FunctionType:
            name = "A hook, or another function,"
        raise RecomputeError(GONE.format(name=name))

    # --- What is written ---

    def write(self, then: HolderParts, holder: Any, now: Any = None) -> None:
        """Have a holder, which holds `now`, hold something until the run has ended."""
        keys, items = then.keys and self.values(then.keys), self.values(then.items)
        if now is None or then.is_changed or not _are_both_same(now, (keys, items)):
            self.give(then.kind, holder, keys, items, is_changed=then.is_changed)

    def give(
        self,
        kind: HolderKind,
        holder: Any,
        keys: Sequence[Any],
        items: Sequence[Any],
        *,
        is_changed: bool = True,
    ) -> None:
        """Have a holder hold these until the run has ended.

        What the forward wrote, the run may write: it is put back in any case.
        """
        with LOCK:
            now_keys, now = kind.held(holder)
            is_same = _are_both_same((now_keys, now), (keys, items))
            if is_same and not is_changed:
                return
            for written in written_to(kind, holder, now_keys, now):
                self.undo.append(written.end)
        if not is_same:
            token = kind.write(holder, keys, items)
            if token is not None:  # of a context variable
                self.undo.append(partial(_reset, holder, token))

    def put_back(self) -> None:
        """Give back what was there just before the run."""
        try:
            while self.undo:
                self.undo.pop()()
        finally:
            if self.undo:  # one of them raised: the others still do
                self.put_back()


def _are_both_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return are_same(a[0], b[0]) and are_same(a[1], b[1])


def _reset(variable: Any, token: Any) -> None:
    with contextlib.suppress(ValueError):  # in another context
        variable.reset(token)


_REFS = {Ref, Box}
_KEPT = frozenset({At, Ref, Box, Iterated})  # what is kept in place of a value


class ForNames(Exchange):
    """For names in errors: what is there is as it is by now, and is not written."""

    __slots__ = ()

    def __init__(self, tensors: Sequence[Any], run: Exchange | None) -> None:
        super().__init__(tensors)
        if run is not None:
            self._made = {**run._made}

    @override
    def _new(self, kept: Ref, values: Sequence[Any]) -> Any:
        return super()._new(kept, values) if type(kept) is Box else None

    @override
    def write(self, then: HolderParts, holder: Any, now: Any = None) -> None:
        """Leave it."""


class Refilled(Exchange):
    """Values that are filled, or made again, around other tensors. They stay so."""

    __slots__ = ()

    @override
    def write(self, then: HolderParts, holder: Any, now: Any = None) -> None:
        """Have a holder hold something."""
        # Past methods of the user's, which may do more than set an item.
        then.kind.write(holder, self.values(then.keys), self.values(then.items))


_AROUND_ITSELF = (
    "remat: a value that never changes, and that the function reached at the call, is "
    "gone, and holds itself. It cannot be made again for the recompute. Keep it alive "
    "until the backward."
)
