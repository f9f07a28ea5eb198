"""The state that a function reads without being passed it: random streams, autocast, the default device.

`Ambient.now()` notes it before the forward, `forward_done` keeps only what the forward moved, and `restored()` puts it back for a
recomputation and takes it away again.

Invariant: after a recomputation every stream stands where it stood before it. Nothing is kept for a function that drew nothing.
Rejected: asking which devices the arguments live on, as torch.utils.checkpoint does; a function may draw on any.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from remat._compat import current_device, is_autocast_active


States = list[tuple[torch.Generator, torch.Tensor]]


def _cpu() -> Sequence[torch.Generator]:
    return (torch.default_generator,)


def _cuda() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def _xpu() -> Sequence[torch.Generator]:
    return torch.xpu.default_generators if torch.xpu.is_initialized() else ()


def _mps() -> Sequence[torch.Generator]:
    return (torch.mps._get_default_mps_generator(),) if _HAS_MPS else ()


_HAS_MPS = torch.backends.mps.is_available()
# One entry a device type: its default generators, once it is initialized.
_STREAMS: tuple[Callable[[], Sequence[torch.Generator]], ...] = (_cpu, _cuda, _xpu, _mps)
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


def _states(generators: Sequence[torch.Generator] = ()) -> States:
    streams = [g for stream in _STREAMS for g in stream()]
    return [(g, g.get_state()) for g in (*streams, *generators)]


def _autocast() -> dict[str, torch.dtype | None]:
    """Return the dtype that each device type autocasts to, `None` for off."""
    if not is_autocast_active():
        return {}
    return {
        d: torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None
        for d in _AUTOCAST_DEVICES
    }


@dataclass(slots=True)
class Ambient:
    """The ambient state of one forward."""

    autocast: dict[str, torch.dtype | None]
    cache: bool
    device: torch.device | None
    before: States
    moved: States = field(default_factory=list)

    @classmethod
    def now(cls, generators: Sequence[torch.Generator] = ()) -> "Ambient":
        """Note the state of this moment, that of the `generators` passed to the function included."""
        autocast = _autocast()
        cache = torch.is_autocast_cache_enabled() if autocast else True
        return cls(autocast, cache, current_device(), _states(generators))

    def forward_done(self) -> None:
        """Keep only the streams that moved since."""
        before, self.before = self.before, []
        self.moved = [
            (g, old) for g, old in before if not torch.equal(old, g.get_state())
        ]

    @property
    def drew_globally(self) -> list[str]:
        """The device types whose global stream moved."""
        streams = {id(g) for stream in _STREAMS for g in stream()}
        return sorted({g.device.type for g, _ in self.moved if id(g) in streams})

    def private(self, generators: Sequence[torch.Generator]) -> list[torch.Generator]:
        """Return a clone of each generator argument, set as it was at the call."""
        states = {id(g): state for g, state in self.moved}
        clones = []
        for g in generators:
            clone = torch.Generator(g.device)
            clone.set_state(states.get(id(g), g.get_state()))
            clones.append(clone)
        return clones

    @contextmanager
    def restored(self, private: Sequence[torch.Generator] = ()) -> Iterator[None]:
        """Run the body in the noted state, and leave every stream as it was before.

        Args:
            private: generators that the body has clones of, and so does not move.
        """
        now = _autocast()
        skip = {id(g) for g in private}
        moved = [(g, old) for g, old in self.moved if id(g) not in skip]
        with ExitStack() as stack:
            if now != self.autocast:
                self._enter_autocast(stack, now)
            if current_device() != self.device:
                stack.enter_context(self.device or torch.device("cpu"))
            if moved:
                stack.enter_context(_set(moved))
            yield

    def _enter_autocast(
        self, stack: ExitStack, now: dict[str, torch.dtype | None]
    ) -> None:
        for device in _AUTOCAST_DEVICES:
            dtype = self.autocast.get(device)
            if dtype != now.get(device):
                stack.enter_context(
                    torch.autocast(
                        device, dtype, dtype is not None, cache_enabled=self.cache
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
