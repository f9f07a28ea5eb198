"""Finds the schedule of a chain that a user gave a budget of bytes.

`_call` asks before a chain runs that is differentiated.

Invariant: steps that are alike are measured once. What cannot be measured runs without
a budget, and a warning says so, once the steps have run: an error in them is raised by
the chain.
Rejected: to measure each call. It takes as long as some sixty steps on fake tensors.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from remat._base.errors import BudgetError
from remat._report.render import mebibytes
from remat._torch import VMAP, batch_size, current_layer, kind_of
from remat.chain._alike import Kind, kind_of_chain
from remat.chain._budget import LoopBudget, StepBytes, chosen, least, online
from remat.chain._forward import ChainCall
from remat.chain._measure import measured
from remat.chain._online import Online
from remat.chain._segments import Sqrt
from remat.chain._staged import Staged, chosen_staged, least_staged
from remat.chain._steps import Steps
from remat.chain.schedules import Schedule


def schedule_within(
    budget: LoopBudget,
    call: ChainCall,
    called: tuple[Any, tuple[Any, ...]],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[Schedule, str]:
    """Return the schedule with the least work that stays under a budget."""
    layer, steps = current_layer(), call.steps
    if layer is not None and kind_of(layer) == VMAP:
        return Sqrt(), _OUTSIDE.format(label=steps.label)
    batch = batch_size()
    inside = replace(budget, nbytes=budget.nbytes // batch)
    kind = kind_of_chain(call, called[0], inputs, needs, inside)
    numbers = _KNOWN.get(kind)
    if numbers is None:
        numbers = measured(*called, steps, inside.nbytes, is_batched=batch > 1)
        if isinstance(numbers, Exception):
            other = Sqrt() if steps.length is not None else Online(_ONLINE)
            return other, _UNMEASURED.format(label=steps.label, error=numbers)
        _KNOWN.add(kind, numbers)
    found, few = _chosen(numbers, steps, inside)
    if found is None:
        raise _too_small(budget.nbytes, few * batch, steps.label)
    return found, ""


_ONLINE = 10  # checkpoints of a loop that cannot be measured


def _chosen(
    numbers: StepBytes | Staged, steps: Steps, budget: LoopBudget
) -> tuple[Schedule | None, int]:
    """Return the schedule; where none fits, the bytes of one that needs the fewest."""
    length = steps.length
    if isinstance(numbers, Staged):
        return _of_stages(numbers, budget.nbytes, budget.disk)
    if length is None:
        return online(numbers, budget.nbytes), numbers.between(1)
    found = chosen(numbers, length, budget)
    return found, 0 if found else least(numbers, length).nbytes


@functools.lru_cache(64)  # to follow all schedules takes long
def _of_stages(numbers: Staged, nbytes: int, disk: bool) -> tuple[Schedule | None, int]:
    found = chosen_staged(numbers, LoopBudget(nbytes, disk))
    return found, 0 if found else least_staged(numbers).nbytes


def _too_small(nbytes: int, few: int, label: str) -> BudgetError:
    shown = {"budget": mebibytes(nbytes), "least": mebibytes(few), "bytes": few}
    return BudgetError(_TOO_SMALL.format(label=label, **shown), few)


class _Known:
    """What was measured, by kind. The least recently used is forgotten first.

    A step that counts refers to another number in each call. Once some measurements
    with other numbers were all the same, no more are made.
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._found: OrderedDict[Hashable, dict[int, StepBytes | Staged]]
        self._found = OrderedDict()

    def get(self, kind: Kind) -> StepBytes | Staged | None:
        """Return what was measured of a kind; None if nothing was."""
        with self._lock:
            found = self._found.get(kind.code)
            if found is None:
                return None
            self._found.move_to_end(kind.code)
            if len(found) == _TIMES and len({*found.values()}) == 1:
                return next(iter(found.values()))
            return found.get(kind.numbers)

    def add(self, kind: Kind, numbers: StepBytes | Staged) -> None:
        """Remember what was measured."""
        with self._lock:
            found = self._found.setdefault(kind.code, {})
            found[kind.numbers] = numbers
            if len(found) > _TIMES:
                del found[next(iter(found))]
            if len(self._found) > self._size:
                self._found.popitem(last=False)


_TIMES = 4
_KNOWN = _Known(128)


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
    "remat: budget={budget} is too small for {label}. The least that works is {least} "
    "(budget={bytes}). It holds the carries that are stored, and the steps that run at "
    "a time. Pass more, or make a step smaller, for example by policy=."
)
