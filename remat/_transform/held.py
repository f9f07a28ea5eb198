"""What a call under base autograd keeps of its inputs.

Leaves that require grad, and parameters, are kept as they are, and a recompute runs on
them. Of others their values are kept, without the graph that they have, and a recompute
runs on stand-ins. What the forward may write to without a sign is copied before.

Invariant: nothing here holds a graph, and a run never sees a value that changed since
the call: it is refused where it is read.
Rejected: stand-ins for leaves, too. In a module that several threads use, the gradients
of the others would be lost.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remat._base.absent import Absent
from remat._base.checks import version_of, versions_of
from remat._base.types import TENSORS
from remat._graph.handles import Outer
from remat._torch import unseen
from remat._transform.buffers import is_same as has_same_bytes
from remat._transform.leaves import attributes_of


_requires_grad = operator.attrgetter("requires_grad")
_is_leaf = operator.attrgetter("is_leaf")
_SMALL = 2**14  # elements


class Held:
    """The inputs of one call.

    Args:
        leaves: the inputs.
        needs: which of them require grad.
        buffers: those that the function may update, and whether they are registered.
        hooks: for saved tensors, around the call: a pair, or None.
        nested: whether those are of a call of remat.

    Attributes:
        needs: see above.
        versions: how often each had been changed.
        values: what is kept of each.
        copied: those of which that is a copy.
        own: those that are kept as they are.
        attributes: what was set on them; None where nothing was.
    """

    __slots__ = (
        *("_hooks", "_kinds", "attributes", "copied", "needs", "own", "values"),
        "versions",
    )

    def __init__(
        self,
        leaves: Sequence[Tensor],
        needs: list[bool],
        buffers: Mapping[int, bool],
        hooks: Any,
        *,
        nested: bool,
    ) -> None:
        self.needs, self._hooks = needs, hooks
        self.versions = versions_of(leaves)
        self.attributes = attributes_of(leaves)
        self._kinds: Sequence[type] = ()
        self.copied: frozenset[int] = frozenset()
        if False not in needs and hooks is None and all(map(_is_leaf, leaves)):
            self.own: Sequence[int] = range(len(leaves))
            self.values: list[Any] = [*leaves]
            return
        if not TENSORS.issuperset(map(type, leaves)):
            self._kinds = [*map(type, leaves)]
        self.own = [i for i, t in enumerate(leaves) if _is_own(t)]
        own = {*self.own}
        if False in needs:
            self.copied = _to_copy(leaves, needs, buffers)
        self.values = []
        for i, t in enumerate(leaves):
            if i in own:
                if nested:
                    # To be counted: in a recompute of the call around it is no leaf.
                    hooks[0](t)
                self.values.append(t)
            elif i in self.copied:
                self.values.append(_copy_of(t))
            else:
                self.values.append(self._value_of(t))

    def _value_of(self, t: Tensor) -> Any:
        return t.detach() if self._hooks is None else Outer(t, self._hooks)

    # --- After the forward ---

    def note_changes(self, leaves: Sequence[Tensor]) -> int | None:
        """Drop the copies of what is as it was; return what changed and has none."""
        now = versions_of(leaves)
        for i in self.copied:
            # On a device, to compare is to wait for it; a fake tensor has no values.
            has_bytes = leaves[i].is_cpu and type(leaves[i]) is Tensor
            if has_bytes and now[i] == self.versions[i]:
                with unseen():
                    is_same = has_same_bytes(self.values[i], leaves[i])
                if is_same:
                    self.values[i] = self._value_of(leaves[i])
                    self.copied -= {i}
        if now == self.versions:
            return None
        pairs = enumerate(zip(self.versions, now, strict=True))
        changed = [i for i, (a, b) in pairs if a != b and i not in self.copied]
        return changed[0] if changed else None

    def let_go(self, dropped: Mapping[int, Absent]) -> None:
        """Let go of inputs that no recompute reads, and keep what stands for them."""
        for i, absent in dropped.items():
            self.values[i] = absent
        self.copied -= dropped.keys()

    # --- For a recompute ---

    def changed(self) -> list[int]:
        """Return the inputs that were changed in place since."""
        values, then = self.values, self.versions
        if len(self.own) == len(values) and versions_of(values) == then:
            return []
        return [
            i
            for i, value in enumerate(values)
            if type(value) not in (Absent, Outer)
            and i not in self.copied
            and version_of(value) != then[i]
        ]

    def kept(self) -> list[tuple[int, Tensor]]:
        """Return what is kept here, and of which input."""
        values = enumerate(self.values)
        return [(i, t) for i, t in values if type(t) not in (Absent, Outer)]

    def leaves(self) -> list[Tensor]:
        """Return those that are kept as they are."""
        return [self.values[i] for i in self.own]

    def own_attributes(self) -> list[dict[str, Any]] | None:
        """Return what had been set on those; None where nothing had been."""
        attributes = self.attributes
        return attributes and [attributes[i] for i in self.own]

    def tensors(self, *, as_they_are: bool) -> list[Tensor]:
        """Return what a run is on.

        Args:
            as_they_are: whether it is on the user's own leaves, where it can be.
        """
        values, needs = self.values, self.needs
        is_all = as_they_are and len(self.own) == len(values)
        if is_all and [*map(_requires_grad, values)] == needs:
            return [*values]
        own = {*self.own} if as_they_are else ()
        tensors = []
        for i, (value, need) in enumerate(zip(values, needs, strict=True)):
            if i in self.copied:
                tensors.append(value.clone())
            elif i in own and value.requires_grad == need:
                tensors.append(value)
            else:
                tensors.append(self._stand_in(i, value, need))
        return tensors

    def are_own(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether a run is on the user's own leaves."""
        return all(tensors[i] is self.values[i] for i in self.own)

    def _stand_in(self, i: int, value: Any, need: bool) -> Tensor:
        """Return a leaf that is what an input was, but for its graph and its hooks."""
        t: Tensor = value.unpacked() if type(value) is Outer else value
        if self._kinds and type(t) is Tensor and self._kinds[i] is not Tensor:
            t = t.as_subclass(self._kinds[i])  # as a plain one it came back from hooks
        if type(t) is nn.Parameter:
            new = Tensor._make_subclass(nn.Parameter, t, need)
        else:
            new = t.detach()
            if need:
                new.requires_grad_()
        if self.attributes and self.attributes[i]:
            new.__dict__.update(self.attributes[i])
        return new


