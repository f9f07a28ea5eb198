"""The carries that are alive are those of the schedule, and so are runs of steps."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.letting_go import Held
from support.loops import Plain, assert_chained, of_backward, schedule_of
from support.tables import rows
from support.transforms import some
from support.zoo import V, leaves_of, scalar
from torch.utils._python_dispatch import TorchDispatchMode

from remat import chain
from remat.chain.schedules import (
    Binomial,
    EveryStep,
    Multilevel,
    Online,
    Sqrt,
    Uniform,
)
from remat.testing import count_ops


SCHEDULES = {
    "uniform": Uniform(3),
    "sqrt": Sqrt(),
    "every step": EveryStep(),
    "every two steps": EveryStep(2),
    "binomial": Binomial(3),
    "binomial in pairs": Binomial(3, 2),
    "one checkpoint": Binomial(1),
    "more checkpoints than steps": Binomial(30),
    "multilevel": Multilevel(4, 2),
    "online": Online(3),
}
LENGTHS = [1, 2, 7, 16]


def by_fori_loop(loops, x, length, schedule):
    return loops.fori_loop(0, length, lambda i, h: h.tanh(), x, checkpoints=schedule)


def runs_of(differentiate):
    """How many steps run in the forward, and in each backward, of a base graph."""
    (x,) = leaves_of(V)
    with count_ops() as ops:
        return [ops.pop("tanh", 0) for _ in differentiate(x)]


@rows("schedule", SCHEDULES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("folder")
def test_each_pass_runs_the_steps_that_its_schedule_predicts(schedule, length):
    def differentiate(x):
        y = by_fori_loop(chain, x, length, schedule).sum()
        yield
        torch.autograd.grad(y, x)
        yield

    assert runs_of(differentiate) == [*schedule.evaluations(length)]


@rows("schedule", SCHEDULES)
@pytest.mark.usefixtures("folder")
def test_a_further_backward_also_runs_the_forward_of_the_schedule_up_to_its_last_store(
    schedule,
):
    """The result is known, so the steps after the last checkpoint do not run."""
    length = 13

    def differentiate(x):
        y = by_fori_loop(chain, x, length, schedule).sum()
        yield
        for _ in range(3):
            torch.autograd.grad(y, x, retain_graph=True)
            yield

    forward, first, *others = runs_of(differentiate)
    again = length - last_advance(schedule, length)
    assert (forward, first) == (length, schedule.evaluations(length).backward)
    assert others == [first + again] * 2


def last_advance(schedule, length):
    """How many steps the forward runs after its last checkpoint."""
    *_, last = schedule.forward(length)
    assert last.stop == length
    return last.stop - last.start


@rows("schedule", SCHEDULES)
@pytest.mark.usefixtures("folder")
def test_under_func_grad_the_same_steps_run(schedule):
    def program(loops):
        return torch.func.grad_and_value(
            lambda x: scalar(by_fori_loop(loops, x, 9, schedule))
        )(V)

    assert_chained(program, steps=9, runs=sum(schedule.evaluations(9)))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=60)
def test_binomial_chains_of_any_length_run_the_predicted_steps(
    length, checkpoints, unroll
):
    def program(loops):
        return of_backward(
            lambda x: loops.fori_loop(
                *(0, length, lambda i, h: h.tanh(), x),
                checkpoints=checkpoints,
                unroll=unroll,
            ),
            V,
        )

    schedule = schedule_of(checkpoints=checkpoints, unroll=unroll)
    assert schedule == Binomial(checkpoints, unroll)
    assert_chained(program, steps=length, runs=sum(schedule.evaluations(length)))


@given(st.integers(1, 40), st.integers(1, 8))
@settings(max_examples=60)
def test_loops_of_unknown_length_run_the_predicted_steps(length, checkpoints):
    def program(loops):
        return of_backward(
            lambda x: loops.while_loop(
                lambda c: c[1] < length,
                lambda c: (c[0].tanh(), c[1] + 1),
                (x, 0),
                checkpoints=checkpoints,
            )[0],
            V,
        )

    runs = sum(Online(checkpoints).evaluations(length))
    assert_chained(program, steps=length, runs=runs)


# --- Live carries -----------------------------------------------------------------


class Carries(TorchDispatchMode):
    """Notes how many results of tanh are alive whenever the next one is computed."""

    def __init__(self):
        super().__init__()
        self.results, self.alive = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.tanh.default:
            return func(*args, **(kwargs or {}))
        self.alive.append(sum(map(bool, self.results)))
        out = func(*args)
        self.results.append(Held(out))
        return out


LOOPS = {
    "fori_loop": by_fori_loop,
    "while_loop": lambda loops, x, length, checkpoints: loops.while_loop(
        lambda c: c[1] < length,
        lambda c: (c[0].tanh(), c[1] + 1),
        (x, 0),
        checkpoints=checkpoints,
    )[0],
    "sequential": lambda loops, x, length, checkpoints: loops.sequential(
        [torch.tanh] * length, x, checkpoints=checkpoints
    ),
}


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 6])
@rows("loop", LOOPS)
@rows("transform", some("backward", "grad", "vmap_grad"))
def test_live_carries_do_not_exceed_the_checkpoints(transform, loop, checkpoints):
    """The initial carry is a checkpoint, and no result; but the live carry is one."""
    with Carries() as carries:
        transform(lambda x: scalar(loop(chain, x, 20, checkpoints)), V)
    assert max(carries.alive) <= checkpoints
    assert len(carries.alive) > 40
    with Carries() as carries:
        transform(lambda x: scalar(loop(Plain, x, 20, checkpoints)), V)
    assert max(carries.alive) == 19


def test_the_starts_of_segments_and_the_steps_of_one_are_alive():
    with Carries() as carries:
        of_backward(lambda x: by_fori_loop(chain, x, 100, None), V)
    forward, backward = carries.alive[:100], carries.alive[100:]
    assert max(forward) == 10
    # Nine starts, nine steps before this one.
    assert max(backward) == 9 + 9


def test_a_graph_holds_its_checkpoints_and_no_other_carry():
    x = V.clone().requires_grad_()
    with Carries() as carries:
        y = by_fori_loop(chain, x, 20, 4)
        # The initial carry is x. The result is another tensor than the last carry.
        assert sum(map(bool, carries.results)) == 3
        y.sum().backward()
        assert sum(map(bool, carries.results)) == 0
