"""Hides remat's own frames in the traceback of an error that leaves remat.

Invariant: the frames of the user and of torch stay, in order. With
`REMAT_FULL_TRACEBACK=1` in the environment all stay. Rejected: an error raised anew,
which would lose its cause, its notes and its identity.
"""

import contextlib
import os
from types import TracebackType

from remat._base.installed import OURS


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
