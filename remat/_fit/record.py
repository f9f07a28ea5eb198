"""A record of one training step: its operations, and the storages that they read.

The step runs on a copy, on fake tensors: once up to its loss with nothing saved, which
tells when Python lets go of each value, and once as it is, which tells when autograd
does.

Invariant: a result is optional here exactly if `remat.scope` asks its policy about it.
The same code tells: `Positions` is the recording of a scope that saves everything.
Rejected: a graph of `make_fx`. It says nothing of lifetimes, of what kernels hold, and
of the order in which a real backward runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.absent import inputs_of
from remat._base.calls import CallPlace, Calls
from remat._base.context import here
from remat._fit.meter import Measured, Meter, work_of
from remat._fit.simulate import (
    BACKWARD,
    NO_UPDATE,
    RefusedStepError,
    TrainingStep,
    Update,
    backward,
    copied,
    gradients_of,
    put_back,
    resident,
    updated,
    without_values_if_possible,
)
from remat._partial.effects import DrawDetector, declared_writes, traits_of
from remat._scope.recording import Numbered, Recording
from remat._scope.table import ValueTable
from remat._scope.values import Block, makes_blank
from remat._torch.autograd import (
    current_node,
    current_task,
    hooks_here,
    nodes_made,
    sequence_number,
)
from remat._torch.operators import OpOverload, is_view_op
from remat._torch.process import is_of_checkpoint
from remat._torch.shards import shards_in
from remat._torch.tensors import AddressAnswers, fake_mode, scales_put_back


@dataclass(frozen=True, slots=True)
class StepOp:
    """One operation of a step that computes something."""

    name: str  # of the overload
    module: str  # in whose call it ran; "" in the backward, and outside of all
    place: CallPlace
    # Storages: of its arguments; of new results; those that it changed in place.
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float  # the time that it takes at nominal rates
    flops: int
    # The bytes that it holds while it runs, beside what it reads and makes; less than
    # zero where the engine adds in place what a mode sees added.
    inside: int
    fate: str  # what a scope does with what it makes
    # Whether each recompute of a call runs it: it draws, or Python reads its result.
    always: bool = False
    node: int = -1  # of the backward that runs it, by its number
    # Whether it reads a part of what was there before the step, or another view of it.
    reads_view: bool = False


# What a scope does with a result: it asks its policy, recomputes or stores it.
ASKED, AGAIN, STORED = "asked", "again", "stored"


class BlockCall(NamedTuple):
    """A call of a block."""

    name: str
    operations: range  # by number
    nodes: range  # that it makes, by number


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step: operations and storages, both by number."""

    operations: tuple[StepOp, ...]
    # The first operation of the model's call, and the one after its last; without a
    # model, those of the function. None if the step calls the model several times, or
    # not at all.
    called: tuple[int, int] | None
    turn: int  # how many operations run before the backward: of the call and the loss
    # Of each storage: its bytes; the operation that made it, or -1; that before which
    # Python lets go of it, if nothing saves it; that before which a step without remat
    # frees it.
    sizes: tuple[int, ...]
    born: tuple[int, ...]
    left: tuple[int, ...]
    dies: tuple[int, ...]
    resident: int  # the bytes that were there before
    calls: tuple["BlockCall", ...] = ()  # of blocks, and of modules around them
    viewed: frozenset[int] = frozenset()  # storages that views were made of
    gathered: frozenset[int] = frozenset()  # those that code frees, and fills again
    # Operations of the forward that run again as a whole, within the backward.
    copied: tuple[range, ...] = ()
    update: Update = NO_UPDATE  # what the optimizer takes, whose states are resident
    functional: "StepRecord | None" = None  # the step under `torch.func.grad`

    @property
    def forwards(self) -> Sequence[int]:
        """The operations of the forward, also of those that run again as a whole."""
        return [*range(self.turn), *sorted(i for each in self.copied for i in each)]

    def turn_of(self, number: int) -> int:
        """Return the operation at which the forward is over that made a storage."""
        born = self.born[number]
        return next((each.stop for each in self.copied if born in each), self.turn)

    @property
    def flops(self) -> int:
        """The floating-point operations of the step."""
        return sum(op.flops for op in self.operations)

    def updated(self, update: Update) -> "StepRecord":
        """Return that of later steps, with the states of an optimizer."""
        return replace(self, resident=self.resident + update.states, update=update)

    def accumulating(self) -> "StepRecord":
        """Return that of the same step with gradients that are there, to which it adds.

        What it makes is freed once it is added: after the node that made it, which may
        run one operation more.
        """
        end, dies = len(self.operations), [*self.dies]
        found = [n for n, b in enumerate(self.born) if b >= self.turn and dies[n] > end]
        for i, op in enumerate(self.operations):
            for n in {*op.reads, *op.makes, *op.writes}.intersection(found):
                dies[n] = min(i + 2, end)
        more = sum(self.sizes[n] for n in found)
        return replace(self, resident=self.resident + more, dies=tuple(dies))


