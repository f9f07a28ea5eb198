"""The hook that fills handles with what a recompute saves.

`refill` recomputes a call under `Filling.pack`. The forward saved in the same order.

Invariant: the j-th tensor saved goes into the j-th handle, if that is alive, and only
if its shape, dtype and node are those of the tensor that the forward saved there. What
is returned to the graph of the recompute has no node: it would be a cycle that Python
does not see.
Rejected: to compare values. That is for `remat.testing.check_replay`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from remat._base.errors import RecomputeError
from remat._base.source import user_line
from remat._graph.handles import Handle, meta_of
from remat._torch import (
    is_below_tracer,
    is_fake,
    is_of_torch_func,
    unwrap_dead,
    without_node,
)


class Stop(BaseException):
    """Ends a recompute: every handle that is alive has its value."""


class Filling:
    """The hook of one recompute.

    Args:
        handles: to be filled.
        metas: of all that the forward saved, None for what was saved itself.
        label: of the call.
        stops: whether the recompute ends once all handles have their values.
        compares: whether shape, dtype and node are compared.
        is_replay: whether the operations are compared with a record besides.

    Attributes:
        left: how many handles are empty.
    """

    __slots__ = (
        *("_compares", "_handles", "_is_replay", "_is_traced", "_label", "_metas"),
        *("_saved", "_stops", "left"),
    )

    def __init__(
        self,
        handles: Iterable[Handle],
        metas: Sequence[Any],
        label: str,
        *,
        stops: bool = True,
        compares: bool = True,
        is_replay: bool = False,
    ) -> None:
        self._stops, self._compares, self._is_replay = stops, compares, is_replay
        self._is_traced = is_below_tracer()
        self._handles = {handle.position: handle for handle in handles}
        self._metas, self._label = metas, label
        self._saved: list[Any] = []
        self.left = len(self._handles)

    def pack(self, t: Tensor) -> Any:
        """Be the hook that saves a tensor."""
        if type(t) is not Tensor and is_of_trace(t, self._is_traced):
            return t
        if not self.left and self._stops:
            raise Stop
        saved, metas = self._saved, self._metas
        position = len(saved)
        if is_of_torch_func(t):
            t = unwrap_dead(t)
            if is_of_torch_func(t):
                saved.append(None)
                return without_node(t)
        node = t.grad_fn
        value = t if node is None else t.detach()
        handle = self._handles.get(position)
        if handle is None:
            saved.append(None)
            if position >= len(metas):
                raise self.differs()
            return value
        meta = meta_of(t, node)
        saved.append(meta)
        if meta != metas[position] and self._is_other(meta, metas[position]):
            raise self.differs()
        handle.value = value
        self.left -= 1
        if not self.left and self._stops:
            raise Stop
        return value

    def end(self) -> None:
        """Check that the recompute, which has ended, has saved all.

        Raises:
            RecomputeError: it saved less than the forward did.
        """
        if self.left or not (self._stops or len(self._saved) == len(self._metas)):
            raise self.differs()

    def _is_other(self, meta: Any, then: Any) -> bool:
        """Say whether what is saved differs from what the forward saved."""
        if not self._compares:
            return False
        if then is None or meta[:2] != then[:2]:
            return True
        nodes = meta[2], then[2]
        if self._is_replay or any(issubclass(node, FunctionCtx) for node in nodes):
            # Hooks may put Functions in between that change nothing, as FSDP's do.
            return False
        names = [*map(_name_of, nodes)]
        # TorchScript fuses operations into such a node once it has run them.
        return names[0] != names[1] and "CppFunction" not in names

    def differs(self) -> RecomputeError:
        """Return the error that the recompute and the forward save different things."""
        then, now = self._metas, self._saved
        # What is saved itself is not compared, nor what nobody reads.
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


def is_of_trace(t: Tensor, is_traced: bool) -> bool:
    """Say whether torch traces a part of the function, as the body of its `scan`.

    What the graph of that trace saves is none of what the graph of the call saves.

    Args:
        t: what is saved.
        is_traced: whether the function itself runs below a tracer, or on fake tensors.
    """
    return is_fake(t) and not is_traced and is_below_tracer()


def _name_of(node: type) -> str:
    """Return the name of a node, the same for both that `reshape` may make."""
    name = node.__name__
    # Which one it makes depends on whether a mode is active.
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
    "did, at {where}.\n  forward:\n{then}\n  recompute:\n{now}\nThe function must "
    "compute the same thing twice: if it depends on outside state that changed, pass "
    "that state as an argument. remat.testing.check_replay shows where the two part."
)