class Unmoved:
    """A context after which leaves have the memory that they had.

    Args:
        leaves: the user's own.
        error: returns the one to raise if a leaf, by its position, was given other
            values: what ran inside started from those of the run before.
    """

    __slots__ = ("_before", "_error", "_leaves")

    def __init__(
        self, leaves: Sequence[Tensor], error: Callable[[int], Exception]
    ) -> None:
        self._leaves, self._error = leaves, error

    def __enter__(self) -> None:
        self._before = [t.data for t in self._leaves]

    def __exit__(self, *_: object) -> None:
        for k, (t, before) in enumerate(zip(self._leaves, self._before, strict=True)):
            if t.data_ptr() != before.data_ptr():
                now, t.data = t.data, before
                with unseen():
                    is_same = now.shape == before.shape and torch.equal(now, before)
                if not is_same:
                    raise self._error(k) from None


def _is_own(tensor: Tensor) -> bool:
    """Say whether a tensor is kept as it is."""
    return (tensor.requires_grad and tensor.is_leaf) or type(tensor) is nn.Parameter


def _copy_of(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        return tensor.clone()  # a fake tensor has no memory for a kernel to read
    with unseen():
        return tensor.clone()


def _to_copy(
    leaves: Sequence[Tensor], needs: Sequence[bool], buffers: Mapping[int, bool]
) -> frozenset[int]:
    """Return which inputs are copied, for they may be updated without a sign.

    Batch norm does so with its running statistics: no version tells.
    """
    return frozenset(
        i
        for i, t in enumerate(leaves)
        if not needs[i]
        and (i in buffers or t.dim() == 1)
        and (type(t) is Tensor or hasattr(t, "fake_mode"))
        and t.layout is torch.strided
        and t.numel() <= _SMALL
        # FSDP frees the memory of what it gathers.
        and t.untyped_storage().nbytes() >= t.nbytes
    )
