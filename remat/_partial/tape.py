"""What a call in a graph keeps: what its policy says, and the states before draws.

Each run of a call is under a `Tape`. The first keeps, and a recompute is given what
was kept, in the order of the operations. A budget is spent when the first run ends. In
a recompute, a call keeps nothing if no more of that reads it, as in eager code.

Invariant: what is given reads the cotangents (`barrier`), as all that a recompute does.
What is not known of a graph leads to fewer results being kept, never to more bytes.
Rejected: record, plan and replay. Whatever makes a graph drops what nobody reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS
from typing_extensions import override

from remat._ambient.draws import draws, drew_in, out_of_place, with_defaults
from remat._base.absent import inputs_of
from remat._base.calls import Places
from remat._base.context import here
from remat._base.errors import OffloadError, RandomnessError, RecomputeError
from remat._base.op import NO_NAMES, Op, Value
from remat._base.operators import named
from remat._base.source import user_line
from remat._base.tensors import taken_apart
from remat._graph.graph import nodes_of
from remat._partial.barrier import Order, after_cotangents
from remat._partial.budget import spent_by
from remat._partial.effects import declared_writes, traits_of
from remat._partial.names import PolicyKeys
from remat._partial.plan import Record, Step
from remat._partial.recorder import SILENT
from remat._partial.values import Arguments, Results
from remat._torch.graphs import (
    AddedNodes,
    TracedMode,
    draw_again,
    draw_and_keep_state,
    let_graphs_draw,
    unlevelled,
)
from remat._torch.levels import base_tensor
from remat._torch.modes import no_torch_functions
from remat._torch.operators import OpOverload, is_view_op
from remat._torch.tensors import storage_id
from remat._torch.tracing import is_symbolic, size_hint
from remat.policies import Decision, Policy


class TapedCall:
    """What one call keeps."""

    def __init__(
        self,
        label: str,
        policy: Policy | None,
        *,
        refuses_draws: bool = False,
        calls: Any = None,
    ) -> None:
        self.label, self.policy, self.refuses_draws = label, policy, refuses_draws
        self.keys: PolicyKeys | None = None  # of the policy
        self.calls = calls  # of modules, where nodes of a graph tell them
        self.entries: list[TapedOperation] = []
        # Each draw, and the state of the random stream before it.
        self.draws: list[tuple[Any, Any]] = []
        self.is_first, self.order = True, Order(())  # the next run is the forward

    def next_tape(self, inputs: Iterable[Any]) -> "Tape":
        """Return the mode for the next run, which is given these inputs."""
        if not self.is_first:
            if self.keys is not None:
                self.keys.tell()
            return LaterTape(self)
        self.is_first, self.order = False, Order(inputs)
        return FirstTape(self)

    def may_read_early(self, tensor: Tensor) -> bool:
        """Say whether a recompute may read an input before the cotangents."""
        return self.order.is_free(tensor)


class TapedOperation:
    """What is kept of one operation."""

    __slots__ = ("_devices", "func", "may", "op", "results", "step")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.op: Op | None = None  # what the policy is asked about, if it is
        self.may = Decision.RECOMPUTE  # what it says
        self.results: Any = None  # what it returned, if that is kept
        self._devices: list[torch.device] = []  # where that belongs
        self.step: Step | None = None  # for a budget

    def keep(self, out: Any, decision: Decision, label: str) -> None:
        """Keep what the operation returned, where the decision says."""
        self.may, self.results = decision, None
        if not decision:
            return
        if decision is Decision.OFFLOAD_TO_DISK:
            raise OffloadError(_DISK.format(label=label))
        self._devices = [t.device for t in _tensors(out)]
        self.results = tree_map_only(Tensor, Tensor.detach, out)
        if decision is Decision.OFFLOAD:
            self.results = tree_map_only(Tensor, Tensor.cpu, self.results)

    def result(self) -> Any:
        """Return what the operation returned, for a recompute."""
        devices = iter(self._devices)

        def back(tensor: Tensor) -> Tensor:
            device, found = next(devices), after_cotangents(tensor)
            return found if found.device == device else found.to(device)

        return tree_map_only(Tensor, back, self.results)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


_DISK = (
    "remat: a policy of {label} offloads to disk, which compiled code and graphs "
    "cannot. Offload to 'pinned_host' there, or call the function outside of them."
)


class Tape(TracedMode):
    """A mode under which a call runs while a graph is made."""

    def __init__(self, kept: TapedCall) -> None:
        super().__init__()
        self._kept, self._is_copying = kept, False
        asks = kept.policy is not None and kept.policy.asks_modules
        self._places = Places(asks, kept.calls)

    @override
    def __enter__(self) -> Any:
        self._places.begin()
        self._around, here().tape = here().tape, self
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        here().tape = self._around
        self._places.end()
        return super().__exit__(exc_type, exc_val, exc_tb)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        # A function mode is not to see what is asked of tensors here.
        with no_torch_functions():
            return self._seen(func, args, kwargs or {})

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is named:
            self.name(*args)
            return None
        if func is draw_and_keep_state or draws(func, args, kwargs):
            return self._draw(func, args, kwargs)
        is_ours = self._is_copying or func in SAC_IGNORED_OPS or func is draw_again
        if self._kept.policy is None or is_ours:
            return self.call(func, args, kwargs)
        return self.run(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that draws nothing."""
        raise NotImplementedError

    def drawn(self, func: Any, draw: Any, args: Any, kwargs: Any) -> Any:
        """Run a draw; return the state before it, and the result."""
        raise NotImplementedError

    def name(self, tensor: Tensor, name: str) -> None:
        """Note the name of a value."""

    def returned(self, out: Any) -> None:
        """Be told what the function returned, before its caller has it."""

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        # The tape of a call inside keeps the state as well.
        is_nested = func is draw_and_keep_state
        inner, args = (args[0], args[1:]) if is_nested else (func, args)
        if kwargs.get("generator") is not None:
            raise RandomnessError(_GENERATOR.format(op=inner, label=self._kept.label))
        if self._kept.refuses_draws:
            message = drew_in(self._kept.label)
            raise RandomnessError(message.format(op=inner, where=user_line()))
        let_graphs_draw()
        if not inner._schema.is_mutable:
            state, out = self.drawn(func, inner, args, kwargs)
        else:
            args = with_defaults(inner, args, kwargs)
            state, out = self.drawn(func, out_of_place(inner), args, kwargs)
            if isinstance(out, tuple):  # of rrelu: its result, and the noise
                out, noise = out
                args[1].copy_(noise)
            else:
                out = args[0].copy_(out)
        return (state, out) if is_nested else out


