"""Records a run for a report: its operations, the calls in it, and what reads what.

Called by `examine`. The calls are those of rematerialized functions in the function
that is examined.

Invariant: it changes nothing of the run, except what a call in it is asked to do
(`ask`).
Rejected: a record for each call. The calls share storages, and bytes are counted once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.absent import Absent
from remat._base.context import here
from remat._base.labels import name_in
from remat._base.parts import parts
from remat._graph.graph import handles_at, nodes_of
from remat._graph.handles import PackedOutside, stored_by
from remat._partial.budgeted import moves
from remat._partial.options import Options
from remat._partial.plan import Fate
from remat._partial.recorder import Recorder, SeenOperation
from remat._partial.values import Storages
from remat._report.labels import reader_of
from remat._torch import base_tensor, current_task
from remat._transform.lowering import Lowering
from remat._transform.saved import Saved


Ask = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Within:
    """A call of a rematerialized function in the function that is examined.

    Attributes:
        around: the index of the call that it runs in; -1 if it runs in none.
        inputs: the storages that it keeps alive to be recomputed.
        holds: the storages that its recompute holds for the backward.
        away: the storages that its policy offloads.
    """

    around: int
    inputs: frozenset[int]
    holds: frozenset[int]
    away: frozenset[int]


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


class Noting(Recorder):
    """Records, and notes the readers of storages, and nested calls.

    Attributes:
        storages: numbers and sizes of storages.
        readers: for each storage, by number, what reads it in the backward.
        itself: the storages that the graph saves itself, without a handle.
        differentiates: whether a backward runs in the run.
        ask: called with each rematerialized function that the run calls, how it would
            be called and its arguments. It returns the lowering and options to take.
    """

    def __init__(self, leaves: Sequence[Tensor], ask: Ask | None) -> None:
        self.ask = ask
        self.storages = _Sizes()
        self.readers: dict[int, dict[str, None]] = {}
        self.itself: set[int] = set()
        self.differentiates = False
        # For each operation, the calls that it runs in, the outermost first.
        self._inside: list[tuple[Saved, ...]] = []
        # For each call: for each handle its storage, and how many operations ran
        # before it.
        self._packed: dict[int, tuple[Saved, dict[int, tuple[int, int]]]] = {}
        # For each call, the one that it runs in.
        self._around: dict[int, Saved | None] = {}
        super().__init__(leaves, None, self.storages)

    @override
    def _note(self, seen: SeenOperation) -> None:
        super()._note(seen)
        self._inside.append(here().inside[1:])
        self.differentiates |= current_task() >= 0

    def observe(
        self, call: Saved, observe: Callable[[int, Tensor | None], None] | None
    ) -> Callable[[int, Tensor | None], None]:
        """Return a function that is called with each tensor that a call saves."""
        packed: dict[int, tuple[int, int]] = {}
        is_first = not self._packed
        self._packed[id(call)] = call, packed
        around = here().inside
        self._around[id(call)] = around[-1] if around else None

        def both(place: int, tensor: Tensor | None) -> None:
            if is_first:
                self.roots.pack(tensor)
            if tensor is not None:
                number = self.storages.number(base_tensor(tensor))
                packed[place] = number, len(self.steps)
            if observe is not None:
                observe(place, tensor)

        return both

    def entered(self, call: Any, inputs: Sequence[Tensor]) -> None:
        """Be told of the forward of a call under torch.func, which saves no handles."""

    def asked(
        self, block: Any, lowering: Lowering, args: tuple[Any, ...]
    ) -> tuple[Lowering, Options]:
        """Return how a rematerialized function in the function is called."""
        if self.ask is None:
            return lowering, block._options
        return self.ask(block, lowering, args)

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
            where = self._steps_of(call)
            last = max((packed[h.position][1] for h in call.alive()), default=0)
            for i, fate in zip(where, _fates(call, len(where)), strict=True):
                times[i] += fate.is_run and i < last
        for i, inside in enumerate(self._inside):
            yield times[i], name_in(inside[-1].label) if inside else ""

    def _steps_of(self, call: Saved) -> list[int]:
        """Return the operations that ran in a call, by index."""
        return [i for i, inside in enumerate(self._inside) if call in inside]

    def calls(self, outermost: Saved) -> Iterator[Within]:
        """Yield the calls within, those around before those inside."""
        index = {id(outermost): -1}
        for call, packed in self._packed.values():
            if call is outermost:
                continue
            index[id(call)] = len(index) - 1
            waiting = call.alive()
            yield Within(
                around=index[id(self._around[id(call)])],
                inputs=frozenset(self._inputs_of(call) if waiting else ()),
                holds=frozenset(packed[handle.position][0] for handle in waiting),
                away=frozenset(self._away(call)),
            )

    def _inputs_of(self, call: Saved) -> Iterator[int]:
        """Yield the storages of the inputs that a call keeps."""
        for value in call.inputs.values:
            kept = stored_by(value) if type(value) is PackedOutside else [value]
            for t in kept:
                if type(t) is not Absent:
                    yield self.storages.number(base_tensor(t))

    def _away(self, call: Saved) -> Iterator[int]:
        """Yield the storages of what a call offloads."""
        made = _plans_of(call)
        steps = self._steps_of(call)
        if made is None or len(steps) != len(made.record.steps):
            return
        for (i, k), decision in zip(
            made.full.plan.residuals, made.destinations, strict=True
        ):
            step = self.steps[steps[i]]
            if moves(decision, step.op.outputs):
                yield step.makes[k]


def _plans_of(call: Saved) -> Any:
    """Return the plans that a call follows; None if it follows none."""
    following = call.following
    decision = None if following is None else following.decision
    return decision[1] if decision else None


def _fates(call: Saved, count: int) -> Sequence[Fate]:
    """Return what a call's recompute does with its `count` operations."""
    made = _plans_of(call)
    fates = made.full.plan.fates if made else ()
    return fates if len(fates) == count else [Fate.RECOMPUTED] * count
