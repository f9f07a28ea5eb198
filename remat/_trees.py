"""Trees of modules that are rebuilt at once, around other tensors.

Invariant: as of replicas, see there. A tree is what an outline found of it in a call:
its modules and attributes, and where its tensors stand among those of the call.
Rejected: a node for each module. What is the same in each call would be made again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from typing_extensions import override

from remat._replicas import Module, Node, Run, note, registries_of, set_dict


_Indices: TypeAlias = tuple[tuple[str, int], ...]


class Part(NamedTuple):
    """One module of a tree: its tensors and modules by name and index in the tree.

    A parameter or buffer that is `None` has the index -1.
    """

    parameters: _Indices
    buffers: _Indices
    modules: _Indices

    def around(
        self, entries: dict[str, Any], tensors: Sequence[Any], modules: Sequence[Any]
    ) -> dict[str, Any]:
        """Return what the module holds, around other tensors and modules."""
        # Loops: as comprehensions, these would cost as much as all the rest.
        held = entries.copy()
        ours: dict[str, Any] = {}
        for name, i in self.parameters:
            ours[name] = tensors[i]
        held["_parameters"] = ours
        ours = {}
        for name, i in self.buffers:
            ours[name] = tensors[i]
        held["_buffers"] = ours
        ours = {}
        for name, i in self.modules:
            ours[name] = modules[i]
        held["_modules"] = ours
        return held


class Tree(NamedTuple):
    """A tree of modules as it is in a call.

    Attributes:
        parts: its modules.
        count: how many tensors they hold.
        modules: the user's own.
        entries: what each holds.
    """

    parts: Sequence[Part]
    count: int
    modules: list[nn.Module]
    entries: list[dict[str, Any]]


class OutlinedNode(Module):
    """A tree of modules.

    Attributes:
        first: the index of its first tensor; the others follow.
    """

    __slots__ = ("_tree", "first")

    def __init__(self, tree: Tree, first: int) -> None:
        self._tree, self.first = tree, first

    @override
    def build(self, run: Run) -> Any:
        """Return a replica of the root."""
        return self.replicas(run)[0]

    def replicas(self, run: Run) -> list[Any]:
        """Return replicas of all modules, the same ones each time in a run."""
        replicas = run.built.get(id(self))
        if replicas is not None:
            return replicas
        parts, _, modules, entries = self._tree
        replicas = [*map(object.__new__, map(type, modules))]
        run.built[id(self)] = replicas
        tensors = self._tensors(run)
        for k, part in enumerate(parts):
            held = part.around(entries[k], tensors, replicas)
            set_dict(replicas[k], held)
            if run.first:
                note(run, self, k, replicas[k], held)
        return replicas

    def _tensors(self, run: Run) -> list[Any]:
        end = self.first + self._tree.count
        return [*run.tensors[self.first : end], None]

    def branches(self) -> Iterator[tuple[nn.Module, Node]]:
        """Yield each module, and how to rebuild it alone."""
        modules = self._tree.modules
        yield modules[0], self
        for k in range(1, len(modules)):
            yield modules[k], BranchNode(self, k)

    @override
    def contents(self, run: Run, k: int) -> dict[str, Any]:
        """Return what a replica has for attributes."""
        entries, replicas = self._tree.entries[k], self.replicas(run)
        return self._tree.parts[k].around(entries, self._tensors(run), replicas)

    @override
    def original(self, k: int) -> tuple[nn.Module, tuple[dict[str, Any], ...]]:
        """Return the user's own module and its registries."""
        return self._tree.modules[k], registries_of(self._tree.entries[k])


class BranchNode(Node):
    """A module within an outlined tree."""

    __slots__ = ("_k", "_tree")

    def __init__(self, tree: OutlinedNode, k: int) -> None:
        self._tree, self._k = tree, k

    @override
    def build(self, run: Run) -> Any:
        """Return its replica."""
        return self._tree.replicas(run)[self._k]
