"""The tensors that a forward under torch.func runs on, and which of them it changes.

In place of an input that is differentiated is a fresh leaf, at which the graph of the
forward ends. A leaf of the user's stays itself, and so do small constants: they are
found by identity, no holder is written for them, and other threads may use them.

Invariant: a write of the forward is noticed, and what was there before is known. The
graph of what is differentiated in a level ends at a fresh leaf: a graph that leads to
one after the forward has no path in that level, and is a leak.
Rejected: fresh leaves for all. In a module that several threads use, each would find
the leaves of the others.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from remat._base.errors import CaptureError
from remat._base.program import InputIndex, PerInput, Request, leaves_for
from remat._reach.copies import note_copy, value_at_copy
from remat._torch import (
    base_tensor,
    is_below_tracer,
    is_shared,
    shared_copy,
    storage_id,
    tells_of,
)
from remat._transform.leaves import (
    LeafChanges,
    Memory,
    WatchedLeaves,
    addresses_of,
    has_same_bytes,
    memories_of,
    with_bytes,
)
from remat._transform.state import CallState


_HOOKED = LeafChanges(accumulates=False, moves=False, marks=True)
SMALL = 2**14  # elements of an input of which the bytes are noted


class ForwardInputs:
    """The tensors that a forward runs on, and what it changes of them.

    Attributes:
        inner: the tensors: fresh leaves, copies of what it may update, or the user's
            own, of which is noted what they hold.
        copies: of inputs that it may update, by index.
    """

    __slots__ = (
        "_leaves_at",
        "_memory",
        "_own",
        "_watched",
        "copies",
        "inner",
        "inputs",
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
            # that is held afterwards would have no path in that level.
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
        small: list[int] = []
        if not is_below_tracer():
            small = [i for i in may_be if self.inner[i].numel() <= SMALL]
        found = zip(small, memories_of([self.inner[i] for i in small]), strict=True)
        self._memory = {i: memory for i, memory in found if memory is not None}
        for i in may_be:
            if i in self._memory:
                continue
            t = self.inner[i]
            copy = shared_copy(t)
            if copy is not None or buffers.get(i, False):
                copy = t.clone() if copy is None else copy
                self.inner[i] = self.copies[i] = copy
                note_copy(copy, t)

    def _written(self, buffers: Mapping[InputIndex, bool]) -> Iterator[int]:
        """Yield the inputs that the forward wrote to."""
        now = memories_of([self.inputs[i] for i in self._memory])
        for (i, memory), there in zip(self._memory.items(), now, strict=True):
            if there != memory:
                yield i
        for i, copy in self.copies.items():
            if is_shared(copy):
                continue
            # It has memory of its own and the same value: the same value was written,
            # or a kernel that may write only read it.
            captured = i in buffers and shared_copy(copy) is not None
            if copy._version or captured or not has_same_bytes(copy, self.inputs[i]):
                yield i

    def _value_before(self, i: InputIndex) -> Tensor:
        """Return what an input held before it was written to."""
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
            written = storage_id(base_tensor(self.inputs[i]))
            others = (t for j, t in enumerate(self.inputs) if j != i)
            return any(storage_id(base_tensor(t)) == written for t in others)
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
        written = self._written(buffers) if self._memory or self.copies else ()
        for i in written:
            if i not in buffers:
                raise changed_inside(i)
            if self._shares_memory(i):  # of each there would be a copy
                raise changed_inside(i)
            before[i] = self._value_before(i)
        if self._watched is None:
            hooked = RemovableHandle.next_id != state.next_hook
            if hooked:
                state = state._replace(leaf_changes=_HOOKED)
        else:
            changes = self._watched.changes(self.inputs)
            if changes.moves:
                moved = self._watched.moved()
                raise changed_inside(None if moved is None else self._leaves_at[moved])
            there = self._addresses(self._watched.addresses)
            own = () if changes.accumulates else frozenset(self._leaves_at)
            state = state._replace(leaf_changes=changes, addresses=there, own=own)
        return (state.updated(before) if before else state), before

    def _addresses(
        self, leaves: Sequence[int] | None
    ) -> tuple[Sequence[InputIndex], Sequence[int] | None]:
        """Return which inputs are the user's own leaves or small constants, and where.

        In memory, that is; None if that cannot be asked.
        """
        if leaves is None or not self._memory:
            return self._leaves_at, leaves
        found = addresses_of([self.inputs[i] for i in self._memory])
        there = None if found is None else [*leaves, *found]
        return [*self._leaves_at, *self._memory], there


_ENDED = (
    "remat: what the function reaches holds a tensor of a torch.func.vmap that has "
    "ended, which no operation takes. Remove it before the call."
)
