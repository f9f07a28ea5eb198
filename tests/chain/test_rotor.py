"""Plans for chains of unequal stages, against all plans and against all schedules."""

import functools
import heapq
import itertools
from random import Random
from unittest import mock

import pytest
from hypothesis import given, strategies as st
from support.interpreter import ByteInterpreter, WrongScheduleError

from remat.chain import _rotor
from remat.chain._binomial import advances
from remat.chain._rotor import Rerun, Rotor, Stages, _smallest
from remat.chain.schedules import (
    Advance,
    Backward,
    Drop,
    Load,
    RecordStep,
    Save,
    StageCosts,
    rotor,
)


def some_stage(random, scale=1):
    """A stage of random numbers."""
    size = random.randint(1, 6) * scale
    given = random.choice([None, 0, random.randint(1, 20) * scale])
    saved = size + random.randint(0, 8) * scale
    more = random.randint(0, 3) * scale
    return StageCosts(
        *(random.randint(0, 9), size, saved, random.randint(0, 9), given),
        # Running a stage without recording needs no more than recording it.
        extra_bytes=random.randint(0, (saved + more - size) // scale) * scale,
        forward_extra=more,
        backward_extra=random.randint(0, 3) * scale,
    )


def some_chain(seed, length, scale=1):
    """A chain of random stages, and the bytes of its input."""
    random = Random(f"{seed} {length} {scale}")
    stages = [some_stage(random, scale) for _ in range(length)]
    return stages, {"input_bytes": random.randint(0, 6) * scale}


def rotor_in(slots, *args, **sizes):
    """A plan that is made in so many slots."""
    with mock.patch.object(_rotor, "_SLOTS", slots):
        return rotor(*args, **sizes)


def least_budget(stages, **sizes):
    numbers = Stages(tuple(stages), **sizes)
    return Rotor(numbers, _smallest(numbers)).peak


def interpret(plan, stages, sizes):
    """The peak, the work, and the steps that a plan runs."""
    interpreter = ByteInterpreter(stages, **sizes)
    evaluations = interpreter.run(plan)
    return interpreter.most_bytes, interpreter.work, evaluations


def assert_as_predicted(plan, stages, sizes):
    found = interpret(plan, stages, sizes)
    assert found == (plan.peak, plan.cost, plan.evaluations(len(stages)))


# --- The interpreter ----------------------------------------------------------------

CHAIN = [
    StageCosts(1, 2, 5, 3, forward_extra=1, backward_extra=2),
    StageCosts(10, 3, 4, 30),
]
FORWARD = [Save(0), Advance(0, 1), RecordStep(1)]
BACKWARD = [Backward(1), Load(0), RecordStep(0), Backward(0), Drop(0)]


def test_the_interpreter_counts_bytes_and_work():
    interpreter = ByteInterpreter(CHAIN, 7)
    interpreter.forward(FORWARD)
    # The input, carry 1, and the residuals and the cotangent of the last stage.
    assert (interpreter.held(), interpreter.most_bytes) == (7 + 2 + 4 + 3, 16)
    interpreter.backward(BACKWARD)
    # The backward of stage 1 also holds the cotangent of carry 1.
    assert interpreter.most_bytes == 16 + 2
    assert interpreter.work == 1 + 10 + 30 + 1 + 3


@pytest.mark.parametrize(
    ("backward", "says"),
    [
        (BACKWARD[1:], "carry 1 has no cotangent"),
        ([Backward(0), *BACKWARD], "step 0 is not recorded"),
        ([*BACKWARD[:3], *BACKWARD[4:]], "step 0 is not reversed"),
        (BACKWARD[:-1], "still stored"),
        (
            [Load(0), RecordStep(0), Load(0), RecordStep(0), *BACKWARD],
            "recorded already",
        ),
        ([Load(0), Advance(0, 1), RecordStep(1), *BACKWARD], "recorded already"),
    ],
)
def test_the_interpreter_refuses_wrong_backwards(backward, says):
    interpreter = ByteInterpreter(CHAIN)
    interpreter.forward(FORWARD)
    with pytest.raises(WrongScheduleError, match=says):
        interpreter.backward(backward)


# --- Against all plans, and against all schedules -----------------------------------


def all_parts(stages, i, j):
    """Every way to keep or recompute the stages of a subchain."""
    if i == j:
        yield ()
        return
    for rest in all_parts(stages, i + 1, j):
        yield (i, *rest)
    for e in range(i + 1, j):
        for inner in all_parts(stages, i, e):
            for rest in all_parts(stages, e, j):
                yield (Rerun(i, e, inner), *rest)


def all_plans(stages, sizes):
    """The peak and the work of each plan, as an interpreter finds them."""
    any_plan = rotor(stages, 10**9, **sizes)
    for parts in all_parts(stages, 0, len(stages)):
        plan = type(any_plan)(any_plan.numbers, parts)
        yield interpret(plan, stages, sizes)[:2]


def assert_best_of_all_plans(stages, sizes):
    plans = list(all_plans(stages, sizes))
    least = min(peak for peak, _ in plans)
    assert least_budget(stages, **sizes) == least
    for budget in range(least, max(peak for peak, _ in plans) + 2):
        plan = rotor(stages, budget, **sizes)
        assert plan.peak <= budget
        assert plan.cost == min(work for peak, work in plans if peak <= budget)
        assert_as_predicted(plan, stages, sizes)
    return least


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_no_other_plan_has_less_work(seed, length):
    assert_best_of_all_plans(*some_chain(seed, length))


@pytest.mark.parametrize("seed", range(4))
def test_no_other_plan_of_five_stages_has_less_work(seed):
    assert_best_of_all_plans(*some_chain(seed, 5))


def test_the_least_budget_counts_what_the_stages_that_run_again_need():
    # The cotangent in the middle is larger than those after it.
    numbers = [(5, 5, 0), (2, 4, 0), (0, 7, 23), (3, 12, 8), (0, 6, 0), (0, 0, 0)]
    stages = [StageCosts(1, size, saved, 0, given) for size, saved, given in numbers]
    assert assert_best_of_all_plans(stages, {"input_bytes": 0}) == 43


def cheapest_schedule(stages, sizes, budget):
    """The least work of any schedule, by searching all states. None: there is none."""
    chain = _States(stages, budget, **sizes)
    queue, done = [(0, chain.start)], set()
    while queue:
        work, state = heapq.heappop(queue)
        if state[0] == 0:
            return work
        if state in done:
            continue
        done.add(state)
        for cost, following in chain.moves(*state):
            heapq.heappush(queue, (work + cost, following))
    return None


class _States:
    """States: the carry with a cotangent, stored carries, and recorded stages."""

    def __init__(self, stages, budget, input_bytes):
        self.stages, self.budget = stages, budget - input_bytes
        self.carries = [0, *(stage.output_bytes for stage in stages)]
        self.gradients = [
            0,
            *(
                s.output_bytes if s.gradient_bytes is None else s.gradient_bytes
                for s in stages
            ),
        ]
        self.start = (len(stages), (), ())

    def moves(self, top, stored, recorded):
        held = sum(self.carries[k] for k in stored) + self.gradients[top]
        held += sum(self.stages[k].saved_bytes for k in recorded)
        made = {0, *stored, *(k + 1 for k in recorded)}
        for k in {*stored} - {*recorded}:  # what a graph holds stays
            yield 0, (top, tuple(s for s in stored if s != k), recorded)
        for k in recorded:
            if k + 1 not in {*recorded} - {*stored}:
                yield 0, (top, stored, tuple(r for r in recorded if r != k))
        for k in made & set(range(top)):
            yield from self._run(k, held, top, stored, recorded)
            extra = self.gradients[k] + self.stages[k].backward_extra
            if k in recorded and k == top - 1 and held + extra <= self.budget:
                rest = tuple(r for r in recorded if r != k)
                kept = tuple(s for s in stored if s <= k)
                yield self.stages[k].backward_cost, (k, kept, rest)

    def _run(self, k, held, top, stored, recorded):
        stage = self.stages[k]
        if held + self.carries[k + 1] + stage.extra_bytes <= self.budget:
            kept = tuple(sorted({*stored, k + 1}))
            yield stage.forward_cost, (top, kept, recorded)
        size = held + stage.saved_bytes + stage.forward_extra
        if size <= self.budget and k not in recorded:
            yield stage.forward_cost, (top, stored, tuple(sorted({*recorded, k})))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_no_schedule_beats_a_plan_where_persistence_costs_nothing(length):
    equal = worse = 0
    for seed in range(12):
        stages, sizes = some_chain(seed, length)
        least = least_budget(stages, **sizes)
        assert cheapest_schedule(stages, sizes, least - 1) is None
        for budget in (least, least + 2, least + 5):
            best = cheapest_schedule(stages, sizes, budget)
            found = rotor(stages, budget, **sizes).cost
            assert found >= best
            equal, worse = equal + (found == best), worse + (found > best)
    assert equal > 9 * worse


# --- Equal stages -------------------------------------------------------------------


@pytest.mark.parametrize("slots", range(1, 7))
def test_with_unit_costs_the_work_is_that_of_binomial_checkpointing(slots):
    # The residuals fit only once, beside the checkpoints and the live carry. So a stage
    # is kept only right before its backward.
    residuals = slots + 1
    stage = StageCosts(1, 1, residuals, gradient_bytes=0)
    for length in range(1, 16):
        budget = slots + 1 + residuals
        plan = rotor([stage] * length, budget, input_bytes=1)
        assert plan.cost == advances(length, slots) + length


# --- Rounding, errors ---------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(0, 100))
def test_no_plan_exceeds_its_budget(seed, length, percent):
    stages, sizes = some_chain(seed, length, scale=1_000_003)
    stages = [*stages, StageCosts(1, 7, 11)]  # nothing divides the sizes
    least = least_budget(stages, **sizes)
    most = rotor(stages, 10**12, **sizes).peak
    budget = least + (most - least) * percent // 100
    plan = rotor_in(15, stages, budget, **sizes)
    assert plan.peak <= budget
    assert_as_predicted(plan, stages, sizes)


def test_a_large_budget_keeps_all():
    stages, sizes = some_chain(3, 30)
    plan = rotor(stages, 10**6, **sizes)
    assert plan.parts == (*range(30),)
    assert plan.evaluations(30) == (30, 0)


def test_rounding_wastes_little():
    # Sizes are rounded up to multiples of a sixtieth of the budget, 30 of them.
    for seed in range(3):
        stages, sizes = some_chain(seed, 30, scale=1_000_003)
        budget = 2 * least_budget(stages, **sizes)
        plan = rotor_in(60, stages, budget, **sizes)
        fine = rotor_in(2000, stages, budget, **sizes)
        assert_as_predicted(plan, stages, sizes)
        assert fine.cost <= plan.cost < 1.02 * fine.cost


def test_fifty_stages_are_planned():
    stages, sizes = some_chain(0, 50, scale=1_000_003)
    budget = 2 * least_budget(stages, **sizes)
    plan = rotor_in(200, stages, budget, **sizes)
    assert 0.97 * budget < plan.peak <= budget
    assert_as_predicted(plan, stages, sizes)


def test_a_budget_that_is_too_small_says_which_one_works():
    stages, sizes = some_chain(0, 6)
    least = least_budget(stages, **sizes)
    assert rotor(stages, least, **sizes).peak == least
    says = f"{least - 1} bytes is too small .* 6 stages. The least .* is {least} bytes"
    with pytest.raises(ValueError, match=says):
        rotor(stages, least - 1, **sizes)


def test_a_plan_is_for_its_own_length():
    stages, sizes = some_chain(0, 6)
    plan = rotor(stages, 1000, **sizes)
    for method in (plan.forward, plan.backward, plan.evaluations):
        with pytest.raises(ValueError, match="for 6 stages; got a chain of 7"):
            method(7)


def test_numbers_are_checked():
    with pytest.raises(ValueError, match="contains its output, 4 bytes; got 3"):
        StageCosts(1, 4, 3)


def test_plans_are_values():
    stages, sizes = some_chain(0, 6)
    budget = least_budget(stages, **sizes)
    same = functools.partial(rotor, stages, **sizes)
    assert same(budget) == same(budget) != same(10 * budget)
    assert len({same(budget), same(budget), same(10 * budget)}) == 2
    assert not list(itertools.islice(same(10 * budget).backward(6), 6, None))
