"""How one call is recomputed under torch.func: along the plan of a record.

`_transform` calls `finish` after a forward, and the backward of the call's node has
`Recomputation` carried out.

Invariant: a cache is only an optimization. A replay that does not fit is given up, and
the function runs as it is. Under more transforms of torch.func than the forward ran
under, none is tried. Inputs are dropped only if replays of this cache have
succeeded, and a mode saw this forward do the same.
Rejected: one plan for all calls of a module. Their cotangents differ, and so does what
is read.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._base.absent import Absent, like
from remat._base.errors import MutationError
from remat._graph.residual import OFFLOAD
from remat._offload.offload import Fetched, Origin, origin_of
from remat._partial.cache import CallCache
from remat._partial.check import Check
from remat._partial.collect import Verify
from remat._partial.forward_plan import ForwardPlan, is_of_memory
from remat._partial.plans import Plans
from remat._partial.recorder import Recorder
from remat._partial.replay import Replay, input_dropped, what_differs
from remat._torch import (
    base_tensor,
    current_layer,
    is_batch_of_cotangents,
    is_lazy,
    transforms,
)


def finish(
    forward_plan: ForwardPlan, outs: Sequence[Any], *, may_drop: bool
) -> tuple["Recomputation | None", list[Tensor]]:
    """Return how a call is recomputed, and the residuals that it saves.

    Args:
        forward_plan: of its forward.
        outs: of its function.
        may_drop: whether inputs that no recompute reads may be dropped.
    """
    mode, cache, count = forward_plan.mode, forward_plan.cache, len(forward_plan.leaves)
    if isinstance(mode, Recorder):
        record = mode.record(outs)
        roots = [j for j, o in enumerate(outs) if o.requires_grad]
        plans = forward_plan.plan_recorded(mode, record, roots)
        if plans is None:
            return None, []
        recomputation = Recomputation(cache, plans, count, {}, True)
        statics = mode.candidates.statics
        recomputation.statics = {i: statics[i] for i in plans.full.plan.saved}
        return recomputation, recomputation.put_away(
            plans.residuals_of(mode.candidates)
        )
    plans = forward_plan.plans
    if plans is None:
        return None, []
    residuals: list[Tensor] | None = [] if mode is None else mode.residuals()
    if residuals is None or len(outs) != len(plans.record.roots):
        cache.drop_record()
        return None, []
    dropped: dict[int, Absent] = {}
    if may_drop and isinstance(mode, Verify):
        leaves = forward_plan.leaves
        dropped = {i: like(leaves[i]) for i in forward_plan.inputs_to_drop(plans.full)}
    recomputation = Recomputation(cache, plans, count, dropped, mode is not None)
    recomputation.statics = {} if mode is None else mode.statics
    return recomputation, recomputation.put_away(residuals)


class Recomputation:
    """How one call is recomputed.

    Attributes:
        dropped: the leaves that are not kept, and an absent tensor for each.
        plans: the plans.
        statics: of the operations whose results are saved.
    """

    __slots__ = (
        *("_cache", "_count", "_origins", "_seen", "_versions"),
        *("dropped", "plans", "statics"),
    )

    def __init__(
        self,
        cache: CallCache,
        plans: Plans,
        count: int,
        dropped: dict[int, Absent],
        seen: bool,
    ) -> None:
        self._cache, self.plans, self._count = cache, plans, count
        self.dropped, self._seen = dropped, seen
        self._origins: list[Origin] | None = None
        self.statics: dict[int, Any] = {}

    def put_away(self, residuals: list[Tensor]) -> list[Tensor]:
        """Return the residuals, moved to where the policy offloads them."""
        destinations = self.plans.destinations
        if not OFFLOAD.keys().isdisjoint(destinations):
            self._origins = [*map(origin_of, residuals)]
            pairs = zip(residuals, destinations, strict=True)
            residuals = [OFFLOAD[d](t) if d in OFFLOAD else t for t, d in pairs]
        self._versions = [t._version for t in residuals]
        return residuals

    def kept(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves that are kept."""
        if not self.dropped:
            return leaves
        return [t for i, t in enumerate(leaves) if i not in self.dropped]

    def carry_out(
        self,
        given: Sequence[int],
        saved: Sequence[Tensor],
        pull: Callable[..., Any],
    ) -> Any:
        """Return `pull(leaves, mode)`, along the plan if it fits.

        Args:
            given: the outputs that have cotangents.
            saved: the leaves that were kept, and the residuals.
            pull: runs the function and its backward.

        Raises:
            RecomputeError: the function does something else than in the forward.
            MutationError: a residual was changed since.
        """
        leaves, residuals = self._put_back(saved)
        if not (self.dropped or self._is_comparable(leaves)):
            return pull(leaves, None)
        schedule = self.plans.schedule_for(given)
        replay = Replay(schedule, residuals, self._taker(residuals), self.statics)
        replay.start(leaves)
        whole = not _is_of_level(leaves)
        try:
            # No name for the stand-ins: `note_escaped` counts who else holds them.
            grads = pull(self._stand_ins(leaves, replay, whole=whole), replay)
        except Exception as error:
            if not (replay.trouble or is_of_memory(error)):
                raise
            self._note(replay, error)
        else:
            # Elsewhere a graph may hold them, and the forward refuses what escapes.
            if current_layer() is None and not torch.is_grad_enabled():
                replay.note_escaped()
            if not replay.trouble:
                self._cache.note_success(self.plans, given if whole else ())
                return grads
            self._note(replay, None)
        return pull(leaves, Check(schedule) if self._seen else None)

    def _is_comparable(self, leaves: Sequence[Tensor]) -> bool:
        """Say whether a recompute runs under the transforms of the forward.

        Under others torch makes other operations of composite ones, such as `linear`.
        """
        now, then = transforms(), self.plans.record.transforms
        if is_batch_of_cotangents(leaves):
            # The function runs below this vmap, unless it is in a vmap of its own.
            return not then
        return now == then[: len(now)]  # the program enters the rest

    def _put_back(
        self, saved: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the leaves, absent tensors for dropped ones, and the residuals."""
        kept, dropped = self._count - len(self.dropped), self.dropped
        leaves, residuals = saved[:kept], saved[kept:]
        if dropped:
            ours = iter(leaves)
            each = range(self._count)
            leaves = [dropped[i] if i in dropped else next(ours) for i in each]
        return leaves, residuals

    def _taker(self, residuals: Sequence[Tensor]) -> Callable[[int], Tensor]:
        """Return a function that gives a residual back, by its index."""
        now = [base_tensor(t)._version for t in residuals]
        if now != self._versions:
            index = [*map(operator.ne, now, self._versions)].index(True)
            i, k = self.plans.full.plan.residuals[index]
            op = self.plans.record.steps[i].op
            raise MutationError(_CHANGED.format(op=op.func, k=k, source=op.source))
        if self._origins is None:
            return residuals.__getitem__
        return Fetched(residuals, self._origins).take

    def _stand_ins(
        self, leaves: Sequence[Tensor], replay: Replay, *, whole: bool
    ) -> Sequence[Tensor]:
        """Put absent tensors in place of leaves whose values are not needed.

        But not if a graph is recorded that has to reach the leaf.
        """
        if not whole:
            return leaves
        recorded, stand_ins = torch.is_grad_enabled(), [*leaves]
        # Once replays have shown that they are not read, only those that are written
        # to are replaced.
        proven = self._cache.is_proven_for(self.plans)
        inputs, written = replay.schedule.record.inputs, replay.schedule.written
        for i in replay.schedule.unneeded:
            t = leaves[i]
            if not (
                (proven and type(t) is not Absent and inputs[i] not in written)
                or type(t) not in (Tensor, Absent)
                or (recorded and t.requires_grad)
                or is_lazy(t)
            ):
                stand_ins[i] = replay.absent_leaf(i, t)
        return stand_ins

    def _note(self, replay: Replay, error: Exception | None) -> None:
        """Correct the plans after a replay that did not fit.

        Raises:
            RecomputeError: the function cannot be run as it is.
        """
        self._cache.note_misfit(self.plans, replay.trouble)
        if self.dropped:
            raise input_dropped(what_differs(replay.trouble, error)) from error


def _is_of_level(leaves: Sequence[Tensor]) -> bool:
    """Say whether a leaf is of a level of torch.func, of which no absent tensor is."""
    return current_layer() is not None and any(base_tensor(t) is not t for t in leaves)


_CHANGED = (
    "remat: output {k} of {op} ({source}), which the policy saves for the backward, "
    "was changed in place since the forward. Change a copy: it was returned, or shares "
    "memory with what was."
)
