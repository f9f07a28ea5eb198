"""Which calls a thread is inside of, and what they ask of what runs in them.

Invariant: whoever sets something here puts it back, also after an error.
Rejected: to look at the stack. It does not tell which call a frame belongs to.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor


Observe: TypeAlias = Callable[[int, Tensor | None], None]


class Context:
    """The calls that one thread is inside of."""

    __slots__ = (
        *("after", "block_pack", "calls", "functions", "hooks_apart", "inside"),
        *("listeners", "modes", "nested_choices", "only_our_hooks", "policy"),
        *("recomputing", "regions", "reporter", "rules", "runs", "step_plans", "tape"),
    )

    def __init__(self) -> None:
        self.policy: Any = None  # of these calls, joined
        self.calls: Any = None  # of modules, in the innermost one, if a policy asks
        self.modes = 0  # of remat, that see the operations of the thread
        self.functions = 0  # calls that run as Functions of remat
        self.step_plans = 0  # plans for whole steps that are followed
        self.recomputing: tuple[Any, ...] = ()  # calls, from the outermost in
        # Of the calls within the innermost one.
        self.nested_choices: NestedChoices | None = None
        # Of each call that runs, from the outermost in: what its forward kept of calls
        # within (`remat.rules`), whether it runs again, how many of these it has met,
        # and whether the graph of its forward is dropped. A list costs no call.
        self.regions: tuple[list[Any], ...] = ()
        # Functions with rules whose `fwd` runs in forward mode.
        self.rules: tuple[Any, ...] = ()
        # What follows the run for a report: how a rematerialized function runs, by
        # `asked`; what is shown the tensors that a call saves, by `observe`; and the
        # inputs of a call under torch.func, by `entered`.
        self.reporter: Any = None
        # For a report: the calls whose forwards run, from the outermost in.
        self.inside: tuple[Any, ...] = ()
        # While a graph is made: the cotangents that a recompute is to read first.
        self.after: tuple[Any, ...] = ()
        self.tape: Any = None  # and the tape of the innermost call
        self.listeners: list[Any] = []  # told of the names that `checkpoint_name` gives
        # Runs whose graphs are being differentiated; None where no graph is.
        self.runs: list[Any] | None = None
        # Whether a level around that of a call differentiates. The hooks that its
        # function sets are in the graph of its own level, so its next recompute sets
        # them where nobody pulls.
        self.hooks_apart = False
        # Whether all hooks for saved tensors here are of calls of remat. Those leave
        # alone what torch.func saves at levels inside the call.
        self.only_our_hooks = False
        # The hook of `remat.scope` at the bottom of the stack of hooks; None where no
        # value of a block is left.
        self.block_pack: Callable[[Tensor], Any] | None = None

    def is_in_call(self) -> bool:
        """Say whether a call runs, for the first time or again."""
        runs = self.functions > 0 or self.nested_choices is not None
        return runs or bool(self.recomputing)


class _ThreadContext(threading.local):
    def __init__(self) -> None:
        self.context = Context()


_THREAD = _ThreadContext()


def here() -> Context:
    """Return what the thread that asks is in the middle of."""
    return _THREAD.context


class NestedChoices:
    """Which plans the calls within a call chose to follow, in order.

    They do the same when the call around is recomputed (`again`).
    """

    __slots__ = ("__weakref__", "_made", "_next", "again")

    def __init__(self, made: list[Any], *, again: bool = False) -> None:
        self._made, self._next, self.again = made, 0, again

    def next(self) -> Any:
        """Return what the next call within chose in the forward, or None."""
        k = self._next
        self._next = k + 1
        return self._made[k] if k < len(self._made) else None

    def reserve(self) -> int:
        """Return the index of the next call within."""
        self._made.append(None)
        return len(self._made) - 1

    def note(self, index: int, choice: Any) -> None:
        self._made[index] = choice


class EnteredAgain(BaseException):
    """Ends a recompute that differentiates what a call within was kept as."""


def is_recomputing() -> bool:
    """Say whether this thread runs a function again for a backward.

    Code inside a rematerialized function asks this, to log or count once per call.

    Returns:
        True in a recompute; False in a forward and outside of all calls.

    Example:
        >>> import torch
        >>> from remat import is_recomputing, remat
        >>> @remat
        ... def layer(x):
        ...     if not is_recomputing():
        ...         print("mean", x.mean().item())
        ...     return x.sin().sin()
        >>> layer(torch.ones(3, requires_grad=True)).sum().backward()
        mean 1.0
    """
    return bool(here().recomputing)


def is_under_mode() -> bool:
    """Say whether one of remat's modes sees the operations of this thread."""
    return here().modes > 0


class within:  # noqa: N801
    """A context of a call's policy, and of whether a mode sees its operations."""

    __slots__ = ("_before", "_context", "_policy", "_under_mode")

    def __init__(self, policy: Any, *, under_mode: bool) -> None:
        self._policy, self._under_mode = policy, under_mode

    def __enter__(self) -> None:
        self._context = context = here()
        self._before, context.policy = context.policy, self._policy
        context.modes += self._under_mode

    def __exit__(self, *_: object) -> None:
        self._context.policy = self._before
        self._context.modes -= self._under_mode


class differentiated:  # noqa: N801
    """A context in which the graphs of runs are differentiated; then the runs end.

    Hooks in these graphs call functions, which find what those runs found.
    """

    __slots__ = ("_before", "_context")

    @classmethod
    def call(cls, fn: Callable[..., Any], *args: Any) -> Any:
        with cls():
            return fn(*args)

    def __enter__(self) -> None:
        self._context = context = here()
        self._before = context.runs
        runs: list[Any] = []
        context.runs = runs

    def __exit__(self, *_: object) -> None:
        runs, self._context.runs = self._context.runs, self._before
        while runs:
            runs.pop().__exit__()
