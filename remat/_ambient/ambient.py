"""What a function reads without being passed it: random streams, autocast, settings.

An `Ambient` notes it before the forward, keeps the states of those streams that the
forward moved, and puts everything back for a recompute.

Invariant: after a recompute every stream and setting is as it was before it. Nothing is
kept for a function that drew nothing.
Rejected: asking which devices the arguments are on, as torch.utils.checkpoint does. A
function may draw on any device. Rejected: an option to leave a stream as it is. A
recompute that draws another mask than the forward gives wrong gradients.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from remat._ambient.streams import (
    Stream,
    device_streams,
    global_streams,
    moved_since,
    stream_of,
)
from remat._base.warned import watch_warnings, without_errors
from remat._torch.autograd import without_hooks
from remat._torch.levels import below_all_levels
from remat._torch.process import (
    autocast_depth,
    device_generators,
    is_autocast_active,
    new_cast,
    read_settings,
    write_settings,
)


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
_OFF = False, None, True  # not on, to no dtype, casts cached


def _nothing() -> None: ...


def _autocast() -> dict[str, Any]:
    """Return whether and to what each device type autocasts; empty where none does."""
    if not is_autocast_active():
        return {}
    cache = torch.is_autocast_cache_enabled()
    return {
        d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache)
        for d in _AUTOCAST_DEVICES
    }


# Returns an object until the cache of casts is emptied, and then None.
_cast: Callable[[], object] = _nothing


def _casts_here() -> Callable[[], object]:
    """Return what returns something while the casts of this region are there."""
    global _cast
    if not autocast_depth():
        return _nothing
    if _cast() is None:
        _cast = below_all_levels(without_hooks, new_cast)
    return _cast


# What restores nothing, and need not be entered.
NOTHING: AbstractContextManager[None] = nullcontext()


class Ambient:
    """The ambient state of one forward.

    If it shares casts, a recompute in the same region of autocast finds what the region
    has cast, as the forward did, and leaves it there. A weight may have been changed
    since it was cast. Otherwise a recompute casts again, and its casts are dropped.
    """

    __slots__ = (
        *("_always", "_autocast", "_before", "_casts", "_filters", "_global"),
        *("_moved", "_plain", "_settings"),
    )

    def __init__(
        self,
        streams: Sequence[Stream] = (),
        always: bool = False,
        *,
        shares_casts: bool = False,
    ) -> None:
        self._autocast = _autocast()
        self._casts = _casts_here() if shares_casts and self._autocast else None
        self._always = always
        self._settings = read_settings()
        self._filters = warnings.filters  # `catch_warnings` puts another list there
        self._global = ours = global_streams()
        others: list[tuple[Any, Any]] = []
        if device_generators() or streams:  # mostly there are none
            others += [(s, s.read()) for s in (*device_streams(), *streams)]
        # The states at the call; None once the forward has ended.
        self._before: tuple[Any, Any] | None = ours.read(), others

    @property
    def key(self) -> tuple[Any, ...]:
        """What of it makes a forward run other operations."""
        return (*self._autocast.items(),)

    def forward_done(self, *, keeps_casts: bool = False) -> None:
        """Keep only the streams that moved since."""
        assert self._before is not None
        before, others = self._before
        self._before = None
        always, now = self._always, self._global.read()
        moved: list[tuple[Any, Any]] = []
        self._moved = moved
        if always or before != now:
            each = zip(self._global.streams, before, now, strict=True)
            moved += [(s, old) for s, old, new in each if always or old != new]
        if others:
            moved += others if always else moved_since(others)
        for generator in device_generators():
            if all(s.of != id(generator) for s, _ in others):  # the forward made it
                moved.append(_at_its_start(generator))
        self._plain = not (always or moved or self._autocast)
        if not keeps_casts:
            self.forget_casts()

    def forget_casts(self) -> None:
        """Free what autocast cast here, which is of no use elsewhere."""
        if self._autocast:
            torch.clear_autocast_cache()

    @property
    def moved(self) -> Sequence[tuple[Any, Any]]:
        """The streams that the forward drew from, and their states before."""
        return getattr(self, "_moved", ())

    def casts_anew(self) -> bool:
        """Say whether a run is not to find what autocast has cast, but could."""
        casts = self._casts
        return casts is not None and casts() is None and autocast_depth() > 0

    def restored(self) -> AbstractContextManager[None]:
        """Run the body in the noted state, and leave everything as it was before."""
        watch_warnings()
        if self._before is not None:  # the forward still runs: what moved is not noted
            before, others = self._before
            return self._restored(
                [*zip(self._global.streams, before, strict=True), *others]
            )
        has_filters = self._filters is warnings.filters
        unchanged = has_filters and self._settings == read_settings()
        if unchanged and self._plain and not autocast_depth():
            return NOTHING
        return self._restored(self._moved)

    def streams_now(self, others: Sequence[Stream] = ()) -> tuple[Any, Any, Any]:
        """Return where torch's global streams are, and others, for `put_back`.

        Python's and NumPy's are left: other threads, which load data, draw from them.
        """
        ours = self._global.streams[0]
        states: Sequence[Any] = ()
        if device_generators() or others:
            states = [(s, s.read()) for s in (*device_streams(), *others)]
        return ours, ours.read(), states

    @contextmanager
    def _restored(self, states: list[tuple[Any, Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(write_settings, read_settings())
            write_settings(self._settings)
            if self._filters is not warnings.filters:
                stack.enter_context(without_errors())
            self._enter_autocast(stack)
            for s, state in states:
                stack.callback(s.write, s.read())
                s.write(state)
            yield

    def _enter_autocast(self, stack: ExitStack) -> None:
        now, then, is_inside = _autocast(), self._autocast, autocast_depth() > 0
        for device in _AUTOCAST_DEVICES if now != then else ():
            have, want = now.get(device, _OFF), then.get(device, _OFF)
            if want != have and (want[0] or have[0]):
                on, dtype, cache = want
                context = torch.autocast(device, dtype, on, cache_enabled=cache)
                stack.enter_context(context)
        if self._casts is None or not is_inside:
            torch.clear_autocast_cache()
            # This runs before autocast ends, which may be the user's own.
            stack.callback(torch.clear_autocast_cache)
        elif self._casts() is None:
            # What is cast here is of other code, which may have changed weights since.
            cached = torch.is_autocast_cache_enabled()
            stack.callback(torch.set_autocast_cache_enabled, cached)
            torch.set_autocast_cache_enabled(False)


def noted(streams: Sequence[Stream], earlier: Ambient | None = None) -> Ambient:
    """Note the state of all streams in the middle of a forward.

    If nothing was drawn since `earlier`, and no stream is new, that is returned.
    """
    if earlier is not None and not moved_since(earlier.moved):
        if not streams:
            return earlier
        known = {stream.of for stream, _ in earlier.moved}
        if known.issuperset(stream.of for stream in streams):
            return earlier
    ambient = Ambient(streams, always=True)
    ambient.forward_done(keeps_casts=True)
    return ambient


def put_back(noted: tuple[Any, Any, Any]) -> None:
    """Have the streams be where they were, if some were drawn from."""
    ours, before, states = noted
    if ours.read() != before:
        ours.write(before)
    for stream, state in moved_since(states) if states else ():
        stream.write(state)


def _at_its_start(generator: torch.Generator) -> tuple[Stream, Any]:
    """Return the stream of a generator, and the state in which it was made."""
    fresh = torch.Generator(generator.device)
    fresh.manual_seed(generator.initial_seed())
    return stream_of(generator), stream_of(fresh).read()
