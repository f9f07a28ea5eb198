"""What one call with a policy or `prune=True` does: record, save residuals, replay.

A call is recorded, or follows the plan of a record that a call like it made. The
forward runs under its `mode`, ends with `finish`, and saves the residuals of the plan.

Invariant: a replay that does not fit is given up, and the function runs as it is. An
input is dropped only if replays of these plans have succeeded, and a mode saw this
forward do the same. A handle of a residual gives that very tensor.
Rejected: one plan for all calls of a module, whose cotangents differ. One list of
residuals for a call at the base: a backward frees what it has used, node by node.
"""

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.absent import Absent, like
from remat._base.context import here
from remat._base.errors import MutationError, RecomputeError
from remat._graph.handles import CHANGED, OFFLOAD, Handle, Offloaded, Residual, store
from remat._offload.offload import Fetched, Origin, origin_of
from remat._partial.decide import ACCUMULATES, CallCache, plan_recorded
from remat._partial.follow import DIFFERENT, Check, Collect
from remat._partial.options import Prune
from remat._partial.recorder import Recorder, tell_recorders
from remat._partial.replay import Replay, is_droppable, may_stand_in
from remat._partial.runnable import Plans
from remat._partial.values import key_of, value_of, viewed_as
from remat._torch.autograd import top_hooks
from remat._torch.levels import (
    base_tensor,
    current_layer,
    is_batch_of_cotangents,
    transforms,
)
from remat._torch.modes import dispatch_modes, outside_dispatch_mode
from remat._torch.tensors import has_no_memory, is_lazy
from remat.policies import Policy


class Repeated(NamedTuple):
    """What a call within another one follows, and does again in a recompute of that."""

    cache: CallCache
    plans: Plans
    may_drop: bool = False
    call: Any = None  # a weak reference to it
    inner: Sequence[Any] = ()  # what the calls within it follow


