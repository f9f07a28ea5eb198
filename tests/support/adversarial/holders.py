"""Ways to hold a number that starts as 1: how to read it, to write it, to observe it.

Each factory makes a holder, and returns those three functions.
"""

import argparse
import array
import contextvars
import ctypes
import enum
import functools
import mmap
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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


# --- Containers ---


def by_key(holder, key=0):
    """Return what reads and writes an entry."""

    def write(v):
        holder[key] = v

    return lambda: holder[key], write, lambda: holder


def in_a_set():
    held = {1}

    def write(v):
        held.clear()
        held.add(v)

    return lambda: next(iter(held)), write, lambda: held


def in_a_chain_of_maps():
    maps = ChainMap({}, {"n": 1})
    return *by_key(maps, "n")[:2], lambda: maps.maps


def in_a_counter():
    counted = Counter(n=1)

    def write(v):
        counted.update(n=v - counted["n"])

    return lambda: counted["n"], write, lambda: counted


def in_a_defaultdict():
    held: Any = defaultdict(lambda: 1)
    return by_key(held, "n")


def by_order():
    held: Any = OrderedDict({1: None, 2: None, 3: None, 4: None})

    def write(v):
        held.setdefault(v)
        held.move_to_end(v, last=False)

    return lambda: next(iter(held)), write, lambda: held


def at_the_end_of_a_deque():
    held = deque([0, 0, 1], maxlen=3)
    return lambda: held[-1], held.append, lambda: held


def by_the_length_of_a_list():
    held = [None]

    def write(v):
        held[:] = [None] * v

    return lambda: len(held), write, lambda: held


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


def in_a_dict_whose_setter_raises():
    held = Loud(n=1)
    return lambda: held["n"], lambda v: dict.__setitem__(held, "n", v), lambda: held


def in_a_list_that_overrides_iteration():
    held = Reversed([0.5, 8])

    def write(v):
        held[0] = v / 2

    return lambda: held[0], write, lambda: [list.__getitem__(held, i) for i in (0, 1)]


def in_a_dict_that_hides_its_entries():
    read, write, dump = by_key(Hiding(n=1), "n")
    return read, write, lambda: dict.__getitem__(dump(), "n")


def in_a_dict_of_lists_of_an_object():
    holder = types.SimpleNamespace(a={"b": [1]})
    return *by_key(holder.a["b"])[:2], lambda: holder


def in_a_list_in_a_tuple():
    held = ([1],)
    return *by_key(held[0])[:2], lambda: held


class Named(NamedTuple):
    numbers: Any


def in_a_list_in_a_namedtuple():
    held = Named([1])
    return *by_key(held.numbers)[:2], lambda: held


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


def in_a_view_of_memory():
    return by_key(memoryview(array.array("d", [1, 0, 0, 0]))[::2])


def in_a_mapped_memory():
    mapped = mmap.mmap(-1, 1)
    mapped[0] = 1
    return by_key(mapped)


def in_a_view_of_a_dict():
    held = {"n": 1}
    view = types.MappingProxyType(held)

    def write(v):
        held["n"] = v

    return lambda: view["n"], write, lambda: held


def by_a_pushing_attribute():
    held = types.SimpleNamespace(push=None, pop=None)
    numbers = [1]
    held.push, held.pop = numbers.append, numbers.pop
    return lambda: held.push.__self__[-1], held.push, lambda: numbers


