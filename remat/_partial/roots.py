"""Notes which storages the graph of a recorded forward saved: the roots of a plan.

Called by `recorder`. Under base autograd hooks say what is saved, one handle at a time;
under torch.func the graph of each output is read.

Invariant: what a node does not tell is taken for everything that it may have saved.
Rejected: one set of roots for a call. A backward that reaches few outputs, or few
handles, would recompute for all of them.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from remat._graph.graph import nodes_of
from remat._partial.plan import Pack, Step
from remat._partial.storages import Storages
from remat._partial.values import value_of
from remat._torch import base_tensor, is_lazy


class Roots:
    """What a graph saved, for each handle or each output.

    Args:
        storages: numbers them.
        steps: the operations so far; it grows.
        made: the storages that those made; it grows.
    """

    def __init__(
        self, storages: Storages, steps: Sequence[Step], made: Collection[int]
    ) -> None:
        self._storages, self._steps, self._made = storages, steps, made
        self._roots: list[set[int]] = []
        self._packs: list[Pack | None] = []

    def pack(self, tensor: Tensor | None) -> None:
        """Note that a handle stands for a tensor; None for what is saved itself."""
        if tensor is None:
            self._packs.append(None)
            self._roots.append(set())
            return
        base = base_tensor(tensor)
        number = self._storages.number(base)
        pack = Pack(number, value_of(base), len(self._steps), is_lazy(base))
        self._packs.append(pack)
        self._roots.append({number})

    def note_copy(self, place: int, tensor: Tensor | None) -> None:
        """Note that a tensor has the value of what was saved at a place."""
        pack = self._packs[place]
        if pack is not None and tensor is not None:
            self._storages.alias(tensor, pack.storage)

    def note_saved(self, outs: Sequence[Any]) -> None:
        """Note what the graph of each output saved.

        To be called while there is a graph; of several levels, for each.
        """
        while len(self._roots) < len(outs):
            self._roots.append(set())
        found = [*zip(outs, self._roots, strict=True)]
        if len(outs) <= _MANY:
            for out, roots in found:
                roots.update(self._saved([out]))
        else:
            saved = self._saved(outs)
            for _, roots in found:
                roots.update(saved)

    def _saved(self, outs: Iterable[Any]) -> set[int]:
        """Return the storages that the backward of some outputs reads."""
        found, known = set[int](), self._storages.known
        for node, tensors in nodes_of(outs):
            kind = type(node).__name__
            if kind in SILENT:
                found.update(self._changed() if kind == "CopySlices" else self._made)
            else:
                found.update(s for s in map(known, tensors) if s is not None)
        return found

    def _changed(self) -> Iterator[int]:
        """Yield what is read by operations that change something in place."""
        for step in self._steps:
            if step.writes:
                yield from (*step.reads, *step.makes)

    def packs(self) -> tuple[Pack | None, ...]:
        """Return what each handle stands for."""
        return tuple(self._packs)

    def roots(self, gone: Container[int]) -> tuple[frozenset[int], ...]:
        """Return the roots, none for the handles that are gone."""
        return tuple(
            frozenset(() if place in gone else roots)
            for place, roots in enumerate(self._roots)
        )


_MANY = 16  # outputs, up to which the graph is walked for each
# Nodes that do not tell what they saved: of in-place operations on views, and in C++.
SILENT = {"CopySlices", "CppFunction"}
