"""`fit`: what a step saves, so that it stays under a budget.

It makes data of the step (`simulate`). A plan by blocks is made by `blocks`; a plan for
the whole step, here:

    1. The step is recorded on a copy, on fake tensors; on real ones if the model asks
       for values.
    2. `choose` finds which results are saved, once for a scope around the call of the
       model, and once for one around the call and the loss.
    3. The copy runs the step as planned, and `Meter` counts. Where it is over the
       budget, the excess is subtracted, and the choice is made again.

Invariant: the model, its gradients, its buffers and random streams stay as they are.
What is returned was run as a whole, and stays under the budget.
Rejected: to apply the plan at once. It is made for models that do not exist yet.
Rejected: to trust the walk. A user's code may hold what no operation made.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from remat import nn as remat_nn
from remat._base.errors import BudgetError
from remat._base.sizes import bytes_in
from remat._base.types import Fn
from remat._fit.block_plan import FitPlan
from remat._fit.blocks import fitted
from remat._fit.choose import (
    Chosen,
    chosen_for,
    has_solver,
    least_for,
    quickly_for,
)
from remat._fit.record import ASKED, StepRecord, recorded
from remat._fit.search import spare
from remat._fit.simulate import (
    TrainingStep,
    gradients_of,
    isolated,
    refuse_arguments,
    resident,
    simulate,
)
from remat._fit.step_plan import FitSegment, Followed, StepPlan, too_small
from remat._fit.walk import Walker
from remat._report.labels import label_of_function, refuse_transforms
from remat._scope.following import Course, Placed
from remat.nn._followed import FollowedScope, can_follow, follow, has_sharded_parts


def fit(
    fn: Fn,
    /,
    *args: Any,
    budget: int | str,
    over: Literal["step", "blocks"] | None = None,
    select: Any = None,
    loss: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    accumulates: bool = False,
    **kwargs: Any,
) -> StepPlan | FitPlan:
    """Choose which results a training step saves, so that its peak stays in a budget.

    A step is the forward, the loss and the backward. Its peak is the most bytes that
    are alive at any one time: parameters, buffers and arguments, gradients that exist
    or are made, and all that the step computes. An optimizer and its state are no part
    of a step. What is not saved is recomputed when the backward reads it, operation by
    operation. Of the choices whose peak is at most the budget, the plan recomputes
    least.

    The step runs on fake tensors: nothing is computed or allocated, and the model may
    be on the meta device or fake. If a model that is there asks for values, or has an
    operation that refuses fake tensors, a copy runs on real tensors. The peak is that
    of the allocator, without memory that kernels of an accelerator take for themselves,
    and without fragmentation.

    Args:
        fn: the model; or a function that is passed the model, or tensors, and returns
            the loss or what the loss is made of.
        *args: its arguments, of the shapes of a step.
        budget: bytes, or a text such as "8GB" (8e9) or "8GiB".
        over: "step" for the whole step, "blocks" for a policy for each block of the
            model. By default the step, but blocks for compiled models, which cannot
            follow a plan for a step.
        select: of a plan by blocks: which modules are blocks, as of `remat.nn.apply`.
            None for the repeated blocks: see `remat.nn.blocks`.
        loss: a function of the result of `fn` that returns the loss. By default the
            loss is the result itself, or its attribute `loss`. Of a result that is
            not a scalar, it is the sum.
        device: where tensors will be that are on the meta device now. By default, where
            the others are.
        accumulates: whether all parameters have gradients before the step, to which it
            adds. By default those that have one now.
        **kwargs: its keyword arguments.

    Returns:
        A `StepPlan`, or by blocks a `FitPlan`. `plan.apply(model)` has the model follow
        it. `print` and notebooks show a table.

    Raises:
        BudgetError: no plan stays under the budget. The message, and `error.least`, say
            which budget would do.
        CaptureError: the step reads values, and the model has none.
        ValueError: by blocks no model is passed, or it has no blocks; or something in
            the model is recomputed already, or sharded.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import remat
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*[layer() for _ in range(4)])
        >>> plan = remat.fit(model, torch.ones(256, 8), budget="350kB")
        >>> plan.peak <= 350_000 < plan.plain_peak
        True
        >>> plan.recomputed > 0
        True
    """
    refuse_transforms("fit", "the model")
    refuse_arguments(fn, args, kwargs, loss)
    limit = bytes_in(budget, "fit")
    step = TrainingStep(fn, args, kwargs, loss, accumulates)
    # Where a step runs whose model is on the meta device.
    devices = (t.device for t in resident(step) if not t.is_meta)
    where = next(devices, torch.device("cpu"))
    if device is not None:
        where = _available(device)
    if over not in (None, "step", "blocks"):
        raise ValueError(f'remat.fit: over is "step", "blocks" or None, got {over!r}')
    model = step.model()
    if model is not None and has_sharded_parts(model):
        raise ValueError(_SHARDED.format(label=type(model).__name__))
    if over is None and model is not None and not can_follow(model):
        over = "blocks"
    if over == "blocks":
        return fitted(step, where, select, limit)
    if select is not None:
        raise ValueError(_SELECT)
    with isolated():
        return _Planning(step, where, limit).plan()


_SHARDED = (
    "remat.fit: {label} has sharded parameters, which no copy can be made of. Plan for "
    "the model before it is sharded, shard it, and then call plan.apply(model)."
)
_SELECT = (
    "remat.fit: select= says which modules are blocks, and a plan for a whole step "
    "knows no blocks. Leave it out, or pass over='blocks'."
)


def _available(asked: torch.device | str) -> torch.device:
    """Return a device; refuse one that torch cannot stand in for here."""
    try:
        device = torch.device(asked)
    except RuntimeError:
        message = f"remat.fit: device is a device of torch, got {asked!r}"
        raise ValueError(message) from None
    if device.type == "cpu":
        return device
    is_real = device.type != "meta"
    if is_real and torch.get_device_module(device.type).is_available():
        return device
    raise ValueError(_NO_DEVICE.format(device=device))


_NO_DEVICE = (
    "remat.fit: torch finds no {device} here, and autograd needs one also for tensors "
    "without memory. Leave out device=, or pass device='cpu': storages are as large "
    "there, but attention and convolutions may take other kernels."
)


# --- A plan for a whole step ---


class _Attempt(NamedTuple):
    """What was chosen, and what a step does that follows it."""

    followed: Followed
    chosen: Chosen
    walker: Walker


_TIMES = 3  # that a choice is made again
_LESS = 0.99  # of the work: what is less than that is worth another run


class _Planning:
    """What is known while a plan is made."""

    def __init__(self, step: TrainingStep, device: torch.device, budget: int) -> None:
        self._step, self._device, self._budget = step, device, budget
        model = step.model()
        is_model = model is not None and model is step.fn
        self.label = type(model).__name__ if is_model else label_of_function(step.fn)
        self._blocks = tuple(remat_nn.blocks(model)) if model is not None else ()
        found, self._is_real = recorded(step, device)
        assert found is not None
        self.record = found
        # With the model in evaluation mode if it trains, or the other way round; None
        # if that runs the same operations.
        self.other = self._record_of_other_mode()
        there = (t.grad is not None for t, _ in gradients_of(step))
        self._counts_gradients = step.accumulates or any(there)
        self._other_courses: dict[bool, list[Course]] = {}
        self._least: list[Followed] = []

    def plan(self) -> StepPlan:
        """Return the plan."""
        record, whole = self.record, (0, self.record.turn)
        applied = None if record.called is None else self._found(record.called)
        # A plan for a model has to be one that the model itself can follow.
        is_needed = record.called is not None and self._step.fn is self._step.model()
        if is_needed and applied is None:
            raise self._too_small()
        around = applied if record.called == whole else self._better(applied)
        found = applied or around
        if found is None:
            raise self._too_small()
        return StepPlan(
            self.label,
            self._budget,
            record.resident,
            self._plain_peak(),
            record.flops,
            None if applied is None else applied.followed,
            (around or found).followed,
            *_segments(found, self._blocks),
            self._device.type,
            lacks_solver=not has_solver() and bool(found.followed.seconds),
        )

    def _better(self, applied: _Attempt | None) -> _Attempt | None:
        """Choose for a scope around the loss, too, if that spares work."""
        walker = Walker(self.record)
        if applied is not None:
            chosen = chosen_for(walker, self._budget)
            work = applied.followed.seconds
            if chosen is None or walker.seconds(chosen) >= work * _LESS:
                first, last = applied.walker.span
                outside = {i for i in walker.choices if not first <= i < last}
                courses = self._courses(walker, applied.chosen | outside)
                followed = replace(applied.followed, courses=courses)
                return applied._replace(followed=followed)
        return self._found((0, self.record.turn))

    def _found(self, span: tuple[int, int]) -> _Attempt | None:
        """Choose, for a scope around some operations; None if nothing fits."""
        walker, aim = Walker(self.record, span), self._budget
        for _ in range(_TIMES):
            chosen = chosen_for(walker, aim)
            if chosen is None:
                break
            found = self._run(walker, chosen)
            over = found.followed.peak - self._budget
            if over <= 0:
                return found
            aim -= over
        found = self._run(walker, least_for(walker, aim))
        if found.followed.peak <= self._budget:
            return found
        self._least.append(found.followed)
        return None

    def _run(self, walker: Walker, chosen: Chosen) -> _Attempt:
        """Run a step that follows a choice."""
        courses = (self._first_course(walker, chosen),)

        def following() -> FollowedScope:
            return FollowedScope(self.label, courses)

        def change(step: TrainingStep) -> TrainingStep:
            model = step.model()
            if walker.span == (0, self.record.turn):
                return step._replace(around=following)
            if model is None or (step.fn is not model and hasattr(step.fn, "__self__")):
                return step._replace(around_call=following)
            follow(model, self.label, courses, (), "")
            return step

        step = self._step, self._device, change, self._blocks
        done = simulate(*step, is_real=self._is_real, times=1)
        work = done.flops - self.record.flops, *walker.again(chosen)
        if done.peak <= self._budget:
            courses = self._courses(walker, chosen)
        followed = Followed(done.peak, done.peak_at, *work, courses)
        return _Attempt(followed, chosen, walker)

    def _courses(self, walker: Walker, chosen: Chosen) -> tuple[Course, ...]:
        is_around = walker.span == (0, self.record.turn)
        if is_around not in self._other_courses:
            self._other_courses[is_around] = [*self._others(is_around)]
        first = self._first_course(walker, chosen)
        return first, *self._other_courses[is_around]

    def _first_course(self, walker: Walker, chosen: Chosen) -> Course:
        return replace(
            _course(walker, chosen),
            counts_gradients=self._counts_gradients,
            is_training=self._is_training,
        )

    @property
    def _is_training(self) -> bool:
        model = self._step.model()
        return model is None or model.training

    # --- Other steps ---

    def _record_of_other_mode(self) -> StepRecord | None:
        if self._step.model() is None:
            return None
        try:
            known = [op.name for op in self.record.operations[: self.record.turn]]
            step = self._step, self._device
            return recorded(*step, known, in_other_mode=True)[0]
        except Exception:  # noqa: BLE001 - the user may never run it
            return None

    def _others(self, is_around: bool) -> Iterator[Course]:
        """Yield the courses of steps that begin with gradients, and of the other mode.

        Where these are over the budget, they are near the least that there is.
        """
        if not (self._counts_gradients or self._step.model() is None):
            record, budget = self.record.accumulating(), self._budget
            walker = Walker(record, None if is_around else record.called)
            chosen = quickly_for(walker, budget)
            over = max(walker(chosen).peak - budget, 0)
            course = replace(_course(walker, chosen), over=over)
            yield replace(course, is_training=self._is_training)
        if self.other is not None:
            walker = Walker(self.other, None if is_around else self.other.called)
            course = _course(walker, quickly_for(walker, self._budget))
            yield replace(
                course,
                counts_gradients=self._counts_gradients,
                is_training=not self._is_training,
            )

    # --- Errors ---

    def _too_small(self) -> BudgetError:
        least = min(self._least, key=lambda each: each.peak)
        where = least.peak, least.peak_at, self.record.resident, self._plain_peak()
        return BudgetError(too_small(self.label, self._budget, *where), least.peak)

    def _plain_peak(self) -> int:
        return Walker(self.record, (0, 0))(()).peak


def _course(walker: Walker, chosen: Chosen) -> Course:
    """Return what a policy answers. It saves what a scope cannot run again, too."""
    saved = walker.storages(chosen)
    needed = walker.closure(saved)[0]
    # What nobody reads again. A value that Python holds is saved.
    unread = walker.makers.keys() - needed
    within = enumerate(walker.record.operations[slice(*walker.span)], walker.span[0])
    to_spare, spares = spare(walker, chosen), dict[Any, set[int]]()
    # Calls are counted from the first one in the span.
    first: dict[str, int] = {}
    found: dict[Any, list[tuple[str, bool, bool, int]]] = {}
    for i, op in within:
        root, turn, path, number = op.place
        place = root, turn - first.setdefault(root, turn), path, number
        if op.fate == ASKED:
            is_again = not (needed - saved).isdisjoint(op.makes)
            is_unread = unread.issuperset(op.makes)
            saves = not (is_again or is_unread)
            size = sum(walker.record.sizes[n] for n in op.makes)
            found.setdefault(place, []).append((op.name, saves, is_unread, size))
            if i in to_spare:
                spares.setdefault(place, set()).add(len(found[place]) - 1)
    return Course(
        tuple(
            Placed(place, *zip(*each, strict=True), frozenset(spares.get(place, ())))
            for place, each in found.items()
        )
    )


def _segments(
    found: _Attempt, blocks: tuple[str, ...]
) -> tuple[tuple[FitSegment, ...], tuple[str, ...]]:
    """Return what is done with each block, and in which blocks something runs again."""
    walker, record = found.walker, found.walker.record
    needed, runs = walker.closure(walker.storages(found.chosen))
    kept = walker.storages(found.chosen) & needed
    rows: dict[str, list[int]] = {}
    again: set[str] = set()
    for i, op in enumerate(record.operations[: record.turn]):
        # The block that the operation is in, or else the outermost module.
        around = (name for name in blocks if f"{op.module}.".startswith(f"{name}."))
        name = next(around, op.module.partition(".")[0] or "outside")
        row = rows.setdefault(name, [0, 0, 0])
        row[0] += 1
        for n in op.makes:
            is_kept = n in kept if n in walker.makers else record.dies[n] > record.turn
            row[1] += record.sizes[n] if is_kept else 0
        if i in runs:
            row[2] += op.flops
            again.add(name)
    segments = tuple(FitSegment(name, *row) for name, row in rows.items())
    return segments, tuple(name for name in blocks if name in again)
