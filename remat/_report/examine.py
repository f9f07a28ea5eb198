"""Runs a call once for a report: records it, and notes what the backward reads.

Called by `explain` and `compare`. It is the forward of a `remat` call, recorded
whatever its options are; nothing is saved, and nothing is recomputed.

Invariant: a call with the same arguments does what was found. Afterwards every graph,
stream, gradient and buffer is as it was. Rejected: a trace on fake tensors. Some
operations choose another kernel there, and the user's code may look at values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base import pytree
from remat._base.context import here
from remat._base.labels import name_in
from remat._base.types import Fn
from remat._capture.search import Search
from remat._capture.snapshot import Snapshot
from remat._graph.graph import handles_at, nodes_of
from remat._partial.cache import Kind
from remat._partial.classify import Seen
from remat._partial.decide import Situation
from remat._partial.forward_plan import is_droppable
from remat._partial.options import Options
from remat._partial.plan import Fate, Record
from remat._partial.recorder import Recorder
from remat._partial.storages import Storages
from remat._report.inputs import Inputs
from remat._report.labels import reader_of, stream_name
from remat._report.ledger import Ledger, is_parameter, parts
from remat._torch import base_tensor
from remat._transform.saved import Saved, setting_of


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
        scalar: whether the outputs have one element each.
        inner: for each operation, how often nested calls of `remat` recompute it, and
            the innermost of those calls.
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
    scalar: bool
    inner: tuple[tuple[int, str], ...]
    exposed: frozenset[int]
    kind: Kind
    streams: tuple[str, ...]


def examine(
    fn: Fn, label: str, args: Any, kwargs: Any, options: Options
) -> Examined | None:
    """Run a call, and put everything back; None if no tensor requires grad."""
    with _undone(fn, args, kwargs) as inputs:
        search = Search(shallow=True)
        snapshot = Snapshot(fn, label, inputs.args, inputs.kwargs, search)
        leaves = search.found.tensors
        needs = [t.requires_grad for t in leaves]
        if True not in needs:
            return None
        call = _Examining(setting_of(snapshot, (), options), leaves, needs)
        call.follow(getattr(fn, "__self__", fn), leaves)
        result = call.forward(fn, inputs.args, inputs.kwargs, leaves)
        return call.found(leaves, result)


@contextmanager
def _undone(fn: Fn, args: Any, kwargs: Any) -> Iterator[Inputs]:
    """Yield what to run on, and put back what the run changes."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = Inputs(fn, args, kwargs)
        stack.enter_context(inputs.restored())
        torch.clear_autocast_cache()  # casts in it may be of another graph
        stack.callback(torch.clear_autocast_cache)
        with Ledger(stack):
            yield inputs


class _Examining(Saved):
    """A call that is recorded whatever its options are."""

    __slots__ = ("_noting", "_situation")

    @override
    def follow(self, owner: Any, inputs: Sequence[Tensor]) -> None:
        self._situation = self.situation(inputs)
        del owner
        self._noting = _Noting(inputs)

    @override
    def forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        context = here()
        before, context.examining = context.examining, self._noting.observe
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
            situation=self._situation,
            scalar=all(t.numel() == 1 for t in outs if t.requires_grad),
            inner=tuple(noting.inner(self)),
            exposed=frozenset(noting.exposed),
            kind=self.kind(leaves),
            streams=tuple(stream_name(stream) for stream, _ in self.ambient.moved),
        )

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
        return "a leaf is alive anyway"
    return "its kind of tensor is not dropped"


def _as_real(tensor: Tensor) -> Tensor:
    """Return a real tensor like a fake one, but without data."""
    if not hasattr(tensor, "fake_mode") or isinstance(tensor, nn.Parameter):
        return tensor
    real = torch.empty(0, dtype=tensor.dtype)
    if tensor.requires_grad:
        real.requires_grad_()
    return real if tensor.is_leaf else real.view(0)


class _Sizes(Storages):
    """Numbers storages, and notes their sizes.

    Attributes:
        sizes: the bytes of each storage.
    """

    __slots__ = ("sizes",)

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    @override
    def number(self, tensor: Tensor) -> int:
        number = super().number(tensor)
        if number not in self.sizes:
            storages = [part.untyped_storage() for part in parts(tensor)]
            self.sizes[number] = sum(s.nbytes() for s in storages)
        return number


class _Noting(Recorder):
    """Records, and notes the readers of storages, and nested calls.

    Attributes:
        storages: numbers and sizes of storages.
        readers: for each storage, by number, what reads it in the backward.
        itself: the storages that the graph saves itself, without a handle.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.storages = _Sizes()
        self.readers: dict[int, dict[str, None]] = {}
        self.itself: set[int] = set()
        # For each operation, the calls that it runs in, the outermost first.
        self._inside: list[tuple[Saved, ...]] = []
        # For each call: for each handle its storage, and how many operations ran
        # before it.
        self._packed: dict[int, tuple[Saved, dict[int, tuple[int, int]]]] = {}
        super().__init__(leaves, None, self.storages)

    @override
    def _note(self, seen: Seen) -> None:
        super()._note(seen)
        self._inside.append(here().inside[1:])

    def observe(
        self, call: Saved, observe: Callable[[int, Tensor | None], None] | None
    ) -> Callable[[int, Tensor | None], None]:
        """Return a function that is called with each tensor that a call saves."""
        packed: dict[int, tuple[int, int]] = {}
        is_first = not self._packed
        self._packed[id(call)] = call, packed

        def both(place: int, tensor: Tensor | None) -> None:
            if is_first:
                self.roots.pack(tensor)
            if tensor is not None:
                number = self.storages.number(base_tensor(tensor))
                packed[place] = number, len(self.steps)
            if observe is not None:
                observe(place, tensor)

        return both

    def note_readers(self, outs: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
        """Note which nodes of the graph read each storage."""
        numbers: dict[int, int] = {}
        for call, packed in self._packed.values():
            for place, (number, _) in packed.items():
                handle = call.handle_at(place)
                if handle is not None:
                    numbers[id(handle)] = number
        for node, tensors in nodes_of(outs, {t.grad_fn for t in leaves}):
            reader = reader_of(node)
            found = [self.storages.number(base_tensor(t)) for t in tensors]
            self.itself.update(found)
            found += [numbers[id(h)] for h in handles_at(node) if id(h) in numbers]
            for number in found:
                self.readers.setdefault(number, {})[reader] = None

    def inner(self, outermost: Saved) -> Iterator[tuple[int, str]]:
        """Yield how often nested calls recompute each operation, and the innermost."""
        times = [0] * len(self.steps)
        for call, packed in self._packed.values():
            if call is outermost:
                continue
            where = [i for i, inside in enumerate(self._inside) if call in inside]
            last = max((packed[h.position][1] for h in call.alive()), default=0)
            for i, fate in zip(where, _fates(call, len(where)), strict=True):
                times[i] += fate.is_run and i < last
        for i, inside in enumerate(self._inside):
            yield times[i], name_in(inside[-1].label) if inside else ""


def _fates(call: Saved, count: int) -> Sequence[Fate]:
    """Return what a call's recompute does with its `count` operations."""
    following = call.following
    decision = None if following is None else following.decision
    fates = decision[1].full.plan.fates if decision else ()
    return fates if len(fates) == count else [Fate.RECOMPUTED] * count
