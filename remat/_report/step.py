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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, autograd, is_grad_enabled
from typing_extensions import override

from remat._base.context import Observe, here
from remat._base.source import user_line
from remat._base.tensors import parts
from remat._base.types import Fn
from remat._graph.graph import handles_at, nodes_of
from remat._report.examine import inputs_kept
from remat._report.inputs import (
    Inputs,
    Ledger,
    has_values,
    is_parameter,
    tensors_in,
    undoing,
)
from remat._report.peak import (
    NAMES,
    Built,
    HeldValues,
    Holder,
    Peak,
    PeakHolder,
    advice_on,
)
from remat._report.timeline import MemoryChange, changes_in, running_operation
from remat._torch import (
    AccumulateGrad,
    base_tensor,
    current_node,
    marked,
    nodes_made,
    sequence_number,
    storage_id,
)
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
                if not all(map(has_values, inputs.tensors)):
                    return None
                for t in inputs.tensors:
                    if t.is_leaf:
                        t.grad = None
                with watch:
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
    watch.note_gradients(g for g in grads if g is not None)
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
    watch.note_gradients([*made, *grads])
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


# --- What runs ---


class WatchedOp(NamedTuple):
    """One operation of a step."""

    name: str
    source: str
    node: int  # the number of the node whose backward it is in; -1 in a forward
    called: str  # the name of the call whose forward it is in; "" if it is in none
    again: str  # of the innermost call whose recompute it is in; "" if it is in none
    saves: bool  # whether a policy of a call under torch.func may save its result


StorageNumber: TypeAlias = tuple[int, int]  # the operation that made it, and its id


class MadeStorage(NamedTuple):
    """A storage that an operation made, and the tensor that it was made for."""

    storage: StorageNumber
    dtype: Any
    shape: tuple[int, ...]


class StepWatch(Ledger):
    """A mode that notes the operations of a step and the storages that they make."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self.ops: list[WatchedOp] = []
        self.made: dict[tuple[int, int], MadeStorage] = {}  # by operation and address
        # For each node, by number, the first operation of its forward.
        self.origins: dict[int, int] = {}
        # Storages: that calls save as inputs; that policies save; of the parameters'
        # gradients.
        self.inputs: set[StorageNumber] = set()
        self.saved: set[StorageNumber] = set()
        self.gradients: set[StorageNumber] = set()
        self._makers: dict[int, int] = {}  # of storages, by id: the last operation
        # Calls that were not recomputed: how many have each label; how many are in no
        # other; the index of the last operation of a forward.
        self.names: dict[str, int] = {}
        self.outermost, self.last = 0, -1
        self.ran_backward = False
        self.differentiates = False  # whether a backward is (`create_graph=True`)
        self.packing: dict[str, None] = {}  # the labels of calls under base autograd
        self._named: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    @override
    def __enter__(self) -> Any:
        self._reporter, here().reporter = here().reporter, self
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        here().reporter = self._reporter

    @override
    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        node, i, context = current_node(), len(self.ops), here()
        if node is not None and is_grad_enabled() and not context.recomputing:
            self.differentiates = True
        if node is not None and not self.ran_backward:
            self.ran_backward = True
            self.saved.update(self._numbers_in(_saved_by_policies(node)))
        again = self._name_of(context.recomputing[-1]) if context.recomputing else ""
        called = self._name_of(context.inside[-1]) if context.inside else ""
        called = called or ("a call" if context.functions else "")
        self.last = i if called and not again else self.last
        name = getattr(func, "overloadpacket", func).__name__
        saves = bool(context.functions) and context.policy is not None
        number = -1 if node is None else sequence_number(node)
        where = name, user_line(), number, called, again, saves
        self.ops.append(WatchedOp(*where))
        self.origins.setdefault(nodes_made() - 1, i)
        with marked(f"{MARK}{i}"):
            result = super().call(func, args, kwargs)
        given = {storage_id(part) for part in _parts_in((args, kwargs))}
        for part in _parts_in(result):
            if storage_id(part) not in self.entries and not part._is_zerotensor():
                if storage_id(part) not in given:
                    self._makers[storage_id(part)] = i
                place = i, part.untyped_storage().data_ptr()
                meta = self._numbers_in([part])[0], part.dtype, tuple(part.shape)
                self.made.setdefault(place, MadeStorage(*meta))
        return result

    def _numbers_in(self, tree: Any) -> list[StorageNumber]:
        """Number storages by their makers: a freed one leaves its id to others."""
        ids = map(storage_id, _parts_in(tree))
        return [(self._makers.get(key, -1), key) for key in ids]

    @override
    def _preserve(self, tensor: Tensor) -> None:
        with marked(OURS):
            super()._preserve(tensor)

    def note_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Note what is a gradient of a parameter."""
        self.gradients.update(self._numbers_in([*tensors]))

    # --- Calls ---

    def asked(self, block: Any, lowering: Any, args: tuple[Any, ...]) -> Any:
        """Return how a rematerialized function is called: as it is."""
        del self, args
        return lowering, block._options

    def observe(self, call: Any, observe: Observe | None) -> Observe:
        """Note a call under base autograd, and what it saves of its inputs."""
        self.packing[call.label] = None
        self._note(call, [*inputs_kept(call)])
        return observe or (lambda _position, _tensor: None)

    def entered(self, call: Any, inputs: Sequence[Tensor]) -> None:
        """Note a call under torch.func, and its inputs."""
        self._note(call, [base_tensor(t) for t in inputs])

    def _note(self, call: Any, inputs: Sequence[Tensor]) -> None:
        context = here()
        if context.recomputing:
            return
        self.inputs.update(self._numbers_in(inputs))
        count = self.names[call.label] = self.names.get(call.label, 0) + 1
        self._named[call] = f"{call.label}\0{count}"
        self.outermost += not (context.inside or context.functions)

    def _name_of(self, call: Any) -> str:
        return self._named.get(call, call.label)

    def words_of(self, called: str) -> str:
        """Return the name of a call, with its number if others have the same label."""
        label, _, number = called.partition("\0")
        count = self.names.get(label, 1)
        return f"{label} (call {number} of {count})" if number and count > 1 else label


