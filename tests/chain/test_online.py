"""Schedules for chains of unknown length, against those that know the length."""

import pytest
from hypothesis import given, strategies as st
from support.interpreter import Interpreter, assert_as_predicted

from remat.chain._binomial import repetitions
from remat.chain.schedules import Advance, Binomial, Online


@given(st.integers(0, 300), st.integers(1, 12))
def test_online_runs_what_it_predicts(length, slots):
    assert_as_predicted(Online(slots), length, memory=slots, width=1)


@pytest.mark.parametrize("slots", range(1, 13))
def test_online_is_close_to_a_schedule_that_knows_the_length(slots):
    ratios = [
        Online(slots).evaluations(length).backward
        / Binomial(slots).evaluations(length).backward
        for length in range(1, 301)
    ]
    assert min(ratios) == 1
    assert max(ratios) < 1.4
    assert sum(ratios) / len(ratios) < 1.12


def test_online_stays_close_on_long_chains():
    for slots, length in [(5, 10_000), (10, 10_000), (20, 10_000), (10, 100_000)]:
        found = Online(slots).evaluations(length).backward
        assert found < 1.25 * Binomial(slots).evaluations(length).backward


@given(st.integers(1, 300), st.integers(2, 12))
def test_no_step_is_repeated_more_often_than_it_must(length, slots):
    times = [0] * length
    for action in Online(slots).backward(length):
        if isinstance(action, Advance):
            for step in range(action.start, action.stop):
                times[step] += 1
    assert max(times) <= repetitions(length + 1, slots)


@given(st.integers(1, 200), st.integers(1, 12))
def test_a_placer_can_be_stopped_at_any_step(length, slots):
    placer = Online(slots).online()
    interpreter = Interpreter(length, memory=slots, width=1)
    interpreter.forward(
        action for k in range(length) for action in [*placer.at(k), Advance(k, k + 1)]
    )
    assert placer.stored == tuple(interpreter.stored)
    found = interpreter.backward(Online(slots).backward(length, placer.stored))
    assert found == Online(slots).evaluations(length).backward


def test_a_placer_refuses_a_step_out_of_order():
    placer = Online(3).online()
    placer.at(0)
    with pytest.raises(ValueError, match="expected carry 1; got carry 2"):
        placer.at(2)
