"""The planner, on records written by hand: no tensors, no torch operations.

Beside the rules one by one, random records are *interpreted*: a storage has for a value
what was done to make it. Along a plan, whatever is read has to hold what it held in the
forward, and at the end the roots have to.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from remat._base.op import Op
from remat._partial.plan import Fate, Plan, Record, Step, plan


RUN, METADATA_ONLY, KEEP, DEAD = (
    Fate.RECOMPUTED,
    Fate.METADATA_ONLY,
    Fate.SAVED,
    Fate.DEAD,
)


def pure(reads, *makes, **flags):
    """An operation that reads some storages and makes others."""
    return Step(Op("pure"), tuple(reads), makes, **flags)


def view(of):
    return Step(Op("view"), (of,), (of,))


def in_place(target, *reads):
    return Step(Op("in_place"), (target, *reads), (target,), (target,))


def draw(*reads, makes):
    return Step(Op("draw"), reads, (makes,), draws=True)


def draw_like(of, makes):
    """Draws as many as another has elements, `rand_like` say."""
    return Step(Op("draw_like"), (of,), (makes,), draws=True, metadata_only=(0,))


def dropout(of, out, mask):
    return Step(Op("dropout"), (of,), (out, mask), draws=True, metadata_only=(1,))


def draw_in_place(target):
    return Step(
        Op("draw_"), (target,), (target,), (target,), draws=True, metadata_only=(0,)
    )


def zeros_like(of, makes):
    return Step(Op("zeros_like"), (of,), (makes,), metadata_only=(0,))


def record(*steps, inputs=(0,), roots=()):
    """Storages are numbered from 0 by the inputs; `roots` are those of each output."""
    return Record(steps, inputs, tuple(map(frozenset, roots)))


def fates(record, *args, **kwargs):
    return [*plan(record, *args, **kwargs).fates]


# --- What is needed, and what is dead ---


def chain(length, roots):
    """`length` operations in a row, the i-th of storage i, which makes i+1."""
    steps = [pure([i], i + 1) for i in range(length)]
    return record(*steps, roots=roots)


def test_nothing_is_needed_of_what_saves_nothing():
    assert plan(chain(3, [[]])) == Plan((DEAD,) * 3, (), frozenset(), frozenset())


def test_the_last_operation_of_a_chain_is_dead():
    made = plan(chain(3, [[0, 1, 2]]))
    assert made == Plan((RUN, RUN, DEAD), (), frozenset({0}), frozenset({0, 1, 2}))


def test_an_input_that_is_only_read_by_what_is_dead_is_not_needed():
    sin_plus = record(pure([0], 2), pure([2, 1], 3), inputs=(0, 1), roots=[[0]])
    assert plan(sin_plus).needed == {0}
    assert fates(sin_plus) == [DEAD, DEAD]


def test_a_branch_that_nobody_needs_is_dead():
    branches = record(pure([0], 1), pure([0], 2), pure([1], 3), roots=[[1]])
    assert fates(branches) == [RUN, DEAD, DEAD]


def test_an_input_may_be_two_leaves():
    made = plan(record(pure([0], 1), inputs=(0, 0, 2), roots=[[0]]))
    assert made.needed == {0, 1}


def test_a_root_that_nobody_made_is_no_matter():
    assert fates(record(pure([0], 1), roots=[[7]])) == [DEAD]


# --- Views ---


def test_a_view_of_what_is_there_runs_and_of_what_is_dead_does_not():
    two = record(pure([0], 1), view(1), pure([0], 2), view(2), roots=[[1]])
    assert fates(two) == [RUN, RUN, DEAD, DEAD]


def test_a_view_of_what_is_kept_runs():
    assert fates(record(pure([0], 1), view(1), roots=[[1]]), [0]) == [KEEP, RUN]


def test_what_returns_a_view_of_what_is_there_runs_whatever_else_it_returns():
    both = record(pure([0], 1), pure([1], 1, 2), roots=[[1]])
    assert fates(both) == [RUN, RUN]
    assert fates(both, outputs=[]) == [DEAD, DEAD]


def test_a_view_of_an_input_needs_it_only_if_somebody_reads_it():
    of_input = record(view(0), pure([0], 1))
    assert plan(of_input).needed == frozenset()
    assert plan(replace(of_input, roots=(frozenset({0}),))).needed == {0}


def test_a_view_is_not_what_makes_a_value():
    """So a policy that lets it be kept keeps nothing."""
    made = plan(record(pure([0], 1), view(1), roots=[[1]]), saveable=[1])
    assert made.residuals == ()
    assert made.fates == (RUN, RUN)


# --- Several outputs ---


def test_of_several_outputs_those_needed_are_kept():
    several = record(pure([0], 1, 2, 3), pure([3], 4), roots=[[1, 3]])
    made = plan(several, saveable=[0])
    assert made.residuals == ((0, 0), (0, 2))
    assert made.saved == {0}
    assert made.fates == (KEEP, DEAD)
    assert made.needed == frozenset()


def test_one_needed_output_makes_the_operation_run():
    several = record(pure([0], 1, 2), pure([2], 3), roots=[[1]])
    assert fates(several) == [RUN, DEAD]


# --- In place ---


def test_a_change_of_what_is_needed_runs_with_what_it_reads():
    changed = record(
        pure([0], 2), pure([1], 3), in_place(2, 3), inputs=(0, 1), roots=[[2]]
    )
    assert fates(changed) == [RUN, RUN, RUN]
    assert plan(changed).needed == {0, 1}


def test_a_change_of_what_is_dead_is_dead():
    changed = record(pure([0], 1), pure([0], 2), in_place(2, 1), roots=[[1]])
    assert fates(changed) == [RUN, DEAD, DEAD]


def test_a_change_through_a_view_is_one_of_the_whole():
    through = record(pure([0], 1), view(1), in_place(1), pure([1], 2), roots=[[2]])
    assert fates(through) == [RUN, RUN, RUN, RUN]


def test_a_change_of_an_input_runs_where_it_is_needed():
    buffer = record(in_place(1, 0), pure([1], 2), inputs=(0, 1), roots=[[1]])
    assert fates(buffer) == [RUN, DEAD]
    assert plan(buffer).needed == {0, 1}


def test_an_operation_that_returns_one_and_changes_another_runs_for_either():
    for root, other in ((2, 1), (1, 2)):
        norm = Step(Op("norm"), (0, 1), (2,), (1,))
        made = plan(record(norm, inputs=(0, 1), roots=[[root]]))
        assert made.fates == (RUN,)
        assert {0, root} <= made.live
        assert 1 in made.live, f"reading {root} needs {other} too"


# --- Draws and effects ---


def test_every_draw_runs():
    """Those after it have to find the stream where it was."""
    draws = record(draw(makes=1), draw(makes=2), pure([2], 3), roots=[[1], []])
    assert fates(draws) == [RUN, RUN, DEAD]
    assert fates(draws, outputs=[]) == [RUN, RUN, DEAD]
    assert fates(draws, saveable=[0, 1]) == [RUN, RUN, DEAD]


def test_a_draw_needs_what_it_reads():
    draws = record(pure([0], 1), draw(1, makes=2), roots=[[]])
    assert fates(draws) == [RUN, RUN]
    assert plan(draws).needed == {0}


def test_a_draw_that_does_not_read_values_needs_none():
    like = record(pure([0], 1), draw_like(1, 2), pure([2], 3), roots=[[2]])
    assert fates(like) == [DEAD, METADATA_ONLY, DEAD]
    assert plan(like).needed == frozenset()
    assert plan(like).live == {2}


def test_a_mask_needs_no_values_and_what_it_is_applied_to_does():
    drops = record(pure([0], 1), dropout(1, 2, 3), roots=[[3], [2, 3]])
    assert fates(drops, outputs=[]) == [DEAD, METADATA_ONLY]
    assert fates(drops, outputs=[0]) == [DEAD, METADATA_ONLY]
    assert fates(drops, outputs=[1]) == [RUN, RUN]


def test_a_draw_is_not_kept_for_it_has_to_run():
    drops = record(dropout(0, 1, 2), roots=[[1]])
    made = plan(drops, saveable=[0])
    assert (made.fates, made.residuals, made.needed) == ((RUN,), (), {0})


def test_a_draw_in_place_needs_its_target_if_somebody_else_does():
    target = record(pure([0], 1), draw_in_place(1), roots=[[], [1]])
    assert fates(target, outputs=[0]) == [DEAD, METADATA_ONLY]
    assert fates(target, outputs=[1]) == [RUN, METADATA_ONLY]
    assert plan(target, outputs=[1]).live >= {0, 1}


def test_what_is_made_after_a_shape_needs_no_values():
    """As in JAX: `zeros_like(x)` keeps no x."""
    zeros = record(pure([0], 1), zeros_like(1, 2), pure([0, 2], 3), roots=[[2]])
    assert fates(zeros) == [DEAD, METADATA_ONLY, DEAD]
    assert plan(zeros).needed == frozenset()
    assert fates(zeros, outputs=[]) == [DEAD] * 3
    assert fates(zeros, saveable=[1]) == [DEAD, KEEP, DEAD]


def test_what_python_reads_runs_with_all_that_it_needs():
    item = record(
        pure([0], 1), pure([1], always_runs=True), pure([0], 2), inputs=(0,), roots=[[]]
    )
    assert fates(item) == [RUN, RUN, DEAD]
    assert plan(item).needed == {0}


def test_what_runs_in_any_case_is_not_kept():
    shaped = record(pure([0], 1, always_runs=True), roots=[[1]])
    assert fates(shaped, [0]) == [RUN]
    assert plan(shaped, [0]).residuals == ()


# --- Policies ---


def test_the_walk_stops_at_what_is_kept():
    made = plan(chain(4, [[1, 3]]), saveable=[0, 2])
    assert made.fates == (KEEP, DEAD, KEEP, DEAD)
    assert made.residuals == ((0, 0), (2, 0))
    assert made.needed == frozenset()


def test_a_result_that_is_not_read_is_not_kept():
    made = plan(chain(4, [[1]]), saveable=range(4))
    assert made.residuals == ((0, 0),)


def test_a_result_behind_one_that_is_kept_is_not_kept():
    assert plan(chain(4, [[3]]), saveable=range(4)).residuals == ((2, 0),)


@pytest.mark.parametrize("writer", [in_place(1), Step(Op("out"), (0, 1), (2,), (1,))])
def test_a_result_that_is_changed_afterwards_is_not_kept(writer):
    made = plan(record(pure([0], 1), writer, roots=[[1]]), saveable=[0, 1])
    assert made.residuals == ()
    assert made.fates == (RUN, RUN)


def test_a_result_that_shares_memory_with_an_input_is_not_kept():
    """Of `reshape`, say, that returned a view: keeping it keeps the input."""
    made = plan(record(view(0), pure([0], 1), roots=[[0]]), saveable=[0])
    assert (made.residuals, made.needed) == ((), {0})


def test_a_result_that_shares_memory_with_another_is_not_kept():
    shares = record(pure([0], 1), pure([1], 1, 2), roots=[[2]])
    made = plan(shares, saveable=[1])
    assert (made.fates, made.residuals) == ((RUN, RUN), ())


# --- Outputs, lessons, prune=False ---


TWO = record(
    pure([0], 1), pure([1], 2), pure([0], 3), pure([3], 4), roots=[[1], [0, 3]]
)


def test_only_what_the_outputs_with_cotangents_read_is_needed():
    assert fates(TWO) == [RUN, DEAD, RUN, DEAD]
    assert fates(TWO, outputs=[0]) == [RUN, DEAD, DEAD, DEAD]
    assert fates(TWO, outputs=[1]) == [DEAD, DEAD, RUN, DEAD]
    assert fates(TWO, outputs=[]) == [DEAD] * 4
    assert plan(TWO, outputs=[0, 1]) == plan(TWO)


def test_fewer_outputs_keep_fewer_residuals():
    assert plan(TWO, [0, 2]).residuals == ((0, 0), (2, 0))
    assert plan(TWO, [0, 2], [1]).residuals == ((2, 0),)


def test_what_was_learned_is_needed_besides():
    assert fates(TWO, outputs=[0], extra_roots=[4]) == [RUN, DEAD, RUN, RUN]
    assert plan(TWO, [3], [0], extra_roots=[4]).residuals == ((3, 0),)


def test_without_pruning_all_runs_but_what_is_kept():
    made = plan(TWO, [0], prune=False)
    assert made.fates == (KEEP, RUN, RUN, RUN)
    assert made.needed == {0}
    assert plan(TWO, [0, 1], prune=False).fates == (KEEP, RUN, RUN, RUN)
    assert fates(TWO, outputs=[], prune=False) == [RUN] * 4


def test_without_pruning_every_output_of_what_is_kept_may_be_read():
    several = record(pure([0], 1, 2), pure([2], 3), roots=[[1]])
    made = plan(several, [0], prune=False)
    assert made.fates == (KEEP, RUN)
    assert made.residuals == ((0, 0), (0, 1))


def test_what_a_record_names():
    named = [
        step._replace(op=replace(step.op, names=frozenset(names)))
        for step, names in zip(TWO.steps, [{"a"}, {"b", "a"}, {}, {"c"}], strict=True)
    ]
    assert TWO.names == frozenset()
    assert replace(TWO, steps=(*named,)).names == {"a", "b", "c"}


# --- Random records ---


class Machine:
    """Interprets a record: a storage holds a number for what was done to make it."""

    def __init__(self, record):
        self.record = record
        self._numbers = {}

    def number(self, *what):
        return self._numbers.setdefault(what, len(self._numbers))

    def forward(self):
        """What is read by each step, made by it, and there in the end."""
        return self.run([RUN] * len(self.record.steps), {*self.record.inputs}, {})

    def run(self, fates, leaves, handed):
        """The same along a plan; `handed` are the values of what was kept."""
        state = {s: self.number("leaf", s) for s in leaves}
        read, made, drawn = {}, {}, 0
        for i, (step, fate) in enumerate(zip(self.record.steps, fates, strict=True)):
            if fate is KEEP:
                state.update(handed.get(i, {}))
            if fate in (KEEP, DEAD):
                continue
            drawn += step.draws
            if fate is RUN:
                read[i] = [state.get(s) for s in step.reads]
            if not step.is_view:
                state |= self.made(i, state, drawn if step.draws else 0, fate)
            made[i] = {s: state.get(s) for s in step.makes}
        return read, made, state

    def made(self, i, state, drawn, fate):
        """The new values of the storages that step `i` makes or changes."""
        step = self.record.steps[i]
        metadata_only = {step.makes[k] for k in step.metadata_only}
        new = {}
        for s in {*step.makes}.difference(step.reads).union(step.writes):
            reads = [s] * (s in step.writes) if s in metadata_only else step.reads
            values = [state.get(r) for r in reads]
            if fate is RUN or (s in metadata_only and None not in values):
                new[s] = self.number(s, i, drawn, *values)
        return new


def misfit(record, made, outputs=None, extra_roots=()):
    """What is other than in the forward if the plan is followed; "" if nothing is."""
    machine = Machine(record)
    read, before, end = machine.forward()
    handed = {}
    for i, k in made.residuals:
        s = record.steps[i].makes[k]
        handed.setdefault(i, {})[s] = before[i][s]
    leaves = {record.inputs[i] for i in made.needed}
    now, _, after = machine.run(made.fates, leaves, handed)
    for i in now:
        if now[i] != read[i]:
            return f"step {i} read {now[i]}, not {read[i]}"
    chosen = range(len(record.roots)) if outputs is None else outputs
    for s in {*extra_roots}.union(*(record.roots[j] for j in chosen)):
        if s in end and after.get(s) != end[s]:
            return f"root {s} is {after.get(s)}, not {end[s]}"
    return ""


KINDS = ["pure", "pure", "pure", "view", "in_place", "runs", "twice"]
KINDS += ["draw", "draw_like", "dropout", "draw_in_place", "zeros_like"]


def step_of(kind, one, reads, new):
    match kind:
        case "view":
            return view(one)
        case "in_place":
            return in_place(one, *reads)
        case "twice":
            return pure(reads, new, new + 1)
        case "draw":
            return draw(*reads, makes=new)
        case "draw_like":
            return draw_like(one, new)
        case "dropout":
            return dropout(one, new, new + 1)
        case "draw_in_place":
            return draw_in_place(one)
        case "zeros_like":
            return zeros_like(one, new)
        case _:
            return pure(reads, new, always_runs=kind == "runs")


@st.composite
def records(choose):
    leaves = choose(st.integers(1, 3))
    known, steps = [*range(leaves)], []
    for kind in choose(st.lists(st.sampled_from(KINDS), max_size=10)):
        one = choose(st.sampled_from(known))
        reads = choose(st.lists(st.sampled_from(known), max_size=3))
        step = step_of(kind, one, reads, len(known))
        steps.append(step)
        known += [s for s in step.makes if s not in known]
    roots = choose(st.lists(st.lists(st.sampled_from(known), max_size=3), max_size=3))
    return record(*steps, inputs=(*range(leaves),), roots=roots)


def subsets(of):
    return st.sets(st.sampled_from([*of])) if of else st.just(set())


def steps_of(made, fate):
    return {i for i, f in enumerate(made.fates) if f is fate}


@settings(max_examples=100)
@given(records(), st.data())
def test_along_a_plan_everything_holds_what_it_held(rec, data):
    saveable = data.draw(subsets(range(len(rec.steps))))
    outputs = data.draw(st.none() | subsets(range(len(rec.roots))))
    storages = {*rec.inputs}.union(*(step.makes for step in rec.steps))
    extra_roots = data.draw(subsets(storages))
    made = plan(rec, saveable, outputs, extra_roots=extra_roots)
    assert not misfit(rec, made, outputs, extra_roots)
    assert made.saved <= saveable
    kept = {rec.steps[i].makes[k] for i, k in made.residuals}
    assert kept.isdisjoint(rec.inputs), "what is an input already is not kept"


@settings(max_examples=100)
@given(records(), st.data())
def test_nothing_in_a_plan_can_be_left_out(rec, data):
    """But draws, and changes of what is there: it must not be read unchanged."""
    made = plan(rec, data.draw(subsets(range(len(rec.steps)))))
    for i in steps_of(made, RUN) | steps_of(made, METADATA_ONLY):
        step = rec.steps[i]
        if not (step.always_runs or step.draws or step.is_view or step.writes):
            without = [*made.fates]
            without[i] = DEAD
            assert misfit(rec, replace(made, fates=(*without,))), i
    for i in made.needed:
        changed = any(rec.inputs[i] in step.writes for step in rec.steps)
        twin = rec.inputs.count(rec.inputs[i]) > 1
        fewer = replace(made, needed=made.needed - {i})
        assert changed or twin or misfit(rec, fewer), i
    for residual in made.residuals:
        fewer = tuple(r for r in made.residuals if r != residual)
        assert misfit(rec, replace(made, residuals=fewer)), residual


@settings(max_examples=100)
@given(records(), st.data())
def test_what_makes_or_changes_a_storage_that_is_there_runs_or_is_kept(rec, data):
    made = plan(rec, data.draw(subsets(range(len(rec.steps)))))
    for i, step in enumerate(rec.steps):
        fate = made.fates[i]
        touched = {*step.makes, *step.writes}
        if fate is DEAD:
            assert touched.isdisjoint(made.live), i
            assert not step.draws, i
            assert not step.always_runs, i
        if fate is METADATA_ONLY:
            metadata_only = {step.makes[k] for k in step.metadata_only}
            assert made.live.intersection(touched) <= metadata_only, i
        if fate is RUN:
            assert made.live.issuperset((*touched, *step.reads)), i
        if fate is KEEP:
            assert not made.live.isdisjoint(touched), i
            others = [s for j, s in enumerate(rec.steps) if j != i]
            assert all(touched.isdisjoint(s.writes) for s in others), i
    assert {s for i, s in enumerate(rec.inputs) if i in made.needed} == {
        s for s in rec.inputs if s in made.live
    }


@settings(max_examples=100)
@given(records(), st.data())
def test_with_fewer_outputs_a_plan_keeps_and_needs_no_more(rec, data):
    saveable = data.draw(subsets(range(len(rec.steps))))
    more = data.draw(subsets(range(len(rec.roots))))
    fewer = data.draw(subsets(more))
    whole, large = plan(rec, saveable), plan(rec, saveable, more)
    small = plan(rec, saveable, fewer)
    for one, other in ((small, large), (large, whole)):
        assert one.needed <= other.needed
        assert one.live <= other.live
        assert {*one.residuals} <= {*other.residuals}
        assert steps_of(one, RUN) <= steps_of(other, RUN)
    # For a backward without some cotangents, among what was kept.
    assert plan(rec, whole.saved, fewer) == small


@settings(max_examples=100)
@given(records(), st.data())
def test_a_policy_that_keeps_more_runs_and_needs_no_more(rec, data):
    more = data.draw(subsets(range(len(rec.steps))))
    fewer = data.draw(subsets(more))
    large, small = plan(rec, more), plan(rec, fewer)
    assert steps_of(large, RUN) <= steps_of(small, RUN)
    assert large.needed <= small.needed


@settings(max_examples=100)
@given(records(), st.data())
def test_without_pruning_everything_holds_what_it_held_too(rec, data):
    made = plan(rec, data.draw(subsets(range(len(rec.steps)))), prune=False)
    assert {*made.fates} <= {RUN, KEEP}
    assert made.needed == {*range(len(rec.inputs))}
    assert not misfit(rec, made)
