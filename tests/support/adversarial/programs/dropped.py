"""Values of many classes that only a call holds, and that are gone by its backward."""

import abc
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import io
import itertools
import operator
import pathlib
import re
import string
import struct
import threading
import types
import typing
import uuid
import weakref

import numpy as np
import torch
from support.adversarial.program import (
    State,
    family,
    leaf,
    observed,
    taking,
    work,
)
from torch import nn
from torch.nn.utils import prune


class Base(abc.ABC):
    @abc.abstractmethod
    def __call__(self, x): ...


class Number(float):
    __slots__ = ("note",)


class Word(str):
    """A word with attributes."""


class Closes:
    """An object that has a finalizer."""

    def __init__(self, k):
        self.k = k

    def __del__(self):
        self.k = None

    def __call__(self, x):
        return x * self.k


class Unhashable:
    __hash__ = None
    k = 2.0

    def __eq__(self, other):
        raise RuntimeError

    def __call__(self, x):
        return x * self.k


class Strict:
    """An object that refuses to be written to."""

    def __init__(self, k):
        self.__dict__["k"] = k

    def __setattr__(self, name, value):
        raise AttributeError(name)

    __delattr__ = None

    def __call__(self, x):
        return x * self.k


class Built:
    """An object that is made by `__new__` with arguments, and cached."""

    held: typing.ClassVar = weakref.WeakValueDictionary()

    def __new__(cls, k):
        made = super().__new__(cls)
        made.k = k
        cls.held[k] = made
        return made

    def __call__(self, x):
        return x * self.k * len(Built.held)


class Own(torch.Tensor):
    """A tensor of the user's."""


class Counted(nn.Module):
    def __init__(self, k=2.0):
        super().__init__()
        self.k = k
        self.register_buffer("b", torch.ones((), dtype=torch.double))

    def forward(self, x):
        return x * self.k * self.b


def of_local_class():
    class Local:
        def __init__(self):
            self.k = 2.0

        def __call__(self, x):
            return x * self.k

    return Local()


def of_local_class_with_super():
    class Local(State):
        def __init__(self):
            super().__init__(k=2.0)

        def __call__(self, x):
            return x * self.k * len(super().__repr__()[:1])

    return Local()


def of_local_dataclass():
    @dataclasses.dataclass
    class Local:
        k: float = 2.0
        rest: list = dataclasses.field(default_factory=list)

        def __call__(self, x):
            return x * self.k * (1 + len(self.rest))

    return Local(rest=[1])


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
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(16, 16).double()

        def forward(self, x):
            return self.l(x)

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


def a_number():
    made = Number(2.0)
    made.note = 3.0
    return lambda x: x * made * made.note


def a_word():
    made = Word("ab")
    made.k = 2.0
    return lambda x: x * len(made) * made.k


def closes():
    return Closes(2.0)


def unhashable():
    return Unhashable()


def strict():
    return Strict(2.0)


def built():
    return Built(2.0)


def own_tensor():
    made = torch.full((16,), 2.0, dtype=torch.double).as_subclass(Own)
    made.note = 3.0
    return lambda x: (x * made).as_subclass(torch.Tensor) * made.note


def frozen_parameter():
    made = nn.Parameter(torch.full((16,), 2.0, dtype=torch.double), requires_grad=False)
    return lambda x: x * made


def buffer():
    made = nn.Buffer(torch.full((16,), 2.0, dtype=torch.double))
    return lambda x: x * made


def sparse():
    made = torch.eye(16, dtype=torch.double).to_sparse()
    return lambda x: made @ x


def generator():
    made = torch.Generator().manual_seed(1)
    return lambda x: x * torch.rand(16, generator=made, dtype=torch.double)


