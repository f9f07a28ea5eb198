"""Asks the policy about each operation, and holds the tensors that it may save.

Invariant: what is held goes with the recording, but for what the plan saves.
Rejected: to save what the policy says at once. Only the plan knows what is read, and a
name may be given to a value long after the operation that made it.
"""

import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import Tensor

from remat._base.op import Op, Value
from remat._base.warned import warn
from remat._partial.plan import Record, Step, overwrites
from remat._partial.values import is_strided, sees_operations, value_of
from remat._torch.levels import below_all_levels
from remat._torch.modes import viewed
from remat._torch.tensors import has_no_memory, is_lazy
from remat.policies import Decision, Policy


class Candidates:
    """What may be saved of a forward that is recorded."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy
        self._decisions: list[Decision] = []
        self._outputs: list[Sequence[weakref.ref[Tensor] | Tensor]] = []
        self._held: dict[int, Tensor] = {}
        self._error: Exception | None = None
        self.statics: list[list[Any]] = []  # the arguments that are no tensors

    def ask(
        self,
        step: Step,
        statics: list[Any],
        outputs: list[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        """Note what the policy says of an operation, and hold what it would save."""
        self.statics.append(statics)
        # They are for `hold_named`. One of several outputs may be named later, and
        # another one be needed, which is gone by then unless it is held here.
        several = len(outputs) > 1 and not (self._policy and self._policy.is_in_order)
        self._outputs.append(outputs if several else [*map(weakref.ref, outputs)])
        decision, found, storages = Decision.RECOMPUTE, outputs, step.makes
        if step.is_collective:
            decision, found, storages = self._decide(step.op), written, step.writes
        elif step.reads and not (
            step.always_runs or step.writes or any(map(Tensor.is_inference, outputs))
        ):
            decision = self._decide(step.op)
        self._decisions.append(decision)
        if decision:
            for t, s in zip(found, storages, strict=True):
                self._hold(t, s)

    def _decide(self, op: Op) -> Decision:
        assert self._policy is not None
        try:
            return self._policy(op)
        except Exception as error:  # noqa: BLE001 - raised at the end
            # Raised here, a TypeError would make `a + b` say that it takes no tensors.
            self._error = self._error or error
            return Decision.RECOMPUTE

    def _hold(self, tensor: Tensor | None, number: int) -> None:
        if tensor is None or number in self._held or is_lazy(tensor):
            return
        if is_strided(tensor) or sees_operations(tensor):
            self._held[number] = tensor

    def hold_named(self, number: int, tensor: Tensor, steps: Sequence[Step]) -> None:
        """Hold a value that got a name: the policy is asked again by that."""
        for outputs, step in zip(self._outputs, steps, strict=False):
            if number in step.makes and number not in step.reads:
                for ref, s in zip(outputs, step.makes, strict=True):
                    self._hold(ref() if isinstance(ref, weakref.ref) else ref, s)
                # The output itself may be gone, and only a view of it be left.
                self._hold(tensor, number)
                return

    def end(self) -> None:
        """Hold the values without their graph; raise what the policy raised.

        What nobody can differentiate is no root of a plan.
        """
        self._outputs.clear()
        # What is held is of no level of torch.func, and would be made one of this.
        pairs = self._held.items()
        self._held = {n: below_all_levels(Tensor.detach, t) for n, t in pairs}
        if self._error is not None:
            raise self._error

    def decisions(self, record: Record, exposed: Container[int]) -> list[Decision]:
        """Return what the policy says of each operation, by its names too."""
        policy = self._policy
        if policy is None:
            return decisions_of(None, record, exposed)
        pairs = [*zip(record.steps, self._decisions, strict=True)]
        kept = ((step.op, decision) for step, decision in pairs if decision)
        for op, decision in kept if policy.may_count else ():
            if policy(op) is not decision:
                warn(_COUNTS.format(policy=policy, op=op.func))
                break
        if not policy.is_in_order:
            self._decisions = [policy(s.op) if s.op.names else d for s, d in pairs]
        return decisions_of(policy, record, exposed, self._decisions)

    def residuals(
        self, values: Sequence[Value], storages: Sequence[int]
    ) -> list[Tensor]:
        """Return the outputs that were made with storages, of which views were held."""
        found: list[Tensor] = []
        for value, number in zip(values, storages, strict=True):
            held = self._held[number]
            if not (value_of(held) == value or has_no_memory(held)):
                held = viewed(held, value.shape, value.stride, value.offset)
            found.append(held)
        return found

    def has(self, numbers: Iterable[int]) -> bool:
        """Say whether all these storages were held."""
        return self._held.keys() >= {*numbers}


_COUNTS = (
    "remat: {policy} was asked twice about one {op}, and answers differ: it counts, "
    "or remembers. A policy is asked while the first call is recorded, and its answers "
    "hold for later calls. Write op.nth for how many of its operator ran before, or "
    "remat.policies.every_other(policy)."
)


def decisions_of(
    policy: Policy | None,
    record: Record,
    exposed: Container[int],
    given: Iterable[Decision] = (),
) -> list[Decision]:
    """Return what a policy says of each operation of a record, or has said: `given`.

    What made an exposed storage is recomputed. Python may have written to its memory,
    where no version counts it.
    """
    if policy is None:
        return [Decision.RECOMPUTE] * len(record.steps)
    found = [*given] or [policy(step.op) for step in record.steps]
    for i, step in enumerate(record.steps):
        if any(s in exposed for s in step.makes):
            found[i] = Decision.RECOMPUTE
    return overwritten(record, found)


def overwritten(record: Record, decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions, where what a collective overwrites is saved for it."""
    found = [*decisions]
    for j, made in overwrites(record).items():
        for i in made:
            found[i] |= decisions[j]
    return found


def moves(decision: Decision, outputs: Sequence[Value]) -> bool:
    """Say whether a result is offloaded: what is in host memory stays in it."""
    away = any(value.device.type != "cpu" for value in outputs)
    return decision is Decision.OFFLOAD_TO_DISK or (decision.offloads and away)