_GENERATOR = (
    "remat: {op} draws from an explicit generator in {label}, while a graph is made. A "
    "graph holds no states of generators. Draw with a key of remat.random."
)


class FirstTape(Tape):
    """The first run, which keeps."""

    def __init__(self, kept: TapedCall) -> None:
        super().__init__(kept)
        # By storage: what made it, with the tensor, so that the number stays its own.
        self._made: dict[int, tuple[TapedOperation, Any]] = {}
        self._has_budget = kept.policy is not None and kept.policy.has_budget
        # For a budget: the numbers of storages, and what keeps these from changing.
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []
        self._nodes, self._given = AddedNodes(), getattr(here().tape, "given", 0)

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._made.clear()
        kept = self._kept
        if kept.policy is not None and kept.policy.keys:
            ops = [entry.op for entry in kept.entries if entry.op is not None]
            kept.keys = PolicyKeys(kept.policy, ops, kept.label)
        kept.order.close()
        self._nodes.end()
        around = self._around
        is_within = isinstance(around, LaterTape) and not kept.draws
        if is_within and around.given == self._given:  # nothing, while this one ran
            around.within.append((kept, self._nodes))
        return super().__exit__(exc_type, exc_val, exc_tb)

    @override
    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self._kept.order.note(func, inputs_of(args, kwargs), out)
        return out

    @override
    def drawn(self, func: Any, draw: Any, args: Any, kwargs: Any) -> Any:
        state, out = draw_and_keep_state(draw, *args, **kwargs)
        self._kept.order.note(draw, inputs_of(args, kwargs), out)
        self._kept.draws.append((func, state))
        if self._kept.policy is not None:
            self._note(draw, Arguments(args, kwargs), out)
        return state, out

    @override
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = Arguments(args, kwargs)
        out = self.call(func, args, kwargs)
        written = declared_writes(traits_of(func), args, kwargs)
        self._note(func, arguments, out, written)
        for tensor in written:
            # A detached tensor counts its versions apart while functions are made of
            # operations in place, so nothing would tell that what is kept was changed.
            made = self._made.get(storage_id(tensor))
            if made is not None:
                made[0].results = None
        return out

    def _note(
        self, func: Any, arguments: Arguments, out: Any, written: Sequence[Tensor] = ()
    ) -> None:
        entry, place = TapedOperation(func), self._places.of(func)
        self._kept.entries.append(entry)
        may_keep = _computes(func) and bool(arguments.tensors)
        if not (may_keep or self._has_budget):
            return
        results = Results(out, arguments)
        values = tuple(results.values)
        op = Op(func, *arguments.described, values, NO_NAMES, user_line(), *place)
        if may_keep:
            self._keep(entry, op, out)
            for t in results.tensors:
                self._made[storage_id(t)] = entry, out
        if self._has_budget:
            tensors = arguments.tensors, results.tensors, written
            self._held += [*arguments.tensors, *results.tensors]
            reads, makes, writes = (tuple(map(self._number, each)) for each in tensors)
            is_known = (makes and {*makes} <= {*reads}) or not is_view_op(func)
            entry.step = Step(op, reads, makes, writes, always_runs=not is_known)

    def _number(self, tensor: Tensor) -> int:
        key = storage_id(base_tensor(tensor))
        return self._numbers.setdefault(key, len(self._numbers))

    def _keep(self, entry: TapedOperation, op: Op, out: Any) -> None:
        """Keep what an operation returned, where the policy says."""
        assert self._kept.policy is not None
        entry.op = op
        entry.keep(out, self._kept.policy(op), self._kept.label)

    @override
    def name(self, tensor: Tensor, name: str) -> None:
        entry, out = self._made.get(storage_id(tensor), (None, None))
        if entry is not None and entry.op is not None:
            op = replace(entry.op, names=entry.op.names | {name})
            self._keep(entry, op, out)

    @override
    def returned(self, out: Any) -> None:
        """Let go of what the budget does not keep; keep copies of what is returned.

        The caller may change that in place. Where nobody does, no graph has the copy.
        """
        if self._has_budget:  # while the result has a graph
            self._spend(_tensors(out))
        self._is_copying = True
        for t in _tensors(out):
            entry, _ = self._made.get(storage_id(base_tensor(t)), (None, None))
            if entry is not None:
                with unlevelled(), torch.no_grad():
                    entry.results = tree_map_only(Tensor, Tensor.clone, entry.results)

    def _spend(self, outs: Sequence[Tensor]) -> None:
        """Let go of what the budget does not keep."""
        entries = self._kept.entries
        steps: list[Step] = []
        may: list[Decision] = []
        for entry in entries:
            step, op = entry.step, entry.op
            assert step is not None
            steps.append(step._replace(op=_hinted(op or step.op)))
            sizes = [n for v in step.op.outputs for n in v.shape]
            has_sizes = None not in map(size_hint, sizes)
            may.append(entry.may if has_sizes else Decision.RECOMPUTE)
        roots = frozenset(self._saved(outs))
        record = Record(tuple(steps), (), (roots,))
        found = spent_by(self._kept.policy, record, may, (), prune=True)
        assert found is not None
        self._held.clear()
        for i, entry in enumerate(entries):
            if i not in found.solution.saved:
                entry.results = None

    def _saved(self, outs: Sequence[Tensor]) -> Iterable[int]:
        """Return the storages that the graph of the outputs saved."""
        found: set[int] = set()
        for node, tensors in nodes_of(outs):
            if type(node).__name__ in SILENT:
                return self._numbers.values()
            keys = (storage_id(base_tensor(t)) for t in tensors)
            found.update(self._numbers[k] for k in keys if k in self._numbers)
        return found


