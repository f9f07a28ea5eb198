"""What a call under base autograd saves of its inputs.

Leaves that require grad, and parameters, are saved themselves, and a recompute runs on
them. Other inputs are saved without their graphs, and a recompute runs on stand-ins for
them. Where torch may not count a write of the forward to an input, that is copied
before.

`saved` makes one for each call. `packing` saves inputs by it, and `refill` recomputes
on what it gives.

Invariant: no graph is held here. A run that would read a value that changed since the
call is refused.
Rejected: stand-ins for leaves, too. In a module that several threads use, the gradients
of the others would be lost.
"""

import contextlib
import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.absent import Absent
from remat._base.tensors import version_of, versions_of
from remat._base.types import TENSORS
from remat._graph.handles import PackedOutside
from remat._torch import Renorm, Renorms, later_renorms, storage_id, unseen
from remat._transform.buffers import is_same as has_same_bytes
from remat._transform.copies import (
    Memory,
    PutBack,
    RowsPutBack,
    can_be_put_back,
    copy_of,
    memory_of,
    with_bytes,
    written_to,
)
from remat._transform.leaves import attributes_of
from remat._transform.still import Still


_requires_grad = operator.attrgetter("requires_grad")
_is_leaf = operator.attrgetter("is_leaf")
_SMALL = 2**14  # elements
_STATISTICS = 2**20  # elements of a buffer of a module that is a vector


