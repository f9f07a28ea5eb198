"""What a report runs a function on: the user's tensors, and what puts back the rest.

Invariant: no graph that was there before is added to or changed, and random streams and
gradients are in the end as they were. Rejected: copies of the arguments, which a model
that only just fits in memory leaves no room for.
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
from remat._capture.search import Search
from remat._capture.snapshot import Snapshot
from remat._report.ledger import ARGUMENT, CAPTURED
from remat._torch import device_generators, preserved_version, use_count


class Inputs:
    """The arguments to run on, and the tensors and streams that can be reached.

    Attributes:
        tensors: passed or captured.
        run_on: what stands in for each, or itself.
        args: the arguments to run on.
        kwargs: the keyword arguments.
    """

    def __init__(self, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        search = Search()
        self._snapshot = Snapshot(_named(fn), "", args, kwargs, search)
        if search.is_lazy:
            raise CaptureError(_LAZY)
        self.tensors = search.tensors
        devices = map(stream_of, device_generators())
        self._streams = [*search.streams, *(s for s in devices if s is not None)]
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

        Python's count only for arguments: what is captured is held by what captured it,
        which a program holds.
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
    """Return what is wrapped, of which the names are those that a user knows."""
    while hasattr(type(fn), "__remat_options__"):
        fn = fn.__wrapped__
    return fn


def _stand_ins(leaves: Iterable[Any], differentiated: bool) -> dict[int, Tensor]:
    """Return tensors to run on in place of those whose graph is not to be touched.

    Those are what a graph was recorded of, or, where nothing is `differentiated`, all
    that can be.
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
    """Makes a tensor require grad without being a leaf, so that it may be changed."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, _anchor: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        ctx.mark_dirty(tensor)
        return tensor
