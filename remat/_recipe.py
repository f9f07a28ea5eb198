"""How calls are recomputed: what those of one signature share, and what one call adds.

A `Trace` is shared: the record of one call, and the plans made of it. `Tracing` is what
one forward does with it: record it, follow it, or nothing. A `Recipe` is what that
leaves for the backward of that call.

Invariant: a trace is only an optimization. A replay that does not fit is given up, and
the function runs as it is; inputs are dropped only where a replay of this trace has
succeeded, and the forward at hand was seen to do the same.
Rejected: to prove that a record fits before it is used. The signature is compared, but
whatever else a function reads may differ; what is absent cannot be read by mistake.
"""

import operator
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._compat import base_tensor, current_layer
from remat._cost import reason_against
from remat._errors import RecomputeError
from remat._op import Op
from remat._plan import Plan, Record, plan
from remat._replay import (
    Absent,
    Check,
    Keep,
    MismatchError,
    MissingError,
    Replay,
    Script,
    Verify,
    like,
)
from remat._trace import Recorder, key_of, names_given
from remat.policies import Decision, Policy


_STRIKES = 3  # records that did not fit, before no more is made
_LESSONS = 16  # values read that no operation reads, before they are given up


class Scripts:
    """The plans of one record.

    Args:
        record: of a forward.
        decisions: what the policy says of each operation.
        prune: whether to leave out what is not needed.
        learned: storages that are needed besides.
    """

    __slots__ = ("_narrowed", "decisions", "full", "learned", "prune", "record")

    def __init__(
        self,
        record: Record,
        decisions: Sequence[Decision],
        *,
        prune: bool,
        learned: Iterable[int] = (),
    ) -> None:
        self.record, self.decisions, self.prune = record, decisions, prune
        self.learned = frozenset(learned)
        saveable = [i for i, decision in enumerate(decisions) if decision]
        made = plan(record, saveable, learned=self.learned, prune=prune)
        self.full = Script(record, made)
        self._narrowed: dict[tuple[int, ...], Script] = {}

    def of(self, given: Sequence[int]) -> Script:
        """Return the script for the outputs that have cotangents."""
        if not self.prune or len(given) == len(self.record.roots):
            return self.full
        key = tuple(given)
        script = self._narrowed.get(key)
        if script is None:
            kept = self.full.plan.kept
            made = plan(self.record, kept, given, learned=self.learned)
            script = Script(self.record, made, self.full.plan.residuals)
            self._narrowed[key] = script
        return script


class Trace:
    """What calls of one signature share.

    Attributes:
        scripts: the plans; None if there is to be a new record.
        reason: why there are none, and will not be.
        proven: whether a replay has succeeded.
        names: those that the policy mentions.
    """

    __slots__ = ("names", "proven", "reason", "scripts", "strikes")

    def __init__(self) -> None:
        self.scripts: Scripts | None = None
        self.reason = ""
        self.proven = False
        self.names: frozenset[str] = frozenset()
        self.strikes = 0

    def strike(self) -> None:
        """Give a record up that did not fit."""
        self.scripts, self.proven = None, False
        self.strikes += 1
        if self.strikes > _STRIKES:
            self.reason = f"{_STRIKES} records did not fit the calls after them"

    def learn(self, scripts: Scripts, number: int) -> None:
        """Plan again, for something read a storage that was thought not needed."""
        learned = scripts.learned | {number}
        if len(learned) > _LESSONS:
            self.reason = "the function reads too much other than by operations"
        if self.scripts is scripts:
            self.scripts = Scripts(
                scripts.record, scripts.decisions, prune=scripts.prune, learned=learned
            )

    def warn_of_names(self) -> None:
        """Warn, once, of names that the policy mentions and nothing was ever given."""
        unknown, self.names = self.names - names_given(), frozenset()
        if unknown:
            names = ", ".join(map(repr, sorted(unknown)))
            warnings.warn(_UNKNOWN.format(names=names), stacklevel=2)


_UNKNOWN = (
    "remat: the policy names {names}, but no checkpoint_name in this program has given "
    "such a name to a value. Nothing is saved for it."
)


