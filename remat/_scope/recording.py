"""Records the operations of blocks, and asks the policy about each result.

Invariant: what is recorded is what would run again. To record changes no value, and
reads none. A result that the policy saves is no value of the block: graphs save it as
they would without one. A result that it offloads is a value that is brought back.
Rejected: to record above autograd, and to run functions again. What they call may draw,
cast and count, and Python code may do anything.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tag, Tensor
from typing_extensions import override

from remat._ambient.streams import Stream, device_streams, global_streams, stream_of
from remat._base.absent import inputs_of, tensors_of
from remat._base.calls import NOWHERE, Places
from remat._base.context import here
from remat._base.op import NO_NAMES, Op
from remat._base.operators import IGNORED, Observer
from remat._base.source import user_line
from remat._base.tensors import version_of
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
from remat._torch.autograd import current_task
from remat._torch.modes import (
    call_kernel,
    leave_dispatch_mode,
    leave_function_mode,
    no_torch_functions,
)
from remat._torch.operators import OpOverload, is_view_op
from remat._torch.process import read_settings
from remat._torch.tensors import is_lazy, storage_id
from remat._torch.tracing import eager_only, is_in_compiled_code
from remat.policies import Decision, Policy


Numbered: TypeAlias = Sequence[tuple[int, Tensor]]  # results, with their numbers


class _EagerExposures(Exposures):
    """Notices memory that is taken. Dynamo does not inline it, for that would trace."""

    @override
    @eager_only
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


# To send or receive once more, for a backward of this process alone, would hang.
_COMMUNICATE = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}


class Recording(Observer):
    """Records the operations of the blocks that are open, all of one thread."""

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
        return True  # Dynamo may compile in a block

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if current_task() >= 0:  # a backward records nothing
            return call_kernel(func, *args, **kwargs)
        with no_torch_functions():
            table = self._table
            table.settle()
            may_run_again = isinstance(func, OpOverload) and (
                func.namespace not in _COMMUNICATE and not is_in_compiled_code()
            )
            if is_view_op(func) or not may_run_again:
                if not is_view_op(func):
                    self.store_late()
                result = call_kernel(func, *args, **kwargs)
                self._tie(tensors_of(result))
                return result
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
            inputs = [*map(id, inputs_of(args, kwargs))]
            read = operands.storages
            new, others = self._sorted(results_of(result), read, inputs)
            for entry in filter(None, map(table.entry_at, statistics)):
                table.drop(entry)  # a batch norm wrote to it, and counted no version
            if len(written) < len(targets):
                new.clear()  # it changed what it was given, so it cannot be run again
            if new or written:
                self._note_writes(operation, changed, written, inputs)
                # Statistics that it updates are no result that anybody saves.
                asks = not written_to
                self._note_new(operation, new, result, asks=asks)
                self._store_owed(args)
            self._tie(others)
            return result

    def _sorted(
        self, results: Sequence[Tensor | None], read: set[int], inputs: Sequence[int]
    ) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
        """Sort results by their storages: new ones, with their numbers, and others."""
        new: list[tuple[int, Tensor]] = []
        others: list[Tensor] = []
        parts: list[Tensor] = []
        known: set[int] = set()
        for k, t in enumerate(results):
            if t is None or not has_layout(t):
                continue
            key = storage_id(t)
            if key in read and id(t) not in inputs:
                parts.append(t)
            if key in read or key in known or self._table.entry_in(key) is not None:
                others.append(t)
            else:
                new.append((k, t))
                known.add(key)
        for entry in filter(None, map(self._table.entry_at, parts)):
            # Parts are returned with version counters of their own.
            if len(parts) > 1:
                self._table.drop(entry)
            else:
                entry.is_parted = True
        return new, others

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
            func = operation.func
            may_grow = func.overloadpacket.__name__ in ("resize_", "resize_as_")
            if traits_of(func).is_read_by_python or may_grow:
                self._table.drop(entry)  # its storage is another one, or a larger one
            elif Tag.inplace_view in func.tags:
                self._table.wrote(entry, t)  # to its shape alone
            else:
                made = Made(self.blocks[-1].part(), TensorLayout.of(t), operation)
                operation.made.append((inputs.index(id(t)), True, weakref.ref(made)))
                made.unread = entry.made.unread
                entry.made = made
                self._table.wrote(entry, t)

    def _note_new(
        self, operation: BlockOperation, new: Numbered, result: Any, *, asks: bool
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
            operation.made.append((numbers[id(t)], False, weakref.ref(made)))
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
            policy.owed += self._late.add([t for _, t in makes])
            return [*makes]
        return [(m, t) for m, t in makes if not _is_stored(m, t, decision)]

    def _store_owed(self, args: Any) -> None:
        """Store late results, and what an operation reads, as far as bytes are owed."""
        policy = self.blocks[-1].policy
        if policy is not None and policy.owed:
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


# --- What a policy says ---


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
        if storage_id(offloads.aways[0].stored) != storage_id(tensor):
            made.stored, made.operation = stored, None
            return False
    # What was made of it meanwhile reads it here.
    made.stored, made.operation = GivenTensor(tensor, made.layout), None
    return True


# --- Results whose saving is decided late, once it is known what is read instead ---
#
# A program may compute another value from a result that the plan saves, and read only
# that value from then on. Then the value is saved in place of the result. To save both
# would break the budget: a layer that makes two more would save one more.


class _Late(NamedTuple):
    entry: ValueEntry
    nbytes: int
    # What was read, while the result was there too: with its memory, which may be there
    # longer than it.
    instead: Sequence[tuple[ValueEntry, Tensor]]


class LateResults:
    """The late results of one thread, in the order in which they were made."""

    def __init__(self, table: ValueTable) -> None:
        self._table = table
        self._waiting: list[_Late] = []
        # Of the operation that runs. They are in the table when it is over.
        self._new: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes wait."""
        return sum(each.nbytes for each in self._waiting)

    def add(self, new: Sequence[Tensor]) -> int:
        """Have results of the operation that runs wait; return how many bytes."""
        self._new = new
        return sum(t.nbytes for t in new)

    def settle(self, read: Sequence[ValueEntry], owed: int, is_replaced: bool) -> None:
        """Decide when an operation runs that is planned, and has read some values.

        So many bytes are owed. Where operations were not planned that ran before, what
        is read may have replaced results.
        """
        waiting, new = self._waiting, [(self._table.entry_of(t), t) for t in self._new]
        self._waiting = [_Late(e, t.nbytes, ()) for e, t in new if e is not None]
        owed -= sum(t.nbytes for t in self._new)
        self._new = ()
        for late in waiting:
            owed -= late.nbytes
            entry, instead, is_read = late.entry, late.instead, late.entry in read
            if is_replaced and not (instead or is_read):
                instead = [(e, e.tied()[0].detach()) for e in read]
            late = late._replace(instead=instead)
            if not is_read and entry.ties and any(e.ties for e, _ in instead):
                self._waiting.append(late)
            elif not self._decide(late, is_read):
                owed += late.nbytes
        for entry in read:
            owed -= self._store(entry) if owed > 0 else 0

    def _decide(self, late: _Late, is_read: bool) -> bool:
        """Store a result or what was read instead; say whether something is stored."""
        if late.entry.ties and (is_read or not any(e.ties for e, _ in late.instead)):
            return self._store(late.entry) > 0
        return any(self._store(*each) for each in late.instead)

    def store_all(self) -> bool:
        """Decide now; say whether there was something to decide."""
        waiting = [*self._waiting]
        self._waiting.clear()
        for late in waiting:
            self._decide(late, is_read=False)
        return bool(waiting)

    def _store(self, entry: ValueEntry, tensor: Tensor | None = None) -> int:
        """Store a value, if its storage holds it; return how many bytes."""
        made, tied = entry.made, entry.tied()
        if tensor is None and tied:
            tensor = tied[0].detach()
        if tensor is None or entry.version != version_of(tensor) or made.stored:
            return 0
        whole = made.layout.view_of(tensor)
        made.stored, made.operation = self._table.given_of(whole, made.layout), None
        self._table.drop(entry)
        return whole.nbytes
