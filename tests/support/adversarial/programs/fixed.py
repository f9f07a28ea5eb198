"""Values that never change, around what can: of which a recompute makes some again."""

import functools
import gc
import types
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from support.adversarial.program import (
    back,
    family,
    leaf,
    loop,
    program,
    work,
)
from torch import nn


class Slotted:
    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n

    def read(self):
        return self.n


@dataclass(frozen=True, slots=True)
class Named:
    n: float


@dataclass(frozen=True)
class Frozen:
    n: Any
    more: Any = field(default=None, hash=False)


class Pair(NamedTuple):
    first: Any
    second: Any = None


class Row(tuple):
    pass


class Group(frozenset):
    pass


def scaled(x, k, *, by=None, more=()):
    return x * k + sum(more) if by is None else x * by["n"]


def with_attribute(value, **attributes):
    vars(value).update(attributes)
    return value


def total(values):
    return sum(value.n for value in values)


# What makes a value that holds a number, and what reads that.
HOLDERS = {
    "partial": (lambda n: functools.partial(scaled, 1.0, n), lambda v: v()),
    "keywords of a partial": (
        lambda n: functools.partial(scaled, 1.0, k=n, more=[n]),
        lambda v: v(),
    ),
    "dict of a partial": (
        lambda n: functools.partial(scaled, 1.0, 1.0, by={"n": n}),
        lambda v: v(),
    ),
    "list of a partial": (lambda n: functools.partial(sum, [n]), lambda v: v()),
    "attribute of a partial": (
        lambda n: with_attribute(functools.partial(sum, [1]), n=Slotted(n)),
        lambda v: v() + v.n.n,
    ),
    "partial of a partial": (
        lambda n: functools.partial(
            with_attribute(functools.partial(scaled, k=n), n=1), 1.0, more=[n]
        ),
        lambda v: v() * v.func.n,
    ),
    "partial in a tuple": (
        lambda n: (functools.partial(scaled, 1.0, k=n), [n]),
        lambda v: v[0]() + v[1][0],
    ),
    "partial in a dict": (
        lambda n: {"act": functools.partial(scaled, 1.0, k=n)},
        lambda v: v["act"](),
    ),
    "method in a partial": (
        lambda n: functools.partial(Slotted(n).read),
        lambda v: v(),
    ),
    "method of an object with slots": (lambda n: Slotted(n).read, lambda v: v()),
    "method of a list": (lambda n: [n].__getitem__, lambda v: v(0)),
    "method in a named tuple": (
        lambda n: Pair(Slotted(n).read, [n]),
        lambda v: v.first() + v.second[0],
    ),
    "frozen dataclass": (
        lambda n: Frozen([n], (Slotted(n),)),
        lambda v: v.n[0] + total(v.more),
    ),
    "frozen dataclass with slots": (lambda n: Named({"n": n}), lambda v: v.n["n"]),
    "named tuple": (
        lambda n: Pair(Slotted(n), ([n], {"n": n})),
        lambda v: v.first.n + v.second[0][0] * v.second[1]["n"],
    ),
    "tuple of objects with slots": (lambda n: (Slotted(n), Slotted(1)), total),
    "tuple of tuples": (lambda n: (((Named(n),),), Row(([n],))), lambda v: v[1][0][0]),
    "tuple with attributes": (
        lambda n: with_attribute(Row([1, [n]]), n=(Slotted(n),)),
        lambda v: v[1][0] + total(v.n),
    ),
    "frozenset of objects with slots": (
        lambda n: frozenset({Named(n), Named(1.5)}),
        total,
    ),
    "frozenset of frozen dataclasses": (
        lambda n: frozenset({Frozen(n, [n]), Frozen(1.5, [])}),
        lambda v: total(v) + sum(sum(f.more) for f in v),
    ),
    "frozenset with attributes": (
        lambda n: with_attribute(Group({(Named(n),), 1.5}), n=[n]),
        lambda v: v.n[0] + sum(k[0].n for k in v if type(k) is tuple),
    ),
    "frozenset of frozensets": (
        lambda n: frozenset({frozenset({Named(n)}), Pair(Named(1.5))}),
        lambda v: sum(total(k) for k in v if isinstance(k, frozenset)),
    ),
    "set of objects with slots": (lambda n: {Named(n), Named(1.5)}, total),
    "keys with slots": (
        lambda n: {Named(n): [n], (Frozen(1.5),): []},
        lambda v: sum(map(sum, v.values())) + sum(k.n for k in v if type(k) is Named),
    ),
    "read-only mapping": (
        lambda n: types.MappingProxyType({"n": [n]}),
        lambda v: v["n"][0],
    ),
    "slice of objects": (
        lambda n: slice(Slotted(n), [n]),
        lambda v: v.start.n + v.stop[0],
    ),
}


