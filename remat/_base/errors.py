"""What a user reads of an error: its class, names in its message, its traceback.

All that remat raises itself are `RematError`, which is a `RuntimeError`.

Invariant: in a traceback the frames of the user and of torch stay, in order. With
`REMAT_FULL_TRACEBACK=1` in the environment all stay.
Rejected: an error of its own for `remat.compat`. Code that catches torch's
`CheckpointError` would have to know which of the two recomputes. Rejected: an error
raised anew, which would lose its cause, its notes and its identity.
"""

import contextlib
import os
from types import TracebackType

from torch.utils.checkpoint import CheckpointError
from typing_extensions import override


class RematError(RuntimeError):
    """Base class of the errors that remat raises itself."""


class RecomputeError(RematError, CheckpointError):
    """The recompute did something other than the forward did.

    It is a `torch.utils.checkpoint.CheckpointError`, too.
    """


class MutationError(RematError):
    """A tensor or an array that the recompute reads was changed in place."""


class CaptureError(RematError):
    """The function uses outside state that cannot be made an input of the call."""


class BudgetError(RematError):
    """No plan stays under a budget.

    Attributes:
        least: the least number of bytes for which a plan was found.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message, least)
        self.least = least

    @override
    def __str__(self) -> str:
        return str(self.args[0])


class OffloadError(RematError):
    """A residual could not be offloaded: there is no room, or no way."""


class RandomnessError(RematError):
    """A draw was refused: from a global stream, where only keys may be drawn from."""


class KeyReuseError(RandomnessError):
    """A key was consumed twice, so that two draws are the same."""


# Tracebacks name them as users import them.
for _error in (RematError, *RematError.__subclasses__(), KeyReuseError):
    _error.__module__ = "remat"


def missing(package: str) -> str:
    """Say that a package is not installed, and what to run.

    >>> missing("scipy")
    'scipy is not installed (pip install scipy)'
    """
    return f"{package} is not installed (pip install {package})"


# --- What messages call a function ---


class Label(str):
    """Text that names a function, whose `name` it knows."""

    __slots__ = ("name",)
    name: str

    @override
    def __new__(cls, text: str, name: str) -> "Label":  # pyrefly: ignore[bad-override]
        label = super().__new__(cls, text)
        label.name = name
        return label

    @override
    def __getnewargs__(self) -> tuple[str, str]:  # pyrefly: ignore[bad-override]
        return str(self), self.name


def label_of(name: str, where: str = "", was: str = "rematerialized") -> Label:
    """Return what to call a function, and where what was done to it."""
    text = f"`{name}` ({was} at {where})" if where else f"`{name}`"
    return Label(text, name)


def name_in(label: str) -> str:
    """Return the name of the function that a label is of."""
    return label.name if isinstance(label, Label) else label


# --- The traceback that a user reads ---


# The folder of remat, with a separator at its end.
OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
IS_ON = not os.environ.get("REMAT_FULL_TRACEBACK")


def hide_frames(error: BaseException) -> None:
    """Take remat's frames out of the traceback of an error."""
    if IS_ON:
        # Not assigned: a frozen dataclass refuses that.
        BaseException.with_traceback(error, _without_ours(error.__traceback__))


def note(error: BaseException, text: str) -> None:
    """Add a note to an error, if its class lets notes be added."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    theirs: list[TracebackType] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(OURS):
            theirs.append(traceback)
        traceback = traceback.tb_next
    rest: TracebackType | None = None
    for found in reversed(theirs):
        found.tb_next = rest
        rest = found
    return rest
