"""Records what the first forward of a kind does, and what its graph saved.

Invariant: a record holds no tensor, and recording changes no value. What it gets wrong
shows in the replay. An operation is left out only if all that it did is known.
Rejected: recording on fake tensors, a second run. The user's code may look at values,
and some operations choose another kernel.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from remat._base.calls import Places
from remat._base.context import here
from remat._base.op import NO_NAMES, Op
from remat._base.operators import Observer
from remat._base.source import user_line
from remat._graph.graph import nodes_of, residuals_at
from remat._partial.candidates import Candidates
from remat._partial.effects import (
    DrawDetector,
    Exposures,
    Timing,
    declared_writes,
    metadata_only_outputs,
    traits_of,
    updated_statistics,
)
from remat._partial.plan import Pack, Record, Step, Within
from remat._partial.runnable import UNRECORDED, statics_of
from remat._partial.values import Arguments, Results, Storages, value_of
from remat._torch.autograd import current_task
from remat._torch.levels import base_tensor, transforms
from remat._torch.modes import call_kernel, no_torch_functions
from remat._torch.tensors import SHARED_COPY, has_no_memory, is_lazy
from remat.policies import Policy
from remat.policies._within import times_operations


_NEW_EMPTY = torch.ops.aten.new_empty_strided.default
_ASSIGNS = "it assigns to the .data of a tensor"
_UNSEEN = (
    "a part of it is not seen: a branch of torch.cond that torch compiles, or a kept "
    "call that is entered again"
)


class Recorder(Observer):
    """Records the operations of one forward, on `inputs`, with storages by number.

    If there is a policy, it is asked which results may be saved.
    """

    unseen = UNRECORDED - {SHARED_COPY}
    tells_modules = False  # whoever asks

    def __init__(
        self,
        inputs: Sequence[Tensor],
        policy: Policy | None,
        storages: Storages | None = None,
    ) -> None:
        super().__init__()
        self._policy = policy
        self._timing = Timing() if times_operations(policy) else None
        self._storages = storages = Storages() if storages is None else storages
        self._made: set[int] = set()  # storages, by operations
        self._updates: list[tuple[int, ...]] = []  # of running statistics
        self._names: dict[int, set[str]] = {}
        self.steps: list[Step] = []
        # Storages whose memory Python read or wrote other than by operations.
        self.exposed: set[int] = set()
        self.inputs = tuple(storages.number(base_tensor(t)) for t in inputs)
        self._within: list[Within] = []
        self.saved_storages = SavedStorages(storages, self.steps, self._made)
        self.candidates = Candidates(policy)
        # Whether a backward inside copied a gradient for a leaf. It does so only while
        # something else holds that gradient, as candidates do.
        self.copies_gradients, self._task = False, current_task()
        self.why_void = ""  # why no call can follow the record
        self.begins_anew = False  # the next call is recorded again, without a warning
        asks = self.tells_modules or (policy is not None and policy.asks_modules)
        self._places = Places(asks, is_asked=asks or policy is not None)

    @override
    def __enter__(self) -> Any:
        here().listeners.append(self)
        self._next_hook = RemovableHandle.next_id
        self._places.begin()
        self._exposures = Exposures(self.expose, self.assign)
        self._exposures.__enter__()
        self._transforms = transforms()
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        here().listeners.remove(self)
        self._places.end()
        super().__exit__(exc_type, exc_val, exc_tb)
        self._exposures.__exit__(exc_type, exc_val, exc_tb)
        del self._exposures  # which refers to this

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is SHARED_COPY:
            result = func(*args, **kwargs)
            # The values that it stands for are needed where it is read.
            self._storages.alias(result, self._storages.number(args[0]))
            return result
        # A TorchFunctionMode of the user's is not to see what is asked of tensors here.
        with no_torch_functions():
            # Before the operation, which may draw, and may change its arguments.
            moves = traits_of(func).may_move_a_stream
            detector = DrawDetector(func, args, kwargs) if moves else None
            arguments = Arguments(args, kwargs)
            result = (self._timing or call_kernel)(func, *args, **kwargs)
            draws = detector is not None and detector.has_drawn()
            self.note(func, arguments, Results(result, arguments), draws=draws)
        return result

    def note(
        self, func: Any, arguments: Arguments, results: Results, *, draws: bool
    ) -> None:
        """Add an operation to the record."""
        storages, traits = self._storages, traits_of(func)
        args, kwargs, number = arguments.args, arguments.kwargs, storages.number
        if func is _NEW_EMPTY and current_task() != self._task:
            self.copies_gradients = True
        written = declared_writes(traits, args, kwargs)
        if written:
            if not traits.is_counted:
                increment_version(written)
            # In a replay around. No storage tells which views there are of it.
            self.begins_anew |= any(map(has_no_memory, written))
        reads = tuple(map(number, arguments.tensors))
        writes = tuple(map(number, written))
        self._updates.append(
            tuple(map(number, updated_statistics(traits, args, kwargs)))
        )
        # Storages that get a number from here on were made by this operation.
        known = len(storages)
        makes = tuple(map(number, results.tensors))
        hides = arguments.hides_aliases or results.hides_aliases
        # No plan may leave it out, for what it does or for what it ran on.
        always_runs = (
            traits.is_read_by_python
            # For tensors of a subclass `on_subclass` says what may be left out.
            or not ((arguments.all_strided and results.all_strided) or hides)
            or not (results.tensors or written)
            or any(map(is_lazy, results.tensors))
            # It wrote to what the call has not met before.
            or not all(s in self._made or s in self.inputs for s in writes)
            or (bool(written) and _resizes(written, arguments))
        )
        values, place = tuple(results.values), self._places.of(func)
        step = Step(
            Op(func, *arguments.described, values, NO_NAMES, user_line(), *place),
            reads,
            makes,
            writes,
            draws=draws,
            may_draw=traits.may_draw,
            metadata_only=metadata_only_outputs(func, len(values)),
            always_runs=always_runs,
            hides_aliases=hides,
            on_subclass=arguments.on_subclass,
            result=results.form,
        )
        # Only now, as what it made counts as the call's own from here on.
        self._made.update(range(known, len(storages)))
        self.steps.append(step)
        if self._timing is not None:
            self._timing.note(step.op)
        if self._policy is not None:
            statics = statics_of(args, kwargs)
            self.candidates.ask(step, statics, results.tensors, written)

    @property
    def paths(self) -> Sequence[str]:
        """Where all modules are, if the policy asks."""
        calls = self._places.calls
        return [] if calls is None else [path for path, _ in calls.all if path]

    @override
    def note_unseen(self) -> None:
        """Note that the record lacks operations."""
        self.why_void = _UNSEEN

    def name(self, tensor: Tensor, name: str) -> None:
        """Give the value of a tensor a name."""
        number = self._storages.known(tensor)
        if number is not None:
            self._names.setdefault(number, set()).add(name)
            self.candidates.hold_named(number, base_tensor(tensor), self.steps)

    def note_within(self, *tensors: Sequence[Tensor]) -> None:
        """Note a call within: the inputs that may do for it, and its residuals."""
        each = (map(self._storages.known, part) for part in tensors)
        found = (frozenset(n for n in part if n is not None) for part in each)
        self._within.append(Within(*found))

    def expose(self, tensor: Tensor) -> None:
        """Note that Python takes the memory of a tensor."""
        number = self._storages.known(tensor)
        if number is not None:
            self.exposed.add(number)

    def assign(self, tensor: Tensor, value: Tensor) -> None:
        """Note that a tensor is given the memory of another.

        No operation tells, and one that is held for the policy has another value then.
        """
        known = self._storages.known
        number, is_ours = known(tensor), known(value) is not None
        is_held = number is not None and self.candidates.has([number])
        if is_held or (number in self.inputs and is_ours):
            self.why_void = self.why_void or _ASSIGNS

    def note_saved(self, outs: Sequence[Any]) -> None:
        """Note what the graph of each output saved."""
        self.saved_storages.note_saved(outs)

    def end(self) -> None:
        """Let go of the graph; raise what the policy raised, if it did."""
        self.candidates.end()

    def record(self, outs: Sequence[Any], gone: Container[int] = ()) -> Record:
        """Return the record."""
        return Record(
            tuple(self._completed()),
            self.inputs,
            self.saved_storages.roots(gone),
            tuple(map(self._storages.known, outs)),
            tuple(self.saved_storages.packs),
            tuple(self._storages.inside.items()),
            self._transforms,
            RemovableHandle.next_id > self._next_hook,
            self.saved_storages.within(self._within),
        )

    def _completed(self) -> list[Step]:
        """Return the operations, with names, hidden draws and updates of statistics.

        A batch norm writes to statistics that something reads afterwards. If nothing
        does, the write is left out: a recompute drops it, and an operation that writes
        to memory of others could not be saved.
        """
        names, read = self._names, {*self.exposed}
        draws = any(step.draws for step in self.steps)
        found: list[Step] = []
        each = zip(reversed(self.steps), reversed(self._updates), strict=True)
        for step, updated in each:
            op, writes = step.op, step.writes
            if names:
                made = {*step.makes}.difference(step.reads)
                own = [name for s in made for name in names.get(s, ())]
                op = replace(op, names=frozenset(own)) if own else op
            if not read.isdisjoint(updated):
                writes += updated
                updated = ()
            read.update({*step.reads}.difference(updated))
            # An operation of others may draw from a stream that nobody knows of.
            hidden = draws and traits_of(op.func).is_of_others
            is_drawing = step.draws or hidden
            found.append(step._replace(op=op, writes=writes, draws=is_drawing))
        return found[::-1]


def tell_recorders(
    inputs: Sequence[Tensor], plans: Any, residuals: Sequence[Tensor]
) -> None:
    """Tell the recorders around a call, which has ended, of its residuals."""
    every = range(len(plans.record.roots))
    needed = plans.runnable_for(every, saves=False).plan.needed
    for recorder in here().listeners:
        if isinstance(recorder, Recorder):
            recorder.note_within([inputs[i] for i in needed], residuals)


def _resizes(written: Iterable[Tensor], arguments: Arguments) -> bool:
    """Say whether an operation changed the metadata of what it wrote to."""
    before = dict(zip(map(id, arguments.tensors), arguments.values, strict=True))
    return any(value_of(t) != before[id(t)] for t in written)


# --- What the graph saved: the roots of plans ---


class SavedStorages:
    """The storages that a graph saved, for each handle or each output.

    One set for a call would not do: a backward that reaches few storages would
    recompute for all.
    """

    def __init__(
        self, storages: Storages, steps: Sequence[Step], made: Collection[int]
    ) -> None:
        self._storages, self._steps, self._made = storages, steps, made
        self._roots: list[set[int]] = []
        self._read: set[int] = set()  # other than as residuals of calls within
        self.packs: list[Pack | None] = []  # what each handle stands for

    def pack(self, tensor: Tensor | None) -> None:
        """Note that a handle stands for a tensor; None for what is saved itself."""
        if tensor is None:
            self.packs.append(None)
            self._roots.append(set())
            return
        base = base_tensor(tensor)
        number = self._storages.number(base)
        version = 0 if base.is_inference() else base._version
        pack = Pack(number, value_of(base), len(self._steps), is_lazy(base), version)
        self.packs.append(pack)
        self._roots.append({number})

    def note_copy(self, position: int, tensor: Tensor | None) -> None:
        """Note that a tensor has the value of what was saved at a position."""
        pack = self.packs[position]
        if pack is not None and tensor is not None:
            self._storages.alias(tensor, pack.storage)

    def note_saved(self, outs: Sequence[Any]) -> None:
        """Note what the graph of each output saved, while there is a graph."""
        self._roots += [set() for _ in outs[len(self._roots) :]]
        # Of many outputs the graph is walked once for all.
        parts = [[k] for k in range(len(outs))]
        for part in parts if len(outs) <= _MANY else [[*range(len(outs))]]:
            found = self._saved([outs[k] for k in part])
            for k in part:
                self._roots[k] |= found

    def _saved(self, outs: Iterable[Any]) -> set[int]:
        """Return the storages that the backward of some outputs reads."""
        found: set[int] = set()
        known = self._storages.known
        for node, tensors in nodes_of(outs):
            kind = type(node).__name__
            if kind == "CopySlices":  # of what is changed in place
                written = [step for step in self._steps if step.writes]
                saved = {s for step in written for s in (*step.reads, *step.makes)}
            elif kind in SILENT:
                saved = {*self._made}
            else:
                saved = {s for s in map(known, tensors) if s is not None}
            found |= saved
            self._read |= saved.difference(map(known, residuals_at(node)))
        return found

    def within(self, calls: Iterable[Within]) -> tuple[Within, ...]:
        """Return the calls within whose residuals the graph alone holds.

        Where it holds handles, these ask for their values one by one.
        """
        if self.packs:
            return ()
        each = ((inputs, residuals - self._read) for inputs, residuals in calls)
        return tuple(Within(*call) for call in each if call[1])

    def roots(self, gone: Container[int]) -> tuple[frozenset[int], ...]:
        """Return the roots of each, none for the handles that are gone."""
        return tuple(
            frozenset(() if position in gone else roots)
            for position, roots in enumerate(self._roots)
        )


_MANY = 16
# Nodes that do not tell what they saved: of in-place operations on views, and in C++.
SILENT = {"CopySlices", "CppFunction"}
