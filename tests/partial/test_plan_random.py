"""The planner, on random records, which are *interpreted*.

A storage has for a value what was done to make it. Along a plan, whatever is read has
to hold what it held in the forward, and at the end the roots have to.
"""

from dataclasses import replace

from hypothesis import given, settings, strategies as st
from support.records import records, subsets

from remat._partial.plan import Fate, plan


RUN, METADATA_ONLY, KEEP, DEAD = (
    Fate.RECOMPUTED,
    Fate.METADATA_ONLY,
    Fate.SAVED,
    Fate.DEAD,
)


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

    def run(self, fates, inputs, handed):
        """The same along a plan; `handed` are the values of what was kept."""
        state = {s: self.number("leaf", s) for s in inputs}
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


def misfit(record, made, targets=None, extra_roots=()):
    """What is other than in the forward if the plan is followed; "" if nothing is."""
    machine = Machine(record)
    read, before, end = machine.forward()
    handed = {}
    for i, k in made.residuals:
        s = record.steps[i].makes[k]
        handed.setdefault(i, {})[s] = before[i][s]
    inputs = {record.inputs[i] for i in made.needed}
    now, _, after = machine.run(made.fates, inputs, handed)
    for i in now:
        if now[i] != read[i]:
            return f"step {i} read {now[i]}, not {read[i]}"
    chosen = range(len(record.roots)) if targets is None else targets
    for s in {*extra_roots}.union(*(record.roots[j] for j in chosen)):
        if s in end and after.get(s) != end[s]:
            return f"root {s} is {after.get(s)}, not {end[s]}"
    return ""


def steps_of(made, fate):
    return {i for i, f in enumerate(made.fates) if f is fate}


@settings(max_examples=100)
@given(records(), st.data())
def test_everything_holds_what_it_held_along_a_plan(rec, data):
    saveable = data.draw(subsets(range(len(rec.steps))))
    targets = data.draw(st.none() | subsets(range(len(rec.roots))))
    storages = {*rec.inputs}.union(*(step.makes for step in rec.steps))
    extra_roots = data.draw(subsets(storages))
    made = plan(rec, saveable, targets, extra_roots=extra_roots)
    assert not misfit(rec, made, targets, extra_roots)
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
def test_an_operation_on_a_live_storage_runs_or_is_kept(rec, data):
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
def test_a_plan_for_fewer_targets_keeps_and_needs_no_more(rec, data):
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
def test_everything_holds_what_it_held_without_pruning(rec, data):
    made = plan(rec, data.draw(subsets(range(len(rec.steps)))), prune=False)
    assert {*made.fates} <= {RUN, KEEP}
    assert made.needed == {*range(len(rec.inputs))}
    assert not misfit(rec, made)
