"""What a graph holds in place of a tensor that it saved, and what a policy keeps.

    Handle          of a value that the call recomputes, or that its policy keeps
    VersionedTensor of an input of the call, or of a leaf that requires grad: itself
    PackedOutside   of an input of the call, as the hooks around the call packed it

Invariant: none holds what the call computed with its graph. The graph holds them where
Python's garbage collector does not look, so it would never be freed.
Rejected: the tensor itself in place of `VersionedTensor`. torch compares no versions
under hooks. One list of residuals for a call: a backward frees them node by node.
"""

import functools
import weakref
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from remat._base.context import here
from remat._base.errors import MutationError, hide_frames
from remat._base.tensors import describe
from remat._offload.inputs import away_of
from remat._offload.offload import Away, Fetched, in_file, in_host_memory
from remat._reach.reach import Reach
from remat._torch.autograd import (
    current_task,
    keeps_graph,
    leave_hooks_on,
    top_hooks,
    when_done,
)
from remat._torch.levels import base_tensor
from remat._torch.modes import viewed
from remat._torch.process import is_of_checkpoint
from remat._torch.tensors import has_no_memory
from remat.policies import Decision


if TYPE_CHECKING:
    from remat._base.op import Op, Value


# --- Residuals: what a policy keeps of a call, on the device or elsewhere ---


OFFLOAD = {Decision.OFFLOAD: in_host_memory, Decision.OFFLOAD_TO_DISK: in_file}


class ReadOnce:
    """A tensor that is brought back once in a backward, and stays until its end."""

    __slots__ = ("__weakref__", "_read")

    def __init__(self) -> None:
        self._read: Tensor | None = None

    def once(self, bring: Callable[[], Tensor]) -> Tensor:
        """Return the tensor: what was read before, or what `bring` returns."""
        read = self._read
        if read is None:
            read = bring()
            if current_task() >= 0:
                self._read = read
                when_done(functools.partial(_let_go, weakref.ref(self)))
        return read


def _let_go(ref: weakref.ref[ReadOnce]) -> None:
    if (found := ref()) is not None:
        found._read = None


class Residual(ReadOnce):
    """One tensor that is kept: itself, or what the hooks around the call made of it."""

    __slots__ = ("_tensor", "_unpack", "_version", "op")
    decision = Decision.SAVE

    def __init__(self, tensor: Tensor, op: "Op", hooks: Any = None) -> None:
        super().__init__()
        self.op, self._unpack = op, None
        self._version = base_tensor(tensor)._version
        self._tensor: Any = tensor
        if hooks is not None:
            pack, self._unpack = hooks
            self._tensor, self._version = pack(tensor), None

    def let_go_of_graph(self) -> None:
        """Keep only the value of a tensor that got its node after it was kept.

        The graph may lead back to who keeps it: a cycle that Python does not see.
        """
        if isinstance(self._tensor, Tensor) and self._tensor.grad_fn is not None:
            self._tensor = self._tensor.detach()

    @property
    def is_as_it_was(self) -> bool:
        """Whether it was not changed in place. Hooks check what they hold."""
        is_ours = self._unpack is None
        return not is_ours or base_tensor(self._tensor)._version == self._version

    def value(self) -> Tensor:
        if self._unpack is not None:
            return self.once(functools.partial(self._unpack, self._tensor))
        if not self.is_as_it_was:
            raise MutationError(CHANGED.format(op=self.op.func, where=self.op.source))
        return self._tensor

    def stored(self) -> list[Tensor]:
        """Return what is kept, for reports; nothing if hooks have it."""
        return [] if self._unpack is not None else [self._tensor]


class Offloaded(ReadOnce):
    """One residual that is kept elsewhere, with the others of its call."""

    __slots__ = ("_all", "_k", "decision", "op")

    def __init__(
        self, offloads: "Offloads", k: int, op: "Op", decision: Decision
    ) -> None:
        super().__init__()
        self._all, self._k, self.op, self.decision = offloads, k, op, decision

    def value(self) -> Tensor:
        return self.once(functools.partial(self._all.take, self._k))

    def stored(self) -> list[Tensor]:
        return [self._all.aways[self._k].stored]


class Offloads:
    """The residuals of a call that are kept elsewhere, in the order of the forward.

    A backward reads them from the end. While it uses one, the one before is fetched.
    """

    __slots__ = ("_fetched", "aways")

    def __init__(self) -> None:
        self.aways: list[Away] = []
        self._fetched: Fetched | None = None

    def put(self, tensor: Tensor, op: "Op", decision: Decision) -> Offloaded:
        """Move a tensor to where a policy wants it."""
        self.aways.append(Away(tensor, OFFLOAD[decision]))
        return Offloaded(self, len(self.aways) - 1, op, decision)

    def take(self, k: int) -> Tensor:
        if self._fetched is None:
            self._fetched = Fetched.of(self.aways[::-1])
        return self.aways[k].wrap(self._fetched.take(len(self.aways) - 1 - k))


def store(
    tensors: Sequence[Tensor],
    decisions: Sequence[Decision],
    ops: Sequence["Op"],
    hooks: Any,
    *,
    nested: bool,
) -> list[Residual | Offloaded]:
    """Store the residuals of a call where a policy wants them.

    The hooks for saved tensors around the call pack what is not offloaded. If they are
    of a call of remat (`nested`), that decides what is offloaded.
    """
    offloads = Offloads()
    return [
        offloads.put(tensor, op, decision)
        if decision in OFFLOAD and not nested
        else Residual(tensor, op, hooks)
        for tensor, decision, op in zip(tensors, decisions, ops, strict=True)
    ]


# --- Handles ---


class Handle:
    """Stands for a tensor that a call computed."""

    __slots__ = (
        *("__weakref__", "call", "position", "residual", "value", "version", "view"),
    )

    def __init__(self, call: Any, position: int) -> None:
        # What gives the value, by its `value_of`; and the number of the handle among
        # all that the call saved.
        self.call, self.position = call, position
        # The tensor, if it was recomputed and not read yet, and its version then.
        self.value: Tensor | None = None
        self.version: int
        # The residual that the tensor is, if it is any, or is this view of.
        self.residual: Residual | Offloaded | None = None
        self.view: Value | None = None

    def unpacked(self) -> Tensor:
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

    def let_go_of_graph(self) -> None:
        """Keep only the value of a tensor that got its node after it was saved.

        A call within hands its residuals on as soon as they are made.
        """
        if self.value is not None and self.value.grad_fn is not None:
            self.value = self.value.detach()


class VersionedTensor:
    """Stands for a tensor that is saved itself, with its version, if torch counts it.

    The reach of the call knows its name.
    """

    __slots__ = ("reach", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None, reach: Reach) -> None:
        self.tensor, self.version, self.reach = tensor, version, reach

    def unpacked(self) -> Tensor:
        tensor, version = self.tensor, self.version
        if version is not None and tensor._version != version:
            raise MutationError(self._changed())
        return tensor

    def _changed(self) -> str:
        name = self.reach.name_of_tensor(self.tensor)
        name = describe(self.tensor) if name is None else f"`{name}`"
        return INPUT_CHANGED.format(name=name, label=self.reach.label)


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


INPUT_CHANGED = (
    "remat: {name} was changed in place between the forward and the backward of "
    "{label}, which reads it. Change a copy, or change it after the backward."
)
CHANGED = (
    "remat: a result of {op} ({where}), which the policy saves for the backward, was "
    "changed in place since the forward. Change a copy: it was returned, or shares "
    "memory with what was."
)
