"""`saved_residuals`: what a function keeps alive between its forward and its backward.

The function runs once under a mode that notes where each storage comes from (a
`Ledger`). Then the report reads what the nodes of the graph saved, and drops the graph:
the graph held every storage that loses a reference.

Invariant: a storage is listed once, with all its bytes, if and only if the graph of the
outputs holds it. The report changes no tensor and moves no random stream.
Rejected: saved-tensor hooks. They do not see what a Function keeps on its ctx, and
torch.func refuses to run under them.
"""

import gc
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import graph
from typing_extensions import override

from remat._base.labels import name_in
from remat._base.op import Op
from remat._base.parts import parts
from remat._base.types import Fn
from remat._graph.graph import (
    foreign_tensors_at,
    handles_at,
    nodes_of,
    tensors_at,
    tensors_reached,
)
from remat._graph.handles import Handle
from remat._partial.names import tell_of_keys, told_of_names
from remat._report.bitwise import has_values
from remat._report.inputs import (
    CONSTANT,
    MADE,
    Inputs,
    Ledger,
    SavedResidual as SavedResidual,
    StorageNote,
    counts,
    origin_text,
    tensors_in,
    undoing,
)
from remat._report.labels import (
    call_behind,
    one_by_one,
    reader_of,
    refuse_transforms,
    stream_name,
)
from remat._torch import saved_by, sequence_number, storage_id
from remat._transform.function import Primal
from remat.policies import Decision


if TYPE_CHECKING:
    from remat._base.program import Evaluation
    from remat._transform.saved import Saved


def saved_residuals(fn: Fn, /, *args: Any, **kwargs: Any) -> list[SavedResidual]:
    """List what stays alive for the backward after the forward of a function.

    The function is called once on the given tensors. It may be rematerialized or not.
    If no tensor that is passed or referred to requires grad, every floating argument is
    treated as if it did, as in JAX. Afterwards the report restores random streams, the
    `.grad` of inputs, and tensors that the function wrote to in place (such as the
    running statistics of batch norm). Changes to Python objects stay. A write by an
    operator whose schema does not declare it stays too.

    Each storage is listed once, in this order: constants, arguments, captured tensors,
    then the others in the order in which they were made. Their bytes add up to what the
    graph of the outputs holds. An output is listed only if the backward reads it. A
    leaf that only receives a gradient is not listed.

    For a call of `remat`, the list has what its policy saves or offloads, and the
    states of random streams. A first call saves all inputs. With pruning, calls after
    the first backward drop the inputs that it did not read. The report is such a call,
    so it lists what the next call would save.

    Compiled functions run eagerly here, and the list has what the eager run saves. A
    few functions of torch, such as `ctc_loss`, take another path under a dispatch mode,
    and the list is of that path. Two kinds of nodes do not tell what they saved:
    Functions written in C++, and in-place operations on views. A tensor that they hold
    is listed without readers if it was passed or an operation made it. The 8 bytes of a
    Python number are not listed.

    Args:
        fn: the function.
        *args: its arguments. Meta and fake tensors are accepted, so the model can be
            larger than memory.
        **kwargs: its keyword arguments.

    Returns:
        The residuals. The list is empty if no output requires grad.

    Raises:
        RuntimeError: `saved_residuals` is called under a transform of torch.func,
            forward-mode AD or torch.compile.
        CaptureError: `fn` holds a lazy or scripted module, or a saved tensor has no
            storage.

    Source: JAX's `jax.ad_checkpoint.saved_residuals`.

    Example:
        >>> from remat import remat
        >>> def f(x):
        ...     return x.sin().sin().sum()
        >>> [r.origin for r in saved_residuals(f, torch.ones(3))]
        ['from the argument x', 'output of sin']
        >>> [r.origin for r in saved_residuals(remat(f), torch.ones(3))]
        ['from the argument x']
    """
    instead = "the transformed function: saved_residuals(torch.func.grad(f), x)"
    refuse_transforms("saved_residuals", instead)
    with undoing(fn, args, kwargs) as (inputs, ledger):
        for i, tensor in enumerate(inputs.tensors):
            ledger.know(tensor, *inputs.described(i))
        first = torch.zeros((), requires_grad=True).view(())
        with one_by_one("saved_residuals", args), told_of_names(ledger), ledger:
            result = fn(*inputs.args, **inputs.kwargs)
        tell_of_keys()
        torch.clear_autocast_cache()
        outs = [t for t in tensors_reached(result) if t.requires_grad]
        del result
        notes = _Notes(ledger)
        notes.ask(outs, sequence_number(first.grad_fn))
        roots = [t.grad_fn for t in outs]
        outs.clear()
        return notes.residuals(roots, inputs)


