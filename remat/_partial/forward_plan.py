"""What one forward does with the cache of its signature: record it, or follow it.

Invariant: a record is only an optimization, and what a call does without one is right.
Rejected: to record on fake tensors, in a run of its own. The user's code may look at
values.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._partial.cache import CallCache, Plans
from remat._partial.collect import Keep, Verify
from remat._partial.cost import reason_against
from remat._partial.decide import asked_for, warn_if_unpruned, why_unpruned
from remat._partial.options import Prune
from remat._partial.plan import Record
from remat._partial.recorder import Recorder
from remat._partial.schedule import Schedule
from remat._partial.values import key_of
from remat._torch import is_lazy
from remat.policies import Decision, Policy


class ForwardPlan:
    """What one forward does with its cache.

    Args:
        cache: of the signature.
        policy: which results may be kept.
        prune: "auto", True or False.
        leaves: of the call.
        label: what warnings call it.
        inner: what stands for them in it; None if the graph is plain's own.

    Attributes:
        cache: of the signature.
        leaves: of the call.
        plans: the plans that it follows, None if it follows none.
        mode: to run the function in, None if it runs as it is.
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
        elif cache.is_proven() and self.droppable(plans.full):
            self.mode = Verify(plans.full, inner, key_of)
        elif plans.full.places and not plans.are_saved:
            self.mode = Keep(plans.full)

    @classmethod
    def again(
        cls,
        cache: CallCache,
        plans: Plans,
        leaves: Sequence[Tensor],
        tell: Callable[[Tensor], None],
    ) -> "ForwardPlan":
        """Return one that follows just these plans, and tells what is to be kept."""
        forward_plan = cls(CallCache(), None, False, leaves, "")
        forward_plan.cache, forward_plan.plans = cache, plans
        forward_plan.mode = Keep(plans.full, tell) if plans.full.places else None
        return forward_plan

    def droppable(self, schedule: Schedule) -> list[int]:
        """Return the leaves to be dropped, if they are worth it."""
        leaves = self.leaves
        found = [i for i in schedule.unneeded if is_droppable(leaves[i])]
        if self._inner is not None:
            # What is kept is differentiated again by way of what it was computed from.
            inner, linked = self._inner, schedule.plan.linked
            found = [i for i in found if not (i in linked and inner[i].requires_grad)]
        if self._prune is not True:
            size = sum(leaves[i].numel() * leaves[i].itemsize for i in found)
            return found if size >= WORTH_DROPPING else []
        return found

    def learn(
        self, recorder: Recorder, record: Record, given: Iterable[int]
    ) -> Plans | None:
        """Plan a record, for this call and those after it.

        Args:
            recorder: made the record.
            record: of this forward.
            given: the roots that a backward may ask for.

        Returns:
            The plans for this call; None if a replay is not worth it.
        """
        cache, policy = self.cache, self._policy
        decisions = recorder.decisions(record)
        unpruned = why_unpruned(self._prune, record)
        warn_if_unpruned(self._prune, self._label, unpruned)
        learned = recorder.taken
        plans = Plans(record, decisions, prune=not unpruned, learned=learned)
        if self._prune == "auto" and policy is None:
            cache.reason = reason_against(record, plans.full.plan)
            if cache.reason:
                return None
        cache.plans, cache.proven, cache.outputs = plans, set(), frozenset(given)
        cache.names = frozenset() if policy is None else policy.names
        asked = asked_for(policy, self._prune)
        cache.asked = asked and f"{asked} of {self._label}"
        return _with_what_was_held(plans, recorder)


WORTH_DROPPING = 2**16  # bytes, for which "auto" follows a forward


def is_droppable(leaf: Tensor) -> bool:
    """Say whether a leaf that is not needed need not be kept.

    The graph keeps those that gradients are accumulated in, a module its parameters.
    """
    if type(leaf) is not Tensor or (leaf.requires_grad and leaf.is_leaf):
        return False
    return leaf.layout is torch.strided and not is_lazy(leaf)


def _with_what_was_held(plans: Plans, recorder: Recorder) -> Plans:
    """Return the plans for the call that was recorded.

    What got its name after it was gone is kept by later calls only.
    """
    record = plans.record
    residuals = plans.full.plan.residuals
    if recorder.has(record.steps[i].makes[k] for i, k in residuals):
        return plans
    decisions = [
        decision if recorder.has(step.makes) else Decision.RECOMPUTE
        for step, decision in zip(record.steps, plans.decisions, strict=True)
    ]
    return Plans(record, decisions, prune=plans.prune, learned=plans.learned)


def is_of_memory(error: Exception) -> bool:
    """Say whether torch refused to read what is absent, or found no memory there."""
    text = str(error)
    return "Absent" in text or any(words in text for words in _REFUSALS)


_REFUSALS = (
    "data is not allocated yet",
    "data pointer",
    "tensor subclass",
    "non-wrapper subclass",
)
