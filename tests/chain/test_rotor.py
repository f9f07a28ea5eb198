"""Plans for chains of unequal stages, against all plans and against all schedules."""

import functools
import heapq
import itertools
from random import Random

import pytest
from hypothesis import given, strategies as st
from support.interpreter import ByteInterpreter, Interpreter, WrongScheduleError

from remat.chain.schedules import (
    Advance,
    Backward,
    Drop,
    Keep,
    Load,
    Option,
    Recompute,
    Record,
    Save,
    Stage,
    advances,
    least_budget,
    rotor,
)


def some_stage(random, options=1, scale=1):
    """A stage of random numbers."""
    size = random.randint(1, 6) * scale
    given = random.choice([None, 0, random.randint(1, 20) * scale])
    kinds = tuple(
        Option(
            saved_bytes=size + random.randint(0, 8) * scale,
            backward_cost=random.randint(0, 9),
            forward_extra=random.randint(0, 3) * scale,
            backward_extra=random.randint(0, 3) * scale,
        )
        for _ in range(options)
    )
    # Running a stage without recording needs no more than recording it.
    recorded = min(option.saved_bytes + option.forward_extra for option in kinds)
    extra = random.randint(0, (recorded - size) // scale) * scale
    return Stage(random.randint(0, 9), size, kinds, given, extra)


def some_chain(seed, length, options=1, scale=1):
    """A chain of random stages, and the bytes of its input."""
    random = Random(f"{seed} {length} {options} {scale}")
    stages = [some_stage(random, options, scale) for _ in range(length)]
    sizes = {
        "input_bytes": random.randint(0, 6) * scale,
        "input_gradient_bytes": random.randint(0, 6) * scale,
    }
    return stages, sizes


def interpret(plan, stages, sizes):
    """The peak, the work, and the steps that a plan runs."""
    interpreter = ByteInterpreter(stages, **sizes)
    evaluations = interpreter.run(plan)
    return interpreter.most_bytes, interpreter.work, evaluations


def assert_as_predicted(plan, stages, sizes):
    found = interpret(plan, stages, sizes)
    assert found == (plan.peak, plan.cost, plan.evaluations(len(stages)))


# --- The interpreter ----------------------------------------------------------------

CHAIN = [Stage(1, 2, (Option(5, 3, 1, 2),)), Stage(10, 3, (Option(4, 30),))]
FORWARD = [Save(0), Advance(0, 1), Record(1)]
BACKWARD = [Backward(1), Load(0), Record(0), Backward(0), Drop(0)]


def test_the_interpreter_counts_bytes_and_work():
    interpreter = ByteInterpreter(CHAIN, 7, 1)
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
        ([Load(0), Record(0), Load(0), Record(0), *BACKWARD], "recorded already"),
        ([Load(0), Advance(0, 1), Record(1), *BACKWARD], "recorded already"),
    ],
)
def test_the_interpreter_refuses_wrong_backwards(backward, says):
    interpreter = ByteInterpreter(CHAIN)
    interpreter.forward(FORWARD)
    with pytest.raises(WrongScheduleError, match=says):
        interpreter.backward(backward)


def test_the_interpreter_refuses_residuals_that_nobody_needs():
    interpreter = Interpreter(2)
    interpreter.forward([Record(0), Record(1)])
    interpreter.recorded[5] = 0
    with pytest.raises(WrongScheduleError, match=r"steps \[5\] are still recorded"):
        interpreter.backward([Backward(1), Backward(0)])


# --- Against all plans, and against all schedules -----------------------------------


def all_parts(stages, i, j):
    """Every way to keep or recompute the stages of a subchain."""
    if i == j:
        yield ()
        return
    for number in range(len(stages[i].options)):
        for rest in all_parts(stages, i + 1, j):
            yield (Keep(i, number), *rest)
    for e in range(i + 1, j):
        for inner in all_parts(stages, i, e):
            for rest in all_parts(stages, e, j):
                yield (Recompute(i, e, inner), *rest)


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


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 2))
def test_no_other_plan_has_less_work(seed, length, options):
    assert_best_of_all_plans(*some_chain(seed, length, options))


@pytest.mark.parametrize("seed", range(8))
def test_no_other_plan_of_five_stages_has_less_work(seed):
    assert_best_of_all_plans(*some_chain(seed, 5))


