"""A policy by position: what a plan for a whole step saves, in the order of the asks.

Invariant: an answer depends on the operations so far, not on sizes. Where they are not
those of any course, all that follows is recomputed, and a warning says so once.
Rejected: to look for the place at which the operations agree again. Two layers look
alike, and what one of them saves may be too much in the other.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import override

from remat._base.op import Op
from remat._base.source import user_line
from remat.policies import Decision, Policy


class Course(NamedTuple):
    """The operations of one kind of forward, by name, and which results are saved."""

    names: tuple[str, ...]
    saves: tuple[bool, ...]


class ByPosition(Policy):
    """Answers as a plan says, operation by operation.

    After the last one it starts again: a `with` may hold several forwards.
    """

    def __init__(self, label: str, courses: Sequence[Course]) -> None:
        self._label, self._all = label, [c for c in courses if c.names]
        self.restart()

    def restart(self) -> None:
        """Begin with the first operation."""
        self._left, self._at = [*self._all], 0
        self._is_lost = False

    @property
    @override
    def is_data(self) -> bool:
        return False

    @override
    def decide(self, op: Op) -> Decision:
        """Return what the plan says about the next operation."""
        # A result has names where a scope asks again, after it was not saved.
        if self._is_lost or op.names:
            return Decision.RECOMPUTE
        name = str(op.func)
        left = [s for s in self._left if s.names[self._at] == name]
        if not left:
            return self._lose(name)
        saves = left[0].saves[self._at]
        self._at += 1
        self._left = [s for s in left if len(s.names) > self._at]
        if not self._left:
            self.restart()
        return Decision.SAVE if saves else Decision.RECOMPUTE

    def _lose(self, name: str) -> Decision:
        if self._at == 0:  # outside of what was planned
            return Decision.SAVE
        self._is_lost = True
        expected = " or ".join(dict.fromkeys(s.names[self._at] for s in self._left))
        warnings.warn(
            _OTHER.format(
                label=self._label, name=name, where=user_line(), expected=expected
            ),
            stacklevel=2,
        )
        return Decision.RECOMPUTE


_OTHER = (
    "remat: the plan for {label} expects {expected}, but {name} runs at {where}. What "
    "follows in this forward is recomputed as far as it can be. Call remat.fit again "
    "for what runs now."
)
