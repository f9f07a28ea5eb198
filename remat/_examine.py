"""Runs a call once for a report: its record, and who reads what in the backward.

It is the forward of a `remat` call, followed as one that has no record yet, under the
options it would have; only nothing is kept, and nothing is recomputed.

Invariant: what is found is what a call does with the same arguments. No graph, stream,
gradient or buffer is other than before. Rejected: a trace on fake tensors. Some
operations choose another kernel there, and the user's code may look at values.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._compat import base_tensor
from remat._graph import nodes_of
from remat._inputs import Inputs
from remat._options import Options
from remat._plan import Fate, Record
from remat._primal import Primal
from remat._program import Program
from remat._tracing import Tracing, is_droppable
from remat._reporting import called, reader_of, stream_name
from remat._storages import Ledger, parts
from remat._trace import Recorder
from remat._traces import Trace
from remat._decide import SMALL
from remat._transform import record
from remat._types import Fn


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of a call.

    Attributes:
        name: as the function's author would write it.
        dtype: its dtype.
        shape: its shape.
        nbytes: its bytes, of whatever storage it is a view of.
        needs: whether it is differentiated.
        stays: why it is kept even if it is not needed; "" if it is not.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    needs: bool
    stays: str


@dataclass(frozen=True, slots=True)
class Examined:
    """What one call did.

    Attributes:
        record: of its operations.
        readers: for each storage, by number, what reads it in the backward.
        sizes: the bytes of each storage.
        leaves: its inputs.
        elements: how many they have in all.
        small: whether that is so few that "auto" does not even look.
        scalar: whether the outputs are of one element each.
        inner: how often calls of `remat` within it recompute each operation, and which.
        compiled: whether it reaches compiled code.
        given_up: why calls like it are not pruned any more, "" if they are.
        taken: the storages whose memory Python takes.
        learned: those, and others that are needed, as calls like it have shown.
        streams: the random streams that it draws from.
    """

    record: Record
    readers: Mapping[int, tuple[str, ...]]
    sizes: Mapping[int, int]
    leaves: tuple[Leaf, ...]
    elements: int
    small: bool
    scalar: bool
    inner: tuple[tuple[int, str], ...]
    compiled: bool
    given_up: str
    taken: frozenset[int]
    learned: frozenset[int]
    streams: tuple[str, ...]


def examine(
    fn: Fn, label: str, args: Any, kwargs: Any, options: Options
) -> Examined | None:
    """Run a call, and put everything back; None if nothing is to be differentiated."""
    with _undone(fn, args, kwargs) as inputs:
        program = _Examining(fn, label, inputs.args, inputs.kwargs, options)
        leaves, needs = program.take_leaves()
        outs = record(program, leaves, needs)
        return None if outs is None else program.result(leaves, outs)


@contextmanager
def _undone(fn: Fn, args: Any, kwargs: Any) -> Iterator[Inputs]:
    """Give what to run on, and put back what the run changes."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = Inputs(fn, args, kwargs)
        stack.enter_context(inputs.restored())
        torch.clear_autocast_cache()  # casts in it may be of another graph
        stack.callback(torch.clear_autocast_cache)
        with Ledger(stack):
            yield inputs


