"""What one call with a policy or `prune=True` does: record, save residuals, replay.

A call is recorded, or follows the plan of a record that a call like it made. Its
forward saves the residuals of the plan, and its recompute is a replay of the plan. Only
where the residuals are stored depends on the lowering:

    SavedInHandles   under base autograd a handle holds the residual that it stands for,
                     and the call holds those that a recompute reads
    SavedInNode      under torch.func the node of the call saves them with its inputs

`_transform` makes one for each call, runs the forward under its `mode`, and ends with
`finish`.

Invariant: a record is only an optimization. A replay that does not fit is given up, and
the function runs as it is. An input is dropped only if replays of these plans have
succeeded, and a mode saw this forward do the same.
Rejected: one list of residuals for a call, at base. A backward frees what it has used,
node by node.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.absent import Absent, like
from remat._base.errors import MutationError, RecomputeError
from remat._base.op import Value
from remat._graph.handles import Handle
from remat._graph.residual import OFFLOAD, Offloaded, Residual, store
from remat._offload.offload import Fetched, Origin, origin_of
from remat._partial.cache import CallCache, Plans
from remat._partial.candidates import Candidates
from remat._partial.decide import (
    ACCUMULATES,
    ASSIGNS,
    UNSEEN,
    asked_for,
    inputs_to_drop,
    planned,
    warn_if_not_followed,
    warn_if_overdrawn,
    warn_if_unpruned,
)
from remat._partial.options import Prune
from remat._partial.plan import Record
from remat._partial.recorder import Recorder
from remat._partial.replay import (
    Check,
    Collect,
    Replay,
    Verify,
    input_dropped,
    what_differs,
)
from remat._partial.values import can_be_viewed_as, key_of, value_of
from remat._torch import (
    base_tensor,
    current_layer,
    is_batch_of_cotangents,
    is_lazy,
    outside_dispatch_mode,
    transforms,
    viewed,
)
from remat.policies import Decision, Policy


class PlannedCall:
    """One call, and the plans that it follows.

    Args:
        cache: of the signature.
        policy: of the call.
        prune: "auto", True or False.
        leaves: of the call.
        label: what warnings call it.
        inner: what the function runs on in place of the leaves; None if it runs on
            them, as it does if the graph is plain's own.

    Attributes:
        mode: to run the forward in; None if it runs as it is.
        plans: the plans that the call follows; None if it follows none.
        dropped: the leaves that are not kept, and an absent tensor for each.
    """

    __slots__ = (
        *("_cache", "_inner", "_label", "_leaves", "_policy", "_prune", "_statics"),
        *("_was_seen", "dropped", "mode", "plans"),
    )

    def __init__(
        self,
        cache: CallCache,
        policy: Policy | None,
        prune: Prune,
        leaves: Sequence[Tensor],
        label: str,
        inner: Sequence[Tensor] | None = None,
    ) -> None:
        self._cache, self._policy, self._prune = cache, policy, prune
        self._leaves, self._inner, self._label = leaves, inner, label
        self.plans: Plans | None = None if cache.reason else cache.plans
        self.mode: Any = None if cache.reason else self._mode_of_forward()
        self._was_seen = self.mode is not None
        self._statics: dict[int, Any] = {}  # of the operations whose results are saved
        self.dropped: dict[int, Absent] = {}

    def _mode_of_forward(self) -> Any:
        plans = self.plans
        inner = self._leaves if self._inner is None else self._inner
        if plans is None:
            return Recorder(inner, self._policy)
        if self._cache.is_proven() and self._inputs_to_drop(plans):
            return Verify(plans.full, inner)
        if plans.destinations and not plans.each_has_handle:
            return Collect(plans.full)
        return None  # the graph saves each residual anyway

    def _inputs_to_drop(self, plans: Plans) -> Sequence[int]:
        """Return the leaves that the call need not keep, if that is worth it."""
        leaves, inner = self._leaves, self._inner
        unneeded = plans.full.unneeded
        droppable = [i for i in unneeded if is_droppable(leaves[i])]
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

        Args:
            count: how many handles or outputs there are.
            roots: those that a backward may ask for.
            outs: of the function.
            gone: the handles that no backward can reach.
            may_drop: whether inputs that no recompute reads may be dropped.
        """
        mode, plans = self.mode, self.plans
        residuals = None
        if isinstance(mode, Recorder):
            residuals = self._plan_recorded(mode, mode.record(outs, gone), roots)
        elif plans is not None:
            if count == len(plans.record.roots):
                residuals = self._collected(plans)
            if residuals is None:
                self._cache.drop_record()
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
        self._statics = self.mode.statics
        return self.mode.residuals()

    def _plan_recorded(
        self, recorder: Recorder, record: Record, roots: Iterable[int]
    ) -> list[Tensor] | None:
        """Plan a record, for this call and those after it; return the residuals.

        None if a replay is not worth it.
        """
        cache, label = self._cache, self._label
        policy, prune = self._policy, self._prune
        asked = asked_for(policy, prune)
        if recorder.misses:
            cache.refuse(UNSEEN)
            warn_if_not_followed(asked, label, UNSEEN)
            return None
        decisions, exposed = recorder.decisions(record), recorder.exposed
        found = planned(record, decisions, policy, prune, exposed)
        warn_if_unpruned(prune, label, found.why_unpruned)
        if found.plan is None:
            cache.reason = found.why_none
            return None
        warn_if_overdrawn(found.spent, label)
        plans = Plans(
            record,
            decisions,
            found.plan,
            prune=not found.why_unpruned,
            extra_roots=exposed,
            spent=found.spent,
        )
        cache.plans, cache.proven, cache.outputs = plans, set(), frozenset(roots)
        cache.names = frozenset() if policy is None else policy.names
        cache.asked = asked and f"{asked} of {label}"
        candidates = recorder.candidates
        self.plans = plans = _with_what_was_held(plans, candidates)
        statics = candidates.statics
        self._statics = {i: statics[i] for i in plans.full.plan.saved}
        return plans.residuals_of(candidates)

    # --- The recompute ---

    def _replaying(
        self,
        roots: Sequence[int],
        residuals: Sequence[Tensor | None],
        take: Callable[[int], Tensor | None],
    ) -> "Replaying":
        """Return a recompute along the plan, for some handles or outputs."""
        assert self.plans is not None
        schedule = self.plans.schedule_for(roots)
        replay = Replay(schedule, residuals, take, self._statics)
        return Replaying(self._cache, self.plans, roots, replay, self.dropped)

    def check(self) -> Check | None:
        """Return a mode that compares a full recompute with the recorded forward.

        None if no mode followed the forward.
        """
        plans = self.plans if self._was_seen else None
        return None if plans is None else Check(plans.full)