class Layer(nn.Module):
    """A layer with a value `held` that never changes, and what may differ."""

    def __init__(self, held, read):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.held, self.read, self.last = held, read, None
        self.step, self.noise = 1.0, np.ones(1)

    def forward(self, x):
        number = self.read(self.held) * self.step + self.noise.item()
        y = work(self.linear(x * 0.5), number)  # which saves no `x`
        if self.last is not None:
            self.last = y.detach()
        return x + y


def change(layer, what, make):
    if what == "an attribute differs":
        layer.step += 1
    elif what == "an array differs":
        layer.noise += 1
    elif what == "it is replaced":
        layer.held = make(3.5)
    elif what == "it is gone":
        layer.held = None
        gc.collect()


DIFFERENCES = (
    *("nothing differs", "an attribute differs", "an array differs"),
    *("an attribute is written", "the input is gone", "it is replaced", "it is gone"),
)
CASES = {
    f"{name}, {what}": (*HOLDERS[name], what)
    for name, what in product(HOLDERS, DIFFERENCES)
}


@family(**CASES)
def held(wrap, case):
    make, read, what = case
    torch.manual_seed(5)
    layers = [Layer(make(k + 2.5), read) for k in range(2)]
    if what == "an attribute is written":
        for layer in layers:
            layer.last = 0

    x = leaf(4, 4)
    y = x * 1 if what == "the input is gone" else x
    for layer in layers:
        y = wrap(layer)(y)
    del layer
    for layer in layers:
        change(layer, what, make)
    back(y)
    grads = [layer.linear.weight.grad for layer in layers]
    lasts = [layer.last for layer in layers]
    return y, x.grad, grads, lasts, [layer.step for layer in layers]


@program
def a_slice_of_an_object_that_changes():
    held = slice(Slotted(2.0), [1])

    def between():
        held.start.n += 1
        held.stop.append(1)

    return loop(lambda x: work(x, held.start.n * len(held.stop)), between=between)


@family(**HOLDERS)
def passed_and_gone(wrap, case):
    make, read = case

    def fn(x, value):
        return work(x * 0.5, read(value))

    x = leaf()
    y = wrap(fn)(wrap(fn)(x, make(2.5)), make(3.5))
    gc.collect()
    back(y)
    return y, x.grad


def a_tuple_that_leads_to_itself(n):
    held = [n]
    value = Pair(held, (held,))
    held.append(value)
    return value


def a_tuple_in_what_it_holds(n):
    first = (held := {"n": n}, [n])
    held["held"] = [(first,)]
    return first


def an_object_in_its_own_frozenset(n):
    member = Frozen(n)
    group = frozenset({member, Frozen(1.5)})
    vars(member)["more"] = (group,)
    return group


def read_itself(value):
    assert value.first[1] is value
    assert value.second[0] is value.first
    return value.first[0]


def read_around(value):
    assert value[0]["held"][0][0] is value
    return value[0]["n"] + value[1][0]


def read_members(value):
    assert all(f.more is None or f.more[0] is value for f in value)
    return total(value)


AROUND = {
    "tuple": (a_tuple_that_leads_to_itself, read_itself),
    "tuple in a tuple": (a_tuple_in_what_it_holds, read_around),
    "frozenset": (an_object_in_its_own_frozenset, read_members),
}


@family(**AROUND)
def leads_to_itself(wrap, case):
    return held(wrap, (*case, "it is gone"))


@family(**AROUND)
def leads_to_itself_and_is_passed(wrap, case):
    return passed_and_gone(wrap, case)
