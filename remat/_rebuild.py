"""Rebuild what a search found around other tensors, for one run.

Invariant: nothing the user owns changes, save that `pass_on` hands over what the
function itself assigned in its first run. A function is rebuilt with new cells, a
module or object as a shallow replica, so no other thread and no plain call sees our
tensors.
Rejected: swapping the parameters of the user's own modules for the duration. Code in
another thread would then read a stand-in for `module.weight`, lock or no lock.
"""

import copy
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat import _tree
from remat._code import CONSTANT, global_names
from remat._errors import CaptureError
from remat._objects import (
    attributes,
    changed,
    differing,
    replica_of,
    set_attributes,
)
from remat._replicas import Node, Run, note_modules, pass_on_modules


def build(
    nodes: Mapping[int, Node], tensors: Sequence[Tensor], *, first: bool
) -> tuple[dict[int, Any], Run]:
    """Rebuild searched values.

    Args:
        nodes: what `Search.visit` returned, under any keys.
        tensors: stand in for `Found.tensors`.
        first: whether `pass_on` is to follow.

    Returns:
        The values, and the run that `pass_on` takes.
    """
    run = Run(tensors, first=first)
    built = {key: node.build(run) for key, node in nodes.items()}
    if run.modules:
        note_modules(run)
    return built, run


def pass_on(run: Run) -> None:
    """Let what the function assigned to captured names and attributes reach those.

    Raises:
        CaptureError: it changed a container within a container that holds tensors.
    """
    _pass_on_variables(run)
    pass_on_modules(run)
    for original, replica, before in run.replicas:
        assigned = changed(replica, before)
        if assigned:
            set_attributes(original, assigned)
    for original, ours, before, leaves in run.copies:
        if not is_same(_tree.flatten(before)[0], leaves):
            raise CaptureError(_CHANGED.format(kind=type(original).__name__))
        if type(original) is list and not is_same(ours, before):
            known = {id(v): o for v, o in zip(before, original, strict=True)}
            original[:] = [known.get(id(v), v) for v in ours]
        elif type(original) is dict:
            for name in before.keys() - ours.keys():
                del original[name]
            original.update(differing(ours, before))


def is_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Say whether two sequences are of the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _pass_on_variables(run: Run) -> None:
    for original, cell, ours in run.cells:
        now = _contents(cell)
        if now is not ours and now is not _EMPTY:
            original.cell_contents = now
    for fn, scope, before in run.scopes:
        for name in global_names(fn.__code__).stored:
            if scope.get(name) is not before.get(name):
                fn.__globals__[name] = scope[name]


_CHANGED = (
    "remat: the function changed a container within a captured {kind} that holds "
    "tensors, which a recomputation would do again. Return the new value instead."
)


# --- How to rebuild each kind of value ---


