"""Records the operations of blocks, and asks the policy about each result.

One observer serves all blocks of a thread that are open.

Invariant: what is recorded is what would run again. To record changes no value, and
reads none. A result that the policy saves is no value of the block: graphs save it as
they would without one. A result that it offloads is a value that is brought back.
Rejected: to record above autograd, and to run functions again. What they call may draw,
cast and count, and Python code may do anything.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tag, Tensor
from typing_extensions import override

from remat._ambient.streams import Stream, device_streams, global_streams, stream_of
from remat._base.absent import IGNORED, inputs_of, tensors_of
from remat._base.calls import NOWHERE, Places
from remat._base.context import here
from remat._base.observer import Observer
from remat._base.op import NO_NAMES, Op
from remat._base.source import user_line
from remat._base.types import CONSTANTS
from remat._graph.handles import OFFLOAD, Offloads
from remat._partial.effects import (
    Exposures,
    Traits,
    declared_writes,
    traits_of,
    updated_statistics,
)
from remat._partial.values import value_of
from remat._scope.late import LateResults
from remat._scope.table import Operands, ValueEntry, ValueTable
from remat._scope.values import (
    Block,
    BlockOperation,
    GivenTensor,
    Made,
    Operand,
    TensorLayout,
    has_layout,
    results_of,
)
from remat._torch import (
    OpOverload,
    call_kernel,
    current_task,
    eager_only,
    is_in_compiled_code,
    is_lazy,
    is_view_op,
    leave_dispatch_mode,
    leave_function_mode,
    no_torch_functions,
    read_settings,
    storage_id,
)
from remat.policies import Decision, Policy


class _EagerExposures(Exposures):
    """Notices memory that is taken. Dynamo does not inline it, for that would trace.

    Not so that of a record: with it kept out, Dynamo went on to trace our hooks.
    """

    @override
    @eager_only
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


# To send or receive once more, for a backward of this process alone, would hang.
_COMMUNICATE = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}


class Recording(Observer):
    """Records the operations of the blocks that are open."""

    # A detached view ties its storage.
    unseen = IGNORED - {op for op in IGNORED if is_view_op(op)}

    def __init__(self, table: ValueTable) -> None:
        super().__init__()
        self._table = table
        self._error: Exception | None = None
        self.blocks: list[Block] = []  # in the order in which they were entered
        self.exposures = _EagerExposures(self.expose)
        self.places = Places(asks=False)
        self._late = LateResults(table)

    def begin(self) -> None:
        """See operations from now on."""
        here().listeners.append(self)
        self.exposures.__enter__()
        self.__enter__()

    def end(self) -> None:
        """See no more operations."""
        leave_dispatch_mode(self)
        leave_function_mode(self.exposures)
        here().listeners.remove(self)

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile in a block."""
        return True

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if current_task() >= 0:  # a backward records nothing
            return call_kernel(func, *args, **kwargs)
        with no_torch_functions():
            table = self._table
            table.settle()
            if is_view_op(func) or not _may_run_again(func) or is_in_compiled_code():
                return self._run_unasked(func, args, kwargs)
            traits = traits_of(func)
            written_to = declared_writes(traits, args, kwargs)
            statistics = updated_statistics(traits, args, kwargs)
            changed = [*written_to, *statistics]
            for t in changed:
                self.store_late()
                if table.entry_of(t) is None:
                    table.keep_given(t)  # the block itself writes to it now
            operands = Operands(table, written_to)
            operation = BlockOperation(func, args, kwargs, operands)
            targets = [(t, table.entry_of(t)) for t in written_to]
            before = _states_before(traits, args, kwargs)
            result = call_kernel(func, *args, **kwargs)
            operation.streams = [(s, state) for s, state in before if s.read() != state]
            written = [(t, e) for t, e in targets if e is not None]
            new, others, parts = self._sorted(results_of(result), operands.storages)
            inputs = [*map(id, inputs_of(args, kwargs))]
            if parts:
                self._drop_parted(parts, inputs)
            for entry in filter(None, map(table.entry_at, statistics)):
                table.drop(entry)  # a batch norm wrote to it, and counted no version
            if len(written) < len(targets):
                new.clear()  # it changed what it was given, so it cannot be run again
            if new or written:
                self._note_writes(operation, changed, written, inputs)
                # Statistics that it updates are no result that anybody saves.
                asks = not written_to
                self._note_new(operation, new, result, asks=asks)
                policy = self.blocks[-1].policy
                if policy is not None and policy.owed:
                    self._store_owed(policy, args)
            self._tie(others)
            return result

    def _run_unasked(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that no policy is asked about."""
        if not is_view_op(func):
            self.store_late()
        result = call_kernel(func, *args, **kwargs)
        self._tie(tensors_of(result))
        return result

    def _sorted(
        self, results: Sequence[Tensor | None], read: set[int]
    ) -> tuple[list[tuple[int, Tensor]], list[Tensor], list[Tensor]]:
        """Sort results by their storages."""
        new: list[tuple[int, Tensor]] = []
        others: list[Tensor] = []
        parts: list[Tensor] = []
        known: set[int] = set()
        for k, t in enumerate(results):
            if t is None or not has_layout(t):
                continue
            key = storage_id(t)
            if key in read:
                parts.append(t)
            if key in read or key in known or self._table.entry_in(key) is not None:
                others.append(t)
            else:
                new.append((k, t))
                known.add(key)
        return new, others, parts

    def _drop_parted(self, parts: Sequence[Tensor], inputs: Sequence[int]) -> None:
        """Drop values whose parts are returned with version counters of their own."""
        parts = [t for t in parts if id(t) not in inputs]
        for entry in filter(None, map(self._table.entry_at, parts)):
            if len(parts) > 1:
                self._table.drop(entry)
            else:
                entry.is_parted = True

    def _note_writes(
        self,
        operation: BlockOperation,
        changed: Sequence[Tensor],
        written: Sequence[tuple[Tensor, ValueEntry]],
        inputs: Sequence[int],
    ) -> None:
        """Note how an operation ran, and the values that it wrote to."""
        places = [k for t in changed for k, n in enumerate(inputs) if n == id(t)]
        operation.written = frozenset(places)
        operation.settings, operation.line = read_settings(), user_line()
        operation.grad_mode = torch.is_grad_enabled()
        for t, entry in written:
            if traits_of(operation.func).is_read_by_python or _may_grow(operation.func):
                self._table.drop(entry)  # its storage is another one, or a larger one
            elif Tag.inplace_view in operation.func.tags:
                self._table.wrote(entry, t)  # to its shape alone
            else:
                made = Made(self.blocks[-1].part(), TensorLayout.of(t), operation)
                operation.note_made(inputs.index(id(t)), made, is_operand=True)
                made.unread = entry.made.unread
                entry.made = made
                self._table.wrote(entry, t)

    def _note_new(
        self,
        operation: BlockOperation,
        new: Sequence[tuple[int, Tensor]],
        result: Any,
        *,
        asks: bool,
    ) -> None:
        block = self.blocks[-1]
        makes = [(Made(block.part(), TensorLayout.of(t), operation), t) for _, t in new]
        if block.policy is not None and asks:
            try:
                makes = self._choose(block.policy, makes, result)
            except Exception as error:  # noqa: BLE001 - raised at the end
                # Raised here, a TypeError would make `a + b` say that it takes no
                # tensors.
                self._error = self._error or error
        numbers = {id(t): k for k, t in new}
        for made, t in makes:
            operation.note_made(numbers[id(t)], made, is_operand=False)
            self._table.enter(made, t)

    def _choose(
        self, policy: Policy, makes: Sequence[tuple[Made, Tensor]], result: Any
    ) -> list[tuple[Made, Tensor]]:
        """Ask the policy about results; return those that no graph stores."""
        if not makes:
            return []
        operation = makes[0][0].operation
        assert operation is not None
        new = {id(tensor): made.layout.value() for made, tensor in makes}
        op = Op(
            operation.func,
            _described(operation.args),
            tuple((name, _described(arg)) for name, arg in operation.kwargs.items()),
            tuple(new.get(id(t)) or value_of(t) for t in tensors_of(result)),
            NO_NAMES,
            operation.line,
            *(NOWHERE if policy.is_by_place else self.places.of(operation.func)),
        )
        block = self.blocks[-1]
        if block.asked is not None:
            block.asked.append(op)
        decision = policy(op) if operation.operands else Decision.RECOMPUTE
        for made, _ in makes:
            made.op, made.unread = op, policy.unread
        # Of several results some are for the backward alone, as statistics: no other
        # result can stand in their place.
        if decision and policy.is_late and len(makes) == 1:
            policy.owed += self._late.add(makes)
            return [*makes]
        return [(m, t) for m, t in makes if not _is_stored(m, t, decision)]

    def _store_owed(self, policy: Policy, args: Any) -> None:
        """Store late results, and what an operation reads, as far as bytes are owed."""
        # `x + f(x)` has the newer one last.
        found = map(self._table.entry_of, reversed(inputs_of(args, {})))
        read = [entry for entry in found if entry is not None]
        self._late.settle(read, policy.owed, policy.is_replaced)
        policy.owed, policy.is_replaced = self._late.nbytes, False

    def store_late(self) -> None:
        """Store late results now."""
        if self._late.nbytes and self._late.store_all():
            policy = self.blocks[-1].policy
            policy.owed = policy.put_off = 0

    def raise_error(self) -> None:
        """Raise what the policy raised, if it did."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _tie(self, results: Sequence[Tensor]) -> None:
        """Have entries live as long as results that lie in their storages."""
        for t in results:
            entry = self._table.entry_at(t)
            if entry is not None:
                entry.tie(t)

    def expose(self, tensor: Tensor) -> None:
        """Be told that Python takes the memory of a tensor, and may write to it."""
        entry = self._table.entry_at(tensor)
        if entry is not None:
            self._table.drop(entry)

    def name(self, tensor: Tensor, name: str) -> None:
        """Be told that the value of a tensor has a name."""
        entry = self._table.entry_of(tensor)
        if entry is not None and _choose_named(entry.made, tensor, name):
            self._table.drop(entry)


def _may_grow(func: Any) -> bool:
    """Say whether an operation may give a storage more bytes, whose values are open."""
    return func.overloadpacket.__name__ in ("resize_", "resize_as_")


def _may_run_again(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.namespace not in _COMMUNICATE


def _states_before(
    traits: Traits, args: Any, kwargs: dict[str, Any]
) -> list[tuple[Stream, Any]]:
    """Return the streams that an operation may move, and their states."""
    if not traits.may_move_a_stream:
        return []
    passed = [stream_of(arg) for arg in (*args, *kwargs.values())]
    streams = [s for s in passed if s is not None]
    if not streams:
        streams = device_streams()
        streams.append(global_streams().streams[0])  # the CPU's, read without a copy
    if traits.is_of_others:
        streams += global_streams().streams[1:]  # Python's and NumPy's
    return [(s, s.read()) for s in streams]


# --- What a policy says ------------------------------------------------------------


def _described(arg: Any) -> Any:
    """Return an argument of an operation as an `Op` holds it."""
    kind = type(arg)
    if kind is Operand:
        return arg.value()
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple(map(_described, arg))
    return arg if kind in CONSTANTS else kind


def _choose_named(made: Made, tensor: Tensor, name: str) -> bool:
    """Ask again about a result that got a name; say whether graphs store it."""
    policy: Policy | None = made.part.block.policy
    if policy is None or made.op is None or made.stored is not None:
        return False
    made.op = replace(made.op, names=made.op.names | {name})
    if made.part.block.asked is not None:
        made.part.block.asked.append(made.op)
    whole = made.layout.view_of(tensor.detach())
    return _is_stored(made, whole, policy(made.op))


def _is_stored(made: Made, tensor: Tensor, decision: Decision) -> bool:
    """Do what the policy says with a result; say whether graphs store it."""
    if not decision:
        return False
    if decision in OFFLOAD and not (made.layout.offset or is_lazy(tensor)):
        assert made.op is not None
        offloads = Offloads()
        stored = offloads.put(tensor.detach(), made.op, decision)
        if storage_id(offloads.stored[0]) != storage_id(tensor):
            made.stored, made.operation = stored, None
            return False
    # What was made of it meanwhile reads it here.
    made.stored, made.operation = GivenTensor(tensor, made.layout), None
    return True