class PlannedCall:
    """One call, and the plans that it follows.

    Under torch.func the function runs on `inner` in place of the inputs. In a recompute
    of a call around it repeats what it followed in its forward.
    """

    is_late = False  # a recompute around left its residuals out: it keeps nothing

    def __init__(
        self,
        *,
        follows: CallCache | Repeated,
        inputs: Sequence[Tensor],
        policy: Policy | None = None,
        prune: Prune = False,
        label: str = "",
        inner: Sequence[Tensor] | None = None,
        nested: bool = False,
    ) -> None:
        self._policy, self._prune, self._label = policy, prune, label
        self._inputs, self._inner = inputs, inner
        self._is_counted = top_hooks(True) is not None  # so each run saves the same
        self._nested = nested  # the hooks for saved tensors around it are of a call
        self.statics: dict[int, Any] = {}  # of the operations whose results are saved
        # The inputs that are not kept, and whether calls after this one may keep fewer.
        self.dropped: dict[int, Absent] = {}
        self.mode: Any = None  # to run the forward in; None to run it as it is
        self.plans: Plans | None = None
        self._repeats = False
        if isinstance(follows, Repeated):
            self.cache, self.plans, self.may_drop = follows[:3]
            if follows.plans.destinations:
                self.mode, self._repeats = self._collecting(follows.plans), True
        else:
            self.cache, self.may_drop = follows, prune is True
            if not follows.reason:
                self.plans = follows.plans
                self._choose_mode(follows.plans)
        self._was_seen = self.mode is not None

    def _choose_mode(self, plans: Plans | None) -> None:
        runs_on = self._inputs if self._inner is None else self._inner
        if plans is None:
            self.mode = Recorder(runs_on, self._policy)
            if any(isinstance(mode, Replay) for mode in dispatch_modes()):
                # What is absent runs other operations: a record for this call.
                self.cache = CallCache()
        elif self.cache.is_proven() and self._inputs_to_drop(plans):
            self.mode = Collect(plans.full, runs_on)
        elif plans.destinations and (self._nested or not plans.each_has_handle):
            self.mode = Collect(plans.full)
        # Else the graph has all, but not in the order that a call around needs.

    def _collecting(self, plans: Plans) -> Collect:
        """Return the mode of a call that repeats what it did."""
        return Collect(plans.full)

    def _inputs_to_drop(self, plans: Plans) -> Sequence[int]:
        """Return the inputs that the call need not keep."""
        if not (self.may_drop and plans.full.unneeded):
            return ()
        inputs, inner, full = self._inputs, self._inner or (), plans.full
        # A node is differentiated again, and its residuals by way of the inputs.
        needs = {i for i, t in enumerate(inner) if t.requires_grad}
        may_drop = full.plan.may_drop
        found = (i for i in full.unneeded if may_drop(i, is_differentiated=i in needs))
        return [i for i in found if is_droppable(inputs[i])]

    # --- The end of the forward ---

    def _end_forward(
        self,
        count: int,
        targets: Iterable[int],
        outs: Sequence[Any] = (),
        gone: Container[int] = (),
        *,
        may_drop: bool = True,
    ) -> list[Tensor] | None:
        """Return the residuals; None if the call follows no plan.

        There are `count` handles or outputs, of which a backward may read `targets`.
        """
        mode, plans = self.mode, self.plans
        residuals = None
        if isinstance(mode, Recorder):
            what = mode.record(outs, gone), targets, self._policy, self._prune
            self.plans = plans = plan_recorded(self.cache, mode, *what, self._label)
            if plans is not None:
                statics = mode.candidates.statics
                self.statics = {i: statics[i] for i in plans.full.plan.saved}
                residuals = mode.candidates.residuals(plans.values, plans.storages)
        elif plans is not None:
            if count == len(plans.record.roots):
                residuals = self._collected()
            if residuals is None:
                self._give_up()
            elif may_drop and mode is not None and mode.verifies:
                inputs, unread = self._inputs, self._inputs_to_drop(plans)
                self.dropped = {i: like(inputs[i]) for i in unread}
        if residuals and not self._is_counted:
            if True in map(has_no_memory, residuals):
                self.is_late = True
                self.dropped.clear()
                residuals.clear()
            elif not self.dropped and here().listeners:
                tell_recorders(self._inputs, plans, residuals)
        # The mode holds candidates, and the call is not to hold its inputs.
        self.mode, self._inputs, self._inner = None, (), None
        return residuals

    def _give_up(self) -> None:
        if self._repeats:  # what is saved after it would take other places
            raise RecomputeError(DIFFERENT)
        self.cache.drop_record()
        self.plans = None

    def _collected(self) -> list[Tensor] | None:
        """Return the residuals; None if the plan does not fit this forward."""
        if self.mode is None:
            return []
        self.statics = self.mode.statics
        return self.mode.residuals()

    # --- The recompute ---

    def check(self) -> Check | None:
        """Return a mode that compares a full recompute with a forward that was seen."""
        plans = self.plans if self._was_seen else None
        return None if plans is None else Check(plans.full)


# --- Under base autograd ---


