"""What a call under torch.func ran in and on: a recompute restores it, or is refused.

`function` notes it in the forward. Buffers that the function updates in place are
updated once: the forward works on copies, which share memory until they are written,
and what it wrote is written back. A recompute starts from the values before that.

Invariant: no tensor is held here. The node that saves the inputs holds them.
Rejected: to compare values. Versions tell of a change, and cost nothing. For buffers
versions do not do: they do not count batch norm's update of its running statistics.
Rejected: one class with `SavedInputs` of `inputs`, which holds the tensors of a call.
Here torch would not see them, and no hook for saved tensors could take them away.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from remat._ambient.ambient import Ambient, put_back
from remat._base.absent import Absent
from remat._base.program import InputIndex, PerInput, fresh_leaves
from remat._base.tensors import changed_since, versions_of
from remat._base.types import TENSORS
from remat._capture.snapshot import Snapshot
from remat._partial.replay import Replay
from remat._torch import (
    FunctionalValue,
    base_tensor,
    current_layer,
    has_proxies,
    is_below_tracer,
    is_shared,
    shared_copy,
)
from remat._transform.checks import enter_refusing_reads, refuse_needed
from remat._transform.leaves import has_same_bytes, in_class


class CallState(NamedTuple):
    """What one call ran in.

    Attributes:
        ambient: what the function reads without being passed it.
        versions: how often each input had been changed in place.
        classes: of the inputs; empty where all are plain tensors.
        values: of the inputs, where AOTAutograd makes functions of operations in place.
    """

    ambient: Ambient
    versions: Sequence[int | None]
    classes: Sequence[type]
    values: Sequence[Any] = ()

    def updated(self, before: Mapping[int, Tensor]) -> "CallState":
        """Return it for recomputes on inputs as they were before some were updated."""
        versions, values = [*self.versions], [*self.values]
        for i, value in before.items():
            versions[i] = value._version
            if values:
                values[i] = FunctionalValue(value)
        return self._replace(versions=versions, values=values)

    def of_first(self, count: int) -> "CallState":
        """Return it for the first inputs: those of the call, without their tangents."""
        return self._replace(
            versions=self.versions[:count],
            classes=self.classes[:count],
            values=self.values[:count],
        )

    def refuse_changed(self, snapshot: Snapshot, inputs: Sequence[Tensor]) -> None:
        """Refuse inputs that were changed in place since, while a graph is made."""
        changed = changed_since(map(base_tensor, inputs), self.versions, (Absent,))
        changed += [i for i, value in enumerate(self.values) if value.has_changed()]
        if changed:
            refuse_needed(snapshot, changed, changed)

    def restored(
        self, snapshot: Snapshot, inputs: Sequence[Tensor], mode: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which it is restored, and changed inputs are not read."""
        streams = self.ambient.streams_now(snapshot.streams)
        return _Restored(self._restored(snapshot, inputs, mode), streams)

    def _restored(
        self, snapshot: Snapshot, inputs: Sequence[Tensor], mode: Any
    ) -> AbstractContextManager[Any]:
        ambient = self.ambient.restored()
        if current_layer() is not None:
            inputs = [*map(base_tensor, inputs)]
        if has_proxies():  # they passed a barrier, and were looked at before
            return ambient
        if versions_of(inputs) == self.versions:
            return ambient
        changed = changed_since(inputs, self.versions, (Absent,))
        if not changed:
            return ambient
        if isinstance(mode, Replay):
            # An operation that reads it may be left out, and its graph may not.
            refuse_needed(snapshot, mode.runnable.plan.needed, changed)
        return enter_refusing_reads(snapshot, inputs, changed, ambient)

    def has_classes(self) -> bool:
        """Say whether inputs are to be given their classes back.

        At the base saved tensors come back as plain ones.
        """
        return bool(self.classes) and current_layer() is None

    def in_classes(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return inputs in the classes that they had."""
        return [*map(in_class, inputs, self.classes)]


class _Restored(AbstractContextManager[None]):
    """A context in which streams are drawn from, and then are where they were."""

    __slots__ = "_around", "_streams"

    def __init__(self, around: AbstractContextManager[Any], streams: Any) -> None:
        self._around, self._streams = around, streams

    @override
    def __enter__(self) -> None:
        self._around.__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        try:
            self._around.__exit__(*error)
        finally:
            put_back(self._streams)


def leaves_to_run_on(
    inputs: Sequence[Tensor], needs: PerInput, *, at_base: bool
) -> list[Tensor]:
    """Return fresh leaves for a forward; to retain a gradient is asked of the input."""
    leaves = fresh_leaves(inputs, needs)
    if at_base:
        for t, leaf in zip(inputs, leaves, strict=True):
            if leaf is not t and t.grad_fn is not None:
                vars(leaf)["retain_grad"] = t.retain_grad  # a leaf's does nothing
    return leaves


def call_state(snapshot: Snapshot, inputs: Sequence[Tensor]) -> CallState:
    """Return what a call runs in, here and now."""
    ambient = Ambient(snapshot.streams, snapshot.uses_stream_states)
    is_plain = TENSORS.issuperset(map(type, inputs))
    classes = () if is_plain else [*map(type, inputs)]
    values = [*map(FunctionalValue, inputs)] if is_below_tracer() else ()
    return CallState(ambient, versions_of(inputs), classes, values)


# --- Buffers that the function updates ---


def copy_buffers(
    inner: list[Tensor], needs: PerInput, buffers: Mapping[InputIndex, bool]
) -> dict[InputIndex, Tensor]:
    """Put copies in place of inputs that may be updated; return the copies by index."""
    copies: dict[int, Tensor] = {}
    if not buffers and False not in needs:
        return copies
    for i, t in enumerate(inner):
        # Running statistics are vectors, and may be passed as arguments as well.
        if needs[i] or not (i in buffers or t.dim() == 1):
            continue
        copy = shared_copy(t)
        if copy is not None or buffers.get(i, False):
            inner[i] = copies[i] = t.clone() if copy is None else copy
    return copies


def inputs_written_to(
    inputs: Sequence[Tensor], copies: Mapping[int, Tensor], buffers: Mapping[int, bool]
) -> Iterator[int]:
    """Yield the inputs whose copies the forward wrote to."""
    for i, copy in copies.items():
        if is_shared(copy):
            continue
        # Memory of its own and the same value: it was written with that value, or a
        # kernel that may write only read it.
        captured = i in buffers and shared_copy(copy) is not None
        if copy._version or captured or not has_same_bytes(copy, inputs[i]):
            yield i


def update(buffer: Tensor, copy: Tensor) -> Tensor:
    """Write `copy` to `buffer`; return the value from before."""
    before = buffer.clone()
    if not has_same_bytes(copy, buffer):
        buffer.copy_(copy)
    return before


def copies_of_buffers(
    inputs: Sequence[Tensor], updated: Sequence[InputIndex]
) -> Sequence[Tensor]:
    """Return inputs with copies in place of those that a recompute updates again."""
    copied = list(inputs)
    for i in updated:
        if type(copied[i]) is not Absent:
            copied[i] = copied[i].clone()
    return copied
