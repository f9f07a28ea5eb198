"""What a call under torch.func runs on and in: noted by the forward, and restored.

In place of an input that is differentiated is a fresh leaf, at which the graph of the
forward ends. Leaves of the user's and small constants stay themselves: no holder is
written for them, and other threads may use them. Buffers are updated once: a recompute
starts from what they held before.

Invariant: a write of the forward is noticed, and what was there before is known. No
tensor is held in `CallState`: the node that saves the inputs holds them.
Rejected: to compare values: versions cost nothing. But batch norm counts no update.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from remat._ambient.ambient import NOTHING, Ambient, put_back
from remat._ambient.modes import NO_MODES, ModesAround, modes_around
from remat._base.absent import Absent
from remat._base.code import has_marks
from remat._base.errors import CaptureError
from remat._base.program import InputIndex, PerInput, Request, leaves_for
from remat._base.tensors import changed_since, versions_of
from remat._base.types import TENSORS
from remat._partial.decide import warn_once
from remat._partial.replay import Replay
from remat._reach.copies import note_copy, value_at_copy
from remat._reach.reach import Reach
from remat._torch.autograd import tells_of, top_hooks
from remat._torch.graphs import FunctionalValue, is_below_tracer
from remat._torch.levels import base_tensor, current_layer
from remat._torch.modes import dispatch_mode_count, torch_functions
from remat._torch.tensors import is_shared, shared_copy, storage_id
from remat._torch.tracing import has_proxies
from remat._transform.checks import enter_refusing_reads, refuse_needed
from remat._transform.leaves import (
    MOVED,
    NO_CHANGES,
    ONLY_MARKS,
    SMALL,
    LeafChanges,
    Memory,
    WatchedLeaves,
    addresses_of,
    has_same_bytes,
    holding,
    in_class,
    in_other_memory,
    memories_of,
    preserved_marks,
    with_bytes,
)


class CallState(NamedTuple):
    ambient: Ambient  # what the function reads without being passed it
    versions: Sequence[int | None]  # how often each input had been changed in place
    classes: Sequence[type]  # of the inputs; empty where all are plain tensors
    # Of the inputs, where AOTAutograd makes functions of operations in place.
    values: Sequence[Any] = ()
    own: Container[InputIndex] = ()  # on which the forward ran itself: user's leaves
    leaf_changes: LeafChanges = NO_CHANGES  # of the forward, of the user's own leaves
    next_hook: int = 0  # the number that the next hook set anywhere was to get
    # The user's modes for operations around the call; None without any mode.
    modes: ModesAround | None = None
    # The user's own leaves and small constants, which these are, and where in memory.
    addresses: tuple[Sequence[InputIndex], Sequence[int] | None] = (), None
    away: Container[InputIndex] = ()  # that nodes sent away: they come back unchanged

    def updated(self, before: Mapping[int, Tensor]) -> "CallState":
        """Return it for recomputes on inputs as they were before some were updated."""
        versions, values = [*self.versions], [*self.values]
        for i, value in before.items():
            versions[i] = value._version
            if values:
                values[i] = FunctionalValue(value)
        new = self.located([i for i in range(len(versions)) if i not in before])
        return new._replace(versions=versions, values=values)

    def of_first(self, count: int) -> "CallState":
        """Return it for the first inputs: those of the call, without their tangents."""
        return self.located(range(count))._replace(
            versions=self.versions[:count],
            classes=self.classes[:count],
            values=self.values[:count],
        )

    def located(self, inputs: Collection[InputIndex]) -> "CallState":
        """Return it with the addresses of some inputs alone."""
        where, then = self.addresses
        if then is None:
            return self
        pairs = [(i, a) for i, a in zip(where, then, strict=True) if i in inputs]
        return self._replace(addresses=([i for i, _ in pairs], [a for _, a in pairs]))

    def refuse_changed(self, reach: Reach, inputs: Sequence[Tensor]) -> None:
        """Refuse inputs that were changed in place since, while a graph is made."""
        changed = self._changed([*map(base_tensor, inputs)])
        changed += [i for i, value in enumerate(self.values) if value.has_changed()]
        if changed:
            refuse_needed(reach, changed, changed)

    def _changed(self, inputs: Sequence[Tensor]) -> list[InputIndex]:
        return changed_since(inputs, self.versions, (Absent,), self.away)

    def run(
        self,
        run: Callable[[Sequence[Tensor]], Any],
        reach: Any,
        inputs: Sequence[Tensor],
        updated: Sequence[InputIndex],
        mode: Any,
    ) -> tuple[Any, Sequence[Tensor]]:
        """Run something in this state. Also return the inputs it was given."""
        streams = self.ambient.streams_now(reach.streams)
        self._check_moved(reach, inputs)
        state, around = self._restored(reach, inputs, mode), NOTHING
        is_marked = reach.attributes or self.leaf_changes.marks
        try:
            if state is NOTHING and not (is_marked or updated or self.classes):
                return run(inputs), inputs
            with state, self._marked(inputs) if is_marked else NOTHING:
                if updated:
                    inputs, around = buffers_to_run_on(reach, inputs, updated)
                if not self.classes or current_layer() is not None:
                    with around:
                        return run(inputs), inputs
                # At the base saved tensors come back as plain ones.
                inputs = [*map(in_class, inputs, self.classes)]
                with around, torch_functions():
                    return run(inputs), inputs
        finally:
            put_back(streams)

    def under_modes(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs under the user's modes for operations that changed some."""
        modes = self.modes or (NO_MODES if dispatch_mode_count() else None)
        if modes is None or self.values:
            return run
        return functools.partial(modes.call, run)

    def _check_moved(self, reach: Reach, inputs: Sequence[Tensor]) -> None:
        """Warn of leaves that were given other memory since; refuse constants."""
        where, then = self.addresses
        if not then or current_layer() is not None:
            return
        now = addresses_of([inputs[i] for i in where])
        for i in map(where.__getitem__, in_other_memory(then, now)):
            if not inputs[i].requires_grad:
                refuse_needed(reach, [i], [i])
            name, label = reach.name_of(i), reach.label
            warn_once(MOVED.format(name=name, label=label))

    def _marked(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context that leaves no hooks or attributes on the user's own."""
        are_own = [i in self.own or not t.requires_grad for i, t in enumerate(inputs)]
        own = [t for t in compress(inputs, are_own) if has_marks(type(t))]
        others = [*compress(inputs, map(operator.not_, are_own))]
        return preserved_marks(own, self.next_hook, others)

    def _restored(
        self, reach: Reach, inputs: Sequence[Tensor], mode: Any
    ) -> AbstractContextManager[Any]:
        ambient = self.ambient.restored()
        if current_layer() is not None:
            inputs = [*map(base_tensor, inputs)]
        # In a graph they passed a barrier, and were checked before it.
        if versions_of(inputs) == self.versions or has_proxies():
            return ambient
        changed = self._changed(inputs)
        if not changed:
            return ambient
        if isinstance(mode, Replay):
            # An operation that reads it may be left out, and its graph may not.
            refuse_needed(reach, mode.runnable.plan.needed, changed)
        return enter_refusing_reads(reach, inputs, changed, ambient)


def call_state(reach: Reach, inputs: Sequence[Tensor]) -> CallState:
    ambient = Ambient(reach.streams, reach.uses_stream_states)
    is_plain = TENSORS.issuperset(map(type, inputs))
    values = [*map(FunctionalValue, inputs)] if is_below_tracer() else ()
    return CallState(
        ambient,
        versions_of(inputs),
        () if is_plain else [*map(type, inputs)],
        values,
        next_hook=RemovableHandle.next_id,
        modes=modes_around() if dispatch_mode_count() and not values else None,
    )


def buffers_to_run_on(
    reach: Any, inputs: Sequence[Tensor], updated: Sequence[InputIndex]
) -> tuple[Sequence[Tensor], AbstractContextManager[Any]]:
    """Return inputs that a recompute updates again, and a context to run it in.

    These are copies. Where an array of the user's may share their memory, they are
    themselves, and in the context hold what they held.
    """
    given, at_base = list(inputs), current_layer() is None and not has_proxies()
    own = reach.beside_arrays(updated) if at_base else {}
    held = [given[i] for i in own]
    for i in updated:
        if i in own:
            given[i] = own[i]
        elif type(given[i]) is not Absent:
            given[i] = given[i].clone()
    return given, holding([*own.values()], held) if own else NOTHING


# --- The forward ---


class ForwardInputs:
    """The tensors that a forward runs on, and what it changes of them.

    Attributes:
        inner: the tensors: fresh leaves, copies of what it may update, or the user's
            own, of which is noted what they hold.
        copies: of inputs that it may update, by index.
    """

    __slots__ = (
        *("_leaves_at", "_memory", "_own", "_watched", "copies", "inner", "inputs"),
    )

    def __init__(
        self,
        inputs: Sequence[Tensor],
        request: Request,
        buffers: Mapping[InputIndex, bool],
        passed: Sequence[Tensor],  # in levels; empty at the base
    ) -> None:
        self.inputs, needs = inputs, request.needs
        own: Sequence[int] = range(len(inputs))
        if passed:
            # The graph of one that is differentiated in a level ends at a new leaf: one
            # that is held afterwards would have no path in that level, and is a leak.
            own = [*compress(own, map(operator.is_, inputs, passed))]
        try:
            self.inner = leaves_for(inputs, needs, own)
        except RuntimeError as error:
            if not tells_of("a level that has ended", error):
                raise
            raise CaptureError(_ENDED) from None
        self._own = [*map(operator.is_, self.inner, inputs)]
        if request.at_base:
            for t, leaf in zip(inputs, self.inner, strict=True):
                if leaf is not t and t.grad_fn is not None:
                    # `retain_grad` is called on the input: on a leaf it does nothing.
                    vars(leaf)["retain_grad"] = t.retain_grad
        self.copies: dict[int, Tensor] = {}
        self._memory: dict[int, Memory] = {}
        if buffers or False in needs:
            self._note_buffers(needs, buffers)
        self._leaves_at: Sequence[InputIndex] = ()
        self._watched: WatchedLeaves | None = None
        if True in self._own:
            flags = [*map(operator.and_, self._own, needs)]
            self._leaves_at = [*compress(range(len(inputs)), flags)]
            leaves = [*compress(inputs, flags)]
            self._watched = WatchedLeaves(leaves, len(leaves))

    def _note_buffers(
        self, needs: PerInput, buffers: Mapping[InputIndex, bool]
    ) -> None:
        """Note what inputs hold that may be updated, or put copies in their place.

        Of large ones a copy shares the memory until it is written.
        """
        # Running statistics are vectors, and may be passed as arguments as well.
        each = enumerate(self.inner)
        may_be = [i for i, t in each if not needs[i] and (i in buffers or t.dim() == 1)]
        if not is_below_tracer():
            small = [i for i in may_be if self.inner[i].numel() <= SMALL]
            found = memories_of([self.inner[i] for i in small])
            known: Any = compress(zip(small, found, strict=True), found)
            self._memory = dict(known)
        for i in may_be:
            if i in self._memory:
                continue
            t = self.inner[i]
            copy = shared_copy(t)
            if copy is not None or buffers.get(i, False):
                copy = t.clone() if copy is None else copy
                self.inner[i] = self.copies[i] = copy
                note_copy(copy, t)

    def _written(self, buffers: Mapping[InputIndex, bool]) -> list[InputIndex]:
        inputs, memory = self.inputs, self._memory
        now = memories_of([inputs[i] for i in memory])
        found = [*compress(memory, map(operator.ne, memory.values(), now))]
        for i, copy in self.copies.items():
            if is_shared(copy):
                continue
            # It has memory of its own and the same value: the same value was written,
            # or a kernel that may write only read it.
            captured = i in buffers and shared_copy(copy) is not None
            if copy._version or captured or not has_same_bytes(copy, inputs[i]):
                found.append(i)
        return found

    def _value_before(self, i: InputIndex) -> Tensor:
        """Return what an input held before it was written to, and write to it."""
        buffer = self.inputs[i]
        if i in self._memory:
            return with_bytes(buffer, self._memory[i][1])
        copy = self.copies[i]
        before = value_at_copy(copy, buffer)
        if not has_same_bytes(copy, buffer):
            buffer.copy_(copy)
        return before

    def _shares_memory(self, i: InputIndex) -> bool:
        """Say whether another input is in the memory of one that was written to."""
        with contextlib.suppress(RuntimeError):  # sparse tensors have none
            storages = [storage_id(base_tensor(t)) for t in self.inputs]
            return storages.count(storages[i]) > 1
        return False

    def fresh(self) -> list[Tensor]:
        """Return those that are nobody else's. A graph that leads to one is a leak."""
        if True not in self._own:
            return self.inner
        return [*compress(self.inner, map(operator.not_, self._own))]

    def state_after(
        self,
        state: CallState,
        buffers: Mapping[InputIndex, bool],
        changed_inside: Callable[[InputIndex | None], Exception],
    ) -> tuple[CallState, dict[InputIndex, Tensor]]:
        """Return the state for recomputes, and what inputs held before an update.

        What is no buffer must not be updated, and no leaf be given other memory.
        """
        before: dict[InputIndex, Tensor] = {}
        for i in self._written(buffers) if self._memory or self.copies else ():
            # Of what shares memory there would be a copy for each.
            if i not in buffers or self._shares_memory(i):
                raise changed_inside(i)
            before[i] = self._value_before(i)
        if self._watched is None:
            if RemovableHandle.next_id != state.next_hook:
                state = state._replace(leaf_changes=ONLY_MARKS)
        else:
            changes = self._watched.changes(self.inputs)
            if changes.moves:
                moved = self._watched.moved()
                raise changed_inside(None if moved is None else self._leaves_at[moved])
            # Of leaves and small constants, None if that cannot be asked. Hooks around
            # the node, as those of a call, may give back another tensor of that value.
            where, there = self._leaves_at, self._watched.addresses
            if there is not None and self._memory and top_hooks(True) is None:
                where = [*where, *self._memory]
                others = addresses_of([self.inputs[i] for i in self._memory])
                there = None if others is None else [*there, *others]
            own = () if changes.accumulates else frozenset(self._leaves_at)
            place = where, there
            state = state._replace(leaf_changes=changes, addresses=place, own=own)
        return (state.updated(before) if before else state), before


_ENDED = (
    "remat: what the function reaches holds a tensor of a torch.func.vmap that has "
    "ended, which no operation takes. Remove it before the call."
)
