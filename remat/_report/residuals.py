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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import graph
from typing_extensions import override

from remat._base.errors import name_in
from remat._base.op import Op
from remat._base.tensors import parts
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
from remat._report import inputs as _inputs
from remat._report.inputs import Inputs, Ledger, StorageNote, tried
from remat._report.render import short_array
from remat._torch.autograd import saved_by, sequence_number
from remat._torch.tensors import storage_id, use_count
from remat._transform.function import Primal
from remat.policies import Decision


@dataclass(frozen=True, slots=True)
class SavedResidual:
    """One storage that stays alive for the backward.

    Attributes:
        dtype, shape: of the tensor that the storage was made for, or that was passed;
            no dtype for the state of a random stream.
        device, nbytes: of the whole storage, even if only a view of it was saved.
        origin: where the storage comes from: "from the argument x['w'][0]", "from the
            captured `self.up.weight`", "output of sin", "named 'y'" if
            `checkpoint_name` gave that name, or "from a constant" if the origin is
            unknown.
        source: the user's line that made or named it: "file.py:12, in block", or "".
        readers: the operations whose backward reads it, in the order of the forward.
            Empty if torch does not tell, as for a Function written in C++.
        place: "pinned host" or "disk" if it was offloaded there, else "".
        is_parameter: whether it is of a leaf that requires grad, which is alive anyway.

    Example:
        >>> (found,) = saved_residuals(lambda x: x.sin(), torch.ones(3))
        >>> found.origin, found.nbytes, found.readers
        ('from the argument x', 12, ('sin',))
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    device: torch.device
    nbytes: int
    origin: str
    source: str
    readers: tuple[str, ...]
    place: str = ""
    is_parameter: bool = False

    def __str__(self) -> str:
        source = f" from {self.source}" if self.source else ""
        place = f", offloaded to {self.place}" if self.place else ""
        readers = f", read by {', '.join(self.readers)}" if self.readers else ""
        what = short_array(self.dtype, self.shape) if self.dtype else "state"
        return f"{what} {self.origin}{source}{place}: {self.nbytes:,} bytes{readers}"


def saved_residuals(fn: Fn, /, *args: Any, **kwargs: Any) -> list[SavedResidual]:
    """List what stays alive for the backward after the forward of a function.

    The function is called once on the given tensors. It may be rematerialized or not.
    If no output requires grad, it is called again, and every floating argument is
    differentiated; so it is at once, as in JAX, if no tensor requires grad. Afterwards
    the report restores random streams, the `.grad` of inputs, and tensors that the
    function wrote to in place. Changes to Python objects stay.

    Each storage is listed once, in this order: constants, arguments, captured tensors,
    then the others in the order in which they were made. Their bytes add up to what the
    graph of the outputs holds. An output is listed only if the backward reads it. A
    leaf that only receives a gradient is not listed.

    A call of `remat` has what its policy saves or offloads, and the states of random
    streams. The report is a call like the next one: a first call saves all inputs, and
    with pruning, those after the first backward drop the inputs that it did not read.

    Args:
        fn: the function. Compiled functions run eagerly here.
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
    _inputs.refuse_transforms("saved_residuals", instead)
    return tried(partial(_residuals, fn, args), fn, args, kwargs)


def _residuals(
    fn: Fn, args: Any, inputs: Inputs, ledger: Ledger
) -> tuple[list[SavedResidual], bool]:
    """Run a function; say whether an output requires grad."""
    for i, tensor in enumerate(inputs.tensors):
        ledger.know(tensor, *inputs.described(i))
    first = torch.zeros((), requires_grad=True).view(())
    with _inputs.one_by_one("saved_residuals", args), told_of_names(ledger), ledger:
        result = fn(*inputs.args, **inputs.kwargs)
    tell_of_keys()
    torch.clear_autocast_cache()
    outs = [t for t in tensors_reached(result) if t.requires_grad]
    del result
    if not outs:
        return [], False
    notes = _Notes(ledger)
    notes.ask(outs, sequence_number(first.grad_fn))
    roots = [t.grad_fn for t in outs]
    outs.clear()
    return notes.residuals(roots, inputs), True


