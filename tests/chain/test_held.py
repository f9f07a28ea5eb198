"""What a chain holds over time, by its schedule, and the plot of it."""

import pytest
from support.interpreter import Interpreter

from remat.chain.schedules import (
    Binomial,
    EveryStep,
    Held,
    Multilevel,
    Online,
    Sqrt,
    StageCosts,
    Storage,
    Uniform,
    held,
    plot,
    rotor,
)


STAGE = StageCosts(1.0, output_bytes=1, saved_bytes=4, backward_cost=2.0)
SCHEDULES = [
    Sqrt(),
    Uniform(7),
    EveryStep(),
    Binomial(5),
    Binomial(5, unroll=3),
    Multilevel(memory=3, write_cost=5, read_cost=5),
    Online(5),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("length", [1, 2, 50])
def test_what_is_held_is_what_an_interpreter_counts(schedule, length):
    states = [*held(schedule, length)]
    interpreter = Interpreter(length, disk=length)
    ran = interpreter.run(schedule)
    assert states[-1] == Held(sum(ran), 0, 0, 0)
    assert max(s.memory for s in states) == interpreter.peak[Storage.MEMORY]
    assert max(s.disk for s in states) == interpreter.peak[Storage.DISK]
    times = [s.evaluations for s in states]
    assert times == sorted(times)


def test_steps_of_a_segment_are_recorded_together():
    assert max(s.recorded for s in held(Sqrt(), 1000)) == 32
    assert max(s.recorded for s in held(EveryStep(unroll=4), 1000)) == 4
    assert max(s.recorded for s in held(Binomial(10), 1000)) == 1


def test_recorded_stages_of_a_plan_wait_for_their_backward():
    plan = rotor([STAGE] * 6, budget=12)
    states = [*held(plan, 6)]
    assert states[-1] == Held(sum(plan.evaluations(6)), 0, 0, 0)
    after_the_forward = next(s for s in states if s.evaluations == 6)
    assert after_the_forward.recorded
    assert max(s.recorded for s in states) < 6


def test_a_chain_without_steps_holds_nothing():
    assert not [*held(Binomial(3), 0)]


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_plot_draws_what_is_held(pyplot, schedule):
    axes = plot(schedule, 50)
    drawn = {line.get_label(): [*line.get_ydata()] for line in axes.get_lines()}
    states = [*held(schedule, 50)]
    assert drawn["carries in memory"] == [s.memory for s in states]
    assert drawn["recorded steps"] == [s.recorded for s in states]
    assert ("carries on disk" in drawn) == isinstance(schedule, Multilevel)
    assert axes.get_xlabel() == "steps evaluated so far"
    assert axes.get_ylabel() == "carries and steps held"
    assert "50 steps" in axes.get_title(loc="left")
    ours = pyplot.figure().add_subplot()
    assert plot(schedule, 50, ours) is ours