class SavedInHandles(PlannedCall):
    """A call under base autograd, whose residuals are in handles.

    The call holds those that a recompute reads. If the graph saves every residual
    anyway, the call takes them from there, and no mode follows its forward. `hooks` are
    those for saved tensors around it, and `nested` if these are of a call of remat.
    """

    def __init__(
        self, *, hooks: Any, follows: CallCache | Repeated, **call: Any
    ) -> None:
        self._hooks = hooks
        self._early: list[Residual] = []  # residuals that were put away at once
        super().__init__(follows=follows, **call)
        self._for_recompute: Sequence[Residual | Offloaded | None] = ()
        self._is_replayed = False  # and holds no residual any more
        self._taken: dict[int, Tensor] = {}  # what handles of residuals stand for
        # For what the call around recomputes.
        forward = follows.call() if isinstance(follows, Repeated) else None
        self._waiting: dict[int, Handle] = getattr(forward, "_waiting", {})

    @override
    def _collecting(self, plans: Plans) -> Collect:
        # Its residuals are handed on as soon as they are made: the recompute around
        # stops once it has all that it needs.
        early, hooks = self._early, self._hooks

        def on_residual(tensor: Tensor) -> None:
            early.append(Residual(tensor, plans.ops[len(early)], hooks))

        return Collect(plans.full, on_residual=on_residual)

    def chosen(self, inner: Sequence[Any]) -> Any:
        """Return what the call, and those within it, follow: a `Repeated`, or None."""
        plans, ours = self.plans, weakref.ref(self)
        return plans and Repeated(self.cache, plans, self.may_drop, ours, inner)

    def pack(self, position: int, tensor: Tensor | None) -> None:
        """Note what the graph saves at a position; None if that has no handle."""
        mode, plans = self.mode, self.plans
        if plans is None and mode is not None:
            mode.saved_storages.pack(tensor)
        if plans is None or tensor is None:
            return
        if position in plans.residual_of_handle:
            self._taken[position] = tensor.detach()
        elif position in self._waiting and self._waiting[position].takes(tensor):
            del self._waiting[position]

    def gives_up(self, *, accumulates: bool) -> str:
        """Return why this call, and those after it, follow nothing; "" if they do.

        If the forward `accumulates` gradients, what a backward inside runs for that
        depends on who else holds them.
        """
        copies = isinstance(self.mode, Recorder) and self.mode.copies_gradients
        if not (accumulates or copies):
            return ""
        self.cache.refuse(ACCUMULATES)
        return ACCUMULATES

    def finish(self, handles: Sequence[Handle | None]) -> None:
        """End the forward; a handle is None where a tensor itself is saved, or gone."""
        gone: set[int] = set()
        targets: list[int] = []
        if isinstance(self.mode, Recorder):
            gone = {p for p, handle in enumerate(handles) if handle is None}
            targets = [p for p in range(len(handles)) if p not in gone]
        tensors = self._end_forward(len(handles), targets, gone=gone)
        self._taken.clear()
        for residual in self._early:
            residual.let_go_of_graph()
        plans = self.plans
        if plans is None or tensors is None or self.is_late:
            return
        saved = self._early or store(
            tensors, plans.destinations, plans.ops, self._hooks, nested=self._nested
        )
        packs = plans.record.packs
        for position, k in plans.residual_of_handle.items():
            handle, pack = handles[position], packs[position]
            if handle is not None and pack is not None:
                handle.call, handle.residual = None, saved[k]
                handle.view = None if pack.value == value_of(tensors[k]) else pack.value
        needed = plans.for_recompute
        self._for_recompute = [r if k in needed else None for k, r in enumerate(saved)]

    @override
    def _collected(self) -> list[Tensor] | None:
        plans = self.plans
        assert plans is not None
        followed = self.mode is not None
        residuals = super()._collected() if followed else self._in_graph(plans)
        if residuals is None:
            return None
        packs, taken = plans.record.packs, self._taken
        for position, k in plans.residual_of_handle.items():
            # A handle of a residual has to stand for it, as recorded.
            saved, pack = taken.get(position), packs[position]
            if saved is None or pack is None or value_of(saved) != pack.value:
                return None
            # Operations that are the same may write to another value than they did.
            if saved.is_inference() or saved._version != pack.version:
                return None
            if has_no_memory(saved) and has_no_memory(residuals[k]):
                continue  # left out by a replay around, which compares on its own
            if is_lazy(saved) or key_of(saved) != key_of(residuals[k]):
                return None
        return residuals

    def _in_graph(self, plans: Plans) -> list[Tensor] | None:
        """Return the residuals, taken from the tensors that the graph saved."""
        found: dict[int, Tensor] = {}
        for position, k in plans.residual_of_handle.items():
            if k not in found and position in self._taken:
                view = viewed_as(self._taken[position], plans.values[k])
                if view is None:
                    return None
                found[k] = view
        if len(found) < len(plans.values):
            return None
        return [found[k] for k in range(len(plans.values))]

    def residuals_held(self) -> list[Residual | Offloaded]:
        """Return the residuals that the call holds for a recompute."""
        return [r for r in self._for_recompute if r is not None]

    def let_go(self) -> None:
        """Let go of what recomputes read: all handles are filled, and no graph stays.

        A backward of another part that reads a handle later recomputes everything.
        """
        self._is_replayed, self._for_recompute = True, ()

    def outside(self) -> AbstractContextManager[Any]:
        """Return a context in which no mode follows the forward."""
        mode = self.mode
        return contextlib.nullcontext() if mode is None else outside_dispatch_mode(mode)

    def note_read(self, handles: Iterable[Handle]) -> None:
        """Note what the forward itself reads."""
        if isinstance(self.mode, Recorder):
            for handle in handles:
                self.mode.saved_storages.note_copy(handle.position, handle.value)

    def replay(self, handles: list[Handle]) -> Replay | None:
        """Return a recompute along the plan that fills handles; None without a plan."""
        plans = self.plans
        if plans is None or self._is_replayed:
            return None
        # The recompute of a call around that is not recorded may fill some of them.
        if shares := self._nested and not here().listeners:
            self._waiting = {handle.position: handle for handle in handles}
        try:
            held = [None if r is None else r.value() for r in self._for_recompute]
            handles[:] = self._waiting.values() if shares else handles
        finally:
            self._waiting = {}
        targets = tuple(sorted(handle.position for handle in handles))
        return Replay(self, plans, targets, held, held.__getitem__)