def print_saved_residuals(fn: Fn, /, *args: Any, **kwargs: Any) -> None:
    """Print the list of `saved_residuals`, one residual per line, and the totals.

    The totals are of activations, of parameters, and of all. Parameters are leaves that
    require grad, which are alive without the graph too.

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
    parameters = [r for r in found if r.is_parameter]
    others = [r for r in found if not r.is_parameter]
    totals = {"activations": others, "parameters": parameters, "total": found}
    lines = *map(str, found), *(_total(*each) for each in totals.items())
    sys.stdout.write("\n".join(lines) + "\n")


def _total(what: str, found: Sequence[SavedResidual]) -> str:
    size = sum(r.nbytes for r in found)
    away = sum(r.nbytes for r in found if r.place)
    plural = "" if len(found) == 1 else "s"
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
            reader, call = _inputs.reader_of(node), _inputs.call_behind(program)
            if call is not None:
                self._note_call(node, call, reader)
                self._note_kept(call.kept, reader, start)
            place = getattr(program, "place", None)
            self._note_kept([] if place is None else [place], reader, start)
            for handle in handles_at(node):
                self._note_handle(handle, reader, start)
            self._note(tensors_at(node), reader)
            # Not all of these are held by the graph: a hook may refer to a global.
            for t in foreign_tensors_at(node):
                self._ledger.know(t, _inputs.CONSTANT, "from a constant")

    def _note(self, tensors: Iterable[Tensor], reader: str, **known: Any) -> None:
        """Note who reads some tensors, and what else is known of their storages."""
        for t in tensors:
            for entry in self._ledger.know(t, _inputs.CONSTANT, "from a constant"):
                entry.readers[reader] = None
                self._saved.add(entry.ref.address)
                for name, value in known.items():
                    setattr(entry, name, value)

    def _note_inputs(
        self, each: Iterable[tuple[int, Tensor]], copied: Any, of: Any, reader: str
    ) -> None:
        """Note what is saved of the inputs of a call, of which some are copies."""
        for i, t in each:
            was = f"copy of `{of.name_of(i)}` as it was before the call"
            copy = {"origin": was, "rank": _inputs.MADE} if i in copied else {}
            self._note([t], reader, **copy)

    def _note_call(self, node: Any, call: Primal, reader: str) -> None:
        """Note what a call keeps besides its inputs: copies, residuals, states."""
        evaluation: Any = node.evaluation
        planned, leaves = evaluation.planned, range(len(evaluation.request.needs))
        kept: Sequence[int] = leaves if planned is None else planned.kept(leaves)
        saved = saved_by(node)
        if len(saved) != len(kept) + evaluation.residuals:
            saved = [*saved[0]]  # an older torch gives all as one tuple
        found: list[tuple[Op, Decision]] = []
        if planned is not None and (plans := planned.plans) is not None:
            residuals = [i for i, _ in plans.full.plan.residuals]
            found = [(plans.record.steps[i].op, plans.decisions[i]) for i in residuals]
        # And what calls within keep by their own rules.
        found += [(op, Decision.SAVE) for op in getattr(planned, "ops", ())]
        for value, (op, decision) in zip(saved[len(kept) :], found, strict=True):
            self._note_saved(_inputs.tensors_in(value), op, decision, reader)
        pairs = zip(kept, map(_inputs.tensors_in, saved), strict=False)
        each = ((i, t) for i, tensors in pairs for t in tensors)
        self._note_inputs(each, evaluation.updated, call.call.reach, reader)
        self._note_states(call.state.ambient.moved if call.state else (), reader)

    def _note_kept(self, places: Iterable[Any], reader: str, start: int) -> None:
        """Note what is kept of calls by their own rules."""
        for place in places:
            for residual in place.residuals or ():
                self._note_saved(residual.stored(), residual.op, Decision.SAVE, reader)
            self._note(place.outs, reader)
            self.ask(place.outs, start)

    def _note_handle(self, handle: Handle, reader: str, start: int) -> None:
        """Note the residual of a handle, or what its call keeps to recompute it."""
        found = handle.residual
        if found is not None:
            self._note_saved(found.stored(), found.op, found.decision, reader)
            return
        call = handle.call
        if id(call) in self._calls:
            return
        self._calls.add(id(call))
        reader = f"remat({name_in(call.label)})"
        stored, copied = call.inputs.stored(), call.inputs.may_be_written
        self._note_inputs(stored, copied, call.reach, reader)
        for kept in call.planned.residuals_held() if call.planned else ():
            self._note_saved(kept.stored(), kept.op, kept.decision, reader)
        self._note_kept(call.kept, reader, start)
        self._note_states(call.ambient.moved, reader)

    def _note_saved(
        self, stored: Sequence[Tensor], op: Op, decision: Decision, reader: str
    ) -> None:
        """Note what a policy saves."""
        origin = _inputs.origin_text(op.func, sorted(op.names))
        for t in stored:
            known: dict[str, Any] = {"place": _PLACES.get(decision, "")}
            if any(storage_id(part) not in self._ledger.entries for part in parts(t)):
                known |= {"rank": _inputs.MADE, "origin": origin, "source": op.source}
            elif _inputs.has_values(t) or (t.is_cpu and decision is Decision.OFFLOAD):
                known = {}  # it is where it would be offloaded to
            self._note([t], reader, **known)

    def _note_states(self, moved: Iterable[tuple[Any, Any]], reader: str) -> None:
        """Note the states of streams, which a recompute sets back."""
        for stream, state in moved:
            origin = f"state of the stream: {stream.name}"
            if isinstance(state, Tensor):
                self._note([state], reader, origin=origin)
            else:
                size, host = _size_of(state), torch.device("cpu")
                row = None, (), host, size, origin, "", (reader,)
                self._states.append(SavedResidual(*row))

    def residuals(self, roots: list[Any], inputs: Inputs) -> list[SavedResidual]:
        """Drop the graph, and list what it saved or was seen to hold."""
        entries, counts = self._ledger.entries, self._counts
        rows = {address: _row(entry) for address, entry in entries.items()}
        made = {a for a, entry in entries.items() if entry.rank == _inputs.MADE}
        # Held until the end: the gradient accumulators of leaves go with the graph,
        # which would look as if it had saved the leaves.
        leaves = [t for t in inputs.run_on if t.is_leaf and t.requires_grad]
        edges = [*map(graph.get_gradient_edge, leaves)]
        if any(entries[a].ref.count() for a in made - self._saved):
            gc.collect()  # what only garbage refers to is not kept for a backward
        before = counts(inputs)
        roots.clear()
        held = self._saved | {a for a, n in counts(inputs).items() if n < before[a]}
        del edges
        if any(entries[a].ref.count() for a in made):
            gc.collect()  # a Function may refer to its own node
            held |= {a for a in made if entries[a].ref.count() < before[a]}
        kept = sorted((a for a in entries if a in held), key=lambda a: entries[a].rank)
        return [rows[a] for a in kept] + self._states

    def _counts(self, inputs: Inputs) -> Counter[int]:
        """Return how many references there are to storages, and to inputs with them."""
        entries = self._ledger.entries.items()
        found = Counter({address: entry.ref.count() for address, entry in entries})
        for i, t in enumerate(inputs.run_on):
            # A captured tensor is held by what captured it, which a call may hold.
            pythons = sys.getrefcount(t) if i < inputs.passed else 0
            for part in parts(t):
                found[storage_id(part)] += use_count(t) + pythons
        return found


def _row(entry: StorageNote) -> SavedResidual:
    storage = entry.ref.get()
    size = 0 if storage is None else storage.nbytes()
    meta = entry.dtype, entry.shape, entry.device, size
    where = entry.origin, entry.source, tuple(entry.readers), entry.place
    return SavedResidual(*meta, *where, entry.is_parameter)


_PLACES = {Decision.OFFLOAD: "pinned host", Decision.OFFLOAD_TO_DISK: "disk"}


def _size_of(state: Any) -> int:
    """Return the bytes of a stream's state."""
    if isinstance(state, bytes):
        return len(state)
    if isinstance(state, tuple):
        return sum(map(_size_of, state))
    return sys.getsizeof(state)
