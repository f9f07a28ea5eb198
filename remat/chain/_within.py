"""Finds the schedule of a chain that a user gave a budget of bytes.

Invariant: steps that are alike are measured once. What cannot be measured runs without
a budget, and a warning says so, once the steps have run: an error in them is raised by
the chain. To tell what is alike, nothing of the user's is held: code and settings,
shapes, and a hash of the numbers that a step refers to. The walk to these is bounded.
Rejected: to measure each call. It takes as long as some sixty steps on fake tensors.
Rejected: the identity of objects. A closure is a new one in each call.
"""

import functools
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from remat._ambient.ambient import Ambient
from remat._base.code import known_code
from remat._base.errors import BudgetError
from remat._base.types import INERT
from remat._partial.cache import metas_of
from remat._report.render import mebibytes
from remat._torch import VMAP, batch_size, current_layer, kind_of
from remat.chain._binomial import Online
from remat.chain._budget import (
    TOGETHER,
    LoopBudget,
    Staged,
    StepBytes,
    chosen,
)
from remat.chain._forward import ChainCall
from remat.chain._measure import measured
from remat.chain._segments import Sqrt
from remat.chain.schedules import Schedule
from remat.policies import Policy


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
    numbers = _KNOWN.get(*kind)
    if numbers is None:
        numbers = measured(*called, steps, inside.nbytes, is_batched=batch > 1)
        if isinstance(numbers, Exception):
            other = Sqrt() if steps.length is not None else Online(_ONLINE)
            return other, _UNMEASURED.format(label=steps.label, error=numbers)
        _KNOWN.add(*kind, numbers)
    found, few = chosen(numbers, steps.length, inside.nbytes, budget.disk)
    if found is None:
        few *= batch
        shown = {"budget": mebibytes(budget.nbytes), "least": mebibytes(few)}
        message = _TOO_SMALL.format(label=steps.label, bytes=few, **shown)
        raise BudgetError(message, few)
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
    "remat: budget={budget} is too small for {label}. The least that works is {least} "
    "(budget={bytes}). It holds the carries that are stored, and the steps that run at "
    "a time. Pass more, or make a step smaller, for example by policy=."
)


# --- Chains that are alike ---


_MOST = 2_000  # values that are walked to


class _Measured:
    """What was measured, by kind. The least recently used is forgotten first.

    A step that counts refers to another number in each call. Once some measurements
    with other numbers were all the same, no more are made.
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._found: OrderedDict[Hashable, dict[int, StepBytes | Staged]]
        self._found = OrderedDict()

    def get(self, code: Hashable, numbers: int) -> StepBytes | Staged | None:
        """Return what was measured of a kind; None if nothing was."""
        with self._lock:
            found = self._found.get(code)
            if found is None:
                return None
            self._found.move_to_end(code)
            if len(found) == _TIMES and len({*found.values()}) == 1:
                return next(iter(found.values()))
            return found.get(numbers)

    def add(self, code: Hashable, numbers: int, costs: StepBytes | Staged) -> None:
        """Remember what was measured."""
        with self._lock:
            found = self._found.setdefault(code, {})
            found[numbers] = costs
            if len(found) > _TIMES:
                del found[next(iter(found))]
            if len(self._found) > self._size:
                self._found.popitem(last=False)


_TIMES = 4
_KNOWN = _Measured(128)


def kind_of_chain(
    call: ChainCall,
    fn: Any,
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    budget: LoopBudget,
) -> tuple[Hashable, int]:
    """Return what chains have in common whose steps are alike.

    That is the code, with shapes and settings, and a hash of the numbers of a step.
    """
    steps = call.steps
    # Of more steps, none more is run to measure them.
    most = TOGETHER + len(call.initial) + 2
    is_long = steps.is_repeated and (steps.length or 0) > most
    rows = {*call.scanned} if is_long else ()
    wholes = [t for i, t in enumerate(inputs) if i not in rows]
    shapes = metas_of(wholes), *((inputs[i].shape[1:], inputs[i].dtype) for i in rows)
    settings = Ambient().key, torch.get_default_dtype()
    length = None if is_long else steps.length
    code = call.snapshot.signature, shapes, tuple(needs), settings, length
    return (code, budget.nbytes), _hash([fn, budget.policy, steps.apply])


def _hash(values: Iterable[Any]) -> int:
    """Hash the numbers that values lead to."""
    todo, seen, found = deque(values), set[int](), list[str]()
    while todo and len(found) < _MOST:
        value = todo.popleft()
        if type(value) in INERT:
            found.append(repr(value))
        elif not isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found.append(type(value).__qualname__)
            todo.extend(_parts(value))
    return hash(tuple(found))


def _parts(value: Any) -> Iterable[Any]:
    """Return what a value refers to."""
    if isinstance(value, (type, types.ModuleType)):
        return ()
    if isinstance(value, Policy):
        return (value.cache_key,)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, dict):
        return *value.keys(), *value.values()
    if isinstance(value, (list, tuple)):
        return value[:_MOST]
    return _attributes(value)


def _parts_of_function(fn: types.FunctionType) -> list[Any]:
    cells = [*map(_content, fn.__closure__ or ())]
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    names = map(fn.__globals__.get, known_code(fn).open)
    return [*cells, *defaults, *names, *vars(fn).values()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _attributes(value: Any) -> list[Any]:
    """Return what an object holds, and what runs where it is called."""
    kind = type(value)
    slots = [name for cls in kind.__mro__ for name in _slots(cls)]
    held = [getattr(value, name, None) for name in slots]
    held += getattr(value, "__dict__", {}).values()
    is_module = isinstance(value, nn.Module)
    return [*held, kind.forward if is_module else kind.__dict__.get("__call__")]


def _slots(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in slots if name not in ("__dict__", "__weakref__")]
