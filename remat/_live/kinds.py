"""How a value of a class is treated: walked, read, held as it is.

Invariant: each answer but those about one value depends on the class alone.
"""

import threading
import types
import weakref
from contextvars import ContextVar
from typing import Any

from torch import nn

from remat._capture.kinds import (
    COPIED_ITERATORS,
    can_be_made_anew,
    is_buffer,
    is_left_alone,
    is_rematerialized,
    is_spent_by_use,
)
from remat._capture.objects import slots_of
from remat._capture.stream_search import (
    is_scripted,
    is_stream,
)
from remat._live.containers import container_kind
from remat._live.holders import PARTS, dict_of


def size_of(buffer: Any) -> int:
    """Return how many numbers a buffer holds."""
    return buffer.size if hasattr(buffer, "size") else len(buffer)


def has_objects(buffer: Any) -> bool:
    """Say whether an array holds objects, which are no numbers."""
    return hasattr(buffer, "dtype") and buffer.dtype.hasobject


def can_be_revived(kind: type) -> bool:
    """Say whether an instance need not be held to be there for a recompute.

    One with `__del__` is not held: a recompute refuses it once it is gone.
    """
    if hasattr(kind, "__del__"):
        return True
    return container_kind(kind) is not None or can_be_made_anew(kind)


def is_of_library(value: Any) -> bool:
    """Say whether a value is a function in C, and no method of a value."""
    kinds = types.BuiltinFunctionType, types.MethodWrapperType
    if not issubclass(type(value), kinds):
        return False
    owner = value.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return True
    return not hasattr(type(owner), value.__name__)  # a function that pybind11 made


def is_opaque(value: Any, kind: type) -> bool:
    """Say whether a value is held as it is: a stream, an array, what is not walked."""
    if is_stream(kind) or is_buffer(kind):
        return True
    if issubclass(kind, (*_WALKED, *PARTS)) or container_kind(kind) is not None:
        return issubclass(kind, PARTS) and is_of_library(value)
    is_iterator = is_spent_by_use(kind) or kind in COPIED_ITERATORS
    return not is_iterator and is_used_as_it_is(value, kind)


_WALKED = types.FunctionType, types.CellType, nn.Module, type, ContextVar


def is_used_as_it_is(value: Any, kind: type) -> bool:
    """Say whether a value is neither read nor put back."""
    if is_rematerialized(kind):
        return False
    if issubclass(kind, (types.ModuleType, weakref.ref)) or is_scripted(kind):
        return True
    if is_left_alone(kind) and not issubclass(kind, _SEARCHED):
        return True
    return dict_of(value) is None and not slots_of(kind)


# Classes of the standard library whose instances hold what users put there.
_SEARCHED = (
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    threading.local,
)
