"""Runs a step, a forward and its backward, and says what holds its peak.

Called by `explain` for a function that returns a loss. The profiler counts the bytes
(`timeline`), and a mode says which operation made them (`watching`).

Invariant: the bytes are those of `memory_timeline`, plus those of the parameters and
inputs. Parameters, `.grad`, buffers and random streams are put back.
Rejected: `.backward()`. It would add to the user's `.grad`, and run the hooks of
optimizers that step in the backward.
Rejected: an estimate from the record, as in `peak`. It does not know the backward.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._base.context import here
from remat._base.parts import parts
from remat._base.types import Fn
from remat._report.bitwise import has_values
from remat._report.examine import undone
from remat._report.inputs import Inputs, is_parameter, tensors_in
from remat._report.peak import Built, HeldValues, Holder, Kind, Peak, advice_on
from remat._report.timeline import MemoryChange, changes_in, name_of
from remat._report.watching import MARK, OURS, StepWatch, WatchedOp
from remat._torch import AccumulateGrad, storage_id


def peak_of(fn: Fn, args: Any, kwargs: Any, *, again: bool) -> Peak | None:
    """Run a step and return its peak; None if the function is not one of a step.

    A step is a function that returns a loss, or one that runs a backward itself.
    """
    for _ in range(again):
        with undone(fn, args, kwargs, StepWatch) as (inputs, watch):
            warm = _Step(fn, args, kwargs, inputs, watch)
            warm.run()
        if not warm.is_step:
            return None
    with undone(fn, args, kwargs, StepWatch) as (inputs, watch):
        if not all(map(has_values, inputs.tensors)):
            return None
        step = _Step(fn, args, kwargs, inputs, watch)
        changes = changes_in(step.run)
    return _peak(changes, watch, inputs) if step.is_step else None


class _Step:
    """One forward and its backward.

    Attributes:
        is_step: whether there was a backward.
    """

    def __init__(
        self, fn: Fn, args: Any, kwargs: Any, inputs: Inputs, watch: StepWatch
    ) -> None:
        self._fn, self._inputs, self._watch = fn, inputs, watch
        self._own = args, kwargs
        self.is_step = False

    def run(self) -> Any:
        """Run it, and return what is alive at its end; None if it has no backward."""
        context = here()
        before, context.examining = context.examining, self._watch
        try:
            return self._run()
        finally:
            context.examining = before

    def _run(self) -> Any:
        inputs, watch = self._inputs, self._watch
        leaves = [t for t in inputs.tensors if t.is_leaf]
        for t in leaves:
            t.grad = None
        differentiated = any(t.requires_grad for t in inputs.tensors)
        if not differentiated:
            args, kwargs = self._own
            result = self._fn(*args, **kwargs)
            if self._ran_backward(result, leaves):
                return result
            del result
        result = self._fn(*inputs.args, **inputs.kwargs)
        outs = [t for t in tensors_in(result) if t.requires_grad]
        if outs and all(t.numel() == 1 for t in outs):
            self.is_step = True
            wrt = _differentiated(outs, inputs.run_on)
            grads = torch.autograd.grad(outs, wrt, allow_unused=True)
            watch.note_gradients(g for g in grads if g is not None)
            return result, grads
        if not outs and self._ran_backward(result, leaves):
            return result
        return None

    def _ran_backward(self, result: Any, leaves: Sequence[Tensor]) -> bool:
        """Say whether the function ran a backward; note the gradients if it did."""
        self.is_step = any(op.node >= 0 for op in self._watch.ops)
        if self.is_step:
            made = [t for t in tensors_in(result) if t.numel() > 1]
            grads = (t.grad for t in leaves)
            self._watch.note_gradients([*made, *(g for g in grads if g is not None)])
        return self.is_step


def _differentiated(outs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return what a backward gives gradients: the inputs, and other leaves."""
    found = [t for t in given if t.requires_grad]
    known = {id(t) for t in found}
    seen: set[Any] = {t.grad_fn for t in found}
    todo = [t.grad_fn for t in outs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [behind for behind, _ in node.next_functions]
        if type(node) is AccumulateGrad and id(node.variable) not in known:
            found.append(node.variable)
    return found


# --- The peak ---


class _Key(NamedTuple):
    """What makes values alike."""

    op: str
    dtype: Any
    shape: tuple[int, ...]
    source: str
    is_gradient: bool


_Found = dict[tuple[Kind, str], dict[_Key, list[int]]]


def _peak(changes: Sequence[MemoryChange], watch: StepWatch, inputs: Inputs) -> Peak:
    theirs = [*_theirs(changes)]
    live = [*accumulate(change.nbytes for change in theirs)]
    end = live.index(max(live)) + 1 if live and max(live) > 0 else 0
    found: _Found = defaultdict(lambda: defaultdict(list))
    sorting = _Sorting(watch, theirs[:end])
    for change, i in sorting.alive():
        kind, name, key = sorting.sorted(change, i)
        found[kind, name][key].append(change.nbytes)
    for kind, name, key, nbytes in _before(inputs):
        found[kind, name][key].append(nbytes)
    holders = _holders(found)
    forward = [op for op in watch.ops if op.node < 0 and not op.again]
    covered = sum(bool(op.called) for op in forward) / max(1, len(forward))
    nested = sum(watch.names.values()) - watch.outermost
    op = name_of(theirs[end - 1].running) if end else ""
    twice = watch.again, watch.differentiates
    built = Built(watch.outermost, nested, covered, *twice)
    advice = advice_on(holders, built)
    return Peak(sum(h.nbytes for h in holders), op, holders, advice)


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


def _before(inputs: Inputs) -> Iterator[tuple[Kind, str, _Key, int]]:
    """Yield what is alive before the step: parameters and inputs."""
    seen: set[int] = set()
    for t in inputs.tensors:
        is_kept = is_parameter(t)
        kind: Kind = "parameters" if is_kept else "inputs"
        name = "the parameters" if is_kept else "the inputs of the step, and buffers"
        for part in parts(t):
            if storage_id(part) not in seen:
                seen.add(storage_id(part))
                key = _Key("", part.dtype, tuple(part.shape), "", False)
                yield kind, name, key, part.untyped_storage().nbytes()


class _Sorting:
    """Sorts what is alive at the peak by what holds it."""

    def __init__(self, watch: StepWatch, changes: Sequence[MemoryChange]) -> None:
        self._watch, self._changes = watch, changes

    def alive(self) -> list[tuple[MemoryChange, int]]:
        """Return what is alive after the changes, with the operations that made it."""
        alive: dict[Any, tuple[MemoryChange, int]] = {}
        last = 0
        for change in self._changes:
            last = _marked(change, last)
            if change.nbytes > 0:
                alive[change.place] = change, last
            else:
                alive.pop(change.place, None)
        # The last operation that began: where the peak is.
        self._in_forward = bool(self._watch.ops) and self._watch.ops[last].node < 0
        return [*alive.values()]

    def sorted(self, change: MemoryChange, i: int) -> tuple[Kind, str, _Key]:
        """Return what holds an allocation, and what it is."""
        watch = self._watch
        made = watch.made.get((i, change.place[1]))
        meta = (None, ()) if made is None else (made.dtype, made.shape)
        if i >= len(watch.ops):
            return "residuals", _NAMES["residuals"], _Key("", *meta, "", False)
        op, storage = watch.ops[i], -1 if made is None else made.storage
        origin = self._origin(op, i)
        kind, name = self._holder(op, origin, storage)
        maker = watch.ops[origin] if origin >= 0 else op
        is_gradient = op.node >= 0 and not op.again
        key = _Key(maker.name, *meta, maker.source, is_gradient)
        return kind, name or _NAMES[kind], key

    def _origin(self, op: WatchedOp, i: int) -> int:
        """Return the forward operation that an operation belongs to, -1 if unknown."""
        if op.node < 0 or op.again:
            return i
        return self._watch.origins.get(op.node, -1)

    def _holder(self, op: WatchedOp, origin: int, storage: int) -> tuple[Kind, str]:
        watch = self._watch
        if storage in watch.gradients:
            return "gradients", ""
        if op.again:
            return "recompute", f"recompute of {watch.words_of(op.again)}"
        if storage in watch.inputs:
            return "saved inputs", ""
        if storage in watch.saved or (op.saves and op.node < 0):
            return "policy", ""
        maker = watch.ops[origin] if origin >= 0 else None
        if op.node >= 0 and (maker is None or maker.called or maker.again):
            return "cotangents", ""
        if op.called and op.node < 0:
            if self._in_forward:
                return "forward", f"the forward of {watch.words_of(op.called)}"
            return "residuals", ""
        return ("loss", "") if -1 < watch.last < origin else ("residuals", "")


_NAMES: dict[Kind, str] = {
    "gradients": "the gradients of the parameters",
    "saved inputs": "the inputs that remat calls save",
    "policy": "the results that policies save",
    "cotangents": "the gradients that pass through remat calls",
    "residuals": "the operations outside of remat calls",
    "loss": "the operations after the last remat call: the head and the loss",
}


def _marked(change: MemoryChange, last: int) -> int:
    """Return the operation that ran at a change, else the last one before."""
    for name in reversed(change.running):
        if name.startswith(MARK):
            return int(name.removeprefix(MARK))
    return last


def _holders(found: _Found) -> tuple[Holder, ...]:
    total = sum(sum(n) for values in found.values() for n in values.values())
    holders = []
    for (kind, name), values in found.items():
        held = [
            HeldValues(*key[:4], len(sizes), sum(sizes), key.is_gradient)
            for key, sizes in values.items()
        ]
        held.sort(key=lambda v: -v.nbytes)
        nbytes = sum(v.nbytes for v in held)
        if nbytes:
            share = nbytes / total
            holders.append(Holder(kind, name, nbytes, share, tuple(held)))
    return tuple(sorted(holders, key=lambda holder: -holder.nbytes))
