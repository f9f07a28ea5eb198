"""What a call does with its operations and inputs, and why.

Invariant: nothing is decided here: `_partial/decide.py` is asked, as by a call. Of
several reasons, the one nearest to the backward is given: a backward that reads the
value comes before a recomputed operation.
Rejected: reasons noted while planning. The planner's walk may meet a value by another
way first.
"""

import dataclasses
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from remat._base.op import Op
from remat._base.operators import unit
from remat._base.source import short
from remat._partial.budget import Spent, cost_of
from remat._partial.candidates import decisions_of, moves
from remat._partial.cost import flops
from remat._partial.decide import plans_of, why_no_record
from remat._partial.options import Options, Prune
from remat._partial.plan import CallPlan, Fate, Step, plan
from remat._report.examine import Examined
from remat._report.reports import (
    ExplainedBudget,
    ExplainedInput,
    ExplainedOp,
    Explanation,
    FateName,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call does under its options."""

    plan: CallPlan
    unpruned: str  # why nothing is left out; "" if it may be
    unread: frozenset[int] = frozenset()  # the leaves that no recompute has to read
    dropped: frozenset[int] = frozenset()  # not kept; the graph may save the others
    offloaded: frozenset[int] = frozenset()  # operations whose results are offloaded
    spent: Spent | None = None  # what the budget of the policy keeps


def outcome_of(found: Examined, options: Options) -> Outcome:
    """Return what a call does under its options."""
    policy, prune, record = options.policy, options.prune, found.record
    is_saved = not options.higher_order
    cache = found.kind.cache(policy, prune, found.owner)
    given_up = (cache.reason or found.situation.given_up) if is_saved else ""
    call = dataclasses.replace(found.situation, is_saved=is_saved, given_up=given_up)
    outcome, filled = None, ()
    why = why_no_record(policy, prune, call)
    if not why:
        decisions = decisions_of(policy, record, found.exposed)
        roots = found.exposed.union(cache.plans.extra_roots if cache.plans else ())
        plans, why = plans_of(record, decisions, policy, prune, roots)
        if not why:
            pairs = enumerate(zip(record.steps, decisions, strict=True))
            # What is in host memory stays in it.
            away = frozenset(i for i, (step, d) in pairs if moves(d, step.op.outputs))
            dropped = _dropped(found, plans.full.plan, prune, is_saved=is_saved)
            rest = dropped, dropped, away, plans.spent
            outcome = Outcome(plans.full.plan, plans.unpruned, *rest)
            filled = plans.residual_of_handle if is_saved else ()
    outcome = outcome or Outcome(plan(record, prune=False), why)
    return _stopped(outcome, found, filled) if is_saved else outcome


def _dropped(
    found: Examined, made: CallPlan, prune: Prune, *, is_saved: bool
) -> frozenset[int]:
    """Return the leaves that a call under a plan does not keep."""
    if prune is not True:
        return frozenset()
    needs = frozenset() if is_saved else found.needs
    may_drop = made.may_drop
    each = enumerate(found.leaves)
    may_go = (i for i, leaf in each if not leaf.kept)
    return frozenset(i for i in may_go if may_drop(i, is_differentiated=i in needs))


def _stopped(outcome: Outcome, found: Examined, filled: Container[int]) -> Outcome:
    """Have a recompute stop when the last handle is filled, of those not `filled`.

    If there is none to fill, it does not start, and reads no input.
    """
    record = found.record
    wanted = [
        pack.after
        for k, (pack, roots) in enumerate(zip(record.packs, record.roots, strict=True))
        if pack is not None and roots and k not in filled
    ]
    last = max(wanted, default=0)
    fates = tuple(
        fate if i < last or fate is Fate.SAVED else Fate.DEAD
        for i, fate in enumerate(outcome.plan.fates)
    )
    unread = outcome.unread if wanted else frozenset(range(len(record.inputs)))
    return dataclasses.replace(
        outcome,
        plan=dataclasses.replace(outcome.plan, fates=fates),
        unread=unread,
        dropped=frozenset(i for i in unread if record.inputs[i] not in found.itself),
    )


# --- What becomes of it, and why ---


_SHOWN = 2  # at most so many readers are named
_UNTOLD = "perhaps read by the backward of a change to a view, or of a function in C++"


class Fates:
    """What becomes of the operations and inputs of a call under its options."""

    def __init__(self, found: Examined, options: Options) -> None:
        self._found, self._record, self._options = found, found.record, options
        self.outcome = outcome_of(found, options)
        self._fates = self.outcome.plan.fates
        self._roots = found.itself.union(*found.record.roots)
        # The storages that inputs and residuals keep alive, each counted once.
        self._counted: set[int] = set()
        # For each storage, the operations that read values in it, and not metadata.
        self._users: dict[int, list[int]] = {}
        for i, step in enumerate(found.record.steps):
            if not step.is_view and len(step.metadata_only) < max(1, len(step.makes)):
                for s in {*step.reads}:
                    self._users.setdefault(s, []).append(i)

    def explained(self, label: str, plainly: Examined) -> Explanation:
        """Return the report, without advice and a peak."""
        found, outcome = self._found, self.outcome
        inputs = tuple(map(self._input, range(len(found.leaves))))
        ops = tuple(map(self._operation, range(len(self._fates)), found.times))
        # The one node of such a call holds its inputs and residuals, and nothing else.
        is_one_node = self._options.higher_order
        held = frozenset() if is_one_node else found.itself - self._counted
        kept, roots = held | self._counted, frozenset().union(*found.record.roots)
        return Explanation(
            label=label,
            policy=self._options.policy,
            inputs=inputs,
            ops=ops,
            pruned=not outcome.unpruned,
            reason=outcome.unpruned,
            plain_bytes=plainly.nbytes(plainly.saved_by_plain()),
            held_bytes=found.nbytes(held),
            recomputed_bytes=found.bytes_recomputed(kept, roots),
            streams=found.streams,
            budget=self._budget(outcome.spent) if outcome.spent else None,
        )

    def _budget(self, spent: Spent) -> ExplainedBudget:
        kept, budget = spent.solution, spent.policy.budget
        whole = sum(map(cost_of(budget), self._record.steps))
        sizes = budget.nbytes, kept.nbytes, kept.work, whole, kept.gap
        return ExplainedBudget(*sizes, bool(spent.overdrawn))

    def _input(self, i: int) -> ExplainedInput:
        leaf, s, outcome = self._found.leaves[i], self._record.inputs[i], self.outcome
        kept, is_one_node = i not in outcome.dropped, self._options.higher_order
        nbytes = 0 if s in self._counted else self._found.sizes[s]
        if i in self._found.copied and i not in outcome.unread:
            nbytes += leaf.nbytes
        why = self._use({s}, -1)
        if not (why or kept):
            why = "nothing that is recomputed reads it"
        elif not why and outcome.unpruned:
            why = f"nothing is left out: {outcome.unpruned}"
        elif not why and is_one_node and i in outcome.plan.residual_sources:
            why = "a saved value was computed from it, for higher derivatives"
        why = why or leaf.why or "only prune=True lets go of it"
        self._counted |= {s} if kept else set()
        return dataclasses.replace(leaf, nbytes=nbytes, kept=kept, why=why)

    def _operation(self, i: int, within: int) -> ExplainedOp:
        step, fate, plan = self._record.steps[i], self._fates[i], self.outcome.plan
        saved = {step.makes[k] for j, k in plan.residuals if j == i} - self._counted
        self._counted |= saved
        why = self._why(i)
        if within and fate is Fate.DEAD:
            why = f"in the backward of remat({self._found.inside[i]}), within this"
        word: FateName = "recomputed" if within or fate.is_run else "dead"
        if fate is Fate.SAVED:
            word = "offloaded" if i in self.outcome.offloaded else "saved"
        return ExplainedOp(
            name=_name(step.op),
            source=step.op.source,
            outputs=step.op.outputs,
            nbytes=0 if step.is_view else step.op.nbytes,
            flops=flops(step),
            fate=word,
            times=within + fate.is_run,
            kept=self._found.nbytes(saved),
            why=why,
            is_view=step.is_view,
        )

    def _why(self, i: int) -> str:
        """Say why an operation is saved, recomputed or left out."""
        step, fate = self._record.steps[i], self._fates[i]
        unpruned = self.outcome.unpruned
        touched = {*step.makes, *step.writes}
        if fate is Fate.DEAD:
            users = self._users_of(touched, i)
            only = f"read only by operations that are not recomputed: {_listed(users)}"
            return only if users else "the backward does not read it"
        use = self._use(touched, i)
        if fate is Fate.SAVED:
            return f"the policy saves it, {use}"
        if use or (unpruned and not step.always_runs):
            return use or f"nothing is left out: {unpruned}"
        return _forced(step)

    def _use(self, touched: set[int], after: int) -> str:
        """Say what reads any of the storages; "" if nothing does."""
        if not touched.isdisjoint(self._roots):
            each = (self._found.readers.get(s, ()) for s in sorted(touched))
            names = dict.fromkeys(chain.from_iterable(each))
            return f"read by the backward of {_listed(names)}" if names else _UNTOLD
        if not touched.isdisjoint(self._found.exposed):
            return "its value is read outside of operations"
        users = self._users_of(touched, after, self._fates)
        return f"read by {_listed(users)}" if users else ""

    def _users_of(
        self, storages: Iterable[int], after: int, fates: Sequence[Fate] | None = None
    ) -> dict[str, None]:
        """Return the later operations that read the storages, with their lines."""
        found = {i for s in storages for i in self._users.get(s, ()) if i > after}
        run = [i for i in sorted(found) if fates is None or fates[i].is_run]
        ops = [self._record.steps[i].op for i in run]
        lines = (f"{_name(op)} ({short(op.source, with_module=False)})" for op in ops)
        return dict.fromkeys(lines)


def _name(op: Op) -> str:
    if op.func is unit:  # of a function with rules
        return str(op.args[-1]).partition(" (")[0].strip("`")
    return getattr(op.packet, "__name__", str(op.packet))


def _listed(names: Iterable[str]) -> str:
    names = [*names]
    rest = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {rest} more" if rest > 0 else shown


def _forced(step: Step) -> str:
    """Say why an operation runs in every recompute."""
    tags = {tag.name for tag in getattr(step.op.func, "tags", ())}
    if tags & {"data_dependent_output", "dynamic_output_shape"}:
        return "Python reads its result"
    if step.draws:
        return "draws random numbers, so that later operations draw the same"
    return "it runs for its side effects, or remat cannot see what it reads and writes"
