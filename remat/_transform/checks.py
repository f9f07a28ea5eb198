"""Checks that a call can be recomputed, and that a recompute is what the forward was.

`forward` and `primal` call these under torch.func; `saved` shares `reading_refused`.
Errors name inputs as the snapshot of the call does.

Invariant: a check raises an error or returns what it found. None changes a value.
Rejected: methods of the call. What a check depends on would be hidden in its state.
"""

import contextlib
import functools
import gc
import operator
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.context import is_followed
from remat._base.errors import CaptureError, MutationError, RecomputeError
from remat._base.parts import parts
from remat._base.tensors import version_of, versions_of
from remat._base.types import TENSORS
from remat._capture.result_walk import Hidden
from remat._capture.snapshot import Snapshot
from remat._live.reach import Origin
from remat._torch import (
    base_tensor,
    call_kernel,
    current_layer,
    is_graph_held,
    storage_id,
)
from remat._transform.changes import changes_of
from remat._transform.keeping import keeper_of
from remat._transform.leaves import addresses_of
from remat._transform.reached import reached_inputs


_name = operator.attrgetter("__name__")
_requires_grad = operator.attrgetter("requires_grad")


# --- What a forward must not do ---


def refuse_changed_inputs(
    snapshot: Origin,
    inputs: Sequence[Tensor],
    inner: Sequence[Tensor],
    versions: Sequence[int | None],
    needs: Sequence[bool],
    updated: Container[int],
    run: Callable[[Sequence[Tensor]], object],
) -> None:
    """Refuse a function that changed an input, or made one require grad.

    Args:
        snapshot: of the call.
        inputs: of the call.
        inner: what the function ran on.
        versions: how often each input had been changed.
        needs: which inputs require grad.
        updated: the inputs that it may change.
        run: runs it on other inputs.

    Raises:
        MutationError: it did.
    """
    now = [*map(_requires_grad, inner)]
    if versions == versions_of(inputs) and needs == now:
        return
    for i, t in enumerate(inputs):
        if version_of(t) != versions[i] and i not in updated:
            raise changed_inside(snapshot, i, changes_of(snapshot, inner, run))
        if not needs[i] and inner[i].requires_grad:
            message = _REQUIRES_GRAD.format(
                name=snapshot.name_of(i), label=snapshot.label
            )
            raise MutationError(message)


def changed_inside(
    snapshot: Origin, index: int | None, changes: Mapping[int, str] | None = None
) -> MutationError:
    """Return the error that a function changed an input in place.

    Args:
        snapshot: of the call.
        index: of the input; None if that is not known.
        changes: the operations that change inputs, by the index of these.
    """
    name = "an input" if index is None else snapshot.name_of(index)
    change = changes.get(index, "") if changes and index is not None else ""
    by = f", by {change}" if change else ""
    option = _OPTION if change.startswith(_ACTIVATIONS) else ""
    message = _IN_PLACE.format(name=name, label=snapshot.label, by=by, option=option)
    return MutationError(message)


def refuse_backward(snapshot: Origin, inner: Sequence[Tensor]) -> None:
    """Refuse a function that called backward(), which left gradients on its inputs.

    Raises:
        CaptureError: it did.
    """
    for t in inner:
        if t.requires_grad and t.grad is not None:
            raise CaptureError(_BACKWARD.format(label=snapshot.label))


def refuse_assigned_data(
    snapshot: Origin,
    inputs: Sequence[Tensor],
    inner: Sequence[Tensor],
    needs: Sequence[bool],
) -> None:
    """Refuse a function that assigned to `.data` of an input.

    Raises:
        MutationError: it did.
    """
    addresses = addresses_of([*compress(inputs, needs)])
    if addresses is None or addresses != addresses_of([*compress(inner, needs)]):
        for i, need in enumerate(needs):
            if need and _was_assigned(inputs[i], inner[i]):
                raise changed_inside(snapshot, i)


def _was_assigned(tensor: Tensor, inner: Tensor) -> bool:
    if type(tensor) not in TENSORS or tensor.layout is not torch.strided:
        return False
    return current_layer() is None and tensor.data_ptr() != inner.data_ptr()


def refuse_leaks(
    snapshot: Snapshot, inner: Sequence[Tensor], hidden: Sequence[Hidden]
) -> None:
    """Refuse a function if something holds its graph, which should be gone by now.

    Args:
        snapshot: of the call.
        inner: what the function ran on.
        hidden: what in its result may hold it.

    Raises:
        CaptureError: it is.
    """
    # A mode around this holds results for its call, which looks itself.
    if snapshot.is_contained or is_followed():
        return
    if not is_graph_held(inner):
        return
    torch.clear_autocast_cache()  # it may be of an autocast that is off by now
    gc.collect()
    if is_graph_held(inner):
        kept = keeper_of(inner, snapshot.code) or _SOMEWHERE
        message = _LEAKED.format(label=snapshot.label, kept=kept)
        if hidden:
            message += hidden[0].told(_MAY_HIDE, snapshot.label)
        raise CaptureError(message)


# --- What a recompute must do ---


def check_differentiable(
    snapshot: Origin, outs: Sequence[Any], then: Sequence[bool]
) -> None:
    """Check that outputs require grad where those of the forward did.

    Raises:
        RecomputeError: they do not.
    """
    now = [*map(_requires_grad, outs)]
    if now != then and now != then[: len(now)]:
        message = _GRADLESS.format(label=snapshot.label, now=now, then=then)
        raise RecomputeError(message)


