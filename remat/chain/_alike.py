"""What tells chains apart whose steps may hold other bytes.

`_within` measures a step once for those that are alike.

Invariant: nothing of the user's is held: code and settings, shapes, and a hash of the
numbers that a step refers to. The walk to these is bounded.
Rejected: the identity of objects. A closure is a new one in each call.
"""

import functools
import types
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from remat._ambient.ambient import Ambient
from remat._base.code import known_code
from remat._base.types import INERT
from remat._partial.cache import metas_of
from remat.chain._budget import TOGETHER, LoopBudget
from remat.chain._forward import ChainCall
from remat.chain._steps import Functions
from remat.policies import Policy


_MOST = 2_000  # values that are walked to


class Kind(NamedTuple):
    """What chains have in common whose steps are alike.

    Attributes:
        code: what it does, with which shapes and settings.
        numbers: a hash of those that its steps refer to.
    """

    code: Hashable
    numbers: int


def kind_of_chain(
    call: ChainCall,
    fn: Any,
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    budget: LoopBudget,
) -> Kind:
    """Return what a chain has in common with those whose steps are alike."""
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
    return Kind((code, budget.nbytes), _hash([fn, budget.policy, steps.apply]))


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
    if isinstance(value, Functions):
        return value.fns
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