class Composite(Node):
    """A value made of others, which may refer to itself: built once a run.

    Attributes:
        value: the user's own.
        children: how to rebuild those parts that hold tensors.
        live: whether it is to be rebuilt; taken for granted until its search has ended.
        frozen: whether it is to be rebuilt in any case, for what it holds may change.
    """

    __slots__ = ("children", "frozen", "live", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.live = True
        self.frozen = False
        self.children: dict[Any, Node] = {}

    def settle(self) -> "Composite | None":
        """End the search of this value; return it if it is to be rebuilt."""
        self.live = self.frozen or any(
            not isinstance(child, Composite) or child.live
            for child in self.children.values()
        )
        return self if self.live else None

    @override
    def build(self, run: Run) -> Any:
        """Return the value rebuilt, the same one each time in a run."""
        built = run.built.get(id(self))
        if built is None:
            built = self._build(run) if self.live else self.value
            run.built[id(self)] = built
        return built

    def _build(self, run: Run) -> Any:
        raise NotImplementedError


class TreeNode(Composite):
    """A pytree."""

    __slots__ = ("_leaves", "_treedef")

    def __init__(self, value: Any, leaves: list[Any], treedef: _tree.Treedef) -> None:
        super().__init__(value)
        self._leaves, self._treedef = leaves, treedef

    @override
    def _build(self, run: Run) -> Any:
        leaves = list(self._leaves)
        for i, child in self.children.items():
            leaves[i] = child.build(run)
        new = _tree.unflatten(self._treedef, leaves)
        run.copies.append((self.value, new, _shallow(new), leaves))
        return new


def _shallow(tree: Any) -> Any:
    return tree.copy() if type(tree) in (list, dict) else tree


class SetNode(Composite):
    """A set or frozenset."""

    __slots__ = ()

    @override
    def _build(self, run: Run) -> Any:
        children = self.children
        parts = enumerate(self.value)
        return type(self.value)(
            children[k].build(run) if k in children else v for k, v in parts
        )


class PartialNode(Composite):
    """A `functools.partial`."""

    __slots__ = ()

    @override
    def _build(self, run: Run) -> Any:
        fn, args, kwargs = self.children["parts"].build(run)
        return type(self.value)(fn, *args, **kwargs)


class MethodNode(Composite):
    """A bound method."""

    __slots__ = ()

    @override
    def _build(self, run: Run) -> Any:
        parts = [self.value.__func__, self.value.__self__]
        for k, child in self.children.items():
            parts[k] = child.build(run)
        return types.MethodType(*parts)


class WrapperNode(Composite):
    """Another function's remat."""

    __slots__ = ()

    @override
    def _build(self, run: Run) -> Any:
        return self.value.__remat_rewrap__(self.children["fn"].build(run))


class FunctionNode(Composite):
    """A Python function, its children keyed `(where, name)`.

    Its variables and global constants are those of the moment of the search: a loop may
    rebind them since.
    """

    __slots__ = ("_constants", "_contents", "_with_globals")

    def __init__(
        self, fn: types.FunctionType, *, with_globals: bool, frozen: bool
    ) -> None:
        super().__init__(fn)
        self._with_globals = with_globals
        self._constants = constants = _constants(fn) if with_globals else {}
        self._contents = [*map(_contents, fn.__closure__ or ())]
        names = fn.__code__.co_freevars
        # `__class__` stands in every method that calls super().
        closed = frozen and any(name != "__class__" for name in names)
        self.frozen = closed or bool(constants)

    def parts(self) -> Iterator[tuple[Any, Any, str]]:
        """Yield key, value and text of what it may reach."""
        fn: types.FunctionType = self.value
        for i, name, content in self.variables():
            yield ("cell", i), content, name
        for where in ("__defaults__", "__kwdefaults__"):
            if getattr(fn, where):
                yield (where, ""), getattr(fn, where), f"{fn.__name__}.{where}"
        if self._with_globals:
            for name in global_names(fn.__code__).loaded:
                yield ("global", name), fn.__globals__.get(name), name

    def variables(self) -> list[tuple[int, str, Any]]:
        """Return position, name and content of the variables that are assigned."""
        names = self.value.__code__.co_freevars
        found = enumerate(zip(names, self._contents, strict=True))
        return [(i, name, c) for i, (name, c) in found if c is not _EMPTY]

    @override
    def _build(self, run: Run) -> Any:
        fn = self.value
        cells = list(fn.__closure__ or ())
        for i, _, content in self.variables():
            cells[i] = types.CellType(content)
        has_globals = any(where == "global" for where, _ in self.children)
        has_globals = has_globals or bool(self._constants)
        scope = fn.__globals__
        if has_globals:
            scope = {**scope, **self._constants}
        new = types.FunctionType(
            fn.__code__, scope, fn.__name__, fn.__defaults__, tuple(cells)
        )
        new.__kwdefaults__ = fn.__kwdefaults__
        new.__dict__.update(fn.__dict__)
        new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
        # Before the children are built: one of them may be this very function.
        run.built[id(self)] = new
        for (where, key), child in self.children.items():
            built = child.build(run)
            if where == "cell":
                cells[key].cell_contents = built
            elif where == "global":
                scope[key] = built
            else:
                setattr(new, where, built)
        for i, _, _ in self.variables():
            run.cells.append((fn.__closure__[i], cells[i], cells[i].cell_contents))
        if has_globals:
            run.scopes.append((fn, scope, dict(scope)))
        return new


def _constants(fn: types.FunctionType) -> dict[str, Any]:
    """Return the global constants, which a notebook's loop may rebind."""
    scope = fn.__globals__
    names = global_names(fn.__code__).loaded
    return {n: scope[n] for n in names if n in scope and type(scope[n]) in CONSTANT}


_EMPTY = object()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable not assigned yet
        return _EMPTY


class SubclassNode(Composite):
    """An instance of a subclass of dict or list, its children keyed by item."""

    __slots__ = ()

    @override
    def _build(self, run: Run) -> Any:
        new = copy.copy(self.value)
        run.built[id(self)] = new
        base: Any = dict if isinstance(self.value, dict) else list
        for key, child in self.children.items():
            base.__setitem__(new, key, child.build(run))
        return new


class ObjectNode(Composite):
    """An object, its children keyed by attribute.

    Its attributes are those of the moment of the search.
    """

    __slots__ = ("entries",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.entries = attributes(value)

    @override
    def _build(self, run: Run) -> Any:
        replica = replica_of(self.value)
        # Before the children are built: one of them may refer to this very object.
        run.built[id(self)] = replica
        entries = self.entries.copy()
        for name, child in self.children.items():
            entries[name] = child.build(run)
        set_attributes(replica, entries)
        run.replicas.append((self.value, replica, entries))
        return replica
