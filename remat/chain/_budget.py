"""Budgets of bytes: what a step takes, and which schedule stays under one.

A few steps run on fake tensors, under a meter. Then closed forms say what schedules of
such steps hold, and how many steps run again.

Invariant: bytes are those of stored carries, of the live carry, and of the steps that
run at a time. Arguments, results and the gradients of both come on top. A step that is
measured runs as the chain runs it, by the chain's own forward, segments and reversal.
What it reaches is put back: objects, buffers and random streams. No dispatch mode sees
it; a print or a write to a file is seen.
Rejected: the peak of a whole training step as a budget. A loop does not know what else
is alive: `remat.fit` does. Rejected: a record of one step, and a formula of what
autograd keeps of it. Policies, chains inside of steps and shared memory would each need
one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from remat import _torch
from remat._base.context import differentiated
from remat._base.program import Request, replaced_at
from remat._base.sizes import Unit, amount_in
from remat._base.types import TENSORS
from remat._fit.meter import Meter, MissingValueError
from remat._fit.simulate import isolated
from remat._partial.cache import CACHES
from remat._report.timeline import has_storage
from remat.chain._actions import Reverse, Schedule
from remat.chain._chain import Chain, Reversing
from remat.chain._forward import ChainCall, call_of
from remat.chain._schedules import Binomial, Online, Uniform
from remat.chain._segment import segment_from
from remat.chain._steps import Live, Steps, tensors_and_frame


TOGETHER = 32  # steps that are reversed together, at most
_SLOTS = 2**20  # of a loop whose carries take no bytes


@dataclass(frozen=True, slots=True)
class LoopBudget:
    """What a user asks for in place of checkpoints; `policy` is that of the steps."""

    nbytes: int
    policy: Any = None
    unit: Unit = "B"  # in which it was given


def budget_of(
    taker: str, budget: int | str, policy: Any, others: Mapping[str, object]
) -> LoopBudget:
    """Return the budget that a user asks for, who passes none of the others."""
    for name, value in others.items():
        if value is not None:
            shown = {"taker": taker, "budget": budget, "name": name, "value": value}
            raise ValueError(_BOTH.format(**shown))
    nbytes, unit = amount_in(budget, taker)
    return LoopBudget(nbytes, policy, unit)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes of a step that is like all others."""

    carry: int
    cotangent: int  # of a carry
    advance: int  # what exists beside the carry before, while a step runs
    # The same while so many steps are run again and reversed: with the cotangents, and
    # without what the gradients of arguments take.
    reverse: tuple[tuple[int, int], ...]

    @property
    def together(self) -> int:
        """How many steps may be reversed together."""
        return self.reverse[-1][0]

    def reversing(self, count: int) -> int:
        """Return the bytes of reversing so many steps, at most `together`.

        Each of the operations of a segment takes what grows with its steps, and the
        peak is the largest. So it is convex, and a line between two of its points is
        above it. A line beyond them would not be.
        """
        assert count <= self.together, "nothing is known of so many steps"
        above = next(k for k, (steps, _) in enumerate(self.reverse) if steps >= count)
        steps, nbytes = self.reverse[above]
        if steps == count:
            return nbytes
        fewer, less = self.reverse[above - 1]
        return less + -(-(nbytes - less) * (count - fewer) // (steps - fewer))

    def between(self, unroll: int) -> int:
        """Return the bytes beside stored carries: to advance, or to reverse a unit."""
        advance = self.advance + self.cotangent
        return self.carry + max(advance, self.reversing(unroll))


def counts_together(length: int) -> list[int]:
    """Return how many steps of a chain to reverse together, to measure it.

    Example:
        >>> counts_together(5), counts_together(1000)
        ([1, 2, 4, 5], [1, 2, 4, 8, 16, 32])
    """
    powers = [2**k for k in range(TOGETHER.bit_length())]
    return [
        *(n for n in powers if n < length),
        *([length] if length <= TOGETHER else ()),
    ]


class Priced(NamedTuple):
    """A schedule, its peak, and how many steps it runs again."""

    nbytes: int
    cost: int
    schedule: Schedule


def chosen(
    step: StepBytes, length: int | None, nbytes: int
) -> tuple[Schedule | None, int]:
    """Return the schedule with the least work that fits, or None; and the least bytes.

    Of those with as much work, it is the first one.
    """
    if length is None:
        slots = max(1, _slots(step, nbytes - step.between(1), _SLOTS))
        options = [_priced(step, Online(slots), 0)]
    else:
        options = [*_of_steps(step, length, nbytes)]
    fitting = [option for option in options if option.nbytes <= nbytes]
    found = min(fitting, key=lambda option: option.cost, default=None)
    least = min(option.nbytes for option in options)
    return None if found is None else found.schedule, least


def _of_steps(step: StepBytes, length: int, nbytes: int) -> Iterator[Priced]:
    """Yield schedules of equal steps: segments, then those with fewer carries.

    Segments run each step twice, which is the least, and the longest come first.
    """
    together = min(step.together, length)
    for size in range(together, 0, -1):
        count = -(-length // size)
        runs = max(step.carry + step.advance, step.reversing(-(-length // count)))
        yield Priced((count - 1) * step.carry + runs, length, Uniform(count))
    yield _binomial(step, length, 1, 1)
    for unroll in range(1, together + 1):
        free = nbytes - step.between(unroll)
        slots = _slots(step, free, -(-length // unroll))
        if slots:
            yield _binomial(step, length, slots, unroll)


def _slots(step: StepBytes, free: int, most: int) -> int:
    """Return how many carries may be stored, with the first, which is an argument."""
    if free < 0:
        return 0
    return min(free // step.carry + 1, most) if step.carry else most


def _priced(step: StepBytes, schedule: Binomial | Online, cost: int) -> Priced:
    unroll = schedule.unroll if isinstance(schedule, Binomial) else 1
    nbytes = (schedule.checkpoints - 1) * step.carry + step.between(unroll)
    return Priced(nbytes, cost, schedule)


def _binomial(step: StepBytes, length: int, slots: int, unroll: int) -> Priced:
    schedule = Binomial(slots, unroll)
    return _priced(step, schedule, schedule.evaluations(length).backward)


_BOTH = (
    "remat: {taker} got budget={budget!r} and {name}={value!r}: pass one of them. A "
    "budget chooses the checkpoints."
)


# --- What a step takes ---


def measured(
    fn: Any, args: tuple[Any, ...], steps: Steps, nbytes: int, *, is_batched: bool
) -> StepBytes | Exception:
    """Return the numbers of the steps of a chain, as they are inside all vmaps."""
    lengths: Sequence[int] = (steps.length or 0,)
    if steps.length is None:  # there may be fewer than are tried
        lengths = len(tensors_and_frame(args[0])[0]) + 2, 2, 1
    error: Exception = RuntimeError()
    # Fake kernels refuse some of what the real ones compute.
    for is_real in (False,) if is_batched else (False, True):
        for length in lengths:
            known = replace(steps, length=length, goes_on=None)
            try:
                with _ALONE:
                    return _measured(fn, args, known, nbytes, is_real=is_real)
            except Exception as raised:  # noqa: BLE001 - the chain raises what is wrong
                error = raised.with_traceback(None)
    return error


# Only one trial at a time: what it sets aside is of the whole process.
_ALONE = threading.RLock()


def _measured(
    fn: Any,
    args: tuple[Any, ...],
    steps: Steps,
    nbytes: int,
    *,
    is_real: bool,
    count: int = 2,
) -> StepBytes:
    """Try some steps, and more of them if carries after these are unlike others."""
    trial = call_of(fn, args, steps, Uniform(1))
    assert trial is not None
    assert steps.length is not None
    trial.length = min(steps.length, count)  # what is scanned is as long as all steps
    passed, needs = trial.take_inputs()
    trial.wrapped = ()  # it runs below all levels
    if not (is_real or TENSORS.issuperset(map(type, map(_torch.base_tensor, passed)))):
        raise MissingValueError("of tensors of other classes there are no fakes")
    mode, chain = None if is_real else _torch.fake_mode(), Chain(trial)

    def run() -> StepBytes:
        inputs = (
            [_torch.empty_in(mode, t) for t in passed]
            if mode
            else _copies(chain, passed)
        )
        with _torch.grad_mode(False), mode or nullcontext(), Meter() as meter:
            for tensor in inputs:
                meter.hold(tensor)
            rehearsal = Rehearsal(chain, inputs, needs, meter)
            return _step_of(rehearsal, nbytes, is_real=is_real)

    try:
        with (
            _torch.outside_all_dispatch_modes(),
            isolated(),
            CACHES.set_aside(),
            _set_back(trial),
        ):
            return _torch.below_all_levels(run)
    except Unsettled as unsettled:
        count = unsettled.steps
    return _measured(fn, args, steps, nbytes, is_real=is_real, count=count)


def _copies(chain: Chain, passed: Sequence[Tensor]) -> list[Tensor]:
    """Return the values of the inputs; of buffers, copies."""
    updated = {*chain.call.reach.buffers}
    values = [_torch.base_tensor(t).detach() for t in passed]
    return [t.clone() if i in updated else t for i, t in enumerate(values)]


@contextmanager
def _set_back(trial: ChainCall) -> Iterator[None]:
    """Put all that the steps reach back, and random streams."""
    streams = trial.reach.streams
    states = [stream.read() for stream in streams]
    try:
        # It is as for a recompute, which leaves everything as it was before.
        with trial.reach.restored(trial.reach.alive()):
            yield
    finally:
        for stream, state in zip(streams, states, strict=True):
            stream.write(state)


class Unsettled(Exception):  # noqa: N818
    """Carries of the first steps are unlike those after them."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


def _step_of(rehearsal: "Rehearsal", nbytes: int, *, is_real: bool) -> StepBytes:
    """Return the numbers of a step that is like those after it."""
    length = rehearsal.call.steps.length
    assert length is not None
    lives, taken = rehearsal.settled()
    last = len(lives) - 1
    carry = rehearsal.size(lives[-1])
    advance = max(*taken, rehearsal.forward_bytes - carry)

    def reversing(count: int) -> int:
        start = min(last, length - count)
        live = lives[start]
        return rehearsal.reversed(live, Reverse(start, start + count))

    reversing(1)  # from the second time on the gradients of arguments are there
    reverse = {1: reversing(1)}
    cotangent = rehearsal.cotangent
    for count in counts_together(length)[1:]:
        before = max(reverse.values())
        # More steps take more, and real ones are not to take that much.
        if (2 * before if is_real else before) > nbytes:
            break
        reverse[count] = reversing(count)
    return StepBytes(carry, cotangent, advance, tuple(reverse.items()))


class Rehearsal:
    """A forward of a trial that has run, and steps of it that run again."""

    def __init__(
        self,
        chain: Chain,
        inputs: Sequence[Tensor],
        needs: Sequence[bool],
        meter: Meter,
    ) -> None:
        self._chain, self._meter, self.call = chain, meter, chain.call
        request = Request(needs, at_base=True)
        (outs, evaluation), peak = self._measured(chain.evaluate, inputs, request)
        updated = evaluation.updated  # buffers, whose values from before come last
        if updated:
            inputs = replaced_at(inputs, updated, outs[-len(updated) :])
        self.inputs = inputs  # with the values of buffers from before the forward
        places = chain.call.outs
        # What the forward took, without what was collected.
        self.forward_bytes = peak - _nbytes([outs[j] for j in places.of_collected])
        given = [*places.of_carry, *places.of_collected]
        given = [j for j in given if evaluation.differentiable[j]]
        cotangents = {j: outs[j].new_zeros(outs[j].shape) for j in given}
        wanted = [i for i, need in enumerate(needs) if need]
        self.run = Reversing(chain, inputs, wanted, cotangents)

    def settled(self) -> tuple[list[Live], list[int]]:
        """Run steps until carries are alike; return these, and what steps took.

        The first may hold tensors that were passed, and need no gradients yet.
        """
        lives = [self.call.first(self.inputs)]
        taken: list[int] = []
        assert self.call.steps.length is not None
        most = min(self.call.steps.length, len(lives[0].tensors) + 2)
        while len(taken) < most:
            bounds = len(taken), len(taken) + 1
            segment, given = segment_from(self._chain, lives[-1], self.inputs, bounds)
            live, found = self._measured(segment.advance, given)
            taken.append(found)
            if self._form(live) == self._form(lives[-1]) and len(taken) > 1:
                break
            lives.append(live)
        if len(lives) - 1 > max(self.call.length, 1):
            raise Unsettled(len(lives))
        # The last one is the result where the chain has no more steps.
        return lives[: self.call.steps.length], taken

    def _form(self, live: Live) -> tuple[int, Sequence[bool]]:
        return self.size(live), [*live.needs]

    def reversed(self, live: Live, action: Reverse) -> int:
        """Reverse steps from a carry; return the most bytes they took.

        The cotangents that they were given count; new gradients of arguments do not.
        """
        given, before = self.cotangent, _nbytes(self.run.gradients.values())
        self.run.live = live
        with differentiated(), self.run.surroundings:
            _, peak = self._measured(self.run.do, action)
        return peak + given - _nbytes(self.run.gradients.values()) + before

    @property
    def cotangent(self) -> int:
        """The bytes of the cotangents of a carry."""
        return _nbytes(self.run.carried)

    def size(self, live: Live) -> int:
        """Return the bytes of a carry, without those of inputs of the chain."""
        return _nbytes(live.tensors, self.inputs)

    def _measured(self, call: Callable[..., Any], *args: Any) -> tuple[Any, int]:
        """Call; return the result, and the most bytes beside those from before."""
        meter = self._meter
        before = meter.live
        meter.begin()
        found = call(*args)
        meter.end()
        return found, meter.peak - before


def _nbytes(tensors: Iterable[Tensor], others: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the storages of tensors, without those of others."""
    known = {_torch.storage_id(t) for t in others if has_storage(t)}
    there = {_torch.storage_id(t): t for t in tensors if has_storage(t)}
    left = there.keys() - known
    return sum(there[number].untyped_storage().nbytes() for number in left)