CONTAINERS = {
    "list": lambda: by_key([1]),
    "dict": lambda: by_key({"n": 1}, "n"),
    "OrderedDict": lambda: by_key(OrderedDict(n=1), "n"),
    "defaultdict": in_a_defaultdict,
    "Counter": in_a_counter,
    "deque": lambda: by_key(deque([1])),
    "deque with maxlen": at_the_end_of_a_deque,
    "UserDict": lambda: by_key(UserDict(n=1), "n"),
    "UserList": lambda: by_key(UserList([1])),
    "ChainMap": in_a_chain_of_maps,
    "set": in_a_set,
    "order of an OrderedDict": by_order,
    "length of a list": by_the_length_of_a_list,
    "list that overrides iteration": in_a_list_that_overrides_iteration,
    "dict whose setter raises": in_a_dict_whose_setter_raises,
    "dict that hides its entries": in_a_dict_that_hides_its_entries,
    "dict of lists of an object": in_a_dict_of_lists_of_an_object,
    "list in a tuple": in_a_list_in_a_tuple,
    "list in a namedtuple": in_a_list_in_a_namedtuple,
    "view of a dict": in_a_view_of_a_dict,
    "push of a list": by_a_pushing_attribute,
    "bytearray": lambda: by_key(bytearray(b"\1")),
    "array": lambda: by_key(array.array("d", [1])),
    "NumPy array": lambda: by_key(np.ones(1)),
    "NumPy array without axes": lambda: by_key(np.array(1.0), ()),
    "record array": lambda: by_key(np.ones(1, [("n", "f8")]).view(np.recarray).n),
    "matrix of NumPy": lambda: by_key(np.ones((1, 1)).view(np.matrix), (0, 0)),
    "field of a record array": lambda: by_key(np.ones(1, [("n", "f8")])["n"]),
    "NumPy array of 64 KiB": lambda: by_key(np.ones((2, 2**12)), (0, 0)),
    "class of a bytearray": lambda: by_key(Bytes(b"\1")),
    "class of an array": lambda: by_key(Numbers("d", [1])),
    "class of a NumPy array": lambda: by_key(np.ones(1).view(Grid)),
    "NumPy array of 1 MiB": lambda: by_key(np.ones((2, 2**16)), (0, 0)),
    "memoryview": lambda: by_key(memoryview(bytearray(b"\1\0"))),
    "memoryview with steps": in_a_view_of_memory,
    "mapped memory": in_a_mapped_memory,
    "array of C": lambda: by_key((ctypes.c_long * 2)(1)),
    "class of an array of C": lambda: by_key(Coefficients(1)),
    "number of C": lambda: by_attribute(ctypes.c_double(1), "value"),
    "structure of C": lambda: by_attribute(Pair(1), "n"),
}


# --- Variables ---


NUMBER = 1


def in_a_global():
    global NUMBER
    NUMBER = 1

    def write(v):
        global NUMBER
        NUMBER = v

    return lambda: NUMBER, write, lambda: NUMBER


def by_globals():
    globals()["DYNAMIC"] = 1
    return *by_key(globals(), "DYNAMIC")[:2], lambda: globals()["DYNAMIC"]


def in_a_closure():
    number = 1

    def write(v):
        nonlocal number
        number = v

    return lambda: number, write, lambda: number


def in_a_closure_of_a_closure():
    def outer():
        number = 1

        def write(v):
            nonlocal number
            number = v

        return lambda: (lambda: number)(), write

    read, write = outer()
    return read, write, read


def in_a_default():
    def read(held=[1]):  # noqa: B006
        return held[0]

    def write(v):
        read.__defaults__[0][0] = v

    return read, write, read


def in_the_defaults():
    def read(n=1):
        return n

    def write(v):
        read.__defaults__ = (v,)

    return read, write, read


def as_a_default():
    def read(*, n=1):
        return n

    def write(v):
        read.__kwdefaults__ = {"n": v}

    return read, write, read


def in_keywords_of_a_partial():
    read = functools.partial(lambda n: n, n=1)

    def write(v):
        read.keywords["n"] = v

    return read, write, read


def in_an_attribute_of_a_function():
    def read():
        return read.n

    def write(v):
        read.n = v

    read.n = 1
    return read, write, read


def in_a_context_variable():
    variable = contextvars.ContextVar("variable", default=1)
    variable.set(1)
    return variable.get, lambda v: variable.set(v) and None, variable.get


def in_a_cache():
    @functools.lru_cache
    def cached():
        return [1]

    return by_key(cached())[0], by_key(cached())[1], cached


def in_a_generator():
    def holding():
        n = 1
        while True:
            n = (yield n) or n

    generator = holding()
    next(generator)
    return lambda: generator.send(None), generator.send, lambda: generator.send(None)


def in_the_environment():
    os.environ["REMAT_ADVERSARY"] = "1"

    def write(v):
        os.environ["REMAT_ADVERSARY"] = str(v)

    def read():
        return int(os.environ["REMAT_ADVERSARY"])

    return read, write, read


VARIABLES = {
    "global": in_a_global,
    "entry of globals": by_globals,
    "closure": in_a_closure,
    "closure of a closure": in_a_closure_of_a_closure,
    "list as a default": in_a_default,
    "default": in_the_defaults,
    "keyword default": as_a_default,
    "keyword of a partial": in_keywords_of_a_partial,
    "attribute of a function": in_an_attribute_of_a_function,
    "context variable": in_a_context_variable,
    "list in a cache": in_a_cache,
    "local of a generator": in_a_generator,
    "environment": in_the_environment,
}


# --- Objects and classes ---


