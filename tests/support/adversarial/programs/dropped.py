"""Values of many classes that only a call holds, and that are gone by its backward.

A row makes a function of `x`, which holds the value.
"""

import abc
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import io
import itertools
import operator
import re
import threading
import types
import typing
import weakref
from typing import Any

import numpy as np
import torch
from support.adversarial.program import State, back, family, leaf, observed, work
from torch import Tensor, nn
from torch.nn.utils import prune


TWOS = torch.full((16,), 2.0, dtype=torch.double)


class Scaled:
    """A callable object, of which the others are."""

    k = 2.0

    def __call__(self, x):
        return x * self.k

    def method(self, x):
        return x * self.k


class Base(abc.ABC):
    @abc.abstractmethod
    def __call__(self, x): ...


class Number(float):
    """A number with attributes."""


class Word(str):
    """A word with attributes."""


class Closes(Scaled):
    """An object that has a finalizer."""

    def __init__(self):
        self.k = 2.0

    def __del__(self):
        self.k = None


class Unhashable(Scaled):
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError


class Strict(Scaled):
    """An object that refuses to be written to."""

    def __init__(self):
        self.__dict__["k"] = 3.0

    def __setattr__(self, name, value):
        raise AttributeError(name)

    __delattr__ = None


class Built(Scaled):
    """An object that is made by `__new__` with arguments, and cached."""

    held: typing.ClassVar = weakref.WeakValueDictionary()

    def __new__(cls, k):
        made = super().__new__(cls)
        made.k = k
        cls.held[k] = made
        return made


class Own(Tensor):
    """A tensor of the user's."""


class Counted(nn.Module):
    def __init__(self, k=2.0):
        super().__init__()
        self.k = k
        self.register_buffer("b", torch.ones((), dtype=torch.double))

    def forward(self, x):
        return x * self.k * self.b


def of_local_class_with_super():
    class Local(State):
        def __init__(self):
            super().__init__(k=2.0)

        def __call__(self, x):
            return x * self.k * len(super().__repr__()[:1])

    return Local()


def of_local_dataclass():
    @dataclasses.dataclass
    class Local(Scaled):
        k: float = 2.0
        rest: list = dataclasses.field(default_factory=list)

    return Local(3.0)


def of_local_slots():
    class Local:
        __slots__ = ("k",)

        def __call__(self, x):
            return x * self.k

    made = Local()
    made.k = 2.0
    return made


def of_local_tuple():
    class Local(typing.NamedTuple):
        k: float

        def __call__(self, x):
            return x * self.k

    return Local(2.0)


def of_local_module():
    class Local(nn.Module):
        gain = 2.0

        def __init__(self):
            super().__init__()
            self.l = nn.Linear(16, 16).double()

        def forward(self, x):
            return self.l(x) * self.gain

    torch.manual_seed(1)
    return Local()


def of_local_enum():
    class Local(enum.Enum):
        A = 2.0

        def __call__(self, x):
            return x * self.value

    return Local.A


def of_local_abstract():
    class Local(Base):
        def __call__(self, x):
            return x * 2.0

    return Local()


def doubled(self, x):
    return x * 2.0


def of_local_meta():
    class Meta(type):
        def of(cls, x):
            return x * cls.k

    class Local(metaclass=Meta):
        k = 2.0

    return Local.of


def a_local_class():
    class Local:
        def __init__(self, x):
            self.out = x * 2.0

    return lambda x: Local(x).out


def a_local_function_of_autograd():
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.cos()

    return Local.apply


def with_attributes(made: Any, **attributes: object) -> Any:
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def linear():
    layer = nn.Linear(16, 16).double()
    nn.init.constant_(layer.weight, 0.1)
    return layer


def with_a_hook():
    made = Counted()
    made.register_forward_hook(lambda m, a, out: out * m.k)
    return made


def weight_normed():
    return nn.utils.parametrizations.weight_norm(linear())


def pruned():
    return prune.random_unstructured(linear(), "weight", 0.5)


def structure_of_ctypes():
    class Local(ctypes.Structure):
        _fields_: typing.ClassVar = [("k", ctypes.c_double)]

    made = Local(2.0)
    return lambda x: x * made.k


def entered(manager, x):
    """Return twice `x`, or what a context manager gives, times `x`."""
    with manager as k:
        return x * (k if isinstance(k, float) else 2)


@contextlib.contextmanager
def managing():
    yield 2.0


def cached_property():
    class Local:
        k = functools.cached_property(lambda self: 2.0)

    made = Local()
    return lambda x: x * made.k


def dispatched():
    @functools.singledispatch
    def made(x):
        raise TypeError

    made.register(Tensor, lambda x: x * 2)
    return made


def partial_method():
    class Local(Scaled):
        half = functools.partialmethod(Scaled.__call__)

    return Local().half