def test_the_least_budget_counts_what_the_stages_that_run_again_need():
    # The cotangent in the middle is larger than those after it.
    numbers = [(5, 5, 0), (2, 4, 0), (0, 7, 23), (3, 12, 8), (0, 6, 0), (0, 0, 0)]
    stages = [
        Stage(1, size, (Option(saved),), gradient) for size, saved, gradient in numbers
    ]
    sizes = {"input_bytes": 0, "input_gradient_bytes": 0}
    assert assert_best_of_all_plans(stages, sizes) == 43


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
    """States: the carry with a cotangent, stored carries, and recorded stages.

    A stored carry is a number, a recorded stage a pair of its number and its option.
    """

    def __init__(self, stages, budget, input_bytes, input_gradient_bytes):
        self.stages, self.budget = stages, budget - input_bytes
        self.carries = [0, *(stage.output_bytes for stage in stages)]
        self.gradients = [
            input_gradient_bytes,
            *(
                s.output_bytes if s.gradient_bytes is None else s.gradient_bytes
                for s in stages
            ),
        ]
        self.start = (len(stages), (), ())

    def moves(self, top, stored, recorded):
        held = sum(self.carries[k] for k in stored) + self.gradients[top]
        held += sum(self.stages[k].options[o].saved_bytes for k, o in recorded)
        made = {0, *stored, *(k + 1 for k, _ in recorded)}
        inputs = {k for k, _ in recorded}  # what a graph holds
        for k in {*stored} - inputs:
            yield 0, (top, tuple(s for s in stored if s != k), recorded)
        for record in recorded:
            if record[0] + 1 not in inputs - {*stored}:
                yield 0, (top, stored, tuple(r for r in recorded if r != record))
        for k in made & set(range(top)):
            yield from self._run(k, held, top, stored, recorded)
            yield from self._reverse(k, held, top, stored, recorded)

    def _run(self, k, held, top, stored, recorded):
        stage = self.stages[k]
        if held + self.carries[k + 1] + stage.extra_bytes <= self.budget:
            kept = tuple(sorted({*stored, k + 1}))
            yield stage.forward_cost, (top, kept, recorded)
        for o, option in enumerate(stage.options):
            size = held + option.saved_bytes + option.forward_extra
            if size <= self.budget and all(k != r for r, _ in recorded):
                kept = tuple(sorted({*recorded, (k, o)}))
                yield stage.forward_cost, (top, stored, kept)

    def _reverse(self, k, held, top, stored, recorded):
        for r, o in recorded:
            option = self.stages[r].options[o]
            size = held + self.gradients[r] + option.backward_extra
            if r == k == top - 1 and size <= self.budget:
                rest = tuple(p for p in recorded if p[0] != k)
                yield (
                    option.backward_cost,
                    (k, tuple(s for s in stored if s <= k), rest),
                )


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
    stage = Stage(1, 1, (Option(residuals),), gradient_bytes=0)
    for length in range(1, 16):
        budget = slots + 1 + residuals
        plan = rotor([stage] * length, budget, input_bytes=1)
        assert plan.cost == advances(length, slots) + length


# --- Rounding, errors ---------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(0, 100))
def test_no_plan_exceeds_its_budget(seed, length, percent):
    stages, sizes = some_chain(seed, length, 2, scale=1_000_003)
    stages = [*stages, Stage(1, 7, (Option(11),))]  # nothing divides the sizes
    least = least_budget(stages, **sizes)
    most = rotor(stages, 10**12, **sizes).peak
    budget = least + (most - least) * percent // 100
    plan = rotor(stages, budget, slots=15, **sizes)
    assert plan.peak <= budget
    assert_as_predicted(plan, stages, sizes)


def test_a_large_budget_keeps_all_by_the_option_with_the_least_work():
    stages, sizes = some_chain(3, 30, options=3)
    plan = rotor(stages, 10**6, **sizes)
    for part, stage in zip(plan.parts, stages, strict=True):
        costs = [option.backward_cost for option in stage.options]
        assert costs[part.option] == min(costs)
    assert plan.evaluations(30) == (30, 0)


def test_rounding_wastes_little():
    # Sizes are rounded up to multiples of a sixtieth of the budget, 30 of them.
    for seed in range(6):
        stages, sizes = some_chain(seed, 30, scale=1_000_003)
        budget = 2 * least_budget(stages, **sizes)
        plan = rotor(stages, budget, slots=60, **sizes)
        fine = rotor(stages, budget, slots=2000, **sizes)
        assert_as_predicted(plan, stages, sizes)
        assert fine.cost <= plan.cost < 1.02 * fine.cost


def test_fifty_stages_are_planned():
    stages, sizes = some_chain(0, 50, options=2, scale=1_000_003)
    budget = 2 * least_budget(stages, **sizes)
    plan = rotor(stages, budget, slots=200, **sizes)
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


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Stage(1, 4, ()), "at least one Option"),
        (lambda: Stage(1, 4, (Option(3),)), "contains the output .* 4 bytes; got 3"),
        (lambda: rotor([Stage(1, 4, (Option(4),))], 9, slots=0), "slots >= 1; got 0"),
    ],
)
def test_numbers_are_checked(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_plans_are_values():
    stages, sizes = some_chain(0, 6)
    budget = least_budget(stages, **sizes)
    same = functools.partial(rotor, stages, **sizes)
    assert same(budget) == same(budget) != same(10 * budget)
    assert len({same(budget), same(budget), same(10 * budget)}) == 2
    assert not list(itertools.islice(same(10 * budget).backward(6), 6, None))
