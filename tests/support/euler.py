"""Euler's identity, x . grad f(x) = 2 f(x), for f of degree 2 with masks in it.

It holds whatever the masks are, as long as the value and the gradient are of the same
ones. So it needs no other run to compare with, and fails wherever a recompute drew
something else.
"""

import itertools
import os
import random as python_random

import numpy as np
import torch
from torch import nn

from remat import random


N = 64
W = torch.randn(N, N, dtype=torch.double)
XS = torch.randn(4, N, dtype=torch.double)
X = XS[0]
KEYS = random.split(random.key(7), 4)
K = KEYS[0]


def dropped(x, drop):
    """Homogeneous of degree 2: a layer between two masks, squared."""
    return drop(torch.relu(drop(x) @ W)).square().sum()


def masked(x, draw):
    return dropped(x, lambda t: t * draw())


# --- Sources: given how to wrap, functions of x and of a key that most leave alone ---


def from_key(x, key):
    keys = iter(random.split(key))
    return masked(x, lambda: random.bernoulli(next(keys), 0.5, (N,)))


def from_dropout(x, key):
    keys = iter(random.split(key))
    return dropped(x, lambda t: random.dropout(next(keys), t, 0.5))


def from_generator(x, generator):
    return masked(x, lambda: torch.rand(N, generator=generator) > 0.5)


def from_global(x):
    return dropped(x, nn.functional.dropout)


def from_python(x):
    return masked(x, lambda: torch.tensor([python_random.random() > 0.5 for _ in X]))


def from_numpy(x):
    return masked(x, lambda: torch.from_numpy(np.random.rand(N) > 0.5))


def from_nowhere(x):
    """What cannot be replayed, and so is drawn anew by a recompute."""
    return masked(x, lambda: torch.tensor([byte > 127 for byte in os.urandom(N)]))


def captured_key(wrap):
    return lambda x, key: wrap(lambda x: from_key(x, key))(x)


def generator_argument(wrap):
    generator, fn = torch.Generator().manual_seed(1), wrap(from_generator)
    return lambda x, _: fn(x, generator)


def captured_generator(wrap):
    generator = torch.Generator().manual_seed(1)
    fn = wrap(lambda x: from_generator(x, generator))
    return lambda x, _: fn(x)


def opaque_generator(wrap):
    generators = itertools.repeat(torch.Generator().manual_seed(1))
    fn = wrap(lambda x: from_generator(x, next(generators)))
    return lambda x, _: fn(x)


def bound_outside(wrap):
    fn = wrap(from_global)
    return lambda x, key: random.bind(key)(fn)(x)


def bound_inside(wrap):
    return wrap(lambda x, key: random.bind(key)(from_global)(x))


def keyless(fn):
    def source(wrap):
        wrapped = wrap(fn)
        return lambda x, _: wrapped(x)

    return source


KEYED = {
    "a key": lambda wrap: wrap(from_key),
    "dropout by a key": lambda wrap: wrap(from_dropout),
    "a captured key": captured_key,
    "bound outside": bound_outside,
    "bound inside": bound_inside,
}
GENERATORS = {
    "a generator": generator_argument,
    "a captured generator": captured_generator,
    "an opaque generator": opaque_generator,
}
GLOBAL = {"the global stream": keyless(from_global)}
HOST = {"Python's random": keyless(from_python), "NumPy": keyless(from_numpy)}
SOURCES = KEYED | GENERATORS | GLOBAL | HOST


# --- The check --------------------------------------------------------------------


def disturb():
    """Move every stream, as what runs before a backward may."""
    torch.rand(3)
    python_random.random()
    np.random.rand()


def differentiated(y, x, **options):
    disturb()
    return torch.autograd.grad(y, x, **options)[0]


def assert_euler(path, f):
    for x, g, y in path(f):
        torch.testing.assert_close(x.dot(g) / (2 * y), torch.ones_like(y))
        assert (g == 0).any()
        assert (g != 0).any()


def cross(paths, sources):
    """Every path with every source."""
    return {f"{p}-{s}": (paths[p], sources[s]) for p in paths for s in sources}
