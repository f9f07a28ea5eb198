"""Records what one forward does: its operations, and what its graph saved.

Invariant: a record holds no tensor, and recording changes no value. It is only ever an
optimization: what it gets wrong shows in the replay (`replay`), as an error or as an
operation that is not the one expected.
Rejected: recording on fake tensors, a second run. The user's code may look at values,
and some operations choose another kernel.
"""

import dataclasses
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from remat._base.absent import IGNORED, Absent
from remat._base.op import Op, Value
from remat._base.source import user_line
from remat._graph.graph import nodes_of
from remat._partial.effects import (
    Moved,
    Traits,
    declared_writes,
    metadata_only_outputs,
    traits_of,
    updated_statistics,
)
from remat._partial.match import constants_of
from remat._partial.naming import tell_no_more, tell_of_names
from remat._partial.plan import Pack, Record, Step
from remat._partial.values import (
    Given,
    Looks,
    Returned,
    is_of_own_class,
    is_plain,
    is_watched,
    key_if,
    key_of,
    reference_if,
    value_of,
)
from remat._torch import (
    LeanDispatchMode,
    base_tensor,
    call_kernel,
    eager_only,
    is_lazy,
    no_torch_functions,
    viewed,
)
from remat.policies import Decision


class Recorder(LeanDispatchMode):
    """Records the operations of one forward.

    Args:
        leaves: what it runs on.
        policy: says of an operation whether its result may be kept; None for no.

    Attributes:
        inputs: the number of each leaf.
        taken: the storages whose memory Python took, past operations.
        constants: the arguments of each operation that are no tensors, for a policy.
    """

    def __init__(self, leaves: Sequence[Tensor], policy: Any) -> None:
        super().__init__()
        self._policy = policy
        self._numbers: dict[int, int] = {}
        # Held weakly, so that no address is used again; for good where that cannot be.
        self._held: list[Any] = []
        self._made: set[int] = set()
        self._steps: list[Step] = []
        self._updates: list[tuple[int, ...]] = []  # of running statistics
        self._decisions: list[Decision] = []
        self._outputs: list[Sequence[weakref.ref[Tensor] | Tensor]] = []
        self._error: Exception | None = None
        self._names: dict[int, set[str]] = {}
        self._kept: dict[int, Tensor] = {}
        self.taken: set[int] = set()
        self.constants: list[list[Any]] = []
        self._roots: list[set[int]] = []
        self._packs: list[Pack | None] = []
        self.inputs = tuple(self.number(base_tensor(t)) for t in leaves)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, a new one if it has none yet."""
        plain = is_plain(tensor)
        key = key_if(plain, tensor)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._held.append(reference_if(plain, tensor))
        return number

    def _numbers_of(self, looks: Looks) -> tuple[int, ...]:
        known = map(self._numbers.get, map(key_if, looks.plain, looks.tensors))
        pairs = zip(looks.tensors, known, strict=True)
        return tuple([self.number(t) if n is None else n for t, n in pairs])

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in IGNORED:
            return func(*args, **kwargs)
        # What we ask of tensors here is no business of TorchFunctionModes.
        with no_torch_functions():
            traits = traits_of(func)
            moved = Moved(func, args, kwargs) if traits.may_move else None
            given = Given(args, kwargs)  # before it changes them
            result = call_kernel(func, *args, **kwargs)
            draws = moved is not None and moved.draws()
            self._note(func, traits, given, result, draws)
        return result

    def _note(
        self, func: Any, traits: Traits, given: Given, result: Any, draws: bool
    ) -> None:
        args, kwargs = given.args, given.kwargs
        reads = self._numbers_of(given)
        written = declared_writes(traits, args, kwargs)
        writes = tuple(map(self.number, written))
        updates = tuple(map(self.number, updated_statistics(traits, args, kwargs)))
        known = len(self._numbers)
        returned = Returned(result, given)
        outputs = returned.tensors
        makes = self._numbers_of(returned)
        others = [t for t in (*given.tensors, *outputs) if is_of_own_class(t)]
        plain = others or (all(given.plain) and all(returned.plain))
        runs = (
            traits.is_read_by_python
            or not plain
            or self._does_more(outputs, writes)
            or (bool(written) and _resizes(written, given))
        )
        self._made.update(range(known, len(self._numbers)))
        op = Op(func, *given.described, tuple(returned.values), source=user_line())
        step = Step(
            op,
            reads,
            makes,
            writes,
            draws=draws,
            may_draw=traits.may_draw,
            metadata_only=metadata_only_outputs(func, len(outputs)),
            runs=runs,
            opaque=bool(others),
            watched=any(map(is_watched, given.tensors)),
            result=returned.form,
        )
        self._steps.append(step)
        self._updates.append(updates)
        if self._policy is not None:
            self.constants.append(constants_of(args, kwargs))
            may = bool(reads) and not (runs or writes or _are_inference(outputs))
            self._ask_policy(op if may else None, outputs, makes)

    def _does_more(self, outputs: Sequence[Tensor], writes: Sequence[int]) -> bool:
        """Say whether an operation does more than its tensors tell."""
        return (
            not (outputs or writes)
            or any(map(is_lazy, outputs))
            or not all(s in self._made or s in self.inputs for s in writes)
        )

    def _ask_policy(
        self, op: Op | None, outputs: list[Tensor], makes: Sequence[int]
    ) -> None:
        """Note what the policy says of an operation, and hold what it wants kept.

        Args:
            op: the operation; None if its results cannot be kept.
            outputs: of it.
            makes: the storages of those.
        """
        # For `name`, after which the policy is asked again. Of several outputs one may
        # be named and others needed, which nobody else need hold by then.
        several = len(outputs) > 1
        self._outputs.append(outputs if several else [*map(weakref.ref, outputs)])
        self._decisions.append(Decision.RECOMPUTE if op is None else self._decide(op))
        if self._decisions[-1]:
            for t, s in zip(outputs, makes, strict=True):
                self._hold(t, s)

    def _decide(self, op: Op) -> Decision:
        try:
            return self._policy(op)
        except Exception as error:  # noqa: BLE001 - raised at the end
            # Of a TypeError raised here, `a + b` would say that it takes no tensors.
            self._error = self._error or error
            return Decision.RECOMPUTE

    def _hold(self, tensor: Tensor, number: int) -> None:
        can_be = is_plain(tensor) or is_of_own_class(tensor)
        if number not in self._kept and can_be and not is_lazy(tensor):
            self._kept[number] = tensor

    def end(self) -> None:
        """Raise what the policy raised, if it did."""
        if self._error is not None:
            raise self._error

    @override
    def __enter__(self) -> Any:
        tell_of_names(self)
        self._memory = _Memory(self)
        self._memory.__enter__()
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        tell_no_more(self)
        super().__exit__(exc_type, exc_val, exc_tb)
        self._memory.__exit__(exc_type, exc_val, exc_tb)
        del self._memory  # which refers to this

    def known(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, if it has one."""
        return self._numbers.get(key_of(base_tensor(tensor)))

    def name(self, tensor: Tensor, name: str) -> None:
        """Give the value of a tensor a name."""
        number = self.known(tensor)
        if number is None:
            return
        self._names.setdefault(number, set()).add(name)
        for i, outputs in enumerate(self._outputs):
            step = self._steps[i]
            if number in step.makes and number not in step.reads:
                for ref, s in zip(outputs, step.makes, strict=True):
                    t = ref() if isinstance(ref, weakref.ref) else ref
                    if t is not None:
                        self._hold(t, s)
                # The result itself may be gone, and only a view of it be left.
                self._hold(base_tensor(tensor), number)
                return

    # --- What the graph saved ---

    def pack(self, tensor: Tensor | None) -> None:
        """Note that a handle stands for a tensor; None for what is saved itself."""
        if tensor is None:
            self._packs.append(None)
            self._roots.append(set())
            return
        base = base_tensor(tensor)
        number = self.number(base)
        pack = Pack(number, value_of(base), len(self._steps), is_lazy(base))
        self._packs.append(pack)
        self._roots.append({number})

    def ask(self, outs: Sequence[Any]) -> None:
        """Note for each output what the graph of it saved.

        To be called while there is a graph; of several levels, for each.
        """
        while len(self._roots) < len(outs):
            self._roots.append(set())
        found = [*zip(outs, self._roots, strict=True)]
        if len(outs) <= _MANY:
            for out, roots in found:
                roots.update(self._saved([out]))
        else:
            saved = self._saved(outs)
            for _, roots in found:
                roots.update(saved)

    def _saved(self, outs: Iterable[Any]) -> set[int]:
        """Return the storages that the backward of some outputs reads."""
        found: set[int] = set()
        for node, tensors in nodes_of(outs):
            kind = type(node).__name__
            if kind in _SILENT:
                found.update(self._changed() if kind == "CopySlices" else self._made)
            else:
                found.update(s for s in map(self.known, tensors) if s is not None)
        return found

    def _changed(self) -> Iterator[int]:
        """Yield what is read by operations that change something in place."""
        for step in self._steps:
            if step.writes:
                yield from (*step.reads, *step.makes)

    def note_copy(self, place: int, tensor: Tensor | None) -> None:
        """Note that a tensor has the value of what was saved at a place."""
        pack = self._packs[place]
        if pack is not None and tensor is not None:
            base = base_tensor(tensor)
            plain = is_plain(base)
            self._numbers[key_if(plain, base)] = pack.storage
            self._held.append(reference_if(plain, base))

    # --- The result ---

    def record(self, outs: Sequence[Any], gone: Container[int] = ()) -> Record:
        """Return the record.

        Args:
            outs: of the function.
            gone: the handles that no backward can reach.
        """
        steps = self._steps
        if self._names:
            steps = [*map(self._named, steps)]
        if any(step.draws for step in steps):
            # They may draw as well, from a stream that nobody knows of.
            steps = [
                step._replace(draws=True)
                if traits_of(step.op.func).is_of_others
                else step
                for step in steps
            ]
        if any(self._updates):
            steps = self._with_updates(steps)
        roots = [
            frozenset(() if place in gone else roots)
            for place, roots in enumerate(self._roots)
        ]
        ends = [self.known(o) for o in outs]
        packs = tuple(self._packs)
        return Record(tuple(steps), self.inputs, tuple(roots), tuple(ends), packs)

    def _with_updates(self, steps: Sequence[Step]) -> list[Step]:
        """Have a batch norm write to the statistics that something reads afterwards.

        To those that nothing reads it does not: a recomputation drops them, and the
        results of what writes to memory that is not its own could not be kept.
        """
        read, found = {*self.taken}, list[Step]()
        for step, updates in zip(steps[::-1], self._updates[::-1], strict=True):
            if read.isdisjoint(updates):
                read.update({*step.reads}.difference(updates))
                found.append(step)
            else:
                read.update(step.reads)
                found.append(step._replace(writes=step.writes + updates))
        return found[::-1]

    def _named(self, step: Step) -> Step:
        made = {*step.makes}.difference(step.reads)
        names = frozenset[str]().union(*(self._names.get(s, ()) for s in made))
        if not names:
            return step
        return step._replace(op=dataclasses.replace(step.op, names=names))

    def decisions(self, record: Record) -> list[Decision]:
        """Return what the policy says of each operation, by its names too."""
        if self._policy is None:
            return [Decision.RECOMPUTE] * len(record.steps)
        found = [
            self._policy(step.op) if step.op.names else decision
            for step, decision in zip(record.steps, self._decisions, strict=True)
        ]
        return [
            Decision.RECOMPUTE if self.taken.intersection(step.makes) else decision
            for step, decision in zip(record.steps, found, strict=True)
        ]

    def residual(self, value: Value, number: int) -> Tensor:
        """Return what was made with a storage, of which some view was held."""
        held = self._kept[number].detach()
        if value_of(held) == value or type(held) is Absent:
            return held
        return viewed(held, value.shape, value.stride, value.offset)

    def has(self, numbers: Iterable[int]) -> bool:
        """Say whether these storages were held."""
        return self._kept.keys() >= {*numbers}


class _Memory(TorchFunctionMode):
    """Notes which storages Python takes the memory of, to read or to write."""

    is_remats_check = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in _TAKES_MEMORY and args and isinstance(args[0], Tensor):
            number = self._recorder.known(args[0])
            if number is not None:
                self._recorder.taken.add(number)
        return func(*args, **(kwargs or {}))


_TAKES_MEMORY = {
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr),
    *(Tensor.storage, Tensor.untyped_storage, Tensor.tolist),
}


_MANY = 16  # outputs, for each of which the graph is walked
# Nodes that do not tell what they saved: of in-place operations on views, and in C++.
_SILENT = {"CopySlices", "CppFunction"}


def _resizes(written: Iterable[Tensor], given: Given) -> bool:
    """Say whether an operation gave what it wrote to another shape: Python sees it."""
    before = dict(zip(map(id, given.tensors), given.values, strict=True))
    return any(value_of(t) != before[id(t)] for t in written)


def _are_inference(outputs: Iterable[Tensor]) -> bool:
    return any(t.is_inference() for t in outputs)
