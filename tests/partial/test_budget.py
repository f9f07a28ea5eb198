"""The solver of budgets, on problems written by hand and on random ones."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from remat._partial import budget, solver
from remat._partial.budget import CostedOperation, Problem, solution_of, solve


LIMITS = 0, 4, 8, 16, 32, 64


@pytest.fixture(autouse=True)
def nothing_is_known():
    budget._known.cache_clear()
    budget._searched.cache_clear()


@st.composite
def problems(draw, most=7, loose=False):
    """A random program: an operation reads what others have made, and an input.

    With loose ends, an operation that always runs may be saved.
    """
    operations, sizes, values = [], {}, [0]
    for _ in range(draw(st.integers(1, most))):
        reads = draw(st.lists(st.sampled_from(values), max_size=3, unique=True))
        count = draw(st.sampled_from([1, 1, 1, 2]))
        makes = tuple(range(len(values), len(values) + count))
        values += makes
        sizes |= {v: draw(st.sampled_from([0, 4, 4, 8, 12, 20])) for v in makes}
        # Some operations change in place what others have made.
        changes = draw(st.booleans()) and draw(st.booleans())
        writes = tuple(reads[:1]) if changes and reads != [0] else ()
        cost = draw(st.sampled_from([0.0, 1.0, 2.0, 7.0, 1e-3]))
        new = CostedOperation(cost, tuple(reads), makes + writes, may_save=not writes)
        operations = [
            op._replace(may_save=False, must_save=False)
            if {*op.makes} & {*writes}
            else op
            for op in operations
        ]
        if not writes:
            kind = draw(st.sampled_from(["", "", "", "never", "must", "always"]))
            new = new._replace(
                may_save=kind not in ("never", "" if loose else "always"),
                must_save=kind == "must",
                always_runs=kind == "always",
            )
        operations.append(new)
    roots = draw(st.frozensets(st.sampled_from(values)))
    return Problem(tuple(operations), tuple(sizes.items()), roots)


def every_choice(problem):
    may = [i for i, op in enumerate(problem.operations) if op.may_save]
    for count in range(len(may) + 1):
        for chosen in itertools.combinations(may, count):
            yield solution_of(problem, chosen)


def assert_best(problem, limit, solution):
    """`solution` recomputes as little as any choice that saves at most `limit`."""
    works = [s.work for s in every_choice(problem) if s.nbytes <= limit]
    if not works:  # what must be saved takes more
        assert solution == solution_of(problem, ())
        return
    assert solution.nbytes <= limit
    assert solution.work == pytest.approx(min(works))
    assert solution.gap == 0


def program_without(saved):
    """How the steps of a small program run again, written out by hand.

    a = f(x); b = g(a); c = h(a); the backward reads a, b and c.
    """
    again = set()
    for name, needs in (("a", ()), ("b", "a"), ("c", "a")):
        if name not in saved:
            again |= {name, *(n for n in needs if n not in saved)}
    return again


FORK = Problem(
    (
        CostedOperation(4.0, (0,), (1,)),
        CostedOperation(2.0, (1,), (2,)),
        CostedOperation(1, (1,), (3,)),
    ),
    ((1, 8), (2, 4), (3, 4)),
    frozenset({1, 2, 3}),
)


@pytest.mark.parametrize("saved", ["", "a", "b", "c", "ab", "ac", "bc", "abc"])
def test_evaluation_counts_each_operation_that_runs_again_once(saved):
    costs, sizes = {"a": 4.0, "b": 2.0, "c": 1.0}, {"a": 8, "b": 4, "c": 4}
    found = solution_of(FORK, {"abc".index(name) for name in saved})
    assert found.work == sum(costs[name] for name in program_without(saved))
    assert found.nbytes == sum(sizes[name] for name in saved)


def test_what_no_recompute_reads_is_not_saved():
    chain = CostedOperation(1.0, (0,), (1,)), CostedOperation(1.0, (1,), (2,))
    problem = Problem(chain, ((1, 4), (2, 4)), frozenset({2}))
    assert solution_of(problem, {0, 1}).saved == {1}
    assert solve(problem, 100).saved == {1}


def test_what_is_changed_in_place_brings_back_what_was_before():
    made = CostedOperation(5.0, (0,), (1,), may_save=False)
    changed = CostedOperation(1.0, (1, 2), (1,), may_save=False)
    other = CostedOperation(3.0, (0,), (2,))
    problem = Problem((made, other, changed), ((1, 4), (2, 4)), frozenset({1}))
    assert solution_of(problem, ()).work == 9
    assert solve(problem, 4).work == 6
    assert solve(problem, 4).saved == {1}


def test_of_what_is_made_together_only_what_is_needed_counts():
    both = CostedOperation(3.0, (0,), (1, 2))
    problem = Problem((both,), ((1, 4), (2, 100)), frozenset({1}))
    assert solve(problem, 4).saved == {0}
    assert solve(problem, 3).saved == frozenset()


@given(problems())
@settings(max_examples=60, deadline=None)
def test_no_choice_within_the_limit_recomputes_less(problem):
    for limit in LIMITS:
        assert_best(problem, limit, solve(problem, limit))


@given(problems(loose=True))
@settings(max_examples=60, deadline=None)
def test_loose_ends_never_exceed_the_limit(problem):
    for limit in LIMITS:
        found = solve(problem, limit)
        if found.nbytes > limit:
            assert found.saved == solution_of(problem, ()).saved
        assert found.work <= solution_of(problem, ()).work
        if found.gap == 0:
            assert_best(problem, limit, found)


def test_the_comparison_with_every_choice_notices_a_worse_one():
    assert_best(FORK, 8, solve(FORK, 8))
    with pytest.raises(AssertionError):
        assert_best(FORK, 8, solution_of(FORK, {2}))
    with pytest.raises(AssertionError):
        assert_best(FORK, 8, solution_of(FORK, {0, 1, 2}))


def test_what_must_be_saved_counts_and_may_exceed_the_limit():
    must = FORK.operations[1]._replace(must_save=True)
    problem = Problem(
        (FORK.operations[0], must, FORK.operations[2]), FORK.nbytes, FORK.roots
    )
    assert solve(problem, 12).saved == {0, 1}
    assert solve(problem, 8).saved == {1, 2}
    beyond = solve(problem, 2)
    assert (beyond.saved, beyond.nbytes, beyond.gap) == ({1}, 4, 0)


def test_a_knapsack_over_residuals_would_recompute_more():
    # Each of three results needs the same costly one. A knapsack counts that cost for
    # each of them, or for none.
    costly = CostedOperation(10.0, (0,), (1,))
    cheap = [CostedOperation(3.0, (1,), (v,)) for v in (2, 3, 4)]
    sizes = (1, 8), (2, 4), (3, 4), (4, 4)
    problem = Problem((costly, *cheap), sizes, frozenset({2, 3, 4}))
    assert solve(problem, 8).saved == {0}
    assert solve(problem, 12).work == 0


# --- Time ---


def hard(count=60):
    """A problem that takes the solver more than a moment: costs like sizes."""
    operations, sizes = [], []
    for i in range(count):
        reads = {0, *((i * 7 + k * k) % i + 1 for k in range(3) if i)}
        cost = 1000 + (i * 7919) % 613
        operations.append(CostedOperation(float(cost), tuple(sorted(reads)), (i + 1,)))
        sizes.append((i + 1, cost * 4 + (i * 31) % 17))
    roots = frozenset(range(1, count + 1, 2))
    return Problem(tuple(operations), tuple(sizes), roots)


def test_when_the_time_is_up_the_limit_holds_and_the_gap_is_told():
    problem = hard()
    found = solve(problem, 40_000, time_limit=0.0)
    assert found.nbytes <= 40_000
    assert found.gap > 0
    assert found.work <= solution_of(problem, ()).work


def test_when_the_time_is_up_a_choice_for_fewer_bytes_is_used_again():
    problem = hard()
    few = solve(problem, 8_000, time_limit=20.0)
    assert few.work < solution_of(problem, ()).work
    more = solve(problem, 40_000, time_limit=0.0)
    assert more.work <= few.work


def test_more_time_is_used_where_there_was_too_little():
    problem = hard(20)
    hasty = solve(problem, 20_000, time_limit=0.0)
    patient = solve(problem, 20_000, time_limit=60.0)
    assert hasty.gap > 0
    assert patient.gap == 0
    assert patient.work < hasty.work


def test_a_problem_is_solved_once(monkeypatch):
    first = solve(FORK, 8)
    monkeypatch.delattr(solver, "_scipy")
    again = Problem(tuple(FORK.operations), tuple(FORK.nbytes), frozenset(FORK.roots))
    assert solve(again, 8) == first
    with pytest.raises(NameError, match="_scipy"):
        solve(again, 12)


@pytest.mark.parametrize("unit", [1, 2**33])
@pytest.mark.parametrize("cost", [1e-9, 1.0, 1e12])
def test_units_do_not_matter(unit, cost):
    problem = Problem(
        tuple(op._replace(cost=op.cost * cost) for op in FORK.operations),
        tuple((v, n * unit) for v, n in FORK.nbytes),
        FORK.roots,
    )
    for limit in (0, 4, 8, 12, 16):
        assert_best(problem, limit * unit, solve(problem, limit * unit))
        if limit:
            assert_best(problem, limit * unit - 1, solve(problem, limit * unit - 1))
