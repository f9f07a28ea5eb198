"""Ways to hold a value, a tensor or a stream, for a function that is not passed it.

Each takes the value and returns a function of `x` that calls `use(x, value)`.
"""

import contextlib
import functools
import itertools
import random
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from support.adversarial.holders import ANYTHING, ANYTHING_UNDER_FUNC
from torch import nn

from remat import remat


Hold = Callable[[Any], Callable[..., Any]]


def use(x, value):
    """The exponential of the sine of `x` times a tensor, or what a stream draws."""
    return (x * noise_of(x, value)).sin().exp()


def noise_of(x, value):
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, torch.Generator):
        mask = torch.rand(x.shape, generator=value) > 0.5
        return mask * torch.randn(x.shape, generator=value)
    if isinstance(value, random.Random):
        return torch.tensor([value.random() for _ in range(len(x))])
    return torch.from_numpy(value.uniform(size=len(x)))


def called(fn):
    """A function that calls `fn`, which holds the value."""
    return lambda x: fn(x)


# --- Containers ---


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Pair:
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class FrozenPair:
    left: Any
    right: Any


def attributes(pair):
    return pair.left, pair.right


# Pytrees: how to put two values in, and how to get them out.
PYTREES = {
    "dict": (lambda a, b: {"a": a, "b": b}, lambda t: (t["a"], t["b"])),
    "dict in unsorted order": (lambda a, b: {"z": a, "b": b}, lambda t: t.values()),
    "dict with mixed keys": (lambda a, b: {1: a, "b": b}, lambda t: (t[1], t["b"])),
    "list": (lambda a, b: [a, b], tuple),
    "tuple": (lambda a, b: (a, b), tuple),
    "namedtuple": (Point, tuple),
    "OrderedDict": (lambda a, b: OrderedDict(z=a, b=b), lambda t: t.values()),
    "defaultdict": (lambda a, b: defaultdict(list, z=a, b=b), lambda t: t.values()),
    "dataclass": (Pair, attributes),
    "frozen dataclass": (FrozenPair, attributes),
    "nested": (
        lambda a, b: {"p": [Point((a,), None), ()], "q": Pair({"r": b}, "text")},
        lambda t: (t["p"][0].x[0], t["q"].left["r"]),
    ),
}


def reading(put: Callable[[Any], Any], get: Callable[[Any], Any]) -> Hold:
    """A way to hold: a function that gets the value from what it was put in."""

    def hold(value):
        container = put(value)
        return lambda x: use(x, get(container))

    return hold


def value_of(holder):
    return holder.value


# --- Objects and modules ---


class Object:
    def __init__(self, value):
        self.value = value

    def method(self, x):
        return use(x, self.value)

    @property
    def computed(self):
        return self.value

    def __call__(self, x):
        return use(x, self.value)


class Slots:
    __slots__ = ("other", "value")

    def __init__(self, value):
        self.value = value


