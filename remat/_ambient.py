"""What a function reads without being passed it: random streams, autocast, settings.

An `Ambient` notes it before the forward, keeps of the streams only those that the
forward moved, and puts it back for a recomputation.

Invariant: after a recomputation every stream and setting stands where it stood before
it. Nothing is kept for a function that drew nothing.
Rejected: asking which devices the arguments live on, as torch.utils.checkpoint does; a
function may draw on any. And an option to leave a stream as it is: a recomputation that
draws another mask than the forward gives wrong gradients, so nobody could use it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from ctypes import string_at
from typing import Any

import torch

from remat._compat import (
    device_generators,
    is_autocast_active,
    read_settings,
    write_settings,
)
from remat._streams import Stream, global_streams


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def _autocast() -> dict[str, Any]:
    """Return the dtype that each device type autocasts to, `None` for off."""
    if not is_autocast_active():
        return _OFF
    on: dict[str, Any] = {
        d: torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None
        for d in _AUTOCAST_DEVICES
    }
    on["cache"] = torch.is_autocast_cache_enabled()
    return on


_OFF: dict[str, Any] = {}


_NOTHING: AbstractContextManager[None] = nullcontext()


class Ambient:
    """The ambient state of one forward.

    Args:
        generators: those passed to the function, noted like the global streams.
        shared: other streams that the function can reach.
    """

    __slots__ = ("_autocast", "_before", "_global", "_moved", "_plain", "_settings")

    def __init__(
        self,
        generators: Sequence[torch.Generator] = (),
        shared: Sequence[Stream] = (),
    ) -> None:
        self._autocast = _autocast()
        self._settings = read_settings()
        self._global = streams = global_streams()
        others = (*device_generators(), *generators, *shared)
        self._before = streams.read(), [(s, _read(s)) for s in others]

    def forward_done(self) -> None:
        """Keep only the streams that moved since."""
        before, others = self._before
        del self._before
        moved: list[tuple[Any, Any]] = []
        if before != (now := self._global.read()):
            each = zip(self._global.streams, before, now, strict=True)
            moved += [(s, old) for s, old, new in each if old != new]
        for s, old in others:
            if _differ(old, _read(s)):
                moved.append((s, old))
        self._moved = moved
        if self._autocast:
            # What was cast here is of no use elsewhere, and would stay alive.
            torch.clear_autocast_cache()
        self._plain = not (moved or self._autocast)

    def private(self, generators: Sequence[torch.Generator]) -> list[torch.Generator]:
        """Return a clone of each generator argument, set as it was at the call."""
        states = {id(g): state for g, state in self._moved}
        clones = []
        for g in generators:
            clone = torch.Generator(g.device)
            clone.set_state(states.get(id(g), g.get_state()))
            clones.append(clone)
        return clones

    def restored(
        self, private: Sequence[torch.Generator] = ()
    ) -> AbstractContextManager[None]:
        """Run the body in the noted state, and leave everything as it was before.

        Args:
            private: generators that the body has clones of, and so does not move.
        """
        unchanged = self._settings == read_settings()
        if unchanged and self._plain and not is_autocast_active():
            return _NOTHING
        return self._restored({id(g) for g in private}, unchanged=unchanged)

    @contextmanager
    def _restored(self, private: set[int], *, unchanged: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if not unchanged:
                stack.enter_context(_under(self._settings))
            self._enter_autocast(stack)
            moved = [(s, state) for s, state in self._moved if id(s) not in private]
            stack.enter_context(_set(moved))
            yield
            if self._autocast:
                torch.clear_autocast_cache()

    def _enter_autocast(self, stack: ExitStack) -> None:
        now, then = _autocast(), self._autocast
        for device in _AUTOCAST_DEVICES if now != then else ():
            dtype, cache = then.get(device), then.get("cache", True)
            if dtype != now.get(device) or (dtype and cache != now.get("cache")):
                on = dtype is not None
                context = torch.autocast(device, dtype, on, cache_enabled=cache)
                stack.enter_context(context)


@contextmanager
def _under(settings: tuple[Any, ...]) -> Iterator[None]:
    now = read_settings()
    write_settings(settings)
    try:
        yield
    finally:
        write_settings(now)


@contextmanager
def _set(states: list[tuple[Any, Any]]) -> Iterator[None]:
    now = [(s, _read(s)) for s, _ in states]
    try:
        for s, state in states:
            _write(s, state)
        yield
    finally:
        for s, state in now:
            _write(s, state)


def _differ(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return a != b
    # Past the dispatcher: unseen by modes and transforms.
    n = a.numel()
    return string_at(a.data_ptr(), n) != string_at(b.data_ptr(), n)


def _read(stream: Any) -> Any:
    return stream.read() if isinstance(stream, Stream) else stream.get_state()


def _write(stream: Any, state: Any) -> None:
    (stream.write if isinstance(stream, Stream) else stream.set_state)(state)
