"""Buffers of numbers: put back up to 4 MiB, left alone above."""

import array
import ctypes
import mmap
import re
import tracemalloc
import types

import numpy as np
import pytest
import torch
from support.adversarial.holders import Bytes, Grid, Numbers
from support.tables import crossed
from support.zoo import make

from remat import MutationError, chain, remat
from remat.testing import assert_same, count_ops


KIB, MIB = 2**10, 2**20


def mapped(size):
    held = mmap.mmap(-1, size)
    held[:] = b"\1" * size
    return held


# Makes a buffer of so many bytes.
BUFFERS = {
    "bytearray": lambda size: bytearray(b"\1" * size),
    "class of a bytearray": lambda size: Bytes(b"\1" * size),
    "array": lambda size: array.array("d", [1]) * (size // 8),
    "class of an array": lambda size: Numbers("d", [1] * (size // 8)),
    "NumPy array": lambda size: np.ones(size // 8),
    "class of a NumPy array": lambda size: np.ones(size // 8).view(Grid),
    "NumPy array of two rows": lambda size: np.ones((2, size // 16)).T,
    "memoryview": lambda size: memoryview(bytearray(b"\1" * size)),
    "mapped memory": mapped,
    "array of C": lambda size: (ctypes.c_byte * size)(*b"\1" * size),
}


def reading(table):
    return lambda x: (x.sin() * float(np.ravel(table[0])[0])).exp()


# --- A change between the forward and the backward ---


def by_backward(wrap, fn, x, change):
    x.requires_grad_()
    y = wrap(fn)(x)
    change()
    return torch.autograd.grad(y.sum(), x)[0]


def by_pull(wrap, fn, x, change):
    y, pull = torch.func.vjp(wrap(fn), x)
    change()
    return pull(torch.ones_like(y))[0]


def by_second_derivative(wrap, fn, x, change):
    def first(x):
        return by_pull(wrap, fn, x, change).sum()

    return torch.func.grad(first)(x)


def by_chain(wrap, fn, x, change):
    x.requires_grad_()

    def step(carry, _):
        return fn(carry), None

    if wrap is remat:
        y, _ = chain.scan(step, x, length=3, checkpoints=2)
    else:
        y = fn(fn(fn(x)))
    change()
    return torch.autograd.grad(y.sum(), x)[0]


WAYS = {
    "backward": by_backward,
    "pull": by_pull,
    "second derivative": by_second_derivative,
    "chain": by_chain,
}


def args_of(kind, size):
    table = BUFFERS[kind](size)

    def change():
        table[0] = 3

    return reading(table), make(4, seed=2), change


@crossed("kind, way, size", BUFFERS, WAYS, [64 * KIB, 4 * MIB])
def test_they_are_put_back(kind, way, size):
    found = []
    for wrap in (lambda fn: fn, remat):
        with count_ops() as ops:
            found.append(WAYS[way](wrap, *args_of(kind, size)))
        found.append(ops["sin"])
    assert found[3] > found[1]
    assert_same(found[0], found[2])


@crossed("kind, way", BUFFERS, WAYS)
def test_the_largest_are_not_watched(kind, way):
    with count_ops() as ops:
        WAYS[way](remat, *args_of(kind, 4 * MIB + 16))
    assert ops["sin"] > 1


# --- Where it is, and what the message calls it ---


class Table(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.held = types.SimpleNamespace(table=table)

    def forward(self, x):
        return reading(self.held.table)(x)


def of_a_module(table):
    module = Table(table)
    return lambda x: remat(module)(x)


def of_a_variable(table):
    tables = {"cos": [0, table]}

    def fn(x):
        return reading(tables["cos"][1])(x)

    return lambda x: remat(fn)(x)


NAMES = {"self.held.table": of_a_module, "tables['cos'][1]": of_a_variable}


@pytest.mark.parametrize("name", NAMES)
def test_the_message_names_it(name):
    memory = np.ones(10**4)
    table = memory.view()
    table.flags.writeable = False
    call = NAMES[name](table)
    loss = call(make(4, seed=2).requires_grad_()).sum()
    memory[5] = 2
    message = (
        rf"`{re.escape(name)}` was changed between the forward and the backward of"
    )
    with pytest.raises(MutationError, match=message):
        loss.backward()


def test_one_that_cannot_be_written_is_watched():
    memory = bytearray(8)
    table = memoryview(memory).toreadonly()
    loss = remat(reading(table))(make(4, seed=2).requires_grad_()).sum()
    memory[1] = 2
    with pytest.raises(MutationError, match=r"`table` was changed .* `memoryview`"):
        loss.backward()


def test_one_that_grew_or_was_closed_is_watched():
    table = mapped(MIB)
    fn = remat(reading(table))
    x = make(4, seed=2).requires_grad_()
    fn(x).sum().backward()
    loss = fn(x).sum()
    table.close()
    with pytest.raises(MutationError, match="`table` was changed"):
        loss.backward()


# --- What the function itself changes, and what a call holds ---


@pytest.mark.parametrize(("size", "calls"), [(MIB, 8), (64 * KIB, 32)])
def test_calls_share_what_no_forward_changed(size, calls):
    table = np.ones(size // 8)
    fns = [remat(reading(table)) for _ in range(calls)]
    x = make(4, seed=2).requires_grad_()
    tracemalloc.start()
    try:
        for fn in fns:
            x = fn(x)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < size + MIB


@pytest.mark.parametrize("kind", [k for k in BUFFERS if "two rows" not in k])
def test_each_call_starts_from_what_it_found_and_shares_what_is_left(kind):
    def run(wrap):
        table = BUFFERS[kind](MIB)

        def fn(x):
            y = x.sin() * float(np.ravel(table[0])[0])
            table[0] = int(np.ravel(table[0])[0]) + 1
            return y.exp()

        xs = [make(4, seed=k).requires_grad_() for k in range(8)]
        tracemalloc.start()
        try:
            with count_ops() as ops:
                ys = [*map(wrap(fn), xs)]
                held, _ = tracemalloc.get_traced_memory()
                grads = torch.autograd.grad(sum(y.sum() for y in ys), xs)
        finally:
            tracemalloc.stop()
        return (grads, float(np.ravel(table[0])[0])), ops["sin"], held

    (want, sines, _), (found, more, held) = run(lambda fn: fn), run(remat)
    assert_same(found, want)
    assert more == 2 * sines
    assert held < 3 * MIB  # of one, and of eight first pieces


@pytest.mark.parametrize("size", [10**4, 6 * 10**5])
def test_what_was_passed_is_put_back_at_any_size(size):
    table = np.ones(size)
    x = make(4, seed=2).requires_grad_()
    (want,) = torch.autograd.grad((x * table[0]).sin().sum(), x)
    with count_ops() as ops:
        loss = remat(lambda x, table: (x * table[0]).sin())(x, table).sum()
        table[0] = 5.0
        (found,) = torch.autograd.grad(loss, x)
    assert_same(found, want)
    assert (ops["sin"], table[0]) == (1, 5.0)


@pytest.mark.parametrize("table", [Grid((4,)), Numbers("d", [1, 1]), Bytes(b"11")])
def test_a_passed_subclass_is_put_back_with_its_attributes(table):
    x = make(4, seed=2).requires_grad_()
    table[0], table.scale = 1, 2.0

    def fn(x, table):
        table[0] += 1
        return (x * float(table[0]) * table.scale).sin().sin()

    (want,) = torch.autograd.grad((x * 4).sin().sin().sum(), x)
    with count_ops() as ops:
        loss = remat(fn)(x, table).sum()
        table[0], table.scale = 7, 9.0
        assert_same(torch.autograd.grad(loss, x)[0], want)
    assert (ops["sin"], table[0], table.scale) == (3, 7, 9.0)


class Logging(torch.nn.Module):
    """A log that the forward does not name, and a table that it reads."""

    def __init__(self):
        super().__init__()
        self.log, self.table = np.zeros(10**4), np.ones(10**4)

    def forward(self, x):
        return (x * self.table[0]).sin().cos()


@pytest.mark.parametrize("name", ["log", "table"])
def test_a_log_may_change_and_a_table_is_put_back(name):
    module, x = Logging(), make(4, seed=2).requires_grad_()
    (want,) = torch.autograd.grad(module(x).sum(), x)
    with count_ops() as ops:
        loss = remat(module)(x).sum()
        getattr(module, name)[0] = 5.0
        assert_same(torch.autograd.grad(loss, x)[0], want)
    assert ops["sin"] == 3  # one is of the derivative of the cosine


def test_a_large_log_that_no_code_names_is_not_read():
    module = Logging()
    module.log, call = np.zeros(MIB // 8), remat(module)
    x = make(4, seed=2).requires_grad_()
    call(x)
    tracemalloc.start()
    try:
        with count_ops() as ops:
            loss = call(x).sum()
            held, _ = tracemalloc.get_traced_memory()
            loss.backward()
    finally:
        tracemalloc.stop()
    assert (ops["sin"], held < MIB // 2) == (3, True)
