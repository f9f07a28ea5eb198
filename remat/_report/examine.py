"""Runs a call once for a report: records it, and notes what the backward reads.

Called by `explain` and `compare`. It is the forward of a `remat` call, recorded
whatever its options are; nothing is saved, and nothing is recomputed.

Invariant: a call with the same arguments does what was found. Afterwards every graph,
stream, gradient and buffer is as it was. Rejected: a trace on fake tensors. Some
operations choose another kernel there, and the user's code may look at values.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base import pytree
from remat._base.context import here
from remat._base.types import Fn
from remat._live.reach import Reach
from remat._partial.cache import CallKind
from remat._partial.decide import ACCUMULATES, Situation
from remat._partial.options import Options
from remat._partial.plan import Record
from remat._partial.planned_call import is_droppable
from remat._report.inputs import Inputs
from remat._report.labels import stream_name
from remat._report.ledger import Ledger, is_parameter
from remat._report.noting import Ask, Noting, Within
from remat._transform.saved import Saved


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of a call.

    Attributes:
        name: as the function's author would write it.
        dtype: its dtype.
        shape: its shape.
        nbytes: its bytes, of whatever storage it is a view of.
        needs: whether it is differentiated.
        stays: why it is kept even if no recompute reads it; "" if it is not.
        is_copied: whether the forward writes to it, so that the call keeps a copy.
        is_parameter: whether it is a leaf that requires grad.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    needs: bool
    stays: str
    is_copied: bool
    is_parameter: bool


@dataclass(frozen=True, slots=True)
class Examined:
    """What one call did.

    Attributes:
        record: of its operations.
        readers: for each storage, by number, what reads it in the backward.
        sizes: the bytes of each storage.
        leaves: its inputs.
        itself: the storages that the graph saves itself, without a handle.
        situation: what decides whether it is recorded.
        differentiable: whether an output requires grad.
        scalar: whether those outputs have one element each.
        differentiates: whether it runs a backward itself.
        inner: for each operation, how often nested calls of `remat` recompute it, and
            the innermost of those calls.
        calls: those nested calls, the ones around before the ones inside.
        exposed: the storages whose memory Python reads or writes.
        kind: what it has in common with calls that share its record.
        streams: the random streams that it draws from.
    """

    record: Record
    readers: Mapping[int, tuple[str, ...]]
    sizes: Mapping[int, int]
    leaves: tuple[Leaf, ...]
    itself: frozenset[int]
    situation: Situation
    differentiable: bool
    scalar: bool
    differentiates: bool
    inner: tuple[tuple[int, str], ...]
    calls: tuple[Within, ...]
    exposed: frozenset[int]
    kind: CallKind
    streams: tuple[str, ...]


def examine(
    fn: Fn,
    label: str,
    args: Any,
    kwargs: Any,
    options: Options,
    ask: Ask | None = None,
) -> Examined | None:
    """Run a call, and put everything back; None if no tensor requires grad.

    Args:
        fn: the function.
        label: of the function.
        args: its arguments.
        kwargs: its keyword arguments.
        options: of the call.
        ask: what calls within are asked to do; None to leave them as they are.
    """
    with undone(fn, args, kwargs) as (inputs, _):
        reach = Reach(fn, label, inputs.args, inputs.kwargs)
        leaves = reach.take_tensors()
        needs = [t.requires_grad for t in leaves]
        if True not in needs:
            fn(*inputs.args, **inputs.kwargs)  # what it raises is to be seen
            return None
        call = _Examining(reach, options, leaves, needs, ask)
        result = call.forward(fn, inputs.args, inputs.kwargs, leaves)
        return call.found(leaves, result)


L = TypeVar("L", bound=Ledger)


@contextmanager
def undone(
    fn: Fn, args: Any, kwargs: Any, mode: Callable[[ExitStack], L] = Ledger
) -> Iterator[tuple[Inputs, L]]:
    """Yield what to run on, and put back what the run changes.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        mode: makes the mode to run under.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = Inputs(fn, args, kwargs)
        stack.enter_context(inputs.restored())
        torch.clear_autocast_cache()  # casts in it may be of another graph
        stack.callback(torch.clear_autocast_cache)
        with mode(stack) as ledger:
            yield inputs, ledger


class _Examining(Saved):
    """A call that is recorded whatever its options are."""

    __slots__ = ("_noting", "_situation")

    def __init__(
        self,
        reach: Reach,
        options: Options,
        inputs: Sequence[Tensor],
        needs: list[bool],
        ask: Ask | None,
    ) -> None:
        super().__init__(reach, options, inputs, needs)
        self._situation, self._noting = self.situation(inputs), Noting(inputs, ask)

    @override
    def forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        context = here()
        before, context.examining = context.examining, self._noting
        try:
            with self._noting:
                return super().forward(fn, args, kwargs, inputs)
        finally:
            context.examining = before

    def found(self, leaves: Sequence[Tensor], result: Any) -> Examined:
        """Return what was found."""
        outs = [t for t in pytree.flatten(result)[0] if isinstance(t, Tensor)]
        noting = self._noting
        alive = {handle.position for handle in self.alive()}
        gone = {*range(len(self.handles))} - alive
        record = noting.record(outs, gone)
        noting.note_readers(outs, leaves)
        return Examined(
            record=record,
            readers={s: tuple(names) for s, names in noting.readers.items()},
            sizes=noting.storages.sizes,
            leaves=tuple(self._leaf(i, t) for i, t in enumerate(leaves)),
            itself=frozenset(noting.itself),
            situation=self._what_there_is_to_know(),
            differentiable=any(t.requires_grad for t in outs),
            scalar=all(t.numel() == 1 for t in outs if t.requires_grad),
            differentiates=noting.differentiates,
            inner=tuple(noting.inner(self)),
            calls=tuple(noting.calls(self)),
            exposed=frozenset(noting.exposed),
            kind=self.kind(leaves),
            streams=tuple(stream_name(stream) for stream, _ in self.ambient.moved),
        )

    def _what_there_is_to_know(self) -> Situation:
        if not self.effects.accumulates:
            return self._situation
        return dataclasses.replace(self._situation, given_up=ACCUMULATES)

    def _leaf(self, i: int, tensor: Tensor) -> Leaf:
        nbytes = tensor.numel() * tensor.element_size()  # of sparse ones too
        meta = tensor.dtype, tuple(tensor.shape), nbytes, self.inputs.needs[i]
        is_copied, stays = i in self.inputs.copied, _stays(_as_real(tensor))
        return Leaf(self.name_of(i), *meta, stays, is_copied, is_parameter(tensor))


def _stays(leaf: Tensor) -> str:
    """Say why an input is kept even if no recompute reads it; "" if it is not."""
    if is_droppable(leaf):
        return ""
    if is_parameter(leaf):
        return "a leaf, which is alive anyway"
    return "its kind of tensor is not dropped"


def _as_real(tensor: Tensor) -> Tensor:
    """Return a real tensor like a fake one, but without data."""
    if not hasattr(tensor, "fake_mode") or isinstance(tensor, nn.Parameter):
        return tensor
    real = torch.empty(0, dtype=tensor.dtype)
    if tensor.requires_grad:
        real.requires_grad_()
    return real if tensor.is_leaf else real.view(0)