def print_saved_residuals(fn: Fn, /, *args: Any, **kwargs: Any) -> None:
    """Print the list of `saved_residuals`, one residual per line, and the totals.

    The last lines count the activations, the parameters and all residuals. Parameters
    are leaves that require grad. They are alive without the graph too. All others count
    as activations.

    Args:
        fn: the function.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Source: JAX's `jax.ad_checkpoint.print_saved_residuals`, with bytes and readers.

    Example:
        >>> print_saved_residuals(lambda x: x.sin(), torch.ones(3))
        f32[3] from the argument x: 12 bytes, read by sin
        activations: 12 bytes in 1 residual
        parameters: 0 bytes in 0 residuals
        total: 12 bytes in 1 residual
    """
    found = saved_residuals(fn, *args, **kwargs)
    lines = [*map(str, found)]
    lines.append(_total("activations", [r for r in found if not r.is_parameter]))
    lines.append(_total("parameters", [r for r in found if r.is_parameter]))
    lines.append(_total("total", found))
    sys.stdout.write("\n".join(lines) + "\n")


def _total(what: str, found: Sequence[SavedResidual]) -> str:
    plural = "" if len(found) == 1 else "s"
    size = sum(r.nbytes for r in found)
    away = sum(r.nbytes for r in found if r.place)
    line = f"{what}: {size:,} bytes in {len(found)} residual{plural}"
    return f"{line}, {away:,} of them offloaded" if away else line


# --- The graph ---


class _Older(NamedTuple):
    """The nodes that are older than a run: what they saved may be freed already."""

    start: int

    @override
    def __contains__(self, node: Any) -> bool:
        return sequence_number(node) < self.start


