"""What a graph saves of a block is a handle; backwards compute what handles stand for.

Invariant: what is no value of a block is saved as without us: by the hooks around, or
itself, with its version, since torch compares no versions under hooks. An operation
runs at most once for a backward. Recomputes end with it, also after an error.
Rejected: to exchange `saved_tensors_hooks.__enter__`. Hooks that are entered later, as
torch's checkpoint has them, count what they are given, in a recompute too. To run all
operations for the first handle: values would wait for handles that are read much later.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.context import here
from remat._base.errors import RecomputeError
from remat._base.tensors import describe, version_of
from remat._base.types import TENSORS
from remat._graph.handles import Offloaded, VersionedTensor, unpack
from remat._scope.table import ValueTable
from remat._scope.values import (
    BlockOperation,
    BlockPart,
    GivenTensor,
    Made,
    Operand,
    TensorLayout,
    has_layout,
    mapped,
    needed_for,
    results_of,
)
from remat._torch.autograd import (
    current_task,
    grad_mode,
    keeps_graph,
    resume_hooks,
    set_grad_enabled,
    suspend_hooks,
    top_hooks,
    when_done,
)
from remat._torch.levels import (
    below_all_levels,
    is_of_torch_func,
    unwrap_dead,
    without_node,
)
from remat._torch.modes import (
    below_autograd,
    call_kernel,
    flat_view,
    no_torch_functions,
    unseen,
)
from remat._torch.process import read_settings, write_settings
from remat._torch.tracing import eager_only


class Hooks:
    """The hooks of blocks in one thread, of which some are `open`.

    torch calls only the innermost hooks of a thread. Ours have to stay after a block,
    for consumers come later, and the `with` blocks around it end then, each of which
    takes away the innermost hooks, whatever they are. So the stack is rebuilt: ours at
    its bottom, and each pair that was there in a pair that asks ours first.

        before   [a, b]
        inside   [ours, ours before a, ours before b]

    They go when no value is left.
    """

    def __init__(self, table: ValueTable) -> None:
        self.table, self.open = table, 0
        # How many of our hooks are being called. torch refers to the stack meanwhile,
        # which must not change.
        self.packing = 0
        self._thread = threading.get_ident()
        self._is_due, self._task = False, -1
        table.when_empty = self.remove

    def install(self) -> None:
        """Have ours asked first, before all hooks that there are now."""
        stack = suspend_hooks()
        own = here().block_pack
        if own is None:
            here().block_pack = own = Asking(self, None)
        around = [pair for pair in stack if pair[0] is not own]
        resume_hooks([*map(self._wrapped, around), (own, unpack)])

    def _wrapped(self, pair: Any) -> Any:
        pack, other = pair
        if type(pack) is Asking:
            return pair
        asking = Asking(self, pair)
        if other is unpack:
            return asking, unpack
        return asking, functools.partial(_unpack_with, other)

    def remove(self) -> None:
        """Take ours away, if no value is left and the stack may be changed now."""
        if self.open or len(self.table):
            return
        if threading.get_ident() != self._thread or self.packing:
            self._is_due = True
        elif current_task() >= 0:
            # Once the callbacks of the backward are over.
            self._is_due = True
            if self._task != current_task():
                self._task = current_task()
                when_done(_AfterBackward(self))
        else:
            self._remove()

    def _remove(self) -> None:
        top = top_hooks(True)
        # Others may be in use just now.
        self._is_due = top is not None and type(top[0]) is not Asking
        if not self._is_due:
            here().block_pack = None
            stack = suspend_hooks()
            inner = (p[0].inner if type(p[0]) is Asking else p for p in stack)
            resume_hooks([*filter(None, inner)])

    def remove_if_due(self) -> None:
        """Take ours away, if `remove` could not do so."""
        if self._is_due:
            self.remove()


class _AfterBackward:
    """Takes hooks away when it is freed: what a backward's callbacks do is undone."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __call__(self) -> None:
        """Do nothing yet."""

    def __del__(self) -> None:
        self._hooks.remove()


