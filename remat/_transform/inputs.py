"""What a call under base autograd saves of its inputs.

Leaves and parameters are saved themselves, others without their graphs. A recompute
runs on the user's own tensors if they are there, hold what they held, and the forward
changed nothing of leaves; else on stand-ins. What may be written though torch does not
count it, as running statistics, is copied before a forward, or its bytes are noted.
Invariant: no graph is held that no code asks for, and a write is never missed.
Rejected: stand-ins for all leaves, because gradients of other threads would be lost. A
copy that shares memory until it is written: an array of NumPy's loses its memory. One
class with `CallState`, which must hold no tensors.
"""

import contextlib
import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from remat._base.absent import Absent
from remat._base.tensors import changed_since, version_of, versions_of
from remat._base.types import TENSORS
from remat._graph.handles import PackedOutside, packed_outside
from remat._partial.values import storage_if_any
from remat._reach.reach import Reach
from remat._torch.modes import dispatch_mode_count, unseen
from remat._torch.noted import Renorm, Renorms, later_renorms
from remat._torch.tensors import has_no_memory, storage_id
from remat._transform.leaves import (
    ONLY_MARKS,
    SMALL,
    LeafChanges,
    Memory,
    addresses_of,
    bytes_at,
    has_same_bytes,
    holding,
    holding_rows,
    memories_of,
    with_bytes,
)
from remat._transform.stand_ins import (
    Ranges,
    as_they_were,
    held_for,
    in_place_of_dead,
    overlapping,
    stand_in,
    together,
    without_graph,
)


_requires_grad = operator.attrgetter("requires_grad")
_is_leaf = operator.attrgetter("is_leaf")
_STATISTICS = 2**20  # elements of the largest vectors of a module that are copied
_FEW = 4  # inputs, which are looked at sooner one by one
# What was let go of, and what the user's hooks may give back as another tensor.
_NOT_OURS = Absent, PackedOutside


