"""The user's own leaves: a recompute runs on them, and leaves nothing on them.

`saved` asks here what a forward set on them. `refill` recomputes in these contexts.

Invariant: after a recompute a leaf has the hooks, the attributes and the memory that it
had before, and no gradient is gone.
Rejected: stand-ins for all leaves, as for other inputs. What the function keeps by the
identity of a leaf would not be found. And in a module that several threads use, the
gradients of the other threads would be lost.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from remat._base.tensors import version_of
from remat._base.types import TENSORS
from remat._live.layout import hooks_so_far
from remat._torch import function_mode_count, no_torch_functions, unseen


class Effects(NamedTuple):
    """What a forward did to the user's leaves. A recompute is taken to do the same.

    Attributes:
        accumulates: whether it changed a gradient, as by `backward()`.
        moves: whether it gave a leaf other memory, as by assigning to `.data`.
        marks: whether it may have set hooks or attributes.
    """

    accumulates: bool
    moves: bool
    marks: bool


UNKNOWN = Effects(accumulates=False, moves=False, marks=True)
NO_EFFECTS = Effects(accumulates=False, moves=False, marks=False)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_hooks_of = operator.attrgetter(*_HOOKS)
grad_of = operator.attrgetter("grad")
_attributes_of = operator.attrgetter("__dict__")
_NONE = None, None
_NONES = frozenset({type(None)})


def attributes_of(leaves: Sequence[Tensor]) -> list[dict[str, Any]] | None:
    """Return what was set on leaves; None where nothing was."""
    found = [*map(_attributes_of, leaves)]
    return [entries.copy() for entries in found] if any(found) else None


class Watched:
    """What a forward may change of leaves, noted before it.

    Args:
        leaves: the user's own, which the call saves itself.
    """

    __slots__ = ("_addresses", "_gradients", "_hooks", "_leaves")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves, self._hooks = leaves, hooks_so_far()
        self._gradients, self._addresses = _gradients_of(leaves), addresses_of(leaves)

    def effects(self, inputs: Sequence[Tensor]) -> Effects:
        """Return what the forward did to the leaves.

        Args:
            inputs: of the call. If it set no hook anywhere, and no input has attributes
                by now, a recompute is taken to set nothing either.
        """
        accumulates = _gradients_of(self._leaves) != self._gradients
        moves = addresses_of(self._leaves) != self._addresses
        marks = hooks_so_far() != self._hooks or any(map(_attributes_of, inputs))
        if accumulates or moves or marks:
            return Effects(accumulates, moves, marks)
        return NO_EFFECTS


def _gradients_of(leaves: Sequence[Tensor]) -> list[Any]:
    """Return what changes when a gradient is set, or added to in place."""
    grads = [*map(grad_of, leaves)]
    if _NONES.issuperset(map(type, grads)):
        return grads
    return [g if g is None else (id(g), version_of(g)) for g in grads]


def addresses_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return where tensors are in memory; None if that cannot be asked.

    Not for a copy that shares memory until it is written: to torch this is a write.
    """
    if not TENSORS.issuperset(map(type, tensors)):  # others may warn
        return None
    try:
        if not function_mode_count():
            return [*map(Tensor.data_ptr, tensors)]
        with no_torch_functions():  # a mode may note who reads memory
            return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:
        return None


def _forget_hooks_of_nodes(leaves: Sequence[Tensor], first: int) -> None:
    """Remove the hooks from a number on that were set on what accumulates gradients."""
    for t in leaves:
        if t.requires_grad:
            node = get_gradient_edge(t).node
            for register in (node.register_prehook, node.register_hook):
                handle = register(_nothing)  # which has all that there are
                hooks: Any = handle.hooks_dict_ref()
                for key in [key for key in hooks if key >= first]:
                    del hooks[key]


def _nothing(*_: Any) -> None:
    """Do nothing."""


