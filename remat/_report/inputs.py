"""What a report runs a function on: the user's own tensors, put back afterwards.

Called by `examine`, `residuals` and `check_replay`.

Invariant: no graph that was there before is added to or changed, and random streams and
gradients are as they were afterwards. Rejected: copies of the arguments. A model that
only just fits in memory leaves no room for them.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

from remat._ambient.streams import global_streams, stream_of
from remat._base import pytree
from remat._base.errors import CaptureError
from remat._base.types import Fn
from remat._capture.search import CallSearch
from remat._capture.snapshot import Snapshot
from remat._report.ledger import ARGUMENT, CAPTURED
from remat._torch import device_generators, preserved_version, use_count
from remat._transform.module import recomputed_by


class Inputs:
    """The arguments to run on, and the tensors and streams that a function reaches.

    Attributes:
        tensors: passed or captured.
        run_on: for each, the tensor itself or a stand-in.
        args: the arguments to run on.
        kwargs: the keyword arguments.
    """

    def __init__(self, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        search = CallSearch()
        self._snapshot = Snapshot(_named(fn), "", args, kwargs, search)
        if search.found.is_lazy:
            raise CaptureError(_LAZY)
        self.tensors = search.found.tensors
        devices = map(stream_of, device_generators())
        self._streams = [
            *self._snapshot.streams,
            *(s for s in devices if s is not None),
        ]
        leaves, treedef = pytree.flatten((args, kwargs))
        stand_ins = _stand_ins(leaves, any(t.requires_grad for t in self.tensors))
        self.run_on = [stand_ins.get(id(t), t) for t in self.tensors]
        self._passed = len({id(value) for value in leaves if isinstance(value, Tensor)})
        leaves = [stand_ins.get(id(value), value) for value in leaves]
        self.args, self.kwargs = pytree.unflatten(treedef, leaves)

    def described(self, index: int) -> tuple[int, str]:
        """Return the rank and the origin of a tensor."""
        name, is_passed = self._snapshot.origin_of(index)
        if is_passed:
            return ARGUMENT, f"from the argument {name}"
        return CAPTURED, f"from the captured `{name}`"

    def references(self) -> list[int]:
        """Return how many references there are to each tensor.

        Python's references count only for arguments: a captured tensor is held by the
        object that captured it, which a call may hold.
        """
        ours = self.run_on[: self._passed]
        pythons = chain(map(sys.getrefcount, ours), repeat(0))
        return [use_count(t) + n for t, n in zip(self.run_on, pythons, strict=False)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Leave streams and gradients as they are now."""
        streams = [*global_streams().streams, *self._streams]
        states = [stream.read() for stream in streams]
        grads = [t.grad if t.is_leaf else None for t in self.tensors]
        try:
            yield
        finally:
            for stream, state in zip(streams, states, strict=True):
                if stream.read() != state:
                    stream.write(state)
            for t, grad in zip(self.tensors, grads, strict=True):
                if t.is_leaf and t.grad is not grad:
                    t.grad = grad


def _named(fn: Any) -> Any:
    """Return the function that is wrapped, whose parameter names the user knows."""
    while (found := recomputed_by(fn)) is not None:
        fn, _ = found
    return fn


def _stand_ins(leaves: Iterable[Any], differentiated: bool) -> dict[int, Tensor]:
    """Return stand-ins for tensors whose graph is not to be touched.

    Those are the tensors that already have a graph. If nothing is `differentiated`,
    they are all tensors that can require grad.
    """
    anchor = torch.zeros((), requires_grad=True)
    found = {}
    for t in leaves:
        if not isinstance(t, Tensor) or t.is_inference():
            continue
        can_be = t.is_floating_point() or t.is_complex()
        if (t.requires_grad and not t.is_leaf) if differentiated else can_be:
            with preserved_version(t):
                found[id(t)] = _StandIn.apply(t.detach(), anchor)
    return found


_LAZY = (
    "remat: the function holds a lazy module, whose parameters are not initialized "
    "yet. A report would be on a call that makes them: call it once before."
)


class _StandIn(Function):
    """Returns a tensor that requires grad and is not a leaf: it may be changed."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, _anchor: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        ctx.mark_dirty(tensor)
        return tensor