def check_reached(
    snapshot: Origin,
    outs: Sequence[Any],
    inputs: Sequence[Tensor],
    missing: Sequence[int],
) -> None:
    """Check that the graph of outputs reaches the inputs that have no gradient.

    Raises:
        RecomputeError: it does not reach one, whose gradient would be lost.
    """
    reached = {*reached_inputs(outs, inputs).inputs}
    for i in missing:
        if i not in reached:
            name = snapshot.name_of(i)
            raise RecomputeError(_LOST.format(name=name, label=snapshot.label))


def refuse_needed(
    snapshot: Origin, needed: Collection[int], changed: Sequence[int]
) -> None:
    """Refuse to recompute on inputs that were changed and are needed for it.

    Raises:
        MutationError: there is one.
    """
    for i in changed:
        if i in needed:
            name = snapshot.name_of(i)
            raise MutationError(_NEEDED.format(name=name, label=snapshot.label))


def reading_refused(
    snapshot: Origin,
    inputs: Sequence[Tensor],
    changed: Sequence[int],
    state: AbstractContextManager[Any],
) -> AbstractContextManager[Any]:
    """Return a context in which inputs that were changed are not to be read.

    Args:
        snapshot: of the call.
        inputs: of the recompute.
        changed: which of them were changed since the forward.
        state: the context in which it runs besides.
    """
    refused = RefuseReads()
    for i in changed:
        refused.refuse(inputs[i], functools.partial(_quoted_name_of, snapshot, i))
    both = contextlib.ExitStack()
    both.enter_context(state)
    both.enter_context(refused)
    return both


def _quoted_name_of(snapshot: Origin, i: int) -> str:
    return f"`{snapshot.name_of(i)}`"


class RefuseReads(TorchDispatchMode):
    """Refuses any operation that reads the memory of some tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, Callable[[], str]] = {}  # by the number of a storage
        self._held: dict[int, Tensor] = {}  # so that no other has their numbers
        # Whose storages are not in `_names`.
        self._new: list[tuple[Tensor, Callable[[], str]]] = []

    def refuse(self, tensor: Tensor, name: Callable[[], str]) -> None:
        """Refuse to read a tensor from now on, and what shares its memory.

        Args:
            tensor: the tensor.
            name: returns what messages call it.
        """
        if id(tensor) not in self._held:
            self._held[id(tensor)] = tensor
            self._new.append((tensor, name))

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self._look()
        # A detached alias reads nothing.
        if func is not torch.ops.aten.detach.default:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    self._check(value, func)
        return call_kernel(func, *args, **(kwargs or {}))

    def _look(self) -> None:
        """Note the storages of new tensors: here, as to ask a sparse one reads it."""
        for tensor, name in self._new:
            for storage in _storages_of(base_tensor(tensor)):
                self._names.setdefault(storage, name)
        self._new.clear()

    def _check(self, tensor: Tensor, func: Any) -> None:
        for storage in _storages_of(tensor):
            if storage in self._names:
                name = self._names[storage]()
                raise MutationError(_READ.format(name=name, func=func))


def _storages_of(tensor: Tensor) -> list[int]:
    """Return the numbers of the storages of a tensor.

    Those of opaque layouts cannot be told apart. Where one was changed, none is read.
    """
    try:
        return [*map(storage_id, parts(tensor))]
    except CaptureError:
        return [_OPAQUE]


_OPAQUE = -1  # no storage has this number


_IN_PLACE = (
    "remat: `{name}` was changed in place inside {label}{by}. A recompute would start "
    "from the changed value: work on a copy (`{name}.clone()`) and return it{option}."
)
_OPTION = ", or pass inplace=False if a module does this"
# What the modules of torch that have the option `inplace` call.
_ACTIVATIONS = tuple(
    f"aten.{name}_."
    for name in (
        *("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish"),
        *("relu", "rrelu_with_noise", "selu", "silu", "threshold"),
    )
)
_REQUIRES_GRAD = (
    "remat: `{name}` was made to require grad inside {label}, where its gradient would "
    "be lost. Call requires_grad_() before the call, or on a detached copy inside."
)
_BACKWARD = (
    "remat: {label} calls backward(), whose gradients of its inputs would be lost. "
    "Use torch.autograd.grad with inputs=, and return what is needed."
)
_LEAKED = (
    "remat: a tensor computed inside {label} left it other than by being returned: it "
    "is kept {kept}. A call under torch.func and a chain are one node of the graph, so "
    "its gradient would be lost. Return it instead."
)
_SOMEWHERE = "in a list, an attribute or a global, say"
_MAY_HIDE = (
    " It may be in the {kind} that is returned (`result{where}`), where remat cannot "
    "see it. {remedy}."
)
_GRADLESS = (
    "remat: recomputing {label} gave outputs that require grad: {now}, where in the "
    "forward: {then}. The function must compute the same thing twice."
)
_LOST = (
    "remat: recomputing {label} gave results that do not depend on `{name}`, where in "
    "the forward they did. The function must compute the same thing twice: if it "
    "depends on outside state that changed, pass that state as an argument."
)
_NEEDED = (
    "remat: `{name}` was changed in place between the forward and the backward of "
    "{label}, which reads it. Change a copy, or change it after the backward."
)
_READ = (
    "remat: {name} was changed in place between the forward and the backward, and the "
    "recompute reads it (in {func}). Change a copy, or change it after the "
    "backward."
)
