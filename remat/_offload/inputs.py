"""Inputs of calls, away from the device until their recomputes.

With full recomputation the inputs of the blocks are what is left: one for each. The one
of a block goes out when it is called, and comes back before its recompute; meanwhile
that of the block before is copied.

Invariant: a tensor has one copy, however many calls are given it. Where it is still
there it is used itself, which is for the call to see (`SavedInputs`).
Rejected: to ask, when a call ends, who else holds an input. Its caller does, until it
goes on.
"""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._base.errors import MutationError
from remat._base.parts import taken_apart
from remat._base.tensors import version_of
from remat._base.types import TENSORS
from remat._offload.offload import (
    Fetched,
    Origin,
    in_file,
    in_host_memory,
    origin_of,
)
from remat._torch import current_task, when_done


SMALL = 2**12  # bytes: what is smaller stays


class _Away:
    """A tensor that is away."""

    __slots__ = ("__weakref__", "origin", "stored", "wrap")

    def __init__(self, tensor: Tensor, move: Callable[[Tensor], Tensor]) -> None:
        inner, self.wrap = taken_apart(tensor)
        self.origin: Origin = origin_of(inner)
        self.stored = move(inner)


class _Here(NamedTuple):
    """A tensor that stays, and how often it had been changed."""

    tensor: Tensor
    version: int | None


class _Known(threading.local):
    """What is away, by the tensor's memory, and the last call that sent something."""

    def __init__(self) -> None:
        self.aways: dict[Any, tuple[weakref.ref[_Away], Any]] = {}
        self.last: Callable[[], InputsAway | None] = lambda: None


_KNOWN = _Known()


class InputsAway:
    """The inputs of one call that are away, and the hooks that put them there.

    Attributes:
        label: what messages call the call.
    """

    def __init__(self, label: str, *, to_disk: bool) -> None:
        self.label = label
        self._move = in_file if to_disk else in_host_memory
        self._to_disk = to_disk
        self._aways: list[_Away] = []
        self._users: list[
            tuple[Any, int | None, Any]
        ] = []  # by whom they are held or not
        self._fetched: Fetched | None = None
        self._before, _KNOWN.last = _KNOWN.last, weakref.ref(self)

    def pack(self, tensor: Tensor) -> Any:
        """Send an input out; return its number here, or what stays in its place."""
        inner, _ = taken_apart(tensor.detach())
        may_go = _may_go(inner)
        if may_go and inner.is_cpu and not self._to_disk:
            warn_of_inputs(self.label, "they are in host memory: pass 'disk'")
            may_go = False
        if not may_go:
            return _Here(tensor.detach(), version_of(tensor))
        self._aways.append(self._away(tensor.detach(), inner))
        storage = weakref.ref(inner.untyped_storage())
        self._users.append((weakref.ref(tensor), version_of(tensor), storage))
        return len(self._aways) - 1

    def _away(self, tensor: Tensor, inner: Tensor) -> _Away:
        """Return the copy of a tensor, which another call may have made already."""
        storage, aways = inner.untyped_storage(), _KNOWN.aways
        layout = inner.storage_offset(), inner.shape, inner.stride(), inner.dtype
        key = id(storage), version_of(inner), *layout, type(tensor), self._to_disk
        refs = aways.get(key)
        found = None if refs is None else refs[0]()
        if found is None:
            found = _Away(tensor, self._move)

            def forget(_: Any) -> None:
                aways.pop(key, None)

            # Another storage may get its number.
            aways[key] = weakref.ref(found, forget), weakref.ref(storage, forget)
        return found

    def unpack(self, packed: Any) -> Tensor:
        """Bring an input back."""
        if type(packed) is _Here:
            if version_of(packed.tensor) != packed.version:
                raise MutationError(_CHANGED.format(label=self.label))
            return packed.tensor
        there = self._still_there(packed)
        if there is not None:
            return there
        if self._fetched is None:
            self.fetch()
        assert self._fetched is not None
        away = self._aways[packed]
        value = away.wrap(self._fetched.take(packed))
        if packed == len(self._aways) - 1:
            self._fetched = None
            before = self._before()
            if before is not None:
                before.fetch()
        return value

    def _still_there(self, k: int) -> Tensor | None:
        """Return an input without its graph, if somebody holds it as it was."""
        ref, version, storage = self._users[k]
        tensor = ref()
        if tensor is None or version_of(tensor) != version:
            return None
        now = taken_apart(tensor.detach())[0].untyped_storage()
        return tensor.detach() if now is storage() else None

    def fetch(self) -> None:
        """Begin to bring the inputs back."""
        each = range(len(self._aways))
        if self._fetched is None and any(self._still_there(k) is None for k in each):
            stored = [away.stored for away in self._aways]
            self._fetched = Fetched(stored, [away.origin for away in self._aways])
            if current_task() >= 0:
                when_done(functools.partial(_let_go, weakref.ref(self)))


def check_where(where: Any) -> None:
    """Check the option `offload_inputs=`."""
    if where not in (False, True, "disk"):
        text = f"remat: offload_inputs={where!r}: use True, False or 'disk'"
        raise ValueError(text)


def away_hooks(where: Any, label: str) -> Any:
    """Return hooks for the inputs of a call."""
    away = InputsAway(label, to_disk=where == "disk")
    return away.pack, away.unpack


def away_of(hooks: Any) -> InputsAway | None:
    """Return whose hooks these are, if they are for the inputs of a call."""
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, InputsAway) else None


def warn_of_inputs(label: str, why: str) -> None:
    """Warn, once, that no input is offloaded."""
    if (label, why) not in _TOLD:
        _TOLD.add((label, why))
        text = f"remat: offload_inputs= moves no input of {label}, for {why}."
        warnings.warn(text, stacklevel=3)


HINT = ". Name them, and have the policy of a call around offload these names"
_TOLD = set[tuple[str, str]]()


def _let_go(ref: Callable[[], InputsAway | None]) -> None:
    away = ref()
    if away is not None:
        away._fetched = None


def _may_go(tensor: Tensor) -> bool:
    """Say whether a tensor is one that can be moved, and worth it."""
    is_plain = type(tensor) in TENSORS and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_meta:
        return False
    return SMALL <= tensor.nbytes <= tensor.untyped_storage().nbytes() or (
        tensor.nbytes >= SMALL and 0 in tensor.stride()
    )


_CHANGED = (
    "remat: an input of {label} was changed in place between the forward and the "
    "backward. A recompute would start from the changed value: change a copy "
    "(`x = x + y` in place of `x += y`)."
)
