"""A call that fails leaves the streams and settings of its surroundings alone."""

import pytest
import torch
from support.runs import leaf
from support.states import STATES, autocast, state_of_now
from support.tables import rows
from support.zoo import Evaluations
from torch.func import grad

from remat import remat
from remat.testing import count_ops, live_bytes


class FailureError(Exception):
    pass


def failing(evaluation):
    """A function that draws, and fails when it is evaluated for this time."""
    calls = Evaluations()

    def breaks(x, w=None):
        torch.rand(5)
        calls.note(None)
        y = (x @ (x if w is None else w)).sin()
        if len(calls) == evaluation:
            with torch.no_grad():
                raise FailureError("boo")
        return y.sin().sum()

    return breaks


def check_that_calls_work():
    with autocast(), count_ops() as ops:
        remat(lambda x: (x @ x).sin().exp())(leaf(8, 8)).sum().backward()
    assert ops["sin"] == 2


@pytest.mark.parametrize("evaluation", [1, 2], ids=["forward", "recomputation"])
def test_what_was_cast_is_freed_when_a_call_fails(evaluation):
    x, w = leaf(4, 64), leaf(64, 64)

    def attempt():
        fn = remat(failing(evaluation))
        with autocast():
            y = fn(x, w)
        y.backward()

    def failed():
        with pytest.raises(FailureError, match="boo"):
            attempt()

    failed()
    assert live_bytes(failed) == 0
    check_that_calls_work()


def backward(fn, x):
    y, one = fn(x), torch.ones(())
    return lambda: torch.autograd.grad(y, x, one)


def backward_with_a_graph(fn, x):
    y, one = fn(x), torch.ones(())
    return lambda: torch.autograd.grad(y, x, one, create_graph=True)


def pullback(fn, x):
    (_, pull), one = torch.func.vjp(fn, x.detach()), torch.ones(())
    return lambda: pull(one)


SURROUNDINGS = {name: change for name, (change, _) in STATES.items()} | {
    "no_grad": torch.no_grad,
    "fork_rng": lambda: torch.random.fork_rng(devices=[]),
}


@rows("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("path", [backward, backward_with_a_graph, pullback])
def test_a_recomputation_that_fails_leaves_the_state_alone(surroundings, path):
    run = path(remat(failing(2)), leaf(3, 3))
    with surroundings():
        torch.manual_seed(11)
        before = state_of_now()
        with pytest.raises(FailureError, match="boo"):
            run()
        assert state_of_now() == before
    check_that_calls_work()


@pytest.mark.parametrize("transform", [lambda f: f, grad], ids=["backward", "grad"])
def test_a_forward_that_fails_leaves_the_state_alone_and_gets_no_note(transform):
    def breaks(x):
        with torch.no_grad():
            raise FailureError("boo")

    x = leaf()
    before = state_of_now()
    with pytest.raises(FailureError, match="boo") as caught:
        transform(remat(breaks))(x)
    assert not hasattr(caught.value, "__notes__")
    assert state_of_now() == before
    check_that_calls_work()