class SavedInputs:
    """The inputs of one call.

    Args:
        inputs: the tensors.
        needs: which of them require grad.
        first: from which of them on all are parameters.
        buffers: those that the function may update, and whether they are registered.
        hooks: for saved tensors, around the call: a pair, or None.
        nested: whether those are of a call of remat.

    Attributes:
        needs: which of them require grad.
        versions: how often each had been changed.
        values: what is saved of each: itself, a copy, its value without a graph, what
            the hooks around the call packed, or an absent tensor.
        copied: the indices of those that were copied.
        leaves_at: the indices of those that are saved themselves.
        attributes: what was set on them; None where nothing was.
        nodes: which of those before the parameters had been computed, by a node.
        renorms: for those that embeddings scaled rows of, these rows, in order: of the
            forward, and of what ran since.
    """

    __slots__ = (
        *("_are_leaves", "_classes", "_first", "_hooks", "_memory", "_outside"),
        *("_refs", "_still", "attributes"),
        *("copied", "leaves_at", "needs", "nodes", "renorms", "values", "versions"),
    )

    def __init__(
        self,
        inputs: Sequence[Tensor],
        needs: list[bool],
        first: int,
        buffers: Mapping[int, bool],
        hooks: Any,
        *,
        nested: bool,
    ) -> None:
        self.needs, self._hooks, self._first = needs, hooks, first
        self.renorms: dict[int, tuple[Sequence[Renorm], Renorms]] = {}
        self.versions = versions_of(inputs)
        self.attributes = attributes_of(inputs)
        entries = inputs[:first]
        self._refs = [*map(weakref.ref, entries)]
        self.nodes = [*map(operator.not_, map(_is_leaf, entries))]
        self._classes: Sequence[type] = ()
        self.copied: frozenset[int] = frozenset()
        # What is copied is packed by a call around in any case: a forward and its
        # recompute have to pack alike, also where only one of them goes on.
        self._outside: dict[int, Any] | None = {} if nested else None
        self._memory: dict[int, Memory] = {}  # of inputs, until the forward has ended
        self._still: Still | None = None
        # Whether all are saved themselves.
        self._are_leaves = (
            hooks is None and True not in self.nodes and False not in needs[:first]
        )
        if self._are_leaves:
            self.leaves_at: Sequence[int] = range(len(inputs))
            self.values: list[Any] = [*inputs]
            return
        self._save(entries, buffers)
        self.leaves_at = [*self.leaves_at, *range(first, len(inputs))]
        self.values += inputs[first:]
        if nested:
            # The call around has to count them. There they may be no leaves.
            for i in self.leaves_at:
                hooks[0](inputs[i])

    def _save(self, entries: Sequence[Tensor], buffers: Mapping[int, bool]) -> None:
        """Note what is saved of the inputs before the parameters."""
        needs = self.needs
        if not TENSORS.issuperset(map(type, entries)):
            self._classes = [*map(type, entries)]
        itself = [*map(_is_saved_itself, entries)]
        self.leaves_at = [i for i, is_saved in enumerate(itself) if is_saved]
        candidates = _may_be_written(entries, needs, buffers)
        if candidates:
            self._still = Still(entries, candidates)
            self.copied = self._still.copied
        pairs = enumerate(zip(entries, itself, strict=True))
        self.values = [t if leaf else self._copy(i, t) for i, (t, leaf) in pairs]

    def _copy(self, i: int, t: Tensor) -> Any:
        """Return the value of an input, or a copy; its bytes are noted if they can be.

        The hooks around the call may take a value away: then it is a copy.
        """
        if i not in self.copied:
            return self._value_of(t)
        memory = memory_of(t) if self._hooks is None else None
        if memory is not None:
            self._memory[i] = memory
            return t.detach()
        try:
            copy = copy_of(t)
            if self._outside is not None:
                self._outside[i] = self._value_of(t)
            return copy
        except RuntimeError:  # torch copies no such tensor; nothing writes to it
            self.copied -= {i}
            return self._value_of(t)

    def _value_of(self, t: Tensor) -> Any:
        return t.detach() if self._hooks is None else PackedOutside(t, self._hooks)

    # --- After the forward ---

    def note_changes(
        self, inputs: Sequence[Tensor], renorms: Sequence[Renorm] = ()
    ) -> int | None:
        """Drop the copies of inputs that did not change.

        Args:
            inputs: of the call.
            renorms: what embeddings did to weights in the forward.

        Returns:
            An input that changed and has no copy; None if there is none.
        """
        now, still = versions_of(inputs), self._still
        self._note_bytes(inputs, now)
        for i in self.copied:
            # On a device, to compare is to wait for it; a fake tensor has no values.
            has_bytes = inputs[i].is_cpu and type(inputs[i]) is Tensor
            if has_bytes and now[i] == self.versions[i]:
                with unseen():
                    is_same = has_same_bytes(self.values[i], inputs[i])
                if is_same:
                    packed = None if self._outside is None else self._outside.pop(i)
                    self.values[i] = packed or self._value_of(inputs[i])
                    self.copied -= {i}
        if still is not None:
            still.note(inputs, self.copied)
        changed = [] if still is None else still.written(inputs)
        if now != self.versions:
            pairs = enumerate(zip(self.versions, now, strict=True))
            changed += [i for i, (a, b) in pairs if a != b and i not in self.copied]
        if renorms:
            changed = [i for i in changed if not self._is_renormed(i, now, renorms)]
        if not changed:
            return None
        if still is not None:
            still.forget(inputs, changed)
        return min(changed)

    def _note_bytes(self, inputs: Sequence[Tensor], now: Sequence[int | None]) -> None:
        """Copy those that hold other bytes than before the forward."""
        befores, then = self._memory, self.versions
        if not befores:
            return
        self._memory = {}
        written = {*written_to(inputs, befores)}
        if now != then:
            written |= {i for i in befores if now[i] != then[i]}
        for i in written:
            self.values[i] = with_bytes(self.values[i], befores[i][1])
        self.copied = self.copied.difference(befores) | written

    def _copy_from_bytes(self) -> None:
        """Make copies of what is known by its bytes, while the forward runs."""
        for i, (_, held) in self._memory.items():
            self.values[i] = with_bytes(self.values[i], held)
        self._memory = {}

    def _is_renormed(
        self, i: int, now: Sequence[int | None], renorms: Sequence[Renorm]
    ) -> bool:
        """Say whether all that changed an input is known, and note it."""
        then, ours = self.versions[i], now[i]
        if then is None or ours is None or i not in self.leaves_at:
            return False
        number = storage_id(self.values[i])
        found = [renorm for renorm in renorms if renorm.storage == number]
        if len(found) != ours - then:
            return False
        self.renorms[i], self.versions[i] = (found, later_renorms(number)), ours
        return True

    def rows_put_back(self) -> AbstractContextManager[Any]:
        """Return a context in which rows that embeddings scaled are as at the call."""
        pairs = [
            (self.values[i], [*ours, *later.changes])
            for i, (ours, later) in self.renorms.items()
        ]
        return RowsPutBack(pairs) if pairs else contextlib.nullcontext()

    def let_go(self, dropped: Mapping[int, Absent]) -> None:
        """Put absent tensors in place of inputs that no recompute reads."""
        for i, absent in dropped.items():
            self.values[i], self._are_leaves = absent, False
        self.copied -= dropped.keys()

    # --- For a recompute ---

    def changed(self) -> list[int]:
        """Return the inputs that were changed in place since."""
        values, then, first = self.values, self.versions, self._first
        if self._are_leaves and not self.renorms:
            now = versions_of(values)
            if now == then:
                return []
        if self.renorms:
            then = then.copy()
            for i, (_, later) in self.renorms.items():
                then[i] = (then[i] or 0) + len(later.changes)
        entries = values
        if versions_of(values[first:]) == then[first:]:
            entries = values[:first]
        return [
            i
            for i, value in enumerate(entries)
            if type(value) not in _NOT_OURS
            and i not in self.copied
            and version_of(value) != then[i]
        ]

    def stored(self) -> list[tuple[int, Tensor]]:
        """Return the tensors that are held here, and of which input each one is."""
        values = enumerate(self.values)
        return [(i, t) for i, t in values if type(t) not in (Absent, PackedOutside)]

    def leaves(self) -> list[Tensor]:
        """Return the inputs that are saved themselves."""
        at, first = self.leaves_at, self._first
        if self._are_leaves:
            return self.values
        before = len(at) - len(self.values) + first
        return [*map(self.values.__getitem__, at[:before]), *self.values[first:]]

    def attributes_of_leaves(self) -> list[dict[str, Any]] | None:
        """Return what had been set on those; None where nothing had been."""
        attributes = self.attributes
        return attributes and [attributes[i] for i in self.leaves_at]

    def to_run_on(
        self, *, leaves_themselves: bool, inputs_themselves: bool = False
    ) -> list[Tensor]:
        """Return the tensors that a recompute runs on.

        Args:
            leaves_themselves: whether it may run on the user's own leaves.
            inputs_themselves: whether it may run on the user's other tensors, where
                they are still there, and write to those that are copied.
        """
        if self._memory:
            self._copy_from_bytes()
        needs, first = self.needs, self._first
        is_same = leaves_themselves and self._are_leaves
        if is_same and [*map(_requires_grad, self.values)] == needs:
            return [*self.values]
        leaves_at = {*self.leaves_at} if leaves_themselves else ()
        parameters = self.values[first:]
        if leaves_themselves and [*map(_requires_grad, parameters)] == needs[first:]:
            alone = range(first)
        else:
            alone, parameters = range(len(needs)), list[Tensor]()
        tensors = []
        for i in alone:
            value, need = self.values[i], needs[i]
            t = value if i in leaves_at else None
            if inputs_themselves and t is None:
                t = self._itself(i)
            if t is not None and t.requires_grad == need:
                tensors.append(t)
            elif i in self.copied:
                tensors.append(value.clone())
            else:
                tensors.append(self._stand_in(i, value, need))
        return tensors + parameters

    def has_parameters(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether the parameters among tensors to run on are the user's own."""
        first = self._first
        return all(map(operator.is_, tensors[first:], self.values[first:]))

    def _itself(self, i: int) -> Tensor | None:
        """Return an input, if it is still there and a recompute may run on it."""
        t = self._refs[i]() if i < self._first else None
        if t is None or type(self.values[i]) in _NOT_OURS or t.is_leaf == self.nodes[i]:
            return None
        if i in self.copied:
            return t if can_be_put_back(t) else None
        return t if _is_where_it_was(t, self.values[i]) else None

    def put_back(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which copied inputs hold what they held at the call.

        Args:
            tensors: that the run is on.
        """
        written = [i for i in self.copied if tensors[i] is self._refs[i]()]
        if not written:
            return contextlib.nullcontext()
        return PutBack([tensors[i] for i in written], [self.values[i] for i in written])

    def _stand_in(self, i: int, value: Any, need: bool) -> Tensor:
        """Return a tensor like an input, without its graph and its hooks."""
        t: Tensor = value.unpacked() if type(value) is PackedOutside else value
        if self._classes and type(t) is Tensor and self._classes[i] is not Tensor:
            t = t.as_subclass(self._classes[i])  # hooks gave it back as a plain one
        if type(t) is nn.Parameter:
            new = Tensor._make_subclass(nn.Parameter, t, need)
        else:
            new = t.detach()
            if need:
                new.requires_grad_()
                is_computed = i < self._first and self.nodes[i]
                new = _computed(new) if is_computed else new
        if self.attributes and self.attributes[i]:
            new.__dict__.update(self.attributes[i])
        return new


# What was let go of, and what the user's hooks may give back as another tensor.
_NOT_OURS = Absent, PackedOutside


def _computed(tensor: Tensor) -> Any:
    """Return a tensor like another, with a node."""
    with torch.enable_grad():
        return Computed.apply(tensor)


class Computed(torch.autograd.Function):
    """Gives a tensor a node, as an input that was computed has one."""

    @staticmethod
    @override
    def forward(ctx: Any, t: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return t.data

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _is_where_it_was(tensor: Tensor, value: Tensor) -> bool:
    """Say whether a tensor was given no other memory, as by assigning to `.data`."""
    if type(tensor) is not Tensor:
        return True
    try:
        return tensor.data_ptr() == value.data_ptr()
    except RuntimeError:  # it has no memory, or none that can be asked for
        return True


def _is_saved_itself(tensor: Tensor) -> bool:
    """Say whether an input is saved itself."""
    return (tensor.requires_grad and tensor.is_leaf) or type(tensor) is nn.Parameter


def _may_be_written(
    inputs: Sequence[Tensor], needs: Sequence[bool], buffers: Mapping[int, bool]
) -> Sequence[int]:
    """Return the inputs that are copied, since a write to them may not be counted.

    Batch norm's update of its running statistics is not. These are vectors, and buffers
    of a module if they are large.
    """
    return [
        i
        for i, t in enumerate(inputs)
        if not needs[i]
        and (i in buffers or t.dim() == 1)
        and (type(t) is Tensor or hasattr(t, "fake_mode"))
        and t.layout is torch.strided
        and t.numel() <= (_STATISTICS if t.dim() == 1 and buffers.get(i) else _SMALL)
        # FSDP frees the memory of what it gathers.
        and t.untyped_storage().nbytes() >= t.nbytes
    ]
