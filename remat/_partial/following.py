"""What a call under base autograd keeps for its policy, and how it is replayed.

The first call of a kind is recorded: its operations, and for each handle the storage
that it stands for. The plan of the record says what is kept. Where the graph saves what
is kept anyway, later calls keep it as it is saved, by its place, and no mode follows
their operations; else one collects it (`collect.Keep`).

Invariant: a handle of a value that is kept gives that very value, whatever a plan says.
A replay that does not fit is given up, and the function runs as it is.
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
from remat._partial.cache import CallCache, Plans
from remat._partial.check import Check
from remat._partial.collect import Verify
from remat._partial.forward_plan import ForwardPlan, is_droppable, is_of_memory
from remat._partial.recorder import Recorder
from remat._partial.replay import Replay
from remat._partial.values import can_be_seen_as, key_of, value_of
from remat._torch import is_lazy, outside_dispatch_mode, viewed


class Following:
    """What one call does with its record.

    Args:
        forward_plan: says whether it is recorded, or follows a record.
        hooks: for saved tensors, around the call: a pair, or None.
        nested: whether those are of a call of remat.

    Attributes:
        mode: to run the forward in, None if nothing follows it.
        dropped: the inputs that are let go, and what stands for them.
    """

    __slots__ = (
        *("_constants", "_early", "_feeding", "_hooks", "_nested", "_plans", "_seen"),
        *("_taken", "_cache", "_forward_plan", "dropped", "mode"),
    )

    def __init__(self, forward_plan: ForwardPlan, hooks: Any, *, nested: bool) -> None:
        self._forward_plan: ForwardPlan | None = forward_plan
        self._hooks, self._nested = hooks, nested
        self.mode, self._plans = forward_plan.mode, forward_plan.plans
        self._cache, self._seen = forward_plan.cache, forward_plan.mode is not None
        self._feeding: Sequence[Residual | Offloaded | None] = ()
        self._constants: dict[int, Any] = {}
        self._taken: dict[int, Tensor] = {}
        self._early: list[Residual] = []
        self.dropped: dict[int, Absent] = {}

    @classmethod
    def again(cls, decision: Any, leaves: Sequence[Tensor], hooks: Any) -> "Following":
        """Return what does as a call within decided, when that around is recomputed.

        What it keeps is saved there as soon as it is made: that recompute stops then.
        """
        cache, plans = decision
        early: list[Residual] = []
        steps, residuals = plans.record.steps, plans.full.plan.residuals

        def tell(tensor: Tensor) -> None:
            i, _ = residuals[len(early)]
            early.append(Residual(tensor, steps[i].op, hooks))

        new = cls(ForwardPlan.again(cache, plans, leaves, tell), hooks, nested=True)
        new._early = early
        return new

    @property
    def decision(self) -> Any:
        """What the call does, for `again`."""
        return None if self._plans is None else (self._cache, self._plans)

    # --- The forward ---

    def pack(self, place: int, tensor: Tensor | None) -> None:
        """Be told of what the graph saves at a place; None for what stays itself."""
        mode, plans = self.mode, self._plans
        if plans is None:
            if mode is not None:
                mode.pack(tensor)
        elif place in plans.saved_at and tensor is not None:
            self._taken[place] = tensor.detach()

    def finish(self, handles: Sequence[Handle | None]) -> None:
        """Plan, and give the handles what is kept.

        Args:
            handles: by place; None for what stays itself, and for what is gone.
        """
        tensors = self._residuals(handles)
        self._forward_plan = self.mode = None
        self._taken.clear()
        plans = self._plans
        if plans is None:
            return
        if tensors is None:
            self._cache.strike()
            self._plans = None
            return
        steps, residuals = plans.record.steps, plans.full.plan.residuals
        ops = [steps[i].op for i, _ in residuals]
        kept = self._early or store(
            tensors, plans.places, ops, self._hooks, nested=self._nested
        )
        packs = plans.record.packs
        for place, k in plans.saved_at.items():
            handle, pack = handles[place], packs[place]
            if handle is not None and pack is not None:
                handle.call, handle.residual = None, kept[k]
                handle.view = None if pack.value == value_of(tensors[k]) else pack.value
        self._feeding = [r if k in plans.feeding else None for k, r in enumerate(kept)]

    def _residuals(self, handles: Sequence[Handle | None]) -> list[Tensor] | None:
        """Return what is to be kept; None if the plan is not of this forward."""
        forward_plan, mode, plans = self._forward_plan, self.mode, self._plans
        assert forward_plan is not None
        if isinstance(mode, Recorder):
            gone = {place for place, handle in enumerate(handles) if handle is None}
            record = mode.record((), gone)
            given = [place for place in range(len(handles)) if place not in gone]
            plans = self._plans = forward_plan.learn(mode, record, given)
            if plans is None:
                return None
            self._constants = {i: mode.constants[i] for i in plans.full.plan.kept}
            return plans.held(mode)
        if plans is None:
            return None
        if len(handles) != len(plans.record.packs):
            return None
        if mode is None:
            residuals = self._taken_by_place(plans)
        else:
            residuals, self._constants = mode.residuals(), mode.constants
        if residuals is None or not self._are_saved(residuals, plans):
            return None
        if isinstance(mode, Verify):
            leaves = forward_plan.leaves
            droppable = forward_plan.droppable(plans.full)
            self.dropped = {i: like(leaves[i]) for i in droppable}
        return residuals

    def _taken_by_place(self, plans: Plans) -> list[Tensor] | None:
        """Return the residuals, of which the graph saved views or themselves."""
        steps, found = plans.record.steps, dict[int, Tensor]()
        residuals = plans.full.plan.residuals
        for place, k in plans.saved_at.items():
            if k not in found and place in self._taken:
                i, j = residuals[k]
                value = steps[i].op.outputs[j]
                if not can_be_seen_as(self._taken[place], value):
                    return None
                found[k] = _as(self._taken[place], value)
        if len(found) < len(residuals):
            return None
        return [found[k] for k in range(len(residuals))]

    def _are_saved(self, residuals: Sequence[Tensor], plans: Plans) -> bool:
        """Say whether the graph saved, where it is to hold residuals, just them."""
        packs, taken = plans.record.packs, self._taken
        for place, k in plans.saved_at.items():
            saved, pack = taken.get(place), packs[place]
            if saved is None or pack is None or value_of(saved) != pack.value:
                return False
            if is_lazy(saved) or key_of(saved) != key_of(residuals[k]):
                return False
        return True

    def residuals_held(self) -> list[Residual | Offloaded]:
        """Return what the call holds for a recompute."""
        return [r for r in self._feeding if r is not None]

    # --- What reads handles while the forward runs ---

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which the forward is not followed, nor calls within."""
        mode = self.mode
        return contextlib.nullcontext() if mode is None else outside_dispatch_mode(mode)

    def note_read(self, handles: Iterable[Handle]) -> None:
        """Be told that the forward itself reads what handles stand for."""
        if isinstance(self.mode, Recorder):
            for handle in handles:
                self.mode.note_copy(handle.position, handle.value)

    # --- The recompute ---

    def replay(self, handles: Iterable[Handle]) -> "Replaying | None":
        """Return how the handles given are filled along the plan, if there is one."""
        plans = self._plans
        if plans is None:
            return None
        given = tuple(sorted(handle.position for handle in handles))
        kept: list[Any] = [None if r is None else r.value() for r in self._feeding]
        replay = Replay(plans.of(given), kept, kept.__getitem__, self._constants)
        return Replaying(self._cache, plans, given, replay)

    def check(self) -> Check | None:
        """Return what compares a full recompute with the forward, if that was seen."""
        plans = self._plans if self._seen else None
        return None if plans is None else Check(plans.full)

    def read_what_is_gone(self, replaying: "Replaying") -> RecomputeError:
        """Return the error that a recompute needs an input that was let go."""
        return RecomputeError(_DROPPED.format(what=replaying.what))