class Asking:
    """A hook that asks whether a tensor is a value of a block, and then other hooks."""

    __slots__ = ("_hooks", "inner")

    def __init__(self, hooks: Hooks, inner: Any) -> None:
        self._hooks, self.inner = hooks, inner

    @eager_only
    def __call__(self, tensor: Tensor) -> Any:
        """Be the hook that saves a tensor."""
        hooks, inner = self._hooks, self.inner
        hooks.packing += 1
        try:
            of = None
            if not (tensor.requires_grad and tensor.is_leaf):
                of = _value_of(tensor, hooks.table, inner is None)
            if of is not None:
                operand = Operand.of_layout(of, TensorLayout.of(tensor))
                return ValueHandle(hooks.table, operand)
            if inner is not None:
                return inner[0](tensor)
            if is_of_torch_func(tensor):
                tensor = unwrap_dead(tensor)
                if is_of_torch_func(tensor):
                    return without_node(tensor)
            return SavedItself(tensor, hooks)
        finally:
            hooks.packing -= 1


def _value_of(tensor: Tensor, table: ValueTable, may_go: bool) -> Any:
    """Return the value of a tensor, or what stands for it if a block sends it out."""
    entry = table.entry_of(tensor)
    if entry is not None and not entry.made.is_blank:
        return entry.made
    return table.given_to_send(tensor) if may_go else None


class SavedItself(VersionedTensor):
    """Stands for a tensor that is saved itself, as without us."""

    __slots__ = ("_hooks",)

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        super().__init__(tensor, version_of(tensor), _NAMELESS)
        self._hooks = hooks
        if not tensor.is_leaf:
            # With its node, it would be a cycle that Python does not see.
            with unseen() if type(tensor) in TENSORS else nullcontext():
                self.tensor = tensor.detach()

    @override
    def unpacked(self) -> Tensor:
        """Return the tensor."""
        self._hooks.remove_if_due()
        return super().unpacked()

    @override
    def _changed(self) -> str:
        return _CHANGED.format(what=describe(self.tensor))


_NAMELESS: Any = None  # there is no call


def _unpack_with(other: Callable[[Any], Tensor], packed: Any) -> Tensor:
    """Be the hook that gives a tensor back that ours or other hooks packed."""
    return unpack(packed) if type(packed) is ValueHandle else other(packed)


_CHANGED = (
    "remat: a tensor that the backward needs, {what}, has been modified by an inplace "
    "operation. Change a copy, or change it after the backward."
)


# --- A backward ---


class ValueHandle:
    """Stands for a value of a block in a graph."""

    __slots__ = ("__weakref__", "made", "table", "tensor")

    def __init__(self, table: ValueTable, tensor: Operand) -> None:
        self.table, self.made, self.tensor = table, tensor.of, tensor
        # The reference takes itself out.
        table.handles.add(weakref.ref(self, table.handles.discard))

    @eager_only
    def unpacked(self) -> Tensor:
        """Return the tensor, unless what it is made of was changed in place."""
        with self.table.lock:
            return below_all_levels(_read, self)


def _read(handle: ValueHandle) -> Tensor:
    table, task = handle.table, current_task()
    if task < 0:
        return Recomputes({weakref.ref(handle)}).take(handle)
    recomputes: Recomputes | None = table.recomputes.get(task)
    if recomputes is None:
        table.recomputes[task] = recomputes = Recomputes(table.handles)
        # The backward holds the callback, and that holds them.
        when_done(functools.partial(_end, recomputes, weakref.ref(table)))
    if not keeps_graph():
        recomputes.used_up.add(handle.made.part)
    if weakref.ref(handle) not in recomputes.unread:
        return Recomputes({weakref.ref(handle)}).take(handle)
    return recomputes.take(handle)


def _end(recomputes: "Recomputes", ref: "weakref.ref[ValueTable]") -> None:
    """End the recomputes of a backward, with it."""
    recomputes.values.clear()
    for part in recomputes.used_up:
        part.is_used_up = True
    table = ref()
    if table is not None:
        table.forget_used_up()


