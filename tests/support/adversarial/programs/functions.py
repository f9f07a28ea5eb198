"""Functions and classes: where they lead, how they are made, what they remember."""

import contextlib
import functools
import gc
import types

from support.adversarial.program import (
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    texts,
    work,
)
from torch import nn


# What a row uses, which is text.
exec("from collections import defaultdict")


def per_call(make, count=3):
    """A step that makes and wraps a function for each call, and lets go of it."""

    def step(wrap):
        xs = [leaf(seed=i + 1) for i in range(count)]
        outs = [wrap(make(i + 1))(x) for i, x in enumerate(xs)]
        gc.collect()
        back(outs)
        return observed((outs, [x.grad for x in xs]))

    return step


class Scaled:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return work(x, self.k)

    def method(self, x):
        return work(x, self.k)

    @classmethod
    def of_class(cls, k, x):
        return work(x, k)


class Scaling(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        return work(x, self.k)


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return work(x, self.k)


@family(
    lambda_=lambda k: lambda x: work(x, k),
    default=lambda k: lambda x, k=k: work(x, k),
    closure_of_a_closure=lambda k: (lambda f: lambda x: f(x))(lambda x: work(x, k)),
    partial=lambda k: functools.partial(lambda k, x: work(x, k), k),
    partial_by_keyword=lambda k: functools.partial(lambda x, k: work(x, k=k), k=k),
    object_that_is_called=Scaled,
    slotted_object=Slotted,
    bound_method=lambda k: Scaled(k).method,
    class_method=lambda k: functools.partial(Scaled.of_class, k),
    method_of_a_function=lambda k: types.MethodType(lambda k, x: work(x, k), k),
    module=lambda k: nn.Sequential(Scaling(k), nn.Tanh()),
)
def gone_after_the_call(make):
    return per_call(make)


@program
def a_loop_variable_read_by_lambdas(wrap):
    xs = [leaf(seed=i) for i in range(3)]
    outs = []
    for i, x in enumerate(xs):
        outs.append(wrap(lambda: work(x, i + 1))())  # noqa: B023
    back(outs)
    return outs, [x.grad for x in xs]


@program
def a_loop_that_replaces_its_input(wrap):
    x = first = leaf()
    for k in range(4):
        x = wrap(lambda: work(x, k + 1).tanh())()  # noqa: B023
    back(x)
    return x, first.grad


@program
def a_name_deleted_between(wrap):
    k = 3

    def fn(x):
        return work(x, k)  # noqa: F821

    x = leaf()
    out = wrap(fn)(x)
    del k
    back(out)
    return out, x.grad


@program
def a_cache_of_a_graph():
    weight = leaf(seed=5)
    scaled = functools.cache(lambda: work(weight))
    return loop(lambda x: work(x * scaled()), state=lambda: weight.grad, count=1)


@family(**{"600": 600, "3,000": 3000})
def a_linked_list_of_nodes(count):
    head = None
    for k in range(count):
        head = types.SimpleNamespace(k=k % 3, next=head)

    def fn(x):
        node, total = head, 0
        while node is not None:
            total, node = total + node.k, node.next
        return work(x, 1 + total / count)

    return loop(fn, between=lambda: setattr(head, "k", 5))


@program
def a_stack_that_is_pushed_and_popped():
    stack = [1]

    @contextlib.contextmanager
    def scale(k):
        stack.append(stack[-1] * k)
        try:
            yield
        finally:
            stack.pop()

    def fn(x):
        with scale(2):
            x = work(x, stack[-1])
            with scale(1.5):
                x = work(x, stack[-1])
        return work(x, stack[-1])

    return loop(fn, state=lambda: stack)


# --- What they remember ---


class Cached:
    made = 0

    @functools.cached_property
    def k(self):
        self.made += 1
        return 2 + self.made


class Config:
    instance = None

    @classmethod
    def get(cls):
        if cls.instance is None:
            cls.instance = cls()
            cls.instance.k = 1
        cls.instance.k += 1
        return cls.instance


class Registered:
    def __init_subclass__(cls, registry):
        registry[cls.__name__] = cls


def last_of(tree):
    while "next" in tree:
        tree = tree["next"]
    return tree


def nested(value, depth=600):
    for _ in range(depth):
        value = [value]
    return value


def innermost(value):
    while isinstance(value[0], list):
        value = value[0]
    return value


def added(fn):
    return lambda: fn() + 0.01


texts(globals())
