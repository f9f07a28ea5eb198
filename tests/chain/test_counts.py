"""How often steps run, and how many carries exist: what the schedule says."""

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.letting_go import Held
from support.loops import PROGRAMS, Plain, derivatives, of_backward
from support.tables import rows
from support.transforms import ALL, some
from support.zoo import V, assert_not_vanishing, scalar
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from remat import chain
from remat.chain.schedules import Binomial, EveryStep, Online, Sqrt, Uniform
from remat.testing import assert_same, count_ops, peak_bytes


SCHEDULES = {
    "Sqrt": Sqrt(),
    "Uniform(4)": Uniform(4),
    "EveryStep": EveryStep(),
    "EveryStep(3)": EveryStep(unroll=3),
    "Binomial(1)": Binomial(1),
    "Binomial(3)": Binomial(3),
    "Binomial(4, 2)": Binomial(4, unroll=2),
    "Binomial(50)": Binomial(50),
    "Online": Online(4),
}
X = torch.linspace(0.1, 1, 5, dtype=torch.double)


def body(i, x):
    return torch.sin(x) * (1 + 0.1 * i)


def counted(fn):
    """What a function returns, and how many steps it ran: each has one sine."""
    with count_ops() as ops:
        found = fn()
    return found, ops["sin"]


def loop(schedule, length, x):
    if not isinstance(schedule, Online):
        return chain.fori_loop(0, length, body, x, checkpoints=schedule)

    def step(carry):
        i, x = carry
        return i + 1, body(i, x)

    def goes_on(carry):
        return carry[0] < length

    return chain.while_loop(goes_on, step, (0, x), checkpoints=schedule)[1]


def runs_of(schedule, length):
    """How often steps run in the forward, the backward and a second backward."""
    x = X.clone().requires_grad_()
    y, forward = counted(lambda: loop(schedule, length, x))
    pull = torch.autograd.grad
    (first,), backward = counted(lambda: pull(y.sum(), x, retain_graph=True))
    (second,), again = counted(lambda: pull(y.sum(), x))
    plain = x.detach().requires_grad_()
    (want,) = pull(Plain.fori_loop(0, length, body, plain).sum(), plain)
    assert_same(first, want)
    assert_same(second, want)
    return forward, backward, again


@rows("schedule", SCHEDULES)
@pytest.mark.parametrize("length", [1, 3, 30])
def test_steps_run_as_often_as_predicted(schedule, length):
    forward, backward, again = runs_of(schedule, length)
    assert (forward, backward) == schedule.evaluations(length)
    # A second backward finds no checkpoints: it runs the way to the last one again. The
    # result is known, so the steps after it do not run.
    *_, last = schedule.forward(length)
    assert again == backward + length - (last.stop - last.start)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 25), st.integers(1, 5), st.sampled_from([Binomial, Online]))
def test_chains_of_any_length(length, checkpoints, kind):
    schedule = kind(checkpoints)
    assert runs_of(schedule, length)[:2] == schedule.evaluations(length)


@rows("schedule", {k: s for k, s in SCHEDULES.items() if k != "Online"})
def test_steps_run_as_often_under_torch_func(schedule):
    length = 30
    value = torch.func.grad(lambda x: loop(schedule, length, x).sum())
    _, runs = counted(lambda: value(X))
    assert runs == sum(schedule.evaluations(length))


@pytest.mark.parametrize("checkpoints", [1, 3])
def test_below_a_vmap_one_more_sweep_is_needed(checkpoints):
    """A checkpoint of the forward would be of a level that is gone."""
    length, schedule = 30, Binomial(checkpoints)
    value = torch.func.grad(lambda x: loop(schedule, length, x).sum())
    got, runs = counted(lambda: torch.func.vmap(value)(X.expand(2, 5)))
    want = value(X)
    assert_same(got, torch.stack([want, want]))
    predicted = sum(schedule.evaluations(length))
    assert predicted <= runs < predicted + length