class Recomputes:
    """The recomputes of one backward.

    The first handle that it reads plans them: which operations all handles that are
    alive need, and how often each value is used, by operations and by handles. Then
    each handle has those operations run that its value still needs. A value is dropped
    when it was used for the last time. Where a step differs from its plan, and no bytes
    are left, what no backward was planned to read is computed anew for each handle.
    """

    def __init__(self, handles: "set[weakref.ref[ValueHandle]]") -> None:
        self.unread = handles.copy()
        self.values: dict[Any, Tensor] = {}  # recomputed or brought back, and needed
        # Those whose handles were read for the last time.
        self.used_up: set[BlockPart] = set()
        made = [handle.made for ref in self.unread if (handle := ref()) is not None]
        blocks = {each.part.block for each in made}
        self._is_short = any(b.policy is not None and b.policy.is_short for b in blocks)
        self._sends = any(b.away is not None for b in blocks)
        self._uses = Counter(each for each in made if self._is_held(each))
        self._given_away: set[Any] = set()
        # The operations whose reads are counted, and that have not run yet.
        self._due: set[BlockOperation] = set()
        self._count([*self._uses])

    def _count(self, targets: Sequence[Any]) -> None:
        """Count what is read by the operations that values need."""
        for operation in needed_for(targets, self.values):
            if operation not in self._due:
                self._due.add(operation)
                self._uses.update(operation.needs() if self._sends else operation.reads)

    def _is_held(self, made: Any) -> bool:
        """Say whether a value is held until its handles are read."""
        return not (self._is_short and made.unread and made.operation is not None)

    def take(self, handle: ValueHandle) -> Tensor:
        """Return what a handle stands for."""
        self.unread.discard(weakref.ref(handle))
        made = handle.made
        if not self._is_held(made):
            self._uses[made] += 1
            self._count([made])
        if made not in self.values:
            with no_torch_functions(), below_autograd(), grad_mode(True):
                self._compute(made)
        view = handle.tensor.tensor_in(self.values[made])
        self._given_away.add(made)
        self._use(made)
        return view

    def _use(self, made: Any) -> None:
        self._uses[made] -= 1
        if self._uses[made] <= 0:
            del self.values[made]
            # Otherwise its operands would stay alive until the backward ends.
            del self._uses[made]
            self._given_away.discard(made)

    def _compute(self, target: Any) -> None:
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
        self._due.discard(operation)
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
                    raise RecomputeError(
                        _DIFFERS.format(op=operation.func, where=operation.line)
                    )
                self.values[made] = value
        for read in operation.needs() if self._sends else operation.reads:
            if read in self.values:
                self._use(read)

    def _operand_values(self, operation: BlockOperation) -> list[Tensor]:
        """Return what an operation runs on: copies of what it writes to, if need be."""
        bases: dict[int, Tensor] = {}
        for k in operation.written:
            of = operation.operands[k].of
            if id(of) not in bases:
                bases[id(of)] = self._to_write(of, operation)
        for o in operation.operands:
            if id(o.of) not in bases:
                bases[id(o.of)] = self._base(o.of, operation)
        return [o.tensor_in(bases[id(o.of)]) for o in operation.operands]

    def _base(self, of: GivenTensor | Made, reader: BlockOperation) -> Tensor:
        if of in self.values:
            return self.values[of]
        assert isinstance(of, GivenTensor)
        tensor = of.tensor(reader.func, reader.line)
        if of.is_away:
            self.values[of] = tensor
        return tensor

    def _to_write(self, of: GivenTensor | Made, reader: BlockOperation) -> Tensor:
        base = self._base(of, reader)
        is_last = isinstance(of, Made) and self._uses[of] == 1
        if is_last and of.operation is not None and of not in self._given_away:
            return base
        if not has_layout(base):
            return base.clone()
        storage = flat_view(base, base.dtype).clone()
        return TensorLayout.of(base).view_of(storage)


def _stored(made: Any) -> Tensor:
    if isinstance(made, GivenTensor):
        return made.tensor()
    if isinstance(made.stored, Offloaded):
        return made.layout.view_of(made.stored.value().detach())
    return made.layout.view_of(made.stored.tensor(made.op.func, made.op.source))


@contextmanager
def _as_recorded(operation: BlockOperation, settings: Any) -> Iterator[None]:
    """Run the body in the settings and streams of an operation, and put them back."""
    with ExitStack() as stack:
        if settings != operation.settings:
            write_settings(operation.settings)
            stack.callback(write_settings, settings)
        for stream, state in operation.streams:
            stack.callback(stream.write, stream.read())
            stream.write(state)
        yield


_DIFFERS = (
    "remat: {op} at {where}, in a `remat.scope` block, returned another shape, stride "
    "or dtype when it was run again for the backward. It must do the same both times."
)
