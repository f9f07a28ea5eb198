"""What is passed, or read past its class, and is also held where no walk leads."""

import functools

import torch
from support.adversarial.program import State, family, loop, nothing, program, work
from torch import nn


# --- A hook holds the container that is passed ---


def by_function(held):
    return lambda _m, _x, y: nothing(held.append(y))


def by_partial(held):
    def hook(given, _m, _x, y):
        given.append(y)

    return functools.partial(hook, held)


class Collecting:
    def __init__(self, held):
        self.held = held

    def __call__(self, _m, _x, y):
        self.held.append(y)

    def method(self, _m, _x, y):
        self.held.append(y)


HOOKS = {
    "function": by_function,
    "partial": by_partial,
    "object": Collecting,
    "method": lambda held: Collecting(held).method,
}


@family(**HOOKS)
def a_passed_list_that_a_hook_fills(make):
    layer, held = nn.Tanh(), []
    layer.register_forward_hook(make(held))
    fn = lambda x, given: work(layer(x)) * given[-1].sin()
    return loop(fn, after=held.clear, args=(held,))


# --- Rows that an embedding scales ---


def embedded(table, *more):
    ids = torch.tensor([1, 3, 3, 7])

    def fn(x):
        y = work(x.reshape(4, 4) * table(ids))
        for ids_of_more in more:
            y = y * table(ids_of_more)
        return y

    return fn


def table_of(scale=5.0):
    torch.manual_seed(3)
    table = nn.Embedding(8, 4, max_norm=1.0, dtype=torch.double)
    with torch.no_grad():
        table.weight.mul_(scale)
    return table


OTHERS = {"the same rows": [1, 7], "other rows": [0, 2], "some of them": [0, 3]}


@family(**OTHERS)
def rows_that_plain_code_scales_between(rows):
    table = table_of()
    return loop(
        embedded(table),
        between=lambda: table(torch.tensor(rows)),
        state=lambda: (table.weight, table.weight.grad),
    )


@family(**OTHERS)
def rows_that_two_calls_scale(wrap, rows):
    table, other = table_of(), torch.tensor(rows)

    run = wrap(embedded(table))
    around = wrap(lambda x: work(x * table(other).sum()))
    return loop(lambda x: run(x).sum() + around(x))(lambda fn: fn)


@program
def rows_that_are_scaled_twice_within_a_call():
    table = table_of()
    fn = embedded(table, torch.tensor([0, 1, 2, 3]), torch.tensor([7, 6, 1, 0]))
    return loop(fn, state=lambda: (table.weight, table.weight.grad))


# --- What a class hides ---


class Slotted:
    __slots__ = ("__weakref__", "value")


class Doubled(Slotted):
    """A property of the name of a slot."""

    __slots__ = ()

    @property
    def value(self):
        return Slotted.value.__get__(self) * 2

    @value.setter
    def value(self, value):
        Slotted.value.__set__(self, value)


class SlottedTwice(Slotted):
    """Two slots of one name."""

    __slots__ = ("value",)


class FromAnIterator:
    """What says which slots there are is used up."""

    __slots__ = iter(("value", "__weakref__"))


@family(property=Doubled, twice=SlottedTwice, iterator=FromAnIterator)
def a_slot_that_its_class_hides(make):
    held = make()
    held.value = 1.0
    if make is SlottedTwice:
        Slotted.value.__set__(held, 3.0)

    def fn(x):
        k = Slotted.value.__get__(held) if make is SlottedTwice else 1.0
        return work(x, held.value * k)

    def between():
        held.value = 0.5
        if make is SlottedTwice:
            Slotted.value.__set__(held, 7.0)

    return loop(fn, between=between, state=lambda: held.value)


class Unhashable(type):
    """A metaclass whose classes cannot be keys."""

    __hash__ = None

    def __eq__(cls, other):
        return cls is other


class OfUnhashable(metaclass=Unhashable):
    def __init__(self):
        self.k = 2.0


@program(recomputes=False)
def an_object_whose_class_cannot_be_hashed():
    held, log = OfUnhashable(), State(count=0)

    def fn(x):
        log.count += 1
        return work(x, held.k)

    return loop(fn)


# --- Deep nesting ---


def nested(make, value, depth=1200):
    for _ in range(depth):
        value = make(value)
    return value


def opened(value):
    while not isinstance(value, (torch.Tensor, float)):
        value = value["a"] if isinstance(value, dict) else value[0]
    return value


@family(
    tuples=lambda v: (v,),
    lists=lambda v: [v],
    both=lambda v: ([v],),
    dicts=lambda v: {"a": v},
)
def containers_passed_that_are_nested_deeply(make):
    held = nested(make, torch.full((16,), 2.0, dtype=torch.double))
    return loop(lambda x, given: work(x * opened(given)), args=(held,))


class Named(tuple):
    """A tuple that holds itself in an attribute."""


@program
def a_tuple_that_leads_to_itself():
    held = Named([2.0])
    held.own = [held, (held,)]
    fn = lambda x, given: work(x, given.own[1][0][0] * len(given.own))
    return loop(fn, args=(held,))
