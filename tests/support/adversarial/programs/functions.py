"""Functions and classes: where they lead, how they are made, what they remember."""

import contextlib
import functools
import gc
import operator
import types
from collections import defaultdict, deque

import torch
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

    @staticmethod
    def static(k, x):
        return work(x, k)


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return work(x, self.k)


def of_a_local_class(k):
    class Local(Scaled):
        def __init__(self, k):
            super().__init__(k)
            self.more = {"a": [k]}

        def __call__(self, x):
            return super().__call__(x) * self.more["a"][0]

    return Local(k)


def module_of_a_local_class(k):
    class Local(nn.Module):
        gain = 2.0

        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x):
            return work(x * self.weight, self.gain)

    module = Local(torch.full((16,), float(k), dtype=torch.double))
    return lambda x: module(x)


def closure(k):
    def fn(x):
        return work(x, k)

    return fn


def closure_of_closure(k):
    inner = closure(k)
    return lambda x: inner(x)


def partial_in_partial(k):
    return functools.partial(functools.partial(lambda a, b, x: work(x, a + b), k), 1)


def wrapped(k):
    @functools.wraps(work)
    def fn(x):
        return work(x, k)

    return fn


def evaluated(k):
    scope = {"work": work, "k": k}
    exec("def fn(x): return work(x, k)", scope)
    return scope["fn"]


def recursive(k):
    def fn(x, depth=3):
        return work(x, k) if depth == 0 else fn(x, depth - 1).tanh()

    return fn


def with_a_tensor(k):
    weight = torch.full((16,), float(k), dtype=torch.double)
    return lambda x: work(x, weight)


def with_a_parameter(k):
    weight = leaf(seed=k)
    return lambda x: work(x * weight)


def with_a_list(k):
    held = [k]
    return lambda x: work(x, held.pop() if len(held) > 1 else held[0])


def with_an_object(k):
    holder = types.SimpleNamespace(k=k, more={"a": [k]})
    return lambda x: work(x, holder.k + holder.more["a"][0])


def with_an_intermediate(k):
    weight = leaf(seed=k) * 2
    return lambda x: work(x * weight)


def dispatched(k):
    @functools.singledispatch
    def fn(x):
        raise TypeError

    @fn.register
    def _(x: torch.Tensor):
        return work(x, k)

    return fn


def module_of(k):
    module = nn.Linear(16, 16).double()
    nn.init.constant_(module.weight, k / 10)
    return nn.Sequential(module, nn.Tanh())


@family(
    lambda_=lambda k: lambda x: work(x, k),
    default=lambda k: lambda x, k=k: work(x, k),
    closure=closure,
    closure_of_a_closure=closure_of_closure,
    partial=lambda k: functools.partial(lambda k, x: work(x, k), k),
    partial_by_keyword=lambda k: functools.partial(lambda x, k: work(x, k=k), k=k),
    partial_in_a_partial=partial_in_partial,
    wrapped=wrapped,
    evaluated=evaluated,
    recursive=recursive,
    object_that_is_called=Scaled,
    slotted_object=Slotted,
    object_of_a_local_class=of_a_local_class,
    module_of_a_local_class=module_of_a_local_class,
    bound_method=lambda k: Scaled(k).method,
    class_method=lambda k: functools.partial(Scaled.of_class, k),
    static_method=lambda k: functools.partial(Scaled.static, k),
    partial_of_a_method=lambda k: functools.partial(Scaled(k).method),
    method_of_a_function=lambda k: types.MethodType(lambda k, x: work(x, k), k),
    with_a_tensor=with_a_tensor,
    with_a_parameter=with_a_parameter,
    with_a_list=with_a_list,
    with_an_object=with_an_object,
    with_an_intermediate=with_an_intermediate,
    dispatched=dispatched,
    composed=lambda k: (lambda f: lambda x: f(f(x)))(closure(k)),
)
def gone_after_the_call(make):
    return per_call(make)


@program
def a_module_that_is_gone_after_the_call():
    def step(wrap):
        torch.manual_seed(1)
        x = leaf()
        out = wrap(module_of(2))(work(x)).sin() * wrap(lambda x: work(x))(x)
        back(out)
        return observed((out, x.grad))

    return step


@program
def closures_made_in_a_loop():
    fns = [lambda x: work(x, k) for k in range(1, 4)]  # noqa: B023

    def step(wrap):
        seen = []
        for fn in [wrap(fn) for fn in fns]:
            x = leaf()
            out = fn(x)
            back(out)
            seen.append(observed((out, x.grad)))
        return seen

    return step


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
def a_loop_that_replaces_its_layer():
    layers = [nn.Tanh(), nn.Sigmoid(), nn.SiLU()]

    def step(wrap):
        x = first = leaf()
        for layer in layers:
            x = wrap(lambda x: work(layer(x)))(x)  # noqa: B023
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
def a_name_set_after_the_function():
    def step(wrap):
        def fn(x):
            return work(x, k)

        k = 2
        x = leaf()
        out = wrap(fn)(x)
        k = 5
        back(out)
        return observed((out, x.grad, k))

    return step


@program
def a_nonlocal_two_levels_up():
    count = 0

    def outer():
        def inner(x):
            nonlocal count
            count += 1
            return work(x, count)

        return inner

    return reversed_loop(outer(), state=lambda: count)


