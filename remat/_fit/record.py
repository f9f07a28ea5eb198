"""A record of one training step: its operations, and the storages that they read.

Called by `planning`. The step runs on a copy, on fake tensors: once forward with
nothing saved, which tells when Python lets go of each value, and once as it is, which
tells when autograd does.

Invariant: a result is optional here exactly if `remat.scope` asks its policy about it.
The same code tells: `Positions` is the recording of a scope that saves everything.
Rejected: a graph of `make_fx`. It says nothing of lifetimes, of what kernels hold, and
of the order in which a real backward runs.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.absent import IGNORED, inputs_of, tensors_of
from remat._base.context import here
from remat._fit.meter import (
    allocated,
    has_storage,
    may_accumulate,
    values_refused,
    work_of,
)
from remat._fit.training_step import TrainingStep, backward, losses, resident
from remat._fit.workspace import copied_inside, held_inside
from remat._partial.effects import declared_writes, traits_of
from remat._report.labels import one_by_one
from remat._scope.recording import Recording
from remat._scope.table import Table
from remat._scope.values import Block
from remat._torch import (
    LeanDispatchMode,
    call_kernel,
    current_task,
    eager_only,
    hooks_here,
    is_of_checkpoint,
    is_view_op,
    storage_id,
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step that computes something.

    Attributes:
        name: of the overload.
        module: in whose forward it ran; "" in the backward, and outside of all.
        reads: the storages of its arguments.
        makes: the storages of its results that did not exist.
        writes: those that it changed in place.
        seconds: the time that it takes at nominal rates.
        flops: its floating-point operations.
        inside: the bytes that it holds while it runs, beside what it reads and makes;
            less than zero where the engine adds in place what a mode sees added.
        fate: what a scope does with what it makes.
    """

    name: str
    module: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float
    flops: int
    inside: int
    fate: str


