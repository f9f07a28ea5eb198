"""Finds the schedule of a chain that a user gave a budget of bytes.

`_call` asks before a chain runs that is differentiated.

Invariant: steps that are alike are measured once. What is remembered holds no tensor,
and no object or function of the user's.
Rejected: to measure each call. It takes as long as some twenty steps on fake tensors.
"""

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from remat._base.errors import BudgetError
from remat._base.types import INERT
from remat._partial.cache import metas_of
from remat._partial.decide import warn_once
from remat._report.render import mebibytes
from remat._torch import VMAP, batch_size, current_layer, kind_of
from remat.chain._budget import LoopBudget, StepBytes, chosen, least, online
from remat.chain._forward import ChainCall
from remat.chain._measure import measured
from remat.chain._segments import Sqrt
from remat.chain._staged import Staged, chosen_staged, least_staged
from remat.chain._steps import Functions, Steps
from remat.chain.schedules import Schedule
from remat.policies import Policy


def schedule_within(
    budget: LoopBudget,
    call: ChainCall,
    called: tuple[Any, tuple[Any, ...]],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> Schedule:
    """Return the schedule with the least work that stays under a budget.

    Args:
        budget: what the user asks for.
        call: the chain.
        called: its function, and its arguments.
        inputs: its tensors.
        needs: which of them are differentiated.

    Raises:
        BudgetError: none does. The error names the least budget.
    """
    layer, steps = current_layer(), call.steps
    if layer is not None and kind_of(layer) == VMAP:
        warn_once(_OUTSIDE.format(label=steps.label))
        return Sqrt()
    batch = batch_size()
    inside = replace(budget, nbytes=budget.nbytes // batch)
    key = _key(call, called[0], inputs, needs, inside)
    found = _KNOWN.get(key)
    if found is None:
        numbers = measured(*called, steps, inside.nbytes, is_batched=batch > 1)
        found = _found(numbers, steps, inside)
        _KNOWN.add(key, found)
    if found.schedule is None:
        raise _too_small(budget.nbytes, found.least * batch, steps.label)
    return found.schedule


class Found(NamedTuple):
    """What was found for a budget.

    Attributes:
        schedule: None if none fits.
        least: the bytes of the one that needs the fewest, where none fits.
    """

    schedule: Schedule | None
    least: int = 0


def _found(
    numbers: StepBytes | Staged | None, steps: Steps, asked: LoopBudget
) -> Found:
    """Choose by the numbers of the steps."""
    length = steps.length
    if numbers is None:
        warn_once(_VALUES.format(label=steps.label))
        return Found(Sqrt())
    if isinstance(numbers, Staged):
        return Found(chosen_staged(numbers, asked), least_staged(numbers).nbytes)
    if length is None:
        return Found(online(numbers, asked.nbytes), numbers.between(1))
    return Found(chosen(numbers, length, asked), least(numbers, length).nbytes)


def _too_small(nbytes: int, few: int, label: str) -> BudgetError:
    shown = {"budget": mebibytes(nbytes), "least": mebibytes(few), "bytes": few}
    return BudgetError(_TOO_SMALL.format(label=label, **shown), few)


# --- What is remembered ---


class _Known:
    """What was found, by key. The least recently used is forgotten first."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._found: OrderedDict[Hashable, Found] = OrderedDict()

    def get(self, key: Hashable) -> Found | None:
        """Return what was found for a key; None if it was not looked for."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def add(self, key: Hashable, found: Found) -> None:
        """Remember what was found."""
        with self._lock:
            self._found[key] = found
            if len(self._found) > self._size:
                self._found.popitem(last=False)


_KNOWN = _Known(128)


def _key(
    call: ChainCall,
    fn: Any,
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    budget: LoopBudget,
) -> Hashable:
    """Return what is equal for chains whose steps are alike.

    The signature tells code and the types of objects. A step may also depend on
    numbers that it refers to, and on what objects hold.
    """
    metas = metas_of(inputs), tuple(needs), call.steps.length
    asked, referred = (budget.nbytes, budget.disk), _Referred()
    return (
        call.snapshot.signature,
        metas,
        asked,
        *referred.to(fn),
        *referred.to(budget.policy),
    )


class _Same:
    """An object, weakly: equal to itself alone, whatever its class says of equality."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, value: Any) -> None:
        self._hash, self._ref = id(value), weakref.ref(value)

    @override
    def __hash__(self) -> int:
        return self._hash

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        value = self._ref()
        return value is not None and value is other._ref()


class _Referred:
    """Walks through what a function refers to, each value once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def to(self, value: Any) -> Iterator[Hashable]:
        """Yield numbers, and objects weakly."""
        if type(value) in INERT:
            yield repr(value)
        elif not isinstance(value, Tensor) and id(value) not in self._seen:
            self._seen.add(id(value))
            parts = _parts(value)
            if parts is None:
                yield _weakly(value)
            else:
                for part in parts:
                    yield from self.to(part)


def _parts(value: Any) -> Iterable[Any] | None:
    """Return what a function or a container is made of; None of other objects."""
    wrapped = getattr(value, "__wrapped__", None)
    if callable(wrapped):
        return (wrapped,)
    if isinstance(value, Policy):
        return (value.cache_key,)
    if isinstance(value, Functions):
        return value.fns
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        return [*map(_content, value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, (list, tuple)) else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _weakly(value: Any) -> Hashable:
    try:
        return _Same(value)
    except TypeError:
        return type(value)


_OUTSIDE = (
    "remat: {label} is differentiated outside of a vmap, where no checkpoints are "
    "stored: its budget is not kept. Its backward holds about sqrt(n) carries. "
    "Differentiate inside of the vmap: vmap(grad(f))."
)
_VALUES = (
    "remat: the steps of {label} ask for values, so they cannot be measured under a "
    "vmap: the budget is not kept, and about sqrt(n) segments are recomputed. Pass "
    "checkpoints= instead."
)
_TOO_SMALL = (
    "remat: budget={budget} is too small for {label}. The least that works is {least} "
    "(budget={bytes}). It holds the carries that are stored, and the steps that run at "
    "a time. Pass more, or make a step smaller, for example by policy=."
)