def by_attribute(holder, name="n", dump=None):
    """Return what reads and writes an attribute."""

    def read():
        return getattr(holder, name)

    return read, lambda v: setattr(holder, name, v), dump or read


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


class Backed:
    def __init__(self):
        self._n = 1

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


def of(make, **attributes):
    """Return a factory: an attribute `n` of what `make` returns."""

    def hold():
        holder = make()
        for name, value in attributes.items():
            setattr(holder, name, value)
        return by_attribute(holder)

    return hold


def fresh_class(*bases, **attributes):
    return type("Fresh", bases, {"n": 1, **attributes})


def of_a_class_by_an_instance():
    cls = fresh_class()
    value = cls()
    return lambda: value.n, lambda v: setattr(cls, "n", v), lambda: cls.n


def of_a_base_class():
    base = fresh_class()
    value = type("Derived", (base,), {})()
    return lambda: value.n, lambda v: setattr(base, "n", v), lambda: base.n


def by_methods_of_a_class():
    class Owner:
        n = 1

        @classmethod
        def read(cls):
            return cls.n

        @staticmethod
        def write(v):
            Owner.n = v

    return Owner.read, Owner.write, Owner.read


def of_a_metaclass():
    class Meta(type):
        n = 1

    cls = Meta("Fresh", (), {})
    return lambda: cls.n, lambda v: setattr(Meta, "n", v), lambda: cls.n


def in_a_list_of_a_class():
    cls = fresh_class(n=[1])
    held = cls.n
    return lambda: cls().n[0], by_key(held)[1], lambda: held


def by_calling_an_object():
    class Called:
        n = 1

        def __call__(self, v=None):
            self.n = self.n if v is None else v
            return self.n

    called = Called()
    return called, called, called


def in_a_weak_dict():
    class Key:
        pass

    key, held = Key(), weakref.WeakKeyDictionary()
    held[key] = 1
    # The key is kept by what reads it.
    return lambda: held[key], by_key(held, key)[1], lambda: held[key]


def in_an_object_of_a_weak_dict():
    value = Data()
    held = weakref.WeakValueDictionary({"v": value})
    return lambda: held["v"].n, lambda v: setattr(value, "n", v), lambda: value


def behind_a_weak_reference():
    value = Data()
    ref = weakref.ref(value)
    return lambda: ref().n, lambda v: setattr(value, "n", v), lambda: value


def of_an_enum():
    class Kind(enum.Enum):
        ONE = 1

    Kind.ONE.n = 1
    return by_attribute(Kind.ONE)


def of_a_python_module():
    settings = types.ModuleType("settings")
    settings.n = 1
    return lambda: settings.n, lambda v: setattr(settings, "n", v), lambda: settings.n


def of_a_thread():
    local = threading.local()
    local.n = 1
    return by_attribute(local)


def in_an_object_that_is_replaced():
    holder = types.SimpleNamespace(data=Data())

    def write(v):
        holder.data = Data(v)

    return lambda: holder.data.n, write, lambda: holder


def in_the_last_of_linked_objects():
    node = last = types.SimpleNamespace(n=1, next=None)
    for _ in range(5):
        node = types.SimpleNamespace(next=node)

    def read():
        at = node
        while at.next is not None:
            at = at.next
        return at.n

    return read, lambda v: setattr(last, "n", v), lambda: last


def in_a_method_bound_late():
    value = Data()
    value.read = types.MethodType(lambda self: self.n, value)
    return value.read, lambda v: setattr(value, "n", v), lambda: value.n


OBJECTS = {
    "namespace": of(lambda: types.SimpleNamespace(n=1)),
    "argparse": of(lambda: argparse.Namespace(n=1)),
    "dataclass": of(Data),
    "slots": of(Slotted, n=1),
    "slots and a dict": of(SlottedAndMore, n=1),
    "dataclass with slots": of(SlottedData),
    "property": of(Backed),
    "getattr": of(Dynamic),
    "descriptor": of(lambda: fresh_class(n=Stored())()),
    "class": of(fresh_class),
    "class by an instance": of_a_class_by_an_instance,
    "base class": of_a_base_class,
    "class method": by_methods_of_a_class,
    "metaclass": of_a_metaclass,
    "list of a class": in_a_list_of_a_class,
    "call of an object": by_calling_an_object,
    "WeakKeyDictionary": in_a_weak_dict,
    "value of a WeakValueDictionary": in_an_object_of_a_weak_dict,
    "weak reference": behind_a_weak_reference,
    "enum": of_an_enum,
    "thread local": of_a_thread,
    "Python module": of_a_python_module,
    "object that is replaced": in_an_object_that_is_replaced,
    "linked objects": in_the_last_of_linked_objects,
    "method bound late": in_a_method_bound_late,
}


