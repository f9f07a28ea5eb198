"""The user's modes for operations around a call, for its recompute.

A counter or a log sees what runs while it is entered, also what is recomputed. A mode
that changes results is part of the forward: a recompute without it would be wrong, and
so would be one under a mode that the forward did not have. So where there are modes of
the user's, each operation is looked at before and after they saw it.

Invariant: no tensor is held, and of modes only those that hold constants alone. A call
without modes of the user's pays nothing.
Rejected: to walk what modes hold, as for functions. A log may hold all that was ever
computed, which would be inputs of each call.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._base.operators import Observer
from remat._base.types import ATOMS
from remat._torch.modes import (
    call_kernel,
    dispatch_mode_count,
    dispatch_modes,
    modes_between,
    under_dispatch_modes,
)
from remat._torch.operators import is_composite


_Ran = tuple[Any, list[Any]]  # an operation, its arguments and then its results


class _Outside(Observer):
    """Sees what the user's modes run, while the function runs an operation."""

    unseen = frozenset()
    calls: list[_Ran] | None = None

    @override
    def seen(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if self.calls is not None:
            self.calls.append((func, tree_leaves((args, kwargs, result))))


class _Inside(Observer):
    """Sees what the function runs, and whether modes gave it something else."""

    unseen = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.outside, self.has_altered = _Outside(), False

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.has_altered or is_composite(func):
            # A mode may look at each of those that an operation is made of.
            return call_kernel(func, *args, **kwargs)
        before = self.outside.calls
        calls: list[_Ran] = []
        self.outside.calls = calls
        try:
            result = call_kernel(func, *args, **kwargs)
        finally:
            self.outside.calls = before
        leaves = tree_leaves((args, kwargs, result))
        ours, known = (func, [*map(_key, leaves)]), {id(t) for t in leaves}
        others = [c for c in calls if (c[0], [*map(_key, c[1])]) != ours]
        self.has_altered = len(others) == len(calls) or any(
            id(held[-1]) in known  # to change a result in place is another operation
            for op, held in others
            if held and not is_composite(op) and op._schema.is_mutable
        )
        return result


def _key(leaf: Any) -> Any:
    return id(leaf) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))


class _Kept:
    """A mode of a call, with what it held: itself, if that is constants."""

    __slots__ = ("_held", "_mode", "_name", "ref")

    def __init__(self, mode: Any) -> None:
        self.ref, self._name = weakref.ref(mode), type(mode).__qualname__
        self._held = _held_by(mode)
        self._mode = mode if ATOMS.issuperset(map(type, self._held.values())) else None

    @contextmanager
    def entered(self, *, is_there: bool) -> Iterator[None]:
        """Run the body under the mode, which holds what it held at the call."""
        mode = self._mode
        if mode is None and not is_there:
            raise RecomputeError(_LEFT.format(name=self._name))
        if mode is None:
            yield
            return
        before = _held_by(mode)
        vars(mode).update(self._held)
        try:
            with under_dispatch_modes(() if is_there else (mode,)):
                yield
        finally:
            for name in _held_by(mode):
                delattr(mode, name)
            vars(mode).update(before)


def _held_by(mode: Any) -> dict[str, Any]:
    """Return the attributes of a mode, but for what torch keeps there."""
    held = vars(mode).items()
    return {n: v for n, v in held if not n.endswith("dispatch_mode_flags")}


def _users_modes() -> list[Any]:
    """Return the user's modes that are entered, outermost first."""
    return [*filter(_is_users, dispatch_modes())]


def are_users_modes() -> bool:
    return dispatch_mode_count() > 0 and bool(_users_modes())


def _is_users(mode: Any) -> bool:
    root = type(mode).__module__.partition(".")[0]
    return root not in ("torch", "remat") and not mode.is_infra_mode()


class ModesAround:
    """The user's modes around one call, and whether they changed what it computed."""

    __slots__ = "_inside", "_kept"

    def __init__(self, modes: Sequence[Any]) -> None:
        self._kept, self._inside = [*map(_Kept, modes)], _Inside()

    @contextmanager
    def watched(self) -> Iterator[Self]:
        """Run the body, a forward, and note what they change."""
        modes, sees = _users_modes(), (self._inside.outside, self._inside)
        with modes_between(modes[0], *sees) if modes else nullcontext():
            yield self

    def watched_with(self, others: "ModesAround") -> "ModesAround":
        """Return these, of which others were watched: those of a whole chain."""
        new = ModesAround(())
        new._kept, new._inside = self._kept, others._inside
        return new

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a recompute, under those that change results and no others that do."""
        now, ours = _users_modes(), {id(kept.ref()) for kept in self._kept}
        new = [mode for mode in now if id(mode) not in ours]
        has_altered = self._inside.has_altered
        with ExitStack() as stack:
            around = stack.enter_context(modes_around().watched()) if new else NO_MODES
            for kept in self._kept if has_altered else ():
                is_there = any(kept.ref() is mode for mode in now)
                stack.enter_context(kept.entered(is_there=is_there))
            result = fn(*args)
        if around._inside.has_altered and not has_altered:
            raise RecomputeError(_NEW.format(name=type(new[-1]).__qualname__))
        return result


def modes_around() -> ModesAround:
    """Return the user's modes that are entered."""
    modes = _users_modes()
    return ModesAround(modes) if modes else NO_MODES


NO_MODES = ModesAround(())
_LEFT = (
    "remat: the forward ran under `{name}`, or modes around it, which changes results. "
    "The backward runs without this TorchDispatchMode, and it holds more than "
    "constants, so it is not entered again. Run the backward under it, too, or enter "
    "it inside the function."
)
_NEW = (
    "remat: the backward runs under `{name}`, a TorchDispatchMode that changes "
    "results, and the forward did not. Its recompute would be another function. Enter "
    "the mode around both, or around neither."
)