@program
def two_closures_that_share_a_variable():
    total = 0

    def add(x):
        nonlocal total
        total += 1
        return work(x, total)

    read = lambda x: work(x, total)

    def step(wrap):
        a, b, x = wrap(add), wrap(read), leaf()
        out = b(a(x)) * a(b(x))
        back(out)
        return observed((out, x.grad, total))

    return step


@program
def an_accumulated_default():
    def fn(x, log=[]):  # noqa: B006
        log.append(len(log) + 1)
        return work(x, sum(log))

    return loop(fn, state=lambda: fn.__defaults__)


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
def a_cache_of_a_tensor():
    @functools.cache
    def mask(n):
        return torch.arange(n, dtype=torch.double).cos()

    return loop(lambda x: work(x * mask(len(x))))


@program
def a_cache_of_a_graph():
    weight = leaf(seed=5)

    def step(wrap):
        @functools.cache
        def scaled():
            return work(weight)

        run, x = wrap(lambda x: work(x * scaled())), leaf()
        out = run(x)
        back(out)
        return observed((out, x.grad, weight.grad))

    return step


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
def a_cached_property_deleted_between():
    class Model:
        made = 0

        @functools.cached_property
        def k(self):
            self.made += 1
            return 2 + self.made

        def __call__(self, x):
            return work(x, self.k)

    model = Model()
    return loop(model, between=lambda: vars(model).pop("k"), state=lambda: model.made)


@program
def a_lazy_attribute_by_getattr():
    class Model:
        def __getattr__(self, name):
            if name != "k":
                raise AttributeError(name)
            self.k = 3
            return 2

        def __call__(self, x):
            return work(x, self.k)

    model = Model()
    return loop(model, state=lambda: vars(model))


@program
def a_method_replaced_between():
    class Model:
        def __call__(self, x):
            return self.act(x)

        def act(self, x):
            return work(x, 2)

    model = Model()

    def between():
        model.act = lambda x: work(x, 3)

    return loop(model, between=between)


@program
def a_method_of_the_class_replaced_between():
    class Model:
        def __call__(self, x):
            return self.act(x)

        def act(self, x):
            return work(x, 2)

    def between():
        Model.act = lambda _, x: work(x, 3)

    return loop(Model(), between=between)


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
def a_property_that_counts():
    class Model:
        reads = 0

        @property
        def k(self):
            self.reads += 1
            return self.reads

    model = Model()
    return loop(lambda x: work(x, model.k), state=lambda: model.reads)


@program
def a_descriptor_with_a_name():
    class Field:
        def __set_name__(self, owner, name):
            self.name = f"_{name}"

        def __get__(self, owner, kind):
            return getattr(owner, self.name, 1)

        def __set__(self, owner, value):
            setattr(owner, self.name, value * 2)

    class Model:
        k = Field()

    model = Model()

    def fn(x):
        model.k = model.k + 1
        return work(x, model.k / 4)

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
def an_instance_counter_of_a_class():
    class Node:
        made = 0

        def __init__(self):
            Node.made += 1
            self.k = Node.made

    return loop(lambda x: work(x, Node().k), state=lambda: Node.made)


@program
def an_instance_counter_in_new():
    class Node:
        made = 0

        def __new__(cls):
            cls.made += 1
            return super().__new__(cls)

    def fn(x):
        Node()
        return work(x, Node.made)

    return reversed_loop(fn, state=lambda: Node.made)


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


@program
def operators_that_are_overloaded():
    class Number:
        def __init__(self, k):
            self.k = k

        def __iadd__(self, other):
            self.k += other
            return self

        def __mul__(self, x):
            return work(x, self.k)

    number = Number(1)

    def fn(x):
        nonlocal number
        number += 1
        return number * x

    return loop(fn, state=lambda: number.k)


@program
def an_item_getter():
    held = {"k": 1}
    get = operator.itemgetter("k")

    def fn(x):
        held["k"] += 1
        return work(x, get(held))

    return loop(fn, state=lambda: held)


@program
def a_method_caller_and_a_partial_method():
    class Model:
        k = 1

        def add(self, n):
            self.k += n
            return self.k

        one = functools.partialmethod(add, 1)

    model = Model()
    return loop(lambda x: work(x, model.one()), state=lambda: model.k)


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
def objects_in_a_ring():
    a, b = types.SimpleNamespace(k=1), types.SimpleNamespace(k=2)
    a.next, b.next = b, a

    def fn(x):
        a.next.next.next.k += 1
        return work(x, b.k)

    return reversed_loop(fn, state=lambda: (a.k, b.k))


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
def a_queue_that_rotates():
    held = deque([1, 2, 3])

    def fn(x):
        held.rotate(1)
        return work(x, held[0])

    return reversed_loop(fn, state=lambda: held)


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


@program
def a_dict_that_counts_misses():
    class Counting(dict):
        misses = 0

        def __missing__(self, key):
            self.misses += 1
            self[key] = self.misses
            return self.misses

    held = Counting()
    return reversed_loop(
        lambda x: work(x, held["a"] + held.misses), state=lambda: (held, held.misses)
    )


@program
def an_exit_stack():
    log = []

    def fn(x):
        with contextlib.ExitStack() as stack:
            stack.callback(log.append, 1)
            return work(x, 2 + len(log))

    return loop(fn, state=lambda: log)
