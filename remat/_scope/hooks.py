"""The hooks for saved tensors that put handles in place of values of blocks.

torch calls only the innermost hooks of a thread. Those of blocks have to stay after the
block, for consumers come later, and then the `with` blocks around them end, each of
which takes away the innermost hooks, whatever they are. So the stack is rebuilt: ours
at its bottom, and each pair that was there in a pair that asks ours first.

    before   [a, b]
    inside   [ours, ours before a, ours before b]

`api` calls `install` when a block begins and ends. They go when no value is left.

Invariant: what is no value of a block is saved as without us: by the hooks around, or
itself, with its version, since torch compares no versions under hooks.
Rejected: to exchange `saved_tensors_hooks.__enter__`. Hooks that are entered later, as
torch's checkpoint has them, count what they are given, in a recompute too.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.context import here
from remat._base.tensors import describe, version_of
from remat._base.types import TENSORS
from remat._graph.handles import VersionedTensor, unpack
from remat._scope.sweep import ValueHandle
from remat._scope.table import ValueTable
from remat._scope.values import Operand, TensorLayout
from remat._torch import (
    current_task,
    eager_only,
    is_of_torch_func,
    resume_hooks,
    suspend_hooks,
    top_hooks,
    unseen,
    unwrap_dead,
    when_done,
    without_node,
)


class Hooks:
    """The hooks of blocks in one thread.

    Attributes:
        packing: how many of our hooks are being called. torch refers to the stack
            meanwhile, which must not change.
        open: how many blocks are open.
    """

    def __init__(self, table: ValueTable) -> None:
        self.table, self.packing, self.open = table, 0, 0
        self._thread = threading.get_ident()
        self._is_due, self._task = False, -1
        table.when_empty = self.remove

    def install(self) -> None:
        """Have ours asked first, before all hooks that there are now."""
        stack = suspend_hooks()
        own = here().block_pack
        if own is None:
            here().block_pack = own = Asking(self, None)
        around = [pair for pair in stack if pair[0] is not own]
        resume_hooks([*map(self._wrapped, around), (own, unpack)])

    def _wrapped(self, pair: Any) -> Any:
        pack, other = pair
        if type(pack) is Asking:
            return pair
        asking = Asking(self, pair)
        if other is unpack:
            return asking, unpack
        return asking, functools.partial(_unpack_with, other)

    def remove(self) -> None:
        """Take ours away, if no value is left and the stack may be changed now."""
        if self.open or len(self.table):
            return
        if threading.get_ident() != self._thread or self.packing:
            self._is_due = True
        elif current_task() >= 0:
            self._is_due = True
            self._remove_after(current_task())
        else:
            self._remove()

    def _remove_after(self, task: int) -> None:
        if self._task != task:
            self._task = task
            when_done(_AfterBackward(self))

    def _remove(self) -> None:
        top = top_hooks(True)
        # Others may be in use just now.
        self._is_due = top is not None and type(top[0]) is not Asking
        if not self._is_due:
            here().block_pack = None
            stack = suspend_hooks()
            resume_hooks([*filter(None, map(_unwrapped, stack))])

    def remove_if_due(self) -> None:
        """Do what `remove` put off."""
        if self._is_due:
            self.remove()


class _AfterBackward:
    """Takes hooks away when a backward is over.

    What its callbacks do to the stack is undone. They are freed after that.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __call__(self) -> None:
        """Do nothing yet."""

    def __del__(self) -> None:
        self._hooks.remove()


class Asking:
    """A hook that asks whether a tensor is a value of a block, and then other hooks."""

    __slots__ = ("_hooks", "inner")

    def __init__(self, hooks: Hooks, inner: Any) -> None:
        self._hooks, self.inner = hooks, inner

    @eager_only
    def __call__(self, tensor: Tensor) -> Any:
        """Be the hook that saves a tensor."""
        hooks, inner = self._hooks, self.inner
        hooks.packing += 1
        try:
            handle = _handle_of(tensor, hooks.table)
            if handle is not None:
                return handle
            return _itself(tensor, hooks) if inner is None else inner[0](tensor)
        finally:
            hooks.packing -= 1


def _handle_of(tensor: Tensor, table: ValueTable) -> ValueHandle | None:
    if tensor.requires_grad and tensor.is_leaf:
        return None
    entry = table.entry_of(tensor)
    if entry is None or entry.made.is_blank:
        return None
    return ValueHandle(table, Operand.of_layout(entry.made, TensorLayout.of(tensor)))


def _itself(tensor: Tensor, hooks: Hooks) -> Any:
    if is_of_torch_func(tensor):
        tensor = unwrap_dead(tensor)
        if is_of_torch_func(tensor):
            return without_node(tensor)
    return SavedItself(tensor, hooks)


class SavedItself(VersionedTensor):
    """Stands for a tensor that is saved itself, as without us."""

    __slots__ = ("_hooks",)

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        super().__init__(tensor, version_of(tensor), _NAMELESS)
        self._hooks = hooks
        if not tensor.is_leaf:
            # With its node, it would be a cycle that Python does not see.
            self.tensor = _detached(tensor)

    @override
    def unpacked(self) -> Tensor:
        """Return the tensor."""
        self._hooks.remove_if_due()
        return super().unpacked()

    @override
    def _changed(self) -> str:
        return _CHANGED.format(what=describe(self.tensor))


_NAMELESS: Any = None  # there is no call


def _detached(tensor: Tensor) -> Tensor:
    if type(tensor) not in TENSORS:
        return tensor.detach()
    with unseen():
        return tensor.detach()


def _unpack_with(other: Callable[[Any], Tensor], packed: Any) -> Tensor:
    """Be the hook that gives a tensor back that ours or other hooks packed."""
    return unpack(packed) if type(packed) is ValueHandle else other(packed)


def _unwrapped(pair: Any) -> Any:
    return pair[0].inner if type(pair[0]) is Asking else pair


_CHANGED = (
    "remat: a tensor that the backward needs, {what}, has been modified by an inplace "
    "operation. Change a copy, or change it after the backward."
)
