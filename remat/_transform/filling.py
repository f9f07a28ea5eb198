"""Fills handles: what a recompute saves, in the order in which the forward saved.

Invariant: the j-th tensor saved goes into the j-th handle, if that is alive, and only
if it is such a tensor as the forward saved there. Nothing that is returned here to the
graph of the recompute has a node: it would be a cycle that Python does not see.
Rejected: to compare values. That is for `remat.testing.check_replay`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from remat._base.context import Decisions, here
from remat._base.errors import RecomputeError
from remat._base.source import user_line
from remat._graph.handles import Handle, meta_of, unpack
from remat._torch import (
    is_of_torch_func,
    pop_hooks,
    push_hooks,
    resume_hooks,
    set_grad_enabled,
    suspend_hooks,
    unwrap_dead,
    without_node,
)


class Stop(BaseException):
    """Every handle that is alive has its value."""


class Filling:
    """What one recompute fills.

    Args:
        handles: those to be filled.
        metas: of all that the forward saved, None for what stayed itself.
        label: of the call.
        is_replay: whether its operations are compared with a record.

    Attributes:
        left: how many of them are empty.
    """

    __slots__ = ("_handles", "_is_replay", "_label", "_metas", "_saved", "left")

    def __init__(
        self,
        handles: Iterable[Handle],
        metas: Sequence[Any],
        label: str,
        *,
        is_replay: bool = False,
    ) -> None:
        self._is_replay = is_replay
        self._handles = {handle.place: handle for handle in handles}
        self._metas, self._label = metas, label
        self._saved: list[Any] = []
        self.left = len(self._handles)

    def pack(self, t: Tensor) -> Any:
        """Be the hook that saves a tensor."""
        if not self.left:
            raise Stop
        saved, metas = self._saved, self._metas
        place = len(saved)
        if is_of_torch_func(t):
            t = unwrap_dead(t)
            if is_of_torch_func(t):
                saved.append(None)
                return without_node(t)
        value = t if t.is_leaf else t.detach()
        handle = self._handles.get(place)
        if handle is None:
            saved.append(None)
            if place >= len(metas):
                raise self.differs()
            return value
        meta = meta_of(t)
        saved.append(meta)
        if meta != metas[place] and self._is_other(meta, metas[place]):
            raise self.differs()
        handle.value = value
        self.left -= 1
        if not self.left:
            raise Stop
        return value

    def _is_other(self, meta: Any, then: Any) -> bool:
        """Say whether something else is saved."""
        if then is None or meta[:2] != then[:2]:
            return True
        nodes = meta[2], then[2]
        if self._is_replay or any(issubclass(node, FunctionCtx) for node in nodes):
            # Hooks may put Functions in between that change nothing, as FSDP's do.
            return False
        return _name_of(nodes[0]) != _name_of(nodes[1])

    def differs(self) -> RecomputeError:
        """Return the error that the recompute saved something else than the forward."""
        then, now = self._metas, self._saved
        # What stays itself is not compared, nor what nobody reads.
        pairs = enumerate(zip(then, now, strict=False))
        first = next((k for k, (a, b) in pairs if a and b and a != b), len(now))
        where = user_line()
        return RecomputeError(
            _DIFFERS.format(
                label=self._label,
                then=_listed(then, first),
                now=_listed(now, first),
                where=where,
            )
        )


def _name_of(node: type) -> str:
    """Return the name of a node."""
    name = node.__name__
    # Which of both `reshape` makes depends on whether a mode is active.
    return "ViewBackward0" if name == "ReshapeAliasBackward0" else name


def _listed(metas: Sequence[Any], first: int) -> str:
    """Write what was saved around the first difference."""
    start = max(0, first - 2)
    lines = [_line(k, meta) for k, meta in enumerate(metas[start : first + 2], start)]
    return "\n".join(lines) if len(metas) > first else "\n".join([*lines, _NO_MORE])


def _line(k: int, meta: Any) -> str:
    if meta is None:
        return f"    {k}: an input, a leaf, or what is not read"
    shape, dtype, node = meta
    name = "no graph" if node is type(None) else node.__name__
    return f"    {k}: {str(dtype).removeprefix('torch.')}{[*shape]} of {name}"


_NO_MORE = "    nothing more"
_DIFFERS = (
    "remat: recomputing {label} saves something else for the backward than the forward "
    "did, at {where}.\n  forward:\n{then}\n  recomputation:\n{now}\nThe function must "
    "compute the same thing twice: if it depends on outside state that changed, pass "
    "that state as an argument. remat.testing.check_replay shows where the two part."
)


class Saving:
    """A context in which a call runs: what is saved in it is packed for that call.

    Args:
        call: the call.
        pack: is given each tensor that a graph saves.
        outer: the hooks around, a pair, or None.
        policy: of the call, and of those around it.
        inner: what the calls within decide.
        again: whether the call is recomputed, whatever goes on around.
    """

    __slots__ = (
        *("_again", "_before", "_call", "_context", "_grad_mode", "_inside", "_now"),
        *("_pack", "_suspended"),
    )

    def __init__(
        self,
        call: Any,
        pack: Callable[[Tensor], Any],
        outer: Any,
        policy: Any,
        inner: list[Any],
        *,
        again: bool = False,
    ) -> None:
        self._call, self._pack, self._again = call, pack, again
        self._context = context = here()
        harmless = outer is None or (context.saves and outer[1] is unpack)
        self._now = harmless, policy, Decisions(inner, again=again)

    def __enter__(self) -> None:
        context = self._context
        self._before = context.saves, context.policy, context.decisions
        context.saves, context.policy, context.decisions = self._now
        if context.examining is not None:
            self._inside, context.inside = context.inside, (*context.inside, self._call)
        if self._again:
            self._suspended, self._grad_mode = suspend_hooks(), torch.is_grad_enabled()
            set_grad_enabled(True)
            context.recomputing += 1
        push_hooks(self._pack, unpack)

    def __exit__(self, *_: object) -> None:
        context = self._context
        pop_hooks()
        context.saves, context.policy, context.decisions = self._before
        if context.examining is not None:
            context.inside = self._inside
        if self._again:
            context.recomputing -= 1
            set_grad_enabled(self._grad_mode)
            resume_hooks(self._suspended)
