"""Objects in C, keys that compare, iterators that do more, weak references."""

import csv
import functools
import itertools
import sqlite3
import weakref

import numpy as np
import torch
from support.adversarial.program import State, family, leaf, loop, program, work


class Numbers:
    """An iterator without a dict."""

    __slots__ = ("n",)

    def __init__(self):
        self.n = 1

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return self.n


@program
def a_slot_of_an_iterator():
    numbers = Numbers()
    return loop(lambda x: work(x, numbers.n))


@program
def an_iterator_with_slots():
    numbers = Numbers()
    return loop(lambda x: work(x, next(numbers)), state=lambda: numbers.n)


@program
def the_class_of_an_iterator():
    numbers = map(int, "123")
    return loop(lambda x: work(x, 2 if isinstance(numbers, map) else 3))


@program
def a_reader_of_a_file_that_is_not_read():
    reader = csv.reader(["a", "b"])
    return loop(lambda x: work(x, 2 + reader.line_num))


@program
def a_cursor_of_a_database():
    connection = sqlite3.connect(":memory:")
    cursor = connection.cursor()
    cursor.execute("create table calls (n)")

    def fn(x):
        cursor.execute("insert into calls values (1)")
        return work(x)

    weakref.finalize(fn, connection.close)
    return loop(fn)


class Key:
    """Compares with its kind alone; any other is an error."""

    def __init__(self, k):
        self.k = k

    def __eq__(self, other):
        return self.k == other.k

    def __hash__(self):
        return hash(self.k)


@program
def keys_that_compare_with_their_kind_alone():
    held, new = {Key(0): 2}, iter(range(1, 9))

    def change():
        held.clear()
        held[Key(next(new))] = 3

    return loop(lambda x: work(x, sum(held.values())), between=change)


@program
def an_iterator_that_is_not_read():
    unread = itertools.cycle([2.0])
    return loop(lambda x: work(x) if unread is not None else x)


@program
def a_list_replaced_by_an_array_between():
    held = State(values=[1.0, 2.0])
    change = lambda: setattr(held, "values", np.arange(3))
    return loop(
        lambda x: work(x, sum(held.values)), between=change, state=lambda: held.values
    )


@family(five=5, a_hundred=100)
def the_order_of_a_set_that_the_function_changes(count):
    names = {f"name {k}" for k in range(count)}

    def fn(x):
        y = work(x, 1 + int(next(iter(names)).split()[1]))
        names.add("name 7000")
        names.discard(next(iter(names)))
        return y

    return loop(fn, state=lambda: len(names), count=1)


@program
def a_hook_of_a_leaf_set_by_the_function():
    w, seen = leaf(seed=5), []

    def fn(x):
        w.register_hook(seen.append)
        return work(x * w)

    return loop(fn, state=lambda: (len(seen), len(w._backward_hooks)), count=1)


@program
def a_tensor_resized_by_the_function():
    held = torch.zeros(4)

    def fn(x):
        held.resize_(8).fill_(2)
        y = work(x, held.sum())
        held.resize_(4)
        return y

    return loop(fn, state=lambda: held)


@program
def an_array_without_axes_that_is_passed():
    held = np.array(2.0)

    def fn(x, number):
        y = work(x, float(number))
        np.add(number, 1, out=number)
        return y

    return loop(fn, args=(held,), state=lambda: held)


class Marker:
    """Has no attributes."""

    __slots__ = ()

    def __call__(self, x):
        return work(x)


MISSING = Marker()


@family(
    closure=lambda x: MISSING(x),
    method=MISSING.__call__,
    itself=MISSING,
    default=lambda x, m=MISSING: m(x),
    key=functools.partial(lambda held, x: held[MISSING](x), {MISSING: MISSING}),
)
def an_object_without_attributes(fn):
    return loop(fn)


@program
def an_object_without_attributes_that_is_passed():
    return loop(lambda x, m: work(x, 2 if m is MISSING else 3), args=(MISSING,))


@program
def a_parameter_in_a_list_of_a_thousand():
    held = [leaf(seed=2) for _ in range(1001)]
    return loop(lambda x: work(x * held[1000]), state=lambda: held[1000].grad)