class _Notes:
    """What the graph says of the storages in the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._saved: set[int] = set()
        self._calls: set[int] = set()
        self._states: list[SavedResidual] = []

    def ask(self, outs: Sequence[Tensor], start: int) -> None:
        """Note for each node since `start` what it saved."""
        nodes = (node for node, _ in nodes_of(outs, _Older(start)))
        for node in sorted(nodes, key=sequence_number):
            program = getattr(node, "program", None)
            reader, call = reader_of(node), call_behind(program)
            if call is not None:
                self._note_call(node, call, reader)
                self._note_kept(call.kept, reader, start)
            place = getattr(program, "place", None)
            self._note_kept([] if place is None else [place], reader, start)
            for handle in handles_at(node):
                self._note_handle(handle, reader, start)
            for t in tensors_at(node):
                self._note(t, reader, "from a constant")
            # Not all of these are held by the graph: a hook may refer to a global.
            for t in foreign_tensors_at(node):
                self._ledger.know(t, CONSTANT, "from a constant")

    def _note(self, tensor: Tensor, reader: str, origin: str) -> list[StorageNote]:
        entries = self._ledger.know(tensor, CONSTANT, origin)
        for entry in entries:
            entry.readers[reader] = None
            self._saved.add(entry.ref.address)
        return entries

    def _note_call(self, node: Any, call: Primal, reader: str) -> None:
        """Note what a call keeps besides its inputs: copies, residuals, states."""
        evaluation: Evaluation = node.evaluation
        leaves: Sequence[int] = range(len(evaluation.request.needs))
        planned = evaluation.planned
        if planned is not None:
            leaves = planned.kept(leaves)
        saved = _saved_by_call(node, len(leaves) + evaluation.residuals)
        found: list[tuple[Op, Decision]] = []
        if planned is not None and planned.plans is not None:
            plans = planned.plans
            residuals = [i for i, _ in plans.full.plan.residuals]
            found = [(plans.record.steps[i].op, plans.decisions[i]) for i in residuals]
        # And what calls within keep by their own rules.
        found += [(op, Decision.SAVE) for op in getattr(planned, "ops", ())]
        for value, (op, decision) in zip(saved[len(leaves) :], found, strict=True):
            self._note_saved(tensors_in(value), op, decision, reader)
        for i, value in zip(leaves, saved, strict=False):
            if i in evaluation.updated:
                name = call.call.snapshot.name_of(i)
                origin = f"copy of `{name}` as it was before the call"
                for t in tensors_in(value):
                    for entry in self._note(t, reader, origin):
                        entry.origin = origin
        for stream, state in call.state.ambient.moved if call.state else ():
            self._note_state(stream, state, reader)

    def _note_kept(self, places: Iterable[Any], reader: str, start: int) -> None:
        """Note what is kept of calls by their own rules."""
        for place in places:
            for residual in place.residuals or ():
                self._note_saved(residual.stored(), residual.op, Decision.SAVE, reader)
            for t in place.outs:
                self._note(t, reader, f"kept of {place.name}")
            self.ask(place.outs, start)

    def _note_handle(self, handle: Handle, reader: str, start: int) -> None:
        """Note the residual of a handle, or what its call keeps to recompute it."""
        found = handle.residual
        if found is not None:
            self._note_saved(found.stored(), found.op, found.decision, reader)
            return
        call: Saved = handle.call
        if id(call) in self._calls:
            return
        self._calls.add(id(call))
        reader = f"remat({name_in(call.label)})"
        for i, t in call.inputs.stored():
            origin = f"copy of `{call.name_of(i)}` as it was before the call"
            copied = i in call.inputs.may_be_written
            for entry in self._note(t, reader, origin if copied else "from a constant"):
                if copied:
                    entry.origin, entry.rank = origin, MADE
        planned = call.planned
        for residual in planned.residuals_held() if planned else ():
            self._note_saved(residual.stored(), residual.op, residual.decision, reader)
        self._note_kept(call.kept, reader, start)
        for stream, state in call.ambient.moved:
            self._note_state(stream, state, reader)

    def _note_saved(
        self, stored: Sequence[Tensor], op: Op, decision: Decision, reader: str
    ) -> None:
        """Note what a policy saves."""
        origin = origin_text(op.func, sorted(op.names))
        for t in stored:
            is_new = not self._ledger.has_met(t)
            for entry in self._note(t, reader, origin):
                if is_new:
                    entry.rank, entry.source = MADE, op.source
                if is_new or _would_move(t, decision):
                    entry.place = _PLACES.get(decision, "")

    def _note_state(self, stream: Any, state: Any, reader: str) -> None:
        """Note the state of a stream, which a recompute sets back."""
        origin = f"state of the stream: {stream_name(stream)}"
        if isinstance(state, Tensor):
            self._note(state, reader, origin)
            return
        size, host = _size_of(state), torch.device("cpu")
        self._states.append(SavedResidual(None, (), host, size, origin, "", (reader,)))

    def residuals(self, roots: list[Any], inputs: Inputs) -> list[SavedResidual]:
        """Drop the graph, and list what it saved or was seen to hold."""
        entries = self._ledger.entries.values()
        sizes = {e.ref.address: e.nbytes() for e in entries}
        made = [e for e in entries if e.rank == MADE]
        if not self._saved.issuperset(_alive(made)):
            gc.collect()  # what only garbage refers to is not kept for a backward
        # Held until the end: the gradient accumulators of leaves go with the graph,
        # which would look as if it had saved the leaves.
        leaves = [t for t in inputs.run_on if t.is_leaf and t.requires_grad]
        edges = [*map(graph.get_gradient_edge, leaves)]
        before = counts(entries), inputs.references()
        roots.clear()
        after = counts(entries), inputs.references()
        del edges
        held = self._saved | {a for a in sizes if before[0][a] > after[0][a]}
        for t, old, new in zip(inputs.run_on, before[1], after[1], strict=True):
            if old > new:
                held.update(map(storage_id, parts(t)))
        if _alive(made):
            gc.collect()  # a Function may refer to its own node
            now = counts(made)
            held |= {a for a in now if before[0][a] > now[a]}
        found = sorted(
            (e for e in entries if e.ref.address in held), key=attrgetter("rank")
        )
        return [e.residual(sizes[e.ref.address]) for e in found] + self._states


def _alive(entries: Iterable[StorageNote]) -> list[int]:
    return [address for address, count in counts(entries).items() if count]


def _saved_by_call(node: Any, count: int) -> list[Any]:
    """Return what each saved tensor became; an older torch gives all as one tuple."""
    saved = saved_by(node)
    return saved if len(saved) == count else [*saved[0]]


def _would_move(tensor: Tensor, decision: Decision) -> bool:
    """Say whether a tensor would be offloaded if it had values."""
    there = tensor.device.type == "cpu" and decision is Decision.OFFLOAD
    return not (has_values(tensor) or there)


_PLACES = {Decision.OFFLOAD: "pinned host", Decision.OFFLOAD_TO_DISK: "disk"}


def _size_of(state: Any) -> int:
    """Return the bytes of a stream's state."""
    if isinstance(state, bytes):
        return len(state)
    if isinstance(state, tuple):
        return sum(map(_size_of, state))
    return sys.getsizeof(state)
