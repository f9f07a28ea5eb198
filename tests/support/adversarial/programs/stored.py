"""Objects of the standard library and of packages that hold what a function uses.

Each is read, counted by the function, changed by the user between, or gone by the
backward.
"""

import argparse
import array
import configparser
import contextlib
import copy
import dataclasses
import functools
import heapq
import itertools
import operator
import types
import typing
import weakref
from collections import ChainMap, Counter, UserDict, UserList, UserString, deque

import numpy as np
import torch
from support.adversarial.program import (
    State,
    family,
    leaf,
    loop,
    observed,
    reversed_loop,
    taking,
    work,
)
from torch import nn


class Table(dict):
    """A dict of the user's with attributes."""


@dataclasses.dataclass(slots=True)
class Point:
    k: float
    rest: tuple = ()


@dataclasses.dataclass(frozen=True)
class Around:
    inner: object
    cache: dict = dataclasses.field(default_factory=dict, compare=False)


class Described:
    """A descriptor that keeps values by a weak reference to their owner."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, owner, kind=None):
        return self if owner is None else self.values[owner]

    def __set__(self, owner, value):
        self.values[owner] = value


class WithDescriptor:
    k = Described()


class Hidden:
    """An object that keeps its attributes somewhere else."""

    __slots__ = ("_held",)

    def __init__(self):
        object.__setattr__(self, "_held", {})

    def __getattr__(self, name):
        return self._held[name]

    def __setattr__(self, name, value):
        self._held[name] = value


class Node:
    __slots__ = "next", "value"

    def __init__(self, value, next=None):
        self.value, self.next = value, next


# Each returns how a number is read and how it is set.


def exit_stack():
    stack = contextlib.ExitStack()
    stack.callback(print, 1.0)

    def write(k):
        stack.pop_all()
        stack.callback(print, k)

    return lambda: stack._exit_callbacks[-1][1].__closure__[0].cell_contents[0], write


def nullcontext():
    context = contextlib.nullcontext([1.0])
    return lambda: context.__enter__()[0], lambda k: context.enter_result.insert(0, k)


def argparse_namespace():
    args = argparse.Namespace(k=1.0)
    return lambda: args.k, lambda k: setattr(args, "k", k)


def config():
    held = configparser.ConfigParser()
    held["a"] = {"k": "1.0"}

    def write(k):
        held["a"]["k"] = str(k)

    return lambda: float(held["a"]["k"]), write


def user_dict():
    held = UserDict(k=1.0)
    return lambda: held["k"], lambda k: held.update(k=k)


def user_list():
    held = UserList([1.0])
    return lambda: held[-1], lambda k: held.append(k)


def user_string():
    held = State(text=UserString("1.0"))
    return lambda: float(str(held.text)), lambda k: setattr(
        held, "text", UserString(str(k))
    )


def chain_map():
    held = ChainMap({}, {"k": 1.0})
    return lambda: held["k"], lambda k: held.maps.insert(0, {"k": k})


def counter():
    held = Counter(k=1)
    return lambda: float(held["k"]), lambda k: held.update(k=1)


def heap():
    held = [(1.0, 0)]
    return lambda: heapq.nlargest(1, held)[0][0], lambda k: heapq.heappush(
        held, (k, len(held))
    )


def bounded_deque():
    held = deque([1.0], maxlen=2)
    return lambda: held[-1] + len(held), lambda k: held.append(k)


def sub_dict():
    held = Table(k=1.0)
    held.note = 1.0
    return lambda: held["k"] * held.note, lambda k: (
        held.update(k=k),
        setattr(held, "note", k),
    )


def slotted_dataclass():
    point = Point(1.0)
    return lambda: point.k + len(point.rest), lambda k: (
        setattr(point, "k", k),
        setattr(point, "rest", (*point.rest, k)),
    )


def frozen_around_slots():
    held = Around(Point(1.0))
    return lambda: held.inner.k, lambda k: setattr(held.inner, "k", k)


def frozen_with_a_cache():
    held = Around(())
    held.cache["k"] = 1.0
    return lambda: held.cache["k"], lambda k: held.cache.update(k=k)


def descriptor():
    held = WithDescriptor()
    held.k = 1.0
    return lambda: held.k, lambda k: setattr(held, "k", k)


def hidden():
    held = Hidden()
    held.k = 1.0
    return lambda: held.k, lambda k: setattr(held, "k", k)


def linked():
    held = State(head=Node(1.0))
    return lambda: held.head.value, lambda k: setattr(held, "head", Node(k, held.head))


def attribute_of_a_function():
    def held():
        return held.k

    held.k = 1.0
    return held, lambda k: setattr(held, "k", k)


def attribute_of_a_wrapper():
    @functools.wraps(print)
    def held(*args):
        return held.k

    held.k = 1.0
    return held, lambda k: setattr(held, "k", k)


def default_of_a_function():
    def held(k=[1.0]):  # noqa: B006 - as it is written
        return k[-1]

    return held, lambda k: setattr(held, "__defaults__", ([k],))


def keyword_default():
    def held(*, k=1.0):
        return k

    return held, lambda k: held.__kwdefaults__.update(k=k)


def annotations():
    def held(x: 1.0):
        return held.__annotations__["x"]

    return lambda: held(0), lambda k: held.__annotations__.update(x=k)


def lru_of_an_object():
    held = State(k=1.0)

    @functools.lru_cache
    def find():
        return held

    return lambda: find().k, lambda k: setattr(held, "k", k)


def partial_of_setattr():
    held = State(k=1.0)
    read = functools.partial(getattr, held, "k")
    return read, functools.partial(setattr, held, "k")


def getters():
    held = {"a": State(k=1.0)}
    get, attr = operator.itemgetter("a"), operator.attrgetter("k")
    return lambda: attr(get(held)), lambda k: setattr(held["a"], "k", k)


def weak_value():
    owner, held = State(k=1.0), weakref.WeakValueDictionary()
    held["a"] = owner
    return lambda: held["a"].k, lambda k, owner=owner: setattr(owner, "k", k)


def weak_method():
    class Owner:
        k = 1.0

        def of(self):
            return self.k

    owner = Owner()
    held = weakref.WeakMethod(owner.of)
    return lambda: held()(), lambda k: setattr(owner, "k", k)


def class_of_a_class():
    class Meta(type):
        k = 1.0

        def of(cls):
            return cls.k

    class Held(metaclass=Meta):
        pass

    return lambda: Held.of(), lambda k: setattr(Meta, "k", k)


def class_in_a_closure():
    class Held:
        k = 1.0

    return lambda: Held.k, lambda k: setattr(Held, "k", k)


def inherited():
    class Base:
        k = 1.0

    class Held(Base):
        pass

    held = Held()
    return lambda: held.k, lambda k: setattr(Base, "k", k)


def static_of_a_class():
    class Held:
        @staticmethod
        def of():
            return 1.0

    def write(k):
        Held.of = staticmethod(lambda: k)

    return lambda: Held.of(), write


def property_of_a_class():
    class Held:
        of = property(lambda self: 1.0)

    def write(k):
        Held.of = property(lambda self: k)

    held = Held()
    return lambda: held.of, write


def module_attribute():
    held = nn.Module()
    held.k = 1.0
    return lambda: held.k, lambda k: setattr(held, "k", k)


def buffer_of_a_module():
    held = nn.Module()
    held.register_buffer("k", torch.ones(()))
    return lambda: float(held.k), lambda k: held.k.fill_(k)


def module_list():
    held = nn.ModuleList([nn.Identity()])
    held[0].k = 1.0

    def write(k):
        layer = nn.Identity()
        layer.k = k
        held.append(layer)

    return lambda: held[-1].k, write


def parameter_dict():
    held = nn.ParameterDict({"k": torch.ones(())})
    return lambda: held["k"].item(), lambda k: held.update({"k": torch.tensor(k)})


def array_of_numbers():
    held = array.array("d", [1.0])
    return lambda: held[0], lambda k: held.__setitem__(0, k)


def array_of_numpy():
    held = np.ones(3)
    return lambda: float(held[1]), lambda k: held.fill(k)


def structured_array():
    held = np.zeros(2, dtype=[("k", "f8"), ("n", "i4")])
    held["k"] = 1.0
    return lambda: float(held["k"][1]), lambda k: held["k"].fill(k)


def view_of_an_array():
    base = np.ones((4, 4))
    held = base[1:, ::2]
    return lambda: float(held[0, 1]), lambda k: base.fill(k)


def scalar_of_numpy():
    held = State(k=np.float64(1.0))
    return lambda: float(held.k), lambda k: setattr(held, "k", np.float64(k))


def tensor_without_grad():
    held = torch.ones(())
    return lambda: held.item(), lambda k: held.fill_(k)


def attribute_of_a_tensor():
    held = torch.ones(())
    held.k = 1.0
    return lambda: held.k, lambda k: setattr(held, "k", k)


def deep_copied():
    held = State(inner=[{"k": 1.0}])

    def write(k):
        held.inner = copy.deepcopy(held.inner)
        held.inner[0]["k"] = k

    return lambda: held.inner[0]["k"], write


def mapping_of_a_class():
    class Held:
        k = 1.0

    held = vars(Held)
    return lambda: held["k"], lambda k: setattr(Held, "k", k)


def named_tuple_replaced():
    class Pair(typing.NamedTuple):
        a: float
        b: dict

    held = State(pair=Pair(1.0, {}))
    return lambda: held.pair.a + len(held.pair.b), lambda k: setattr(
        held, "pair", held.pair._replace(a=k)
    )


def bound_arguments():
    held = State(args=(1.0,), kwargs={"b": 1.0})
    return lambda: held.args[0] * held.kwargs["b"], lambda k: (
        setattr(held, "args", (k,)),
        held.kwargs.update(b=k),
    )


def simple_namespace():
    held = types.SimpleNamespace(inner=types.SimpleNamespace(k=1.0))
    return lambda: held.inner.k, lambda k: setattr(held.inner, "k", k)


def dynamic_module():
    held = types.ModuleType("settings_of_the_user")
    held.k = 1.0
    return lambda: held.k, lambda k: setattr(held, "k", k)


def sets():
    held = {1.0}
    return lambda: max(held) + len(held), lambda k: held.add(k)


def class_with_getitem():
    class Held:
        values: typing.ClassVar = [1.0]

        def __class_getitem__(cls, i):
            return cls.values[i]

    return lambda: Held[-1], lambda k: Held.values.append(k)


def repeated():
    held = State(k=1.0)
    many = itertools.repeat(held, 3)
    return lambda: sum(s.k for s in copy.copy(many)), lambda k: setattr(held, "k", k)


KINDS = taking(globals())


@family(**KINDS)
def changed_between(make):
    read, write = make()
    n = iter(range(2, 100))
    return reversed_loop(
        lambda x: work(x, read()), between=lambda: write(float(next(n))), state=read
    )


@family(**KINDS)
def counted(make):
    read, write = make()

    def fn(x):
        write(read() + 1.0)
        return work(x, read()).tanh() * read()

    return reversed_loop(fn, state=read)


@family(**KINDS)
def counted_in_a_call_within(make):
    read, write = make()

    def inner(x):
        write(read() + 1.0)
        return work(x, read())

    def step(wrap):
        run = wrap(inner)
        return loop(wrap(lambda x: run(run(x).tanh()) * read()), state=read)(
            lambda f: f
        )

    return step


@family(**KINDS)
def gone_and_a_leaf_that_is_gone(make):
    state = State()
    state.read, state.write = make()

    def step(wrap):
        run, seen = wrap(lambda x: work(x, state.read())), []
        for i in range(3):
            x = leaf(seed=i)
            out = run(x * 1.5)
            state.read, state.write = make()
            state.write(i + 2.0)
            out.sum().backward()
            seen.append(observed((out, x.grad)))
        return seen

    return step
