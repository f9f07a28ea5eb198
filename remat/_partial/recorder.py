"""Records what one forward does: its operations, and what its graph saved.

`planned_call` has the first call of a kind run under this mode. Each part of a record
has an owner: `storages` the numbers, `classify` what an operation may become, `roots`
what the graph saved, `candidates` what the policy says.

Invariant: a record holds no tensor, and recording changes no value. It is only ever an
optimization: what it gets wrong shows in the replay (`replay`), as an error or as an
operation that is not the one expected.
Rejected: recording on fake tensors, a second run. The user's code may look at values,
and some operations choose another kernel.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._partial.assemble import completed
from remat._partial.candidates import Candidates
from remat._partial.classify import Seen, may_be_saved, step_of
from remat._partial.effects import (
    DrawDetector,
    declared_writes,
    traits_of,
    updated_statistics,
)
from remat._partial.exposures import Exposures
from remat._partial.match import UNRECORDED, statics_of
from remat._partial.measured import Timing
from remat._partial.naming import tell_no_more, tell_of_names
from remat._partial.plan import Record, Step
from remat._partial.roots import Roots
from remat._partial.storages import Storages
from remat._partial.values import Arguments, Results
from remat._torch import (
    SNAPSHOT,
    LeanDispatchMode,
    base_tensor,
    call_kernel,
    current_task,
    eager_only,
    no_torch_functions,
    transforms,
)
from remat.policies import Decision, Policy
from remat.policies._within import times_operations


_NEW_EMPTY = torch.ops.aten.new_empty_strided.default


class Recorder(LeanDispatchMode):
    """Records the operations of one forward.

    Args:
        leaves: the tensors that it runs on.
        policy: says of an operation whether its outputs may be saved; None for no.
        storages: numbers storages; None for new numbers.

    Attributes:
        steps: the operations so far.
        inputs: the number of each leaf.
        exposed: the storages whose memory Python read or wrote other than by
            operations.
        roots: what the graph saved.
        candidates: what may be saved for the policy.
        assigns: whether an input was given memory of the record, by `.data`. A replay
            may leave that value out, and the user's tensor would have no memory.
        misses: whether operations ran that it did not see.
        copies_gradients: whether a backward inside copied a gradient for a leaf, which
            it does only while something else holds it, as candidates do.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        policy: Policy | None,
        storages: Storages | None = None,
    ) -> None:
        super().__init__()
        self._policy = policy
        self._timing = Timing(call_kernel) if times_operations(policy) else None
        self._storages = storages = Storages() if storages is None else storages
        self._made: set[int] = set()  # storages, by operations
        self._updates: list[tuple[int, ...]] = []  # of running statistics
        self._names: dict[int, set[str]] = {}
        self.steps: list[Step] = []
        self.exposed: set[int] = set()
        self.inputs = tuple(storages.number(base_tensor(t)) for t in leaves)
        self.roots = Roots(storages, self.steps, self._made)
        self.candidates = Candidates(policy)
        self.copies_gradients, self._task = False, current_task()
        self.assigns = self.misses = False

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in UNRECORDED:
            result = func(*args, **kwargs)
            if func is SNAPSHOT:
                # The values that it stands for are needed where it is read.
                self._storages.alias(result, self._storages.number(args[0]))
            return result
        # A TorchFunctionMode of the user's is not to see what is asked of tensors here.
        with no_torch_functions():
            traits = traits_of(func)
            moves = traits.may_move_a_stream
            detector = DrawDetector(func, args, kwargs) if moves else None
            arguments = Arguments(args, kwargs)  # before the operation changes them
            result = (self._timing or call_kernel)(func, *args, **kwargs)
            draws = detector is not None and detector.has_drawn()
            written = declared_writes(traits, args, kwargs)
            results = Results(result, arguments)
            self._note(Seen(func, traits, arguments, results, written, draws))
        return result

    def _note(self, seen: Seen) -> None:
        storages, arguments, results = self._storages, seen.arguments, seen.results
        if seen.func is _NEW_EMPTY and current_task() != self._task:
            self.copies_gradients = True
        args, kwargs = arguments.args, arguments.kwargs
        reads = storages.numbers(arguments.tensors, arguments.strided)
        writes = tuple(map(storages.number, seen.written))
        updated = updated_statistics(seen.traits, args, kwargs)
        self._updates.append(tuple(map(storages.number, updated)))
        known = len(storages)
        makes = storages.numbers(results.tensors, results.strided)
        met = not writes or all(s in self._made or s in self.inputs for s in writes)
        step = step_of(seen, reads, makes, writes, writes_known=met)
        self._made.update(range(known, len(storages)))
        self.steps.append(step)
        if self._timing is not None:
            self._timing.note(step.op)
        if self._policy is not None:
            op = step.op if may_be_saved(step, results.tensors) else None
            statics = statics_of(args, kwargs)
            self.candidates.ask(op, statics, results.tensors, makes)
            if step.is_collective:
                self.candidates.ask_of_collective(step, seen.written)

    @override
    def __enter__(self) -> Any:
        tell_of_names(self)
        self._exposures = Exposures(self.expose, self.assign)
        self._exposures.__enter__()
        self._transforms = transforms()
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        tell_no_more(self)
        super().__exit__(exc_type, exc_val, exc_tb)
        self._exposures.__exit__(exc_type, exc_val, exc_tb)
        del self._exposures  # which refers to this

    @override
    def note_unseen(self) -> None:
        """Note that the record lacks operations."""
        self.misses = True

    def end(self) -> None:
        """Let go of the graph; raise what the policy raised, if it did."""
        self.candidates.let_go_of_graph()
        self.candidates.raise_error()

    def name(self, tensor: Tensor, name: str) -> None:
        """Give the value of a tensor a name."""
        number = self._storages.known(tensor)
        if number is not None:
            self._names.setdefault(number, set()).add(name)
            self.candidates.hold_named(number, base_tensor(tensor), self.steps)

    def expose(self, tensor: Tensor) -> None:
        """Note that Python takes the memory of a tensor."""
        number = self._storages.known(tensor)
        if number is not None:
            self.exposed.add(number)

    def assign(self, tensor: Tensor, value: Tensor) -> None:
        """Note that a tensor is given the memory of another."""
        known = self._storages.known
        if known(tensor) in self.inputs and known(value) is not None:
            self.assigns = True

    def note_saved(self, outs: Sequence[Any]) -> None:
        """Note what the graph of each output saved."""
        self.roots.note_saved(outs)

    def record(self, outs: Sequence[Any], gone: Container[int] = ()) -> Record:
        """Return the record.

        Args:
            outs: of the function.
            gone: the handles that no backward can reach.
        """
        steps = completed(self.steps, self._names, self._updates, self.exposed)
        ends = tuple(map(self._storages.known, outs))
        roots = self.roots
        inside = tuple(self._storages.inside.items())
        packs = roots.packs()
        return Record(
            steps,
            self.inputs,
            roots.roots(gone),
            ends,
            packs,
            inside,
            self._transforms,
        )

    def decisions(self, record: Record) -> list[Decision]:
        """Return what the policy says of each operation of the record."""
        return self.candidates.decisions(record, self.exposed)
