"""What a function reads without being passed it: random streams, autocast, settings.

An `Ambient` notes it before the forward, keeps of the streams only those that the
forward moved, and puts it back for a recomputation.

Invariant: after a recomputation every stream and setting stands where it stood before
it. Nothing is kept for a function that drew nothing.
Rejected: asking which devices the arguments live on, as torch.utils.checkpoint does; a
function may draw on any. And an option to leave a stream as it is: a recomputation that
draws another mask than the forward gives wrong gradients, so nobody could use it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from ctypes import string_at
from typing import Any

import torch

from remat import _settings
from remat._compat import default_generators, is_autocast_active
from remat._streams import Stream, host_streams


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Past the dispatcher: a tenth of the cost of torch.equal, unseen by modes and
    # transforms.
    n = len(a)
    return string_at(a.data_ptr(), n) != string_at(b.data_ptr(), n)


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


class _Phase(threading.local):
    depth = 0


_phase = _Phase()


def is_recomputing() -> bool:
    """Say whether this thread is running a function again for its backward."""
    return _phase.depth > 0


class _Recomputing:
    """Marks the phase, and changes nothing else."""

    __slots__ = ()

    def __enter__(self) -> None:
        _phase.depth += 1

    def __exit__(self, *_: object) -> None:
        _phase.depth -= 1


_RECOMPUTING = _Recomputing()


class Ambient:
    """The ambient state of one forward.

    Args:
        generators: those passed to the function, noted like the global streams.
        shared: other streams that the function can reach.
    """

    __slots__ = ("_autocast", "_before", "_moved", "_plain", "_settings")

    def __init__(
        self,
        generators: Sequence[torch.Generator] = (),
        shared: Sequence[Stream] = (),
    ) -> None:
        self._autocast = _autocast()
        self._settings = _settings.read()
        streams = default_generators()
        streams += generators
        self._before = (
            [(g, g.get_state()) for g in streams],
            [(s, s.read()) for s in (*host_streams(), *shared)],
        )

    def forward_done(self) -> None:
        """Keep only the streams that moved since."""
        before, others = self._before
        del self._before
        moved: list[tuple[Any, Any]] = []
        for g, old in before:
            if _differ(old, g.get_state()):
                moved.append((g, old))
        for s, old in others:
            if old != s.read():
                moved.append((s, old))
        self._moved = moved
        if self._autocast:
            # What was cast here is of no use elsewhere, and would stay alive.
            torch.clear_autocast_cache()
        self._plain = not (moved or self._autocast)

    @property
    def drew_globally(self) -> list[str]:
        """The global streams that moved, by device type or name."""
        streams = {id(s) for s in (*default_generators(), *host_streams())}
        moved = [s for s, _ in self._moved if id(s) in streams]
        return sorted(s.name if isinstance(s, Stream) else s.device.type for s in moved)

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
        unchanged = self._settings == _settings.read()
        if unchanged and self._plain and not is_autocast_active():
            return _RECOMPUTING
        return self._restored({id(g) for g in private}, unchanged=unchanged)

    @contextmanager
    def _restored(self, private: set[int], *, unchanged: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_RECOMPUTING)
            if not unchanged:
                stack.enter_context(_settings.settings(self._settings))
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
def _set(states: list[tuple[Any, Any]]) -> Iterator[None]:
    now = [(s, _read(s)) for s, _ in states]
    try:
        for s, state in states:
            _write(s, state)
        yield
    finally:
        for s, state in now:
            _write(s, state)


def _read(stream: Any) -> Any:
    return stream.read() if isinstance(stream, Stream) else stream.get_state()


def _write(stream: Any, state: Any) -> None:
    (stream.write if isinstance(stream, Stream) else stream.set_state)(state)