def recorded(
    step: TrainingStep,
    device: torch.device,
    *,
    blocks: Iterable[str] = (),
    also: Any = None,
) -> tuple[StepRecord, bool]:
    """Return the record of a copy of a step, and whether its tensors were real."""

    def run(is_real: bool) -> StepRecord:
        mode = nullcontext() if is_real else fake_mode()
        made = [copied(step, mode, device)]
        if shards_in(step.modules()):  # those have to run a backward, too
            made.append(copied(step, mode, device))
        return record(made[0], mode, made[-1], blocks=blocks, also=also)

    return without_values_if_possible(step, run)


def record(
    step: TrainingStep,
    mode: Any,
    other: TrainingStep | None = None,
    *,
    blocks: Iterable[str] = (),
    also: Any = None,
) -> StepRecord:
    """Run a step twice; return what it did.

    `other` is a copy for the first run, which has no backward. `also` may run it again,
    and is given what was recorded.
    """
    grads = gradients_of(step)
    alone = StepRecorder(costs=False)
    whole = StepRecorder(costs=True, blocks=blocks)
    with mode, AddressAnswers(), scales_put_back():
        with (
            alone.watching(other or step) as watched,
            torch.autograd.graph.saved_tensors_hooks(_let_go, _refuse_backward),
        ):
            kept = watched.to_loss()
        del kept
        put_back(grads)
        with whole.watching(step) as watched:
            positions = Positions(whole)
            positions.begin()
            try:
                result, outs = watched.to_loss()
            finally:
                positions.end()
            whole.turn = len(whole.operations)
            backward(outs)
            whole.settle()
            found = whole.record(alone)
        if step.optimizer is not None:
            found = found.updated(updated(step, result))
        del result, outs
        put_back(grads)
        if also is not None:
            found = replace(found, functional=also(step, found, alone))
    return found


def _let_go(tensor: Any) -> Any:
    del tensor


def _refuse_backward(_: Any) -> Any:
    raise RefusedStepError(BACKWARD)


