"""Objects in C, keys that compare, iterators that do more, weak references."""

import functools
import sqlite3
import weakref

import numpy as np
from support.adversarial.program import Text, family, loop, program, texts, work


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

texts(
    globals(),
    {
        "a slot of an iterator": Text("held = Numbers()", "x, held.n", state="held.n"),
        "an iterator with slots": Text(
            "held = Numbers()", "x, next(held)", state="held.n"
        ),
        "the class of an iterator": Text(
            "held = map(int, '123')", "x, 2 if isinstance(held, map) else 3", state="1"
        ),
        "a reader of a file that is not read": Text(
            "held = csv.reader(['a', 'b'])",
            "x, 2 + held.line_num",
            state="held.line_num",
        ),
        "an iterator that is not read": Text(
            "held = itertools.cycle([2])", "x, 3 if held is None else 2", state="None"
        ),
        "keys that compare with their kind alone": Text(
            "held = {Key(0): 2}",
            "x, sum(held.values())",
            between="held.clear(); held[Key(1)] = 3",
            state="[*held.values()]",
        ),
        "a list replaced by an array between": Text(
            "held = State(values=[1.0, 2.0])",
            "x, sum(held.values)",
            between="held.values = np.arange(3)",
        ),
        "a hook of a leaf set by the function": Text(
            "held = leaf(seed=5); seen = []",
            "x * held",
            before="held.register_hook(seen.append)",
            state="(len(seen), len(held._backward_hooks))",
            count=1,
        ),
        "a tensor resized by the function": Text(
            "held = torch.zeros(4)",
            "x, held.sum()",
            before="held.resize_(8).fill_(2)",
            after="held.resize_(4)",
        ),
        "a parameter in a list of a thousand": Text(
            "held = [leaf(seed=2) for _ in range(1001)]",
            "x * held[1000]",
            state="held[1000].grad",
        ),
        **{
            f"the order of a set that the function changes: {count}": Text(
                f"held = {{f'name {{k}}' for k in range({count})}}",
                "x, 1 + int(next(iter(held)).split()[1])",
                after="held.add('name 7000'); held.discard(next(iter(held)))",
                state="len(held)",
                count=1,
            )
            for count in (5, 100)
        },
    },
)
