"""A policy by place: what a plan for a whole step saves, call by call of its modules.

Each call of a module has a list of its own operations, with which those that run are
aligned: as few as possible more or fewer. So a difference ends with its call.
Invariant: an answer depends on the operations so far, not on sizes. What is not in the
plan is recomputed. If an operation that the plan saves does not run, the operands of
the next planned operation are saved instead: they may be all that a block saves.
Rejected: to follow by position in the step, or to go on at the next operation of the
same name: one operation more, and all that followed was recomputed.
"""

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from typing_extensions import override

from remat._base.calls import OUTSIDE, CallPlace, Calls, ModuleCall
from remat._base.context import here
from remat._base.op import Op
from remat._scope.values import BETWEEN
from remat._torch.operators import is_view_op
from remat.policies import Decision, Policy


class Placed(NamedTuple):
    """The operations of one place: names, what becomes of results, and bytes."""

    place: CallPlace
    names: tuple[str, ...]
    saves: tuple[bool, ...]
    # Why no backward reads results. Until the forward ends, what is not planned may
    # read those that pass, so that they are recomputed, and not held.
    unread: tuple[int, ...]
    sizes: tuple[int, ...]
    # The positions of saved results that are recomputed where what was not planned
    # takes as much.
    spares: frozenset[int] = frozenset()


_NOTHING = Placed(OUTSIDE, (), (), (), ())


