"""What a thread is inside of: which calls are around it, and what they do at present.

Invariant: whoever sets something here puts it back, also after an exception.
Rejected: looking at the stack. A frame does not tell which call it is of.
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
        inside: the calls whose forwards run, the outermost first; only while a report
            examines.
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
    """What the calls within a call decided, in order.

    They have to do the same in a recompute: it determines what the call around saves.

    Args:
        made: the decisions; a forward adds to them.
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
    """A context inside of a call with a policy, which a mode may follow."""

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
    """Empty the variables of functions that nobody calls any more.

    A function that refers to itself would wait for the garbage collector.
    """
    for cell in cells:
        del cell.cell_contents


class differentiated:  # noqa: N801
    """A context in which graphs of runs are differentiated, which calls their hooks.

    Functions that were made for a run keep their variables until it ends. They keep
    them for good if the derivative may be differentiated again.
    """

    __slots__ = ("_before", "_context")

    def __enter__(self) -> None:
        self._context = context = here()
        self._before, context.cells = context.cells, list[Any]()

    def __exit__(self, *_: object) -> None:
        cells, self._context.cells = self._context.cells, self._before
        if cells and not torch.is_grad_enabled():
            empty(cells)
