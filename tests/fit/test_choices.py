"""A walk predicts the peak of any choice, and choices are near a lower bound."""

import copy
import functools
import random

import pytest
import torch
from support.fitted import CASES, bytes_before

from remat._base.calls import OUTSIDE, ModuleCall
from remat._fit.choose import chosen_for, greedy, least_for, program_of, solved
from remat._fit.planning import _course
from remat._fit.record import record
from remat._fit.simulate import TrainingStep, copied, isolated
from remat._fit.walk import Walker
from remat._scope.following import ByPlace, Course, Placed
from remat._torch.tensors import fake_mode
from remat.nn._followed import FollowedScope
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
        with FollowedScope("", [course]):
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
    program = program_of(walker)
    for at, nbytes in enumerate(walker.base):
        program.limits[at] = budget - nbytes
    program.solve(node_limit=5000, mip_rel_gap=1e-4)
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
    low, high = walker(least_for(walker)).peak, walker(walker.choices).peak
    budget = int(low + share * (high - low))
    chosen = chosen_for(walker, budget)
    assert walker(chosen).peak <= budget
    assert 0 < walker.seconds(chosen) <= 1.1 * bound(walker, budget)
    assert chosen == chosen_for(walker_of(name)[0], budget)


SWEPT = [("mlps", 24), *(pytest.param(n, 48, marks=pytest.mark.slow) for n in MODELS)]


@pytest.mark.parametrize(("name", "count"), SWEPT)
def test_more_bytes_never_cost_more_work(name, count):
    pytest.importorskip("scipy")
    walker, _ = known(name)
    low, high = walker(least_for(walker)).peak, walker(walker.choices).peak
    assert chosen_for(walker, low - 1) is None
    work = float("inf")
    for k in range(count + 1):
        budget = int(low + (k / count) ** 1.5 * (high - low))
        chosen = chosen_for(walker, budget)
        assert walker(chosen).peak <= budget
        assert walker.seconds(chosen) <= work * (1 + 1e-9), budget
        work = walker.seconds(chosen)
    assert work == 0


@pytest.mark.parametrize("name", ["mlps", "lm"])
def test_no_choice_among_results_of_one_kind_is_below_the_least(name):
    pytest.importorskip("scipy")
    walker, _ = known(name)
    low, kinds = walker(least_for(walker)).peak, {}
    for i in walker.choices:
        kinds.setdefault(walker.record.operations[i].name, []).append(i)
    for kind in kinds.values():
        for share in range(2 ** min(len(kind), 6)):
            saved = [i for k, i in enumerate(kind) if share >> k & 1]
            assert walker(saved).peak >= low
    assert walker(chosen_for(walker, low)).peak <= low
    assert chosen_for(walker, low - 1) is None


@pytest.mark.parametrize("name", ["lm", pytest.param("unet", marks=pytest.mark.slow)])
def test_without_a_solver_choices_fit_and_cost_no_less(name):
    pytest.importorskip("scipy")
    walker, _ = known(name)
    low, high = walker(least_for(walker)).peak, walker(walker.choices).peak
    budget = (low + high) // 2
    found = greedy(walker, budget)
    assert walker(found).peak <= budget
    assert walker.seconds(found) >= 0.999 * walker.seconds(solved(walker, budget))


# --- The policy ----------------------------------------------------------------------


def course(*asked, place=OUTSIDE):
    """Return a course of operations: those in capitals are saved."""
    names = [f"aten.{name.lower()}.default" for name in asked]
    saves = [name.isupper() for name in asked]
    unread = (0,) * len(names)
    sizes = (4,) * len(names)
    return Course((Placed(place, tuple(names), tuple(saves), unread, sizes),))


def asked(policy, names):
    """Ask about operations; return them, those in capitals that are saved."""
    ops = [(n, Op(getattr(torch.ops.aten, n).default)) for n in names.split()]
    saved = [n.upper() if policy(op) is Decision.SAVE else n for n, op in ops]
    return " ".join(saved)


ROW = "SIN", "cos", "EXP", "tan", "TANH", "abs"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("sin cos exp tan tanh abs", "SIN cos EXP tan TANH abs"),
        # It starts again after the last one.
        (
            "sin cos exp tan tanh abs sin cos exp",
            "SIN cos EXP tan TANH abs SIN cos EXP",
        ),
        # One more is recomputed, and costs nothing else.
        ("sin neg cos exp tan tanh abs", "SIN neg cos EXP tan TANH abs"),
        ("neg sin cos exp", "neg SIN cos EXP"),
        ("sin sin cos exp", "SIN sin cos EXP"),
        ("sin cos exp exp tan tanh", "SIN cos EXP exp tan TANH"),
        # So is one fewer, and another one.
        ("sin exp tan tanh", "SIN EXP tan TANH"),
        ("cos exp tan tanh", "cos EXP tan TANH"),
        ("sin cos neg tan tanh", "SIN cos neg tan TANH"),
        ("sin neg neg neg neg tanh abs", "SIN neg neg neg neg TANH abs"),
        ("neg neg neg", "neg neg neg"),
    ],
)
def test_operations_are_aligned_with_a_plan(names, expected):
    assert asked(ByPlace("f", [course(*ROW)]), names) == expected


def test_one_more_of_a_common_name_does_not_lose_what_follows():
    policy = ByPlace("f", [course("CLONE", "mm", "tan", "CLONE", "mm", "EXP")])
    found = asked(policy, "clone clone mm tan clone mm exp")
    assert found == "CLONE clone mm tan CLONE mm EXP"


def test_a_policy_takes_the_course_that_runs():
    policy = ByPlace("f", [course("SIN", "cos"), course("SIN", "EXP")])
    assert asked(policy, "sin exp sin exp sin cos") == "SIN EXP SIN EXP SIN cos"


def test_a_difference_in_one_call_is_none_in_the_next():
    places = [("Net", 0, name, 0) for name in "ab"]
    parts = [course("SIN", "EXP", place=place).placed[0] for place in places]
    policy = ByPlace("f", [Course(tuple(parts))])
    policy.calls.current = ModuleCall(places[0], None)
    assert asked(policy, "tan tan") == "tan tan"
    policy.calls.current = ModuleCall(places[1], None)
    assert asked(policy, "sin exp") == "SIN EXP"


def test_more_calls_than_planned_begin_again():
    parts = [("Net", 0, "a", 0), ("Net", 0, "a", 1)]
    parts = [course("SIN", "EXP", place=parts[0]), course("sin", "EXP", place=parts[1])]
    policy = ByPlace("f", [Course(tuple(part.placed[0] for part in parts))])
    for number, expected in enumerate(["SIN EXP", "sin EXP", "SIN EXP"]):
        policy.calls.current = ModuleCall(("Net", 3, "a", number), None)
        assert asked(policy, "sin exp") == expected
