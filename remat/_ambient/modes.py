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
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._base.observer import Observer
from remat._base.types import ATOMS
from remat._torch import (
    call_kernel,
    dispatch_mode_count,
    dispatch_modes,
    is_composite,
    modes_between,
    under_dispatch_modes,
)


_Ran = tuple[Any, list[Any], list[Any]]  # an operation, its arguments, its results


class _Outside(Observer):
    """Sees what the user's modes run."""

    unseen = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Ran] | None = None  # only while one is looked at

    @override
    def seen(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if self.calls is not None:
            ran = func, tree_leaves((args, kwargs)), tree_leaves(result)
            self.calls.append(ran)


class _Inside(Observer):
    """Sees what the function runs, and what it gets."""

    unseen = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.outside, self.has_altered = _Outside(), False

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.has_altered:
            return call_kernel(func, *args, **kwargs)
        before, calls = self.outside.calls, list[_Ran]()
        self.outside.calls = calls
        try:
            result = call_kernel(func, *args, **kwargs)
        finally:
            self.outside.calls = before
        asked = func, tree_leaves((args, kwargs)), tree_leaves(result)
        self.has_altered = _is_altered(asked, calls)
        return result


def _is_altered(asked: _Ran, calls: Sequence[_Ran]) -> bool:
    """Say whether modes ran something else, or changed what they ran."""
    func, args, results = asked
    if is_composite(func):  # a counter may count what it is made of
        return False
    same, others = list[_Ran](), list[_Ran]()
    for ran in calls:
        (same if ran[0] is func and _are_same(ran[1], args) else others).append(ran)
    if not any(_are_same(ran[2], results) for ran in same):
        return True
    known = {id(t) for t in (*args, *results) if isinstance(t, Tensor)}
    # To change a result in place, or an argument, is another operation.
    return any(
        id(written) in known
        for other, _, found in others
        if not is_composite(other) and other._schema.is_mutable
        for written in found[:1]
    )


def _are_same(found: Sequence[Any], others: Sequence[Any]) -> bool:
    if len(found) != len(others):
        return False
    pairs = zip(found, others, strict=True)
    return all(a is b or _is_same_constant(a, b) for a, b in pairs)


def _is_same_constant(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) and type(a) is type(b) and repr(a) == repr(b)


def _users_modes() -> list[Any]:
    """Return the user's modes that are entered, outermost first."""
    return [mode for mode in dispatch_modes() if _is_users(mode)]


def are_users_modes() -> bool:
    """Say whether modes of the user's are entered."""
    return dispatch_mode_count() > 0 and bool(_users_modes())


def _is_users(mode: Any) -> bool:
    root = type(mode).__module__.partition(".")[0]
    return root not in ("torch", "remat") and not mode.is_infra_mode()


class _Kept:
    """A mode of a call: itself, if what it holds is constants."""

    __slots__ = ("_held", "_ref", "_state", "name")

    def __init__(self, mode: Any) -> None:
        self._ref, self.name = weakref.ref(mode), type(mode).__qualname__
        self._state = _state_of(mode)
        self._held = mode if ATOMS.issuperset(map(type, self._state.values())) else None

    def is_of(self, mode: Any) -> bool:
        return self._ref() is mode

    @contextmanager
    def entered(self, now: Sequence[Any]) -> Iterator[None]:
        """Run the body under the mode, which holds what it held at the call."""
        mode, is_there = self._held, any(map(self.is_of, now))
        if mode is None and not is_there:
            raise RecomputeError(_LEFT.format(name=self.name))
        if mode is None:
            yield
            return
        state = _state_of(mode)
        _hold(mode, self._state)
        try:
            with under_dispatch_modes(() if is_there else (mode,)):
                yield
        finally:
            _hold(mode, state)


def _state_of(mode: Any) -> dict[str, Any]:
    """Return the attributes of a mode, but for what torch keeps there."""
    held = vars(mode).items()
    return {n: v for n, v in held if not n.endswith("dispatch_mode_flags")}


def _hold(mode: Any, state: dict[str, Any]) -> None:
    held = vars(mode)
    for name in [*_state_of(mode)]:
        del held[name]
    held.update(state)


class ModesAround:
    """The user's modes around one call."""

    __slots__ = ("_inside", "_kept", "_watches")

    def __init__(self) -> None:
        modes = _users_modes()
        self._kept = [*map(_Kept, modes)]
        self._inside: Any = _Inside() if modes else None
        stack = dispatch_modes()
        watching = [k for k, mode in enumerate(stack) if type(mode) is _Inside]
        # A call around looks already.
        if watching and not any(map(_is_users, stack[watching[-1] :])):
            self._inside = stack[watching[-1]]
        self._watches = bool(modes) and self._inside not in stack

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the body, the forward, and note whether these modes change results."""
        if not self._watches:
            yield
            return
        first = _users_modes()[0]
        with modes_between(first, self._inside.outside, self._inside):
            yield

    def run_watched(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call the forward, and note whether these modes change results."""
        with self.watched():
            return fn(*args)

    @property
    def has_altered(self) -> bool:
        """Whether one of these changed what an operation gave."""
        return self._inside is not None and self._inside.has_altered

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a recompute, under those that change results and no others that do."""
        now = _users_modes()
        new = [m for m in now if not any(kept.is_of(m) for kept in self._kept)]
        with ExitStack() as stack:
            around = ModesAround() if new else None
            if around is not None:
                stack.enter_context(around.watched())
            for kept in self._kept if self.has_altered else ():
                stack.enter_context(kept.entered(now))
            result = fn(*args)
        if around is not None and around.has_altered and not self.has_altered:
            raise RecomputeError(_NEW.format(name=type(new[-1]).__qualname__))
        return result


class _NoModes(ModesAround):
    """Of a call that had none."""

    __slots__ = ()

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._inside, self._watches = None, False


NO_MODES = _NoModes()
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
