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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from operator import is_, is_not
from typing import Any, Self

from torch.utils.hooks import RemovableHandle

from remat._base.absent import Absent
from remat._base.code import has_marks
from remat._base.errors import RecomputeError
from remat._base.types import Fn
from remat._reach.before import Ref, differing, marks_of
from remat._reach.exchange import (
    CLASS_OF,
    LOCK,
    Exchange,
    Written,
    are_same,
    written_to,
)
from remat._reach.holders import CONTAINERS, MovedError
from remat._reach.layout import LiveValues, live_in
from remat._reach.left import ON_INPUT, Left, LeftAt
from remat._reach.lifted import Lifted
from remat._reach.objects import HOOKS
from remat._reach.parts import HolderNow, among, holding
from remat._reach.roots import Root
from remat._reach.walk import is_hook_of_library
from remat._reach.watched import Buffer
from remat._torch.modes import function_mode_count, function_modes, under_function_modes
from remat._torch.process import (
    MODULE_HOOKS,
    parametrization_cache,
    swap_parametrization_cache,
)


class Running:
    """A run of a call, as a context."""

    __slots__ = (
        *("_alive", "_buffers", "_first", "_lifted", "_made", "_next_hook", "_now"),
        "_stand_ins",
        *("_roots", "_undo", "_users", "passed", "tensors"),
    )

    def __init__(
        self,
        roots: Sequence[Root],
        buffers: tuple[Sequence[Buffer], Callable[[Buffer], Exception]],
        next_hook: int,
        tensors: Sequence[Any],
        users: Callable[[], Sequence[Any]],
    ) -> None:
        self._roots, self._buffers, self._next_hook = roots, buffers, next_hook
        self.tensors, self._users = tensors, users
        self._lifted: Lifted | None = None
        self.passed: Callable[[int], Any] = _nothing
        self._made: dict[int, Any] = {}
        self._alive: dict[int, Any] = {}
        self._now: list[tuple[Root, LiveValues | Exchange]] = []
        self._undo: list[Callable[[], object]] = []
        self._stand_ins: Sequence[Any] = ()  # that may have attributes

    def __enter__(self) -> Self:
        self._first = RemovableHandle.next_id
        try:
            if self._first != self._next_hook:
                self._hide_hooks()
            if self._roots:
                self._exchange()
            noted, changed = self._buffers
            for buffer in noted:
                if not buffer.exchange(self._undo):
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
                self._lifted.end()
            for tensor in self._stand_ins:
                vars(tensor).clear()

    def _end_run(self) -> None:
        self.passed = _nothing
        if RemovableHandle.next_id > self._first:
            # Those that the run set: before the dicts of hooks are written again.
            for hooks in self._hooks_of_modules():
                for key in [key for key in hooks if key >= self._first]:
                    del hooks[key]
        if self._undo:
            self._put_back()

    def end_run(self) -> bool:
        """Put back all but the tensors, until the context is left; say if some stay.

        Hooks in the graph of the run may call functions, which are to find those of the
        run. What these change stays. What was left out of a replay nobody finds.
        """
        exchanges = [now for _, now in self._now if isinstance(now, Exchange)]
        # Nobody but this run has what it made, and hooks in its graph may read it.
        made = [w for held in exchanges for w in held.set_aside(self._made.values())]
        self._end_run()
        self._undo += [written.end for written in made]
        tensors, self.tensors, self._first = self.tensors, (), _NEVER
        self._now.clear()
        if exchanges:
            held = [pair for one in exchanges for pair in one.holders()]

            def here(ids: Any) -> Iterator[HolderNow]:
                return among((HolderNow(k, h, *k.held(h)) for k, h in held), ids)

            each = zip(self._users(), tensors, strict=True)
            pairs = [(u, t) for u, t in each if u is not None and type(t) is not Absent]
            self._lifted = Lifted([here], [u for u, _ in pairs], [t for _, t in pairs])
            self._lifted.__enter__()
        elif self._lifted is not None:
            self._lifted = self._lifted.without(Absent)
        stay = self._lifted is not None and bool(self._lifted.written)
        return stay or bool(made or self._stand_ins)

    def note_stand_ins(self) -> None:
        """Have the tensors of the run lose their attributes, but for the user's own."""
        users = self._users()
        pairs = compress(
            zip(self.tensors, users, strict=False), map(is_not, self.tensors, users)
        )
        self._stand_ins = [
            t
            for t, user in pairs
            if has_marks(type(t)) and (user is None or vars(t) is not vars(user))
        ]

    def _put_back(self) -> None:
        try:
            while self._undo:
                self._undo.pop()()
        finally:
            if self._undo:  # one of them raised: the others still do
                self._put_back()

    def found(self, kept: Ref) -> Any:
        """Return a value that the call was given: itself, or what was revived."""
        value = None if kept.ref is None else kept.ref()
        value = self._made.get(kept.id) if value is None else value
        if value is None:
            raise RecomputeError(_GONE)
        return value

    def container(self, kept: Ref) -> Any:
        """Return a container that was passed and that an owner leads to, or None."""
        for root, now in self._now:
            if isinstance(now, Exchange):
                value = now.container(kept.id)
                if value is not None:
                    return value
                continue
            place = root.before.places(root.layout).get(kept.id)
            if place is not None:
                position, as_key = place
                value = (now.keys if as_key else now.values)[position]
                return value if self._lifted is None else self._lifted.of(value)
        return None

    def left(self, at: Sequence[LeftAt]) -> list[Left]:
        """Return what the run left in holders, in some of their places."""
        found: list[Left] = []
        for one in at:
            i, key = one.where
            if i == ON_INPUT:
                holder: Any = vars(self.tensors[key])
            else:
                holder = self.passed(key) if i is None else self._now[i][1].holder(key)
            found.append(Left(one, holder))
        return found

    def _exchange(self) -> None:
        lives = [root.now() for root in self._roots]
        if not self._exchange_tensors(lives):
            self._exchange_all(lives)
        for root in self._roots:
            for large in root.large.values():
                if large.has_grown():
                    self.write(large.kind, large.value, large.keys, large.values)

    def _exchange_tensors(self, lives: Sequence[LiveValues | None]) -> bool:
        """Have other tensors stand in, if nothing else differs; say if that is so."""
        there: dict[int, tuple[Any, Any]] = {}
        now: list[tuple[Root, Any]] = []
        for root, live in zip(self._roots, lives, strict=True):
            found = None if live is None else root.but_for_tensors(live, self.tensors)
            if found is None:
                return False
            now.append((root, live))
            for is_there, then in found:
                if there.setdefault(id(is_there), (is_there, then))[1] is not then:
                    return False  # one that is to be two
        pairs = [pair for pair in there.values() if pair[0] is not pair[1]]
        if pairs:
            here = [partial(holding, root.layout, live) for root, live in now]
            lifted = Lifted(here, [u for u, _ in pairs], [t for _, t in pairs])
            self._lifted = lifted.__enter__()
        self._now = now
        return True

    def _exchange_all(self, lives: Sequence[LiveValues | None]) -> None:
        started: list[Exchange] = []
        leased = (lease() for root in self._roots for lease in root.leases)
        self._alive.update((id(v), v) for v in leased if v is not None)
        for root, live in zip(self._roots, lives, strict=True):
            if live is not None and self._exchange_numbers(root, live):
                self._now.append((root, live))
                continue
            exchange = root.exchange(self.tensors, self._made, self._alive)
            # What is gone of any root may be in another: all are made first.
            exchange.revive_owners()
            started.append(exchange)
            self._now.append((root, exchange))
        for exchange in started:
            exchange.look()
        for exchange in started:
            self._undo.append(exchange.end)
            exchange.start()

    def _exchange_numbers(self, root: Root, live: LiveValues) -> bool:
        """Exchange numbers and words, if nothing else differs; say if that is so."""
        found = root.but_for_numbers(live, self.tensors)
        if found is None:
            return False
        if root.effects is None:  # the run may write any of them
            self._undo.append(_putting_back(live))
        for kind, holder, keys, now, then in found:
            for written in written_to(kind, holder, keys, now):
                written.start()
                self._undo.append(written.end)
            if not are_same(now, then):
                kind.write(holder, keys, then)
        return True

    def write(self, kind: Any, holder: Any, keys: Any, values: Any) -> None:
        """Have a holder hold this until the run has ended."""
        now_keys, now = kind.held(holder)
        written = Written(kind, holder, now_keys, now, (id(holder), id(kind)))
        written.start()
        self._undo.append(written.end)
        kind.write(holder, keys, values)

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
                self.write(how, hooks, kept, [hooks[key] for key in kept])

    def _hooks_of_modules(self) -> list[Any]:
        dicts = [held for root in self._roots for held in root.layout.modules()]
        found = [held[n] for held in dicts for n in HOOKS if held.get(n)]
        return found + [hooks for hooks in MODULE_HOOKS.dicts if hooks]


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


def _nothing(_: int) -> None:
    """Return nothing: no container was passed."""


_NEVER = 1 << 62  # no hook gets this number
_GONE = (
    "remat: what the function was called with is gone, and cannot be made again for "
    "the recompute. Keep it alive until the backward."
)
