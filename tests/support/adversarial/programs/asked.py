"""What functions ask of tensors: who and what they are, and what they hold.

`asked.txt` has the expressions. What one gives is computed with.
"""

import functools
import io
from pathlib import Path

import torch
from support.adversarial.program import (
    State,
    around,
    family,
    loop,
    reversed_loop,
    within,
    work,
)
from support.tables import sections_of
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu


# What the rows use besides, which are text.
exec(
    """
import copy, inspect, math, operator, pickle, weakref
from collections import OrderedDict
import numpy as np
from torch.overrides import has_torch_function
from torch.utils import dlpack
"""
)


def last_of(held, key, value):
    """Put a value in a dict, and return what was there."""
    before = held.get(key)
    held[key] = value
    return before


def setting(value, **attributes):
    vars(value).update(attributes)
    return value


@functools.singledispatch
def factor(value):
    return 1.0


@factor.register
def _(value: nn.Parameter):
    return 2.0


def matched(z):
    match z:
        case nn.Parameter():
            return z * 2
        case Tensor(shape=(n,)):
            return z * n
    return z


def memo_by_id(x, seen):
    last_of(seen, len(seen), x)  # else another one may get its identity
    return x * seen.setdefault(id(x), len(seen) + 1.0)


def saved(z):
    torch.save(z.detach(), to := io.BytesIO())
    to.seek(0)
    return torch.load(to)


TABLES = sections_of(Path(__file__).with_suffix(".txt"))
ASKS, SUMS = dict(TABLES["asks"]), dict(TABLES["sums"])


def asking(program, *without):
    """Add a program for each question: it is given what asks, and returns a step."""

    def build(wrap, question):
        ask, seen = eval(f"lambda x, z, seen: {question}"), {}
        return program(lambda x: ask(x, x.sin(), seen))

    build.__name__, build.__module__ = program.__name__, program.__module__
    family(**SUMS, is_close=True)(build)
    family(**{name: ask for name, ask in ASKS.items() if name not in without})(build)


@asking
def of_a_leaf(ask):
    return loop(lambda x: work(ask(x)).tanh())


@asking
def of_what_was_computed_and_is_gone(ask):
    fn = lambda x: work(ask(x)).tanh()
    return around(fn, lambda run: lambda x: run(x * 1.5), by=reversed_loop)


@asking
def of_a_product(ask):
    """A policy may save it, and leave out what it is of."""
    w = torch.eye(16, dtype=torch.double) * 2
    fn = lambda x: work(ask(w @ x.sin())).tanh() @ w
    return around(fn, lambda run: lambda x: run(x * 1.5))


@asking
def of_what_nobody_reads(ask):
    def fn(x):
        z = (x * 3).view(4, 4).t().reshape(16)
        return work(x, ask(z).detach().mean()) + z

    return loop(fn)


@asking
def within_a_call(ask):
    def step(wrap):
        run = wrap(lambda x: work(ask(x)).tanh())
        return loop(wrap(lambda x: run(x * 1.5).tanh() + x.sum()))(lambda f: f)

    return step


# Plain code refuses torch.func under hooks.
@lambda program: asking(program, "by grad")
def beside_an_attribute_of_a_parameter(ask):
    module = nn.Linear(16, 16).double()
    nn.init.eye_(module.weight)

    def fn(x):
        module.weight.is_ours = True
        return work(module(ask(x))).tanh()

    outer = within(save_on_cpu, times=1.5)
    return around(fn, outer, state=lambda: module.weight.grad)


@asking
def of_the_second_input(ask):
    held = State(y=None)

    def outer(run):
        def call(x):
            held.y = x.cos()
            return run(x, held.y)

        return call

    return around(lambda x, y: (work(ask(y)) * x).tanh(), outer)
