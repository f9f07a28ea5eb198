"""Rebuild what a search found around other tensors, for one run.

Invariant: nothing the user owns changes, save that `pass_on` hands over what the
function itself assigned in its first run. A function is rebuilt with new cells, a
module or object as a shallow replica, so no other thread and no plain call sees our
tensors.
Rejected: swapping the parameters of the user's own modules for the duration. Code in
another thread would then read a stand-in for `module.weight`, lock or no lock.
"""

import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat import _tree
from remat._code import global_names
from remat._errors import CaptureError


class Run:
    """What building for one run has made, with what it was made from."""

    __slots__ = (
        "built",
        "cells",
        "copies",
        "generators",
        "registries",
        "replicas",
        "scopes",
        "tensors",
    )

    def __init__(
        self, tensors: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> None:
        self.tensors, self.generators = tensors, generators
        self.built: dict[int, Any] = {}
        self.cells: list[tuple[Any, Any, Any]] = []
        self.scopes: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self.copies: list[tuple[Any, Any, Any, list[Any]]] = []
        self.registries: list[tuple[dict[str, Any], ...]] = []
        self.replicas: list[tuple[Any, Any, dict[str, Any]]] = []


def build(
    nodes: Mapping[int, "Node"],
    tensors: Sequence[Tensor],
    generators: Sequence[torch.Generator],
) -> tuple[dict[int, Any], Run]:
    """Rebuild searched values.

    Args:
        nodes: what `Search.visit` returned, under any keys.
        tensors: stand in for `Found.tensors`.
        generators: stand in for `Found.generators`.

    Returns:
        The values, and the run that `pass_on` takes.
    """
    run = Run(tensors, generators)
    return {key: node.build(run) for key, node in nodes.items()}, run


def pass_on(run: Run) -> None:
    """Let what the function assigned to captured names and attributes reach those.

    Raises:
        CaptureError: it changed a captured container that holds tensors.
    """
    _pass_on_variables(run)
    for registry, ours, before in run.registries:
        for name in _changed(ours, before):
            registry[name] = ours[name]
    for original, replica, before in run.replicas:
        now = attributes(replica)
        for name in _changed(now, before):
            object.__setattr__(original, name, now[name])
    for original, copy, treedef, leaves in run.copies:
        now, now_treedef = _tree.flatten(copy)
        same = map(operator.is_, now, leaves)
        if now_treedef != treedef or not all(same):
            raise CaptureError(_CHANGED.format(kind=type(original).__name__))


def _pass_on_variables(run: Run) -> None:
    for original, cell, ours in run.cells:
        if cell.cell_contents is not ours:
            original.cell_contents = cell.cell_contents
    for fn, scope, before in run.scopes:
        for name in global_names(fn.__code__).stored:
            if scope.get(name) is not before.get(name):
                fn.__globals__[name] = scope[name]


def _changed(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [k for k in now if k not in before or now[k] is not before[k]]


_CHANGED = (
    "remat: the function changed a captured {kind} that holds tensors, which a "
    "recomputation would do again. Return the new value instead, or pass the {kind} as "
    "an argument."
)


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds, in its `__dict__` and its slots."""
    held = dict(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


# --- How to rebuild each kind of value ---


class Node:
    """How to rebuild one value."""

    __slots__ = ()

    def build(self, run: Run) -> Any:
        """Return the value around the run's tensors."""
        raise NotImplementedError


class TensorNode(Node):
    """A tensor, by its index among those found."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    @override
    def build(self, run: Run) -> Any:
        """Return the run's tensor."""
        return run.tensors[self.index]


class GeneratorNode(TensorNode):
    """A generator, by its index among those found."""

    __slots__ = ()

    @override
    def build(self, run: Run) -> Any:
        """Return the run's generator."""
        return run.generators[self.index]


class Composite(Node):
    """A value made of others, which may refer to itself: built once a run.

    Attributes:
        value: the user's own.
        children: how to rebuild those parts that hold tensors.
        live: whether there are any; taken for granted until the search of it ended.
    """

    __slots__ = ("children", "live", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.live = True
        self.children: dict[Any, Node] = {}

    def settle(self) -> "Composite | None":
        """End the search of this value; return it if it holds a tensor."""
        self.live = any(
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
        copy = _tree.unflatten(self._treedef, leaves)
        run.copies.append((self.value, copy, self._treedef, leaves))
        return copy


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
    """A Python function, its children keyed `(where, name)`."""

    __slots__ = ()

    @override
    def _build(self, run: Run) -> Any:
        fn = self.value
        cells = [
            types.CellType() if ("cell", i) in self.children else cell
            for i, cell in enumerate(fn.__closure__ or ())
        ]
        has_globals = any(where == "global" for where, _ in self.children)
        scope = dict(fn.__globals__) if has_globals else fn.__globals__
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
                run.cells.append((fn.__closure__[key], cells[key], built))
            elif where == "global":
                scope[key] = built
            else:
                setattr(new, where, built)
        if has_globals:
            run.scopes.append((fn, scope, dict(scope)))
        return new


class ObjectNode(Composite):
    """A module or an object, its children keyed `(registry or None, name)`."""

    __slots__ = ()

    @override
    def _build(self, run: Run) -> Any:
        cls: Any = type(self.value)
        replica = cls.__new__(cls)
        # Before the children are built: one of them may refer to this very object.
        run.built[id(self)] = replica
        entries = attributes(self.value)
        own = {registry for registry, _ in self.children if registry is not None}
        for registry in own:
            entries[registry] = entries[registry].copy()
        for (registry, name), child in self.children.items():
            target = entries if registry is None else entries[registry]
            target[name] = child.build(run)
        for name, value in entries.items():
            object.__setattr__(replica, name, value)
        for registry in own:
            ours = entries[registry]
            run.registries.append((vars(self.value)[registry], ours, ours.copy()))
        run.replicas.append((self.value, replica, entries))
        return replica
