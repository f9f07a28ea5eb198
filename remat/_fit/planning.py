"""Makes a plan: chooses what a step saves, and runs it as planned.

    1. The step is recorded on a copy, on fake tensors; on real ones if the model asks
       for values.
    2. `choose` finds which results are saved: for a scope around the call of the model,
       and for one around the call and the loss; or for blocks as units.
    3. The copy runs the step as planned, and `Meter` counts. Where it is over the
       budget, the excess is subtracted, and the choice is made again.

Invariant: what is returned was run as a whole, and stays under the budget; by blocks in
the first step, too.
Rejected: to trust the walk. A user's code may hold what no operation made.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from remat._base.errors import BudgetError
from remat._base.sizes import Amount, in_unit
from remat._fit.choose import (
    Chosen,
    chosen_for,
    has_solver,
    least_for,
    quickly_for,
    spare,
)
from remat._fit.plan import FLAGS, FitSegment, Followed, Over, Plan
from remat._fit.record import ASKED, StepRecord, recorded
from remat._fit.rewritten import with_nests
from remat._fit.simulate import TrainingStep, begins_with_gradients, simulate
from remat._fit.units import FunctionalWalker, UnitWalker, record_functional
from remat._fit.walk import Walker
from remat._report.inputs import label_of_function
from remat._scope.following import Course, Placed
from remat._scope.values import BETWEEN, PASSING
from remat._transform.api import has_forward
from remat.nn._apply import apply_from
from remat.nn._followed import FollowedScope, follow
from remat.policies import Policy


def _around(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the modules that several blocks are in, by depth, the innermost first."""
    found: dict[int, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        inside = [block for block in blocks if name and block.startswith(f"{name}.")]
        if len(inside) > 1 and has_forward(module):
            depth = name.count(".")
            found[depth] = (*found.get(depth, ()), name)
    return [names for _, names in sorted(found.items(), reverse=True)]


class _Draft(NamedTuple):
    """What was chosen for one kind of step."""

    walker: Walker
    chosen: Chosen
    spared: Chosen
    how: dict[str, Any]  # what a course says beside

    def course(self) -> Course:
        """Return what a scope follows."""
        found = _course(self.walker, self.chosen, self.spared)
        return replace(found, **self.how)

    def around(self) -> "_Draft":
        """Return that of a scope around the loss, too, which saves all outside."""
        walker, (first, last) = Walker(self.walker.record), self.walker.span
        outside = {i for i in walker.choices if not first <= i < last}
        return self._replace(walker=walker, chosen=self.chosen | outside)


class _Attempt(NamedTuple):
    """What was chosen, and what a step does that follows it."""

    followed: Followed
    chosen: Chosen
    walker: Walker
    drafts: Sequence[_Draft] = ()


_TIMES = 3  # that a choice is made again
_LESS = 0.99  # of the work: what is less than that is worth another run


class Planning:
    """What is known while a plan is made."""

    def __init__(
        self,
        step: TrainingStep,
        device: torch.device,
        budget: Amount,
        blocks: Sequence[str],
        tell: Callable[[str], None],
        *,
        is_functional: bool = False,
    ) -> None:
        self._tell = tell
        self._step, self._device = step._replace(optimizer=None), device
        model = step.model()
        is_model = model is not None and model is step.fn
        self.label = type(model).__name__ if is_model else label_of_function(step.fn)
        self._blocks = tuple(blocks)
        self._depths = _around(model, blocks) if model is not None else []
        around = [name for names in self._depths for name in names]
        also = record_functional if is_functional else None
        names = *blocks, *around, *([""] if is_functional else ())
        found, self._is_real = recorded(step, device, blocks=names, also=also)
        self.record = found
        # What is chosen for. An optimizer may need more than was asked for.
        self._asked, self._budget = budget, max(budget.nbytes, found.update.peak)
        self._counts_gradients = begins_with_gradients(step)
        self._least: list[Followed] = []
        self._run_as: StepRecord | None = None  # that of torch.func, if it runs there

    def over_step(self) -> Plan:
        """Return a plan for the whole step."""
        record, whole = self.record, (0, self.record.turn)
        applied = None
        if record.called is not None:
            applied = self._found(Walker(record, record.called))
        # A plan for a model has to be one that the model itself can follow.
        is_needed = record.called is not None and self._step.fn is self._step.model()
        if is_needed and applied is None:
            raise self._too_small()
        around = applied if record.called == whole else self._better(applied)
        found = applied or around
        if found is None:
            raise self._too_small()
        in_call = None if applied is None else applied.followed
        if in_call is not None and self._blocks:
            units, most = self._units()
            in_call = replace(in_call, units=units, units_peak=most)
        return self._plan("step", found, in_call, (around or found).followed)

    def _units(self) -> tuple[tuple[tuple[str, Policy | None], ...], int]:
        """Return what blocks do where no scope can act, in the same budget; the peak.

        It is over the budget where blocks cannot be as low as operations one by one.
        """
        self._tell("choosing for blocks")
        walker = UnitWalker(self.record, self._blocks)
        chosen = quickly_for(walker, self._budget)
        return tuple(walker.policies(chosen).items()), walker(chosen).peak

    def over_blocks(self) -> Plan:
        """Return a plan for blocks."""
        found = self._found(UnitWalker(self.record, self._blocks))
        for around in self._depths:  # modules that run again as a whole
            if found is None:
                record, inside = with_nests(self.record, around), {*self._blocks}
                found = self._found(UnitWalker(record, inside - {*around}, around))
        if found is None:
            raise self._too_small()
        return self._plan("blocks", found, found.followed, None)

    def over_functional(self) -> Plan:
        """Return a plan for blocks under `torch.func.grad`."""
        self._run_as = self.record.functional
        assert self._run_as is not None
        for around in (), *self._depths, ("",):
            found = self._found(FunctionalWalker(self._run_as, self._blocks, around))
            if found is not None:
                return self._plan("functional", found, found.followed, None)
        raise self._too_small()

    def _plan(
        self,
        over: Over,
        found: "_Attempt",
        applied: Followed | None,
        around: Followed | None,
    ) -> Plan:
        if self._asked.nbytes < self._budget:
            raise self._refused(self._budget, self.record.update.peak_at)
        applied, around = self._with_update(applied), self._with_update(around)
        return Plan(
            self.label,
            over,
            self._budget,
            self._asked.unit,
            self.record.resident,
            self.record.update.states,
            self._plain_peak(),
            self.record.flops,
            applied,
            around,
            *_segments(found, self._blocks),
            self._device.type,
            lacks_solver=not has_solver() and bool(found.followed.seconds),
        )

    def _with_update(self, followed: Followed | None) -> Followed | None:
        """Return what a step does with the step of its optimizer."""
        _, peak, at = self.record.update
        if followed is None or peak <= followed.peak:
            return followed
        return replace(followed, peak=peak, peak_at=at)

    def _better(self, applied: _Attempt | None) -> _Attempt | None:
        """Choose for a scope around the loss, too, if that spares work."""
        walker = Walker(self.record)
        if applied is not None:
            work = applied.followed.seconds * _LESS
            found = chosen_for(walker, self._budget)
            if found is None or walker.seconds(found) >= work:
                courses = tuple(draft.around().course() for draft in applied.drafts)
                followed = replace(applied.followed, courses=courses)
                return applied._replace(followed=followed)
        return self._found(walker)

    def _found(self, walker: Walker) -> _Attempt | None:
        """Choose, for a scope around some operations or units; None if nothing fits."""
        aim = self._budget
        self._tell("choosing what is saved")
        for _ in range(_TIMES):
            chosen = chosen_for(walker, aim)
            if chosen is None:
                break
            found = self._run(walker, chosen)
            over = found.followed.peak - self._budget
            if over <= 0:
                return found
            aim -= over
        found = self._run(walker, least_for(walker))
        if found.followed.peak <= self._budget:
            return found
        self._least.append(found.followed)
        return None

    def _run(self, walker: Walker, chosen: Chosen) -> _Attempt:
        """Run a step that follows a choice."""
        is_units = isinstance(walker, UnitWalker)
        courses = () if is_units else (_course(walker, chosen),)
        units = walker.policies(chosen) if isinstance(walker, UnitWalker) else {}
        self._tell("running the step as planned")

        following = partial(FollowedScope, self.label, courses)
        over: Over = "blocks" if self._run_as is None else "functional"

        def change(step: TrainingStep) -> TrainingStep:
            model = step.model()
            if is_units:
                if units and model is not None:
                    apply_from("", model, units, None, FLAGS[over])
                return step
            if walker.span == (0, self.record.turn):
                return step._replace(around=following)
            if model is None or (step.fn is not model and hasattr(step.fn, "__self__")):
                return step._replace(around_call=following)
            follow(model, self.label, courses, (), "")
            return step

        step = self._step, self._device, change, self._blocks
        # The first call of a block records, and what rules keep is counted after it.
        times = 2 if is_units and not self._is_real else 1
        how = {"is_real": self._is_real, "is_functional": self._run_as is not None}
        done = simulate(*step, **how, times=times)
        peak = done.peak + self.record.update.states
        drafts: Sequence[_Draft] = ()
        if courses and peak <= self._budget:
            drafts = self._drafts(walker, chosen, peak)
            courses = tuple(draft.course() for draft in drafts)
        which = courses, tuple(units.items())
        followed = Followed(peak, done.peak_at, *walker.again(chosen), *which)
        return _Attempt(followed, chosen, walker, drafts)

    def _drafts(self, walker: Walker, chosen: Chosen, peak: int) -> list[_Draft]:
        """Return what was chosen, and what for a step that begins with gradients.

        Where that is over the budget, it is near the least that there is.
        """
        drafts = [self._draft(walker, chosen, peak, self._counts_gradients)]
        if not (self._counts_gradients or self._step.model() is None):
            self._tell("choosing for steps with gradients")
            other = Walker(walker.record.accumulating(), walker.span)
            found = quickly_for(other, self._budget)
            drafts.append(self._draft(other, found, other(found).peak, True))
        return drafts

    def _draft(
        self, walker: Walker, chosen: Chosen, peak: int, counts_gradients: bool
    ) -> _Draft:
        how = {"over": peak - self._budget, "counts_gradients": counts_gradients}
        return _Draft(walker, chosen, spare(walker, chosen), how)

    # --- Errors ---

    def _too_small(self) -> BudgetError:
        least = min(self._least, key=lambda each: each.peak)
        return self._refused(least.peak, least.peak_at)

    def _refused(self, least: int, at: str) -> BudgetError:
        sizes = {
            "budget": self._asked.nbytes,
            "least": least,
            "resident": self.record.resident,
            "plain": self._plain_peak(),
        }
        shown = {name: in_unit(n, self._asked.unit) for name, n in sizes.items()}
        shown["do"] = _HOLDS_LESS if at == self.record.update.peak_at else _DO
        return BudgetError(_TOO_SMALL.format(label=self.label, at=at, **shown), least)

    def _plain_peak(self) -> int:
        record = self._run_as or self.record
        return max(Walker(record, (0, 0))(()).peak, record.update.peak)


def _course(walker: Walker, chosen: Chosen, spared: Chosen = frozenset()) -> Course:
    """Return what a policy answers. It saves what a scope cannot run again, too."""
    saved, needed, _ = walker.closure(chosen)
    # What nobody reads again. A value that Python holds is saved.
    unread = walker.makers.keys() - needed
    within = enumerate(walker.record.operations[slice(*walker.span)], walker.span[0])
    spares: dict[Any, set[int]] = {}
    # Calls are counted from the first one in the span.
    first: dict[str, int] = {}
    found: dict[Any, list[tuple[str, bool, int, int]]] = {}
    for i, op in within:
        root, turn, path, number = op.place
        place = root, turn - first.setdefault(root, turn), path, number
        if op.fate == ASKED:
            is_again = not (needed - saved).isdisjoint(op.makes)
            is_unread = unread.issuperset(op.makes)
            is_saved = not (is_again or is_unread)
            size = sum(walker.record.sizes[n] for n in op.makes)
            is_between = walker.targets.isdisjoint(op.makes)
            why = PASSING if is_unread else BETWEEN if is_between else 0
            found.setdefault(place, []).append((op.name, is_saved, why, size))
            if i in spared:
                spares.setdefault(place, set()).add(len(found[place]) - 1)
    placed: list[Placed] = []
    for place, each in found.items():
        names, saves, unread, sizes = zip(*each, strict=True)
        given = frozenset(spares.get(place, ()))
        placed.append(Placed(place, names, saves, unread, sizes, given))
    return Course(tuple(placed))


def _segments(
    found: _Attempt, blocks: tuple[str, ...]
) -> tuple[tuple[FitSegment, ...], tuple[str, ...]]:
    """Return what is done with each block, and in which blocks something runs again."""
    walker, record = found.walker, found.walker.record
    saved, needed, runs = walker.closure(found.chosen)
    kept = saved & needed
    rows: dict[str, list[int]] = {}
    again: set[str] = set()
    for i in record.forwards:
        op = record.operations[i]
        # The block that the operation is in, or else the outermost module.
        around = (name for name in blocks if f"{op.module}.".startswith(f"{name}."))
        name = next(around, op.module.partition(".")[0] or "outside")
        row = rows.setdefault(name, [0, 0, 0])
        is_copied = i >= record.turn
        row[0] += not is_copied
        row[2] += op.flops if is_copied else 0
        for n in () if is_copied else op.makes:
            is_kept = n in kept if n in walker.makers else record.dies[n] > record.turn
            row[1] += record.sizes[n] if is_kept else 0
        if i in runs:
            row[2] += op.flops
            again.add(name)
    segments = tuple(FitSegment(name, *row) for name, row in rows.items())
    return segments, tuple(name for name in blocks if name in again)


_TOO_SMALL = (
    "remat.fit: no plan for {label} stays under {budget}. The least budget for which "
    "there is one is {least} (`error.least`), with the peak {at}; {resident} of it are "
    "there before the step. Without remat the peak is {plain}. {do}"
)
_DO = (
    "Pass a larger budget, a smaller batch, or, if the loss holds much, a function of "
    "model and batch that computes it, too."
)
_HOLDS_LESS = (
    "Pass a larger budget, or an optimizer that holds less: with foreach=False, or "
    "fused=True."
)
