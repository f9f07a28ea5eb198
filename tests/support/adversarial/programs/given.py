"""What was passed is itself in a recompute: containers, objects and tensors."""

import functools
import types
import weakref
from collections import OrderedDict, UserList, defaultdict, deque
from typing import Any, NamedTuple
from unittest.mock import MagicMock  # noqa: F401 -- a row makes one

import torch
from support.adversarial.program import (
    State,
    around,
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
from torch.utils.checkpoint import checkpoint


class Log(list):
    """A list with attributes."""


class Table(dict):
    """A dict with attributes."""


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ("items", "k")

    def __init__(self, k=1):
        self.items, self.k = [k], k


class Owner:
    def method(self):
        return self


# What is passed: each is made anew for each call.
KINDS = {
    "list": lambda: [1, "a"],
    "dict": lambda: {"a": 1},
    "tuple": lambda: (1, object()),
    "named_tuple": lambda: Pair([1], 2),
    "deque": lambda: deque([1]),
    "set": lambda: {1},
    "frozenset": lambda: frozenset([object()]),
    "OrderedDict": lambda: OrderedDict(a=1),
    "defaultdict": lambda: defaultdict(list, a=1),
    "subclass_of_list": lambda: Log([1]),
    "subclass_of_dict": lambda: Table(a=1),
    "UserList": lambda: UserList([1]),
    "slots": Slotted,
    "namespace": lambda: types.SimpleNamespace(k=1),
    "partial": lambda: functools.partial(float, 2),
    "partial_of_a_list": lambda: functools.partial(len, [1]),
    "bound_method": lambda: Owner().method,
    "method_of_a_list": lambda: [1].append,
    "tensors": lambda: [torch.ones(16).double()],
}
HASHABLE = {
    name: KINDS[name]
    for name in ("slots", "partial", "bound_method", "tuple", "frozenset")
}


def passed(fn, make):
    """Return a step that passes a value to each of three calls, then runs backward.

    `fn` returns what a call is, from all three values.
    """

    def step(wrap):
        values, xs = [make() for _ in range(3)], [leaf(seed=i) for i in range(3)]
        run = wrap(fn(values))
        outs = [run(x, value) for x, value in zip(xs, values, strict=True)]
        back(outs)
        return observed((outs, [x.grad for x in xs]))

    return step


@family(**KINDS)
def a_table_by_the_identity_of(make):
    def fn(values):
        table = {id(value): i for i, value in enumerate(values, 2)}
        return lambda x, value: work(x, table.get(id(value), 9))

    return passed(fn, make)


@program
def a_table_by_the_identity_of_a_pair_of_tensors():
    def fn(values):
        table = {id(value): i for i, value in enumerate(values, 2)}
        return lambda x, pair: work(x * pair[0] + pair[1].sin(), table.get(id(pair), 9))

    return passed(fn, lambda: (leaf(seed=8), leaf(seed=9) * 2))


@family(**KINDS)
def a_table_by_the_identity_of_what_is_in_a(make):
    def fn(values):
        table = {id(value[0]): i for i, value in enumerate(values, 2)}
        return lambda x, value: work(x, table.get(id(value[0]), 9))

    return passed(fn, lambda: (make(),))


@family(**HASHABLE)
def a_key_that_is_a(make):
    def fn(values):
        table = {value: i for i, value in enumerate(values, 2)}
        return lambda x, value: work(x, table.get(value, 9))

    return passed(fn, make)


@family(**HASHABLE)
def a_key_in_a_cache_that_is_a(make):
    def fn(values):
        table = {id(value): i for i, value in enumerate(values, 2)}
        scale = functools.lru_cache(lambda value: table.get(id(value), 9))
        return lambda x, value: work(x, scale(value))

    return passed(fn, make)


@family(**{n: KINDS[n] for n in ("list", "subclass_of_list", "deque", "tensors")})
def grown_by_the_function_and_the_user(wrap, make):
    def fn(values):
        table = {id(value): i for i, value in enumerate(values, 2)}

        def call(x, value):
            value.append(len(value))
            return work(x, table.get(id(value), 9) + value[-1])

        return call

    values, xs = [make() for _ in range(3)], [leaf(seed=i) for i in range(3)]
    run = wrap(fn(values))
    outs = [run(x, value) for x, value in zip(xs, values, strict=True)]
    for value in values:
        value.append("later")
    back(outs)
    return outs, [x.grad for x in xs], values


@program
def a_passed_list_that_holds_itself():
    held = [2]
    held.append(held)
    known = {id(held)}
    fn = lambda x, value: work(x, value[0] + (id(value[1][1]) in known))
    return loop(fn, args=(held,))


@program
def a_passed_tuple_around_an_input_that_is_gone(wrap):
    def fn(x, pair):
        return work(x * pair[0], 2 if pair[1] is pair[0] else 3)

    run, x = wrap(fn), leaf()
    y = x * 2
    out = run(x, (y, y))
    del y
    back(out)
    return out, x.grad


# --- Tensors ---


def _marked(x):
    x.tag = 1


def _hooked(x):
    x.register_hook(lambda g: g * 2)


# What a function does with a parameter or an input that leaves something on it.
MARKS = {
    "an_attribute_of_a_parameter": lambda x, p: _marked(p),
    "a_hook_of_a_parameter": lambda x, p: _hooked(p),
    "an_attribute_of_the_input": lambda x, p: _marked(x),
    "a_hook_of_the_input": lambda x, p: _hooked(x),
    "a_hook_of_what_is_made": lambda x, p: _hooked(x * 1),
    "a_hook_of_the_node": lambda x, p: x.grad_fn.register_prehook(
        lambda g: (g[0] * 2,)
    ),
}


@family(**MARKS)
def an_input_is_itself_beside(wrap, mark):
    x, p = leaf(), leaf(seed=2)
    p._is_initialized = True
    made = [x * i for i in range(1, 4)]
    table = {id(y): i for i, y in enumerate(made, 2)}

    def fn(y, p):
        mark(y, p)
        return work(y * p, table.get(id(y), 9))

    run = wrap(fn)
    outs = [run(y, p) for y in made]
    back(outs)
    tags = [getattr(t, "tag", None) for t in (p, *made)]
    hooks = [len(t._backward_hooks or ()) for t in (p, *made)]
    return outs, x.grad, p.grad, tags, hooks


def _nested(wrap, fn):
    inner = wrap(fn)
    return wrap(lambda y: inner(y) * 2)


def _packed(wrap, fn):
    run = wrap(fn)

    def call(y):
        with torch.autograd.graph.save_on_cpu():
            return run(y)

    return call


def _within(wrap, fn):
    run = wrap(fn)

    def call(y):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return run(y)

    return call


@family(a_nested_call=_nested, save_on_cpu=_packed, hooks_for_saved_tensors=_within)
def an_input_is_itself_in(wrap, within):
    x = leaf()
    made = [x * i for i in range(1, 4)]
    table = {id(y): i for i, y in enumerate(made, 2)}
    run = within(wrap, lambda y: work(y, table.get(id(y), 9)))
    back(outs := [run(y) for y in made])
    return outs, x.grad


@program(recomputes=False)  # once, as torch's checkpoint around it does in plain code
def an_input_is_itself_in_torchs_checkpoint(wrap):
    def within(wrap, fn):
        return functools.partial(checkpoint, wrap(fn), use_reentrant=False)

    return an_input_is_itself_in(wrap, within)


@program
def an_input_with_other_memory_under_hooks(wrap):
    x, held = leaf(), leaf(seed=3).detach()
    run = _within(wrap, lambda y: work(y * held.clone(), 2))
    outs = []
    for _ in range(2):
        y = x * 2
        outs.append(run(y))
        y.data = torch.zeros(16).double()
    back(outs)
    return outs, x.grad


@program
def hooks_on_an_input_that_was_made(wrap):
    seen = State(count=0)

    def hook(g):
        seen.count += 1
        return g * 2

    def fn(y):
        y.register_hook(hook)
        return work(y)

    x = leaf()
    y = x * 3
    y.register_hook(hook)
    out = wrap(fn)(y)
    back(out)
    return out, x.grad, seen.count


# --- Tensors that share memory, and others that are hard to stand in for ---


PARTS = {
    "a_part_that_is_gone": lambda b: (b, b[:8]),
    "two_parts_that_are_gone": lambda b: (b[2:], b[:8]),
    "numbers_of_another_kind": lambda b: (b[:8].view(torch.int64), b),
}


@family(**PARTS)
def a_buffer_and(wrap, parts):
    def fn(x, a, b):
        b[:4].fill_(2.0)  # a second time, it makes no difference
        return work(x * a.double().sum() * b.sum() / 99)

    run, x, seen = wrap(fn), leaf(), []
    for i in range(3):
        buffer = torch.arange(i, 16.0 + i).double()
        out = run(x, *parts(buffer))
        buffer[9:] += i
        back(out)
        seen.append(observed((out, x.grad, buffer)))
    return seen


class Wrapper(torch.Tensor):
    """A tensor with attributes, of which `detach` gives a plain one."""

    @staticmethod
    def __new__(cls, data, size):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        made.data_, made.size_ = data, size
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [a.data_ if isinstance(a, Wrapper) else a for a in args]
        return func(*plain, **(kwargs or {}))


@family(of_integers=torch.int64, of_floats=torch.double)
def a_wrapper_with_attributes(dtype):
    fn = lambda x, index: work(x * index.size_ * index.data_)
    make = lambda: Wrapper(torch.arange(16, dtype=dtype).add_(1), 3)
    return around(fn, lambda run: lambda x: run(x, make()))


@program
def a_tensor_of_a_vmap_that_has_ended():
    held = State(last=None)
    weights = leaf(3, 16, seed=4)

    def one(row, weight):
        held.last = weight
        return work(row * held.last)

    fn = lambda x: torch.func.vmap(one)(x.expand(3, 16), weights)
    return loop(fn, state=lambda: weights.grad)


@program
def a_module_with_parameters_of_a_vmap_that_has_ended():
    layer = nn.Linear(16, 16).double()
    given = {name: leaf(2, *p.shape) for name, p in layer.named_parameters()}

    def one(row, given):
        layer._parameters.update(given)
        return work(layer(row))

    fn = lambda x: torch.func.vmap(one)(x.expand(2, 16), given)
    return loop(fn, state=lambda: [p.grad for p in given.values()])


# --- Keys that are made by each call ---


KEYS = {
    "an_object": lambda owner: ("a", owner),
    "a_function": lambda owner: (work, 1),
    "a_tuple": lambda owner: ("a", (owner, frozenset([owner]))),
    "a_frozenset": lambda owner: frozenset([owner, 1]),
    "a_named_tuple": lambda owner: Pair(owner, 1),
}


@family(**KEYS)
def a_memo_that_is_cleared_whose_keys_hold(key_of):
    owner = State(memo={}, weight=leaf(seed=4))

    def fn(x):
        key, before = key_of(owner), len(owner.memo)
        owner.memo.clear()
        owner.memo[key] = work(owner.weight, before + 1)
        return work(x * owner.memo[key_of(owner)])

    return loop(fn, state=lambda: (owner.weight.grad, len(owner.memo)))


# --- What stands for something else ---


@program
def a_passed_weak_proxy():
    owner = State(k=2)
    between = lambda: setattr(owner, "k", owner.k + 1)
    fn = lambda x, given: work(x, given.k)
    return loop(fn, between=between, args=(weakref.proxy(owner),))


@program
def a_weak_proxy_of_what_is_gone():
    proxy = weakref.proxy(State(k=2))

    def fn(x):
        try:
            return work(x, proxy.k)
        except ReferenceError:
            return work(x, 5)

    return loop(fn)


texts(globals())
