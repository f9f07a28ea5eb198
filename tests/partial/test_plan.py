"""The planner, on records written by hand: no tensors, no torch operations."""

from dataclasses import replace

import pytest
from support.records import (
    collective,
    draw,
    draw_in_place,
    draw_like,
    dropout,
    in_place,
    pure,
    record,
    view,
    zeros_like,
)

from remat._base.op import Op
from remat._partial.plan import Fate, Step, plan


# --- Which operations run, are kept or are dead ---


def chain(length, roots):
    """`length` operations in a row, the i-th of storage i, which makes i+1."""
    steps = [pure([i], i + 1) for i in range(length)]
    return record(*steps, roots=roots)


TWO = record(
    pure([0], 1), pure([1], 2), pure([0], 3), pure([3], 4), roots=[[1], [0, 3]]
)
WRITER = Step(Op("out"), (0, 1), (2,), (1,))
NEEDS = [
    ("what saves nothing needs nothing", chain(3, [[]]), "dead dead dead", set()),
    ("the last of a chain is dead", chain(3, [[0, 1, 2]]), "run run dead", {0}),
    (
        "an input that what is dead reads is not needed",
        record(pure([0], 2), pure([2, 1], 3), inputs=(0, 1), roots=[[0]]),
        *("dead dead", {0}),
    ),
    (
        "a branch that nobody needs is dead",
        record(pure([0], 1), pure([0], 2), pure([1], 3), roots=[[1]]),
        *("run dead dead", {0}),
    ),
    (
        "an input is two leaves",
        record(pure([0], 1), inputs=(0, 0, 2), roots=[[0]]),
        *("dead", {0, 1}),
    ),
    ("a root that nobody made", record(pure([0], 1), roots=[[7]]), "dead", set()),
    (
        "a view of what is there runs, and of what is dead does not",
        record(pure([0], 1), view(1), pure([0], 2), view(2), roots=[[1]]),
        *("run run dead dead", {0}),
    ),
    (
        "a view of an input that nobody reads",
        record(view(0), pure([0], 1)),
        *("dead dead", set()),
    ),
    (
        "a view of an input that is read",
        record(view(0), pure([0], 1), roots=[[0]]),
        *("run dead", {0}),
    ),
    (
        "one of several outputs is needed",
        record(pure([0], 1, 2), pure([2], 3), roots=[[1]]),
        *("run dead", {0}),
    ),
    (
        "a change of what is needed runs with what it reads",
        record(pure([0], 2), pure([1], 3), in_place(2, 3), inputs=(0, 1), roots=[[2]]),
        *("run run run", {0, 1}),
    ),
    (
        "a change of what is dead is dead",
        record(pure([0], 1), pure([0], 2), in_place(2, 1), roots=[[1]]),
        *("run dead dead", {0}),
    ),
    (
        "a change through a view is one of the whole",
        record(pure([0], 1), view(1), in_place(1), pure([1], 2), roots=[[2]]),
        *("run run run run", {0}),
    ),
    (
        "a change of an input that is needed runs",
        record(in_place(1, 0), pure([1], 2), inputs=(0, 1), roots=[[1]]),
        *("run dead", {0, 1}),
    ),
    (
        "a draw needs what it reads",
        record(pure([0], 1), draw(1, makes=2), roots=[[]]),
        *("run run", {0}),
    ),
    (
        "a draw that reads a shape needs no values",
        record(pure([0], 1), draw_like(1, 2), pure([2], 3), roots=[[2]]),
        *("dead metadata_only dead", set()),
    ),
    (
        "what is made after a shape needs no values, as in JAX",
        record(pure([0], 1), zeros_like(1, 2), pure([0, 2], 3), roots=[[2]]),
        *("dead metadata_only dead", set()),
    ),
    (
        "what Python reads runs with all that it needs",
        record(pure([0], 1), pure([1], always_runs=True), pure([0], 2), roots=[[]]),
        *("run run dead", {0}),
    ),
    ("all outputs", TWO, "run dead run dead", {0}),
]


def rows(table):
    """Parametrize over rows that begin with an id."""
    return [pytest.param(*row, id=name) for name, *row in table]


_FATES = {"run": "recomputed", "keep": "saved"}


def fates(text):
    return tuple(Fate[_FATES.get(word, word).upper()] for word in text.split())


@pytest.mark.parametrize(("rec", "expected", "needed"), rows(NEEDS))
def test_a_plan_runs_what_the_roots_need(rec, expected, needed):
    made = plan(rec)
    assert (made.fates, made.residuals, made.saved) == (fates(expected), (), set())
    assert made.needed == needed


def test_the_storages_of_a_plan_that_are_there_are_live():
    assert plan(chain(3, [[]])).live == set()
    assert plan(chain(3, [[0, 1, 2]])).live == {0, 1, 2}
    assert plan(record(pure([0], 1), draw_like(1, 2), roots=[[2]])).live == {2}


