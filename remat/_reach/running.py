"""One run of a call again, in which everything holds what it held at the call.

Where nothing differs but the tensors that the run is given, these stand in for the
user's (`lifted`). Else holders that differ are exchanged (`exchange`).

Invariant: after the run everything holds what it held just before, also after an
error, and no hook that the run set on a module stays. What stays until the context is
left are tensors that stand in (`Running.end_run`).
Rejected: to leave all as it is in the run until its graph is differentiated. What hooks
in that graph change is to stay.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from operator import is_, is_not, not_
from typing import Any, Self

from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from remat._base.absent import Absent
from remat._base.code import has_marks
from remat._base.types import Fn
from remat._reach.before import differing, marks_of
from remat._reach.holders import CONTAINERS, MovedError
from remat._reach.layout import LiveValues, live_in
from remat._reach.left import ON_INPUT, Left, LeftAt
from remat._reach.lifted import Lifted
from remat._reach.objects import HOOKS, dict_of
from remat._reach.parts import LOCK, HolderNow, KindAndHolder, among, holding
from remat._reach.restored import CLASS_OF, Restored
from remat._reach.roots import Numbers, Root
from remat._reach.walk import is_hook_of_library
from remat._reach.watched import Buffer
from remat._torch.modes import function_mode_count, function_modes, under_function_modes
from remat._torch.process import (
    MODULE_HOOKS,
    parametrization_cache,
    swap_parametrization_cache,
)


class Running(Restored):
    """A run of a call, as a context."""

    __slots__ = (
        *("_buffers", "_first", "_lifted", "_next_hook", "_roots", "_set_on"),
        *("_unchanged", "_users"),
    )

    def __init__(
        self,
        roots: Sequence[Root],
        buffers: tuple[Sequence[Buffer], Callable[[Buffer], Exception]],
        next_hook: int,
        tensors: Sequence[Any],
        users: Callable[[], Sequence[Any]],
        are_there: bool,
    ) -> None:
        super().__init__(tensors, are_there)
        self._roots, self._buffers, self._next_hook = roots, buffers, next_hook
        self._users = users
        self._lifted: Lifted | None = None
        # Roots all of whose containers are there, by their numbers.
        self._unchanged: list[tuple[int, Root, LiveValues]] = []
        self._set_on: Sequence[Any] = ()  # what stands in and may have attributes

    def __enter__(self) -> Self:
        self._first = RemovableHandle.next_id
        try:
            if self._first != self._next_hook:
                self._hide_hooks()
            if self._roots:
                self._exchange()
                self._exchange_large()
            noted, changed = self._buffers
            for buffer in noted:
                if not buffer.exchange(self.undo):
                    raise changed(buffer)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_run()
        finally:
            if self._lifted is not None:
                self._lifted.put_back()
            for tensor in self._set_on:
                vars(tensor).clear()

    def _end_run(self) -> None:
        if RemovableHandle.next_id > self._first:
            # Those that the run set: before the dicts of hooks are written again.
            for hooks in self._hooks_of_modules():
                for key in [key for key in hooks if key >= self._first]:
                    del hooks[key]
        if self.undo:
            self.put_back()

    def end_run(self) -> bool:
        """Put back all but the tensors, until the context is left; say if some stay.

        Hooks in the graph of the run may call functions, which are to find those of the
        run. What these change stays. What was left out of a replay nobody finds.
        """
        # Nobody but this run has what it made, and hooks in its graph may read it.
        made = self._set_aside() if self._holders else []
        self._end_run()
        self.undo += made
        tensors, self._first = self.tensors, _NEVER
        self.tensors = ()
        self._found.clear()
        self._alive.clear()
        self._unchanged.clear()
        self._held.clear()
        if self._holders:
            held = [(k, h) for k, h in self._holders.values() if h is not None]

            def here(ids: Any) -> Iterator[KindAndHolder]:
                return among((HolderNow(k, h, *k.held(h)) for k, h in held), ids)

            each = zip(self._users(), tensors, strict=True)
            pairs = [(u, t) for u, t in each if u is not None and type(t) is not Absent]
            self._lifted = Lifted([here], [u for u, _ in pairs], [t for _, t in pairs])
            self._lifted.__enter__()
        elif self._lifted is not None:
            self._lifted = self._lifted.without(Absent)
        stay = self._lifted is not None and bool(self._lifted.undo)
        return stay or bool(made or self._set_on)

    def _set_aside(self) -> list[Callable[[], object]]:
        """Return what puts back values that the run has made, which stay."""
        own = {id(part) for v in self._made.values() for part in (v, dict_of(v))}
        own.discard(id(None))  # no dict, and what is put back without a holder
        are = [id(getattr(_written(undo), "holder", None)) in own for undo in self.undo]
        made = [*compress(self.undo, are)]
        self.undo = [*compress(self.undo, map(not_, are))]
        return made

    def note_stand_ins(self) -> None:
        """Have the tensors of the run lose their attributes, but for the user's own."""
        users = self._users()
        pairs = compress(
            zip(self.tensors, users, strict=False), map(is_not, self.tensors, users)
        )
        self._set_on = [
            t
            for t, user in pairs
            if has_marks(type(t)) and (user is None or vars(t) is not vars(user))
        ]

    def left(self, at: Sequence[LeftAt]) -> list[Left]:
        """Return what the run left in holders, in some of their places."""
        found: list[Left] = []
        unchanged = {number: live for number, _, live in self._unchanged}
        for one in at:
            i, key = one.where
            if i == ON_INPUT:
                holder: Any = vars(self.tensors[key])
            elif i is None:
                holder = self._found.get(key)
            elif i in unchanged:
                holder = self._standing_for(unchanged[i].holder(key))
            else:
                _, holder = self._holders[i, key]
            found.append(Left(one, holder))
        return found

    def _exchange(self) -> None:
        others: list[tuple[int, Root]] = []
        each: list[tuple[int, Root, LiveValues, Any, Sequence[Numbers]]] = []
        for i, root in enumerate(self._roots):
            live = root.now()
            found = None if live is None else root.but_for_values(live, self.tensors)
            if live is None or found is None:
                others.append((i, root))
            else:
                each.append((i, root, live, *found))
        there = None if others else _stand_ins(each)
        if there is None:
            others += [one[:2] for one in each if one[3]]
            each = [one for one in each if not one[3]]
        self._unchanged = [one[:3] for one in each]
        if there:
            self._lift([pair for pair in there.values() if pair[0] is not pair[1]])
        for _, root, live, _, holders in each:
            if holders or root.effects is None:
                self._give_numbers(root, live, holders)
        if others:
            leased = (lease() for root in self._roots for lease in root.leases)
            self._alive.update((id(v), v) for v in leased if v is not None)
            self.exchange([(i, root, root.among(self.tensors)) for i, root in others])

    def _give_numbers(
        self, root: Root, live: LiveValues, holders: Sequence[Numbers]
    ) -> None:
        """Have holders hold the numbers and words of the call."""
        if root.effects is None:  # the run may write any of them
            self.undo.append(_putting_back(live))
        for kind, given, numbers in holders:
            holder = self._standing_for(given)  # a tuple with attributes, say
            keys, now = kind.held(holder)
            then = [numbers.get(i, value) for i, value in enumerate(now)]
            self.give(kind, holder, keys, then)

    def _lift(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Have other tensors stand in for those that are there."""
        if pairs:
            each = [(root.layout, live) for _, root, live in self._unchanged]
            here = [partial(holding, layout, live) for layout, live in each]
            self._lifted = Lifted(here, [u for u, _ in pairs], [t for _, t in pairs])
            self._lifted.__enter__()

    @override
    def _as_it_was(self, key: int) -> Any:
        for _, root, live in self._unchanged:
            place = root.before.places(root.layout).get(key)
            if place is not None:
                position, as_key = place
                value = (live.keys if as_key else live.values)[position]
                return self._standing_for(value)
        return None

    def _standing_for(self, value: Any) -> Any:
        return value if self._lifted is None else self._lifted.of(value)

    def _exchange_large(self) -> None:
        """Have large containers hold what they held, if they only grew since."""
        for root in self._roots:
            for large in root.large.values():
                if large.has_grown():
                    self.give(large.kind, large.value, large.keys, large.values)

    def _hide_hooks(self) -> None:
        """Take off the hooks of modules that the user has set since the call."""
        for hooks in self._hooks_of_modules():
            is_of_all = any(hooks is held for held in MODULE_HOOKS.dicts)
            kept = [
                key
                for key, hook in hooks.items()
                if key < self._next_hook or (is_of_all and is_hook_of_library(hook))
            ]
            if len(kept) < len(hooks):
                how = CONTAINERS[OrderedDict if type(hooks) is OrderedDict else dict]
                self.give(how, hooks, kept, [hooks[key] for key in kept])

    def _hooks_of_modules(self) -> list[Any]:
        dicts = [held for root in self._roots for held in root.layout.modules()]
        found = [held[n] for held in dicts for n in HOOKS if held.get(n)]
        return found + [hooks for hooks in MODULE_HOOKS.dicts if hooks]


def _stand_ins(each: Iterable[Any]) -> dict[int, tuple[Any, Any]] | None:
    """Return pairs by the identity of the first; None if one is to be two."""
    there: dict[int, tuple[Any, Any]] = {}
    for *_, pairs, _ in each:
        for pair in pairs:
            if there.setdefault(id(pair[0]), pair)[1] is not pair[1]:
                return None
    return there


@contextmanager
def undone(roots: Sequence[Root]) -> Iterator[None]:
    """Have all holders hold, after the body, what they held before it."""
    then: list[LiveValues] = []
    with suppress(MovedError):
        then = [live_in(root.layout) for root in roots]
    put_back = [*map(_putting_back, then)]
    try:
        yield
    finally:
        for each in put_back:
            each()


def _putting_back(then: LiveValues) -> Callable[[], None]:
    """Return what has all holders hold again what they held."""
    classes = [*map(type, then.owners)]

    def put_back() -> None:
        for owner, kind in zip(then.owners, classes, strict=True):
            if type(owner) is not kind:
                CLASS_OF.write(owner, [], [kind])
        groups = then.groups
        sizes = [(kind, len(holders)) for kind, holders in groups]
        for span, _ in differing(sizes, marks_of(then), marks_of(then.again())):
            holder = groups[span.group][1][span.number]
            with LOCK:
                span.kind.put_back(holder, *span.of(then.keys, then.values))

    return put_back


def call_under(
    fn: Fn, args: Any, kwargs: Any, modes: Sequence[Any], cache: dict[Any, Any] | None
) -> Any:
    """Call a function under these modes, and this cache of parametrizations alone."""

    def run() -> Any:
        if cache is None and parametrization_cache() is None:
            return fn(*args, **kwargs)
        state = ({}, 0) if cache is None else (dict(cache), 1)
        before = swap_parametrization_cache(state)
        try:
            return fn(*args, **kwargs)
        finally:
            swap_parametrization_cache(before)

    now = function_modes() if modes or function_mode_count() else modes
    if len(now) == len(modes) and all(map(is_, now, modes)):
        return run()
    return under_function_modes(modes, run)


def _written(undo: Any) -> Any:
    """Return what is put back by this."""
    return getattr(undo, "__self__", None)


_NEVER = 1 << 62  # no hook gets this number
