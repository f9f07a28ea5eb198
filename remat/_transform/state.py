"""What a call under torch.func ran in and on: a recompute restores it, or is refused.

`function` notes it in the forward. Buffers that the function updates in place are
updated once: the forward works on copies, which share memory until they are written,
and what it wrote is written back. A recompute starts from the values before that.

Invariant: no tensor is held here. The node that saves the inputs holds them.
Rejected: to compare values. Versions tell of a change, and cost nothing. Versions do
not suffice for buffers: batch norm's update of its running statistics is not counted.
Rejected: one class with `SavedInputs` of `inputs`, which holds the tensors of a call.
Here torch would not see them, and no hook for saved tensors could take them away.
"""

import functools
import operator
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from remat._ambient.ambient import NOTHING, Ambient, put_back
from remat._ambient.modes import NO_MODES, ModesAround, modes_around
from remat._base.absent import Absent
from remat._base.code import has_marks
from remat._base.program import (
    InputIndex,
)
from remat._base.tensors import changed_since, versions_of
from remat._base.types import TENSORS
from remat._partial.decide import warn_once
from remat._partial.replay import Replay
from remat._reach.reach import Reach
from remat._torch import (
    FunctionalValue,
    base_tensor,
    current_layer,
    dispatch_mode_count,
    has_proxies,
    is_below_tracer,
    torch_functions,
)
from remat._transform.checks import enter_refusing_reads, refuse_needed
from remat._transform.leaves import (
    MOVED,
    NO_CHANGES,
    LeafChanges,
    addresses_of,
    holding,
    in_class,
    may_be_gathered,
    preserved_marks,
)


class CallState(NamedTuple):
    """What one call ran in.

    Attributes:
        ambient: what the function reads without being passed it.
        versions: how often each input had been changed in place.
        classes: of the inputs; empty where all are plain tensors.
        values: of the inputs, where AOTAutograd makes functions of operations in place.
        own: the inputs that the forward ran on itself, as leaves of the user's.
        leaf_changes: what the forward changed of the user's own leaves.
        next_hook: the number that the next hook set anywhere was to get.
        modes: the user's modes for operations around the call; None without any mode.
        addresses: of the user's own leaves and of small constants, which these are,
            and where in memory.
        away: the inputs that nodes sent away: these come back as they were.
    """

    ambient: Ambient
    versions: Sequence[int | None]
    classes: Sequence[type]
    values: Sequence[Any] = ()
    own: Container[InputIndex] = ()
    leaf_changes: LeafChanges = NO_CHANGES
    next_hook: int = 0
    modes: ModesAround | None = None
    addresses: tuple[Sequence[InputIndex], Sequence[int] | None] = (), None
    away: Container[InputIndex] = ()

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
        inputs = [*map(base_tensor, inputs)]
        changed = changed_since(inputs, self.versions, (Absent,), self.away)
        changed += [i for i, value in enumerate(self.values) if value.has_changed()]
        if changed:
            refuse_needed(reach, changed, changed)

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
        where, then = self.addresses
        if then:
            self._check_moved(reach, inputs, where, then)
        state, around = self._restored(reach, inputs, mode), NOTHING
        is_marked = reach.attributes or self.leaf_changes.marks
        try:
            if state is NOTHING and not (is_marked or updated or self.classes):
                return run(inputs), inputs
            with state, self._marked(inputs) if is_marked else NOTHING:
                if not (updated or self.classes):
                    return run(inputs), inputs
                if updated:
                    inputs, around = buffers_to_run_on(reach, inputs, updated)
                if self.has_classes():
                    inputs = self.in_classes(inputs)
                    with around, torch_functions():
                        return run(inputs), inputs
                with around:
                    return run(inputs), inputs
        finally:
            put_back(streams)

    def under_modes(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs under the user's modes for operations that changed some."""
        modes = self.modes or (NO_MODES if dispatch_mode_count() else None)
        if modes is None or self.values:
            return run
        return functools.partial(modes.call, run)

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs a forward, and notes whether the user's modes change it."""
        if self.modes is None:
            return run
        return functools.partial(self.modes.run_watched, run)

    @staticmethod
    def _check_moved(
        reach: Reach,
        inputs: Sequence[Tensor],
        where: Sequence[InputIndex],
        then: Sequence[int],
    ) -> None:
        """Warn of leaves that were given other memory since; refuse constants."""
        if current_layer() is not None or may_be_gathered():
            return
        now = addresses_of([inputs[i] for i in where])
        if now is None or now == then:
            return
        for i in compress(where, map(operator.ne, now, then)):
            if not inputs[i].requires_grad:
                refuse_needed(reach, [i], [i])
            name, label = reach.name_of(i), reach.label
            warn_once(MOVED.format(name=name, label=label))

    def _marked(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context that leaves no hooks or attributes on the user's own."""
        are_own = [i in self.own or not t.requires_grad for i, t in enumerate(inputs)]
        own = [t for t in compress(inputs, are_own) if has_marks(type(t))]
        others = [t for t, is_own in zip(inputs, are_own, strict=True) if not is_own]
        return preserved_marks(own, self.next_hook, others)

    def _restored(
        self, reach: Reach, inputs: Sequence[Tensor], mode: Any
    ) -> AbstractContextManager[Any]:
        ambient = self.ambient.restored()
        if current_layer() is not None:
            inputs = [*map(base_tensor, inputs)]
        if versions_of(inputs) == self.versions:
            return ambient
        if has_proxies():  # these passed a barrier, and were checked before it
            return ambient
        changed = changed_since(inputs, self.versions, (Absent,), self.away)
        if not changed:
            return ambient
        if isinstance(mode, Replay):
            # An operation that reads it may be left out, and its graph may not.
            refuse_needed(reach, mode.runnable.plan.needed, changed)
        return enter_refusing_reads(reach, inputs, changed, ambient)

    def were_hooks_set(self) -> bool:
        """Say whether any hooks were set since the call."""
        return RemovableHandle.next_id != self.next_hook

    def has_classes(self) -> bool:
        """Say whether inputs are to be given their classes back.

        At the base saved tensors come back as plain ones.
        """
        return bool(self.classes) and current_layer() is None

    def in_classes(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return inputs in the classes that they had."""
        return [*map(in_class, inputs, self.classes)]


def call_state(reach: Reach, inputs: Sequence[Tensor]) -> CallState:
    """Return what a call runs in, here and now."""
    ambient = Ambient(reach.streams, reach.uses_stream_states)
    is_plain = TENSORS.issuperset(map(type, inputs))
    classes = () if is_plain else [*map(type, inputs)]
    values = [*map(FunctionalValue, inputs)] if is_below_tracer() else ()
    return CallState(
        ambient,
        versions_of(inputs),
        classes,
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
    for i in updated:
        if i not in own and type(given[i]) is not Absent:
            given[i] = given[i].clone()
    if not own:
        return given, nullcontext()
    held = [given[i] for i in own]
    for i, t in own.items():
        given[i] = t
    return given, holding([*own.values()], held)