def _hinted(op: Op) -> Op:
    """Return an operation with the sizes that a trace has for those that vary."""
    args, kwargs, outputs = map(_with_hints, (op.args, op.kwargs, op.outputs))
    return Op(op.func, args, kwargs, outputs, op.names, op.source)


def _with_hints(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(map(_with_hints, part))
    if isinstance(part, Value):
        shape, stride = _with_hints(part.shape), _with_hints(part.stride)
        return Value(shape, part.dtype, part.device, stride, _with_hints(part.offset))
    return size_hint(part) or 0 if is_symbolic(part) else part


def _computes(func: Any) -> bool:
    is_known = isinstance(func, OpOverload)
    return is_known and not func._schema.is_mutable and not is_view_op(func)


class LaterTape(Tape):
    """A later run, which is given what the first one kept."""

    def __init__(self, kept: TapedCall) -> None:
        super().__init__(kept)
        self._entries, self._states = iter(kept.entries), iter(kept.draws)
        self._differs, self.given = False, 0  # how many results of the first one
        # The calls within, in their first runs, and the nodes that these added.
        self.within: list[tuple[TapedCall, AddedNodes]] = []

    @override
    def returned(self, out: Any) -> None:
        """Have the calls within keep nothing of which no more is read."""
        if not self.within:
            return
        outs = _tensors(out)
        read: list[Tensor] = []
        for node, saved in nodes_of([*outs, *map(base_tensor, outs)]):
            if type(node).__name__ in SILENT:
                return
            read += (taken_apart(base_tensor(t))[0] for t in saved)
        for kept, nodes in self.within:
            if not nodes.lead_to(read):
                kept.entries.clear()

    @override
    def drawn(self, func: Any, draw: Any, args: Any, kwargs: Any) -> Any:
        then, state = next(self._states, (None, None))
        if then is not func:
            raise RecomputeError(_OTHER.format(op=func, label=self._kept.label))
        entry = None if self._kept.policy is None else self._entry_of(draw)
        if entry is not None and entry.results is not None:
            return state, entry.result()
        return state, draw_again(state, draw, *args, **kwargs)

    @override
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        entry = self._entry_of(func)
        if entry is None or entry.results is None:
            return func(*args, **kwargs)
        self.given += 1
        return entry.result()

    def _entry_of(self, func: Any) -> TapedOperation | None:
        """Return what was kept of the next operation, while they are the same."""
        entry = None if self._differs else next(self._entries, None)
        self._differs = entry is None or entry.func is not func
        return None if self._differs else entry


_OTHER = (
    "remat: the recompute of {label} draws with {op} where its forward did not, while "
    "a graph is made. Make it draw the same numbers in both runs."
)
