"""Ways to hold a number that starts as 1: how to read it, to write it, to observe it.

A row is text: what makes `held`, an expression that reads the number, a statement that
writes `v` instead, and an expression to observe. `HOLDERS` has a function for each,
which makes a holder, and returns three functions that do this.

Invariant: each holder is of one kind. How it is changed, and when, is `programs/held`.
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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


Hold = Callable[[], tuple[Callable[..., Any], ...]]

_SOURCE = """
def hold():
    {make}
    def write(v):
        {write}
    return lambda: {read}, write, lambda: {dump}
"""


def holder(make: str, read: str, write: str, dump: str = "held") -> Hold:
    """Return what makes a holder and the functions that read, write and observe it."""
    source = _SOURCE.format(make=make, read=read, write=write, dump=dump)
    found: dict[str, Hold] = {}
    exec(compile(source, f"<{make}>", "exec"), globals(), found)
    return found["hold"]


def by_key(make: str, key: object = "n") -> Hold:
    """Return how a number is held as an entry."""
    return holder(f"held = {make}", f"held[{key!r}]", f"held[{key!r}] = v")


def by_attribute(make: str) -> Hold:
    """Return how a number is held as an attribute `n`."""
    return holder(f"held = {make}; held.n = 1", "held.n", "held.n = v", "held.n")


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


CONTAINERS = {
    "list": by_key("[1]", 0),
    "dict": by_key("{'n': 1}"),
    "OrderedDict": by_key("OrderedDict(n=1)"),
    "defaultdict": by_key("defaultdict(lambda: 1)"),
    "Counter": holder(
        "held = Counter(n=1)", "held['n']", "held.update(n=v - held['n'])"
    ),
    "deque": by_key("deque([1])", 0),
    "deque with maxlen": holder(
        "held = deque([0, 0, 1], maxlen=3)", "held[-1]", "held.append(v)"
    ),
    "UserDict": by_key("UserDict(n=1)"),
    "UserList": by_key("UserList([1])", 0),
    "ChainMap": holder(
        "held = ChainMap({}, {'n': 1})", "held['n']", "held['n'] = v", "held.maps"
    ),
    "maps of a ChainMap": holder(
        "held = ChainMap({'n': 1})", "held['n']", "held.maps[:] = [{'n': v}]"
    ),
    "set": holder("held = {1}", "next(iter(held))", "held.clear(); held.add(v)"),
    "order of an OrderedDict": holder(
        "held = OrderedDict.fromkeys([1, 2, 3, 4])",
        "next(iter(held))",
        "held.setdefault(v); held.move_to_end(v, last=False)",
    ),
    "length of a list": holder("held = [None]", "len(held)", "held[:] = [None] * v"),
    "heap": holder("held = [-1]", "-held[0]", "heapq.heappush(held, -v)"),
    "list that overrides iteration": holder(
        "held = Reversed([0.5, 8])",
        "held[0]",
        "held[0] = v / 2",
        "[list.__getitem__(held, i) for i in (0, 1)]",
    ),
    "dict whose setter raises": holder(
        "held = Loud(n=1)", "held['n']", "dict.__setitem__(held, 'n', v)"
    ),
    "dict that hides its entries": holder(
        "held = Hiding(n=1)", "held['n']", "held['n'] = v", "held['n']"
    ),
    "attribute of a dict": by_attribute("Table(a=1)"),
    "dict of lists of an object": holder(
        "held = types.SimpleNamespace(a={'b': [1]})",
        "held.a['b'][0]",
        "held.a['b'][0] = v",
    ),
    "list in a tuple": holder("held = ([1],)", "held[0][0]", "held[0][0] = v"),
    "list in a namedtuple": holder(
        "held = Named([1])", "held.numbers[0]", "held.numbers[0] = v"
    ),
    "view of a dict": holder(
        "held = {'n': 1}; view = types.MappingProxyType(held)",
        "view['n']",
        "held['n'] = v",
    ),
    "dict in a frozenset of partials": holder(
        "held = {'n': 1}; fns = frozenset({functools.partial(held.get, 'n')})",
        "next(iter(fns))()",
        "held['n'] = v",
    ),
    "dict of a default factory": holder(
        "held = {'n': 1}; table = defaultdict(lambda: held['n'])",
        "table[len(table)]",
        "held['n'] = v",
    ),
    "push of a list": holder(
        "held = [1]; owner = types.SimpleNamespace(push=held.append, pop=held.pop)",
        "owner.push.__self__[-1]",
        "owner.push(v)",
    ),
    "bytearray": by_key("bytearray(b'\\1')", 0),
    "array": by_key("array.array('d', [1])", 0),
    "NumPy array": by_key("np.ones(1)", 0),
    "NumPy array without axes": by_key("np.array(1.0)", ()),
    "view of a NumPy array": holder(
        "held = np.ones((4, 4)); view = held[1:, ::2]",
        "float(view[0, 1])",
        "held[:] = v",
    ),
    "record array": by_key("np.ones(1, [('n', 'f8')]).view(np.recarray).n", 0),
    "matrix of NumPy": by_key("np.ones((1, 1)).view(np.matrix)", (0, 0)),
    "field of a record array": by_key("np.ones(1, [('n', 'f8')])['n']", 0),
    "NumPy array of 64 KiB": by_key("np.ones((2, 2**12))", (0, 0)),
    "class of a bytearray": by_key("Bytes(b'\\1')", 0),
    "class of an array": by_key("Numbers('d', [1])", 0),
    "class of a NumPy array": by_key("np.ones(1).view(Grid)", 0),
    "NumPy array of 1 MiB": by_key("np.ones((2, 2**16))", (0, 0)),
    "memoryview": by_key("memoryview(bytearray(b'\\1\\0'))", 0),
    "memoryview with steps": by_key(
        "memoryview(array.array('d', [1, 0, 0, 0]))[::2]", 0
    ),
    "mapped memory": holder(
        "held = mmap.mmap(-1, 1); held[0] = 1", "held[0]", "held[0] = v", "held[:]"
    ),
    "array of C": by_key("(ctypes.c_long * 2)(1)", 0),
    "class of an array of C": by_key("Coefficients(1)", 0),
    "number of C": holder(
        "held = ctypes.c_double(1)", "held.value", "held.value = v", "held.value"
    ),
    "structure of C": holder("held = Pair(1)", "held.n", "held.n = v", "held.n"),
}


# --- Variables ---


NUMBER = 1


VARIABLES = {
    "global": holder(
        "global NUMBER; NUMBER = 1", "NUMBER", "global NUMBER; NUMBER = v", "NUMBER"
    ),
    "entry of globals": holder(
        "held = globals(); held['N'] = 1", "held['N']", "held['N'] = v", "held['N']"
    ),
    "closure": holder("held = 1", "held", "nonlocal held; held = v"),
    "closure of a closure": holder(
        "held = 1", "(lambda: held)()", "nonlocal held; held = v"
    ),
    "list as a default": holder(
        "held = lambda numbers=[1]: numbers[0]",
        "held()",
        "held.__defaults__[0][0] = v",
        "held()",
    ),
    "default": holder(
        "held = lambda n=1: n", "held()", "held.__defaults__ = (v,)", "held()"
    ),
    "keyword default": holder(
        "held = lambda *, n=1: n", "held()", "held.__kwdefaults__ = {'n': v}", "held()"
    ),
    "keyword of a partial": holder(
        "held = functools.partial(lambda n: n, n=1)",
        "held()",
        "held.keywords['n'] = v",
        "held()",
    ),
    "object of a partial": holder(
        "owner = Data(); held = functools.partial(getattr, owner, 'n')",
        "held()",
        "owner.n = v",
        "held()",
    ),
    "attribute of a function": by_attribute("lambda: held.n"),
    "attribute of a wrapper": by_attribute("functools.wraps(print)(lambda: 1)"),
    "context variable": holder(
        "held = contextvars.ContextVar('held', default=1); held.set(1)",
        "held.get()",
        "held.set(v)",
        "held.get()",
    ),
    "object in a cache": holder(
        "held = Data(); find = functools.cache(lambda: held)", "find().n", "held.n = v"
    ),
    "local of a generator": holder(
        "held = holding(); next(held)",
        "held.send(None)",
        "held.send(v)",
        "held.send(None)",
    ),
    "environment": holder(
        "held = os.environ; held['REMAT_ADVERSARY'] = '1'",
        "int(os.environ['REMAT_ADVERSARY'])",
        "held['REMAT_ADVERSARY'] = str(v)",
        "held['REMAT_ADVERSARY']",
    ),
    "callback of an exit stack": holder(
        "held = contextlib.ExitStack(); held.callback(print, 1)",
        "held._exit_callbacks[-1][1].__closure__[0].cell_contents[0]",
        "held.pop_all(); held.callback(print, v)",
        "len(held._exit_callbacks)",
    ),
}


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


def of_a_class(make: str, read: str = "made.n", write: str = "held.n = v") -> Hold:
    """Return how a number is held by a class `held`, of which there may be `made`."""
    return holder(make, read, write, "held.n")


OBJECTS = {
    "namespace": by_attribute("types.SimpleNamespace()"),
    "argparse": by_attribute("argparse.Namespace()"),
    "configparser": holder(
        "held = configparser.ConfigParser(); held['a'] = {'n': '1'}",
        "int(held['a']['n'])",
        "held['a']['n'] = str(v)",
        "held['a']['n']",
    ),
    "dataclass": by_attribute("Data()"),
    "slots": by_attribute("Slotted()"),
    "slots and a dict": by_attribute("SlottedAndMore()"),
    "dataclass with slots": by_attribute("SlottedData()"),
    "slots in a frozen dataclass": holder(
        "held = Around(SlottedData())",
        "held.inner.n",
        "held.inner.n = v",
        "held.inner.n",
    ),
    "dict of a frozen dataclass": holder(
        "held = Around((), {'n': 1})", "held.cache['n']", "held.cache['n'] = v"
    ),
    "property": by_attribute("Backed()"),
    "getattr": by_attribute("Dynamic()"),
    "descriptor": by_attribute("fresh(n=Stored())()"),
    "class": by_attribute("fresh()"),
    "class by an instance": of_a_class("held = fresh(); made = held()"),
    "base class": of_a_class("held = fresh(); made = type('Derived', (held,), {})()"),
    "class method": of_a_class(
        "held = fresh(of=classmethod(lambda cls: cls.n)); made = held.of", "made()"
    ),
    "static method": of_a_class(
        "held = fresh(of=staticmethod(lambda: 1))",
        "held.of()",
        "held.of = staticmethod(lambda: v)",
    ),
    "property of a class": of_a_class(
        "held = fresh(of=property(lambda self: 1)); made = held()",
        "made.of",
        "held.of = property(lambda self: v)",
    ),
    "metaclass": of_a_class("held = fresh(type); made = held('Made', (), {})"),
    "dict of a class": of_a_class("held = fresh(); made = vars(held)", "made['n']"),
    "list of a class": holder(
        "made = fresh(n=[1]); held = made.n", "made().n[0]", "held[0] = v"
    ),
    "call of an object": holder("held = Called()", "held()", "held(v)", "held()"),
    "WeakKeyDictionary": holder(
        "key = fresh()(); held = weakref.WeakKeyDictionary({key: 1})",
        "held[key]",  # which keeps the key
        "held[key] = v",
        "held[key]",
    ),
    "value of a WeakValueDictionary": holder(
        "held = Data(); of = weakref.WeakValueDictionary(v=held)",
        "of['v'].n",
        "held.n = v",
    ),
    "weak reference": holder(
        "held = Data(); ref = weakref.ref(held)", "ref().n", "held.n = v"
    ),
    "weak method": holder(
        "held = Called(); ref = weakref.WeakMethod(held.__call__)",
        "ref()()",
        "held.n = v",
    ),
    "enum": by_attribute("enum.Enum('Kind', 'ONE').ONE"),
    "thread local": by_attribute("threading.local()"),
    "Python module": by_attribute("types.ModuleType('settings')"),
    "object that is replaced": holder(
        "held = types.SimpleNamespace(data=Data())",
        "held.data.n",
        "held.data = Data(v)",
    ),
    "getters": holder(
        "held = {'a': Data()}; get = operator.itemgetter('a')",
        "operator.attrgetter('n')(get(held))",
        "held['a'].n = v",
    ),
    "linked objects": holder(
        "held = types.SimpleNamespace(next=types.SimpleNamespace(next=Data()))",
        "held.next.next.n",
        "held.next.next.n = v",
    ),
    "method bound late": holder(
        "held = Data(); held.read = types.MethodType(lambda self: self.n, held)",
        "held.read()",
        "held.n = v",
        "held.n",
    ),
}


# --- Modules and tensors ---


def module_with(value: torch.Tensor) -> nn.Module:
    """Return a module with a buffer `n`."""
    module = nn.Module()
    module.register_buffer("n", value)
    return module


_BUFFER = "held = module_with(torch.ones((), dtype=torch.long))"

MODULES = {
    "module": by_attribute("nn.Module()"),
    "buffer": holder(_BUFFER, "held.n.item()", "held.n.fill_(v)", "held.state_dict()"),
    "buffer that is replaced": holder(
        _BUFFER, "held.n.item()", "held.n = torch.full((), v)", "held.state_dict()"
    ),
    "layer of a model": holder(
        "held = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh())); held[1][0].n = 1",
        "held[1][0].n",
        "held[1][0].n = v",
        "held[1][0].n",
    ),
    "ParameterDict": holder(
        "held = nn.ParameterDict({'n': torch.ones(())})",
        "held['n'].item()",
        "held['n'] = torch.full((), float(v))",
        "[*held]",
    ),
    "tensor": holder(
        "held = torch.ones((), dtype=torch.long)", "held.item()", "held.fill_(v)"
    ),
    "array of a tensor": holder(
        "held = torch.ones(1, dtype=torch.long); numbers = held.numpy()",
        "held.item()",
        "numbers[0] = v",
    ),
    "attribute of a tensor": by_attribute("torch.ones(1)"),
    "attribute of a parameter": by_attribute("nn.Parameter(torch.ones(1))"),
    "dict of a tensor": holder(
        "held = torch.ones(1); held.s = {'n': 1}",
        "held.s['n']",
        "held.s['n'] = v",
        "held.s",
    ),
    "object of a parameter": holder(
        "held = nn.Parameter(torch.ones(1)); held.s = types.SimpleNamespace(n=[1])",
        "held.s.n[0]",
        "held.s.n[0] = v",
        "held.s",
    ),
    "tensor of a tensor": holder(
        "held = torch.ones(1); held.inner = torch.ones(1); held.inner.n = 1",
        "held.inner.n",
        "held.inner.n = v",
        "held.inner.n",
    ),
}

# Its rows would all be known to fail.
ANNOTATIONS = holder(
    "held = lambda: 1; held.__annotations__['n'] = 1",
    "held.__annotations__['n']",
    "held.__annotations__['n'] = v",
    "held.__annotations__",
)
HOLDERS = {**CONTAINERS, **VARIABLES, **OBJECTS, **MODULES}

# Those that hold a tensor or a list as well as a number.
_NUMBERS = {
    *("Counter", "set", "order of an OrderedDict", "length of a list", "bytearray"),
    *("list that overrides iteration", "array", "NumPy array", "environment", "heap"),
    *("NumPy array without axes", "field of a record array", "buffer", "tensor"),
    *("record array", "matrix of NumPy", "NumPy array of 64 KiB", "configparser"),
    *("class of a bytearray", "class of an array", "class of a NumPy array"),
    *("NumPy array of 1 MiB", "memoryview", "memoryview with steps", "mapped memory"),
    *("array of C", "class of an array of C", "number of C", "structure of C"),
    *("buffer that is replaced", "array of a tensor", "local of a generator"),
    *("view of a NumPy array", "ParameterDict"),
}
ANYTHING = {name: hold for name, hold in HOLDERS.items() if name not in _NUMBERS}

# What a recompute under torch.func does not put back, or torch refuses to change there.
_AT_BASE_ALONE = {
    *("global", "default", "attribute of a function", "context variable", "enum"),
    *("environment", "descriptor", "class", "class by an instance", "base class"),
    *("class method", "metaclass", "list of a class", "WeakKeyDictionary"),
    *("thread local", "Python module", "array of a tensor", "attribute of a tensor"),
    *("attribute of a parameter", "local of a generator", "buffer", "tensor"),
    *("static method", "property of a class", "dict of a class"),
    *("attribute of a wrapper",),
}
UNDER_FUNC = {n: hold for n, hold in HOLDERS.items() if n not in _AT_BASE_ALONE}
# Nor tensors in these.
_OF_NUMBERS = {
    *("keyword default", "keyword of a partial", "weak reference", "weak method"),
    *("dict in a frozenset of partials", "dict of a default factory"),
    *("value of a WeakValueDictionary", "object of a partial"),
    *("getters", "callback of an exit stack"),
}
ANYTHING_UNDER_FUNC = [n for n in ANYTHING if n in UNDER_FUNC.keys() - _OF_NUMBERS]
