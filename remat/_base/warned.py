"""At which line a warning is shown, and that a recompute shows none a second time.

Python asks its list of filters about each warning that was not shown yet. The first
filter of the list is ours: it ignores what code of the user warns of in a recompute,
and moves to the user's line what torch warns of at a line of remat.

Invariant: a function that catches warnings, or turns them into errors, does so again in
its recompute. Outside of calls of remat a warning is as it is without remat.
Rejected: `warnings.catch_warnings` around a recompute. It acts on all threads, and
makes Python forget what was shown: each step would show its warnings again.
"""

import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from remat._base.context import here
from remat._base.source import user_frame


def warn(message: str) -> None:
    """Warn at the user's line."""
    with _telling():
        _warn_in(user_frame(), message, UserWarning)


def warn_at(message: str, file: str, line: int) -> None:
    """Warn at a line of a file."""
    with _telling():
        warnings.warn_explicit(message, UserWarning, file, line)


def watch_warnings() -> None:
    """Have our filter be the first in the list that holds now."""
    filters: Any = warnings.filters
    if not filters or filters[0] is not _FILTER:
        # In place: the list belongs to the `catch_warnings` around, if there is one.
        filters[:] = [_FILTER, *(f for f in filters if f is not _FILTER)]


@contextmanager
def without_errors() -> Iterator[None]:
    """Return a context of recomputes in which no filter makes an error of a warning."""
    before, _THREAD.has_errors = _THREAD.has_errors, False
    try:
        yield
    finally:
        _THREAD.has_errors = before


class _Thread(threading.local):
    is_telling = False  # a warning that stands at its place
    has_errors = True
    text = module = ""


_THREAD = _Thread()


class _NotesIt:
    """What our filter compares the text of a warning, or its module, with."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def match(self, found: str) -> bool:
        """Note what was found."""
        setattr(_THREAD, self._name, found)
        return True


class _Category(type):
    """What our filter compares the category of a warning with, which is done last."""

    @override
    def __subclasscheck__(cls, category: type[Warning]) -> bool:
        """Say whether a warning is ignored here."""
        if _THREAD.is_telling:
            return False
        context = here()
        if context.recomputing:
            # The function may catch the error.
            text, module = _THREAD.text, _THREAD.module
            return not (_THREAD.has_errors and _is_error(text, category, module))
        if not _THREAD.module.startswith("remat."):
            return False
        frame = user_frame()
        if frame is None:
            return False
        with _telling():
            _warn_in(frame, _THREAD.text, category)
        return True


class _OfRecomputes(metaclass=_Category):
    """All categories, where a warning is ignored."""


_FILTER = ("ignore", _NotesIt("text"), _OfRecomputes, _NotesIt("module"), 0)


def _is_error(text: str, category: type[Warning], module: str) -> bool:
    """Say whether the other filters make an error of a warning."""
    filters: Any = warnings.filters
    for action, message, of, place, _ in filters:
        is_of_it = of is not _OfRecomputes and issubclass(category, of)
        if is_of_it and _fits(message, text) and _fits(place, module):
            return action == "error"
    return False


def _fits(wanted: Any, found: str) -> bool:
    if wanted is None or isinstance(wanted, str):  # as Python's own filters
        return wanted in (None, found)
    return bool(wanted.match(found))


@contextmanager
def _telling() -> Iterator[None]:
    before, _THREAD.is_telling = _THREAD.is_telling, True
    try:
        yield
    finally:
        _THREAD.is_telling = before


def _warn_in(
    frame: types.FrameType | None, message: str, category: type[Warning]
) -> None:
    """Warn as `warnings.warn` does, in a frame."""
    if frame is None:  # on a thread of the autograd engine
        warnings.warn(message, category, stacklevel=3)
        return
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__"),
        names.setdefault("__warningregistry__", {}),
    )
