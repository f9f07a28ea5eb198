"""What a function reads without being passed it: random streams, autocast, device.

An `Ambient` notes it before the forward, keeps only what the forward moved, and puts it
back for a recomputation.

Invariant: after a recomputation every stream stands where it stood before it. Nothing
is kept for a function that drew nothing.
Rejected: asking which devices the arguments live on, as torch.utils.checkpoint does; a
function may draw on any.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from ctypes import string_at

import torch

from remat._compat import current_device, default_generators, is_autocast_active


States = list[tuple[torch.Generator, torch.Tensor]]


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Past the dispatcher: a tenth of the cost of torch.equal, unseen by modes and
    # transforms.
    n = len(a)
    return string_at(a.data_ptr(), n) != string_at(b.data_ptr(), n)


def _autocast() -> dict[str, torch.dtype | None]:
    """Return the dtype that each device type autocasts to, `None` for off."""
    if not is_autocast_active():
        return _OFF
    return {
        d: torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None
        for d in _AUTOCAST_DEVICES
    }


_OFF: dict[str, torch.dtype | None] = {}
_NOTHING: AbstractContextManager[None] = nullcontext()


class Ambient:
    """The ambient state of one forward.

    Args:
        generators: those passed to the function, noted like the global streams.
    """

    __slots__ = ("_autocast", "_before", "_cache", "_device", "_moved", "_plain")

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._autocast = _autocast()
        self._cache = torch.is_autocast_cache_enabled() if self._autocast else True
        self._device = current_device()
        streams = default_generators()
        streams += generators
        self._before = [(g, g.get_state()) for g in streams]

    def forward_done(self) -> None:
        """Keep only the streams that moved since."""
        before = self._before
        self._before: States = []
        self._moved: States = []
        for g, old in before:
            if _differ(old, g.get_state()):
                self._moved.append((g, old))
        self._plain = not (self._moved or self._autocast or self._device)

    @property
    def drew_globally(self) -> list[str]:
        """The device types whose global stream moved."""
        streams = {id(g) for g in default_generators()}
        return sorted({g.device.type for g, _ in self._moved if id(g) in streams})

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
        """Run the body in the noted state, and leave every stream as it was before.

        Args:
            private: generators that the body has clones of, and so does not move.
        """
        if self._plain and not is_autocast_active() and current_device() is None:
            return _NOTHING
        skip = {id(g) for g in private}
        moved = [(g, old) for g, old in self._moved if id(g) not in skip]
        return self._restored(moved, _autocast())

    @contextmanager
    def _restored(
        self, moved: States, now: dict[str, torch.dtype | None]
    ) -> Iterator[None]:
        with ExitStack() as stack:
            if now != self._autocast:
                self._enter_autocast(stack, now)
            if current_device() != self._device:
                stack.enter_context(self._device or torch.device("cpu"))
            stack.enter_context(_set(moved))
            yield

    def _enter_autocast(
        self, stack: ExitStack, now: dict[str, torch.dtype | None]
    ) -> None:
        for device in _AUTOCAST_DEVICES:
            dtype = self._autocast.get(device)
            if dtype != now.get(device):
                stack.enter_context(
                    torch.autocast(
                        device, dtype, dtype is not None, cache_enabled=self._cache
                    )
                )


@contextmanager
def _set(states: States) -> Iterator[None]:
    now = [(g, g.get_state()) for g, _ in states]
    try:
        for g, state in states:
            g.set_state(state)
        yield
    finally:
        for g, state in now:
            g.set_state(state)
