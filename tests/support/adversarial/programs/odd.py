"""Objects in C, keys that compare, iterators that do more, weak references."""

import functools
import sqlite3
import weakref

import numpy as np
from support.adversarial.program import family, loop, program, texts, work


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


# What the rows use besides, which are text.
exec(
    """
import csv, itertools, torch
import numpy as np
from support.adversarial.program import State, leaf
"""
)

texts(globals())
