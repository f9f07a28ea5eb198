"""Budgets of bytes: what a step takes, and which schedule stays under one.

A few steps run on fake tensors, under a meter. Then closed forms say what schedules of
such steps hold, and how many steps run again.

Invariant: bytes are those of stored carries, of the live carry, and of the steps that
run at a time. Arguments, results and the gradients of both come on top. What is
measured is the chain's own forward, segments and reversal; what it reaches is put back.
Rejected: the peak of a whole training step as a budget. A loop does not know what else
is alive: `remat.fit` does. Rejected: to measure each call, or to compare the identity
of objects to tell which are alike. A closure is a new one in each call.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from remat._ambient.ambient import Ambient
from remat._base.context import differentiated
from remat._base.errors import BudgetError
from remat._base.program import Request, replaced_at
from remat._base.sizes import Unit, amount_in, in_unit
from remat._base.types import TENSORS
from remat._fit.meter import Meter, MissingValueError
from remat._fit.simulate import isolated
from remat._partial.decide import CACHES, metas_of
from remat._report.inputs import streams_kept
from remat._report.timeline import has_storage
from remat._torch import levels, modes
from remat._torch.autograd import grad_mode
from remat._torch.tensors import empty_in, fake_mode, storage_id
from remat.chain._actions import Reverse, Schedule
from remat.chain._chain import Chain, Reversing
from remat.chain._forward import ChainCall, call_of
from remat.chain._schedules import Binomial, Online, Sqrt, Uniform
from remat.chain._segment import segment_from
from remat.chain._steps import Live, Steps, tensors_and_frame
from remat.policies import Policy


# --- What a user asks for ---


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


_BOTH = (
    "remat: {taker} got budget={budget!r} and {name}={value!r}: pass one of them. A "
    "budget chooses the checkpoints."
)


Called: TypeAlias = tuple[Any, tuple[Any, ...]]  # a function, and its arguments


def schedule_within(
    budget: LoopBudget,
    call: ChainCall,
    called: Called,
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[Schedule, str]:
    """Return the schedule with the least work that stays under a budget; or a warning.

    The chain warns once its steps have run: an error in them is raised first.
    """
    layer, steps = levels.current_layer(), call.steps
    if layer is not None and levels.kind_of(layer) == levels.VMAP:
        return Sqrt(), _OUTSIDE.format(label=steps.label)
    batch = levels.batch_size()
    inside = replace(budget, nbytes=budget.nbytes // batch)
    step = _of_kind(
        *_kind_of(call, inputs, needs, inside),
        lambda: measured(called, steps, inside.nbytes, is_batched=batch > 1),
    )
    if isinstance(step, Exception):
        other = Sqrt() if steps.length is not None else Online(_ONLINE)
        return other, _UNMEASURED.format(label=steps.label, error=step)
    found, few = chosen(step, steps.length, inside.nbytes)
    if found is None:
        few *= batch
        sizes = {"budget": budget.nbytes, "least": few}
        shown = {name: in_unit(n, budget.unit) for name, n in sizes.items()}
        raise BudgetError(_TOO_SMALL.format(label=steps.label, **shown), few)
    return found, ""


_ONLINE = 10  # checkpoints of a loop that cannot be measured
_OUTSIDE = (
    "remat: {label} is differentiated outside of a vmap, where no checkpoints are "
    "stored: its budget is not kept. Its backward holds about sqrt(n) carries. "
    "Differentiate inside of the vmap: vmap(grad(f))."
)
_UNMEASURED = (
    "remat: the steps of {label} could not be measured, so the budget is not kept. "
    "Pass checkpoints= instead. ({error})"
)
_TOO_SMALL = (
    "remat: a budget of {budget} is too small for {label}. The least that works is "
    "{least}. It holds the carries that are stored, and the steps that run at a time. "
    "Pass more, or make a step smaller, for example by policy=."
)


# --- Chains that are alike ---


# What was measured, by kind, and for each by the numbers that its steps refer to.
_KNOWN: dict[Hashable, dict[int, "StepBytes"]] = {}
_KINDS, _TIMES = 128, 4
# Only one trial at a time: what it sets aside is of the whole process.
_ALONE = threading.RLock()


def _of_kind(
    kind: Hashable, numbers: int, measure: Callable[[], "StepBytes | Exception"]
) -> "StepBytes | Exception":
    """Return what was measured of a kind of chains, or measure one.

    A step that counts refers to another number in each call. Once some measurements
    with other numbers were all the same, no more are made.
    """
    with _ALONE:
        known = _KNOWN.setdefault(kind, {})
        if len(_KNOWN) > _KINDS:
            del _KNOWN[next(iter(_KNOWN))]
        if numbers in known:
            return known[numbers]
        costs = {*known.values()}
        if len(known) == _TIMES and len(costs) == 1:
            return costs.pop()
        found = measure()
        if not isinstance(found, Exception):
            known[numbers] = found
            if len(known) > _TIMES:
                del known[next(iter(known))]
        return found


def _kind_of(
    call: ChainCall, inputs: Sequence[Tensor], needs: Sequence[bool], budget: LoopBudget
) -> tuple[Hashable, int]:
    """Return what chains have in common whose steps are alike.

    That is the code, with shapes and settings, and a hash of the numbers that it leads
    to. Nothing of the user's is held.
    """
    steps = call.steps
    # A trial runs at most so many steps: longer chains are alike.
    most = TOGETHER + len(call.initial) + 2
    is_long = (steps.length or 0) > most
    rows = {*call.scanned} if is_long else ()
    wholes = [t for i, t in enumerate(inputs) if i not in rows]
    shapes = metas_of(wholes), *((inputs[i].shape[1:], inputs[i].dtype) for i in rows)
    settings = Ambient().key, torch.get_default_dtype()
    length = None if is_long else steps.length
    code = call.reach.signature, shapes, tuple(needs), settings, length
    policy = budget.policy
    rules = policy.cache_key if isinstance(policy, Policy) else policy
    first = getattr(steps.apply, "args", ())  # of `fori_loop`: its first number
    numbers = call.reach.moment(inputs).numbers
    return (code, budget.nbytes, first), hash((rules, *numbers))


# --- Which schedule ---


TOGETHER = 32  # steps that are reversed together, at most
_SLOTS = 2**20  # of a loop whose carries take no bytes


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes of a step that is like all others."""

    carry: int
    cotangent: int  # of a carry
    advance: int  # what exists beside the carry before, while a step runs
    # The same while so many steps are run again and reversed: with the cotangents, and
    # without what the gradients of arguments take.
    reverse: tuple[tuple[int, int], ...]

    def reversing(self, count: int) -> int:
        """Return the bytes of reversing so many steps.

        Each of the operations of a segment takes what grows with its steps, and the
        peak is the largest. So it is convex, and a line between two of its points is
        above it. A line beyond them would not be.
        """
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