# --- Live carries ---


def peak(run):
    """The most bytes that a second run held at a time, by torch's own count."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()
    )
    return max(itertools.accumulate(e.nbytes() for e in memory))


def test_what_is_collected_keeps_no_carry_alive():
    x = torch.zeros(1024, requires_grad=True)

    def step(carry, _):
        carry = torch.sin(carry)
        return carry, carry[0]  # a view of it

    def run():
        _, firsts = chain.scan(step, x, length=100, checkpoints=10)
        firsts.sum().backward()

    assert peak(run) <= 20 * x.nbytes


@pytest.mark.parametrize(
    ("transform", "length"),
    [
        ("backward", 4_000),
        pytest.param("backward", 100_000, marks=pytest.mark.slow),
        pytest.param("grad", 100_000, marks=pytest.mark.slow),
    ],
)
def test_thousands_of_steps_are_one_node(transform, length):
    limit = sys.getrecursionlimit()

    def value(x):
        return chain.fori_loop(0, length, lambda i, x: x * 0.99999, x)

    x = torch.ones(2, dtype=torch.double, requires_grad=True)
    want = torch.full((2,), 0.99999**length, dtype=torch.double)
    if transform == "grad":
        got, products = products_of(
            lambda: torch.func.grad(lambda x: value(x).sum())(x)
        )
    else:
        y = value(x)
        ((leaf, _),) = [e for e in y.grad_fn.next_functions if e[0] is not None]
        assert type(leaf).__name__ == "AccumulateGrad"
        (got,), products = products_of(lambda: torch.autograd.grad(y.sum(), x))
    torch.testing.assert_close(got, want)
    assert products >= 2 * length
    assert sys.getrecursionlimit() == limit


def products_of(fn):
    with count_ops() as ops:
        found = fn()
    return found, ops["mul"]


def test_unroll_without_checkpoints_stores_the_carries_between():
    """As many steps are reversed together: 10 of 100 carries, and 10 steps."""
    x = torch.ones(1000, requires_grad=True)
    step = lambda h, _: (h.sin(), None)

    def peak(**options):
        run = lambda: chain.scan(step, x, length=100, **options)[0].sum().backward()
        with count_ops() as ops:
            run()
        assert ops["sin"] == 200
        return round(peak_bytes(run) / x.nbytes)

    assert peak(unroll=10) == peak(unroll=10, checkpoints="all")
    assert peak(unroll=10) < peak(unroll=50) < 60


# --- What is alive ---


def by_fori_loop(loops, x, length, schedule):
    return loops.fori_loop(0, length, lambda i, h: h.tanh(), x, checkpoints=schedule)


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


@pytest.mark.parametrize("checkpoints", [1, 3])
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


# --- Under every transform ---


# How many steps run at most, for each step of the plain loop, by order. One order
# runs a step in the forward and again in the backward; the next does both again.
MOST = {1: 6, 2: 10, 3: 20}
FAST = (
    *("backward", "twice", "grad", "jvp", "vmap_grad", "grad_vmap"),
    *("hessian", "batched_cotangents", "retained"),
)

# torch's own, of any function under linearize.
LINEARIZE = "ignore:Attempted to insert a get_attr Node:UserWarning"


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings(LINEARIZE)
@rows("checkpoints", {"sqrt": None, "three": 3, "all": "all"}, fast=("three",))
@rows("program", PROGRAMS)
@rows("transform", ALL, fast=FAST)
def test_derivatives_are_those_of_plain_loops(transform, program, checkpoints):
    with count_ops() as plain:
        expected = derivatives(transform, program, Plain)
    with count_ops() as ops:
        actual = derivatives(transform, program, chain, checkpoints=checkpoints)
    assert_not_vanishing(expected)
    assert_same(actual, expected, reassociated=True)
    assert plain["tanh"] < ops["tanh"] <= MOST[transform.order] * plain["tanh"]
