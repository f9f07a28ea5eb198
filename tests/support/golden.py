"""The programs of the golden table, and how often JAX runs each operation of them.

tests/parity/test_golden.py runs them in eager code, tests/transform/
test_traced_golden.py in graphs.
"""

from collections import Counter
from functools import partial

import torch

from remat import checkpoint_name, remat
from remat.policies import (
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    save_any_names_but_these,
    save_only_these_names,
)


pruned = partial(remat, prune=True)
nothing = partial(pruned, policy=nothing_saveable)
dots = partial(pruned, policy=dots_saveable)
everything = partial(pruned, policy=everything_saveable)


# --- The programs ---


def sin2(w, x):
    return x.sin().sin()


def sin3(w, x):
    return x.sin().sin().sin()


def sin_exp(w, x):
    return x.sin(), x.exp()


def sin2_exp2(w, x):
    return x.sin().sin(), x.exp().exp()


def linear(w, x):
    return 2 * x + 1


def sin_plus(w, x):
    return x.sin() + w


def product(w, x):
    return w @ x


def block(w, x):
    return torch.tanh(w @ torch.tanh(w @ x))


def first(fn):
    return lambda w, x: fn(w, x)[0]


def two(fn):
    return lambda w, x: fn(w, fn(w, x))


BLOCK, TWO = "dot 2, tanh 2", "dot 4, tanh 4"
# The program as it is, and rematerialized; what runs forward and backward.
ROWS = {
    "sin2": (sin2, pruned(sin2), "sin 2", "sin 1, cos 2"),
    "sin3": (sin3, pruned(sin3), "sin 3", "sin 2, cos 3"),
    "sin, exp": (first(sin_exp), first(pruned(sin_exp)), "sin 1, exp 1", "cos 1"),
    "sin2, exp2": (
        *(first(sin2_exp2), first(pruned(sin2_exp2))),
        *("sin 2, exp 2", "sin 1, cos 2"),
    ),
    "2x+1": (linear, pruned(linear), "mul 1, add 1", "mul 1"),
    "sin(x)+y": (sin_plus, pruned(sin_plus), "sin 1, add 1", "cos 1"),
    "W@x": (product, pruned(product), "dot 1", "dot 2"),
    "plain": (block, block, BLOCK, "dot 4"),
    "remat": (block, pruned(block), BLOCK, "dot 6, tanh 2"),
    "nothing": (block, nothing(block), BLOCK, "dot 6, tanh 2"),
    "dots": (block, dots(block), BLOCK, "dot 4, tanh 2"),
    "everything": (block, everything(block), BLOCK, "dot 4"),
    "remat(remat)": (block, pruned(pruned(block)), BLOCK, "dot 6, tanh 2"),
    "three deep": (block, pruned(pruned(pruned(block))), BLOCK, "dot 6, tanh 2"),
    "remat(dots)": (block, pruned(dots(block)), BLOCK, "dot 6, tanh 3"),
    "dots(remat)": (block, dots(pruned(block)), BLOCK, "dot 4, tanh 2"),
    "everything(remat)": (block, everything(pruned(block)), BLOCK, "dot 4"),
    "two": (two(block), two(pruned(block)), TWO, "dot 12, tanh 4"),
    "remat(two)": (two(block), pruned(two(pruned(block))), TWO, "dot 14, tanh 6"),
}
# In these a weight is used several times in several calls: its gradient is the same sum
# in another order.
REASSOCIATED = {"two", "remat(two)"}

KINDS = {"mm": "dot", "bmm": "dot", "mv": "dot"}


def table(text):
    pairs = (part.split() for part in text.split(", ") if part)
    return Counter({name: int(count) for name, count in pairs})


def executed(ops):
    """What ran: the products by whatever kernel, and no bookkeeping."""
    found = Counter()
    for name, count in ops.items():
        found[KINDS.get(name, name)] += count
    return found


def compared(ops, row):
    """Of what ran, the operations that a row is about."""
    about = table(", ".join((ROWS | ROWS_OF_0_12)[row][2:]))
    return Counter({name: n for name, n in executed(ops).items() if name in about})