@dataclass(frozen=True)
class Course:
    """The operations of one kind of forward, by place."""

    placed: tuple[Placed, ...]
    # Whether gradients that are there when a step begins are counted.
    counts_gradients: bool = True
    over: int = 0  # the bytes of a step over its budget; less than 0 for what is left
    # What was said about steps that differ, and whether one was as planned.
    told: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all results."""
        return sum(sum(each.sizes) for each in self.placed)

    @cached_property
    def _by_place(self) -> dict[CallPlace, Placed]:
        return {each.place: each for each in self.placed}

    @cached_property
    def roots(self) -> frozenset[str]:
        """The outermost modules."""
        return frozenset(place[0] for place in self._by_place)

    @cached_property
    def paths(self) -> frozenset[str]:
        """The modules that are called in these."""
        return frozenset(place[2] for place in self._by_place)

    @cached_property
    def _counts(self) -> dict[Any, int]:
        """How many calls there are of an outermost module, and of each path in each."""
        counts: dict[Any, int] = {}
        for root, turn, path, number in self._by_place:
            for key, k in (root, turn), ((root, turn, path), number):
                counts[key] = max(counts.get(key, 0), k + 1)
        return counts

    def at(self, place: CallPlace) -> Placed:
        """Return what is planned for a place. More calls than planned begin again."""
        found = self._by_place.get(place)
        if found is not None or place[2] not in self.paths:
            return found or _NOTHING
        root, turn, path, number = place
        turn %= self._counts.get(root, 1)
        number %= self._counts.get((root, turn, path), 1)
        return self._by_place.get((root, turn, path, number), _NOTHING)


class Cursor:
    """How far one call has come in the operations that are planned for it."""

    __slots__ = ("agreed", "at", "costs", "course", "placed")

    def __init__(self, course: int, placed: Placed) -> None:
        self.course, self.placed, self.at = course, placed, 0
        # After a difference: where it may be, and how many there are up to there.
        self.costs: dict[int, int] | None = None
        self.agreed = 0  # operations since

    def align(self, name: str) -> int:
        """Return the position of an operation in the list, -1 if it has none.

        One more, one fewer and another one cost 1. To pass over many costs 1 if the
        name is there once.
        """
        names = self.placed.names
        if self.costs is None:
            self.costs, self.agreed = _with_fewer({self.at: 0}, len(names)), 0
        costs = self.costs
        found = {p: cost + 1 for p, cost in costs.items()}
        for p, cost in costs.items():
            if p < len(names):
                found[p + 1] = min(cost + 1, found.get(p + 1, _FAR))
        met = {p: c for p, c in costs.items() if names[p : p + 1] == (name,)}
        if names.count(name) == 1 and (p := names.index(name)) >= self.at:
            met[p] = min(met.get(p, _FAR), min(costs.values()) + 1)
        for p, cost in met.items():
            found[p + 1] = min(cost, found.get(p + 1, _FAR))
        least = min(found.values())
        at = min(met, key=lambda p: (met[p], p < self.at, p), default=-1)
        if at >= 0 and met[at] > least:
            at = -1
        is_next = at == self.at
        self.at = min(p for p, c in found.items() if c == least) if at < 0 else at + 1
        self.agreed = 0 if at < 0 else self.agreed + 1 if is_next else 1
        is_sure = self.agreed >= _SURE
        self.costs = None if is_sure else _with_fewer(found, len(names))
        return at


def _with_fewer(costs: dict[int, int], count: int) -> dict[int, int]:
    """Add the positions that are reached where operations are missing."""
    limit, last = min(costs.values()) + _APART, max(costs)
    cost = _FAR
    found: dict[int, int] = {}
    for p in range(min(costs), count + 1):
        cost = min(costs.get(p, _FAR), cost + 1)
        if cost <= limit:
            found[p] = cost
        elif p > last:
            break
    return found


_FAR = 1 << 30
_APART = 8  # by how many operations two alignments may differ
_HELD = 8  # of so many that were not planned one is held until it is read
_SURE = 4  # operations that agree, after which there is one alignment


class ByPlace(Policy):
    """Answers as a plan says, operation by operation of each call."""

    is_by_place = True

    def __init__(self, label: str, courses: Sequence[Course]) -> None:
        self._label, self._courses = label, courses
        self.calls = Calls(frozenset().union(*(each.roots for each in courses)))
        self._course = 0  # the one that is followed, until a module is called
        self._is_chosen = len(courses) < 2
        # Until a step was as planned, what is saved is decided one operation later.
        self.is_late = bool(courses) and _AS_PLANNED not in courses[0].told
        self._visited: set[CallPlace] = set()
        # The bytes that were planned and did not run, or run and were not planned.
        self._off = 0
        # Not planned bytes since something was saved, the most of these, and those of
        # spare results that are not saved for them.
        self._extra = self._most_extra = self._spared = 0
        # Of the first results of calls: their bytes as planned, and those that differ.
        self._sized = self._resized = 0
        self._first = ""  # difference
        self._unplanned = 0  # operations

    @property
    @override
    def is_data(self) -> bool:
        return False

    @override
    def decide(self, op: Op) -> Decision:
        """Return what the plan says about the next operation of the call that runs."""
        # A result has names where a scope asks again, after it was not saved.
        if op.names:
            return Decision.RECOMPUTE
        calls, name = self.calls, str(op.func)
        if calls.ended and self._courses:
            self._leave(calls.ended)
        call = calls.current
        cursor: Cursor | None = call.cursor
        if cursor is None:
            if self.put_off:
                self._go_on()
            if not self._is_chosen and len(calls.running) > 1:
                self._choose(calls.running[1].module)
            call.cursor = cursor = self._begun(self._course, call.place)
            self._compare(op, name, cursor.placed)
        at, placed = cursor.at, cursor.placed
        names = placed.names
        if at < len(names) and names[at] == name and cursor.costs is None:
            cursor.at = at + 1
        else:
            at, placed = self._found(op, name, call)
            if at < 0:
                self._unplanned += 1
                self.unread = BETWEEN if self._unplanned % _HELD else 0
                self.is_short = bool(self._courses) and self._missing() > 0
                if self.owed and self.is_short:
                    self.owed, self.put_off = 0, self.owed
                return Decision.RECOMPUTE
        if placed.saves[at]:
            is_spared = self._off and self._is_spared(placed, at)
            return Decision.RECOMPUTE if is_spared else Decision.SAVE
        self.unread = placed.unread[at]
        return Decision.RECOMPUTE

    def _choose(self, root: Any) -> None:
        """Choose the course by whether a model has gradients."""
        self._is_chosen, has_gradients = True, _has_gradients(root)
        self._course = min(
            range(len(self._courses)),
            key=lambda k: self._courses[k].counts_gradients != has_gradients,
        )
        course = self._courses[self._course]
        if has_gradients and course.over > 0:
            say_once(self._courses, _GRADIENTS, self._label, f"{course.over:,}")

    def _begun(self, course: int, place: CallPlace) -> Cursor:
        found = self._courses[course].at(place) if self._courses else _NOTHING
        self._visited.add(found.place)
        return Cursor(course, found)

    def _is_spared(self, placed: Placed, at: int) -> bool:
        """Say whether a saved result makes place for what was not planned."""
        is_spared = self._missing() > 0 and at in placed.spares
        self._extra = 0
        if is_spared:
            self._spared += placed.sizes[at]
            self.unread = 0
        self.is_short = self._missing() > 0
        return is_spared

    def _missing(self) -> int:
        """Return how many bytes what was not planned takes over the budget."""
        self._most_extra = max(self._most_extra, self._extra)
        return self._most_extra + self._courses[self._course].over - self._spared

    def _go_on(self) -> None:
        """Owe what was put off while what ran was not planned."""
        self.owed, self.put_off = self.owed + self.put_off, 0
        self.is_replaced = True

    def _compare(self, op: Op, name: str, placed: Placed) -> None:
        """Note whether the first result of a call has other bytes than planned."""
        names = placed.names
        if names and names[0] == name:
            size, nbytes = placed.sizes[0], op.nbytes
            self._sized += size
            if nbytes == size:
                return
            self._resized += abs(nbytes - size)
            if not self._first:
                made = f"{name} makes {nbytes:,} bytes at {op.source}"
                self._first = f"{size:,} bytes were planned, and {made}"

    def _found(self, op: Op, name: str, call: ModuleCall) -> tuple[int, Placed]:
        """Return where an operation is that is not the next, or -1, and in what."""
        cursor: Cursor = call.cursor
        if self.put_off:
            self._go_on()
        if cursor.costs is None:
            other = self._other(cursor, name, call.place)
            if other is not None:
                call.cursor, self._course = other, other.course
                return other.at - 1, other.placed
        before, names = cursor.at, cursor.placed.names
        self.is_late = True
        self._courses[0].told.discard(_AS_PLANNED)
        if not self._first:
            expected = names[before] if before < len(names) else "nothing more"
            self._first = f"{expected} was planned, and {name} runs at {op.source}"
        at = cursor.align(name)
        if at < 0:
            self._off += op.nbytes
            self._extra += op.nbytes
        else:
            self._pass_over(cursor.placed, before, at)
        return at, cursor.placed

    def _pass_over(self, placed: Placed, first: int, end: int) -> None:
        """Note that operations do not run."""
        each = zip(placed.saves[first:end], placed.sizes[first:end], strict=True)
        for saves, size in each:
            self._off += size
            self._extra -= size
            self.owed += size if saves else 0
        if first < end and not self._first:
            path = placed.place[2] or "the model"
            self._first = f"{placed.names[first]} was planned in {path}, and is not run"

    def _leave(self, ended: list[ModuleCall]) -> None:
        """Note which operations calls have left out that are over."""
        if self.put_off:
            self._go_on()
        course = self._courses[self._course]
        for call in ended:
            cursor: Cursor | None = call.cursor
            if cursor is not None:
                placed, at = cursor.placed, cursor.at
            elif call.place[2] in course.paths:
                placed, at = course.at(call.place), 0
                self._visited.add(placed.place)
            else:
                continue
            if at < len(placed.names):
                self._pass_over(placed, at, len(placed.names))
        ended.clear()

    def _other(self, cursor: Cursor, name: str, place: CallPlace) -> Cursor | None:
        """Return a beginning, or that of another course, which an operation fits."""
        at, names = cursor.at, cursor.placed.names
        # A `with` may hold several forwards.
        starts = at == len(names) and place == OUTSIDE
        run = () if starts else names[:at]
        for k in range(len(self._courses)):
            other = self._begun(k, place)
            is_other = starts or k != cursor.course
            if is_other and other.placed.names[: len(run) + 1] == (*run, name):
                other.at = len(run) + 1
                return other
        return None

    def end(self) -> None:
        """Tell once if more than a hundredth of the bytes is not as planned."""
        if not (self._courses and self._visited):
            return
        self._leave([*self.calls.ended, *self.calls.running])
        course = self._courses[self._course]
        for placed in course.placed:
            if placed.place not in self._visited:
                self._pass_over(placed, 0, len(placed.names))
        if not self._off:
            self._courses[0].told.add(_AS_PLANNED)
        if self._off * 100 > course.nbytes:
            off, of = self._off, course.nbytes
        elif self._resized * 100 > self._sized:
            off, of = self._resized, self._sized
        else:
            return
        sizes = f"{off:,}", f"{of:,}"
        say_once(self._courses, _OTHER, self._label, *sizes, self._first)


def say_once(courses: Sequence[Course], message: str, *args: Any) -> None:
    """Say something about steps that follow a plan, once for all of them."""
    if courses and message not in courses[0].told:
        courses[0].told.add(message)
        _LOG.info(message, *args)


def _has_gradients(model: Any) -> bool:
    """Say whether the first parameter that learns has a gradient, as all have then."""
    learned = (p for p in model.parameters() if p.requires_grad)
    first = next(learned, None)
    return first is not None and first.grad is not None


_AS_PLANNED = "as planned"
_LOG = logging.getLogger("remat")
_GRADIENTS = (
    "remat: a step that follows the plan for %s begins with gradients, as where these "
    "are accumulated. No plan was found for that under the budget: the step is over it "
    "by up to %s bytes. Pass a larger budget to remat.fit, or set gradients to None "
    "before each step."
)
_OTHER = (
    "remat: a step differs from the plan for %s in %s bytes, where %s were planned: "
    "%s. What is not in the plan is recomputed. Call remat.fit for what runs now, with "
    "the arguments of a step, to have a plan that is exact."
)


# --- Plans for blocks, which are recomputed at once ---


@dataclass(frozen=True, repr=False)
class OfBlock(Policy):
    """Answers as a plan says, operation by operation of a call.

    Operations are aligned with the plan, with as few as possible more or fewer.
    """

    placed: Placed

    is_in_order = True

    @override
    def decide(self, op: Op) -> Decision:
        """Return what the plan says about the next operation of the call that runs."""
        if is_view_op(op.func):
            return Decision.RECOMPUTE
        cursor, name = _AT.cursor(self), str(op.func)
        names, at = cursor.placed.names, cursor.at
        if cursor.costs is None and at < len(names) and names[at] == name:
            cursor.at = at + 1
        else:
            at = cursor.align(name)
        is_saved = at >= 0 and cursor.placed.saves[at]
        return Decision.SAVE if is_saved else Decision.RECOMPUTE

    @override
    def __repr__(self) -> str:
        count = sum(self.placed.saves)
        return f"{count} of {len(self.placed.saves)} results"


class _InBlocks(threading.local):
    """Where the call is that asked last in a thread."""

    def __init__(self) -> None:
        self._call: Any = None
        self._of: OfBlock | None = None
        self._cursor: Cursor | None = None

    def cursor(self, policy: OfBlock) -> Cursor:
        call = here().nested_choices
        before = None if self._call is None else self._call()
        if self._cursor is None or self._of is not policy or call is not before:
            self._call = None if call is None else weakref.ref(call)
            self._of, self._cursor = policy, Cursor(0, policy.placed)
        elif call is None and self._cursor.at == len(policy.placed.names):
            self._cursor = Cursor(0, policy.placed)
        return self._cursor


_AT = _InBlocks()
