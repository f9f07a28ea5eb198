"""What was passed is found again in a recompute, and is not kept alive for it."""

import gc
import weakref

import pytest
import torch
from support.zoo import Evaluations

from remat import remat


class Slotted:
    __slots__ = ("items",)

    def __init__(self):
        self.items = []


pytestmark = pytest.mark.usefixtures("_no_collector")


def called(fn, make):
    """Call `fn` with a value that gets the output; return what refers to the output."""
    calls = Evaluations()

    def counted(x, value):
        calls.note(1)
        return fn(x.sin().exp(), value)

    x, value = torch.ones(4, requires_grad=True), make()
    out = remat(counted)(x, value)
    (value if isinstance(value, list) else value.items).append(out)
    return weakref.ref(out), calls


def by_identity(x, value):
    return x * (id(value) > 0)


@pytest.mark.parametrize("make", [list, Slotted])
def test_a_passed_value_that_holds_the_output_is_freed_at_once(make):
    ref, calls = called(lambda x, value: x * 2, make)
    assert len(calls) == 1
    assert ref() is None


@pytest.mark.parametrize("make", [list, Slotted])
def test_one_whose_identity_is_asked_for_is_freed_by_the_collector(make):
    ref, calls = called(by_identity, make)
    assert len(calls) == 1
    assert ref() is not None, "a lease holds it until somebody looks"
    gc.collect()
    assert ref() is None


def test_one_whose_identity_is_asked_for_is_freed_by_the_next_call():
    refs = [called(by_identity, list)[0] for _ in range(5)]
    assert [ref() is None for ref in refs] == [True] * 4 + [False]
    gc.collect()


def test_a_lease_lasts_while_somebody_else_holds_the_value():
    held, calls = [1], Evaluations()

    def fn(x, value):
        calls.note(id(value))
        return (x * 2).sin().exp()

    x = torch.ones(4, requires_grad=True)
    out = remat(fn)(x, held)
    gc.collect()
    called(by_identity, list)
    out.sum().backward()
    assert [*calls] == [id(held)] * 2


def test_one_that_nobody_holds_is_made_again_with_what_it_held():
    calls = Evaluations()

    def fn(x, value):
        calls.note(len(value) * (id(value) > 0))
        return (x * value[0]).sin().exp()

    x = torch.ones(4, requires_grad=True)
    out = remat(fn)(x, [3.0, 1])
    gc.collect()
    out.sum().backward()
    assert [*calls] == [2, 2]
    plain = torch.ones(4, requires_grad=True)
    (plain * 3.0).sin().exp().sum().backward()
    assert torch.equal(x.grad, plain.grad)