class Replaying:
    """One recompute along a plan. What it shows corrects the plans.

    Args:
        cache: of the signature.
        plans: the plans.
        roots: the handles or outputs for which it is made.
        mode: that replays.
        dropped: the inputs that were not kept.

    Attributes:
        mode: that replays.
    """

    __slots__ = ("_cache", "_dropped", "_plans", "_roots", "mode")

    def __init__(
        self,
        cache: CallCache,
        plans: Plans,
        roots: Sequence[int],
        mode: Replay,
        dropped: dict[int, Absent],
    ) -> None:
        self._cache, self._plans, self._roots = cache, plans, roots
        self.mode, self._dropped = mode, dropped

    def stand_ins(
        self,
        tensors: Sequence[Tensor],
        may_stand_in: Callable[[Tensor], bool] | None = None,
    ) -> list[Tensor]:
        """Return what to run on: absent tensors in place of inputs that nobody needs.

        Once replays have shown that they are not read, only those that are written to
        are replaced. One that was dropped is replaced in any case, so that this replay
        notices who reads it.

        Args:
            tensors: the inputs.
            may_stand_in: says whether an absent tensor may stand for an input; None for
                `is_droppable`.
        """
        mode, stand_ins = self.mode, [*tensors]
        mode.start(tensors)
        is_allowed = may_stand_in or is_droppable
        proven = self._cache.is_proven_for(self._plans)
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

    def failed(self, error: Exception | None) -> None:
        """Correct the plans after a replay that did not fit.

        Raises:
            Exception: the error, if the user's code raised it.
            RecomputeError: inputs were dropped, so the function cannot run as it is.
        """
        trouble = self.mode.trouble
        is_ours = trouble or error is None or isinstance(error, RecomputeError)
        if error is not None and not (is_ours or is_of_memory(error)):
            raise error
        self._cache.note_misfit(self._plans, trouble)
        if self._dropped:
            raise input_dropped(what_differs(trouble, error)) from error