def chosen(
    step: StepBytes, length: int | None, nbytes: int
) -> tuple[Schedule | None, int]:
    """Return the schedule with the least work that fits, or None; and the least bytes.

    Of those with as much work, it is the first one.
    """
    options = [*_options(step, length, nbytes)]
    fitting = [option for option in options if option[0] <= nbytes]
    found = min(fitting, key=lambda option: option[1], default=None)
    return None if found is None else found[2], min(option[0] for option in options)


def _options(
    step: StepBytes, length: int | None, nbytes: int
) -> Iterator[tuple[int, int, Schedule]]:
    """Yield schedules of equal steps, with their bytes and how many steps run again.

    Segments run each step twice, which is the least, and the longest come first. Then
    come schedules with fewer carries; the one with the fewest holds the least.
    """

    def slots(unroll: int, most: int) -> int:
        # With that of the first carry, which is an argument.
        free = nbytes - step.between(unroll)
        count = min(free // step.carry + 1, most) if step.carry else most
        return max(count if free >= 0 else 0, int(unroll == 1))

    if length is None:
        count = slots(1, _SLOTS)
        yield (count - 1) * step.carry + step.between(1), 0, Online(count)
        return
    together = min(step.reverse[-1][0], length)
    for size in range(together, 0, -1):
        count = -(-length // size)
        runs = max(step.carry + step.advance, step.reversing(-(-length // count)))
        yield (count - 1) * step.carry + runs, length, Uniform(count)
    for unroll in range(1, together + 1):
        if count := slots(unroll, -(-length // unroll)):
            schedule = Binomial(count, unroll)
            held = (count - 1) * step.carry + step.between(unroll)
            yield held, schedule.evaluations(length).backward, schedule


# --- What a step takes ---


def measured(
    called: Called, steps: Steps, nbytes: int, *, is_batched: bool
) -> StepBytes | Exception:
    """Return the numbers of the steps of a chain, as they are inside all vmaps."""
    most = len(tensors_and_frame(called[1][0])[0]) + 2
    lengths: Sequence[int] = (steps.length or 0,)
    if steps.length is None:  # there may be fewer than are tried
        lengths = most, 2, 1
    error: Exception = RuntimeError()
    # Fake kernels refuse some of what the real ones compute.
    for is_real in (False,) if is_batched else (False, True):
        for length in lengths:
            known = replace(steps, length=length, goes_on=None)
            try:
                for count in 2, most:
                    found = _tried(called, known, nbytes, count, is_real=is_real)
                    if found is not None:
                        return found
            except Exception as raised:  # noqa: BLE001 - the chain raises what is wrong
                error = raised.with_traceback(None)
    return error


def _tried(
    called: Called, steps: Steps, nbytes: int, count: int, *, is_real: bool
) -> StepBytes | None:
    """Try so many steps; None if carries after these are unlike others."""
    trial = call_of(*called, steps, Uniform(1))
    assert trial is not None
    assert steps.length is not None
    trial.length = min(steps.length, count)  # what is scanned is as long as all steps
    passed, needs = trial.take_inputs()
    trial.wrapped = ()  # it runs below all levels
    if not (is_real or TENSORS.issuperset(map(type, map(levels.base_tensor, passed)))):
        raise MissingValueError("of tensors of other classes there are no fakes")
    mode, chain = None if is_real else fake_mode(), Chain(trial)

    def run() -> StepBytes | None:
        like = [empty_in(mode, t) for t in passed] if mode else None
        inputs = like or _copies(chain, passed)
        with grad_mode(False), mode or nullcontext(), Meter() as meter:
            for tensor in inputs:
                meter.hold(tensor)
            rehearsal = Rehearsal(chain, inputs, needs, meter)
            return rehearsal.step(nbytes, is_real=is_real)

    reach = trial.reach
    with (
        modes.outside_all_dispatch_modes(),
        isolated(),
        CACHES.set_aside(),
        streams_kept(reach.streams),
        reach.restored(reach.alive()),  # as for a recompute
    ):
        return levels.below_all_levels(run)


def _copies(chain: Chain, passed: Sequence[Tensor]) -> list[Tensor]:
    """Return the values of the inputs; of buffers, copies."""
    updated = {*chain.call.reach.buffers}
    values = [levels.base_tensor(t).detach() for t in passed]
    return [t.clone() if i in updated else t for i, t in enumerate(values)]


class Rehearsal:
    """A forward of a trial that has run, and steps of it that run again."""

    def __init__(
        self,
        chain: Chain,
        inputs: Sequence[Tensor],
        needs: Sequence[bool],
        meter: Meter,
    ) -> None:
        self._chain, self._meter, self._call = chain, meter, chain.call
        request = Request(needs, at_base=True)
        (outs, evaluation), peak = self._measured(chain.evaluate, inputs, request)
        updated = evaluation.updated  # buffers, whose values from before come last
        if updated:
            inputs = replaced_at(inputs, updated, outs[-len(updated) :])
        self._inputs = inputs  # with the values of buffers from before the forward
        places = chain.call.outs
        # What the forward took, without what was collected.
        self._forward = peak - _nbytes([outs[j] for j in places.of_collected])
        given = [*places.of_carry, *places.of_collected]
        given = [j for j in given if evaluation.differentiable[j]]
        cotangents = {j: outs[j].new_zeros(outs[j].shape) for j in given}
        wanted = [i for i, need in enumerate(needs) if need]
        self._run = Reversing(chain, inputs, wanted, cotangents)

    def step(self, nbytes: int, *, is_real: bool) -> StepBytes | None:
        """Return the numbers of a step that is like those after it; None if unlike."""
        length = self._call.steps.length
        assert length is not None
        lives, taken = self._settled(length)
        if len(lives) - 1 > max(self._call.length, 1):
            return None
        del lives[length:]  # the result, where the chain has no more steps
        carry = _nbytes(lives[-1].tensors, self._inputs)

        def reversing(count: int) -> int:
            start = min(len(lives) - 1, length - count)
            return self._reversed(lives[start], Reverse(start, start + count))

        reversing(1)  # from the second time on the gradients of arguments are there
        reverse = {1: reversing(1)}
        cotangent = _nbytes(self._run.carried)
        tried = sorted({2, 4, 8, 16, TOGETHER, length})
        for count in [n for n in tried if 1 < n <= min(length, TOGETHER)]:
            before = max(reverse.values())
            # More steps take more, and real ones are not to take that much.
            if (2 * before if is_real else before) > nbytes:
                break
            reverse[count] = reversing(count)
        advance = max(*taken, self._forward - carry)
        return StepBytes(carry, cotangent, advance, tuple(reverse.items()))

    def _settled(self, length: int) -> tuple[list[Live], list[int]]:
        """Run steps until carries are alike; return these, and what steps took.

        The first may hold tensors that were passed, and need no gradients yet.
        """
        lives = [self._call.first(self._inputs)]
        taken: list[int] = []
        while len(taken) < min(length, len(lives[0].tensors) + 2):
            last, bounds = lives[-1], (len(taken), len(taken) + 1)
            segment, given = segment_from(self._chain, last, self._inputs, bounds)
            live, found = self._measured(segment.advance, given)
            taken.append(found)
            forms = [
                (_nbytes(c.tensors, self._inputs), [*c.needs]) for c in (last, live)
            ]
            if forms[0] == forms[1] and len(taken) > 1:
                break
            lives.append(live)
        return lives, taken

    def _reversed(self, live: Live, action: Reverse) -> int:
        """Reverse steps from a carry; return the most bytes they took.

        The cotangents that they were given count; new gradients of arguments do not.
        """
        run = self._run
        given, before = _nbytes(run.carried), _nbytes(run.gradients.values())
        run.live = live
        with differentiated(), run.surroundings:
            _, peak = self._measured(run.do, action)
        return peak + given - _nbytes(run.gradients.values()) + before

    def _measured(self, call: Callable[..., Any], *args: Any) -> tuple[Any, int]:
        """Call; return the result, and the most bytes beside those from before."""
        meter = self._meter
        before = meter.live
        meter.begin()
        found = call(*args)
        meter.settle()
        return found, meter.peak - before


def _nbytes(tensors: Iterable[Tensor], others: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the storages of tensors, without those of others."""
    known = {storage_id(t) for t in others if has_storage(t)}
    there = {storage_id(t): t for t in tensors if has_storage(t)}
    left = there.keys() - known
    return sum(there[number].untyped_storage().nbytes() for number in left)