class Replaying:
    """One recompute along a plan.

    Args:
        cache: of the signature.
        plans: the plans.
        given: the places that are to be filled.
        mode: that replays.
    """

    def __init__(
        self, cache: CallCache, plans: Plans, given: Sequence[int], mode: Replay
    ) -> None:
        self._cache, self._plans, self._given = cache, plans, given
        self.mode = mode
        self.what = ""

    def stand_ins(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what to run on: nothing in place of inputs that are not needed.

        Once it is known that they are not read, only what is changed is left out. What
        was let go has this replay learn of who reads it.
        """
        mode, stand_ins = self.mode, [*tensors]
        mode.start(tensors)
        proven = self._cache.is_proven() and self._cache.plans is self._plans
        inputs, written = mode.schedule.record.inputs, mode.schedule.written
        for i in mode.schedule.unneeded:
            t = tensors[i]
            left = not proven or inputs[i] in written
            if type(t) is Absent or (left and is_droppable(t)):
                new = stand_ins[i] = mode.absent_leaf(i, t)
                new.requires_grad_(t.requires_grad)
        return stand_ins

    def escaped(self) -> bool:
        """Say whether there was trouble, or somebody holds what was left out."""
        self.mode.note_escaped()
        return bool(self.mode.trouble)

    def succeeded(self) -> None:
        """Note that nothing was read but what the plan says."""
        cache = self._cache
        # Another record may have taken its place since.
        if cache.plans is self._plans:
            # What is kept is given without a replay.
            cache.proven.update(self._given, self._plans.saved_at)
        cache.warn_of_names()

    def failed(self, error: Exception | None) -> None:
        """Learn from a replay that did not fit.

        Raises:
            Exception: the error, if it is none of the replay's.
        """
        trouble = self.mode.trouble
        is_ours = trouble or error is None or isinstance(error, RecomputeError)
        if error is not None and not (is_ours or is_of_memory(error)):
            raise error
        if trouble.missed and not trouble.differs:
            self._cache.learn(self._plans, trouble.missed)
        else:
            self._cache.strike()
        self.what = trouble.differs or _READ.format(error=error)


def _as(tensor: Tensor, value: Value) -> Tensor:
    """Return a tensor as another view of its storage."""
    if value_of(tensor) == value:
        return tensor
    return viewed(tensor, value.shape, value.stride, value.offset)


_READ = "  something read the value of what was left out. {error}"
_DROPPED = (
    "remat: the recomputation did something else than it did before, and inputs were "
    "not kept that it needs for that. Pass prune=False if it depends on more than its "
    "inputs.\n{what}"
)
