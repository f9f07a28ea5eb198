"""A walk predicts the peak of any choice, and choices are near a lower bound."""

import copy
import functools
import random

import pytest
import torch
from support.fitted import CASES, bytes_before

import remat
from remat._fit.api import _course
from remat._fit.choose import SavingProgram, chosen_for, greedy, lowest, solved
from remat._fit.record import record
from remat._fit.simulate import TrainingStep, copied, isolated
from remat._fit.walk import Walker
from remat._scope.following import ByPosition, Course
from remat._torch import fake_mode
from remat.policies import Decision, Op
from remat.testing import memory_timeline


MODELS = "mlps", "lm", "resnet", "unet"


@functools.cache
def known(name):
    """Return what `walker_of` returns, once for all tests."""
    return walker_of(name)


def walker_of(name):
    make, *rest = CASES[name]
    torch.manual_seed(0)
    case = make(), *rest
    with isolated():
        mode = fake_mode()
        made = copied(TrainingStep(*case), mode, torch.device("cpu"))
        return Walker(record(made, mode)), case


def measured(walker, chosen, case):
    """Return the peak of a step that follows a choice."""
    model, args, kwargs, loss = case
    model, course = copy.deepcopy(model), _course(walker, chosen)

    def step():
        with remat.scope(ByPosition("", [course])):
            out = model(*args, **kwargs)  # alive until the end
            value = loss(out)
        value.backward()

    return bytes_before(model, *args, *kwargs.values()) + memory_timeline(step).peak


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_walk_predicts_the_peak_of_any_choice(name):
    walker, case = known(name)
    draw = random.Random(0)
    for share in (0, 0.3, 0.6, 1) if name in ("mlps", "lm") else (0.3,):
        chosen = {i for i in sorted(walker.choices) if draw.random() < share}
        found = measured(walker, chosen, case)
        # Fakes do not show the tensors that Python's numbers become.
        assert -256 <= walker(chosen).peak - found <= 0.02 * found, share


def test_a_walk_tells_choices_apart():
    walker, _ = known("lm")
    some = [*walker.choices][::2]
    found = {walker(chosen).peak for chosen in (some, [], walker.choices)}
    assert len(found) == 3


def bound(walker, budget):
    """Return the least seconds, if what is recomputed took no memory."""
    program = SavingProgram(walker)
    for at, nbytes in enumerate(walker.base):
        program.limits[at] = budget - nbytes
    program.solve(nodes=5000, gap=1e-4)
    return program.bound / 1e6


SHARES = [("mlps", 0.7), ("lm", 0.4), ("resnet", 0.9)]
OTHERS = [(n, s) for n in MODELS for s in (0.4, 0.7, 0.9) if (n, s) not in SHARES]


@pytest.mark.parametrize(
    ("name", "share"),
    [*SHARES, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)],
)
def test_choices_are_near_the_lower_bound(name, share):
    pytest.importorskip("scipy")
    walker, _ = known(name)
    low, high = walker(lowest(walker)).peak, walker(walker.choices).peak
    budget = int(low + share * (high - low))
    chosen = chosen_for(walker, budget)
    assert walker(chosen).peak <= budget
    assert 0 < walker.seconds(chosen) <= 1.1 * bound(walker, budget)
    assert chosen == chosen_for(walker_of(name)[0], budget)


@pytest.mark.parametrize("name", ["lm", pytest.param("unet", marks=pytest.mark.slow)])
def test_without_a_solver_choices_fit_and_cost_no_less(name):
    pytest.importorskip("scipy")
    walker, _ = known(name)
    low, high = walker(lowest(walker)).peak, walker(walker.choices).peak
    budget = (low + high) // 2
    found = greedy(walker, budget)
    assert walker(found).peak <= budget
    assert walker.seconds(found) >= 0.999 * walker.seconds(solved(walker, budget))


# --- The policy ----------------------------------------------------------------------


def asked(policy, *names):
    ops = [Op(getattr(torch.ops.aten, name).default) for name in names]
    return [policy(op) is Decision.SAVE for op in ops]


SIN_COS = Course(("aten.sin.default", "aten.cos.default"), (True, False))
SIN_EXP = Course(("aten.sin.default", "aten.exp.default"), (True, True))


def test_a_policy_by_position_starts_again_after_the_last():
    policy = ByPosition("f", [SIN_COS])
    assert asked(policy, "sin", "cos", "sin", "cos") == [True, False, True, False]


def test_a_policy_by_position_takes_the_course_that_runs():
    policy = ByPosition("f", [SIN_COS, SIN_EXP])
    assert asked(policy, "sin", "exp", "sin", "cos") == [True, True, True, False]


def test_what_runs_outside_of_a_course_is_saved():
    policy = ByPosition("f", [SIN_COS])
    assert asked(policy, "exp", "sin", "cos", "exp") == [True, True, False, True]


def test_other_operations_are_recomputed_from_there_on():
    policy = ByPosition("f", [SIN_COS])
    with pytest.warns(UserWarning, match=r"expects aten\.cos\.default, but aten\.exp"):
        assert asked(policy, "sin", "exp", "sin", "cos") == [True, False, False, False]