def raised(error, x):
    try:
        raise error
    except ValueError as found:
        return x * found.args[1]


def in_a_module_of_its_own():
    space = types.ModuleType("made")
    exec("def fn(x):\n    return x * k\nk = 2.0", vars(space))
    return lambda x: space.fn(x)


def evaluated():
    exec("def fn(x):\n    return x * K", space := {"K": 2.0})
    return space["fn"]


def weak_set():
    owner = State(k=2.0)
    made = weakref.WeakSet([owner])
    return lambda x, owner=owner: x * sum(o.k for o in made)


def finalized():
    owner = State(k=2.0)
    weakref.finalize(owner, int)
    return lambda x: x * owner.k


def recursive():
    def fn(x, n=3):
        return x.sin() if not n else fn(x * 1.1, n - 1)

    return fn


def mutual():
    def even(x, n=4):
        return x.sin() if not n else odd(x * 1.1, n - 1)

    def odd(x, n):
        return even(x.cos(), n - 1)

    return even


def asynchronous():
    async def made(x):
        return x * 2

    def fn(x):
        try:
            made(x).send(None)
        except StopIteration as stop:
            return stop.value

    return fn


def generated():
    def made(x):
        for k in (1.0, 2.0):
            yield x * k

    return lambda x: sum(made(x))


def of(make, read):
    """Return what makes a value, and a function that multiplies by what it reads."""

    def hold():
        made = make()
        return lambda x: x * read(made)

    return hold


