"""Tells kinds of values apart, and finds the dicts and the slots of objects.

Called by walks over what a call reaches or returns, for each class once.

Invariant: no property, setter or constructor of the user's runs, nor a metaclass. What
is said of a kind depends on the class alone.
Rejected: `copy.copy` for all objects, which runs `__reduce__` and `__setstate__`.
"""

import argparse
import contextlib
import functools
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from remat._base.code import VIEWED
from remat._base.interpreter import is_made_by_statement


T = TypeVar("T")


def by_class(fn: Callable[[type], T]) -> Callable[[type], T]:
    """Remember what `fn` says of a class, for as long as the class lives."""
    known: dict[int, tuple[T, weakref.ref[type]]] = {}

    def remembered(kind: type) -> T:
        key = id(kind)
        found = known.get(key)
        if found is None:
            ref = weakref.ref(kind, lambda _: known.pop(key, None))
            found = known[key] = fn(kind), ref
        return found[0]

    return remembered


def dict_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object; None if it has none, or pretends not to."""
    if issubclass(type(value), threading.local):
        return value.__dict__  # of this thread
    with contextlib.suppress(Exception):
        return object.__getattribute__(value, "__dict__")
    return None


def members_of(kind: type) -> list[Any]:
    """Return what reads and writes the slots of instances, past their properties."""
    return [kind.__mro__[i].__dict__[name] for name, i in slots_of(kind)]


@by_class
def slots_of(kind: type) -> list[tuple[str, int]]:
    """Return the names of slots, and by which class of the bases each is.

    In the order of the names, then from the bases up: the last of a name is that of the
    instance's own class.
    """
    found = [
        (name, i)
        for i, cls in enumerate(kind.__mro__)
        if "__slots__" in cls.__dict__
        for name, value in cls.__dict__.items()
        if type(value) is types.MemberDescriptorType
    ]
    return sorted(found, key=lambda place: (place[0], -place[1]))


def defines(kind: type, name: str) -> bool:
    """Say whether a class has an attribute, without asking its metaclass."""
    return any(name in cls.__dict__ for cls in kind.__mro__)


# What `nn.Module` sets itself: by hand, a new name would be missed.
TEMPLATE = vars(nn.Module())
REGISTRIES = ("_parameters", "_buffers", "_modules")
# Hooks that run in a forward, or that change its graph.
HOOKS = tuple(
    name
    for name in TEMPLATE
    if name.startswith(("_forward_", "_backward_")) and "hook" in name
)


# --- Kinds: what is copied, what is walked, what is used as it is ---


# Classes of the standard library whose instances are searched all the same, and modules
# of it all of whose classes are.
_OPEN = (
    *(argparse.Namespace, types.SimpleNamespace, ChainMap, UserDict, UserList),
    *(contextlib.ExitStack, contextlib.AsyncExitStack, contextlib.nullcontext),
    type(functools.cache(len)),
)
_OPEN_IN = {"configparser", "unittest.mock"}
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
    roots = {str(cls.__module__).partition(".")[0] for cls in kind.__mro__}
    if roots <= sys.stdlib_module_names:
        is_open = not _OPEN_IN.isdisjoint(cls.__module__ for cls in kind.__mro__)
        return not (is_open or issubclass(kind, _OPEN))
    return is_left_alone_in(str(kind.__module__))


def is_left_alone_in(module: str) -> bool:
    """Say whether what a Python module defines is not searched."""
    return module.startswith(_LEFT_ALONE)


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
def is_sharded(kind: type) -> bool:
    """Say whether modules of a class have their parameters exchanged by FSDP."""
    return any(
        cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.distributed")
        for cls in kind.__mro__
    )


@by_class
def is_view(kind: type) -> bool:
    """Say whether instances of a class are views of modules."""
    return VIEWED in dict(slots_of(kind))


@by_class
def is_rematerialized(kind: type) -> bool:
    """Say whether instances of a class are what `remat` returns."""
    return defines(kind, "__remat_options__")


@by_class
def is_spent_by_use(kind: type) -> bool:
    """Say whether instances of a class are iterators that can be read only once."""
    if not issubclass(kind, Iterator) or kind in weakref.ProxyTypes:
        return False
    if kind.__dictoffset__:
        return False
    # Of an iterator that is written in Python, the slots are read.
    return type(getattr(kind, "__next__", None)) is not types.FunctionType