class _Examining(Primal):
    """A call that is recorded whatever its options are."""

    __slots__ = ("_noting", "_trace_of_calls", "_usual")

    @override
    def _tracing(
        self, program: Program, leaves: Sequence[Tensor], inner: Sequence[Tensor]
    ) -> Tracing:
        self._usual = super()._tracing(program, leaves, inner)
        self._trace_of_calls = Trace()
        tracing = Tracing(self._trace_of_calls, None, True, leaves, inner)
        tracing.mode = self._noting = _Noting(inner)
        return tracing

    def result(self, leaves: Sequence[Tensor], outs: Sequence[Any]) -> Examined:
        """Return what was found."""
        scripts = self._trace_of_calls.scripts
        assert scripts is not None
        noting = self._noting
        usual = None if self._usual is None else self._usual.trace
        known = None if usual is None else usual.scripts
        return Examined(
            record=scripts.record,
            readers={s: tuple(names) for s, names in noting.readers.items()},
            sizes=noting.sizes,
            leaves=tuple(self._leaf(i, t) for i, t in enumerate(leaves)),
            elements=sum(t.numel() for t in leaves),
            small=sum(t.numel() for t in leaves) < SMALL,
            scalar=all(t.numel() == 1 for t in outs if t.requires_grad),
            inner=tuple(_inner(noting.calls, scripts.record)),
            compiled=self.compiled,
            given_up="" if usual is None else usual.reason,
            taken=frozenset(noting.taken),
            learned=frozenset(noting.taken).union(known.learned if known else ()),
            streams=tuple(stream_name(stream) for stream, _ in self._ambient._moved),
        )

    def _leaf(self, i: int, tensor: Tensor) -> Leaf:
        nbytes = tensor.numel() * tensor.element_size()  # of sparse ones too
        meta = tensor.dtype, tuple(tensor.shape), nbytes, self.facts.needs[i]
        return Leaf(self.name_of(i), *meta, _stays(_as_real(tensor)))


def _stays(leaf: Tensor) -> str:
    """Say why an input is kept even if it is not needed; "" if it is not."""
    if is_droppable(leaf):
        return ""
    anyway = leaf.is_leaf and (leaf.requires_grad or isinstance(leaf, nn.Parameter))
    return "a leaf is alive anyway" if anyway else "its kind of tensor is not dropped"


def _as_real(tensor: Tensor) -> Tensor:
    """Return what a fake tensor stands for, but without its data."""
    if not hasattr(tensor, "fake_mode") or isinstance(tensor, nn.Parameter):
        return tensor
    real = torch.empty(0, dtype=tensor.dtype)
    if tensor.requires_grad:
        real.requires_grad_()
    return real if tensor.is_leaf else real.view(0)


class _Noting(Recorder):
    """Records, and notes the sizes of storages, their readers, and calls within.

    Attributes:
        readers: for each storage, by number, what reads it in the backward.
        sizes: the bytes of each storage.
        calls: for each operation, the calls of `remat` that it runs in, from the
            outermost one in.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.readers: dict[int, dict[str, None]] = {}
        self.sizes: dict[int, int] = {}
        self.calls: list[list[Primal]] = []
        self._outside = len(_calls()) + 1  # with the one that is recorded
        super().__init__(leaves, None)

    @override
    def number(self, tensor: Tensor) -> int:
        number = super().number(tensor)
        if number not in self.sizes:
            storages = [part.untyped_storage() for part in parts(tensor)]
            self.sizes[number] = sum(s.nbytes() for s in storages)
        return number

    @override
    def _note(self, *args: Any, **kwargs: Any) -> None:
        super()._note(*args, **kwargs)
        self.calls.append(_calls()[self._outside :])

    @override
    def ask(self, outs: Sequence[Any]) -> None:
        super().ask(outs)
        for node, tensors in nodes_of(outs):
            reader = reader_of(node)
            for tensor in tensors:
                number = self.number(base_tensor(tensor))
                self.readers.setdefault(number, {})[reader] = None


# --- Calls within ---


def _calls() -> list[Primal]:
    """Return, by the stack, the calls whose forwards run, from the outermost one in."""
    found: list[Primal] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FOLLOWED and frame.f_locals["first"]:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


_FOLLOWED = Primal._followed.__code__


def _inner(
    calls: Sequence[Sequence[Primal]], record: Record
) -> Iterator[tuple[int, str]]:
    """Yield how often the calls within recompute each operation, and the innermost."""
    times = [0] * len(record.steps)
    for call in {id(c): c for inside in calls for c in inside}.values():
        where = [i for i, inside in enumerate(calls) if call in inside]
        recipe = call.facts.recipe
        fates = None if recipe is None else recipe.scripts.full.plan.fates
        if fates is None or len(fates) != len(where):
            fates = [Fate.RUN] * len(where)
        for i, fate in zip(where, fates, strict=True):
            times[i] += fate.is_run
    for i, inside in enumerate(calls):
        yield times[i], called(inside[-1]) if inside else ""
