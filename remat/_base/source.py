"""Which line of the user's code is running, as text.

Invariant: it is the innermost line that is neither torch's nor remat's, `model.py:12,
in block`. A notebook's file reads `Cell In[9]`. All layers of a model in a package run
the same line, so a line of a package says which module runs it:
`modeling.py:310, in forward (layers.3.mlp)`.
Rejected: hooks on modules to know that path. Every call would pay for them, and only
records, reports and errors ask.
"""

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module

from remat._base.code import TORCH, is_library, is_standard
from remat._base.errors import OURS


def user_line() -> str:
    """Return the innermost line of the stack that is neither torch's nor remat's."""
    frame = user_frame()
    if frame is None:
        return "an unknown line"
    code = frame.f_code
    line = f"{shown(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"
    path = _path_of(sys._getframe(1)) if is_library(frame.f_globals) else ""
    return f"{line} ({path})" if path else line


def user_frame() -> types.FrameType | None:
    """Return the innermost frame that runs neither torch's code nor remat's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def short(line: str, *, with_module: bool = True) -> str:
    """Return a line without its folder and function, and perhaps without its module.

    Example:
        >>> short("/home/me/model.py:12, in block")
        'model.py:12'
        >>> short("/lib/modeling.py:310, in forward (layers.3.mlp)")
        'modeling.py:310 (layers.3.mlp)'
    """
    where, _, function = line.partition(", in ")
    name = where.replace("\\", "/").rsplit("/", 1)[-1]
    _, opening, path = function.partition(" (")
    return name + opening + path if with_module else name


def shown(file: str) -> str:
    """Return a file's name as a reader knows it: a notebook's cell by its number."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return file
    shell = getattr(ipython, "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if name_of is None else name_of(file)
    return file if cell is None else " ".join(cell)


# Not that of a notebook or a prompt.
_GENERATED = ("<string>", "<frozen", "<eval_with_key>")


@functools.lru_cache(maxsize=4096)  # each operation of a block asks it ten times
def _is_passed(file: str) -> bool:
    """Say whether a file's lines are torch's, remat's, or of no file at all."""
    return file.startswith((TORCH, OURS, *_GENERATED)) or is_standard(file)


# --- The module that runs a line ---


def _path_of(first: types.FrameType) -> str:
    """Return the path of the innermost module that is called, in the outermost one."""
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    frame: types.FrameType | None = first
    while frame is not None:
        if frame.f_code.co_filename == module.__file__:  # that of `Module.__call__`
            found = frame.f_locals.get("self")
            if isinstance(found, nn.Module):
                inner, outer = found if inner is None else inner, found
        frame = frame.f_back
    return "" if inner is None or outer is None else _name_in(outer, inner)


class _Names(threading.local):
    """The names in the module that a thread asked about last: a record asks often."""

    outer: Callable[[], Any] = staticmethod(lambda: None)
    names: dict[int, str] = {}  # noqa: RUF012 - never changed, only replaced


_LAST = _Names()


def _name_in(outer: nn.Module, inner: nn.Module) -> str:
    """Return the name of a module in another one, "" if it is not in there."""
    if _LAST.outer() is not outer or _LAST.names.get(id(inner)) is None:
        _LAST.outer = weakref.ref(outer)
        _LAST.names = {id(m): name for name, m in outer.named_modules()}
    return _LAST.names.get(id(inner), "")