def golden(row):
    _, _, in_forward, in_backward = ROWS[row]
    return table(in_forward) + table(in_backward)


# --- More programs, by JAX 0.12 (0.12.0.1), and its two implementations ---


def sines_of_products(w, x):
    return (w @ (w @ (w @ x).sin()).sin()).sin()


def named(w, x):
    h = checkpoint_name(w @ x, "h")
    return torch.tanh(w @ checkpoint_name(torch.tanh(h), "a"))


def saves(*names):
    return pruned(named, policy=save_only_these_names(*names))


SINES = "sin 3, dot 3"
# As above. All rows above are in JAX 0.12 what they are in 0.10.2.
ROWS_OF_0_12 = {
    "other": (
        lambda w, x: sin2_exp2(w, x)[1],
        lambda w, x: pruned(sin2_exp2)(w, x)[1],
        *("sin 2, exp 2", "exp 2"),
    ),
    "three": (
        *(sines_of_products, pruned(sines_of_products)),
        *(SINES, "sin 2, cos 3, dot 9"),
    ),
    "three dots": (
        *(sines_of_products, dots(sines_of_products)),
        *(SINES, "sin 2, cos 3, dot 6"),
    ),
    "named h": (named, saves("h"), BLOCK, "tanh 2, dot 5"),
    "named a": (named, saves("a"), BLOCK, "tanh 2, dot 6"),
    "named ha": (named, saves("h", "a"), BLOCK, "tanh 2, dot 5"),
    "named anybut h": (
        *(named, pruned(named, policy=save_any_names_but_these("h"))),
        *(BLOCK, "tanh 2, dot 6"),
    ),
    "both": (
        named,
        pruned(named, policy=save_only_these_names("h") | dots_saveable),
        *(BLOCK, "tanh 2, dot 4"),
    ),
}
# What the backward runs in its newer implementation (`jax_remat3`), where that differs.
BY_REMAT3 = {
    "remat(dots)": "dot 6, tanh 2",  # one tanh less: it asks no policy of calls within
    "everything(remat)": "dot 6, tanh 2",  # for which it recomputes all of this
}
# What the backward runs here, where that is less than in the older one.
FEWER = {"remat(dots)": "dot 6, tanh 2"}


def backward_of(row):
    """What the backward runs here."""
    return table(FEWER.get(row, ROWS[row][3]))


def ours(row):
    """What runs here."""
    return table(ROWS[row][2]) + backward_of(row)


# --- Calls in a call ---


# Functions that are called in a call; what each runs again by JAX 0.12.0.1, and by its
# newer implementation, where a block within saves its products.
CALLS_WITHIN = {
    "alone": (lambda f, _: f, "dot 2, tanh 3", "dot 2, tanh 2"),
    "two": (lambda f, _: two(f), "dot 4, tanh 7", "dot 6, tanh 6"),
    "three": (
        lambda f, _: lambda w, x: f(w, two(f)(w, x)),
        *("dot 6, tanh 11", "dot 10, tanh 10"),
    ),
    "deep": (lambda f, wrap: wrap(f), "dot 2, tanh 3", "dot 2, tanh 2"),
    "two deep": (lambda f, wrap: two(wrap(f)), "dot 6, tanh 8", "dot 6, tanh 6"),
    "before more": (
        lambda f, _: lambda w, x: f(w, x).sin(),
        *("dot 2, tanh 4", "dot 4, tanh 4"),
    ),
    "before less": (
        lambda f, _: lambda w, x: f(w, x) + 1,
        *("dot 2, tanh 3", "dot 2, tanh 2"),
    ),
    "side by side": (
        lambda f, _: lambda w, x: f(w, x) + f(w, x.sin()),
        *("dot 4, tanh 6", "dot 4, tanh 4"),
    ),
}


def within(case, wrap, save):
    """A function that calls some, as wrapped."""
    return wrap(CALLS_WITHIN[case][0](save(block), wrap))


def as_it_is(fn):
    return fn


def only(ops, *names):
    return Counter({name: ops[name] for name in names})


def least(case):
    """What the better implementation of JAX's runs again, of each operation."""
    return table(CALLS_WITHIN[case][1]) & table(CALLS_WITHIN[case][2])
