"""What a thread is in the middle of: which calls run around, and for what.

Invariant: what is set here is put back by whoever set it, also after an exception.
Rejected: to look at the stack. It does not tell of which call a frame is.
"""

import threading
from collections.abc import Iterable
from typing import Any

import torch


class Context:
    """The calls that one thread is in.

    Attributes:
        policy: of the calls around, joined.
        followed: how many modes of ours follow what the thread does.
        recomputing: how many recomputes it is in.
        decisions: of the calls within the innermost one, in order.
        examining: what a report notes of the calls within one, None where none does.
        listeners: who is told of the names that `checkpoint_name` gives.
        inside: the calls that run their forwards, from the outermost in; kept only for
            such a report.
        cells: the variables of functions that were made for runs whose graphs are being
            differentiated; None where none is.
        saves: whether only calls of remat are asked what is saved here: then what is
            saved by torch.func inside is no business of theirs.
    """

    __slots__ = (
        *("cells", "decisions", "examining", "followed", "inside", "listeners"),
        *("policy", "recomputing", "saves"),
    )

    def __init__(self) -> None:
        self.policy: Any = None
        self.followed = self.recomputing = 0
        self.decisions: Decisions | None = None
        self.examining: Any = None
        self.inside: tuple[Any, ...] = ()
        self.listeners: list[Any] = []
        self.cells: list[Any] | None = None
        self.saves = False


class _Threads(threading.local):
    def __init__(self) -> None:
        self.context = Context()


_THREADS = _Threads()


def here() -> Context:
    """Return what the thread that asks is in the middle of."""
    return _THREADS.context


class Decisions:
    """What the calls within a call decided, which they are to do in a recompute too.

    What they hand to the call around them to be saved depends on it.

    Args:
        made: in order; filled in a forward.
        again: whether the call around is recomputed.
    """

    __slots__ = ("_made", "_next", "again")

    def __init__(self, made: list[Any], *, again: bool) -> None:
        self._made, self._next, self.again = made, 0, again

    def next(self) -> Any:
        """Return what the next call within had decided; None for nothing."""
        k = self._next
        self._next = k + 1
        return self._made[k] if k < len(self._made) else None

    def reserve(self) -> int:
        """Return the number of the next call within."""
        self._made.append(None)
        return len(self._made) - 1

    def note(self, number: int, decision: Any) -> None:
        """Note what a call within decided."""
        self._made[number] = decision


def is_recomputing() -> bool:
    """Say whether this thread runs a function again for a backward."""
    return here().recomputing > 0


def is_followed() -> bool:
    """Say whether a mode of ours follows what this thread does."""
    return here().followed > 0


class within:  # noqa: N801
    """A context that is part of a call with a policy, followed by a mode or not."""

    __slots__ = ("_before", "_context", "_followed", "_policy")

    def __init__(self, policy: Any, *, followed: bool) -> None:
        self._policy, self._followed = policy, followed

    def __enter__(self) -> None:
        self._context = context = here()
        self._before, context.policy = context.policy, self._policy
        context.followed += self._followed

    def __exit__(self, *_: object) -> None:
        self._context.policy = self._before
        self._context.followed -= self._followed


def empty(cells: Iterable[Any]) -> None:
    """Empty variables, for functions that nobody calls any more.

    Those that refer to themselves would wait for the garbage collector.
    """
    for cell in cells:
        del cell.cell_contents


class differentiated:  # noqa: N801
    """A context in which the graphs of runs are differentiated: their hooks are called.

    If a graph of that is recorded they may be called yet again, later.
    """

    __slots__ = ("_before", "_context")

    def __enter__(self) -> None:
        self._context = context = here()
        self._before, context.cells = context.cells, list[Any]()

    def __exit__(self, *_: object) -> None:
        cells, self._context.cells = self._context.cells, self._before
        if cells and not torch.is_grad_enabled():
            empty(cells)
