"""A context in which all that a call reaches holds what it held, for one run.

Invariant: if nothing differs, nothing is written. Afterwards everything holds what it
held just before, also after an error, and no hook that the run set on a module stays.
Rejected: to put everything back in every run. Most runs find nothing that differs.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Self

from remat._base.errors import RecomputeError
from remat._capture.modules import HOOKS
from remat._live.containers import CONTAINERS
from remat._live.contents import Ref
from remat._live.exchange import Exchange, Written
from remat._live.layout import Taken, hooks_so_far
from remat._live.roots import Root


class Running:
    """A run of a call.

    Args:
        roots: of the call.
        buffers: the buffers of numbers that it reaches, with their bytes then.
        hooks: how many hooks had been set anywhere at the call.
        tensors: to run on.
        exchanges: whether some of these are others than at the call.

    Attributes:
        tensors: see above.
    """

    __slots__ = (
        *("_buffers", "_exchanges", "_first", "_hooks", "_made", "_now", "_roots"),
        *("_undo", "tensors"),
    )

    def __init__(
        self,
        roots: Sequence[Root],
        buffers: Sequence[tuple[Any, bytes]],
        hooks: int,
        tensors: Sequence[Any],
        *,
        exchanges: bool,
    ) -> None:
        self._roots, self._buffers, self._hooks = roots, buffers, hooks
        self.tensors, self._exchanges = tensors, exchanges
        self._made: dict[int, Any] = {}
        self._now: list[tuple[Root, Taken | Exchange]] = []
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        self._first = hooks_so_far()
        try:
            if self._first != self._hooks:
                self._hide_hooks()
            self._exchange()
            for buffer, then in self._buffers:
                self._exchange_bytes(buffer, then)
            for root in self._roots:
                self._shorten(root)
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hooks_so_far() != self._first:
            self._forget_hooks()
        self._put_back()

    def _put_back(self) -> None:
        while self._undo:
            self._undo.pop()()

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
            place = root.contents.containers(root.layout).get(kept.id)
            if place is not None:
                return now.values[place[0]]
        return None

    def _exchange(self) -> None:
        started: list[Exchange] = []
        for root in self._roots:
            now: Any = root.as_it_was(self.tensors)
            if now is None:
                now = root.exchange(self.tensors, self._made, exchanges=self._exchanges)
                now.revive_owners()
                started.append(now)
            self._now.append((root, now))
        for exchange in started:
            self._undo.append(exchange.end)
            exchange.start()

    def _exchange_bytes(self, buffer: Any, then: bytes) -> None:
        now = bytes_of(buffer)
        self._undo.append(lambda: bytes_of(buffer) == now or set_bytes(buffer, now))
        if now != then:
            set_bytes(buffer, then)

    def _shorten(self, root: Root) -> None:
        for large in root.large.values():
            if large.has_grown():
                self._write(large.kind, large.value, large.keys, large.values)

    def _write(self, kind: Any, holder: Any, keys: Any, values: Any) -> None:
        key = (id(holder), id(kind))
        now_keys, now_values = kind.held(holder)
        written = Written(kind, holder, now_keys, now_values, key)
        written.start()
        self._undo.append(written.end)
        kind.write(holder, keys, values)

    # --- Hooks of modules ---

    def _hide_hooks(self) -> None:
        """Take off the hooks that were set since the call."""
        for hooks in self._hooks_of_modules():
            kept = [key for key in hooks if key < self._hooks]
            if len(kept) < len(hooks):
                how = CONTAINERS[OrderedDict if type(hooks) is OrderedDict else dict]
                self._write(how, hooks, kept, [hooks[key] for key in kept])

    def _forget_hooks(self) -> None:
        """Remove the hooks that the run set."""
        for hooks in self._hooks_of_modules():
            for key in [key for key in hooks if key >= self._first]:
                del hooks[key]

    def _hooks_of_modules(self) -> list[Any]:
        dicts = [held for root in self._roots for held in root.module_dicts()]
        return [held[n] for held in dicts for n in HOOKS if held.get(n)]


def bytes_of(buffer: Any) -> bytes:
    """Return what a buffer of numbers holds."""
    return buffer.tobytes() if hasattr(buffer, "tobytes") else bytes(buffer)


def set_bytes(buffer: Any, held: bytes) -> None:
    """Have a buffer of numbers hold this, in place."""
    if hasattr(buffer, "dtype"):  # of NumPy
        array = next(cls for cls in type(buffer).__mro__ if cls.__name__ == "ndarray")
        then = array(buffer.shape, buffer.dtype, held)
        array.__setitem__(buffer, ..., then)
    elif isinstance(buffer, bytearray):
        buffer[:] = held
    else:
        del buffer[:]
        buffer.frombytes(held)


_GONE = (
    "remat: what the function was called with is gone, and cannot be made again for "
    "the recompute. Keep it alive until the backward."
)