class StepRecorder(Meter):
    """Notes the operations of a step, and when storages are made and freed."""

    def __init__(self, *, costs: bool, blocks: Iterable[str] = ()) -> None:
        super().__init__()
        self.blocks = [*blocks]
        self._calls_of_modules: list[BlockCall] = []  # also of the model, ""
        self._costs = costs
        self.operations: list[StepOp] = []
        self.turn = 0  # how many there were before the backward
        # The span of the function, where a plan is applied to it and not to a model.
        self._span: tuple[int, int] | None = None
        self._dies: dict[int, int] = {}
        # Storages that only kernels which torch does not see may have written to; those
        # whose memory Python took. A scope does not recompute them.
        self._blank: set[int] = set()
        self.exposed: set[int] = set()
        self._viewed: set[int] = set()  # storages
        self._calls = Calls()
        self._names: dict[int, str] = {}  # of modules
        self._resident = self._count_before = 0
        self._is_over = False

    @contextmanager
    def watching(self, step: TrainingStep) -> Iterator[TrainingStep]:
        """See the operations of the body, which runs the step that is yielded."""
        with ExitStack() as stack:
            stack.enter_context(self)
            self._resident = self.hold_all(resident(step))
            self._count_before = len(self.sizes)
            model = step.model()
            if model is not None:
                self._names = {id(m): name for name, m in model.named_modules()}
                for name in dict.fromkeys(("", *self.blocks)):
                    for handle in self._hook(model.get_submodule(name), name):
                        stack.callback(handle.remove)
            stack.enter_context(self._calls)
            yield step._replace(around_call=lambda: self._note_call(step))
            self._is_over = True

    @contextmanager
    def _note_call(self, step: TrainingStep) -> Iterator[None]:
        """Note what a plan is applied to, if that is the function of the step."""
        yield
        model = step.model()
        if model is None or getattr(step.fn, "__self__", None) is model:
            self._span = 0, len(self.operations)

    def _hook(self, block: nn.Module, name: str) -> Sequence[Any]:
        """Note which operations are those of calls of a block, or of the model."""
        begun: list[tuple[int, int]] = []

        def enter(*_: Any) -> None:
            begun.append((len(self.operations), nodes_made()))

        def leave(*_: Any) -> None:
            first, node = begun.pop()
            operations = range(first, len(self.operations))
            call = BlockCall(name, operations, range(node, nodes_made()))
            self._calls_of_modules.append(call)

        # What a shard gathers and frees around its call runs once, whatever is
        # recomputed.
        is_shard = bool(shards_in([block]))
        return (
            block.register_forward_pre_hook(enter, prepend=not is_shard),
            block.register_forward_hook(leave, prepend=is_shard, always_call=True),
        )

    @override
    def reads(self, args: Any, kwargs: dict[str, Any]) -> Sequence[int]:
        return [*map(self.hold, inputs_of(args, kwargs))]

    @override
    def measured(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: Measured
    ) -> None:
        # One of NumPy's memory makes a storage.
        if is_view_op(func) and not found.makes:
            self._viewed.update(found.reads)
            return
        node = current_node()
        call = self._calls.current
        module = self._names.get(id(call.module), "")
        if current_task() == -1:
            _refuse_recomputed(module or "the function")
        traits = traits_of(func)
        written = declared_writes(traits, args, kwargs)
        writes = dict.fromkeys(n for n in map(self.hold, written) if n >= 0)
        if not (found.makes or writes):
            return
        if isinstance(func, OpOverload) and makes_blank(func):
            self._blank.update(found.makes)
        self._blank.difference_update(writes)
        reads = tuple(dict.fromkeys(n for n in found.reads if n >= 0))
        seconds, flops = 0.0, 0
        if self._costs and not is_view_op(func):
            seconds, flops = work_of(func, args, kwargs, found.result)
        draws = DrawDetector(func, args, kwargs).has_drawn()
        self.operations.append(
            StepOp(
                *(str(func), module, call.place),
                *(reads, tuple(found.makes), tuple(writes)),
                *(seconds, flops, found.inside, STORED),
                traits.is_read_by_python or draws,
                -1 if node is None else sequence_number(node),
                any(map(self._is_view_from_before, inputs_of(args, kwargs))),
            )
        )
        self._sum = found.reads[0] if found.reads else -1

    def _is_view_from_before(self, tensor: Tensor) -> bool:
        number = self.hold(tensor)
        is_there = number < self._count_before or number in self.gathered
        return tensor._is_view() and is_there

    @override
    def added_in_place(self) -> None:
        # What was replaced was freed before the next operation began.
        last = self.operations[-1]
        inside = last.inside - self.sizes[self._sum]
        self.operations[-1] = replace(last, inside=inside)

    @override
    def freed(self, number: int) -> None:
        if not self._is_over:
            self._dies[number] = len(self.operations)

    def record(self, alone: "StepRecorder") -> StepRecord:
        """Return the record, with the lifetimes of a run that saves nothing."""
        end, count = len(self.operations) + 1, len(self.sizes)
        born = [-1] * count
        same: dict[int, int] = {}
        for i, op in enumerate(self.operations):
            for n in op.makes:
                born[n] = i
        for op, other in zip(self.operations, alone.operations, strict=False):
            same.update(zip(op.makes, other.makes, strict=False))
        is_kept = self._blank | self.exposed
        calls = self._calls_of_modules
        spans = [c.operations for c in calls if not c.name]
        only = (spans[0].start, spans[0].stop) if len(spans) == 1 else None
        return StepRecord(
            tuple(self.operations),
            self._span or only,
            self.turn,
            tuple(self.sizes),
            tuple(born),
            tuple(
                end if n in is_kept else alone._dies.get(same.get(n, -1), end)
                for n in range(count)
            ),
            tuple(self._dies.get(n, end) for n in range(count)),
            self._resident,
            tuple(calls),
            frozenset(self._viewed),
            frozenset(self.gathered),
        )


def _refuse_recomputed(name: str) -> None:
    is_torchs = any(is_of_checkpoint(pack) for pack, _ in hooks_here())
    if is_torchs or here().is_in_call():
        by = "torch.utils.checkpoint" if is_torchs else "remat"
        raise RefusedStepError(_RECOMPUTED.format(name=name, by=by))


_RECOMPUTED = (
    "remat.fit: {name} is recomputed already, by {by}. A plan says what is "
    "recomputed: undo that first (remat.nn.remove(model), or the switch of the model)."
)


class Positions(Recording):
    """A scope that saves everything: notes what one would ask its policy about."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__(ValueTable())
        self._recorder = recorder
        self.blocks.append(Block(None))

    @override
    def _note_new(
        self, operation: Any, new: Numbered, result: Any, *, asks: bool
    ) -> None:
        if new:
            operations = self._recorder.operations
            fate = ASKED if asks and operation.operands else AGAIN
            operations[-1] = replace(operations[-1], fate=fate)

    @override
    def expose(self, tensor: Tensor) -> None:
        super().expose(tensor)
        self._recorder.exposed.add(self._recorder.hold(tensor))
