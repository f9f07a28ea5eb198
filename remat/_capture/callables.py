"""Nodes of functions, and of their variables.

Invariant: that of `nodes`. A function that is made again has the code and the globals
of the user's function, and variables of its own.
Rejected: assigning to the variables of the user's functions, and back afterwards.
Other threads read them meanwhile.
"""

import operator
import types
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from typing_extensions import override

from remat._base.types import INERT
from remat._capture.holders import MISSING, content_of
from remat._capture.nodes import Composite, Node, Part, Rebuilding


class CellNode(Composite):
    """A variable of an outer function, which several functions may share.

    Attributes:
        may_hold_itself: whether it may hold a function that it belongs to.
    """

    __slots__ = ("_content", "may_hold_itself")

    def __init__(self, cell: types.CellType) -> None:
        super().__init__()
        self.may_hold_itself = False
        self._content = content_of(cell)

    @override
    def parts(self) -> Iterator[Part]:
        if self._content is not MISSING:
            yield "content", self._content, ""

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        self._content = None

    @override
    def new(self, run: Rebuilding) -> Any:
        """Make an empty cell. What it holds may be the function that it belongs to."""
        new = run.built[self.identity] = types.CellType()
        return new

    def fill(self, run: Rebuilding) -> None:
        """Put in what the variable held."""
        content = self._content
        for child in self.children.values():
            content = child.build(run)
        if content is not MISSING:
            run.built[self.identity].cell_contents = content


class FunctionNode(Composite):
    """A Python function, with its variables and those globals that may change.

    Children are keyed by position for variables, by `(where, name)` for the rest.
    """

    __slots__ = (
        *("_cells", "_entries", "_name"),
        *("code", "scope", "stores", "variables"),
    )

    def __init__(
        self, fn: types.FunctionType, names: Sequence[str], stores: Sequence[str]
    ) -> None:
        super().__init__()
        self.code, self.scope, self.stores = fn.__code__, fn.__globals__, stores
        scope = self.scope
        self.variables = {n: scope[n] for n in names if n in scope}
        self._cells: Any = fn.__closure__ or ()
        self._name = fn.__name__
        self._entries = {
            "__defaults__": fn.__defaults__,
            "__kwdefaults__": fn.__kwdefaults__,
            "__qualname__": fn.__qualname__,
            "__module__": fn.__module__,
            **fn.__dict__,
        }

    @override
    def parts(self) -> Iterator[Part]:
        for i, cell in enumerate(self._cells):
            yield i, cell, self.code.co_freevars[i]
        for name, value in self.variables.items():
            yield ("global", name), value, name
        for name, value in self._entries.items():
            if type(value) not in INERT:  # of most functions, all are
                yield ("entry", name), value, f"{self._name}.{name}"

    @override
    def hold(self, key: Any, node: Node) -> None:
        super().hold(key, node)
        if isinstance(key, tuple):
            where, name = key
            (self.variables if where == "global" else self._entries)[name] = None

    @override
    def settle(self) -> None:
        super().settle()
        self._cells = [self.children.pop(i) for i in range(len(self._cells))]

    @property
    def is_settled(self) -> bool:
        """Whether it does the same as long as nobody changes the function itself."""
        return not (self.children or self.variables or self._cells)

    @override
    def new(self, run: Rebuilding) -> Any:
        fresh = [cell for cell in self._cells if cell.identity not in run.built]
        cells = tuple([cell.build(run) for cell in self._cells])
        scope = self._scope_of_run()
        new = types.FunctionType(self.code, scope, self._name, closure=cells)
        run.built[self.identity] = new  # what it refers to may be this very function
        entries = self._entries.copy()
        for (where, name), child in self.children.items():
            (scope if where == "global" else entries)[name] = child.build(run)
        for name in _SPECIAL:
            setattr(new, name, entries.pop(name))
        new.__dict__.update(entries)
        for cell in fresh:
            cell.fill(run)
        return new

    def _scope_of_run(self) -> dict[str, Any]:
        """Return the globals for a run: a copy if some of them are to be others."""
        scope, then = self.scope, self.variables
        now = map(scope.get, then, repeat(MISSING))
        is_same = all(map(operator.is_, now, then.values()))
        return scope if is_same and not self.stores else {**scope, **then}


_SPECIAL = ("__defaults__", "__kwdefaults__", "__qualname__", "__module__")
