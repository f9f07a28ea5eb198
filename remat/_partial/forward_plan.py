"""What one forward does with the cache of its signature: record it, or follow it.

Called by `_transform` with the cache that `cache` has for a call. `following` and
`recomputation` take over when the forward has run.

Invariant: a record is only an optimization, and what a call does without one is right.
Rejected: to record on fake tensors, in a run of its own. The user's code may look at
values.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._partial.cache import CallCache
from remat._partial.candidates import Candidates
from remat._partial.collect import Collect, Verify
from remat._partial.decide import (
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
from remat._partial.plans import Plans
from remat._partial.recorder import Recorder
from remat._partial.schedule import Schedule
from remat._torch import is_lazy
from remat.policies import Decision, Policy


class ForwardPlan:
    """What one forward does with its cache.

    Args:
        cache: of the signature.
        policy: of the call.
        prune: "auto", True or False.
        leaves: of the call.
        label: what warnings call it.
        inner: what the function runs on in place of the leaves; None if it runs on
            them, as it does if the graph is plain's own.

    Attributes:
        cache: of the signature.
        leaves: of the call.
        plans: the plans that it follows; None if it follows none.
        mode: to run the function in; None if it runs as it is.
    """

    __slots__ = (
        *("_inner", "_label", "_policy", "_prune"),
        *("leaves", "mode", "plans", "cache"),
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
        self.cache, self._policy, self._prune = cache, policy, prune
        self._label = label
        self.leaves, self._inner = leaves, inner
        inner = leaves if inner is None else inner
        self.plans: Plans | None = None if cache.reason else cache.plans
        self.mode: Any = None
        if cache.reason:
            return
        plans = self.plans
        if plans is None:
            self.mode = Recorder(inner, policy)
        elif cache.is_proven() and self.inputs_to_drop(plans.full):
            self.mode = Verify(plans.full, inner)
        elif plans.destinations and not plans.each_has_handle:
            self.mode = Collect(plans.full)

    @classmethod
    def given(
        cls,
        cache: CallCache,
        plans: Plans,
        leaves: Sequence[Tensor],
        on_residual: Callable[[Tensor], None],
    ) -> "ForwardPlan":
        """Return one that follows these plans, and hands on each residual once made."""
        forward_plan = cls(CallCache(), None, False, leaves, "")
        forward_plan.cache, forward_plan.plans = cache, plans
        saves = bool(plans.destinations)
        forward_plan.mode = Collect(plans.full, on_residual) if saves else None
        return forward_plan

    def inputs_to_drop(self, schedule: Schedule) -> Sequence[int]:
        """Return the leaves that the call need not keep, if that is worth it."""
        leaves, inner = self.leaves, self._inner
        droppable = [i for i in schedule.unneeded if is_droppable(leaves[i])]
        if not droppable:
            return ()
        return inputs_to_drop(
            schedule.plan,
            self._prune,
            droppable,
            lambda i: leaves[i].numel() * leaves[i].itemsize,
            is_differentiated=(
                None if inner is None else lambda i: inner[i].requires_grad
            ),
        )

    def plan_recorded(
        self, recorder: Recorder, record: Record, roots: Iterable[int]
    ) -> Plans | None:
        """Plan a record, for this call and those after it.

        Args:
            recorder: made the record.
            record: of this forward.
            roots: those that a backward may ask for.

        Returns:
            The plans for this call; None if a replay is not worth it.
        """
        cache, policy, prune = self.cache, self._policy, self._prune
        if recorder.misses:
            cache.refuse(UNSEEN)
            warn_if_not_followed(asked_for(policy, prune), self._label, UNSEEN)
            return None
        decisions, exposed = recorder.decisions(record), recorder.exposed
        found = planned(record, decisions, policy, prune, exposed)
        unpruned = found.why_unpruned
        warn_if_unpruned(prune, self._label, unpruned)
        if found.plan is None:
            cache.reason = found.why_none
            return None
        warn_if_overdrawn(found.spent, self._label)
        plans = Plans(
            record,
            decisions,
            found.plan,
            prune=not unpruned,
            extra_roots=exposed,
            spent=found.spent,
        )
        cache.plans, cache.proven, cache.outputs = plans, set(), frozenset(roots)
        cache.names = frozenset() if policy is None else policy.names
        asked = asked_for(policy, prune)
        cache.asked = asked and f"{asked} of {self._label}"
        return _with_what_was_held(plans, recorder.candidates)


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
