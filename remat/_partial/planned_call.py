"""What one call with a policy or `prune=True` does: record, save residuals, replay.

A call is recorded, or follows the plan of a record that a call like it made. Its
forward saves the residuals of the plan (where, says `stores`), and its recompute is a
replay of the plan.

Invariant: a record is only an optimization. A replay that does not fit is given up, and
the function runs as it is. An input is dropped only if replays of these plans have
succeeded, and a mode saw this forward do the same.
Rejected: one plan for all calls of a module. Their cotangents differ, and so does what
is read.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.absent import Absent, inputs_of, like, tensors_of
from remat._partial.cache import CallCache, Plans
from remat._partial.decide import inputs_to_drop, plan_recorded
from remat._partial.options import Prune
from remat._partial.plan import Fate, Step
from remat._partial.recorder import Recorder
from remat._partial.replay import (
    Check,
    Replay,
    input_dropped,
    is_of_memory,
    what_differs,
)
from remat._partial.runnable import (
    UNRECORDED,
    Follow,
    RunnablePlan,
    fits_metadata,
    has_same_statics,
    is_reflection,
    statics_of,
)
from remat._partial.values import key_of
from remat._torch import eager_only, is_lazy
from remat.policies import Policy


class PlannedCall:
    """One call, and the plans that it follows.

    Under torch.func the function runs on `inner` in place of the leaves.
    """

    def __init__(
        self,
        cache: CallCache,
        policy: Policy | None,
        prune: Prune,
        leaves: Sequence[Tensor],
        label: str,
        inner: Sequence[Tensor] | None = None,
    ) -> None:
        self.cache, self._policy, self._prune = cache, policy, prune
        self._leaves, self._inner, self._label = leaves, inner, label
        self.plans: Plans | None = None if cache.reason else cache.plans
        self.statics: dict[int, Any] = {}  # of the operations whose results are saved
        self.dropped: dict[int, Absent] = {}  # the leaves that are not kept
        self.mode: Any = None  # to run the forward in; None to run it as it is
        plans = self.plans
        if not cache.reason:
            runs_on = leaves if inner is None else inner
            if plans is None:
                self.mode = Recorder(runs_on, policy)
            elif cache.is_proven() and self._inputs_to_drop(plans):
                self.mode = Verify(plans.full, runs_on)
            elif plans.destinations and not plans.each_has_handle:
                self.mode = Collect(plans.full)
            # Else the graph saves each residual anyway.
        self._was_seen = self.mode is not None

    def _inputs_to_drop(self, plans: Plans) -> Sequence[int]:
        """Return the leaves that the call need not keep, if that is worth it."""
        leaves, inner = self._leaves, self._inner
        droppable = [i for i in plans.full.unneeded if is_droppable(leaves[i])]
        if not droppable:
            return ()
        return inputs_to_drop(
            plans.full.plan,
            self._prune,
            droppable,
            lambda i: leaves[i].numel() * leaves[i].itemsize,
            is_differentiated=(
                None if inner is None else lambda i: inner[i].requires_grad
            ),
        )

    # --- The end of the forward ---

    def _end_forward(
        self,
        count: int,
        roots: Iterable[int],
        outs: Sequence[Any] = (),
        gone: Container[int] = (),
        *,
        may_drop: bool = True,
    ) -> list[Tensor] | None:
        """Return the residuals; None if the call follows no plan.

        There are `count` handles or outputs, of which a backward may ask for `roots`.
        """
        mode, plans = self.mode, self.plans
        residuals = None
        if isinstance(mode, Recorder):
            plans = self.plans = plan_recorded(
                self.cache,
                mode,
                mode.record(outs, gone),
                roots,
                self._policy,
                self._prune,
                self._label,
            )
            if plans is not None:
                statics = mode.candidates.statics
                self.statics = {i: statics[i] for i in plans.full.plan.saved}
                residuals = plans.residuals_of(mode.candidates)
        elif plans is not None:
            if count == len(plans.record.roots):
                residuals = self._collected(plans)
            if residuals is None:
                self.cache.drop_record()
                self.plans = None
            elif may_drop and isinstance(mode, Verify):
                leaves, unread = self._leaves, self._inputs_to_drop(plans)
                self.dropped = {i: like(leaves[i]) for i in unread}
        # The mode holds candidates, and the call is not to hold its inputs.
        self.mode, self._leaves, self._inner = None, (), None
        return residuals

    def _collected(self, plans: Plans) -> list[Tensor] | None:
        """Return the residuals; None if the plan does not fit this forward."""
        del plans
        if self.mode is None:
            return []
        self.statics = self.mode.statics
        return self.mode.residuals()

    # --- The recompute ---

    def check(self) -> Check | None:
        """Return a mode that compares a full recompute with a forward that was seen."""
        plans = self.plans if self._was_seen else None
        return None if plans is None else Check(plans.full)


class Replaying:
    """One recompute along a plan, for some handles or outputs: the roots.

    What it shows corrects the plans. `residuals` and `take` are as of `Replay`.
    """

    def __init__(
        self,
        call: PlannedCall,
        plans: Plans,
        roots: Sequence[int],
        residuals: Sequence[Tensor | None],
        take: Callable[[int], Tensor | None],
    ) -> None:
        self._cache, self._dropped = call.cache, call.dropped
        self._plans, self._roots = plans, roots
        schedule = plans.schedule_for(roots)
        self.mode = Replay(schedule, residuals, take, call.statics)

    def stand_ins(
        self,
        tensors: Sequence[Tensor],
        may_stand_in: Callable[[Tensor], bool] | None = None,
    ) -> list[Tensor]:
        """Return what to run on: absent tensors in place of inputs that nobody needs.

        `may_stand_in` says whether one may stand for an input; None for `is_droppable`.
        """
        # Once replays have shown that inputs are not read, only those that are written
        # to are replaced, and those that were dropped: this replay notices who reads.
        mode, stand_ins = self.mode, [*tensors]
        mode.start(tensors)
        is_allowed = may_stand_in or is_droppable
        # Another record may have replaced the plans.
        proven = self._cache.is_proven() and self._cache.plans is self._plans
        inputs, written = mode.schedule.record.inputs, mode.schedule.written
        for i in mode.schedule.unneeded:
            t = tensors[i]
            replaced = not proven or inputs[i] in written
            if type(t) is Absent or (replaced and is_allowed(t)):
                new = stand_ins[i] = mode.absent_leaf(i, t)
                if may_stand_in is None:  # the function runs on it as it is
                    new.requires_grad_(t.requires_grad)
        return stand_ins

    def escaped(self) -> bool:
        """Say whether something did not fit, or an absent tensor is still held."""
        self.mode.note_escaped()
        return bool(self.mode.trouble)

    def succeeded(self, *, proves: bool = True) -> None:
        """Note that the plan was right for these roots, if the replay proves it."""
        # Handles of residuals need no replay.
        roots = (self._roots, self._plans.residual_of_handle) if proves else ()
        self._cache.note_success(self._plans, *roots)

    def failed(self, error: Exception | None, *, is_ours: bool = False) -> None:
        """Correct the plans after a replay that did not fit; raise a user's error.

        `is_ours` says that the error itself tells of that: a hook raised it. Where
        inputs were dropped, the function cannot run as it is: a RecomputeError.
        """
        trouble = self.mode.trouble
        if error is not None and not (trouble or is_ours or is_of_memory(error)):
            raise error
        self._cache.note_misfit(self._plans, trouble)
        if self._dropped:
            raise input_dropped(what_differs(trouble, error)) from error


def is_droppable(leaf: Tensor) -> bool:
    """Say whether a leaf that no recompute reads need not be kept.

    The graph keeps those that gradients are accumulated in, a module its parameters.
    """
    if type(leaf) is not Tensor or (leaf.requires_grad and leaf.is_leaf):
        return False
    return leaf.layout is torch.strided and not is_lazy(leaf)


# --- Modes of a forward whose plan is known ---


class Collect(Follow):
    """Collects, in a forward, the residuals that a plan saves.

    `on_residual` is called with each as it is made. `fits` says whether the plan fits
    this forward so far.
    """

    def __init__(
        self,
        schedule: RunnablePlan,
        on_residual: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(schedule)
        self._on_residual = on_residual
        self._residual_index = schedule.residual_index
        self._collected: list[tuple[Tensor, int]] = []  # with their versions
        self.statics: dict[int, Any] = {}
        self.fits = True

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        if self._funcs[i] is not func:
            if is_reflection(func, of=self._funcs[i]):
                return self.__torch_dispatch__(self._funcs[i], types, args[::-1])
            if func not in UNRECORDED:
                self._give_up()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._next = i + 1
        kernel = self._kernels[i]
        result = kernel(*args, **kwargs) if kwargs else kernel(*args)
        if i in self._residual_index:
            self._collect(i, args, kwargs, tensors_of(result))
        return result

    def _collect(
        self, i: int, args: Any, kwargs: Any, outputs: Sequence[Tensor]
    ) -> None:
        step = self.schedule.record.steps[i]
        if step.may_draw and not has_same_statics(step.op, args, kwargs):
            self._give_up()
        self.statics[i] = statics_of(args, kwargs)
        for k in self._residual_index[i]:
            # Not detached: below autograd a detached tensor has a version counter of
            # its own, so changes would go unnoticed.
            self._collected.append((outputs[k], outputs[k]._version))
            if self._on_residual is not None:
                self._on_residual(outputs[k])

    @override
    def _give_up(self) -> None:
        super()._give_up()
        self.fits = False

    @override
    def end(self) -> None:
        """Do nothing: `residuals` says whether the plan fits."""

    def residuals(self) -> list[Tensor] | None:
        """Return what was collected; None if the plan does not fit this forward."""
        unchanged = all(t._version == version for t, version in self._collected)
        complete = self._funcs[self._next] is None
        if not (self.fits and complete and unchanged):
            return None
        return [t.detach() for t, _ in self._collected]


class Verify(Collect):
    """Also checks that each operation reads what it read when it was recorded.

    For a forward whose inputs are to be dropped: once they are, nothing can be
    recomputed but by the plan.
    """

    def __init__(self, schedule: RunnablePlan, leaves: Sequence[Tensor]) -> None:
        super().__init__(schedule)
        numbers = schedule.record.inputs
        self._numbers = {key_of(t): s for t, s in zip(leaves, numbers, strict=True)}

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.fits and self._next > i:
            step = self.schedule.record.steps[i]
            inputs, outputs = inputs_of(args, kwargs), tensors_of(result)
            if not self._is_wired(i, step, args, kwargs, inputs, outputs):
                self._give_up()
                return result
            self._numbers.update(zip(map(key_of, outputs), step.makes, strict=True))
        return result

    def _is_wired(
        self, i: int, step: Step, args: Any, kwargs: Any, inputs: Any, outputs: Any
    ) -> bool:
        """Say whether an operation reads the storages that it read."""
        if (len(inputs), len(outputs)) != (len(step.reads), len(step.makes)):
            return False
        numbers, known = self._numbers, self.schedule.known
        reads = zip(inputs, step.reads, strict=True)
        if not all(numbers.get(key_of(t), s) == s for t, s in reads if s in known):
            return False
        if self.schedule.fates[i] is not Fate.DEAD:
            return True
        return fits_metadata(self.schedule.expected[i], args, kwargs, inputs)
