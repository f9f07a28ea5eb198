"""Residuals: what a policy keeps of a call, on the device or elsewhere.

`remat._partial` stores them with `store`. Handles read them, and so do recomputes.

Invariant: a residual is given back as it was, or there is an error. It belongs to the
handle that reads it, or to the call if a recompute reads it.
Rejected: one list for a call. A backward frees what it has used, node by node.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from remat._base.errors import MutationError
from remat._base.op import Op
from remat._base.tensors import taken_apart
from remat._offload.offload import Fetched, Origin, in_file, in_host_memory, origin_of
from remat._torch import base_tensor, current_task, when_done
from remat.policies import Decision


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
    found = ref()
    if found is not None:
        found._read = None


class Residual(ReadOnce):
    """One tensor that is kept: itself, or what the hooks around the call made of it."""

    __slots__ = ("_tensor", "_unpack", "_version", "op")
    decision = Decision.SAVE

    def __init__(self, tensor: Tensor, op: Op, hooks: Any = None) -> None:
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
        """Return the tensor."""
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
        self, offloads: "Offloads", k: int, op: Op, decision: Decision
    ) -> None:
        super().__init__()
        self._all, self._k, self.op, self.decision = offloads, k, op, decision

    def value(self) -> Tensor:
        """Return the tensor, brought back."""
        return self.once(functools.partial(self._all.take, self._k))

    def stored(self) -> list[Tensor]:
        """Return what is kept, for reports."""
        return [self._all.stored[self._k]]


class Offloads:
    """The residuals of a call that are kept elsewhere, in the order of the forward.

    A backward reads them from the end. While it uses one, the one before is fetched.
    """

    __slots__ = ("_fetched", "_origins", "_wrap", "stored")

    def __init__(self) -> None:
        self.stored: list[Tensor] = []
        self._origins: list[Origin] = []
        self._wrap: list[Callable[[Tensor], Tensor]] = []
        self._fetched: Fetched | None = None

    def put(self, tensor: Tensor, op: Op, decision: Decision) -> Offloaded:
        """Move a tensor to where a policy wants it."""
        inner, wrap = taken_apart(tensor)
        self._wrap.append(wrap)
        self._origins.append(origin_of(inner))
        self.stored.append(OFFLOAD[decision](inner))
        return Offloaded(self, len(self.stored) - 1, op, decision)

    def take(self, k: int) -> Tensor:
        """Bring a tensor back."""
        if self._fetched is None:
            self._fetched = Fetched(self.stored[::-1], self._origins[::-1])
        return self._wrap[k](self._fetched.take(len(self.stored) - 1 - k))


def store(
    tensors: Sequence[Tensor],
    decisions: Sequence[Decision],
    ops: Sequence[Op],
    hooks: Any,
    *,
    nested: bool,
) -> list[Residual | Offloaded]:
    """Store the residuals of a call where a policy wants them.

    The hooks for saved tensors around the call pack what is not offloaded. If they are
    of a call of remat (`nested`), that decides what is offloaded.
    """
    offloads = Offloads()
    residuals: list[Residual | Offloaded] = []
    for tensor, decision, op in zip(tensors, decisions, ops, strict=True):
        if decision in OFFLOAD and not nested:
            residuals.append(offloads.put(tensor, op, decision))
        else:
            residuals.append(Residual(tensor, op, hooks))
    return residuals


CHANGED = (
    "remat: a result of {op} ({where}), which the policy saves for the backward, was "
    "changed in place since the forward. Change a copy: it was returned, or shares "
    "memory with what was."
)