@pytest.mark.parametrize(("root", "other"), [(2, 1), (1, 2)])
def test_an_operation_that_returns_one_and_changes_another_runs_for_either(root, other):
    norm = Step(Op("norm"), (0, 1), (2,), (1,))
    made = plan(record(norm, inputs=(0, 1), roots=[[root]]))
    assert made.fates == (Fate.RECOMPUTED,)
    assert {0, root} <= made.live
    assert 1 in made.live, f"reading {root} needs {other} too"


# --- Outputs with cotangents, and what was extra_roots ---


DRAWS = record(draw(makes=1), draw(makes=2), pure([2], 3), roots=[[1], []])
DROPS = record(pure([0], 1), dropout(1, 2, 3), roots=[[3], [2, 3]])
TARGET = record(pure([0], 1), draw_in_place(1), roots=[[], [1]])
ZEROS = record(pure([0], 1), zeros_like(1, 2), pure([0, 2], 3), roots=[[2]])
BOTH = record(pure([0], 1), pure([1], 1, 2), roots=[[1]])
# One call within, of three operations, which keeps the results of the first and last.
CALL = pure([0], 1), pure([1], 2), pure([2], 3)
WITHIN = record(*CALL, roots=[[0, 1, 3], [2]], within=[([0], [1, 3])])
OUTPUTS = [
    ("the first", TWO, {"targets": [0]}, "run dead dead dead"),
    ("the second", TWO, {"targets": [1]}, "dead dead run dead"),
    ("both", TWO, {"targets": [0, 1]}, "run dead run dead"),
    ("none", TWO, {"targets": []}, "dead dead dead dead"),
    ("a lesson besides", TWO, {"targets": [0], "extra_roots": [4]}, "run dead run run"),
    ("not pruned", TWO, {"targets": [], "prune": False}, "run run run run"),
    # Draws after them have to find the stream where it was.
    ("every draw runs", DRAWS, {}, "run run dead"),
    ("every draw runs for no output", DRAWS, {"targets": []}, "run run dead"),
    ("every draw runs if it may be kept", DRAWS, {"saveable": [0, 1]}, "run run dead"),
    ("a mask for no output", DROPS, {"targets": []}, "dead metadata_only"),
    ("a mask alone", DROPS, {"targets": [0]}, "dead metadata_only"),
    ("what a mask is applied to", DROPS, {"targets": [1]}, "run run"),
    ("a draw into what nobody needs", TARGET, {"targets": [0]}, "dead metadata_only"),
    ("a draw into what is needed", TARGET, {"targets": [1]}, "run metadata_only"),
    ("zeros for no output", ZEROS, {"targets": []}, "dead dead dead"),
    ("zeros that may be kept", ZEROS, {"saveable": [1]}, "dead keep dead"),
    ("residuals of a call alone", WITHIN, {"targets": [0]}, "dead dead dead"),
    ("residuals of a call that is read", WITHIN, {}, "run run run"),
    ("a call that is read alone", WITHIN, {"targets": [1]}, "run run dead"),
    ("a call of which a part is kept", WITHIN, {"saveable": [0]}, "keep run run"),
    ("a call, not pruned", WITHIN, {"targets": [0], "prune": False}, "run run run"),
    ("a view beside another output", BOTH, {}, "run run"),
    ("a view beside another for no output", BOTH, {"targets": []}, "dead dead"),
]


@pytest.mark.parametrize(("rec", "options", "expected"), rows(OUTPUTS))
def test_a_plan_is_for_some_targets(rec, options, expected):
    assert plan(rec, **options).fates == fates(expected)


def test_the_target_of_a_draw_in_place_is_live():
    assert plan(TARGET, targets=[1]).live >= {0, 1}


# --- What a policy lets be kept ---