class PreserveGradients:
    """A context after which leaves that had a gradient have one.

    One that was changed is not put back: another thread may have added to it.
    """

    __slots__ = ("_grads", "_leaves")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        grads = [*map(grad_of, leaves)]
        has_some = not _NONES.issuperset(map(type, grads))
        self._leaves, self._grads = (leaves, grads) if has_some else ((), ())

    def __enter__(self) -> None:
        """Do nothing: what to put back is known."""

    def __exit__(self, *_: object) -> None:
        if all(map(operator.is_, self._grads, map(grad_of, self._leaves))):
            return
        for t, grad in zip(self._leaves, self._grads, strict=True):
            if grad is not None and t.grad is None:
                t.grad = grad


class PreserveMarks:
    """A context in which leaves have the attributes and hooks that they had at a call.

    After it they have those of before.

    Args:
        leaves: the user's own.
        attributes: what was set on them at the call; None where nothing was.
        hooks: how many hooks had been set anywhere at the call.
    """

    __slots__ = ("_after", "_attributes", "_first", "_hooks", "_leaves", "_then")

    def __init__(
        self,
        leaves: Sequence[Tensor],
        attributes: list[dict[str, Any]] | None,
        hooks: int,
    ) -> None:
        self._leaves, self._attributes, self._then = leaves, attributes, hooks

    def __enter__(self) -> None:
        leaves = self._leaves
        self._first = hooks_so_far()
        self._hooks = _hooks(leaves)
        if self._hooks is not None:
            _hide_hooks(leaves, self._then)
        self._after = attributes_of(leaves)
        if self._attributes or self._after:
            _set_attributes(leaves, self._attributes)

    def __exit__(self, *_: object) -> None:
        leaves = self._leaves
        if hooks_so_far() != self._first:
            _forget_hooks_of_nodes(leaves, self._first)
        if self._hooks is not None or _hooks(leaves) is not None:
            befores = self._hooks or [_NONE] * len(leaves)
            for t, before in zip(leaves, befores, strict=True):
                for name, hooks in zip(_HOOKS, before, strict=True):
                    _put_back(t, name, hooks)
        if self._after or any(map(_attributes_of, leaves)):
            _set_attributes(leaves, self._after)


class PreserveMemory:
    """A context after which leaves have the memory that they had.

    Args:
        leaves: the user's own.
        error: returns the error for a leaf, by its index, whose values were exchanged:
            a run inside would start from those that the run before left.
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
            address = _address_of(t)
            if address != _address_of(before):
                now, t.data = t.data, before
                if address is not None and not _is_equal(now, before):
                    raise self._error(k) from None


def _address_of(tensor: Tensor) -> int | None:
    """Return where a tensor is; None if it was assigned what a replay left out."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def _is_equal(a: Tensor, b: Tensor) -> bool:
    with unseen():
        return a.shape == b.shape and torch.equal(a, b)


def _hooks(leaves: Sequence[Tensor]) -> list[Any] | None:
    """Return copies of the hooks of leaves; None where there are none."""
    hooks = [*map(_hooks_of, leaves)]
    if hooks.count(_NONE) == len(hooks):
        return None
    return [tuple(h if h is None else h.copy() for h in both) for both in hooks]


def _hide_hooks(leaves: Sequence[Tensor], first: int) -> None:
    """Take off the hooks from a number on."""
    for hooks in (hooks for t in leaves for hooks in _hooks_of(t) if hooks):
        for key in [key for key in hooks if key >= first]:
            del hooks[key]


def _put_back(tensor: Tensor, name: str, before: Any) -> None:
    now = getattr(tensor, name)
    if now is None or before is None:
        if now is not before:
            setattr(tensor, name, before)
    elif now != before:
        now.clear()
        now.update(before)


def _set_attributes(leaves: Sequence[Tensor], attributes: Any) -> None:
    for t, entries in zip(leaves, attributes or [{}] * len(leaves), strict=True):
        t.__dict__.clear()
        t.__dict__.update(entries)
