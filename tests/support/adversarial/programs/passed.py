"""Containers and objects that are passed, and changed by the user or the function."""

import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from support.adversarial.program import (
    around,
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


class Log(list):
    def __iter__(self):
        return reversed([self[i] for i in range(len(self))])


class Table(dict):
    def values(self):
        return ()


@dataclass
class Data:
    items: list = field(default_factory=lambda: [1])


@dataclass(slots=True)
class SlottedData:
    items: list = field(default_factory=lambda: [1])


class Named(NamedTuple):
    items: Any


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = [1]


class HoldingInSlots(nn.Module):
    __slots__ = ("items",)

    def __init__(self):
        super().__init__()
        self.items = [1]


class Words(tuple):
    """A tuple with attributes."""


def words():
    found = Words(("a", "b"))
    found.items = [1]
    return found


# What is passed, and the list in it.
PASSED = {
    "list": (lambda: [1], lambda v: v),
    "list in a list": (lambda: [[1]], lambda v: v[0]),
    "list in a tuple": (lambda: ([1],), lambda v: v[0]),
    "list in a dict": (lambda: {"a": [1]}, lambda v: v["a"]),
    "list in a namedtuple": (lambda: Named([1]), lambda v: v.items),
    "list in a dataclass": (Data, lambda v: v.items),
    "list in slots": (SlottedData, lambda v: v.items),
    "list in a namespace": (
        lambda: types.SimpleNamespace(items=[1]),
        lambda v: v.items,
    ),
    "list in a module": (Holding, lambda v: v.items),
    "list in slots of a module": (HoldingInSlots, lambda v: v.items),
    "list in a variable": (lambda: types.CellType([1]), lambda v: v.cell_contents),
    "list in an OrderedDict": (lambda: OrderedDict(a=[1]), lambda v: v["a"]),
    "list in a defaultdict": (lambda: defaultdict(list, a=[1]), lambda v: v["a"]),
    "list in an attribute of a tuple": (words, lambda v: v.items),
    "list in a UserDict": (lambda: UserDict(a=[1]), lambda v: v["a"]),
    "list in a deque": (lambda: deque([[1]]), lambda v: v[0]),
    "UserList": (lambda: UserList([1]), lambda v: v),
    "deque": (lambda: deque([1]), lambda v: v),
    "list that overrides iteration": (lambda: Log([1]), lambda v: v),
    "list in a dict that hides values": (lambda: Table(a=[1]), lambda v: v["a"]),
    "method of a list": (lambda: [1].append, lambda v: v.__self__),
    "closure": (lambda: (lambda held: lambda: held)([1]), lambda v: v()),
}


@family(**PASSED)
def appended_by_the_function(case):
    make, get = case
    value = make()

    def fn(x, value):
        get(value).append(len(get(value)) + 1)
        return work(x, get(value)[-1] / 2)

    return loop(fn, args=(value,), state=lambda: [*get(value)])


@family(**PASSED)
def appended_by_the_user(case):
    make, get = case
    value = make()
    fn = lambda x, value: work(x, get(value)[-1])
    change = lambda: get(value).append(5)
    return loop(fn, args=(value,), between=change, state=lambda: [*get(value)])


@family(**PASSED)
def kept_by_the_function(case):
    make, get = case
    value, kept = make(), []

    def fn(x, value):
        if not any(v is value for v in kept):
            kept.append(value)
        get(value).append(len(kept))
        return work(x, sum(get(kept[-1])))

    return loop(fn, args=(value,), state=lambda: ([*get(value)], kept[0] is value))


@family(**PASSED)
def passed_twice(case):
    make, get = case
    value = make()

    def fn(x, a, b):
        get(a).append(2)
        return work(x, len(get(b)) + (a is b))

    return loop(fn, args=(value, value), state=lambda: [*get(value)])


@family(**PASSED)
def filled_with_outputs(wrap, case):
    make, get = case

    def fn(x, value):
        get(value).append(work(x))
        return work(get(value)[-1].tanh())

    run, seen = wrap(fn), []
    for i in range(3):
        x, value = leaf(seed=i), make()
        out = run(x, value)
        (out.sum() + get(value)[-1].sum()).backward()
        seen.append(observed((out, x.grad, [*get(value)])))
    return seen


@family(**PASSED)
def gone_after_the_call(case):
    make, get = case
    fn = lambda x, value: work(x, get(value)[0])
    return around(fn, lambda run: lambda x: run(x, make()), by=reversed_loop)


@program
def keywords_that_are_collected():
    def fn(x, *rest, **options):
        options["n"] = options.get("n", 0) + len(rest)
        return work(x, options["n"])

    return around(fn, lambda run: lambda x: run(x, 1, 2, n=1))


@program
def tensors_in_nested_containers(wrap):
    def fn(tree):
        tree["list"].append(work(tree["list"][0]))
        return sum(t.sin() for t in tree["list"]) * tree["pair"][1]

    x = leaf()
    tree = {"list": [x, x * 2], "pair": (x, x.exp())}
    out = wrap(fn)(tree)
    tree.clear()
    back(out)
    return out, x.grad


@program
def a_passed_list_emptied_by_the_function(wrap):
    def fn(values):
        total = work(values.pop())
        while values:
            total = total * work(values.pop())
        return total

    x = leaf()
    values = [x, x * 2, x.tanh()]
    out = wrap(fn)(values)
    back(out)
    return out, x.grad, values


@program
def a_passed_list_reused_for_each_call(wrap):
    fn = lambda values: work(values[0]) * values[1]

    run, xs, values = wrap(fn), [leaf(seed=i) for i in range(4)], [None, None]
    outs = []
    for i in range(3):
        values[:] = xs[i : i + 2]
        outs.append(run(values))
    back(outs)
    return outs, [x.grad for x in xs]


@program
def a_passed_dict_updated_in_place_by_each_layer(wrap):
    def layer(state):
        state["x"] = work(state["x"]).tanh()
        state["n"] += 1
        return state

    run, x = wrap(layer), leaf()
    state = {"x": x, "n": 0}
    for _ in range(3):
        state = run(state)
    back(state["x"])
    return state["x"], state["n"], x.grad


@program
def a_returned_container_that_was_passed(wrap):
    def fn(x, held):
        held.append(work(x))
        return held

    run, x, held = wrap(fn), leaf(), []
    found = run(x, held)
    back(found)
    return found, x.grad, found is held


@program
def a_returned_object_that_is_made(wrap):
    fn = lambda x: types.SimpleNamespace(y=work(x), more=[x.sin()])

    x = leaf()
    found = wrap(fn)(x)
    back([found.y, *found.more])
    return found, x.grad


@program
def a_passed_iterator_of_a_list():
    fn = lambda x, it: work(x, sum(it))
    return around(fn, lambda run: lambda x: run(x, iter([1, 2])))


@program
def a_passed_tensor_in_a_set():
    k = torch.ones(16, dtype=torch.double) * 2
    fn = lambda x, held: work(x * next(iter(held)), 2 if k in held else 3)
    return loop(fn, args=({k},))


@program
def the_order_of_a_passed_set_of_layers():
    held = {nn.Tanh() for _ in range(200)}
    in_order = [*map(id, held)]
    fn = lambda x, held: work(x, 2 if [*map(id, held)] == in_order else 3)
    return loop(fn, args=(held,))


@program
def tensors_of_another_device(wrap):
    fn = lambda tree: (work(tree["a"][0]) * torch.rand(16), tree["b"]["m"].sin())

    x, m = leaf(), torch.empty(3, device="meta", requires_grad=True)
    out, on_meta = wrap(fn)({"a": [x, None], "b": {"m": m}})
    back(out)
    return out, x.grad, on_meta.is_meta