# --- Under torch.func ---


class SavedInNode(PlannedCall):
    """A call under torch.func, whose node saves the residuals with the inputs."""

    note: Callable[[Any], None] | None = None  # is told what it follows

    def finish(self, outs: Sequence[Any], *, may_drop: bool) -> list[Tensor] | None:
        """End the forward: return the residuals; None to recompute in full."""
        self._count = len(self._inputs)
        self._origins: list[Origin] = []
        targets: list[int] = []
        if isinstance(self.mode, Recorder):
            targets = [j for j, o in enumerate(outs) if o.requires_grad]
        tensors = self._end_forward(len(outs), targets, outs, may_drop=may_drop)
        plans = self.plans
        if plans is None or tensors is None:
            return None
        if self.note is not None:
            self.note(Repeated(self.cache, plans))
        destinations = () if self.is_late else plans.destinations
        if not OFFLOAD.keys().isdisjoint(destinations):
            self._origins = [*map(origin_of, tensors)]
            pairs = zip(tensors, destinations, strict=True)
            tensors = [OFFLOAD[d](t) if d in OFFLOAD else t for t, d in pairs]
        self._versions = [t._version for t in tensors]
        return tensors

    def kept(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs that are kept."""
        if not self.dropped:
            return inputs
        return [t for i, t in enumerate(inputs) if i not in self.dropped]

    def carry_out(
        self, targets: Sequence[int], saved: Sequence[Tensor], pull: Callable[..., Any]
    ) -> Any:
        """Return `pull(inputs, mode)`, along the plan if it fits."""
        kept = self._count - len(self.dropped)
        inputs, residuals = saved[:kept], saved[kept:]
        if self.dropped:
            ours, gone = iter(inputs), self.dropped
            each = range(self._count)
            inputs = [gone[i] if i in gone else next(ours) for i in each]
        elif not self._is_comparable(inputs):
            return pull(inputs, None)
        assert self.plans is not None
        again = torch.is_grad_enabled() and any(t.requires_grad for t in saved)
        if again and self.plans.record.within and not self.dropped:
            return pull(inputs, None)  # second derivatives read calls within once more
        take = self._taker(residuals)
        replaying = Replay(self, self.plans, targets, residuals, take)
        whole = current_layer() is None or all(base_tensor(t) is t for t in inputs)
        recorded = torch.is_grad_enabled()
        may_any = functools.partial(may_stand_in, whole, recorded)
        try:
            grads = pull(replaying.stand_ins(inputs, may_any), replaying)
        except Exception as error:  # noqa: BLE001 - raised there, if it is the user's
            replaying.failed(error)
        else:
            # Without a level, a graph may hold them, and the forward refused what
            # escaped.
            if current_layer() is None and not recorded:
                replaying.escaped()
            if not replaying.trouble:
                replaying.succeeded(proves=whole)
                return grads
            replaying.failed(None)
        return pull(inputs, self.check())

    def _is_comparable(self, inputs: Sequence[Tensor]) -> bool:
        """Say whether a recompute runs under the transforms of the forward.

        Under others torch makes other operations of composite ones, such as `linear`.
        """
        assert self.plans is not None
        now, then = transforms(), self.plans.record.transforms
        if is_batch_of_cotangents(inputs):
            # The function runs below this vmap, unless it is in a vmap of its own.
            return not then
        return now == then[: len(now)]  # the program enters the rest

    def _taker(self, residuals: Sequence[Tensor]) -> Callable[[int], Tensor]:
        """Return a function that gives a residual back, by its index."""
        now = [base_tensor(t)._version for t in residuals]
        if now != self._versions:
            assert self.plans is not None
            index = [*map(operator.ne, now, self._versions)].index(True)
            op = self.plans.ops[index]
            raise MutationError(CHANGED.format(op=op.func, where=op.source))
        if not self._origins:
            return residuals.__getitem__
        return Fetched(residuals, self._origins).take