# --- Under base autograd ---


class SavedInHandles(PlannedCall):
    """A call under base autograd, whose residuals are in handles.

    If the graph saves every residual anyway, the call takes them from there, and no
    mode follows its forward. A handle of a residual gives that very tensor, whatever
    the plan of a backward says.

    Args:
        cache: of the signature.
        policy: of the call.
        prune: "auto", True or False.
        leaves: of the call.
        label: what warnings call it.
        hooks: the saved-tensor hooks around the call: a pair, or None.
        nested: whether those are of a call of remat.
    """

    __slots__ = ("_early", "_for_recompute", "_hooks", "_nested", "_taken")

    def __init__(
        self,
        cache: CallCache,
        policy: Policy | None,
        prune: Prune,
        leaves: Sequence[Tensor],
        label: str,
        hooks: Any,
        *,
        nested: bool,
    ) -> None:
        super().__init__(cache, policy, prune, leaves, label)
        self._hooks, self._nested = hooks, nested
        self._for_recompute: Sequence[Residual | Offloaded | None] = ()
        self._taken: dict[int, Tensor] = {}  # what handles of residuals stand for
        self._early: list[Residual] = []  # residuals that were put away at once

    @classmethod
    def of_decision(
        cls, decision: Any, leaves: Sequence[Tensor], hooks: Any
    ) -> "SavedInHandles":
        """Return what does as a nested call did, while the call around is recomputed.

        Its residuals are handed to the call around as soon as they are made, since the
        recompute of that stops once it has all that it needs.
        """
        new = cls(_FOLLOWS_NOTHING, None, False, leaves, "", hooks, nested=True)
        new._cache, new.plans = decision
        plans, early = decision[1], new._early
        steps, residuals = plans.record.steps, plans.full.plan.residuals

        def on_residual(tensor: Tensor) -> None:
            i, _ = residuals[len(early)]
            early.append(Residual(tensor, steps[i].op, hooks))

        if plans.destinations:
            new.mode, new._was_seen = Collect(plans.full, on_residual), True
        return new

    @property
    def decision(self) -> Any:
        """What the call does, for `of_decision`."""
        return None if self.plans is None else (self._cache, self.plans)

    def pack(self, place: int, tensor: Tensor | None) -> None:
        """Note a tensor that the graph saves at a place; None if it has no handle."""
        mode, plans = self.mode, self.plans
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
        """End the forward: give handles their residuals.

        Args:
            handles: by place; None where the tensor itself is saved, and where the
                handle is gone.
        """
        gone = {place for place, handle in enumerate(handles) if handle is None}
        roots = [place for place in range(len(handles)) if place not in gone]
        tensors = self._end_forward(len(handles), roots, gone=gone)
        self._taken.clear()
        for residual in self._early:
            residual.let_go_of_graph()
        plans = self.plans
        if plans is None or tensors is None:
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

    @override
    def _collected(self, plans: Plans) -> list[Tensor] | None:
        followed = self.mode is not None
        residuals = super()._collected(plans) if followed else self._in_graph(plans)
        if residuals is None:
            return None
        packs, taken = plans.record.packs, self._taken
        for place, k in plans.residual_of_handle.items():
            # A handle of a residual has to stand for it, as recorded.
            saved, pack = taken.get(place), packs[place]
            if saved is None or pack is None or value_of(saved) != pack.value:
                return None
            if is_lazy(saved) or key_of(saved) != key_of(residuals[k]):
                return None
        return residuals

    def _in_graph(self, plans: Plans) -> list[Tensor] | None:
        """Return the residuals, taken from the tensors that the graph saved."""
        steps, found = plans.record.steps, dict[int, Tensor]()
        residuals = plans.full.plan.residuals
        for place, k in plans.residual_of_handle.items():
            if k not in found and place in self._taken:
                taken, (i, j) = self._taken[place], residuals[k]
                value = steps[i].op.outputs[j]
                if not can_be_viewed_as(taken, value):
                    return None
                found[k] = _viewed_as(taken, value)
        if len(found) < len(residuals):
            return None
        return [found[k] for k in range(len(residuals))]

    def residuals_held(self) -> list[Residual | Offloaded]:
        """Return the residuals that the call holds for a recompute."""
        return [r for r in self._for_recompute if r is not None]

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which no mode follows the forward."""
        mode = self.mode
        return contextlib.nullcontext() if mode is None else outside_dispatch_mode(mode)

    def note_read(self, handles: Iterable[Handle]) -> None:
        """Note that the forward itself reads what handles stand for."""
        if isinstance(self.mode, Recorder):
            for handle in handles:
                self.mode.roots.note_copy(handle.position, handle.value)

    def replay(self, handles: Iterable[Handle]) -> Replaying | None:
        """Return a recompute along the plan that fills handles; None without a plan."""
        if self.plans is None:
            return None
        roots = tuple(sorted(handle.position for handle in handles))
        held = [None if r is None else r.value() for r in self._for_recompute]
        return self._replaying(roots, held, held.__getitem__)


def _viewed_as(tensor: Tensor, value: Value) -> Tensor:
    """Return a tensor as another view of its storage."""
    if value_of(tensor) == value:
        return tensor
    return viewed(tensor, value.shape, value.stride, value.offset)


# --- Under torch.func ---


class SavedInNode(PlannedCall):
    """A call under torch.func, whose node saves the residuals with the inputs.

    Under more transforms of torch.func than the forward ran under, no replay is tried.
    """

    __slots__ = ("_count", "_origins", "_versions")

    def finish(self, outs: Sequence[Any], *, may_drop: bool) -> list[Tensor] | None:
        """Return the residuals to save; None if the call is recomputed in full.

        Args:
            outs: of the function.
            may_drop: whether inputs that no recompute reads may be dropped.
        """
        self._count, self._origins = len(self._leaves), list[Origin]()
        roots = [j for j, o in enumerate(outs) if o.requires_grad]
        tensors = self._end_forward(len(outs), roots, outs, may_drop=may_drop)
        plans = self.plans
        if plans is None or tensors is None:
            return None
        destinations = plans.destinations
        if not OFFLOAD.keys().isdisjoint(destinations):
            self._origins = [*map(origin_of, tensors)]
            pairs = zip(tensors, destinations, strict=True)
            tensors = [OFFLOAD[d](t) if d in OFFLOAD else t for t, d in pairs]
        self._versions = [t._version for t in tensors]
        return tensors

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
        kept = self._count - len(self.dropped)
        leaves, residuals = saved[:kept], saved[kept:]
        if self.dropped:
            ours = iter(leaves)
            each = range(self._count)
            leaves = [
                self.dropped[i] if i in self.dropped else next(ours) for i in each
            ]
        elif not self._is_comparable(leaves):
            return pull(leaves, None)
        replaying = self._replaying(given, residuals, self._taker(residuals))
        # No absent tensor is of a level of torch.func.
        whole = current_layer() is None or not any(map(_is_of_level, leaves))
        recorded = torch.is_grad_enabled()
        may_stand_in = functools.partial(_may_stand_in, recorded) if whole else _never
        try:
            # No name for the stand-ins: `escaped` counts who else holds them.
            grads = pull(replaying.stand_ins(leaves, may_stand_in), replaying.mode)
        except Exception as error:  # noqa: BLE001 - raised there, if it is the user's
            replaying.failed(error)
        else:
            # Elsewhere a graph may hold them, and the forward refuses what escapes.
            if current_layer() is None and not recorded:
                replaying.escaped()
            if not replaying.mode.trouble:
                replaying.succeeded(proves=whole)
                return grads
            replaying.failed(None)
        # Not above, where the error would hold what the replay computed.
        return pull(leaves, self.check())

    def _is_comparable(self, leaves: Sequence[Tensor]) -> bool:
        """Say whether a recompute runs under the transforms of the forward.

        Under others torch makes other operations of composite ones, such as `linear`.
        """
        assert self.plans is not None
        now, then = transforms(), self.plans.record.transforms
        if is_batch_of_cotangents(leaves):
            # The function runs below this vmap, unless it is in a vmap of its own.
            return not then
        return now == then[: len(now)]  # the program enters the rest

    def _taker(self, residuals: Sequence[Tensor]) -> Callable[[int], Tensor]:
        """Return a function that gives a residual back, by its index."""
        now = [base_tensor(t)._version for t in residuals]
        if now != self._versions:
            assert self.plans is not None
            index = [*map(operator.ne, now, self._versions)].index(True)
            i, k = self.plans.full.plan.residuals[index]
            op = self.plans.record.steps[i].op
            raise MutationError(_CHANGED.format(op=op.func, k=k, source=op.source))
        if not self._origins:
            return residuals.__getitem__
        return Fetched(residuals, self._origins).take


def _is_of_level(leaf: Tensor) -> bool:
    return base_tensor(leaf) is not leaf


def _may_stand_in(recorded: bool, leaf: Tensor) -> bool:
    """Say whether an absent tensor may stand for a leaf, under a graph or not."""
    reaches = recorded and leaf.requires_grad  # the graph has to reach it
    return type(leaf) is Tensor and not (reaches or is_lazy(leaf))


def _never(leaf: Tensor) -> bool:
    del leaf
    return False


# --- Both ---


def is_droppable(leaf: Tensor) -> bool:
    """Say whether a leaf that no recompute reads need not be kept.

    The graph keeps those that gradients are accumulated in, a module its parameters.
    """
    if type(leaf) is not Tensor or (leaf.requires_grad and leaf.is_leaf):
        return False
    return leaf.layout is torch.strided and not is_lazy(leaf)


def _with_what_was_held(plans: Plans, candidates: Candidates) -> Plans:
    """Return the plans for the call that was recorded.

    A result that got its name after it was freed is saved by later calls only.
    """
    record = plans.record
    residuals = plans.full.plan.residuals
    if candidates.has(record.steps[i].makes[k] for i, k in residuals):
        return plans
    decisions = [
        decision if candidates.has(step.makes) else Decision.RECOMPUTE
        for step, decision in zip(record.steps, plans.decisions, strict=True)
    ]
    return plans.planned_again(decisions, plans.extra_roots)


def is_of_memory(error: Exception) -> bool:
    """Say whether torch refused to read an absent tensor, or found no memory there."""
    text = str(error)
    return "Absent" in text or any(words in text for words in _REFUSALS)


_REFUSALS = (
    "data is not allocated yet",
    "data pointer",
    "tensor subclass",
    "non-wrapper subclass",
)
_FOLLOWS_NOTHING = CallCache()
_FOLLOWS_NOTHING.reason = "it does what was decided before"
_CHANGED = (
    "remat: output {k} of {op} ({source}), which the policy saves for the backward, "
    "was changed in place since the forward. Change a copy: it was returned, or shares "
    "memory with what was."
)