CHAIN, SEVERAL = (
    chain(4, [[1, 3]]),
    record(pure([0], 1, 2, 3), pure([3], 4), roots=[[1, 3]]),
)
HALF = record(pure([0], 1, 2), pure([2], 3), roots=[[1]])
IN_FULL = {"prune": False}
KEPT = [
    ("stops the walk", CHAIN, [0, 2], {}, "keep dead keep dead", {(0, 0), (2, 0)}),
    ("not what is not read", chain(4, [[1]]), range(4), {}, None, {(0, 0)}),
    ("not what is behind it", chain(4, [[3]]), range(4), {}, None, {(2, 0)}),
    ("the needed of several", SEVERAL, [0], {}, "keep dead", {(0, 0), (0, 2)}),
    (
        "and a view of it runs",
        record(pure([0], 1), view(1), roots=[[1]]),
        *([0], {}, "keep run", {(0, 0)}),
    ),
    (
        "not a view, which does not make a value",
        record(pure([0], 1), view(1), roots=[[1]]),
        *([1], {}, "run run", set()),
    ),
    (
        "not a draw, for it has to run",
        record(dropout(0, 1, 2), roots=[[1]]),
        *([0], {}, "run", set()),
    ),
    (
        "not what runs in any case",
        record(pure([0], 1, always_runs=True), roots=[[1]]),
        *([0], {}, "run", set()),
    ),
    (
        "not what is changed in place",
        record(pure([0], 1), in_place(1), roots=[[1]]),
        *([0, 1], {}, "run run", set()),
    ),
    (
        "not what is written into",
        record(pure([0], 1), WRITER, roots=[[1]]),
        *([0, 1], {}, "run run", set()),
    ),
    # Of `reshape`, say, that returned a view: keeping it keeps the input.
    (
        "not what shares memory with an input",
        record(view(0), pure([0], 1), roots=[[0]]),
        *([0], {}, "run dead", set()),
    ),
    (
        "not what shares memory with another",
        record(pure([0], 1), pure([1], 1, 2), roots=[[2]]),
        *([1], {}, "run run", set()),
    ),
    (
        "what a collective overwrites, as the collective leaves it",
        record(pure([0], 1), collective(1), pure([1], 2), roots=[[1]]),
        *([0], {}, "keep keep dead", {(0, 0)}),
    ),
    (
        "what a collective overwrites, also of nothing, and in full",
        record(pure([], 1), collective(1), pure([1], 2), roots=[[1]]),
        *([0], {"prune": False}, "keep keep run", {(0, 0)}),
    ),
    (
        "nothing of it, if the policy does not say so",
        record(pure([0], 1), collective(1), pure([1], 2), roots=[[1]]),
        *([1], {}, "run run dead", set()),
    ),
    (
        "not what was read before a collective overwrote it",
        record(pure([0], 1), pure([1], 2), collective(1), roots=[[1, 2]]),
        *([0], {}, "run run run", set()),
    ),
    (
        "not what is changed after a collective overwrote it",
        record(pure([0], 1), collective(1), in_place(1), roots=[[1]]),
        *([0], {}, "run run run", set()),
    ),
    (
        "not an input that a collective overwrites",
        record(collective(0), pure([0], 1), roots=[[0]]),
        *([0], {}, "run dead", set()),
    ),
    (
        "what a wrapper holds, for the wrapper",
        record(pure([0], 1), pure([2], 3), roots=[[2]], inside=[(2, 1)]),
        *([0], {}, "keep dead", {(0, 0)}),
    ),
    (
        "a wrapper, for what it holds",
        record(pure([0], 1), pure([2], 3), roots=[[2]], inside=[(1, 2)]),
        *([0], {}, "keep dead", {(0, 0)}),
    ),
    (
        "not a wrapper of what is changed in place",
        record(pure([0], 1), in_place(2), roots=[[1]], inside=[(1, 2)]),
        *([0], {}, "run run", set()),
    ),
    (
        "what a wrapper of it is read from: that is a view",
        record(
            pure([0], 1), Step(Op("wait"), (2,), (1,)), roots=[[1]], inside=[(2, 1)]
        ),
        *([0], {}, None, {(0, 0)}),
    ),
    ("for all outputs", TWO, [0, 2], {}, None, {(0, 0), (2, 0)}),
    ("for one output", TWO, [0, 2], {"targets": [1]}, None, {(2, 0)}),
    ("a lesson", TWO, [3], {"targets": [0], "extra_roots": [4]}, None, {(3, 0)}),
    ("in full", TWO, [0], IN_FULL, "keep run run run", {(0, 0)}),
    ("in full, what is read", TWO, [0, 1], IN_FULL, "keep run run run", {(0, 0)}),
    ("in full, every output", HALF, [0], IN_FULL, "keep run", {(0, 0), (0, 1)}),
]


@pytest.mark.parametrize(
    ("rec", "saveable", "options", "expected", "residuals"), rows(KEPT)
)
def test_a_plan_keeps_of_what_may_be_kept(rec, saveable, options, expected, residuals):
    made = plan(rec, saveable, **options)
    assert {*made.residuals} == residuals
    assert made.saved == {i for i, _ in residuals}
    assert expected is None or made.fates == fates(expected)


def test_a_plan_that_keeps_what_it_reads_needs_no_input():
    assert plan(CHAIN, [0, 2]).needed == set()
    assert plan(SEVERAL, [0]).needed == set()
    assert plan(record(view(0), pure([0], 1), roots=[[0]]), [0]).needed == {0}
    assert plan(TWO, [0], prune=False).needed == {0}


def test_a_record_knows_the_names_given():
    named = [
        step._replace(op=replace(step.op, names=frozenset(names)))
        for step, names in zip(TWO.steps, [{"a"}, {"b", "a"}, {}, {"c"}], strict=True)
    ]
    assert TWO.names == frozenset()
    assert replace(TWO, steps=(*named,)).names == {"a", "b", "c"}
