"""What a call does with its operations and inputs under its options, and why.

Invariant: nothing is decided here: `_partial/decide.py` is asked, as by a call. Of
several reasons, the one nearest to the backward is given: a backward that reads the
value comes before a recomputed operation.
Rejected: reasons noted while planning. The planner's walk may meet a value by another
way first.
"""

from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import chain

from remat._base.op import Op
from remat._base.operators import unit
from remat._base.source import short
from remat._partial.budget import cost_of
from remat._partial.candidates import decisions_of, moves
from remat._partial.decide import plans_of, why_no_record
from remat._partial.effects import flops
from remat._partial.options import Options
from remat._partial.plan import Fate, plan
from remat._partial.runnable import Plans
from remat._report.examine import Examined
from remat._report.reports import (
    ExplainedBudget,
    ExplainedInput,
    ExplainedOp,
    Explanation,
    FateName,
)


class Fates:
    """What becomes of the operations and inputs of a call under its options."""

    def __init__(self, found: Examined, options: Options) -> None:
        self._found, self._options, log = found, options, found.log
        self._is_saved = not options.higher_order
        # Operations whose results are offloaded; and leaves that no recompute has to
        # read, and those of them that are not kept: the graph may save the others.
        self._away: frozenset[int] = frozenset()
        self._unread: frozenset[int] = frozenset()
        self._spent: ExplainedBudget | None = None
        made, self._unpruned = self._planned()
        self._plan = made.full.plan if made else plan(log, prune=False)
        self._fates, self._dropped = self._plan.fates, self._unread
        if self._is_saved:
            self._stop_early(made.residual_of_handle if made else ())
        self._roots = frozenset(found.itself).union(*log.roots)
        # The storages that inputs and residuals keep alive, each counted once.
        self._counted: set[int] = set()
        # For each storage, the operations that read values in it, and not metadata.
        self._users: dict[int, list[int]] = {}
        for i, step in enumerate(log.steps):
            if not step.is_view and len(step.metadata_only) < max(1, len(step.makes)):
                for s in {*step.reads}:
                    self._users.setdefault(s, []).append(i)

    def _planned(self) -> tuple[Plans | None, str]:
        """Return the plans that the call follows, and why it follows none, or ""."""
        found, log, is_saved = self._found, self._found.log, self._is_saved
        policy, prune = self._options.policy, self._options.prune
        cache = found.kind.cache(policy, prune, found.owner)
        given_up = (cache.reason or found.situation.given_up) if is_saved else ""
        call = replace(found.situation, is_saved=is_saved, given_up=given_up)
        why = why_no_record(policy, prune, call)
        if why:
            return None, why
        decisions = decisions_of(policy, log, found.exposed)
        roots = found.exposed.union(cache.plans.extra_roots if cache.plans else ())
        plans, why = plans_of(log, decisions, policy, prune, roots)
        if why:
            return None, why
        spent = plans.spent
        if spent is not None:
            kept, budget = spent.solution, spent.policy.budget
            whole = sum(map(cost_of(budget), log.steps))
            sizes = budget.nbytes, kept.nbytes, kept.work, whole, kept.gap
            self._spent = ExplainedBudget(*sizes, bool(spent.overdrawn))
        pairs = enumerate(zip(log.steps, decisions, strict=True))
        # What is in host memory stays in it.
        away = (i for i, (step, d) in pairs if moves(d, step.op.outputs))
        self._away = frozenset(away)
        if prune is True:
            needs = () if is_saved else found.needs
            may_drop = plans.full.plan.may_drop
            self._unread = frozenset(
                i
                for i, leaf in enumerate(found.leaves)
                if not leaf.kept and may_drop(i, is_differentiated=i in needs)
            )
        return plans, plans.unpruned

    def _stop_early(self, filled: Container[int]) -> None:
        """Have a recompute stop when the last handle is filled, of those not `filled`.

        If there is none to fill, it does not start, and reads no input.
        """
        log = self._found.log
        wanted = [
            pack.after
            for k, (pack, roots) in enumerate(zip(log.packs, log.roots, strict=True))
            if pack is not None and roots and k not in filled
        ]
        last = max(wanted, default=0)
        self._fates = tuple(
            fate if i < last or fate is Fate.SAVED else Fate.DEAD
            for i, fate in enumerate(self._fates)
        )
        if not wanted:
            self._unread = frozenset(range(len(log.inputs)))
        itself = self._found.itself
        self._dropped = frozenset(
            i for i in self._unread if log.inputs[i] not in itself
        )

    def explained(self, label: str, plainly: Examined) -> Explanation:
        """Return the report, without advice and a peak."""
        found = self._found
        inputs = tuple(map(self._input, range(len(found.leaves))))
        ops = tuple(map(self._operation, range(len(self._fates)), found.times))
        # The one node of a call of a higher order holds its inputs and residuals alone.
        held = frozenset(found.itself - self._counted if self._is_saved else ())
        kept, roots = held | self._counted, frozenset().union(*found.log.roots)
        return Explanation(
            label=label,
            policy=self._options.policy,
            inputs=inputs,
            ops=ops,
            pruned=not self._unpruned,
            reason=self._unpruned,
            plain_bytes=plainly.nbytes(plainly.saved_by_plain()),
            held_bytes=found.nbytes(held),
            recomputed_bytes=found.bytes_recomputed(kept, roots),
            streams=found.streams,
            budget=self._spent,
        )

    # --- What becomes of each, and why ---

    def _input(self, i: int) -> ExplainedInput:
        found, s = self._found, self._found.log.inputs[i]
        leaf, kept = found.leaves[i], i not in self._dropped
        nbytes = 0 if s in self._counted else found.storages.sizes[s]
        if i in found.copied and i not in self._unread:
            nbytes += leaf.nbytes
        why = self._use({s}, -1)
        if not (why or kept):
            why = "nothing that is recomputed reads it"
        elif not why and self._unpruned:
            why = f"nothing is left out: {self._unpruned}"
        why = why or leaf.why or "only prune=True lets go of it"
        self._counted |= {s} if kept else set()
        return replace(leaf, nbytes=nbytes, kept=kept, why=why)

    def _operation(self, i: int, within: int) -> ExplainedOp:
        step, fate = self._found.log.steps[i], self._fates[i]
        saved = {step.makes[k] for j, k in self._plan.residuals if j == i}
        saved -= self._counted
        self._counted |= saved
        why = self._why(i)
        if within and fate is Fate.DEAD:
            why = f"in the backward of remat({self._found.inside[i]}), within this"
        word: FateName = "recomputed" if within or fate.is_run else "dead"
        if fate is Fate.SAVED:
            word = "offloaded" if i in self._away else "saved"
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
        step, fate = self._found.log.steps[i], self._fates[i]
        touched = {*step.makes, *step.writes}
        if fate is Fate.DEAD:
            users = self._users_of(touched, i)
            only = f"read only by operations that are not recomputed: {users}"
            return only if users else "the backward does not read it"
        use = self._use(touched, i)
        if fate is Fate.SAVED:
            return f"the policy saves it, {use}"
        if use or (self._unpruned and not step.always_runs):
            return use or f"nothing is left out: {self._unpruned}"
        tags = {tag.name for tag in getattr(step.op.func, "tags", ())}
        if tags & {"data_dependent_output", "dynamic_output_shape"}:
            return "Python reads its result"
        if step.draws:
            return "draws random numbers, so that later operations draw the same"
        return _UNSEEN

    def _use(self, touched: set[int], after: int) -> str:
        """Say what reads any of the storages; "" if nothing does."""
        if not touched.isdisjoint(self._roots):
            each = (self._found.readers.get(s, ()) for s in sorted(touched))
            names = _listed(chain.from_iterable(each))
            return f"read by the backward of {names}" if names else _UNTOLD
        if not touched.isdisjoint(self._found.exposed):
            return "its value is read outside of operations"
        users = self._users_of(touched, after, are_run=True)
        return f"read by {users}" if users else ""

    def _users_of(
        self, storages: Iterable[int], after: int, *, are_run: bool = False
    ) -> str:
        """Name the later operations that read the storages, with their lines."""
        found = {i for s in storages for i in self._users.get(s, ()) if i > after}
        read = [i for i in sorted(found) if self._fates[i].is_run or not are_run]
        ops = [self._found.log.steps[i].op for i in read]
        where = (short(op.source, with_module=False) for op in ops)
        return _listed(f"{_name(op)} ({at})" for op, at in zip(ops, where, strict=True))


_SHOWN = 2  # at most so many readers are named
_UNTOLD = "perhaps read by the backward of a change to a view, or of a function in C++"
_UNSEEN = "it runs for its side effects, or remat cannot see what it reads and writes"


def _name(op: Op) -> str:
    if op.func is unit:  # of a function with rules
        return str(op.args[-1]).partition(" (")[0].strip("`")
    return getattr(op.packet, "__name__", str(op.packet))


def _listed(each: Iterable[str]) -> str:
    names = [*dict.fromkeys(each)]
    rest = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {rest} more" if rest > 0 else shown