class _Traces:
    """The traces by signature; the least recently used go first."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()

    def __getitem__(self, key: Hashable) -> Trace:
        with self._lock:
            trace = self._traces.get(key)
            if trace is None:
                trace = self._traces[key] = Trace()
                if len(self._traces) > self._size:
                    self._traces.popitem(last=False)
            else:
                self._traces.move_to_end(key)
            return trace

    def __len__(self) -> int:
        return len(self._traces)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._traces.clear()


TRACES = _Traces(512)
_meta = operator.attrgetter("shape", "dtype", "device")
_is_contiguous = operator.methodcaller("is_contiguous")


_numel = operator.methodcaller("numel")
_SMALL = 2**12  # elements


def is_small(leaves: Sequence[Tensor]) -> bool:
    """Say whether "auto" does not even look: too little is there to be worth it."""
    return sum(map(_numel, leaves)) < _SMALL


def trace_of(signature: Hashable, leaves: Sequence[Tensor]) -> Trace:
    """Return what is shared by the calls of a signature, on such leaves."""
    metas = (*map(_meta, leaves), *map(_is_contiguous, leaves))
    return TRACES[signature, metas]


class Tracing:
    """What one forward does with its trace.

    Args:
        trace: of the signature.
        policy: which results may be kept.
        prune: "auto", True or False.
        leaves: that it runs on.

    Attributes:
        mode: to run the function in, None if it runs as it is.
    """

    __slots__ = ("_leaves", "_policy", "_prune", "_scripts", "_trace", "mode")

    def __init__(
        self,
        trace: Trace,
        policy: Policy | None,
        prune: str | bool,
        leaves: Sequence[Tensor],
    ) -> None:
        self._trace, self._policy, self._prune = trace, policy, prune
        self._leaves = leaves
        scripts = None if trace.reason else trace.scripts
        self._scripts: Scripts | None = scripts
        self.mode: Any = None
        if trace.reason:
            return
        if scripts is None:
            self.mode = Recorder(leaves, policy)
        elif trace.proven and self._droppable(scripts.full.plan):
            self.mode = Verify(scripts.full, leaves, key_of)
        elif scripts.full.places:
            self.mode = Keep(scripts.full)

    def _droppable(self, made: Plan) -> list[int]:
        """Return the leaves to be dropped: parameters live on elsewhere."""
        return [
            i
            for i, t in enumerate(self._leaves)
            if i not in made.needed and type(t) is Tensor
        ]

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
        if residuals is None:
            self._trace.strike()
            return None, []
        dropped: list[int] = []
        if may_drop and isinstance(mode, Verify):
            dropped = self._droppable(scripts.full.plan)
        count = len(self._leaves)
        seen = mode is not None
        recipe = Recipe(self._trace, scripts, count, self._metas(dropped), seen)
        return recipe, residuals

    def _metas(self, dropped: Iterable[int]) -> dict[int, Absent]:
        return {i: like(self._leaves[i]) for i in dropped}

    def _recorded(
        self, recorder: Recorder, outs: Sequence[Any]
    ) -> tuple["Recipe | None", list[Tensor]]:
        trace, policy = self._trace, self._policy
        record = recorder.record(outs)
        decide = policy or _nothing
        decisions = [
            decide(step.op)
            if recorder.has(step.makes) and step.makes
            else Decision.RECOMPUTE
            for step in record.steps
        ]
        prune = self._prune is not False
        scripts = Scripts(record, decisions, prune=prune)
        residuals = [
            recorder.residual(record.steps[i].op.outputs[k], record.steps[i].makes[k])
            for i, k in scripts.full.plan.residuals
        ]
        if self._prune == "auto" and policy is None:
            verdict = reason_against(record, scripts.full.plan)
            if verdict:
                trace.reason = verdict
                return None, []
        trace.scripts = scripts
        trace.names = frozenset() if policy is None else policy.names
        return Recipe(trace, scripts, len(self._leaves), {}, True), residuals


def _nothing(op: Op) -> Decision:
    del op
    return Decision.RECOMPUTE


class Recipe:
    """How one call is recomputed.

    Attributes:
        dropped: the leaves that were not kept, and what stands for them.
    """

    __slots__ = ("_count", "_scripts", "_seen", "_trace", "dropped")

    def __init__(
        self,
        trace: Trace,
        scripts: Scripts,
        count: int,
        dropped: dict[int, Absent],
        seen: bool,
    ) -> None:
        self._trace, self._scripts, self._count = trace, scripts, count
        self.dropped, self._seen = dropped, seen

    def kept(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves that are kept."""
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
        """
        ours = iter(saved)
        leaves = [
            self.dropped[i] if i in self.dropped else next(ours)
            for i in range(self._count)
        ]
        script = self._scripts.of(given)
        replay = Replay(script, [*ours])
        stand_ins = self._stand_ins(leaves, replay, script.plan)
        try:
            grads = pull(stand_ins or leaves, replay)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a value that is absent leads to is anything
            if not self._may_run_as_it_is(error, replay):
                raise
        else:
            self._trace.proven = self._trace.proven or bool(stand_ins)
            self._trace.warn_of_names()
            return grads
        return pull(leaves, Check(script) if self._seen else None)

    def _stand_ins(
        self, leaves: Sequence[Tensor], replay: Replay, made: Plan
    ) -> list[Tensor]:
        """Put stand-ins in place of leaves whose values are not needed.

        Nothing where they are of a level: a stand-in would be of none. And none for
        what a graph is recorded of, which is to reach it.
        """
        recorded = torch.is_grad_enabled()
        if current_layer() is not None and any(base_tensor(t) is not t for t in leaves):
            return []
        return [
            t
            if i in made.needed
            or type(t) not in (Tensor, Absent)
            or (recorded and t.requires_grad)
            else replay.absent_leaf(i, t)
            for i, t in enumerate(leaves)
        ]

    def _may_run_as_it_is(self, error: Exception, replay: Replay) -> bool:
        """Say whether to run the function as it is, and learn from the error."""
        missed = isinstance(error, MissingError)
        if missed and not replay.has_left_out(error.shared):
            return False  # an outer call did
        if self.dropped:
            if isinstance(error, (MissingError, MismatchError)):
                raise RecomputeError(_DROPPED.format(error=error)) from error
            return False
        if missed:
            self._trace.learn(self._scripts, error.shared.number)
        else:
            self._trace.strike()
        return True


_DROPPED = (
    "remat: the recomputation did something else than it did before, and inputs were "
    "not kept that it needs for that. Pass prune=False if it depends on more than its "
    "inputs. {error}"
)
