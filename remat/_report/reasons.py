"""Says why each operation of a record has its fate.

Called by `explain`.

Invariant: a reason is read off the record and the plan, never off tensors. If there are
several reasons, the one nearest to the backward is given: a backward that reads the
value comes before a recomputed operation that does.
Rejected: reasons noted while planning. The planner's walk may meet a value by another
way first.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from remat._base.op import Op
from remat._base.source import short
from remat._partial.plan import Fate, Plan, Record, Step


_SHOWN = 2  # at most so many readers are named
_UNTOLD = "perhaps read by the backward of a change to a view, or of a function in C++"


def name(op: Op) -> str:
    """Return the name of an operation: `mm`."""
    return getattr(op.packet, "__name__", str(op.packet))


def _reads(step: Step) -> bool:
    """Say whether an operation reads values, and not only metadata."""
    return not step.is_view and len(step.metadata_only) < max(1, len(step.makes))


class Reasons:
    """The reasons for the fates of one plan.

    Args:
        record: of a forward.
        plan: made of the record.
        readers: for each storage, what reads it in the backward.
        itself: the storages that the graph saves itself, without a handle.
        exposed: the storages whose memory Python reads.
        unpruned: why nothing is left out; "" if it may be.
    """

    def __init__(
        self,
        record: Record,
        plan: Plan,
        readers: Mapping[int, Sequence[str]],
        itself: Collection[int] = (),
        exposed: Collection[int] = (),
        unpruned: str = "",
    ) -> None:
        self._record, self._plan, self._readers = record, plan, readers
        self._exposed, self._unpruned, self._itself = exposed, unpruned, itself
        self._users: dict[int, list[int]] = {}
        for i, step in enumerate(record.steps):
            for s in {*step.reads}:
                self._users.setdefault(s, []).append(i)

    def of_operation(self, i: int) -> str:
        """Say why an operation is saved, recomputed or left out."""
        step, fate = self._record.steps[i], self._plan.fates[i]
        touched = {*step.makes, *step.writes}
        if fate is Fate.SAVED:
            return f"the policy saves it, {self._use(touched, i)}"
        if fate is Fate.DEAD:
            return self._unused(touched, i)
        use = self._use(touched, i) or (_forced(step) if step.always_runs else "")
        if use or self._unpruned:
            return use or f"nothing is left out: {self._unpruned}"
        return self._drawn(i)

    def of_input(self, s: int) -> str:
        """Say why an input of that storage is needed; "" if it is not."""
        return self._use({s}, -1)

    def _use(self, touched: set[int], after: int) -> str:
        """Say what reads any of the storages; "" if nothing does."""
        if not touched.isdisjoint(self._roots()):
            each = (self._readers.get(s, ()) for s in sorted(touched))
            names = dict.fromkeys(chain.from_iterable(each))
            return f"read by the backward of {_listed(names)}" if names else _UNTOLD
        if not touched.isdisjoint(self._exposed):
            return "its value is read outside of operations"
        fates = self._plan.fates
        users = [i for i in self._users_of(touched) if i > after]
        running = [i for i in users if fates[i].is_run]
        return f"read by {self._steps(running)}" if running else ""

    def _roots(self) -> frozenset[int]:
        return frozenset(self._itself).union(*self._record.roots)

    def _unused(self, touched: set[int], i: int) -> str:
        users = [j for j in self._users_of(touched) if j > i]
        if users:
            readers = self._steps(users)
            return f"read only by operations that are not recomputed: {readers}"
        if touched.isdisjoint(s for s in self._record.outputs if s is not None):
            return "nothing reads it"
        return "a result that the backward does not read"

    def _users_of(self, storages: Iterable[int]) -> list[int]:
        """Return the operations that read values in any of the storages."""
        users = chain(*(self._users.get(s, ()) for s in storages))
        return [i for i in sorted({*users}) if _reads(self._record.steps[i])]

    def _steps(self, indices: Sequence[int]) -> str:
        ops = [self._record.steps[i].op for i in indices]
        return _listed(
            dict.fromkeys(
                f"{name(op)} ({short(op.source, with_module=False)})" for op in ops
            )
        )

    def _drawn(self, i: int) -> str:
        """Say why an operation that draws runs although its result is not needed."""
        steps = self._record.steps
        later = [j for j in range(i + 1, len(steps)) if steps[j].draws]
        needed = [j for j in later if self._use({*steps[j].makes}, j)]
        if not needed:
            return "draws random numbers, which advances a stream"
        return f"draws random numbers before {self._steps(needed[:1])}, which is needed"


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
    if not (step.makes or step.writes):
        return "it returns no tensor, so it runs for its side effects"
    return "remat cannot see what it reads and writes"