# --- Modules and tensors ---


def in_a_buffer():
    module = nn.Module()
    module.register_buffer("n", torch.ones((), dtype=torch.long))

    def write(v):
        module.n.fill_(v)

    return lambda: module.n.item(), write, module.state_dict


def in_a_buffer_that_is_replaced():
    module = nn.Module()
    module.register_buffer("n", torch.ones((), dtype=torch.long))

    def write(v):
        module.n = torch.full((), v)

    return lambda: module.n.item(), write, module.state_dict


def of_a_layer_of_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity()))
    model[1][0].n = 1
    # Another owner leads there.
    return lambda: model[1][0].n, by_attribute(model[1][0])[1], lambda: model[1][0].n


def in_a_captured_tensor():
    n = torch.ones((), dtype=torch.long)
    return n.item, lambda v: n.fill_(v) and None, lambda: n


def in_an_array_of_a_tensor():
    n = torch.ones(1, dtype=torch.long)
    return n.item, by_key(n.numpy())[1], lambda: n


def in_a_dict_of_a_tensor():
    tensor = torch.ones(1)
    tensor.s = {"n": 1}
    return lambda: tensor.s["n"], by_key(tensor.s, "n")[1], lambda: tensor.s


def in_an_object_of_a_parameter():
    parameter = nn.Parameter(torch.ones(1))
    parameter.s = types.SimpleNamespace(held=[1])
    write = by_key(parameter.s.held)[1]
    return lambda: parameter.s.held[0], write, lambda: parameter.s


def of_a_tensor_of_a_tensor():
    tensor = torch.ones(1)
    tensor.inner = torch.ones(1)
    tensor.inner.n = 1
    inner = tensor.inner
    return lambda: tensor.inner.n, by_attribute(inner)[1], lambda: inner.n


MODULES = {
    "module": of(nn.Module, n=1),
    "buffer": in_a_buffer,
    "buffer that is replaced": in_a_buffer_that_is_replaced,
    "layer of a model": of_a_layer_of_a_model,
    "tensor": in_a_captured_tensor,
    "array of a tensor": in_an_array_of_a_tensor,
    "attribute of a tensor": of(lambda: torch.ones(1), n=1),
    "attribute of a parameter": of(lambda: nn.Parameter(torch.ones(1)), n=1),
    "dict of a tensor": in_a_dict_of_a_tensor,
    "object of a parameter": in_an_object_of_a_parameter,
    "tensor of a tensor": of_a_tensor_of_a_tensor,
}

HOLDERS = {**CONTAINERS, **VARIABLES, **OBJECTS, **MODULES}

# Those that hold a tensor or a list as well as a number.
_NUMBERS = {
    *("Counter", "set", "order of an OrderedDict", "length of a list", "bytearray"),
    *("list that overrides iteration", "array", "NumPy array", "environment"),
    *("NumPy array without axes", "field of a record array", "buffer", "tensor"),
    *("record array", "matrix of NumPy", "NumPy array of 64 KiB"),
    *("class of a bytearray", "class of an array", "class of a NumPy array"),
    *("NumPy array of 1 MiB", "memoryview", "memoryview with steps", "mapped memory"),
    *("array of C", "class of an array of C", "number of C", "structure of C"),
    *("buffer that is replaced", "array of a tensor", "local of a generator"),
}
ANYTHING = {name: hold for name, hold in HOLDERS.items() if name not in _NUMBERS}

# What a recompute under torch.func does not put back, or torch refuses to change there.
_AT_BASE_ALONE = {
    *("global", "default", "attribute of a function", "context variable", "enum"),
    *("environment", "descriptor", "class", "class by an instance", "base class"),
    *("class method", "metaclass", "list of a class", "WeakKeyDictionary"),
    *("thread local", "Python module", "array of a tensor", "attribute of a tensor"),
    *("attribute of a parameter", "local of a generator", "buffer", "tensor"),
}
UNDER_FUNC = {n: hold for n, hold in HOLDERS.items() if n not in _AT_BASE_ALONE}
# Nor tensors in these.
_OF_NUMBERS = {
    *("keyword default", "keyword of a partial", "weak reference"),
    "value of a WeakValueDictionary",
}
ANYTHING_UNDER_FUNC = [n for n in ANYTHING if n in UNDER_FUNC.keys() - _OF_NUMBERS]
