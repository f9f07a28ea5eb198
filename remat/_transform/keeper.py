"""What keeps a graph that should be gone, and the line that put it there.

Invariant: nothing of the user's is run, and nothing that is found is held afterwards.
Rejected: to watch what a call stores. It would cost each call, for an error of few.
"""

import gc
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from remat._base.installed import is_installed
from remat._base.interpreter import lines_storing
from remat._base.source import shown
from remat._base.types import TENSORS
from remat._graph.edges import Edge, edge_of, leads_to
from remat._reach.holders import dict_of
from remat._torch import forget_saved_by_traced, no_torch_functions


def let_go_of_computed(leaves: Sequence[Tensor]) -> None:
    """Take off what may lead back to itself, of tensors and the nodes behind them."""
    computed = _computed_from(leaves)
    seen = {None, *(edge_of(t)[0] for t in leaves)}
    todo: list[Any] = [t.grad_fn for t in computed]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [behind for behind, _ in node.next_functions]
            forget_saved_by_traced(node)
    for tensor in computed:
        if type(tensor) in TENSORS:  # those of other classes hold what they wrap
            vars(tensor).clear()


def keeper_of(leaves: Sequence[Tensor], codes: Iterable[Any]) -> str:
    """Return what keeps a tensor computed from leaves, and the line; "" if unknown.

    The garbage collector says what refers to it, and `codes`, which the call reaches,
    which lines store into a thing of that name. Nothing of the user's is run.
    """
    held = _computed_from(leaves)
    places = [place for tensor in held for place in _places(tensor, [held])]
    name, text = min(places, key=lambda place: not place[0], default=("", ""))
    functions = _functions(codes) if name else ()
    for code in functions:
        for line in lines_storing(code, name):
            return f"{text}, at {shown(code.co_filename)}:{line}"
    return text


def _computed_from(leaves: Sequence[Tensor]) -> list[Tensor]:
    # A mode of ours refuses to look at tensors of other levels.
    with no_torch_functions():
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        ends = {*map(edge_of, leaves)}
        others: set[Edge] = set()
        return [t for t in tensors if t.grad_fn and leads_to(edge_of(t), ends, others)]


def _places(value: Any, ours: list[Any], depth: int = 3) -> Iterator[tuple[str, str]]:
    """Yield where a value is kept: its name there, if it has one, and the text."""
    for owner in gc.get_referrers(value):
        if isinstance(owner, types.FrameType) or any(owner is x for x in ours):
            continue
        name, text = _place_in(owner, value)
        if name:
            yield name, text
        elif depth and isinstance(owner, (list, set, tuple, dict)):
            for name, text in _places(owner, [*ours, value], depth - 1):
                if name:
                    yield name, f"in {text.removeprefix('as ').removeprefix('in ')}"
            yield "", f"in a {type(owner).__name__}"


def _place_in(owner: Any, value: Any) -> tuple[str, str]:
    """Return the name of a value in its owner, if it has one, and the text."""
    if isinstance(owner, types.CellType):
        name = _variable(owner)
        return name, f"as the variable `{name}`"
    held = owner if isinstance(owner, dict) else dict_of(owner)
    entries = held.items() if isinstance(held, dict) else ()
    name = next((k for k, v in entries if v is value), None)
    if not isinstance(name, str):
        return "", ""
    if isinstance(owner, dict):
        if "__builtins__" in owner:
            return name, f"as the global `{name}`"
        owner = next((o for o in gc.get_referrers(owner) if dict_of(o) is owner), None)
        if owner is None:
            return "", ""
    return name, f"as `{name}` of a {type(owner).__qualname__}"


def _variable(cell: types.CellType) -> str:
    """Return the name that functions have for a cell."""
    for closure in gc.get_referrers(cell):
        for fn in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(fn, types.FunctionType) and fn.__closure__ is closure:
                return fn.__code__.co_freevars[[*map(id, closure)].index(id(cell))]
    return ""


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