class SavedInputs:
    """The inputs of one call.

    Attributes:
        needs: which of them require grad.
        versions: how often each had been changed.
        values: what is saved of each: itself, a copy, its value without a graph, what
            the hooks around the call packed, or an absent tensor.
        may_be_written: the indices of those that a run may write to, though torch does
            not count it. Of each there is a copy, or, while the forward runs, an alias
            and its bytes (`_memory`). Its end takes out those that it left alone.
        originals, originals_at: those that are saved themselves, and their indices.
        renorms: for weights of which `max_norm=` of an embedding scaled rows in place,
            these, in order: of the forward, and of what ran since.
    """

    __slots__ = (
        *("_are_originals", "_asked", "_attributes", "_classes", "_first", "_had_node"),
        *("_hooks", "_memory", "_outside", "_overlaps", "_packed", "_refs"),
        *("_storages", "may_be_written", "needs", "originals", "originals_at"),
        *("renorms", "values", "versions"),
    )

    def __init__(
        self,
        inputs: Sequence[Tensor],
        needs: list[bool],
        reach: Reach,
        hooks: Any,
        *,
        nested: bool,
    ) -> None:
        first, buffers = reach.first_parameter, reach.buffers
        self.needs, self._hooks, self._first = needs, hooks, first
        self._storages: dict[int, weakref.ref[Any]] = {}  # of what is packed outside
        self.renorms: dict[int, tuple[Sequence[Renorm], Renorms]] = {}
        self.versions = versions_of(inputs)
        entries = inputs[:first]
        self._refs = [*map(weakref.ref, entries)]
        # Which of those before the parameters had been computed, by a node.
        self._had_node = [*map(operator.not_, map(_is_leaf, entries))]
        asks = reach.asks  # of nodes, in whose place nothing stands
        self._asked = held_for(asks, entries, self._had_node) if asks else None
        self._classes: Sequence[type] = ()
        self._attributes: Sequence[dict[str, Any]] = ()
        if not TENSORS.issuperset(map(type, entries)):
            self._classes = [*map(type, entries)]
            # In them a subclass has the tensors that it wraps.
            self._attributes = [vars(t).copy() for t in entries]
        self.may_be_written: frozenset[int] = frozenset()
        # What a nested call copies is handed to the outer hook before the forward: the
        # outer recompute, which may stop inside this call, has to count the same
        # tensors.
        self._outside: dict[int, Any] | None = {} if nested else None
        self._memory: dict[int, Memory] = {}  # of inputs, until the forward has ended
        self._overlaps: Sequence[Ranges] = ()  # of those that were written to
        # Whether all are saved themselves.
        are_leaves = True not in self._had_node and False not in needs[:first]
        self._are_originals = hooks is None and are_leaves
        if self._are_originals:
            self.originals_at: Sequence[int] = range(len(inputs))
            self.originals = self.values = [*inputs]
            return
        self._packed = () if hooks is None else packed_outside(reach, hooks)
        self._choose_copies(entries, buffers)
        themselves = self._save(entries)
        self.originals = [*map(inputs.__getitem__, themselves), *inputs[first:]]
        self.originals_at = [*themselves, *range(first, len(inputs))]
        self.values += inputs[first:]
        if nested:
            for t in inputs[first:]:
                hooks[0](t)

    def _save(self, entries: Sequence[Tensor]) -> list[int]:
        """Note what is saved of inputs; return those that are saved themselves."""
        copied, needs = self.may_be_written.difference(self._memory), self.needs
        values: list[Any] = []
        themselves: list[int] = []
        for i, t in enumerate(entries):
            if (needs[i] and t.is_leaf) or type(t) is nn.Parameter:
                themselves.append(i)
                value: Any = t
                if self._outside is not None:
                    # The call around has to count it: in its place, as in another call
                    # it may be no leaf.
                    self._hooks[0](t)
            elif i in copied:
                value = self._copy(i, t)
            else:
                try:
                    value = self._value_of(i, t) if self._packed else without_graph(t)
                except RuntimeError:
                    value = in_place_of_dead(t)
            values.append(value)
        self.values = values
        return themselves

    def _choose_copies(
        self, entries: Sequence[Tensor], buffers: Mapping[int, bool]
    ) -> None:
        """Choose the inputs that are copied, since a write to them may not be counted.

        Batch norm's update of its running statistics is not. These are vectors, and
        buffers of a module if they are large.
        """
        found: list[int] = []
        needs, has_modes, strided = self.needs, dispatch_mode_count() > 0, torch.strided
        for i, t in enumerate(entries):
            try:
                if (
                    not needs[i]
                    and (i in buffers or t.dim() == 1)
                    and (type(t) is Tensor or hasattr(t, "fake_mode"))
                    and t.layout is strided
                    and t.numel()
                    <= (_STATISTICS if buffers.get(i) and t.dim() == 1 else SMALL)
                    # FSDP frees the memory of what it gathers.
                    and t.untyped_storage().nbytes() >= t.nbytes
                    and not (has_modes and has_no_memory(t))
                ):
                    found.append(i)
            except RuntimeError:
                in_place_of_dead(t)
        self.may_be_written = frozenset(found)
        if found and self._hooks is None:
            each = memories_of([*map(entries.__getitem__, found)])
            known: Any = compress(zip(found, each, strict=True), each)
            self._memory = dict(known)

    def _copy(self, i: int, t: Tensor) -> Any:
        """Return a copy of an input; its value if torch copies no such tensor."""
        try:
            if type(t) is not Tensor:
                copy = t.clone()  # a fake one has no memory for a kernel to read
            else:
                with unseen():
                    copy = t.clone()
            if self._outside is not None:
                self._outside[i] = self._value_of(i, t)
            return copy
        except RuntimeError:  # torch copies no such tensor; nothing writes to it
            self.may_be_written -= {i}
            return self._value_of(i, t)

    def _value_of(self, i: int, t: Tensor) -> Any:
        if i not in self._packed:
            return without_graph(t)
        storage = storage_if_any(t)
        if storage is not None:
            self._storages[i] = weakref.ref(storage)
        return PackedOutside(t, self._hooks)

    # --- After the forward ---

    def note_changes(
        self, inputs: Sequence[Tensor], renorms: Sequence[Renorm] = ()
    ) -> list[int]:
        """Drop copies of what did not change; return what did and has none."""
        now, then = versions_of(inputs), self.versions
        # First: of these there is no copy yet, only their bytes.
        if self._memory:
            self._copy_written(inputs, now)
        for i in self.may_be_written:
            # On a device, to compare is to wait for it; a fake tensor has no values.
            has_bytes = inputs[i].is_cpu and type(inputs[i]) is Tensor
            if has_bytes and now[i] == then[i]:
                with unseen():
                    is_same = has_same_bytes(self.values[i], inputs[i])
                if is_same:
                    packed = None if self._outside is None else self._outside.pop(i)
                    self.values[i] = packed or self._value_of(i, inputs[i])
                    self.may_be_written -= {i}
        if now == then:
            return []
        pairs, copied = enumerate(zip(then, now, strict=True)), self.may_be_written
        changed = [i for i, (a, b) in pairs if a != b and i not in copied]
        if renorms:
            changed = [i for i in changed if not self._is_renormed(i, now[i], renorms)]
        return changed

    def _copy_written(
        self, inputs: Sequence[Tensor], now: Sequence[int | None]
    ) -> None:
        """Copy those of which the bytes are known and that hold others by now."""
        befores = self._memory
        self._memory = {}
        there = addresses_of([inputs[i] for i in befores]) or [None] * len(befores)
        addresses, held = zip(*befores.values(), strict=True)
        are_there = there == [*addresses] and now == self.versions
        if are_there and (*map(bytes_at, addresses, map(len, held)),) == held:
            self.may_be_written = self.may_be_written.difference(befores)
            return
        same = [
            a == b and bytes_at(a, len(then)) == then and now[i] == self.versions[i]
            for i, a, b, then in zip(befores, addresses, there, held, strict=True)
        ]
        self.may_be_written = self.may_be_written.difference(compress(befores, same))
        written = compress(befores.items(), map(operator.not_, same))
        self._copy_noted(dict(written))

    def _copy_noted(self, noted: Mapping[int, Memory]) -> None:
        """Make copies of bytes that were noted before the forward."""
        for i, (_, held) in noted.items():
            self.values[i] = with_bytes(self.values[i], held)
        each = noted.items()
        self._overlaps = overlapping([(a, a + len(b), i) for i, (a, b) in each])

    def _is_renormed(self, i: int, now: int | None, renorms: Sequence[Renorm]) -> bool:
        """Say whether all that changed an input is known, and note it."""
        then = self.versions[i]
        if then is None or now is None or i not in self.originals_at:
            return False
        number = storage_id(self.values[i])
        found = [renorm for renorm in renorms if renorm.storage == number]
        if len(found) != now - then:
            return False
        self.renorms[i], self.versions[i] = (found, later_renorms(number)), now
        return True

    def let_go(self, dropped: Mapping[int, Absent]) -> None:
        """Put absent tensors in place of inputs that no recompute reads: no leaves."""
        for i, absent in dropped.items():
            self.values[i], t = absent, self._refs[i]()
            self.versions[i] = None if t is None else version_of(t)
        self.may_be_written = self.may_be_written.difference(dropped)

    # --- For a recompute ---

    def changed(self) -> list[int]:
        """Return the inputs that were changed in place since."""
        values, then, first = self.values, self.versions, self._first
        are_ours = self._are_originals or self._are_plain()
        if are_ours and not self.renorms and versions_of(values) == then:
            return []
        if self.renorms:
            then = then.copy()
            for i, (_, later) in self.renorms.items():
                then[i] = (then[i] or 0) + len(later.changes)
        # Parameters are many, and are compared at the speed of C.
        if versions_of(values[first:]) == then[first:]:
            values = values[:first]
        return changed_since(values, then, _NOT_OURS, self.may_be_written)

    def _are_plain(self) -> bool:
        """Say whether of each input there is itself or its value, and no copy."""
        first = self.values[: self._first]
        return not self.may_be_written and TENSORS.issuperset(map(type, first))

    def stored(self) -> list[tuple[int, Tensor]]:
        """Return the tensors that are held here, and of which input each one is."""
        values = enumerate(self.values)
        return [(i, t) for i, t in values if type(t) not in _NOT_OURS]

    def own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the user's own among tensors to run on, and the originals."""
        known, refs = {*self.originals_at}, enumerate(self._refs)
        at = [i for i, ref in refs if i not in known and tensors[i] is ref()]
        return [*self.originals, *(tensors[i] for i in at)]

    def to_run_on(self, changes: LeafChanges) -> list[Tensor]:
        """Return the tensors that a recompute runs on.

        If the forward changed nothing of leaves, these are the user's own, where they
        are still there, and what is copied may be written to. If it changed gradients,
        not even the leaves are: they would get them twice.
        """
        on_originals = not changes.accumulates
        are_originals = on_originals and self._are_originals
        if are_originals and [*map(_requires_grad, self.values)] == self.needs:
            return [*self.values]
        on_others = on_originals and not changes.moves and changes is not ONLY_MARKS
        if self._memory:  # the forward still runs
            self._copy_noted(self._memory)
            self._memory = {}
        values, needs, first = self.values, self.needs, self._first
        parameters = values[first:]
        are_ours = on_originals and [*map(_requires_grad, parameters)] == needs[first:]
        if on_others and are_ours and first > _FEW and self._are_plain():
            there = as_they_were(self._refs, values[:first], needs, self._had_node)
            if there is not None:
                return there + parameters
        tensors: list[Tensor] = []
        originals_at = {*self.originals_at} if on_originals else ()
        for i, value in enumerate(values[:first] if are_ours else values):
            t, need = None, needs[i]
            if i in originals_at:
                t = value
            elif on_others and i < first:
                t = self._itself(i, value)
            if t is not None and t.requires_grad == need:
                tensors.append(t)
            else:
                tensors.append(self._stand_in(i, value, need=need))
        for group in self._overlaps:
            together(group, tensors, self._first_there(group, tensors))
        return tensors + parameters if are_ours else tensors

    def _first_there(self, group: Ranges, tensors: Sequence[Tensor]) -> int | None:
        """Return which of a group is first of those that are the user's own, if any."""
        return next((i for i in group if tensors[i] is self._refs[i]()), None)

    def _itself(self, i: int, value: Any) -> Tensor | None:
        """Return an input, if it is still there and a recompute may run on it."""
        t = self._refs[i]()
        if t is None and self._asked and type(value) is not Absent:
            edge = self._asked.get(i)
            return edge and edge.of(self._stand_in(i, value, need=False))
        # It may have lost its node since, or got one.
        if t is None or t.is_leaf == self._had_node[i]:
            return None
        if i in self.may_be_written:  # on a device, copies stand in for it
            is_writable = type(t) is Tensor and t.is_cpu and not t.is_inference()
            return t if is_writable else None
        if type(value) in _NOT_OURS:  # nothing else checks that it is as it was
            version, storage = self.versions[i], self._storages.get(i)
            if type(value) is Absent:  # only the tensor is needed, and not its value
                return t if version_of(t) == version else None
            is_same = version is not None and t._version == version
            is_same = is_same and storage is not None
            return t if is_same and storage() is storage_if_any(t) else None
        if type(t) is not Tensor:
            return t
        try:  # it may have got other memory, as by assigning to `.data`
            return t if t.data_ptr() == value.data_ptr() else None
        except RuntimeError:  # it has no memory, or none that can be asked for
            return t

    def is_itself(self, i: int, tensor: Tensor) -> bool:
        """Say whether a tensor is an input, and not what stands in for it."""
        return i < self._first and self._refs[i]() is tensor

    def _stand_in(self, i: int, value: Any, *, need: bool) -> Tensor:
        """Return a tensor like an input, without its graph and its hooks."""
        if i in self.may_be_written:
            return value.clone()
        t: Tensor = value.unpacked() if type(value) is PackedOutside else value
        is_entry = i < self._first
        # Hooks may have given it back as a plain one. Parameters are saved themselves.
        return stand_in(
            t,
            self._classes[i] if self._classes and is_entry else type(t),
            self._attributes[i] if self._attributes and is_entry else None,
            need=need,
            is_computed=is_entry and self._had_node[i],
        )

    def put_back(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which copied inputs, to run on, hold what they held."""
        groups, refs = self._overlaps, self._refs
        shared = {
            i for g in groups if self._first_there(g, tensors) is not None for i in g
        }
        may_be = self.may_be_written
        written = [i for i in may_be if i in shared or tensors[i] is refs[i]()]
        if not written:
            return contextlib.nullcontext()
        return holding([tensors[i] for i in written], [self.values[i] for i in written])

    def rows_put_back(self) -> AbstractContextManager[Any]:
        """Return a context in which rows that embeddings scaled are as at the call."""
        if not self.renorms:
            return contextlib.nullcontext()
        pairs = [
            (self.values[i], [*ours, *later.changes])
            for i, (ours, later) in self.renorms.items()
        ]
        return holding_rows(pairs)
