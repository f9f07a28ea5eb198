"""The record of a step, a forward and its backward: what holds its peak.

The profiler says when memory is allocated and freed (`timeline`). An observer says
which operation made it: each runs under a mark that the profiler sees.

Invariant: the bytes are those of `memory_timeline`, plus those of the parameters and
inputs. The observer keeps no storage alive. Parameters, `.grad`, buffers and random
streams are put back.
Rejected: `.backward()`. It would add to the user's `.grad`, and run the hooks of
optimizers that step in the backward. Rejected: to count in the observer. Operations use
memory that they do not return.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, autograd
from typing_extensions import override

from remat._base.context import Observe, here
from remat._base.source import user_line
from remat._base.tensors import parts
from remat._base.types import Fn
from remat._graph.graph import handles_at, nodes_of
from remat._report import inputs as _inputs
from remat._report.inputs import Inputs, Ledger, StorageNote, tensors_in, undoing
from remat._report.peak import NAMES, HeldValues, Holder, Peak, PeakHolder, advice_on
from remat._report.timeline import MemoryChange, changes_in, timeline_of
from remat._torch.autograd import (
    AccumulateGrad,
    current_node,
    marked,
    nodes_made,
    sequence_number,
)
from remat._torch.levels import base_tensor
from remat._torch.tensors import storage_id
from remat._transform.saved import DIFFERENTIATED_AGAIN


MARK, OURS = "remat watches #", "remat keeps"


def peak_of(fn: Fn, args: Any, kwargs: Any) -> Peak | None:
    """Return the peak of a step; None if no loss is returned and no backward runs.

    A step is a loss with its backward, perhaps one that all arguments are to be
    differentiated of; or a function that runs its own. It runs twice: first, calls
    learn what their recomputes need.
    """
    others = False
    for run, every in (_loss, False), (_loss, True), (_own_backward, False):
        for is_first in (True, False):
            if every and not others:
                break
            with undoing(fn, args, kwargs, StepWatch, every=every) as (inputs, watch):
                others = inputs.has_others or every
                if not all(map(_inputs.has_values, inputs.tensors)):
                    return None
                for t in inputs.tensors:
                    if t.is_leaf:
                        t.grad = None
                with _inputs.reporting(watch), watch:
                    call = partial(run, fn, args, kwargs, inputs, watch)
                    if is_first and call() is None:
                        break
                    if not is_first:
                        return _peak(changes_in(call), watch, inputs)
    return None


def _loss(fn: Fn, _args: Any, _kwargs: Any, inputs: Inputs, watch: "StepWatch") -> Any:
    """Run a loss and its backward; return what is alive then, None if it is none."""
    result = fn(*inputs.args, **inputs.kwargs)
    outs = [t for t in tensors_in(result) if t.requires_grad]
    if not outs or any(t.numel() != 1 for t in outs):
        return None
    wrt = _differentiated(outs, inputs.run_on)
    try:
        grads = autograd.grad(outs, wrt, allow_unused=True)
    except RuntimeError:
        if watch.ran_backward:  # its own, which freed the graph
            return None
        raise
    watch.hold("gradients", grads)
    return result, grads


def _own_backward(
    fn: Fn, args: Any, kwargs: Any, inputs: Inputs, watch: "StepWatch"
) -> Any:
    """Run a function that runs a backward; None if it does not."""
    if not inputs.are_made_up:
        args, kwargs = inputs.args, inputs.kwargs
    result = fn(*args, **kwargs)
    if not watch.ran_backward:
        return None
    made = [t for t in tensors_in(result) if t.numel() > 1]
    grads = [t.grad for t in inputs.tensors if t.is_leaf and t.grad is not None]
    watch.hold("gradients", [*made, *grads])
    return (result,)


def _differentiated(outs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return what a backward gives gradients: the inputs, and other leaves."""
    found = [t for t in given if t.requires_grad]
    known = {id(t) for t in found}
    seen: set[Any] = {None, *(t.grad_fn for t in found)}
    todo = [t.grad_fn for t in outs]
    while todo:
        node: Any = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [behind for behind, _ in node.next_functions]
        if type(node) is AccumulateGrad and id(node.variable) not in known:
            found.append(node.variable)
    return found


# --- The record of a step ---


class WatchedOp(NamedTuple):
    """One operation of a step."""

    name: str
    source: str
    node: int  # the number of the node whose backward it is in; -1 in a forward
    called: "CalledAs | None"  # the call whose forward it is in
    again: "CalledAs | None"  # the innermost call whose recompute it is in
    saves: bool  # whether a policy of a call under torch.func may save its result


CalledAs: TypeAlias = tuple[str, int]  # the label of a call, and which one of it; or 0


