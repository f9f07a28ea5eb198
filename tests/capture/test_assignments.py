"""What a function assigns to what it captures is assigned once."""

import sys

import pytest
import torch
from support.holders import Object
from support.runs import assert_replayed
from torch.func import grad


def wave(x, w):
    return (x * w).sin().exp().sum()


def linspace():
    return torch.linspace(0.1, 1, 3).requires_grad_()


COUNT = torch.zeros(3)


def rebinds_a_nonlocal():
    state, w = torch.zeros(3), torch.ones(3, requires_grad=True)

    def fn(x):
        nonlocal state
        state = state + x.detach()
        return wave(x + state, w)

    return fn, lambda: (state, w.grad)


def rebinds_a_global():
    sys.modules[__name__].COUNT = torch.zeros(3)

    def fn(x):
        global COUNT
        COUNT = COUNT + 1
        return wave(x, COUNT)

    return fn, lambda: COUNT


def rebinds_attributes():
    o = Object(torch.ones(3, requires_grad=True))
    o.seen = torch.zeros(3)

    def fn(x):
        o.seen = o.seen + x.detach()
        o.new = "text"
        return wave(x + o.seen, o.value)

    return fn, lambda: (o.seen, o.new, o.value.grad)


def appends_to_an_inner_container():
    cache = [[torch.ones(3)]]

    def fn(x):
        cache[0].append(x.detach() * 2)
        return wave(x, cache[0][-2])

    return fn, lambda: cache


def adds_to_containers_of_tensors():
    log, seen = [torch.ones(3)], {"first": torch.ones(3)}

    def fn(x):
        log.append(x.detach())
        seen["last"] = x.detach()
        return wave(x, log[0])

    return fn, lambda: (log, seen)


def replaces_an_entry():
    cache = [torch.ones(3), torch.full((3,), 2.0)]

    def fn(x):
        y = wave(x, cache[0])
        cache[0] = x.detach() * 2
        return y

    return fn, lambda: cache


def pops_an_entry():
    cache = [torch.full((3,), float(n)) for n in range(1, 5)]

    def fn(x):
        y = wave(x, cache[0])
        cache.pop(0)
        return y

    return fn, lambda: cache


# Each makes a function, and tells what it has assigned since.
ASSIGNING = [
    rebinds_a_nonlocal,
    rebinds_a_global,
    rebinds_attributes,
    appends_to_an_inner_container,
    adds_to_containers_of_tensors,
    replaces_an_entry,
    pops_an_entry,
]


@pytest.mark.parametrize("make", ASSIGNING, ids=lambda make: make.__name__)
def test_what_a_function_assigns_is_assigned_once(make):
    def program(wrap):
        x = linspace()
        fn, assigned = make()
        step = wrap(fn)
        for _ in range(3):
            step(x).backward()
        return assigned(), x.grad

    assert_replayed(program, sin=2 * 3)


@pytest.mark.parametrize("make", ASSIGNING, ids=lambda make: make.__name__)
def test_each_of_two_calls_is_recomputed_with_what_it_read(make):
    def program(wrap):
        x = linspace()
        fn, assigned = make()
        step = wrap(fn)
        (step(x) + step(x)).backward()
        return assigned(), x.grad

    assert_replayed(program, sin=2 * 2)


@pytest.mark.parametrize("make", ASSIGNING, ids=lambda make: make.__name__)
def test_what_a_function_assigns_under_grad_is_assigned_once(make):
    def program(wrap):
        x = linspace().detach()
        fn, assigned = make()
        step = wrap(fn)
        return grad(lambda x: step(x) + step(x))(x), sizes(assigned())

    assert_replayed(program, sin=2 * 2)


def sizes(tree):
    """The containers, without the tensors, which may be dead ones of the transform."""
    return torch.utils._pytree.tree_map(lambda _: None, tree)


def grows(x, log):
    log.append(x.detach())
    return wave(x, log[0] * len(log))


def test_what_a_container_passed_as_an_argument_becomes_is_kept():
    def program(wrap):
        log, x, call = [], linspace(), wrap(grows)
        (call(x, log) + call(2 * x, log)).backward()
        return log, x.grad

    assert_replayed(program, sin=2 * 2)


def test_a_container_passed_as_an_argument_is_changed_once_under_grad():
    def program(wrap):
        log, call = [], wrap(grows)
        got = grad(lambda x: call(x, log) + call(2 * x, log))(linspace().detach())
        return got, len(log)

    assert_replayed(program, sin=2 * 2)
