"""What a call under base autograd keeps for its policy, and how it is replayed.

The first call of a kind is recorded: its operations, and for each handle the storage
that it stands for. The plan of the record says what is kept. Where the graph saves what
is kept anyway, later calls keep it as it is saved, by its place, and no mode follows
their operations; else one collects it (`replay.Keep`).

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
from remat._graph.residual import Offloaded, Residual, keep
from remat._partial.recorder import Recorder
from remat._partial.replay import Check, Replay, Verify
from remat._partial.traces import Scripts, Trace
from remat._partial.tracing import Tracing, is_droppable, is_of_memory
from remat._partial.values import can_be_seen_as, key_of, value_of
from remat._torch import is_lazy, outside_dispatch_mode, viewed


class Following:
    """What one call does with its record.

    Args:
        tracing: says whether it is recorded, or follows a record.
        hooks: for saved tensors, around the call: a pair, or None.
        nested: whether those are of a call of remat.

    Attributes:
        mode: to run the forward in, None if nothing follows it.
        dropped: the inputs that are let go, and what stands for them.
    """

    __slots__ = (
        *("_constants", "_early", "_feeding", "_hooks", "_nested", "_scripts", "_seen"),
        *("_taken", "_trace", "_tracing", "dropped", "mode"),
    )

    def __init__(self, tracing: Tracing, hooks: Any, *, nested: bool) -> None:
        self._tracing: Tracing | None = tracing
        self._hooks, self._nested = hooks, nested
        self.mode, self._scripts = tracing.mode, tracing.scripts
        self._trace, self._seen = tracing.trace, tracing.mode is not None
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
        trace, scripts = decision
        early: list[Residual] = []
        steps, residuals = scripts.record.steps, scripts.full.plan.residuals

        def tell(tensor: Tensor) -> None:
            i, _ = residuals[len(early)]
            early.append(Residual(tensor, steps[i].op, hooks))

        new = cls(Tracing.again(trace, scripts, leaves, tell), hooks, nested=True)
        new._early = early
        return new

    @property
    def decision(self) -> Any:
        """What the call does, for `again`."""
        return None if self._scripts is None else (self._trace, self._scripts)

    # --- The forward ---

    def pack(self, place: int, tensor: Tensor | None) -> None:
        """Be told of what the graph saves at a place; None for what stays itself."""
        mode, scripts = self.mode, self._scripts
        if scripts is None:
            if mode is not None:
                mode.pack(tensor)
        elif place in scripts.saved_at and tensor is not None:
            self._taken[place] = tensor.detach()

    def finish(self, handles: Sequence[Handle | None]) -> None:
        """Plan, and give the handles what is kept.

        Args:
            handles: by place; None for what stays itself, and for what is gone.
        """
        tensors = self._residuals(handles)
        self._tracing = self.mode = None
        self._taken.clear()
        scripts = self._scripts
        if scripts is None:
            return
        if tensors is None:
            self._trace.strike()
            self._scripts = None
            return
        steps, residuals = scripts.record.steps, scripts.full.plan.residuals
        ops = [steps[i].op for i, _ in residuals]
        kept = self._early or keep(
            tensors, scripts.places, ops, self._hooks, nested=self._nested
        )
        packs = scripts.record.packs
        for place, k in scripts.saved_at.items():
            handle, pack = handles[place], packs[place]
            if handle is not None and pack is not None:
                handle.call, handle.residual = None, kept[k]
                handle.view = None if pack.value == value_of(tensors[k]) else pack.value
        self._feeding = [
            r if k in scripts.feeding else None for k, r in enumerate(kept)
        ]

    def _residuals(self, handles: Sequence[Handle | None]) -> list[Tensor] | None:
        """Return what is to be kept; None if the plan is not of this forward."""
        tracing, mode, scripts = self._tracing, self.mode, self._scripts
        assert tracing is not None
        if isinstance(mode, Recorder):
            gone = {place for place, handle in enumerate(handles) if handle is None}
            record = mode.record((), gone)
            given = [place for place in range(len(handles)) if place not in gone]
            scripts = self._scripts = tracing.learn(mode, record, given)
            if scripts is None:
                return None
            self._constants = {i: mode.constants[i] for i in scripts.full.plan.kept}
            return scripts.held(mode)
        if scripts is None:
            return None
        if len(handles) != len(scripts.record.packs):
            return None
        if mode is None:
            residuals = self._taken_by_place(scripts)
        else:
            residuals, self._constants = mode.residuals(), mode.constants
        if residuals is None or not self._are_saved(residuals, scripts):
            return None
        if isinstance(mode, Verify):
            leaves = tracing.leaves
            droppable = tracing.droppable(scripts.full)
            self.dropped = {i: like(leaves[i]) for i in droppable}
        return residuals

    def _taken_by_place(self, scripts: Scripts) -> list[Tensor] | None:
        """Return the residuals, of which the graph saved views or themselves."""
        steps, found = scripts.record.steps, dict[int, Tensor]()
        residuals = scripts.full.plan.residuals
        for place, k in scripts.saved_at.items():
            if k not in found and place in self._taken:
                i, j = residuals[k]
                value = steps[i].op.outputs[j]
                if not can_be_seen_as(self._taken[place], value):
                    return None
                found[k] = _as(self._taken[place], value)
        if len(found) < len(residuals):
            return None
        return [found[k] for k in range(len(residuals))]

    def _are_saved(self, residuals: Sequence[Tensor], scripts: Scripts) -> bool:
        """Say whether the graph saved, where it is to hold residuals, just them."""
        packs, taken = scripts.record.packs, self._taken
        for place, k in scripts.saved_at.items():
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
                self.mode.note_copy(handle.place, handle.value)

    # --- The recompute ---

    def replay(self, handles: Iterable[Handle]) -> "Replaying | None":
        """Return how the handles given are filled along the plan, if there is one."""
        scripts = self._scripts
        if scripts is None:
            return None
        given = tuple(sorted(handle.place for handle in handles))
        kept: list[Any] = [None if r is None else r.value() for r in self._feeding]
        replay = Replay(scripts.of(given), kept, kept.__getitem__, self._constants)
        return Replaying(self._trace, scripts, given, replay)

    def check(self) -> Check | None:
        """Return what compares a full recompute with the forward, if that was seen."""
        scripts = self._scripts if self._seen else None
        return None if scripts is None else Check(scripts.full)

    def read_what_is_gone(self, replaying: "Replaying") -> RecomputeError:
        """Return the error that a recompute needs an input that was let go."""
        return RecomputeError(_DROPPED.format(what=replaying.what))


class Replaying:
    """One recompute along a plan.

    Args:
        trace: of the signature.
        scripts: the plans.
        given: the places that are to be filled.
        mode: that replays.
    """

    def __init__(
        self, trace: Trace, scripts: Scripts, given: Sequence[int], mode: Replay
    ) -> None:
        self._trace, self._scripts, self._given = trace, scripts, given
        self.mode = mode
        self.what = ""

    def stand_ins(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what to run on: nothing in place of inputs that are not needed.

        Once it is known that they are not read, only what is changed is left out. What
        was let go has this replay learn of who reads it.
        """
        mode, stand_ins = self.mode, [*tensors]
        mode.start(tensors)
        proven = self._trace.is_proven() and self._trace.scripts is self._scripts
        inputs, written = mode.script.record.inputs, mode.script.written
        for i in mode.script.unneeded:
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
        trace = self._trace
        # Another record may have taken its place since.
        if trace.scripts is self._scripts:
            # What is kept is given without a replay.
            trace.proven.update(self._given, self._scripts.saved_at)
        trace.warn_of_names()

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
            self._trace.learn(self._scripts, trouble.missed)
        else:
            self._trace.strike()
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
