"""Rebuild modules around other tensors: the part of a rebuild that has to be fast.

A block of a model is a dozen modules and as many tensors, and is rebuilt in each call
and each recomputation. So what is a module's own is copied in one piece, and what the
function assigned is found by one comparison for all modules of a run.

Invariant: a replica is an instance of the module's class with a `__dict__` and
registries of its own; no constructor, property or `__setattr__` runs.
Rejected: replicas kept for the next call. Whoever got hold of one would see it change.
"""

import functools
import gc
import operator
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from remat._objects import (
    attributes,
    differing,
    identities,
    replica_of,
    set_attributes,
    slots_of,
)


class Run:
    """What building for one run has made, with what it was made from."""

    __slots__ = (
        "before",
        "built",
        "cells",
        "copies",
        "first",
        "modules",
        "replicas",
        "scopes",
        "slotted",
        "tensors",
    )

    def __init__(self, tensors: Sequence[Tensor], *, first: bool) -> None:
        self.tensors = tensors
        self.first = first
        self.built: dict[int, Any] = {}
        self.cells: list[tuple[Any, Any, Any]] = []
        self.scopes: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self.copies: list[tuple[Any, Any, Any, list[Any]]] = []
        self.replicas: list[tuple[Any, Any, dict[str, Any]]] = []
        self.modules: list[tuple[Module, int, nn.Module, Any]] = []
        self.slotted: list[nn.Module] = []
        self.before = b""


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

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(index: int) -> "TensorNode":
        """Return the node of a tensor; there is one for each index."""
        return TensorNode(index)

    @override
    def build(self, run: Run) -> Any:
        """Return the run's tensor."""
        return run.tensors[self.index]


REGISTRIES = ("_parameters", "_buffers", "_modules")
registries_of = operator.itemgetter(*REGISTRIES)
_dict_of = nn.Module.__dict__["__dict__"].__get__
set_dict = nn.Module.__dict__["__dict__"].__set__


class Module(Node):
    """Modules: one, or several at once."""

    __slots__ = ()

    def contents(self, run: Run, k: int) -> dict[str, Any]:
        """Return what the replica of one of them has for attributes."""
        raise NotImplementedError

    def original(self, k: int) -> tuple[nn.Module, Sequence[dict[str, Any]]]:
        """Return the user's own module and its registries."""
        raise NotImplementedError


class ModuleNode(Module):
    """A module.

    Its attributes are those of the moment of the search: it may be in another mode
    since.

    Attributes:
        value: the user's own.
        entries: its attributes, with `None` for the registries.
        registries: of parameters, buffers and modules, the user's own.
        children: how to rebuild attributes that hold tensors.
        parameters: their indices.
        buffers: theirs.
        modules: the modules as they are, and how to rebuild them.
    """

    __slots__ = (
        "buffers",
        "children",
        "entries",
        "modules",
        "parameters",
        "registries",
        "submodules",
        "value",
    )

    def __init__(self, value: nn.Module) -> None:
        self.value = value
        slots = slots_of(type(value))
        self.entries = entries = attributes(value) if slots else _dict_of(value).copy()
        self.registries = [entries[name] for name in REGISTRIES]
        entries["_parameters"] = entries["_buffers"] = entries["_modules"] = None
        self.children: dict[str, Node] = {}
        self.parameters: dict[str, int | None] = {}
        self.buffers: dict[str, int | None] = {}
        self.modules = self.registries[2].copy()
        self.submodules: list[tuple[str, Node]] = []

    def mode(self) -> tuple[object, object]:
        """Return what stands for the module in a signature."""
        return weakref.ref(type(self.value)), self.entries.get("training")

    @override
    def build(self, run: Run) -> Any:
        """Return a replica, the same one each time in a run."""
        replica = run.built.get(id(self))
        if replica is not None:
            return replica
        replica = replica_of(self.value)
        # Before the children are built: one of them may refer to this very module.
        run.built[id(self)] = replica
        entries = self.contents(run, 0)
        if slots_of(type(replica)):
            set_attributes(replica, entries)
        else:
            set_dict(replica, entries)
        if run.first:
            note(run, self, 0, replica, entries)
        return replica

    @override
    def contents(self, run: Run, k: int) -> dict[str, Any]:
        """Return what the replica has for attributes."""
        entries = self.entries.copy()
        if self.children:
            for name, child in self.children.items():
                entries[name] = child.build(run)
        entries["_parameters"] = _filled(self.parameters, run.tensors)
        entries["_buffers"] = _filled(self.buffers, run.tensors)
        entries["_modules"] = modules = self.modules.copy()
        for name, node in self.submodules:
            modules[name] = node.build(run)
        return entries

    @override
    def original(self, k: int) -> tuple[nn.Module, Sequence[dict[str, Any]]]:
        """Return the user's own module and its registries."""
        return self.value, self.registries


def _filled(
    indices: dict[str, int | None], tensors: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    # Loops: as comprehensions, these cost as much as the rest of a module.
    filled: dict[str, Tensor | None] = {}
    for name, i in indices.items():
        filled[name] = None if i is None else tensors[i]
    return filled


# --- What a function assigned ---


def note(
    run: Run, node: Module, k: int, replica: nn.Module, entries: dict[str, Any]
) -> None:
    """Remember a replica for `pass_on_modules`."""
    run.modules.append((node, k, replica, registries_of(entries)))
    if slots_of(type(replica)):
        run.slotted.append(replica)


def note_modules(run: Run) -> None:
    """Remember what the replicas hold, now that all are built."""
    run.before = _state(run)


def pass_on_modules(run: Run) -> None:
    """Let what the function assigned to replicas reach the user's own modules."""
    if run.modules and _state(run) != run.before:
        for node, k, replica, registries in run.modules:
            before = node.contents(run, k)
            original, originals = node.original(k)
            each = zip(REGISTRIES, originals, registries, strict=True)
            for name, registry, ours in each:
                registry.update(differing(ours, before[name]))
                before[name] = ours
            assigned = differing(attributes(replica), before)
            if assigned:
                set_attributes(original, assigned)


def _state(run: Run) -> bytes:
    """Return which objects the replicas and their registries hold by which names.

    What they held when they were built is kept alive by what they were built from.
    """
    replicas = [replica for _, _, replica, _ in run.modules]
    dicts = [*map(_dict_of, replicas)]
    for _, _, _, registries in run.modules:
        dicts += registries
    dicts += [attributes(replica) for replica in run.slotted]
    values = gc.get_referents(*dicts)
    values += chain.from_iterable(dicts)
    return identities(values)
