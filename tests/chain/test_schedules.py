"""Schedules of chains: what an interpreter finds, against their closed forms."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st
from support.interpreter import (
    LENGTHS,
    SLOTS,
    WIDTHS,
    Interpreter,
    WrongScheduleError,
    assert_as_predicted,
    fewest_advances,
)

from remat.chain._schedules import advances, beta, repetitions
from remat.chain.schedules import (
    Advance,
    Binomial,
    Drop,
    EveryStep,
    Held,
    Load,
    Online,
    Reverse,
    Save,
    Sqrt,
    Uniform,
    held,
    plot,
)


# --- The interpreter ----------------------------------------------------------------

FORWARD = [Save(0), Advance(0, 2), Save(2), Advance(2, 3)]
BACKWARD = [
    *(Load(2), Reverse(2, 3), Drop(2)),
    *(Load(0), Advance(0, 1), Reverse(1, 2)),
    *(Load(0), Reverse(0, 1), Drop(0)),
]


def interpret(forward, backward, **limits):
    interpreter = Interpreter(3, **{"memory": 2, **limits})
    return interpreter.forward(forward), interpreter.backward(backward)


def edited(actions, at, *new, cut=1):
    return [*actions[:at], *new, *actions[at + cut :]]


def test_the_interpreter_accepts_a_right_schedule_and_counts():
    assert interpret(FORWARD, BACKWARD) == (3, 4)


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (edited(FORWARD, 3), "does not reach the result"),
        (edited(FORWARD, 1, Load(0), Advance(0, 2)), "Load.* in a forward"),
        (edited(FORWARD, 1, Advance(1, 2)), "carry 1 is not live, but 0 is"),
        (edited(FORWARD, 1, Advance(0, 1), Save(1), Advance(1, 2)), "3 carries in"),
        (edited(FORWARD, 2, Drop(2)), "carry 2 is not stored"),
        (edited(FORWARD, 3, Advance(2, 4)), "no steps"),
        ([*FORWARD, Drop(0), Save(3)], "the result needs no checkpoint"),
    ],
)
def test_the_interpreter_refuses_wrong_forwards(forward, says):
    with pytest.raises(WrongScheduleError, match=says):
        interpret(forward, BACKWARD)


@pytest.mark.parametrize(
    ("backward", "says"),
    [
        (BACKWARD[1:], "carry 2 is not live, but None is"),
        (BACKWARD[:-2], "step 0 is not reversed"),
        (edited(BACKWARD, 2), r"carries \[2\] are still stored"),
        (BACKWARD[3:], "has no cotangent"),
        (edited(BACKWARD, 4, Advance(0, 3)), "step 2 is reversed already"),
        (edited(BACKWARD, 0, Load(1)), "carry 1 is not stored"),
        (edited(BACKWARD, 4, Reverse(0, 2), cut=4), "too wide"),
        (edited(BACKWARD, 5, Save(1), Reverse(1, 2), Drop(1)), "stored in vain"),
    ],
)
def test_the_interpreter_refuses_wrong_backwards(backward, says):
    with pytest.raises(WrongScheduleError, match=says):
        interpret(FORWARD, backward, width=1)


def test_the_assertion_fails_on_a_wrong_prediction():
    class Wrong(Binomial):
        def evaluations(self, length):
            right = super().evaluations(length)
            return right._replace(backward=right.backward + 1)

    with pytest.raises(WrongScheduleError, match=r"backward=18.* predicted .*=19"):
        assert_as_predicted(Wrong(3), 10)


# --- Closed forms -------------------------------------------------------------------


@pytest.mark.parametrize("slots", range(1, 15))
def test_the_fewest_advances_are_those_of_all_splits(slots):
    for length in range(61):
        assert advances(length, slots) == fewest_advances(length, slots)


@given(st.integers(2, 10**6), st.integers(1, 60))
def test_the_repetitions_are_the_least_that_reach_the_length(length, slots):
    r = repetitions(length, slots)
    assert beta(slots, r - 1) < length <= beta(slots, r)


# --- Segments -----------------------------------------------------------------------


@given(LENGTHS, st.integers(1, 40))
def test_uniform_segments_are_equal(length, segments):
    width = math.ceil(length / segments)
    found = assert_as_predicted(Uniform(segments), length, memory=segments, width=width)
    assert found.done[Reverse] == found.peak == min(segments, length)


@given(LENGTHS)
def test_the_segments_of_sqrt_are_as_many_as_their_steps(length):
    root = math.ceil(math.sqrt(length))
    found = assert_as_predicted(Sqrt(), length, memory=root, width=root)
    assert found.done[Reverse] == root


@given(LENGTHS, WIDTHS)
def test_every_step_is_stored_and_reversed_alone(length, unroll):
    found = assert_as_predicted(EveryStep(unroll), length, width=unroll)
    assert found.done[Reverse] == found.peak == -(-length // unroll)


# --- Binomial -----------------------------------------------------------------------


@given(LENGTHS, SLOTS, WIDTHS)
def test_binomial_runs_what_it_predicts(length, slots, unroll):
    schedule = Binomial(slots, unroll)
    assert_as_predicted(schedule, length, memory=slots, width=unroll)


def all_schedules_of(length, slots):
    """The fewest steps that a backward runs, over all checkpoints of the forward."""
    carries = range(1, length)
    kept = itertools.chain.from_iterable(
        itertools.combinations(carries, n) for n in range(min(slots, length))
    )
    return min(_reversal((0, *stored), length, slots) for stored in kept)


def _reversal(stored, length, slots):
    total, free = length, slots - len(stored)
    for start, stop in itertools.pairwise([*stored, length][::-1]):
        start, stop = stop, start
        total += fewest_advances(stop - start, free + 1)
        free += 1
    return total


@pytest.mark.parametrize("slots", range(1, 5))
def test_no_choice_of_checkpoints_in_the_forward_runs_fewer(slots):
    for length in range(1, 11):
        assert Binomial(slots).evaluations(length).backward == all_schedules_of(
            length, slots
        )


def test_with_a_checkpoint_for_each_step_every_step_runs_once_more():
    for length in range(10):
        for slots in range(max(length, 1), 12):
            assert Binomial(slots).evaluations(length) == (length, length)


def test_long_chains_are_scheduled_lazily():
    schedule, length = Binomial(10), 20_000
    first = list(itertools.islice(schedule.backward(10**12), 5))
    assert isinstance(first[0], Load)
    assert_as_predicted(schedule, length, memory=10, width=1)


# --- Arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Uniform(0), ValueError, "Uniform takes segments >= 1; got 0"),
        (lambda: Binomial(0), ValueError, "Binomial takes checkpoints >= 1; got 0"),
        (lambda: Binomial(2.5), TypeError, "an integer as checkpoints; got 2.5, a f"),
        (lambda: Binomial(True), TypeError, "an integer as checkpoints; got True"),
        (lambda: Binomial(3, 0), ValueError, "Binomial takes unroll >= 1; got 0"),
        (lambda: Online(0), ValueError, "Online takes checkpoints >= 1; got 0"),
        (lambda: EveryStep(-1), ValueError, "EveryStep takes unroll >= 1; got -1"),
    ],
)
def test_counts_are_checked(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_schedules_are_values():
    assert Binomial(3) == Binomial(3) != Binomial(4)
    assert len({Binomial(3), Binomial(3), Uniform(3), Sqrt(), EveryStep()}) == 4
    assert Advance(0, 3) != Reverse(0, 3)


# --- Schedules for chains of unknown length, against those that know the length ---


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
    assert placer.stored == tuple(sorted(interpreter.stored))
    found = interpreter.backward(Online(slots).backward(length))
    assert found == Online(slots).evaluations(length).backward


def test_a_placer_refuses_a_step_out_of_order():
    placer = Online(3).online()
    placer.at(0)
    with pytest.raises(AssertionError, match="expected carry 1; got carry 2"):
        placer.at(2)


# --- What a chain holds over time, by its schedule, and the plot of it ---


SCHEDULES = [
    Sqrt(),
    Uniform(7),
    EveryStep(),
    Binomial(5),
    Binomial(5, unroll=3),
    Online(5),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("length", [1, 2, 50])
def test_what_is_held_is_what_an_interpreter_counts(schedule, length):
    states = [*held(schedule, length)]
    interpreter = Interpreter(length)
    ran = interpreter.run(schedule)
    assert states[-1] == Held(sum(ran), 0, 0)
    assert max(s.stored for s in states) == interpreter.peak
    times = [s.evaluations for s in states]
    assert times == sorted(times)


def test_steps_of_a_segment_are_recorded_together():
    assert max(s.recorded for s in held(Sqrt(), 1000)) == 32
    assert max(s.recorded for s in held(EveryStep(unroll=4), 1000)) == 4
    assert max(s.recorded for s in held(Binomial(10), 1000)) == 1


def test_a_chain_without_steps_holds_nothing():
    assert not [*held(Binomial(3), 0)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_plot_draws_what_is_held(pyplot, schedule):
    axes = plot(schedule, 50)
    drawn = {line.get_label(): [*line.get_ydata()] for line in axes.get_lines()}
    states = [*held(schedule, 50)]
    assert drawn["stored carries"] == [s.stored for s in states]
    assert drawn["recorded steps"] == [s.recorded for s in states]
    assert axes.get_xlabel() == "steps evaluated so far"
    assert axes.get_ylabel() == "carries and steps held"
    assert "50 steps" in axes.get_title(loc="left")
    ours = pyplot.figure().add_subplot()
    assert plot(schedule, 50, ours) is ours
