"""What a call under base autograd saves for its policy, and how it is replayed.

`_transform/saved.py` has one `Following` for each call with a policy or `prune=True`.
The first call of a kind is recorded: its operations, and the storage that each handle
stands for. The plan of the record says which results are residuals. If the graph saves
every residual anyway, later calls take them from there, and no mode follows their
operations; otherwise a mode collects them (`collect`).

Invariant: a handle of a residual gives that very tensor, whatever a plan says. A replay
that does not fit is given up, and the function runs as it is.
Rejected: one list of residuals for a call. A backward frees what it has used, node by
node.
"""

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from remat._base.absent import Absent, like
from remat._base.errors import RecomputeError
from remat._base.op import Value
from remat._graph.handles import Handle
from remat._graph.residual import Offloaded, Residual, store
from remat._partial.cache import CallCache
from remat._partial.check import Check
from remat._partial.collect import Verify
from remat._partial.decide import ACCUMULATES, ASSIGNS, UNSEEN
from remat._partial.forward_plan import ForwardPlan, is_droppable, is_of_memory
from remat._partial.plans import Plans
from remat._partial.recorder import Recorder
from remat._partial.replay import Replay, input_dropped, what_differs
from remat._partial.storages import key_of
from remat._partial.values import can_be_viewed_as, value_of
from remat._torch import is_lazy, outside_dispatch_mode, viewed