class Module(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value  # an attribute, no parameter

    def forward(self, x):
        return use(x, self.value)


# --- Globals ---

VALUE = None
MODULE = types.ModuleType("settings_of_the_user")


def reads(x):
    return use(x, VALUE)


def in_global(make: Callable[[], Any]) -> Hold:
    """A way to hold: what is made reads a global."""

    def hold(value):
        global VALUE
        VALUE = MODULE.value = OfClass.value = value
        return make()

    return hold


def held_in(make: Callable[[], Any]) -> Hold:
    """Return how to hold a value in one of the holders of the table of programs."""

    def hold(value):
        read, write, _ = make()
        write(value)
        return lambda x: use(x, read())

    return hold


# A class that is gone with the function cannot be made again, and of what holds weakly
# nothing but what writes keeps the owner.
_KEPT = "global", "default", "attribute of a function", "context variable"
HOLDERS: dict[str, Hold] = {
    name: held_in(ANYTHING[name]) for name in (*ANYTHING_UNDER_FUNC, *_KEPT)
}
# What is called itself, and holds the value.
HOLDERS |= {
    "partial": lambda v: functools.partial(lambda v, x: use(x, v), v),
    "default": lambda v: lambda x, value=v: use(x, value),
    "keyword default": lambda v: lambda x, *, value=v: use(x, value),
    "bound self": lambda v: Object(v).method,
    "callable object": Object,
    "module attribute": Module,
    "submodule": lambda v: nn.Sequential(nn.Identity(), Module(v)),
    "global of a function that is called": in_global(lambda: lambda x: reads(x)),
    "set": reading(lambda v: {v}, lambda t: next(iter(t))),
    "frozenset": reading(lambda v: frozenset([v]), lambda t: next(iter(t))),
    "key of a dict": reading(lambda v: (v, {v: 1}), lambda t: next(iter(t[1]))),
    "list of functions": reading(lambda v: [lambda: v, len], lambda t: t[0]()),
}


# --- Where only streams are looked for: the code of methods, and more ---


def method(forward):
    """A module with this forward."""
    return type("Local", (nn.Module,), {"forward": forward})()


def rematerialized(value):
    """A module that asks a rematerialized method of its own."""
    held, forward = remat(lambda self: value), lambda self, x: use(x, self.held())
    return type("Local", (nn.Module,), {"held": held, "forward": forward})()


def decorated(value):
    @functools.wraps(use)
    def forward(self, x):
        return use(x, value)

    return forward


class OfClass(nn.Module):
    value = None

    def forward(self, x):
        return use(x, self.value)


class OfProperty(nn.Module):
    @property
    def value(self):
        return VALUE

    def forward(self, x):
        return use(x, self.value)


def weak(value):
    """Refer weakly to a torch.Generator; other streams do not allow it."""
    return weakref.ref(value) if isinstance(value, torch.Generator) else [value]


CONTEXT = ContextVar("context")


def in_context(value):
    CONTEXT.set(value)
    return CONTEXT


class Later(nn.Module):
    def forward(self, x):
        return use(x, self.value)


def added_later(value):
    """Add an attribute to a class that was walked before."""
    if hasattr(Later, "value"):
        del Later.value
    later, x = Later(), torch.ones(64, requires_grad=True)
    with contextlib.suppress(AttributeError):
        remat(later)(x)
    Later.value = value
    return later


SOURCE = np.random


class Rebound(nn.Module):
    def forward(self, x):
        return x.cos() if SOURCE is np.random else use(x, SOURCE)


def rebound(value):
    """Name a value what was a module of a package in a first call."""
    global SOURCE
    SOURCE, module = np.random, Rebound()
    remat(module)(torch.ones(64, requires_grad=True))
    SOURCE = value
    return module


def unregistered(value):
    """Make a class in a module that is not in sys.modules."""
    module = types.ModuleType("not_registered")
    module.__dict__.update(use=use, nn=nn, VALUE=value)
    source = "class M(nn.Module):\n    forward = lambda self, x: use(x, VALUE)"
    exec(source, module.__dict__)
    return module.M()


class Cell:
    """A class that a function names, and no object of it."""

    value = None


def in_class(read: Callable[[Any], Any]) -> Hold:
    """A way to hold: an attribute of a class, which `read` is given."""

    def hold(value):
        local = type("Local", (Cell,), {"value": value})
        local.chain = [local]
        return lambda x: use(x, read(local))

    return hold


def chain_of_classes(value):
    """Make a class whose attribute is a class, and so on; the last has the value."""
    inner = type("Last", (), {"value": value})
    for _ in range(200):
        inner = type("Outer", (), {"inner": inner})
    return inner


def last_of(cls):
    while hasattr(cls, "inner"):
        cls = cls.inner
    return cls


def by_context_manager(value):
    class Drawing:
        stream = value

        def __enter__(self):
            return self.stream

        def __exit__(self, *_):
            pass

    def fn(x):
        with Drawing() as stream:
            return use(x, stream)

    return fn


def by_context_function(value):
    @contextlib.contextmanager
    def drawing():
        yield value

    def fn(x):
        with drawing() as stream:
            return use(x, stream)

    return fn


HOLDERS_OF_STREAMS: dict[str, Hold] = {
    "attribute of a class": in_class(value_of),
    "class in an attribute of a class": in_class(lambda c: c.chain[0].value),
    "chain of classes": reading(chain_of_classes, lambda c: last_of(c).value),
    "context manager": by_context_manager,
    "context manager that is a function": by_context_function,
    "closure of a method": lambda v: method(lambda self, x: use(x, v)),
    "default of a method": lambda v: method(lambda self, x, value=v: use(x, value)),
    "keyword default of a method": lambda v: method(
        lambda self, x, *, value=v: use(x, value)
    ),
    "closure of a rematerialized method": rematerialized,
    "wrapper of a method": lambda v: method(decorated(v)),
    "global of a forward": in_global(lambda: method(lambda self, x: use(x, VALUE))),
    "attribute of a Python module": in_global(
        lambda: method(lambda self, x: use(x, MODULE.value))
    ),
    "global of a function that forward calls": in_global(
        lambda: method(lambda self, x: reads(x))
    ),
    "global of a property": in_global(OfProperty),
    "proxy": reading(lambda v: types.MappingProxyType({"v": v}), lambda t: t["v"]),
    "iterator": reading(itertools.repeat, next),
    "closure and iterator": reading(
        lambda v: (v, itertools.repeat(v)), lambda t: (next(t[1]), t[0])[0]
    ),
    "weak reference": reading(weak, lambda r: r[0] if type(r) is list else r()),
    "weak dictionary": reading(
        lambda v: (weakref.WeakValueDictionary(a=(held := Object(v))), held)[0:2],
        lambda pair: pair[0]["a"].value,
    ),
    "class": in_global(OfClass),
    "class, later than a first call": added_later,
    "context variable": reading(in_context, lambda c: c.get()),
    "global that was a package's": rebound,
    "module that is not registered": unregistered,
}


# --- What is passed to the function ---

Way = Callable[[Callable[..., Any], Any], Callable[..., Any]]


def wrapping(hold: Hold) -> Way:
    return lambda wrap, value: wrap(hold(value))


# Each takes `wrap` and the value, and returns a function of `x`.
PASSED: dict[str, Way] = {
    "argument": lambda wrap, v: lambda x: wrap(use)(x, v),
    "keyword": lambda wrap, v: lambda x: wrap(use)(x, value=v),
    "argument, nested": lambda wrap, v: (
        lambda x: wrap(lambda x, t: use(x, t["v"][0]))(x, {"v": [v]})
    ),
}
WAYS: dict[str, Way] = PASSED | {name: wrapping(h) for name, h in HOLDERS.items()}
WAYS_OF_STREAMS = WAYS | {name: wrapping(h) for name, h in HOLDERS_OF_STREAMS.items()}