# What a scope does with a result: it asks its policy, recomputes or stores it.
ASKED, AGAIN, STORED = "asked", "again", "stored"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step: operations and storages, both by number.

    Attributes:
        operations: in the order in which they ran.
        forward: the first operation of the model's forward, and the one after its last;
            without a model, those of the function. None if the step calls the model
            several times, or not at all.
        turn: how many of them are of the forward, with the loss.
        sizes: the bytes of each storage.
        born: the operation that made it; -1 for what was there before.
        left: the operation before which the forward lets go of it, if nothing saves it.
        dies: the operation before which it is freed in a step without remat.
        resident: the bytes that were there before.
    """

    operations: tuple[Operation, ...]
    forward: tuple[int, int] | None
    turn: int
    sizes: tuple[int, ...]
    born: tuple[int, ...]
    left: tuple[int, ...]
    dies: tuple[int, ...]
    resident: int

    @property
    def flops(self) -> int:
        """The floating-point operations of the step."""
        return sum(op.flops for op in self.operations)


def record(
    step: TrainingStep,
    mode: Any,
    *,
    unless: Sequence[str] | None = None,
) -> StepRecord | None:
    """Run a step twice, and return what it did.

    Args:
        step: a copy of the user's.
        mode: the mode of its fake tensors; a context that does nothing for real ones.
        unless: the names of the operations of a forward of which no record is needed.

    Returns:
        The record; None if it is not needed.
    """
    grads = [(t, t.grad) for t in resident(step) if t.is_leaf and t.requires_grad]
    forward, whole = Watch(counts=False), Watch(counts=True)
    with mode:
        with (
            forward.watching(step),
            torch.autograd.graph.saved_tensors_hooks(_let_go, _let_go),
        ):
            kept = _forward(step, forward)
        del kept
        if unless is not None and names_of(forward.operations) == unless:
            return None
        for tensor, grad in grads:
            tensor.grad = grad
        with whole.watching(step):
            with whole.asking():
                result, outs = _forward(step, whole)
            whole.turn = len(whole.operations)
            backward(outs)
            whole.settle()
            found = whole.record(forward)
            del result, outs
        for tensor, grad in grads:
            tensor.grad = grad
    return found


def names_of(operations: Iterable[Operation]) -> list[str]:
    """Return the names of operations, in order."""
    return [op.name for op in operations]


def _let_go(tensor: Any) -> Any:
    del tensor


def _forward(step: TrainingStep, watch: "Watch") -> tuple[Any, list[Tensor]]:
    with one_by_one("fit", step.args):
        result = step.fn(*step.args, **step.kwargs)
    watch.end_forward(step)
    return result, losses(result, step.loss)


class Watch(LeanDispatchMode):
    """Sees the operations of a step, and when storages are made and freed.

    Attributes:
        operations: those that were seen.
        forward: see `StepRecord`.
        turn: how many there were before the backward.

    Args:
        counts: whether the work and the bytes inside of operations are of interest.
    """

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self._counts = counts
        self.operations: list[Operation] = []
        self.turn = 0
        self._ends: list[tuple[int, int]] = []
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._dies: dict[int, int] = {}
        self._modules: list[tuple[str, int]] = []
        self._replaced: tuple[int, int] | None = None
        self._resident = 0
        self._is_over = False

    @contextmanager
    def watching(self, step: TrainingStep) -> Iterator[None]:
        """See the operations of the body."""
        with ExitStack() as stack:
            stack.enter_context(self)
            for tensor in resident(step):
                self._number(tensor)
            self._resident = sum(self._sizes)
            model = step.model()
            for name, module in () if model is None else model.named_modules():
                for handle in self._hook(name, module):
                    stack.callback(handle.remove)
            yield
            self._is_over = True

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note what a scope around the body would ask its policy about."""
        positions = Positions(self)
        positions.begin()
        try:
            yield
        finally:
            positions.end()

    def end_forward(self, step: TrainingStep) -> None:
        """Note that the function of the step has returned."""
        model = step.model()
        if model is None or getattr(step.fn, "__self__", None) is model:
            self._ends = [(0, len(self.operations))]

    @property
    def forward(self) -> tuple[int, int] | None:
        """The operations of the forward that a plan can be applied to."""
        return self._ends[0] if len(self._ends) == 1 else None

    def _hook(self, name: str, module: nn.Module) -> Sequence[Any]:
        """Note in which module operations run, and which those of the model are."""

        def enter(*_: Any) -> None:
            self._modules.append((name, len(self.operations)))

        def leave(*_: Any) -> None:
            begin = self._modules.pop()[1]
            if not name:
                self._ends.append((begin, len(self.operations)))

        return (
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )

    @property
    def _module(self) -> str:
        return self._modules[-1][0] if self._modules else ""

    def note_fate(self, fate: str) -> None:
        """Note what a scope does with what the last operation made."""
        self.operations[-1] = replace(self.operations[-1], fate=fate)

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in IGNORED:
            return func(*args, **kwargs)
        self.settle()
        with values_refused(func, args, kwargs, self._is_known):
            read = [*map(self._number, inputs_of(args, kwargs))]
            result = call_kernel(func, *args, **kwargs)
        if not is_view_op(func):
            self._see(func, args, kwargs, result, read)
        return result

    def _see(
        self, func: Any, args: Any, kwargs: Any, result: Any, read: Sequence[int]
    ) -> None:
        if current_task() == -1:
            self._refuse_recomputed()
        at, known = len(self.operations), len(self._sizes)
        found = [*map(self._number, tensors_of(result))]
        makes = [*dict.fromkeys(n for n in found if n >= known)]
        written = declared_writes(traits_of(func), args, kwargs)
        writes = [*dict.fromkeys(map(self._number, written))]
        if not (makes or writes):
            return
        if current_task() != -1 and may_accumulate(func, args, result):
            self._replaced = at, read[0]
        self.operations.append(
            Operation(
                str(func),
                self._module,
                tuple(dict.fromkeys(n for n in read if n >= 0)),
                tuple(makes),
                tuple(n for n in writes if n >= 0),
                *self._costs(func, args, kwargs, result, makes),
                STORED,
            )
        )

    def _refuse_recomputed(self) -> None:
        is_torchs = any(is_of_checkpoint(pack) for pack, _ in hooks_here())
        if is_torchs or here().is_in_call():
            by = "torch.utils.checkpoint" if is_torchs else "remat"
            name = self._module or "the function"
            raise ValueError(_RECOMPUTED.format(name=name, by=by))

    def _costs(
        self, func: Any, args: Any, kwargs: Any, result: Any, makes: Sequence[int]
    ) -> tuple[float, int, int]:
        if not self._counts:
            return 0.0, 0, 0
        return *work_of(func, args, kwargs, result), self._inside(func, args, makes)

    def _inside(self, func: Any, args: Any, makes: Sequence[int]) -> int:
        made = sum(self._sizes[n] for n in makes)
        return max(0, held_inside(func, args) - made) + copied_inside(func, args)

    def settle(self) -> None:
        """Take an accumulation of gradients for one in place, if it freed the sum."""
        if self._replaced is not None:
            at, before = self._replaced
            self._replaced = None
            if before in self._dies:
                inside = -self._sizes[before]
                self.operations[at] = replace(self.operations[at], inside=inside)

    def _number(self, tensor: Tensor) -> int:
        """Return the number of the storage of a tensor; -1 if it has none."""
        if not has_storage(tensor):
            return -1
        key = storage_id(tensor)
        known = self._numbers.get(key)
        if known is not None:
            return known[0]
        storage, number = tensor.untyped_storage(), len(self._sizes)
        freed = weakref.ref(storage, partial(self._free, key, number))
        self._numbers[key] = number, freed
        self._sizes.append(allocated(storage.nbytes(), tensor.device))
        self._born.append(len(self.operations))
        return number

    def _is_known(self, tensor: Tensor) -> bool:
        return has_storage(tensor) and storage_id(tensor) in self._numbers

    def _free(self, key: int, number: int, _: Any) -> None:
        if self._is_over:
            return
        del self._numbers[key]
        self._dies[number] = len(self.operations)

    def record(self, forward: "Watch") -> StepRecord:
        """Return the record, with the lifetimes of a forward that saves nothing."""
        born = [-1 if not self._is_made(n) else b for n, b in enumerate(self._born)]
        end = len(self.operations) + 1
        same = self._same_in(forward)
        return StepRecord(
            tuple(self.operations),
            self.forward,
            self.turn,
            tuple(self._sizes),
            tuple(born),
            tuple(forward._dies.get(same.get(n, -1), end) for n in range(len(born))),
            tuple(self._dies.get(n, end) for n in range(len(born))),
            self._resident,
        )

    def _is_made(self, number: int) -> bool:
        at = self._born[number]
        return at < len(self.operations) and number in self.operations[at].makes

    def _same_in(self, forward: "Watch") -> dict[int, int]:
        """Return the numbers that storages have in the other run."""
        pairs = zip(self.operations, forward.operations, strict=False)
        made = (zip(a.makes, b.makes, strict=False) for a, b in pairs)
        return {n: m for each in made for n, m in each}


_RECOMPUTED = (
    "remat.fit: {name} is recomputed already, by {by}. A plan for a whole step says "
    "what is recomputed: undo that first (remat.nn.remove(model), or the switch of the "
    "model), or pass over='blocks'."
)


class Positions(Recording):
    """The recording of a scope whose policy saves everything.

    Args:
        watch: is told what the scope does with each result.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__(Table())
        self._watch = watch
        self.blocks.append(Block(None))

    @override
    def _note_new(
        self,
        operation: Any,
        new: Sequence[tuple[int, Tensor]],
        result: Any,
        *,
        asks: bool,
    ) -> None:
        if new:
            asks = asks and bool(operation.operands)
            self._watch.note_fate(ASKED if asks else AGAIN)
