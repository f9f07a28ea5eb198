"""Paths: where a value was found in a call, and how its author would write that.

Invariant: a path holds no value of the user's but the keys of dicts.
Rejected: paths as text. To write one costs as much as to search what it leads to, and
most are never read.
"""

import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn


# The position of an argument; None for the function; `(path, text)` for what a value
# holds; `(path, key, None)` for an item, whose key is written only when asked for.
Path: TypeAlias = tuple[Any, ...] | int | None


def written(path: Path) -> tuple[int | None, str]:
    """Return the root of a path, and how it is written from there."""
    root, parts = texts_of(path)
    return root, "".join(parts)


def texts_of(path: Path) -> tuple[int | None, list[str]]:
    """Return the root of a path, and the texts after it."""
    parts: list[str] = []
    while isinstance(path, tuple):
        path, part, *is_item = path
        parts.append(f"[{part!r}]" if is_item else part)
    return path, parts[::-1]


def code_of_arguments(fn: Any) -> tuple[Any, int]:
    """Return the code that names the arguments of a function, and how many it skips.

    Those are bound: `self`, or arguments of a partial.
    """
    skip = 0
    while True:
        if isinstance(fn, types.FunctionType):
            if "__wrapped__" not in fn.__dict__:
                return fn.__code__, skip
            fn = fn.__dict__["__wrapped__"]
        elif isinstance(fn, types.MethodType):
            fn, skip = fn.__func__, skip + 1
        elif isinstance(fn, functools.partial):
            fn, skip = fn.func, skip + len(fn.args)
        elif isinstance(fn, nn.Module):
            fn = fn.forward
        elif hasattr(type(fn), "__remat_options__"):
            fn = fn.__wrapped__
        elif isinstance(
            inspect.getattr_static(type(fn), "__call__", None), types.FunctionType
        ):
            fn, skip = type(fn).__call__, skip + 1
        else:
            return None, 0


def argument_name(
    target: tuple[Any, int], names: Sequence[str], k: int, count: int
) -> str:
    """Return what messages call an argument.

    Args:
        target: what `code_of_arguments` returned.
        names: of the keyword arguments, which come after the others.
        k: its number.
        count: how many arguments there are without keywords.
    """
    if k >= count:
        return names[k - count]
    code, skip = target
    return parameter_at(code, skip + k) or f"args[{k}]"


def parameter_at(code: Any, position: int) -> str:
    """Return the name of a parameter; "" if there is none."""
    if code is None:
        return ""
    if position < code.co_argcount:
        return code.co_varnames[position]
    if not code.co_flags & inspect.CO_VARARGS:
        return ""
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    return f"{name}[{position - code.co_argcount}]"
