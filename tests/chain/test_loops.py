"""`fori_loop` and `while_loop`: the plain loops, also where values say how long."""

import pytest
import support.loops
import torch
from support.loops import (
    Plain,
    assert_backward,
    assert_chained,
    of_backward,
    steps_run,
)
from support.tables import rows
from support.zoo import V, W, X, leaves_of

from remat import chain
from remat.chain.schedules import EveryStep, Online
from remat.testing import count_ops


OPTIONS = {"three": {"checkpoints": 3}, "all": {"checkpoints": "all"}, "sqrt": {}}


# --- fori_loop ----------------------------------------------------------------------


def powers(loops, w, x, *, lower=-2, upper=7, **options):
    def body(i, carry):
        h, total = carry
        return torch.tanh(h @ w) * (i + 0.5), total + i

    h, total = loops.fori_loop(lower, upper, body, (x, 0), **options)
    return h * total


@rows("options", OPTIONS)
def test_fori_loop_is_the_plain_loop(options):
    assert_backward(powers, W, X, steps=9, reassociated=not options, **options)


@pytest.mark.parametrize(("lower", "upper"), [(3, 3), (5, 2)])
def test_a_loop_without_steps_returns_its_carry(lower, upper):
    def never(i, h):
        raise AssertionError

    (x,) = leaves_of(X)
    assert chain.fori_loop(lower, upper, never, x) is x


def test_bounds_are_whatever_python_takes_for_integers():
    def run(loops, w, x, **options):
        first, last = torch.tensor(1), torch.tensor(5)
        return powers(loops, w, x, lower=first, upper=last, **options)

    assert_backward(run, W, X, steps=4, checkpoints=2)


# --- while_loop ---------------------------------------------------------------------

CONDITIONS = {
    "tensor": lambda h: h.norm() > 0.02,
    "bool": lambda h: bool(h.norm() > 0.02),
    "tensor of one element": lambda h: (h.norm() > 0.02)[None, None],
    "number": lambda h: int(h.norm() * 50),
}


@rows("cond", CONDITIONS)
@rows("transform", {"base": of_backward, "func": None})
def test_values_say_how_many_steps_there_are(transform, cond):
    def program(loops):
        def run(w, x):
            def body(h):
                return torch.tanh(h * w.cos()) * 0.8

            return loops.while_loop(cond, body, x, checkpoints=3)

        if transform is not None:
            return transform(run, W, X * 9)
        out, pull = torch.func.vjp(run, W, X * 9)
        return out, pull(out.cos())

    with count_ops() as ops:
        program(Plain)
    length = ops["tanh"]
    assert 3 < length < 100
    assert_chained(program, steps=length, runs=sum(Online(3).evaluations(length)))


def test_a_condition_is_asked_once_for_each_carry_and_not_again():
    """It is called with the last carry, too."""

    def program(loops):
        def run(w, x):
            return loops.while_loop(
                lambda c: torch.tanh(c[1]) < 0.999,
                lambda c: (c[0] @ w, c[1] + 0.4),
                (x, torch.tensor(0.0)),
                checkpoints=2,
            )[0]

        return of_backward(run, W, X)

    assert_chained(program, steps=11, runs=11)
    with count_ops() as plain:
        program(Plain)
    with count_ops() as ops:
        program(chain)
    again = Online(2).evaluations(10).backward
    assert ops["mm"] - plain["mm"] == again


def test_a_condition_reads_what_it_refers_to_when_it_is_called():
    limit = torch.tensor(4)

    def run(loops, w, x, checkpoints):
        h, n = loops.while_loop(
            lambda c: c[1] < limit,
            lambda c: (torch.tanh(c[0] @ w), c[1] + 1),
            (x, torch.tensor(0)),
            checkpoints=checkpoints,
        )
        limit.fill_(0)
        return h, n

    def program(loops):
        limit.fill_(4)
        return of_backward(lambda w, x: run(loops, w, x, 2), W, X)

    assert_chained(program, steps=4, runs=sum(Online(2).evaluations(4)))


def test_a_loop_whose_condition_is_false_at_once():
    def never(h):
        raise AssertionError

    def program(loops):
        def run(x):
            return loops.while_loop(lambda h: False, never, x.tanh(), checkpoints=2) * 2

        return of_backward(run, X)

    assert_chained(program, steps=1, runs=1)


def test_all_carries_of_a_loop_are_stored():
    def run(loops, w, x, **options):
        return loops.while_loop(
            lambda c: c[1] < 9,
            lambda c: (torch.tanh(c[0] @ w), c[1] + 1),
            (x, 0),
            **options,
        )[0]

    assert_backward(run, W, X, steps=9, checkpoints="all")
    assert_backward(run, W, X, steps=9, checkpoints=EveryStep(3), reassociated=True)


# --- The comparison itself ----------------------------------------------------------


def ten_steps(loops):
    return of_backward(lambda w, x: powers(loops, w, x, upper=8, checkpoints=3), W, X)


def test_the_comparison_fails_for_loops_that_run_no_step_again(monkeypatch):
    runs = steps_run(10, checkpoints=3)
    assert_chained(ten_steps, steps=10, runs=runs)
    monkeypatch.setattr(support.loops, "chain", Plain)
    with pytest.raises(AssertionError, match=f"10 steps run, not {runs}"):
        assert_chained(ten_steps, steps=10, runs=runs)
    with pytest.raises(AssertionError, match="plain runs 10 steps, not 9"):
        assert_chained(ten_steps, steps=9, runs=runs)


def test_a_loop_that_grows_without_bound_is_stopped_by_an_error_of_the_body():
    class TooLongError(Exception):
        pass

    def body(c):
        if c[1] == 20:
            raise TooLongError("twenty")
        return c[0].tanh(), c[1] + 1

    (x,) = leaves_of(V)
    with count_ops() as ops, pytest.raises(TooLongError, match="twenty"):
        chain.while_loop(lambda c: True, body, (x, 0), checkpoints=2)
    assert ops["tanh"] == 20


def test_the_comparison_fails_for_other_gradients():
    def program(loops):
        h, (w, x) = ten_steps(loops)
        return h, (w, x * (1 + (loops is chain) * 1e-6))

    with pytest.raises(AssertionError, match="differs in value"):
        assert_chained(program, steps=10, runs=steps_run(10, checkpoints=3))