def _parts_in(tree: Any) -> list[Tensor]:
    return [part for t in tensors_in(tree) for part in parts(base_tensor(t))]


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


# --- The peak ---


def _peak(changes: Sequence[MemoryChange], watch: StepWatch, inputs: Inputs) -> Peak:
    theirs = [*_theirs(changes)]
    live = [*accumulate(change.nbytes for change in theirs)]
    end = live.index(max(live)) + 1 if live and max(live) > 0 else 0
    holders = _holders(theirs[:end], watch, inputs)
    first = [op for op in watch.ops if op.node < 0 and not op.again]
    built = Built(
        calls=watch.outermost,
        nested=sum(watch.names.values()) - watch.outermost,
        covered=sum(bool(op.called) for op in first) / max(1, len(first)),
        again=tuple(c for c in watch.packing if c in DIFFERENTIATED_AGAIN),
        differentiates=watch.differentiates,
    )
    op = running_operation(theirs[end - 1].running) if end else ""
    nbytes = sum(h.nbytes for h in holders)
    return Peak(nbytes, op, tuple(holders), advice_on(holders, built))


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
    known = [
        (_sorted(watch, change, i, is_early=is_early), change.nbytes)
        for change, i in alive.values()
    ]
    known += _before(inputs)
    sizes, counts = Counter(), Counter(key for key, _ in known)
    for key, nbytes in known:
        sizes[key] += nbytes
    held: dict[tuple[PeakHolder, str], list[HeldValues]] = defaultdict(list)
    for (kind, name, like), nbytes in sizes.most_common():
        value = replace(like, count=counts[kind, name, like], nbytes=nbytes)
        held[kind, name or NAMES[kind]].append(value)
    found = [(sum(v.nbytes for v in values), key) for key, values in held.items()]
    found.sort(key=lambda each: -each[0])
    total = sizes.total()
    return [Holder(*k, n, n / total, tuple(held[k])) for n, k in found if n]


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


_OfHolder: TypeAlias = tuple[PeakHolder, str, HeldValues]  # without counts and bytes


def _before(inputs: Inputs) -> Iterator[tuple[_OfHolder, int]]:
    """Yield what is alive before the step: parameters and inputs."""
    seen: set[int] = set()
    for t in inputs.tensors:
        kind: PeakHolder = "parameters" if is_parameter(t) else "inputs"
        for part in parts(t):
            if storage_id(part) not in seen:
                seen.add(storage_id(part))
                like = HeldValues("", part.dtype, tuple(part.shape), "", 0, 0)
                yield (kind, "", like), part.untyped_storage().nbytes()


def _sorted(
    watch: StepWatch, change: MemoryChange, i: int, *, is_early: bool
) -> _OfHolder:
    """Return what holds an allocation, and what it is, but for counts and bytes."""
    made = watch.made.get((i, change.place[1]))
    storage, dtype, shape = made or MadeStorage((-1, -1), None, ())
    if i >= len(watch.ops):
        return "residuals", "", HeldValues("", dtype, shape, "", 0, 0)
    op = watch.ops[i]
    # The operation in whose forward or backward it ran; -1 if that is unknown.
    is_gradient = op.node >= 0 and not op.again
    origin = watch.origins.get(op.node, -1) if is_gradient else i
    maker = watch.ops[origin] if origin >= 0 else op
    key = HeldValues(maker.name, dtype, shape, maker.source, 0, 0, is_gradient)
    if storage in watch.gradients:
        return "gradients", "", key
    if op.again:
        return "recompute", f"recompute of {watch.words_of(op.again)}", key
    if storage in watch.inputs:
        return "saved inputs", "", key
    if storage in watch.saved or (op.saves and op.node < 0):
        return "policy", "", key
    if op.node >= 0 and watch.names and (origin < 0 or maker.called or maker.again):
        return "cotangents", "", key
    if op.called and op.node < 0:
        if is_early:
            return "forward", f"the forward of {watch.words_of(op.called)}", key
        return "residuals", "", key
    return "loss" if -1 < watch.last < origin else "residuals", "", key