class Following:
    """What one call does with its record.

    Args:
        forward_plan: says whether it is recorded, or follows a record.
        hooks: the saved-tensor hooks around the call: a pair, or None.
        nested: whether those are of a call of remat.

    Attributes:
        mode: to run the forward in; None if no mode follows it.
        dropped: the inputs that are not kept, and an absent tensor for each.
    """

    __slots__ = (
        *("_cache", "_early", "_for_recompute", "_forward_plan", "_hooks", "_nested"),
        *("_plans", "_seen", "_statics", "_taken", "dropped", "mode"),
    )

    def __init__(self, forward_plan: ForwardPlan, hooks: Any, *, nested: bool) -> None:
        self._forward_plan: ForwardPlan | None = forward_plan
        self._hooks, self._nested = hooks, nested
        self.mode, self._plans = forward_plan.mode, forward_plan.plans
        self._cache, self._seen = forward_plan.cache, forward_plan.mode is not None
        self._for_recompute: Sequence[Residual | Offloaded | None] = ()
        self._statics: dict[int, Any] = {}
        self._taken: dict[int, Tensor] = {}  # what handles of residuals stand for
        self._early: list[Residual] = []  # residuals that were put away at once
        self.dropped: dict[int, Absent] = {}

    @classmethod
    def of_decision(
        cls, decision: Any, leaves: Sequence[Tensor], hooks: Any
    ) -> "Following":
        """Return what does as a nested call did, while the call around is recomputed.

        Its residuals are handed to the call around as soon as they are made, since the
        recompute of that stops once it has all that it needs.
        """
        cache, plans = decision
        early: list[Residual] = []
        steps, residuals = plans.record.steps, plans.full.plan.residuals

        def on_residual(tensor: Tensor) -> None:
            i, _ = residuals[len(early)]
            early.append(Residual(tensor, steps[i].op, hooks))

        forward_plan = ForwardPlan.given(cache, plans, leaves, on_residual)
        new = cls(forward_plan, hooks, nested=True)
        new._early = early
        return new

    @property
    def decision(self) -> Any:
        """What the call does, for `of_decision`."""
        return None if self._plans is None else (self._cache, self._plans)

    # --- The forward ---

    def pack(self, place: int, tensor: Tensor | None) -> None:
        """Note a tensor that the graph saves at a place; None if it has no handle."""
        mode, plans = self.mode, self._plans
        if plans is None:
            if mode is not None:
                mode.roots.pack(tensor)
        elif place in plans.residual_of_handle and tensor is not None:
            self._taken[place] = tensor.detach()

    def gives_up(self, *, accumulates: bool) -> str:
        """Return why this call, and those after it, follow nothing; "" if they do.

        Args:
            accumulates: whether the forward changed gradients. What a backward inside
                runs for that depends on who else holds them.
        """
        mode = self.mode
        is_recorded = isinstance(mode, Recorder)
        why = ""
        if accumulates or (is_recorded and mode.copies_gradients):
            why = ACCUMULATES
        elif is_recorded and mode.assigns:
            why = ASSIGNS
        elif is_recorded and mode.misses:
            why = UNSEEN
        if why:
            self._cache.refuse(why)
        return why

    def finish(self, handles: Sequence[Handle | None]) -> None:
        """Plan the call, if it was recorded, and give handles their residuals.

        Args:
            handles: by place; None where the tensor itself is saved, and where the
                handle is gone.
        """
        tensors = self._residuals(handles)
        self._forward_plan = self.mode = None
        self._taken.clear()
        for residual in self._early:
            residual.let_go_of_graph()
        plans = self._plans
        if plans is None:
            return
        if tensors is None:
            self._cache.drop_record()
            self._plans = None
            return
        steps, residuals = plans.record.steps, plans.full.plan.residuals
        ops = [steps[i].op for i, _ in residuals]
        saved = self._early or store(
            tensors, plans.destinations, ops, self._hooks, nested=self._nested
        )
        packs = plans.record.packs
        for place, k in plans.residual_of_handle.items():
            handle, pack = handles[place], packs[place]
            if handle is not None and pack is not None:
                handle.call, handle.residual = None, saved[k]
                handle.view = None if pack.value == value_of(tensors[k]) else pack.value
        needed = plans.for_recompute
        self._for_recompute = [r if k in needed else None for k, r in enumerate(saved)]

    def _residuals(self, handles: Sequence[Handle | None]) -> list[Tensor] | None:
        """Return the residuals; None if the plan does not fit this forward."""
        forward_plan, mode, plans = self._forward_plan, self.mode, self._plans
        assert forward_plan is not None
        if isinstance(mode, Recorder):
            gone = {place for place, handle in enumerate(handles) if handle is None}
            record = mode.record((), gone)
            roots = [place for place in range(len(handles)) if place not in gone]
            plans = self._plans = forward_plan.plan_recorded(mode, record, roots)
            if plans is None:
                return None
            statics = mode.candidates.statics
            self._statics = {i: statics[i] for i in plans.full.plan.saved}
            return plans.residuals_of(mode.candidates)
        if plans is None:
            return None
        if len(handles) != len(plans.record.packs):
            return None
        if mode is None:
            residuals = self._residuals_in_handles(plans)
        else:
            residuals, self._statics = mode.residuals(), mode.statics
        if residuals is None or not self._are_as_saved(residuals, plans):
            return None
        if isinstance(mode, Verify):
            leaves = forward_plan.leaves
            unread = forward_plan.inputs_to_drop(plans.full)
            self.dropped = {i: like(leaves[i]) for i in unread}
        return residuals

    def _residuals_in_handles(self, plans: Plans) -> list[Tensor] | None:
        """Return the residuals, taken from the tensors that the graph saved."""
        steps, found = plans.record.steps, dict[int, Tensor]()
        residuals = plans.full.plan.residuals
        for place, k in plans.residual_of_handle.items():
            if k not in found and place in self._taken:
                i, j = residuals[k]
                value = steps[i].op.outputs[j]
                if not can_be_viewed_as(self._taken[place], value):
                    return None
                found[k] = _viewed_as(self._taken[place], value)
        if len(found) < len(residuals):
            return None
        return [found[k] for k in range(len(residuals))]

    def _are_as_saved(self, residuals: Sequence[Tensor], plans: Plans) -> bool:
        """Say whether the handles of residuals stand for them, as recorded."""
        packs, taken = plans.record.packs, self._taken
        for place, k in plans.residual_of_handle.items():
            saved, pack = taken.get(place), packs[place]
            if saved is None or pack is None or value_of(saved) != pack.value:
                return False
            if is_lazy(saved) or key_of(saved) != key_of(residuals[k]):
                return False
        return True

    def residuals_held(self) -> list[Residual | Offloaded]:
        """Return the residuals that the call holds for a recompute."""
        return [r for r in self._for_recompute if r is not None]

    # --- Handles that are read while the forward runs ---

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which no mode follows the forward."""
        mode = self.mode
        return contextlib.nullcontext() if mode is None else outside_dispatch_mode(mode)

    def note_read(self, handles: Iterable[Handle]) -> None:
        """Note that the forward itself reads what handles stand for."""
        if isinstance(self.mode, Recorder):
            for handle in handles:
                self.mode.roots.note_copy(handle.position, handle.value)

    # --- The recompute ---

    def replay(self, handles: Iterable[Handle]) -> "Replaying | None":
        """Return a recompute along the plan that fills handles; None without a plan."""
        plans = self._plans
        if plans is None:
            return None
        roots = tuple(sorted(handle.position for handle in handles))
        held = [None if r is None else r.value() for r in self._for_recompute]
        schedule = plans.schedule_for(roots)
        replay = Replay(schedule, held, held.__getitem__, self._statics)
        return Replaying(self._cache, plans, roots, replay)

    def check(self) -> Check | None:
        """Return a mode that compares a full recompute with the recorded forward.

        None if no mode followed the forward.
        """
        plans = self._plans if self._seen else None
        return None if plans is None else Check(plans.full)

    def read_what_is_gone(self, replaying: "Replaying") -> RecomputeError:
        """Return the error that a recompute needs an input that was not kept."""
        return input_dropped(replaying.what)


class Replaying:
    """One recompute along a plan.

    Args:
        cache: of the signature.
        plans: the plans.
        roots: the places of the handles that are to be filled.
        mode: that replays.

    Attributes:
        mode: that replays.
        what: what did not fit, once it has failed.
    """

    def __init__(
        self, cache: CallCache, plans: Plans, roots: Sequence[int], mode: Replay
    ) -> None:
        self._cache, self._plans, self._roots = cache, plans, roots
        self.mode = mode
        self.what = ""

    def stand_ins(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what to run on: absent tensors in place of inputs that nobody needs.

        Once replays have shown that they are not read, only those that are written to
        are replaced. One that was dropped is replaced in any case, so that this replay
        notices who reads it.
        """
        mode, stand_ins = self.mode, [*tensors]
        mode.start(tensors)
        proven = self._cache.is_proven_for(self._plans)
        inputs, written = mode.schedule.record.inputs, mode.schedule.written
        for i in mode.schedule.unneeded:
            t = tensors[i]
            replaced = not proven or inputs[i] in written
            if type(t) is Absent or (replaced and is_droppable(t)):
                new = stand_ins[i] = mode.absent_leaf(i, t)
                new.requires_grad_(t.requires_grad)
        return stand_ins

    def escaped(self) -> bool:
        """Say whether something did not fit, or an absent tensor is still held."""
        self.mode.note_escaped()
        return bool(self.mode.trouble)

    def succeeded(self) -> None:
        """Note that the plan was right for these roots."""
        # Handles of residuals need no replay.
        self._cache.note_success(
            self._plans, self._roots, self._plans.residual_of_handle
        )

    def failed(self, error: Exception | None) -> None:
        """Correct the plans after a replay that did not fit.

        Raises:
            Exception: the error, if the user's code raised it.
        """
        trouble = self.mode.trouble
        is_ours = trouble or error is None or isinstance(error, RecomputeError)
        if error is not None and not (is_ours or is_of_memory(error)):
            raise error
        self._cache.note_misfit(self._plans, trouble)
        self.what = what_differs(trouble, error)


def _viewed_as(tensor: Tensor, value: Value) -> Tensor:
    """Return a tensor as another view of its storage."""
    if value_of(tensor) == value:
        return tensor
    return viewed(tensor, value.shape, value.stride, value.offset)
