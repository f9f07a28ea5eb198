"""How one call is recomputed.

`Tracing` is what one forward does with the trace of its signature (`_traces`): record
it, follow it, or nothing. A `Recipe` is what that leaves for the backward of the call.

Invariant: a trace is only an optimization. A replay that does not fit is given up, and
the function runs as it is; inputs are dropped only where replays of this trace have
succeeded, and the forward at hand was seen to do the same.
Rejected: one plan for all calls of a module. What is given differs, and so what is
read.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._absent import Absent, like
from remat._compat import base_tensor, current_layer, is_lazy
from remat._cost import reason_against
from remat._errors import MutationError, RecomputeError
from remat._offload import Fetched, Origin, in_file, in_host_memory, origin_of
from remat._replay import Check, Keep, Replay, Verify
from remat._script import Script
from remat._trace import Recorder
from remat._traces import Scripts, Trace
from remat._values import key_of
from remat.policies import Decision, Policy


class Tracing:
    """What one forward does with its trace.

    Args:
        trace: of the signature.
        policy: which results may be kept.
        prune: "auto", True or False.
        leaves: of the call.
        inner: what stands for them in it.

    Attributes:
        trace: of the signature.
        mode: to run the function in, None if it runs as it is.
    """

    __slots__ = ("_inner", "_leaves", "_policy", "_prune", "_scripts", "mode", "trace")

    def __init__(
        self,
        trace: Trace,
        policy: Policy | None,
        prune: str | bool,
        leaves: Sequence[Tensor],
        inner: Sequence[Tensor] | None = None,
    ) -> None:
        self.trace, self._policy, self._prune = trace, policy, prune
        self._inner = inner = leaves if inner is None else inner
        self._leaves = leaves
        scripts = None if trace.reason else trace.scripts
        self._scripts: Scripts | None = scripts
        self.mode: Any = None
        if trace.reason:
            return
        if scripts is None:
            self.mode = Recorder(inner, policy)
        elif trace.is_proven() and self._droppable(scripts.full):
            self.mode = Verify(scripts.full, inner, key_of)
        elif scripts.full.places:
            self.mode = Keep(scripts.full)

    def _droppable(self, script: Script) -> list[int]:
        """Return the leaves to be dropped, if they are worth it."""
        leaves, inner, linked = self._leaves, self._inner, script.plan.linked
        found = [
            i
            for i in script.unneeded
            if is_droppable(leaves[i]) and not (i in linked and inner[i].requires_grad)
        ]
        if self._prune is not True:
            size = sum(leaves[i].numel() * leaves[i].itemsize for i in found)
            return found if size >= WORTH_DROPPING else []
        return found

    def finish(
        self, outs: Sequence[Any], *, may_drop: bool
    ) -> tuple["Recipe | None", list[Tensor]]:
        """Return how the call is recomputed, and the tensors to keep for it."""
        mode = self.mode
        if isinstance(mode, Recorder):
            return self._recorded(mode, outs)
        scripts = self._scripts
        if scripts is None:
            return None, []
        residuals: list[Tensor] | None = []
        if mode is not None:
            residuals = mode.residuals()
        if residuals is None or len(outs) != len(scripts.record.roots):
            self.trace.strike()
            return None, []
        dropped: list[int] = []
        if may_drop and isinstance(mode, Verify):
            dropped = self._droppable(scripts.full)
        count = len(self._leaves)
        seen = mode is not None
        recipe = Recipe(self.trace, scripts, count, self._metas(dropped), seen)
        recipe.constants = mode.constants if mode is not None else {}
        return recipe, recipe.put_away(residuals)

    def _metas(self, dropped: Iterable[int]) -> dict[int, Absent]:
        return {i: like(self._leaves[i]) for i in dropped}

    def _recorded(
        self, recorder: Recorder, outs: Sequence[Any]
    ) -> tuple["Recipe | None", list[Tensor]]:
        trace, policy = self.trace, self._policy
        record = recorder.record(outs)
        decisions = recorder.decisions(record)
        prune, learned = self._prune is not False, recorder.taken
        scripts = Scripts(record, decisions, prune=prune, learned=learned)
        if self._prune == "auto" and policy is None:
            trace.reason = reason_against(record, scripts.full.plan)
            if trace.reason:
                return None, []
        trace.scripts, trace.proven = scripts, set()
        trace.outputs = frozenset(j for j, o in enumerate(outs) if o.requires_grad)
        trace.names = frozenset() if policy is None else policy.names
        trace.followed = policy is not None
        scripts = _with_what_was_held(scripts, recorder)
        outputs = [
            (record.steps[i].op.outputs[k], record.steps[i].makes[k])
            for i, k in scripts.full.plan.residuals
        ]
        residuals = [recorder.residual(*output) for output in outputs]
        recipe = Recipe(trace, scripts, len(self._leaves), {}, True)
        kept = scripts.full.plan.kept
        recipe.constants = {i: recorder.constants[i] for i in kept}
        return recipe, recipe.put_away(residuals)


WORTH_DROPPING = 2**16  # bytes, for which "auto" follows a forward


def is_droppable(leaf: Tensor) -> bool:
    """Say whether a leaf that is not needed need not be kept.

    The graph keeps those that gradients are accumulated in, a module its parameters.
    """
    if type(leaf) is not Tensor or (leaf.requires_grad and leaf.is_leaf):
        return False
    return leaf.layout is torch.strided and not is_lazy(leaf)


def _with_what_was_held(scripts: Scripts, recorder: Recorder) -> Scripts:
    """Return the plans for the call that was recorded.

    What got its name after it was gone is kept by later calls only.
    """
    record = scripts.record
    residuals = scripts.full.plan.residuals
    if recorder.has(record.steps[i].makes[k] for i, k in residuals):
        return scripts
    decisions = [
        decision if recorder.has(step.makes) else Decision.RECOMPUTE
        for step, decision in zip(record.steps, scripts.decisions, strict=True)
    ]
    return Scripts(record, decisions, prune=scripts.prune, learned=scripts.learned)


class Recipe:
    """How one call is recomputed.

    Attributes:
        dropped: the leaves that were not kept, and what stands for them.
        scripts: the plans.
        constants: of the operations whose results are kept.
    """

    __slots__ = (
        "_count",
        "_origins",
        "_seen",
        "_trace",
        "_versions",
        "constants",
        "dropped",
        "scripts",
    )

    def __init__(
        self,
        trace: Trace,
        scripts: Scripts,
        count: int,
        dropped: dict[int, Absent],
        seen: bool,
    ) -> None:
        self._trace, self.scripts, self._count = trace, scripts, count
        self.dropped, self._seen = dropped, seen
        self._origins: list[Origin] | None = None
        self.constants: dict[int, Any] = {}

    def put_away(self, residuals: list[Tensor]) -> list[Tensor]:
        """Return the residuals where the policy wants them."""
        places = self.scripts.places
        if not _PUT.keys().isdisjoint(places):
            self._origins = [*map(origin_of, residuals)]
            pairs = zip(residuals, places, strict=True)
            residuals = [_PUT[d](t) if d in _PUT else t for t, d in pairs]
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
        """Return `pull(leaves, mode)`, along the script if it fits.

        Args:
            given: the outputs that have cotangents.
            saved: the leaves kept, and the residuals.
            pull: runs the function, and the backward of what it did.

        Raises:
            RecomputeError: the function does something else than in the forward.
            MutationError: a result that was kept was changed since.
        """
        leaves, residuals = self._put_back(saved)
        script = self.scripts.of(given)
        replay = Replay(script, residuals, self._taker(residuals), self.constants)
        replay.start(leaves)
        whole = not _is_of_level(leaves)
        try:
            # No name for the stand-ins: `note_escaped` counts who else holds them.
            grads = pull(self._stand_ins(leaves, replay, whole=whole), replay)
        except Exception as error:
            if not (replay.trouble or _is_of_memory(error)):
                raise
            self._note(replay, error)
        else:
            # Elsewhere a graph holds them, or what escapes is refused in the forward.
            if current_layer() is None and not torch.is_grad_enabled():
                replay.note_escaped()
            if not replay.trouble:
                trace = self._trace
                # Another record may have taken its place since.
                if whole and trace.scripts is self.scripts:
                    self._trace.proven.update(given)
                self._trace.warn_of_names()
                return grads
            self._note(replay, None)
        return pull(leaves, Check(script) if self._seen else None)

    def _put_back(
        self, saved: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return leaves, with stand-ins for those that were dropped, and residuals."""
        kept, dropped = self._count - len(self.dropped), self.dropped
        leaves, residuals = saved[:kept], saved[kept:]
        if dropped:
            ours = iter(leaves)
            each = range(self._count)
            leaves = [dropped[i] if i in dropped else next(ours) for i in each]
        return leaves, residuals

    def _taker(self, residuals: Sequence[Tensor]) -> Callable[[int], Tensor]:
        """Return what gives a residual back, by its place."""
        now = [base_tensor(t)._version for t in residuals]
        if now != self._versions:
            place = [*map(operator.ne, now, self._versions)].index(True)
            i, k = self.scripts.full.plan.residuals[place]
            op = self.scripts.record.steps[i].op
            raise MutationError(_CHANGED.format(op=op.func, k=k, source=op.source))
        if self._origins is None:
            return residuals.__getitem__
        return Fetched(residuals, self._origins).take

    def _stand_ins(
        self, leaves: Sequence[Tensor], replay: Replay, *, whole: bool
    ) -> Sequence[Tensor]:
        """Put stand-ins in place of leaves whose values are not needed.

        But not for what a graph is recorded of, which is to reach it.
        """
        if not whole:
            return leaves
        recorded, stand_ins = torch.is_grad_enabled(), [*leaves]
        # Once it is known that they are not read, only what is changed is left out.
        proven = self._trace.is_proven() and self._trace.scripts is self.scripts
        inputs, written = replay.script.record.inputs, replay.script.written
        for i in replay.script.unneeded:
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
        """Learn from a replay that did not fit.

        Raises:
            RecomputeError: the function cannot be run as it is.
        """
        trouble = replay.trouble
        if trouble.missed and not trouble.differs:
            self._trace.learn(self.scripts, trouble.missed)
        else:
            self._trace.strike()
        if self.dropped:
            what = trouble.differs or _READ.format(error=error)
            raise RecomputeError(_DROPPED.format(what=what)) from error


def _is_of_level(leaves: Sequence[Tensor]) -> bool:
    """Say whether some leaf is of a level, where a stand-in would be of none."""
    return current_layer() is not None and any(base_tensor(t) is not t for t in leaves)


def _is_of_memory(error: Exception) -> bool:
    """Say whether torch refused to read what is absent, or found no memory there."""
    text = str(error)
    return "Absent" in text or any(words in text for words in _REFUSALS)


_REFUSALS = (
    "data is not allocated yet",
    "data pointer",
    "tensor subclass",
    "non-wrapper subclass",
)


_READ = "  something read the value of what was left out. {error}"
_PUT = {Decision.OFFLOAD: in_host_memory, Decision.OFFLOAD_TO_DISK: in_file}
_CHANGED = (
    "remat: output {k} of {op} ({source}), which the policy keeps for the backward, "
    "was changed in place since the forward. Change a copy: it was returned, or shares "
    "memory with what was."
)
_DROPPED = (
    "remat: the recomputation did something else than it did before, and inputs were "
    "not kept that it needs for that. Pass prune=False if it depends on more than its "
    "inputs.\n{what}"
)
