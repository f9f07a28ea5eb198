"""What a graph holds in place of a tensor that it saved.

The hook that packs saved tensors puts it there: of a call (`_transform/saved.py`), or
of a scope (`_scope/hooks.py`), which has handles of its own.

    Handle          of a value that the call recomputes, or that its policy keeps
    VersionedTensor of an input of the call, or of a leaf that requires grad: itself
    PackedOutside   of an input of the call, as the hooks around the call packed it

Invariant: none of them holds what the call computed with its graph. The graph holds
them where Python's garbage collector does not look, so it would never be freed.
Rejected: the tensor itself in place of `VersionedTensor`. torch compares no versions
under hooks, so a change in place would not be noticed.
"""

import functools
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from torch import Tensor

from remat._base.context import here
from remat._base.errors import MutationError, hide_frames
from remat._base.tensors import describe
from remat._graph.residual import Offloaded, ReadOnce, Residual
from remat._offload.inputs import away_of
from remat._reach.reach import Reach
from remat._torch import (
    has_no_memory,
    is_of_checkpoint,
    keeps_graph,
    leave_hooks_on,
    top_hooks,
    viewed,
)


if TYPE_CHECKING:
    from remat._base.op import Value


class Handle:
    """Stands for a tensor that a call computed.

    Attributes:
        call: gives the value, by its `value_of`; None where the policy saves it.
        position: the handle's number among all that the call saved.
        value: the tensor, if it was recomputed and not read yet.
        version: how often that had been changed when it was saved.
        residual: the residual that the tensor is, or is a view of, if it is any.
        view: which view of it; None if it is the residual.
    """

    __slots__ = (
        *("__weakref__", "call", "position", "residual", "value", "version", "view"),
    )

    def __init__(self, call: Any, position: int) -> None:
        self.call, self.position = call, position
        self.value: Tensor | None = None
        self.version: int
        self.residual: Residual | Offloaded | None = None
        self.view: Value | None = None

    def unpacked(self) -> Tensor:
        """Return the tensor."""
        value = self.value
        if value is not None and value._version <= self.version:
            if keeps_graph():
                self.value = None  # the node stays, and its value is computed again
            return value
        if self.residual is None:
            return self.call.value_of(self)
        residual, view = self.residual.value(), self.view
        if view is None:
            return residual.detach()
        return viewed(residual, view.shape, view.stride, view.offset)

    def takes(self, tensor: Tensor) -> bool:
        """Take a value that a recompute around the call has; say whether it fits."""
        node = tensor.grad_fn
        # Without a node it may be a buffer, which is put back. One without memory was
        # left out of that recompute. A nested one has no shape.
        if node is None or tensor.is_nested or has_no_memory(tensor):
            return False
        meta = tensor.shape, tensor.dtype, type(node)
        if meta != self.call.metas[self.position]:
            return False
        self.value, self.version = tensor.detach(), tensor._version
        return True


class VersionedTensor:
    """Stands for a tensor that is saved itself, with its version at that time.

    The version is None if torch counts none. The reach of the call knows its name.
    """

    __slots__ = ("reach", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None, reach: Reach) -> None:
        self.tensor, self.version, self.reach = tensor, version, reach

    def unpacked(self) -> Tensor:
        """Return the tensor."""
        tensor, version = self.tensor, self.version
        if version is not None and tensor._version != version:
            raise MutationError(self._changed())
        return tensor

    def _changed(self) -> str:
        name = self.reach.name_of_tensor(self.tensor)
        name = describe(self.tensor) if name is None else f"`{name}`"
        return _CHANGED.format(name=name, label=self.reach.label)


class PackedOutside(ReadOnce):
    """Stands for a tensor as other hooks packed it.

    The graph reads it several times in a backward, and so does a recompute. Other hooks
    may give it back only once, as torch.utils.checkpoint's do.
    """

    __slots__ = ("packed", "unpack")

    def __init__(self, tensor: Tensor, hooks: Any) -> None:
        super().__init__()
        pack, self.unpack = hooks
        self.packed = pack(tensor)

    def unpacked(self) -> Tensor:
        """Return the tensor."""
        if self.unpack is unpack and isinstance(self.packed, _CHEAP):
            return unpack(self.packed)
        return self.once(functools.partial(self.unpack, self.packed))


def packed_outside(reach: Reach, hooks: Any) -> Container[int]:
    """Return which inputs hooks around a call may pack."""
    # Torch's checkpoint tells tensors by position. A list may hold more by then.
    if is_of_checkpoint(hooks[0]):
        return reach.passed
    stay = away_of(hooks) is not None and reach.buffers  # those that modules hold
    return [i for i in range(reach.first_parameter) if not (stay and stay.get(i))]


# These return their tensor any number of times, without computing it again.
_CHEAP = (Handle, VersionedTensor, PackedOutside)


def unpack(packed: Any) -> Tensor:
    """Be the hook that gives a saved tensor back."""
    kind = type(packed)
    # The usual case comes first: this is called for each tensor of a graph.
    if (
        kind is Handle
        and (value := packed.value) is not None
        and value._version <= packed.version
        and not keeps_graph()
    ):
        return value
    if (
        kind is VersionedTensor
        and packed.version is not None
        and packed.tensor._version == packed.version
    ):
        return packed.tensor
    if not hasattr(kind, "unpacked"):
        return packed
    try:
        return packed.unpacked()
    except Exception as error:
        hide_frames(error)
        raise


def innermost(packed: Any) -> Any:
    """Return what stands for a tensor in the outermost call that packed it."""
    while isinstance(packed, PackedOutside):
        packed = packed.packed
    return packed


def stored_by(packed: Any) -> list[Tensor]:
    """Return the tensors that what stands for a tensor keeps alive."""
    packed = innermost(packed)
    if isinstance(packed, VersionedTensor):
        return [packed.tensor]
    if isinstance(packed, Handle) and packed.residual is not None:
        return packed.residual.stored()
    return []


def _are_harmless() -> bool:
    """Say whether the hooks here leave alone what torch.func saves at its levels."""
    context = here()
    if context.only_our_hooks or context.block_pack is None:
        return context.only_our_hooks
    hooks = top_hooks(True)
    return hooks is not None and hooks[0] is context.block_pack


# On import. torch.func refuses to run under hooks for saved tensors; from now on it
# runs under those here.
leave_hooks_on(_are_harmless)


_CHANGED = (
    "remat: {name} was changed in place between the forward and the backward of "
    "{label}, which reads it. Change a copy, or change it after the backward."
)
