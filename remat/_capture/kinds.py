"""Tells kinds of values apart: what is copied, what is walked, what is used as it is.

Called by a search for the class of each value, and by nodes.

Invariant: an answer depends on the class alone, and is remembered for it.
Rejected: asking each instance, which costs more and may run the user's code.
"""

import argparse
import array
import sys
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from typing import Any

from remat._base.code import VIEWED
from remat._base.interpreter import is_made_by_statement
from remat._capture.objects import by_class, defines, slots_of


SEQUENCES = (list, tuple, set, frozenset, deque)
# Iterators that `copy.copy` copies, rather than sharing what they iterate over.
_EMPTY: dict[Any, Any] = {}
COPIED_ITERATORS = frozenset(
    {
        *map(type, map(iter, ([], (), range(0), range(2**64), "", b"", {}, set()))),
        *(type(iter(_EMPTY.values())), type(iter(_EMPTY.items()))),
        type(reversed([0])),
    }
)
# Classes of the standard library whose instances are searched all the same.
_OPEN = (argparse.Namespace, types.SimpleNamespace, ChainMap, UserDict, UserList)
# Where classes are whose instances hold no state of a model: operators and their
# kernels, compiled code, process groups, streams, graphs, optimizers. And remat's own.
_LEFT_ALONE = (
    *("torch._ops", "torch._library", "torch._dynamo", "torch._inductor"),
    *("torch.distributed", "torch.fx", "torch.jit", "torch.optim", "torch.cuda"),
    *("torch.export", "torch._functorch"),
    "remat._",
)


@by_class
def is_left_alone(kind: type) -> bool:
    """Say whether instances of a class are used as they are, and not searched."""
    # A class that is made by code of the library is a user's if it inherits from one.
    if all(map(_is_of_standard_library, kind.__mro__)):
        return not issubclass(kind, _OPEN)
    return str(kind.__module__).startswith(_LEFT_ALONE)


def _is_of_standard_library(cls: type) -> bool:
    return str(cls.__module__).partition(".")[0] in sys.stdlib_module_names


@by_class
def can_be_made_anew(kind: type) -> bool:
    """Say whether an instance is its attributes and nothing more."""
    if hasattr(kind, "__del__"):  # which would be called for an instance made to try
        return all(cls is object or is_made_by_statement(cls) for cls in kind.__mro__)
    try:
        object.__new__(kind)
    except TypeError:  # a subclass of str, say
        return False
    return True


@by_class
def is_stateless(kind: type) -> bool:
    """Say whether instances of a class have no attributes: a new one is another one."""
    return can_be_made_anew(kind) and not (kind.__dictoffset__ or slots_of(kind))


@by_class
def is_sharded(kind: type) -> bool:
    """Say whether modules of a class have their parameters exchanged by FSDP."""
    return any(
        cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.distributed")
        for cls in kind.__mro__
    )


@by_class
def is_view(kind: type) -> bool:
    """Say whether instances of a class are views of modules."""
    return VIEWED in slots_of(kind)


@by_class
def is_rematerialized(kind: type) -> bool:
    """Say whether instances of a class are what `remat` returns."""
    return defines(kind, "__remat_options__")


@by_class
def is_spent_by_use(kind: type) -> bool:
    """Say whether instances of a class are iterators that can be read only once."""
    if kind in COPIED_ITERATORS or kind in weakref.ProxyTypes:
        return False
    if not issubclass(kind, Iterator) or kind.__dictoffset__:
        return False
    # Of an iterator that is written in Python, the slots are read.
    return type(getattr(kind, "__next__", None)) is not types.FunctionType


@by_class
def is_buffer(kind: type) -> bool:
    """Say whether instances of a class are numbers that change in place."""
    if kind in (bytearray, array.array):
        return True
    return kind.__name__ in _ARRAYS and str(kind.__module__).startswith("numpy")


_ARRAYS = {"matrix", "memmap", "ndarray", "recarray"}
