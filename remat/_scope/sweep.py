"""Recomputes what handles stand for, in a backward.

The first handle of a thread's blocks that a backward reads plans a sweep: which
operations all handles that are alive need, and how often each value is used, by
operations and by handles. Then each handle that is read has those operations run that
its value still needs. A value is dropped when it was used for the last time.

`hooks` calls `value_of`.

Invariant: an operation runs at most once in a sweep. The sweep belongs to the backward,
and ends with it, also after an error.
Rejected: to run all operations for the first handle. Values would wait for handles that
are read much later.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from remat._ambient.streams import set_state, state_of
from remat._base.errors import RecomputeError
from remat._graph.residual import Offloaded
from remat._scope.table import ValueTable
from remat._scope.values import (
    BlockOperation,
    GivenTensor,
    Made,
    Operand,
    Part,
    TensorLayout,
    has_layout,
    mapped,
    results_of,
)
from remat._torch import (
    below_all_levels,
    below_autograd,
    call_kernel,
    current_task,
    eager_only,
    flat_view,
    grad_mode,
    keeps_graph,
    no_torch_functions,
    read_settings,
    set_grad_enabled,
    when_done,
    write_settings,
)


class ValueHandle:
    """Stands for a value of a block in a graph.

    Attributes:
        made: the value.
    """

    __slots__ = ("__weakref__", "made", "table", "tensor")

    def __init__(self, table: ValueTable, tensor: Operand) -> None:
        assert isinstance(tensor.of, Made)
        self.table, self.made, self.tensor = table, tensor.of, tensor
        # The reference takes itself out.
        table.handles.add(weakref.ref(self, table.handles.discard))

    def unpacked(self) -> Tensor:
        """Return the tensor."""
        return value_of(self)


@eager_only
def value_of(handle: ValueHandle) -> Tensor:
    """Return what a handle stands for.

    Raises:
        MutationError: a tensor that it is made of was changed in place.
    """
    with handle.table.lock:
        return below_all_levels(_read, handle)


def _read(handle: ValueHandle) -> Tensor:
    table, task = handle.table, current_task()
    if task < 0:
        return Sweep({weakref.ref(handle)}).take(handle)
    sweep: Sweep | None = table.sweeps.get(task)
    if sweep is None:
        table.sweeps[task] = sweep = Sweep(table.handles)
        # The backward holds the callback, and that the sweep.
        when_done(functools.partial(_end, sweep, weakref.ref(table)))
    if not keeps_graph():
        sweep.used_up.add(handle.made.part)
    if weakref.ref(handle) not in sweep.unread:
        return Sweep({weakref.ref(handle)}).take(handle)
    return sweep.take(handle)


def _end(sweep: "Sweep", ref: "weakref.ref[ValueTable]") -> None:
    """End a sweep, with its backward."""
    sweep.values.clear()
    for part in sweep.used_up:
        part.is_used_up = True
    table = ref()
    if table is not None:
        table.forget_used_up()


class Sweep:
    """The recomputes of one backward.

    Attributes:
        unread: weak references to those that were not read yet.
        values: what was recomputed and is still needed.
        used_up: the parts of blocks whose handles were read for the last time.
    """

    def __init__(self, handles: "set[weakref.ref[ValueHandle]]") -> None:
        self.unread = handles.copy()
        self.values: dict[Made, Tensor] = {}
        self.used_up: set[Part] = set()
        alive = [handle for ref in self.unread if (handle := ref()) is not None]
        self._uses: Counter[Made] = Counter([handle.made for handle in alive])
        self._given_away: set[Made] = set()
        for operation in _needed_for([*self._uses]):
            self._uses.update(operation.reads)

    def take(self, handle: ValueHandle) -> Tensor:
        """Return what a handle stands for."""
        self.unread.discard(weakref.ref(handle))
        made = handle.made
        if made not in self.values:
            with no_torch_functions(), below_autograd(), grad_mode(True):
                self._compute(made)
        view = handle.tensor.tensor_in(self.values[made])
        self._given_away.add(made)
        self._use(made)
        return view

    def _use(self, made: Made) -> None:
        self._uses[made] -= 1
        if self._uses[made] <= 0:
            del self.values[made]
            # With it, what it was made of would stay to the end of the backward.
            del self._uses[made]
            self._given_away.discard(made)

    def _compute(self, target: Made) -> None:
        """Compute a value, and what it needs before it."""
        settings = read_settings()
        stack = [target]
        while stack:
            made = stack[-1]
            if made in self.values:
                stack.pop()
            elif made.operation is None:
                self.values[made] = _stored(made)
            else:
                missing = [m for m in made.operation.reads if m not in self.values]
                stack += missing
                if not missing:
                    self._run(made.operation, settings)

    def _run(self, operation: BlockOperation, settings: Any) -> None:
        values = self._operand_values(operation)
        operands, kwargs = iter(values), operation.kwargs
        args = mapped(operation.args, Operand, lambda _: next(operands))
        if kwargs:
            kwargs = mapped(kwargs, Operand, lambda _: next(operands))
        set_grad_enabled(operation.grad_mode)
        if operation.streams or operation.settings != settings:
            with _as_recorded(operation, settings):
                result = call_kernel(operation.func, *args, **kwargs)
        else:
            result = call_kernel(operation.func, *args, **kwargs)
        results = results_of(result)
        for number, is_operand, ref in operation.made:
            made = ref()
            if made is not None and self._uses[made] > 0:
                value = values[number] if is_operand else results[number]
                if value is None or TensorLayout.of(value) != made.layout:
                    raise RecomputeError(_differs(operation))
                self.values[made] = value
        for made in operation.reads:
            if made in self.values:
                self._use(made)

    def _operand_values(self, operation: BlockOperation) -> list[Tensor]:
        """Return the tensors to run an operation on.

        What it writes to is copied, unless nobody else will read it.
        """
        operands = operation.operands
        if not operation.written:
            return [o.tensor_in(self._base(o.of, operation)) for o in operands]
        of_written = [operands[k].of for k in operation.written]
        bases = {id(of): self._to_write(of, operation) for of in of_written}
        return [
            o.tensor_in(
                bases[id(o.of)] if id(o.of) in bases else self._base(o.of, operation)
            )
            for o in operands
        ]

    def _base(self, of: GivenTensor | Made, reader: BlockOperation) -> Tensor:
        if isinstance(of, Made):
            return self.values[of]
        return of.tensor(reader.func, reader.line)

    def _to_write(self, of: GivenTensor | Made, reader: BlockOperation) -> Tensor:
        base = self._base(of, reader)
        is_last = isinstance(of, Made) and self._uses[of] == 1
        if is_last and of.operation is not None and of not in self._given_away:
            return base
        if not has_layout(base):
            return base.clone()
        storage = flat_view(base, base.dtype).clone()
        return TensorLayout.of(base).view_of(storage)


def _stored(made: Made) -> Tensor:
    stored = made.stored
    assert stored is not None
    if isinstance(stored, Offloaded):
        return made.layout.view_of(stored.value().detach())
    assert made.op is not None
    stored_tensor = stored.tensor(made.op.func, made.op.source)
    return made.layout.view_of(stored_tensor)


def _needed_for(targets: Sequence[Made]) -> Iterator[BlockOperation]:
    """Return the operations that some values need, each once."""
    seen: set[Any] = set()
    stack = [*targets]
    while stack:
        operation = stack.pop().operation
        if operation is not None and operation not in seen:
            seen.add(operation)
            yield operation
            stack += operation.reads


def _differs(operation: BlockOperation) -> str:
    return _DIFFERS.format(op=operation.func, where=operation.line)


@contextmanager
def _as_recorded(operation: BlockOperation, settings: Any) -> Iterator[None]:
    """Run the body in the settings and streams of an operation, and put them back."""
    with ExitStack() as stack:
        if settings != operation.settings:
            write_settings(operation.settings)
            stack.callback(write_settings, settings)
        for stream, state in operation.streams:
            stack.callback(set_state, stream, state_of(stream))
            set_state(stream, state)
        yield


_DIFFERS = (
    "remat: {op} at {where}, in a `remat.scope` block, returned another shape, stride "
    "or dtype when it was run again for the backward. It must do the same both times."
)
