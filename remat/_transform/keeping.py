"""Says what keeps a tensor whose graph should be gone, and which line put it there.

`checks` asks when it refuses a call.

Invariant: nothing of the user's is run. The garbage collector says what refers to the
tensor, and the code of the call which lines store into a thing of that name.
Rejected: to run the function once more under a trace. It would keep a second tensor.
"""

import gc
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from remat._base.installed import is_installed
from remat._base.interpreter import lines_storing
from remat._base.source import shown
from remat._torch import no_torch_functions


class _Place(NamedTuple):
    """Where something is kept.

    Attributes:
        name: of the attribute or the variable; "" if it has none.
        text: that a message has.
    """

    name: str
    text: str

    def around(self) -> "_Place":
        """Return the place of what is in a container there."""
        return self._replace(
            text=f"in {self.text.removeprefix('as ').removeprefix('in ')}"
        )


def keeper_of(leaves: Sequence[Tensor], codes: Iterable[Any]) -> str:
    """Return what keeps a tensor computed from leaves, and the line; "" if unknown.

    Args:
        leaves: of autograd.
        codes: code objects and classes that the call reaches.
    """
    # A mode of ours refuses to look at tensors of other levels.
    with no_torch_functions():
        held = _computed_from(leaves)
    places = [place for tensor in held for place in _places(tensor, [held])]
    places.sort(key=lambda place: not place.name)
    for place in places[:1]:
        line = next(_lines_storing(place.name, codes), "") if place.name else ""
        return f"{place.text}, at {line}" if line else place.text
    return ""


def _computed_from(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose graphs lead to leaves."""
    reach = _Reach(leaves)
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    return [t for t in tensors if t.grad_fn and reach.is_reached(t.grad_fn)]


class _Reach:
    """Tells which nodes of graphs lead to leaves."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = {*map(id, leaves)}
        self._others: set[Any] = set()  # nodes that lead to none

    def is_reached(self, node: Any) -> bool:
        """Say whether a node leads to one of the leaves."""
        todo, seen = [node], set[Any]()
        while todo:
            now = todo.pop()
            if now is None or now in seen or now in self._others:
                continue
            if id(getattr(now, "variable", None)) in self._leaves:
                return True
            seen.add(now)
            todo += [behind for behind, _ in now.next_functions]
        self._others |= seen
        return False


# --- What refers to it ---


def _places(value: Any, ours: list[Any], depth: int = 3) -> Iterator[_Place]:
    """Yield where a value is kept, by name."""
    for owner in gc.get_referrers(value):
        if isinstance(owner, types.FrameType) or any(owner is x for x in ours):
            continue
        place = _place_in(owner, value)
        if place is not None:
            yield place
        elif depth and isinstance(owner, (list, set, tuple, dict)):
            outer = _places(owner, [*ours, value], depth - 1)
            yield from (p.around() for p in outer if p.name)
            yield _Place("", f"in a {type(owner).__name__}")


def _place_in(owner: Any, value: Any) -> _Place | None:
    """Return where in an owner a value is, if that has a name."""
    if isinstance(owner, types.CellType):
        name = _variable(owner)
        return _Place(name, f"as the variable `{name}`") if name else None
    if isinstance(owner, dict):
        name = next((k for k, v in owner.items() if v is value), None)
        if not isinstance(name, str):
            return None
        if "__builtins__" in owner:
            return _Place(name, f"as the global `{name}`")
        holders = [o for o in gc.get_referrers(owner) if _dict_of(o) is owner]
        return _attribute(holders[0], name) if holders else None
    entries = _dict_of(owner)
    name = next((k for k, v in (entries or {}).items() if v is value), None)
    return None if name is None else _attribute(owner, name)


def _attribute(owner: Any, name: str) -> _Place:
    return _Place(name, f"as `{name}` of a {type(owner).__qualname__}")


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _variable(cell: types.CellType) -> str:
    """Return the name that functions have for a cell."""
    for closure in gc.get_referrers(cell):
        for fn in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(fn, types.FunctionType) and fn.__closure__ is closure:
                return fn.__code__.co_freevars[[*map(id, closure)].index(id(cell))]
    return ""


# --- The line that puts it there ---


def _lines_storing(name: str, codes: Iterable[Any]) -> Iterator[str]:
    """Yield the lines that assign to a name, or add to what it names."""
    for code in _functions(codes):
        for line in lines_storing(code, name):
            yield f"{shown(code.co_filename)}:{line}"


def _functions(codes: Iterable[Any]) -> Iterator[types.CodeType]:
    """Yield the code of the user's functions, with those inside of them."""
    for code in codes:
        if isinstance(code, type):
            methods = (v for k, v in vars(code).items() if k != "__init__")
            found = (getattr(method, "__code__", None) for method in methods)
            yield from _functions(method for method in found if method is not None)
        elif isinstance(code, types.CodeType) and not is_installed(code.co_filename):
            yield code
            yield from _functions(code.co_consts)