KINDS = {
    # Functions and classes.
    "lambda": lambda: lambda x: x * 2,
    "default": lambda: lambda x, k=2.0: x * k,
    "closure": lambda: (lambda k: lambda x: x * k)(2.0),
    "closure of a closure": lambda: (lambda f: lambda x: f(f(x)))(lambda x: x * 1.5),
    "partial": lambda: functools.partial(lambda k, x: x * k, 2.0),
    "partial in a partial": lambda: functools.partial(
        functools.partial(lambda a, x, b: x * a * b, 2.0), b=1.5
    ),
    "wrapper": lambda: functools.wraps(work)(lambda x: x * 2),
    "method": lambda: Scaled().method,
    "method of a function": lambda: types.MethodType(lambda k, x: x * k, 2.0),
    "recursive": recursive,
    "mutual": mutual,
    "evaluated": evaluated,
    "dispatched": dispatched,
    "generated": generated,
    "asynchronous": asynchronous,
    "object": Scaled,
    "of local class with super": of_local_class_with_super,
    "of local dataclass": of_local_dataclass,
    "of local slots": of_local_slots,
    "of local tuple": of_local_tuple,
    "of local module": of_local_module,
    "of local enum": of_local_enum,
    "of local abstract": of_local_abstract,
    "of local meta": of_local_meta,
    "of a made class": lambda: type("Made", (), {"__call__": doubled})(),
    "of made abstract": lambda: type("Made", (Base,), {"__call__": doubled})(),
    "a made class": of(
        lambda: type("Made", (Base,), {"__call__": doubled}), lambda c: c()(1.0)
    ),
    "a local class": a_local_class,
    "a local function of autograd": a_local_function_of_autograd,
    "closes": Closes,
    "unhashable": Unhashable,
    "strict": Strict,
    "built": lambda: Built(2.0),
    "cached property": cached_property,
    "cached": of(lambda: functools.lru_cache(lambda n: n * 2.0), lambda f: f(1)),
    "partial method": partial_method,
    "compared": of(
        lambda: functools.cmp_to_key(lambda a, b: b - a), lambda f: min([1.0, 2], key=f)
    ),
    "getter": of(lambda: operator.attrgetter("real"), lambda get: get(2.0)),
    "caller": lambda: operator.methodcaller("mul", TWOS.clone()),
    "property of its own": of(lambda: property(lambda _: 2.0), lambda p: p.fget(None)),
    "module of its own": in_a_module_of_its_own,
    "code": of(lambda: compile("2.0", "a", "eval"), eval),
    # Containers, and what they make.
    "list": of(lambda: [2.0], lambda v: v[0]),
    "method of a dict": of(lambda: {"k": 2.0}.get, lambda get: get("k")),
    "method of a deque": of(
        lambda: collections.deque([3.0]).__getitem__, lambda f: f(0)
    ),
    "views of a dict": of(
        lambda: (d := {"a": 2.0}, d.keys(), d.values(), d.items()),
        lambda v: sum(v[2]) + len(v[1]) + len(v[3]),
    ),
    "chained": of(lambda: collections.ChainMap({}, {"k": 2.0}), lambda v: v["k"]),
    "sliced": lambda: lambda x, part=slice(2, None): x.repeat(2)[part][:16],
    "ellipsis of indices": lambda: (
        lambda x, at=(..., None, slice(0, 4)): x.view(4, 4)[at].sum() * x
    ),
    "exception": lambda: functools.partial(raised, ValueError("a", 2.0)),
    "zipped": of(lambda: [*zip([1.0], [2.0], strict=True)], lambda v: v[0][1]),
    "counting": of(lambda: itertools.count(2), next),
    "weak set": weak_set,
    "finalized": finalized,
    # Numbers, texts, memory.
    "a number": of(
        lambda: with_attributes(Number(2.0), note=3.0), lambda k: k * k.note
    ),
    "a word": of(lambda: with_attributes(Word("ab"), k=2.0), lambda v: len(v) * v.k),
    "rolled": of(lambda: np.full(16, 2.0), torch.from_numpy),
    "array of objects": of(
        lambda: np.array([Counted(), Counted(3.0)], dtype=object), lambda v: v[1].k
    ),
    "vectorized": of(lambda: np.vectorize(lambda k: k * 2), lambda f: float(f(1.5))),
    "generator of NumPy": of(lambda: np.random.default_rng(1), lambda v: v.random()),
    "memory": of(lambda: memoryview(bytearray(b"\2\3")), lambda v: v[1]),
    "of ctypes": of(lambda: (ctypes.c_double * 2)(2.0, 3.0), lambda v: v[1]),
    "structure of ctypes": structure_of_ctypes,
    "pattern": of(lambda: re.compile("a+"), lambda v: len(v.findall("aabaa"))),
    "number of decimal": of(lambda: decimal.Decimal(2), float),
    "text": of(lambda: io.StringIO("2.0"), lambda v: float(v.getvalue())),
    # What is entered, and what is a thread's.
    "lock": lambda: functools.partial(entered, threading.Lock()),
    "managed": lambda: lambda x: entered(managing(), x),
    "exit stack": lambda: functools.partial(entered, contextlib.ExitStack()),
    "local of a thread": of(
        lambda: with_attributes(threading.local(), k=2.0), lambda v: v.k
    ),
    "variable": of(
        lambda: contextvars.ContextVar("made", default=2.0), lambda v: v.get()
    ),
    "context": lambda: functools.partial(contextvars.copy_context().run, torch.sin),
    # Tensors and modules.
    "tensor": of(TWOS.clone, lambda k: k),
    "parameter": of(lambda: leaf(seed=3), lambda k: k),
    "intermediate": of(lambda: leaf(seed=3) * 2, lambda k: k),
    "own tensor": of(
        lambda: with_attributes(TWOS.as_subclass(Own), note=3.0),
        lambda k: k.as_subclass(Tensor) * k.note,
    ),
    "frozen parameter": of(
        lambda: nn.Parameter(TWOS.clone(), requires_grad=False), lambda k: k
    ),
    "buffer": of(lambda: nn.Buffer(TWOS.clone()), lambda k: k),
    "method of a tensor": lambda: TWOS.clone().mul,
    "sparse": lambda: (lambda made: lambda x: made @ x)(
        torch.eye(16).double().to_sparse()
    ),
    "generator": of(
        lambda: torch.Generator().manual_seed(1),
        lambda g: torch.rand(16, generator=g, dtype=torch.double),
    ),
    "scripted module": lambda: torch.jit.script(nn.Linear(16, 16).double()),
    "traced": lambda: torch.jit.trace(lambda x: x.sin() * 2, TWOS),
    "module": Counted,
    "module with a hook": with_a_hook,
    "parametrized": weight_normed,
    "pruned": pruned,
}


def calls(fn_of, *, made):
    """A step in which what is made is gone when the backward begins."""

    def step(wrap):
        seen = []
        for i in range(2):
            x = leaf(seed=i)
            out = fn_of(wrap, made)(x)
            gc.collect()
            back(out)
            seen.append(observed((out, x.grad)))
        return seen

    return step


@family(**KINDS)
def captured(make):
    def fn_of(wrap, make):
        made = make()
        return wrap(lambda x: work(made(x)).tanh())

    return calls(fn_of, made=make)


@family(**KINDS)
def passed(make):
    def fn_of(wrap, make):
        run = wrap(lambda x, made: work(made(x)).tanh())
        return lambda x: run(x, make())

    return calls(fn_of, made=make)


@family(**KINDS)
def passed_in_a_dict_on_a_tensor_that_is_gone(make):
    def fn_of(wrap, make):
        run = wrap(lambda x, held: work(held["a"][0](x)).tanh())
        return lambda x: run(x * 1.5, {"a": [make()]})

    return calls(fn_of, made=make)


@family(**KINDS)
def held_by_what_is_replaced(make):
    state = State()

    def fn_of(wrap, make):
        state.fn = make()
        run = wrap(lambda x: work(state.fn(x)).tanh())

        def call(x):
            out = run(x * 1.5)
            state.fn = None
            return out

        return call

    return calls(fn_of, made=make)
