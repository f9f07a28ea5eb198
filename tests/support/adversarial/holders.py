"""Ways to hold a number that starts as 1: how to read it, to write it, to observe it.

A row of `holders.txt` is one. `HOLDERS` has a function for each, which makes a holder,
and returns three functions that do this. What rows use is here.

Invariant: each holder is of one kind. How it is changed, and when, is the theme `held`.
Rejected: three functions a row. In a line of text one sees what is held where.
"""

# ruff: noqa: F401 - the rows, which are text, use what is imported

import argparse
import array
import configparser
import contextlib
import contextvars
import copy
import ctypes
import enum
import functools
import heapq
import itertools
import mmap
import operator
import os
import re
import threading
import types
import weakref
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    defaultdict,
    deque,
)
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from support.tables import sections_of
from torch import nn


Hold = Callable[[], tuple[Callable[..., Any], ...]]


# --- Containers ---


class Reversed(list):
    def __iter__(self):
        return iter([self[i] for i in reversed(range(len(self)))])

    def __getitem__(self, i):
        return super().__getitem__(i) * 2


class Hiding(dict):
    def __iter__(self):
        return iter(())

    def items(self):
        return {}.items()

    def values(self):
        return {}.values()

    def __len__(self):
        return 0


class Loud(dict):
    def __setitem__(self, key, value):
        raise AssertionError("no setter of the user's runs")


class Named(NamedTuple):
    numbers: Any


class Table(dict):
    """A dict with attributes."""


class Bytes(bytearray):
    """A buffer with attributes."""


class Numbers(array.array):
    """An array with attributes."""


class Grid(np.ndarray):
    """A NumPy array with attributes."""


class Coefficients(ctypes.c_double * 2):
    """An array of C with attributes."""


class Pair(ctypes.Structure):
    """Numbers of C."""

    _fields_ = (("n", ctypes.c_long), ("m", ctypes.c_double * 2))


# --- Variables ---


NUMBER = 1


def holding():
    n = 1
    while True:
        n = (yield n) or n


# --- Objects and classes ---


class Slotted:
    __slots__ = ("n",)


class SlottedAndMore(Slotted):
    pass


@dataclass
class Data:
    n: int = 1


@dataclass(slots=True)
class SlottedData:
    n: int = 1


@dataclass(frozen=True)
class Around:
    inner: object
    cache: dict = field(default_factory=dict, compare=False)


class Backed:
    _n = 1

    @property
    def n(self):
        return self._n

    @n.setter
    def n(self, value):
        self._n = value


class Dynamic:
    def __init__(self):
        self.__dict__["held"] = {"n": 1}

    def __getattr__(self, name):
        return self.held[name]

    def __setattr__(self, name, value):
        self.held[name] = value


class Stored:
    """A descriptor that keeps values beside the objects."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, owner, kind):
        return self.values.get(owner, 1)

    def __set__(self, owner, value):
        self.values[owner] = value


class Called:
    n = 1

    def __call__(self, v=None):
        self.n = self.n if v is None else v
        return self.n


def fresh(*bases: type, **attributes: object) -> Any:
    """Return a class of its own, with an attribute `n`."""
    return type("Fresh", bases, {"n": 1, **attributes})


# --- Modules and tensors ---


def module_with(value: torch.Tensor) -> nn.Module:
    """Return a module with a buffer `n`."""
    module = nn.Module()
    module.register_buffer("n", value)
    return module


def holder(make: str, read: str, write: str = "", dump: str = "") -> Hold:
    """Return what makes a holder and the functions that read, write and observe it."""
    make = make if "held = " in make or "global " in make else f"held = {make}"
    if not write:  # an entry or an attribute
        read = f"held{read}"
        make = f"{make}; {read} = 1" if read == "held.n" else make
        write, dump = f"{read} = v", "held.n" if read == "held.n" else "held"
    source = f"""
def hold():
    {make}
    def write(v):
        {write}
    return lambda: {read}, write, lambda: {dump or "held"}
"""
    found: dict[str, Hold] = {}
    exec(compile(source, f"<{make}>", "exec"), globals(), found)
    return found["hold"]


# The marks of each holder, and what makes one.
TABLES = sections_of(Path(__file__).with_suffix(".txt"))
ROWS = [row for table in TABLES.values() for row in table]
NAMES = [re.fullmatch(r"(.*?)(?: \((\w+)\))?", name).groups("") for name, *_ in ROWS]
MARKS = dict(NAMES)
HOLDERS = {n: holder(*row) for (n, _), (_, *row) in zip(NAMES, ROWS, strict=True)}
# Its rows would all be known to fail.
ANNOTATIONS = holder(
    "held = lambda: 1; held.__annotations__['n'] = 1",
    "held.__annotations__['n']",
    "held.__annotations__['n'] = v",
    "held.__annotations__",
)
ANYTHING = {n: hold for n, hold in HOLDERS.items() if "n" not in MARKS[n]}
ANYTHING_UNDER_FUNC = [n for n in ANYTHING if not {*"bf"} & {*MARKS[n]}]