def scripted():
    @torch.jit.script
    def made(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    return made


def scripted_module():
    return torch.jit.script(nn.Linear(16, 16).double())


def traced():
    return torch.jit.trace(lambda x: x.sin() * 2, torch.ones(16, dtype=torch.double))


def module():
    return Counted()


def module_with_a_hook():
    made = Counted()
    made.register_forward_hook(lambda m, a, out: out * m.k)
    return made


def parametrized():
    made = nn.Linear(16, 16).double()
    nn.init.constant_(made.weight, 0.1)
    nn.utils.parametrizations.weight_norm(made)
    return made


def pruned():
    made = nn.Linear(16, 16).double()
    nn.init.constant_(made.weight, 0.1)
    prune.random_unstructured(made, "weight", 0.5)
    return made


def rolled():
    made = np.full(16, 2.0)
    return lambda x: x * torch.from_numpy(made)


def array_of_objects():
    made = np.array([Counted(), Counted(3.0)], dtype=object)
    return lambda x: made[1](made[0](x))


def vectorized():
    made = np.vectorize(lambda k: k * 2)
    return lambda x: x * float(made(1.5))


def generator_of_numpy():
    made = np.random.default_rng(1)
    return lambda x: x * made.random()


def memory():
    made = memoryview(bytearray(b"\2\3"))
    return lambda x: x * made[1]


def of_ctypes():
    made = (ctypes.c_double * 2)(2.0, 3.0)
    return lambda x: x * made[1]


def structure_of_ctypes():
    class Local(ctypes.Structure):
        _fields_: typing.ClassVar = [("k", ctypes.c_double)]

    made = Local(2.0)
    return lambda x: x * made.k


def pattern():
    made = re.compile("a+")
    return lambda x: x * len(made.findall("aabaa"))


def match():
    made = re.match("a+", "aab")
    return lambda x: x * made.end()


def date():
    made = datetime.datetime(2024, 1, 2)
    return lambda x: x * made.day


def number_of_decimal():
    made = decimal.Decimal(2)
    return lambda x: x * float(made)


def fraction():
    made = fractions.Fraction(3, 2)
    return lambda x: x * float(made)


def path():
    made = pathlib.Path("a") / "b"
    return lambda x: x * len(made.parts)


def unique():
    made = uuid.UUID(int=3)
    return lambda x: x * made.int


def template():
    made = string.Template("$k")
    return lambda x: x * float(made.substitute(k=2))


def packed():
    made = struct.Struct("d")
    return lambda x: x * made.unpack(made.pack(2.0))[0]


def text():
    made = io.StringIO("2.0")
    return lambda x: x * float(made.getvalue())


def data():
    made = io.BytesIO(b"ab")
    return lambda x: x * len(made.getvalue())


def lock():
    made = threading.Lock()

    def fn(x):
        with made:
            return x * 2

    return fn


def condition():
    made = threading.Condition()

    def fn(x):
        with made:
            return x * 2

    return fn


def local_of_a_thread():
    made = threading.local()
    made.k = 2.0
    return lambda x: x * made.k


def variable():
    made = contextvars.ContextVar("made", default=2.0)
    return lambda x: x * made.get()


def context():
    made = contextvars.copy_context()
    return lambda x: made.run(torch.sin, x)


def exit_stack():
    made = contextlib.ExitStack()

    def fn(x):
        with made:
            made.callback(int)
            return x * 2

    return fn


def managed():
    @contextlib.contextmanager
    def made():
        yield 2.0

    def fn(x):
        with made() as k:
            return x * k

    return fn


def redirected():
    made = io.StringIO()

    def fn(x):
        with contextlib.redirect_stdout(made):
            made.write("a")
        return x * 2

    return fn


def cached_property():
    class Local:
        @functools.cached_property
        def k(self):
            return 2.0

    made = Local()
    return lambda x: x * made.k


def cached():
    @functools.lru_cache
    def made(n):
        return n * 2.0

    return lambda x: x * made(1)


def cached_method():
    class Local:
        @functools.cache  # noqa: B019 - it is gone with the class
        def k(self, n):
            return n * 2.0

    made = Local()
    return lambda x: x * made.k(1)


def dispatched():
    @functools.singledispatch
    def made(x):
        return x * 2

    made.register(int, lambda x: x)
    return made


def partial_method():
    class Local:
        def of(self, x, k):
            return x * k

        half = functools.partialmethod(of, k=0.5)

    return Local().half


def compared():
    made = functools.cmp_to_key(lambda a, b: b - a)
    return lambda x: x * min([1.0, 2.0], key=made)


def getter():
    made = operator.attrgetter("real")
    return lambda x: x * made(2.0)


def caller():
    return operator.methodcaller("mul", torch.full((16,), 2.0, dtype=torch.double))


def method_of_a_tensor():
    return torch.full((16,), 2.0, dtype=torch.double).mul


def method_of_a_dict():
    made = {"k": 2.0}.get
    return lambda x: x * made("k")


def method_of_a_deque():
    made = collections.deque([2.0, 3.0]).__getitem__
    return lambda x: x * made(1)


def views_of_a_dict():
    made = {"a": 2.0, "b": 3.0}
    keys, values, items = made.keys(), made.values(), made.items()
    return lambda x: x * (sum(values) + len(keys) + len(items))


def sliced():
    made = slice(2, None)
    return lambda x: x.repeat(2)[made][:16]


def ellipsis_of_indices():
    made = (..., None, slice(0, 4))
    return lambda x: x.view(4, 4)[made].sum() * x


def alias():
    made = list[int]
    return lambda x: x * len(made([1, 2]))


def exception():
    made = ValueError("a", 2.0)

    def fn(x):
        try:
            raise made
        except ValueError as error:
            return x * error.args[1]

    return fn


def group_of_exceptions():
    made = ExceptionGroup("a", [ValueError(2.0)])
    return lambda x: x * made.exceptions[0].args[0]


def property_of_its_own():
    made = property(lambda self: 2.0)
    return lambda x: x * made.fget(None)


def space():
    made = types.ModuleType("made")
    exec("def fn(x):\n    return x * k\nk = 2.0", vars(made))
    return lambda x: made.fn(x)


def code():
    made = compile("x * 2.0", "a", "eval")
    return lambda x: eval(made, {"x": x})


def evaluated():
    space = {}
    exec("def fn(x):\n    return x * K\nK = 2.0", space)
    return space["fn"]


def zipped():
    made = [zip([1.0], [2.0], strict=True)]
    pairs = [*made[0]]
    return lambda x: x * pairs[0][1]


def counting():
    made = itertools.count(2)
    return lambda x: x * next(made)


def weak_set():
    owner = State(k=2.0)
    made = weakref.WeakSet([owner])
    return lambda x, owner=owner: x * sum(o.k for o in made)


def finalized():
    owner = State(k=2.0)
    weakref.finalize(owner, int)
    return lambda x: x * owner.k


def chained():
    made = collections.ChainMap({}, {"k": 2.0})
    return lambda x: x * made["k"]


def recursive():
    def fn(x, n=3):
        return x.sin() if not n else fn(x * 1.1, n - 1)

    return fn


def mutual():
    def even(x, n):
        return x.sin() if not n else odd(x * 1.1, n - 1)

    def odd(x, n):
        return even(x.cos(), n - 1)

    return lambda x: even(x, 4)


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


KINDS = taking(globals())


def calls(fn_of, *, made):
    """A step in which what is made is gone when the backward begins."""

    def step(wrap):
        seen = []
        for i in range(2):
            x = leaf(seed=i)
            gc.freeze()  # what is collected is what this program leaves
            out = fn_of(wrap, made)(x)
            gc.collect()
            gc.unfreeze()
            back_of(out)
            seen.append(observed((out, x.grad)))
        return seen

    return step


def back_of(out):
    out.sin().sum().backward()


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