class StepWatch(Ledger):
    """Notes the operations of a step, and the storages that they make."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self.ops: list[WatchedOp] = []
        # What operations made, by operation and address; for each node, by number, the
        # first operation of its forward; and storages that are held by one kind.
        self.made: dict[tuple[int, int], StorageNote] = {}
        self.origins: dict[int, int] = {}
        self.kinds: dict[int, PeakHolder] = {}
        # Calls that were not recomputed: how many have each label; how many are in no
        # other; the last operation of a forward.
        self.labels: Counter[str] = Counter()
        self.outermost, self.last = 0, -1
        self.ran_backward = False
        self.again: dict[str, None] = {}  # the labels of those under base autograd
        self._called = weakref.WeakKeyDictionary[Any, CalledAs]()

    @override
    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        node, context, i = current_node(), here(), len(self.ops)
        again, called = map(self._innermost, (context.recomputing, context.inside))
        if context.functions:
            called = called or ("a call", 0)
        if node is not None and not self.ran_backward:
            self.ran_backward = True
            self.hold("policy", _saved_by_policies(node))
        self.last = i if called and not again else self.last
        name = getattr(func, "overloadpacket", func).__name__
        saves = bool(context.functions) and context.policy is not None
        number = -1 if node is None else sequence_number(node)
        op = WatchedOp(name, user_line(), number, called, again, saves)
        self.ops.append(op)
        self.origins.setdefault(nodes_made() - 1, i)
        with marked(f"{MARK}{i}"):
            return super().call(func, args, kwargs)

    @override
    def know(
        self, tensor: Tensor, rank: int, origin: str, source: str = ""
    ) -> list[StorageNote]:
        found = super().know(tensor, rank, origin, source)
        if rank == _inputs.MADE:
            for part, entry in zip(parts(tensor), found, strict=True):
                if not part._is_zerotensor():
                    place = len(self.ops) - 1, part.untyped_storage().data_ptr()
                    self.made.setdefault(place, entry)
        return found

    @override
    def _preserve(self, tensor: Tensor) -> None:
        with marked(OURS):
            super()._preserve(tensor)

    def hold(self, kind: PeakHolder, tree: Any) -> None:
        """Note what holds some tensors; gradients are nothing else."""
        for t in tensors_in(tree):
            for part in parts(base_tensor(t)):
                number = storage_id(part)
                if number in self.entries and kind == "gradients":
                    self.kinds[number] = kind
                elif number in self.entries:
                    self.kinds.setdefault(number, kind)

    # --- Calls ---

    def asked(self, block: Any, lowering: Any, args: tuple[Any, ...]) -> Any:
        """Return how a rematerialized function is called: as it is."""
        del self, args
        return lowering, block._options

    def observe(self, call: Any, observe: Observe | None) -> Observe:
        """Note a call under base autograd, and what it saves of its inputs."""
        if call.label in DIFFERENTIATED_AGAIN:
            self.again[call.label] = None
        self._note(call, [*_inputs.inputs_kept(call)])
        return observe or (lambda _position, _tensor: None)

    def entered(self, call: Any, inputs: Sequence[Tensor]) -> None:
        """Note a call under torch.func, and its inputs."""
        self._note(call, [*inputs])

    def _note(self, call: Any, inputs: Sequence[Tensor]) -> None:
        context = here()
        if not context.recomputing:
            self.hold("saved inputs", inputs)
            self.labels[call.label] += 1
            self._called[call] = call.label, self.labels[call.label]
            self.outermost += not (context.inside or context.functions)

    def _innermost(self, calls: Sequence[Any]) -> CalledAs | None:
        if not calls:
            return None
        return self._called.get(calls[-1], (calls[-1].label, 0))

    def words_of(self, called: CalledAs) -> str:
        """Return the name of a call, with its number if others have the same label."""
        label, number = called
        count = self.labels[label]
        return f"{label} (call {number} of {count})" if number and count > 1 else label


def _saved_by_policies(root: Any) -> list[Tensor]:
    """Return what policies save of a graph whose backward starts."""
    out = SimpleNamespace(grad_fn=root, requires_grad=True)
    calls: dict[int, Any] = {}
    found: list[Any] = []
    for handle in (h for node, _ in nodes_of([out]) for h in handles_at(node)):
        if handle.residual is not None:
            found.append(handle.residual)
        elif handle.call.planned is not None:
            calls[id(handle.call)] = handle.call.planned
    for planned in calls.values():
        found += planned.residuals_held()
    return [t for residual in found for t in tensors_in(residual.stored())]


# --- Its peak ---


def _peak(changes: Sequence[MemoryChange], watch: StepWatch, inputs: Inputs) -> Peak:
    theirs = [*_theirs(changes)]
    seen = timeline_of("", theirs)
    end = seen.bytes.index(seen.peak) + 1 if seen.peak > 0 else 0
    holders = _holders(theirs[:end], watch, inputs)
    op = seen.peak_op if end else ""
    first = [op for op in watch.ops if op.node < 0 and not op.again]
    covered = sum(bool(op.called) for op in first) / max(1, len(first))
    calls, is_only = watch.outermost, watch.labels.total() == 1
    is_whole = is_only and covered >= _WHOLE
    advice = advice_on(holders, watch.again, calls=calls, is_whole=is_whole)
    return Peak(sum(h.nbytes for h in holders), op, tuple(holders), advice)


_WHOLE = 0.7  # of the operations of a forward: then the call is the whole model


def _theirs(changes: Sequence[MemoryChange]) -> Iterator[MemoryChange]:
    """Yield the changes but for copies that are kept to put tensors back."""
    ours: set[Any] = set()
    for change in changes:
        if change.nbytes > 0 and OURS in change.running:
            ours.add(change.place)
        elif change.nbytes < 0 and change.place in ours:
            ours.discard(change.place)
        else:
            yield change


def _holders(
    changes: Sequence[MemoryChange], watch: StepWatch, inputs: Inputs
) -> list[Holder]:
    """Return what holds the bytes that are alive after some changes."""
    # What is alive, each with the operation that ran when it was made, or before.
    alive: dict[Any, tuple[MemoryChange, int]] = {}
    last = 0
    for change in changes:
        marks = [name for name in change.running if name.startswith(MARK)]
        last = int(marks[-1].removeprefix(MARK)) if marks else last
        alive.pop(change.place, None)
        if change.nbytes > 0:
            alive[change.place] = change, last
    is_early = bool(watch.ops) and watch.ops[last].node < 0  # before the backward
    # By holder, the bytes of each value that is like others.
    held: dict[tuple[PeakHolder, str], dict[HeldValues, list[int]]]
    held = defaultdict(lambda: defaultdict(list))
    for change, i in alive.values():
        kind, name, like = _sorted(watch, change, i, is_early=is_early)
        held[kind, name][like].append(change.nbytes)
    storages: dict[int, tuple[Tensor, Tensor]] = {}
    for t in inputs.tensors:
        for part in parts(t):
            storages.setdefault(storage_id(part), (t, part))
    for t, part in storages.values():  # what is alive before the step
        kind = "parameters" if _inputs.is_parameter(t) else "inputs"
        like = HeldValues("", part.dtype, tuple(part.shape), "", 0, 0)
        held[kind, NAMES[kind]][like].append(part.untyped_storage().nbytes())
    sizes = {key: sum(map(sum, each.values())) for key, each in held.items()}
    found: list[Holder] = []
    for key, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        each = held[key].items()
        values = [replace(v, count=len(n), nbytes=sum(n)) for v, n in each]
        values.sort(key=lambda value: -value.nbytes)
        share = size / max(1, sum(sizes.values()))
        found += [Holder(*key, size, share, tuple(values))] if size else []
    return found


def _sorted(
    watch: StepWatch, change: MemoryChange, i: int, *, is_early: bool
) -> tuple[PeakHolder, str, HeldValues]:
    """Return what holds an allocation, and what it is, but for counts and bytes."""
    made = watch.made.get((i, change.place[1]))
    meta = (None, ()) if made is None else (made.dtype, made.shape)
    if i >= len(watch.ops):
        return "residuals", NAMES["residuals"], HeldValues("", *meta, "", 0, 0)
    op = watch.ops[i]
    # The operation in whose forward or backward it ran; -1 if that is unknown.
    is_gradient = op.node >= 0 and not op.again
    origin = watch.origins.get(op.node, -1) if is_gradient else i
    maker = watch.ops[origin] if origin >= 0 else op
    value = HeldValues(maker.name, *meta, maker.source, 0, 0, is_gradient)
    known = None if made is None else watch.kinds.get(made.ref.address)
    kind: PeakHolder = "loss" if -1 < watch.last < origin else "residuals"
    if known == "gradients":
        kind = known
    elif op.again:
        return "recompute", f"recompute of {watch.words_of(op.again)}", value
    elif known is not None:
        kind = known
    elif op.saves and op.node < 0:
        kind = "policy"
    elif op.node >= 0 and watch.labels and (origin < 0 or maker.called or maker.again):
        kind = "cotangents"
    elif op.called and op.node < 0:
        if is_early:
            return "recompute", f"forward of {watch.words_of(op.called)}", value
        kind = "residuals"
    return kind, NAMES[kind], value
