"""Functions and classes: where they lead, how they are made, what they remember."""

import contextlib
import functools
import gc
import types
from collections import defaultdict

from support.adversarial.program import (
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    reversed_loop,
    work,
)
from torch import nn


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
def a_loop_variable_read_by_lambdas():
    def step(wrap):
        xs = [leaf(seed=i) for i in range(3)]
        outs = []
        for i, x in enumerate(xs):
            outs.append(wrap(lambda: work(x, i + 1))())  # noqa: B023
        back(outs)
        return observed((outs, [x.grad for x in xs]))

    return step


@program
def a_loop_that_replaces_its_input():
    def step(wrap):
        x = first = leaf()
        for k in range(4):
            x = wrap(lambda: work(x, k + 1).tanh())()  # noqa: B023
        back(x)
        return observed((x, first.grad))

    return step


@program
def a_name_deleted_between():
    def step(wrap):
        k = 3

        def fn(x):
            return work(x, k)  # noqa: F821

        x = leaf()
        out = wrap(fn)(x)
        del k
        back(out)
        return observed((out, x.grad))

    return step


@program
def a_cache_of_results():
    calls = []

    @functools.lru_cache(maxsize=2)
    def scale(n):
        calls.append(n)
        return n + len(calls)

    return reversed_loop(lambda x: work(x, scale(2)), state=lambda: calls)


@program
def a_cache_of_results_cleared_between():
    @functools.cache
    def scale(n):
        return n * 2

    state = lambda: scale.cache_info().currsize
    fn = lambda x: work(x, scale(2))
    return loop(fn, between=scale.cache_clear, state=state)


@program
def a_cache_of_a_graph():
    weight = leaf(seed=5)
    scaled = functools.cache(lambda: work(weight))
    return loop(lambda x: work(x * scaled()), state=lambda: weight.grad, count=1)


@program
def a_cached_property():
    class Model:
        made = 0

        @functools.cached_property
        def k(self):
            self.made += 1
            return 2 + self.made

        def __call__(self, x):
            return work(x, self.k)

    model = Model()
    return loop(model, state=lambda: vars(model))


@program
def code_replaced_between():
    def act(x):
        return work(x, 2)

    def other(x):
        return work(x, 3)

    def between():
        act.__code__ = other.__code__

    return loop(lambda x: act(x), between=between)


@program
def a_class_attribute_shadowed_by_the_function():
    class Model:
        k = 1

        def __call__(self, x):
            self.k = self.k + 1
            return work(x, self.k)

    model = Model()
    return reversed_loop(model, state=lambda: vars(model))


@program
def an_attribute_deleted_by_the_function():
    class Model:
        k = 1

    model = Model()
    model.k = 5

    def fn(x):
        y = work(x, model.k)
        vars(model).pop("k", None)
        return y

    return reversed_loop(fn, state=lambda: vars(model))


@program
def a_registry_filled_by_new_classes():
    registry = {}

    class Base:
        def __init_subclass__(cls):
            registry[cls.__name__] = cls

    def fn(x):
        type(f"Made{len(registry)}", (Base,), {})
        return work(x, len(registry))

    return loop(fn, state=lambda: [*registry])


@program
def a_singleton_made_at_the_first_call():
    class Config:
        instance = None

        @classmethod
        def get(cls):
            if cls.instance is None:
                cls.instance = cls()
                cls.instance.k = 2
            else:
                cls.instance.k += 1
            return cls.instance

    return reversed_loop(lambda x: work(x, Config.get().k))


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
def nested_lists_600_deep():
    held = [1]
    for _ in range(600):
        held = [held]

    def fn(x):
        at = held
        while isinstance(at[0], list):
            at = at[0]
        at[0] += 1
        return work(x, at[0])

    return loop(fn)


@program
def closures_400_deep():
    def added(fn):
        return lambda: fn() + 0.01

    fn = lambda: 1
    for _ in range(400):
        fn = added(fn)
    return loop(lambda x: work(x, fn()))


@program
def a_list_that_holds_itself():
    held = [1]
    held.append(held)

    def fn(x):
        held[0] += 1
        return work(x, held[1][1][0])

    return loop(fn, state=lambda: held[0])


@program
def a_tree_that_grows():
    root = {"k": 1}

    def fn(x):
        at = root
        while "next" in at:
            at = at["next"]
        at["next"] = {"k": at["k"] + 1}
        return work(x, at["next"]["k"])

    return reversed_loop(fn, state=lambda: root)


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


@program
def a_missing_entry_is_made():
    held = defaultdict(lambda: len(held) + 1)
    fn = lambda x: work(x, held["a"] + held["b"] + held[len(held)])
    return reversed_loop(fn, state=lambda: held)
