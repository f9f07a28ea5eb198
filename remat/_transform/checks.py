"""Refuses what would be lost or wrong, and says who did it, at which line.

    of a forward      it changes an input, or keeps its graph
    of a recompute    it computes something else, or reads what was changed since

Invariant: a check raises an error or returns what it found. None changes a value.
Rejected: methods of the call. What a check depends on would be hidden in its state.
"""

import contextlib
import gc
import operator
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.context import is_under_mode
from remat._base.errors import CaptureError, MutationError, RecomputeError
from remat._base.operators import DETACH, Observer
from remat._base.program import InputIndex, PerInput, PerResult
from remat._base.tensors import parts, version_of, versions_of
from remat._base.types import TENSORS
from remat._graph.graph import Edge, edge_of, leads_to, reached_inputs
from remat._graph.handles import INPUT_CHANGED
from remat._reach.reach import Reach
from remat._reach.result_walk import Hidden
from remat._torch.autograd import is_graph_held, nodes_behind
from remat._torch.graphs import forget_saved_by_traced
from remat._torch.levels import base_tensor, current_layer
from remat._torch.modes import call_kernel, no_torch_functions, unseen
from remat._torch.tensors import storage_id
from remat._transform.changes import changes_of
from remat._transform.leaves import addresses_of


_requires_grad = operator.attrgetter("requires_grad")


# --- What a forward must not do ---


def refuse_changed_inputs(
    origin: Reach,
    inputs: Sequence[Tensor],
    inner: Sequence[Tensor],
    versions: Sequence[int | None],
    needs: PerInput,
    updated: Container[InputIndex],
    run: Callable[[Sequence[Tensor]], object],
) -> None:
    """Refuse a function that changed an input, or made one require grad."""
    now = [*map(_requires_grad, inner)]
    if versions == versions_of(inputs) and needs == now:
        return
    for i, t in enumerate(inputs):
        if version_of(t) != versions[i] and i not in updated:
            raise changed_inside(origin, i, changes_of(origin, inner, run))
        if not needs[i] and inner[i].requires_grad:
            name, label = origin.name_of(i), origin.label
            raise MutationError(_REQUIRES_GRAD.format(name=name, label=label))


def changed_inside(
    origin: Reach, index: InputIndex | None, changes: Any = None
) -> MutationError:
    """Return the error that a function changed an input, which `changes` may tell."""
    name = "an input" if index is None else origin.name_of(index)
    change = changes.get(index, "") if changes else ""
    by = f", by {change}" if change else ""
    option = _OPTION if change.startswith(_ACTIVATIONS) else ""
    message = _IN_PLACE.format(name=name, label=origin.label, by=by, option=option)
    return MutationError(message)


def refuse_backward(
    program: Any, inner: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Refuse a function that called backward(), which left gradients on its inputs."""
    for t, original in zip(inner, inputs, strict=True):
        if t is not original and t.requires_grad and t.grad is not None:
            state = getattr(program, "state", None)
            if state is not None and state.leaf_changes.accumulates:
                return  # the forward did so on the user's leaves: that is done once
            label = getattr(program, "label", "a vjp")
            raise CaptureError(_BACKWARD.format(label=label))


def refuse_assigned_data(
    origin: Reach, inputs: Sequence[Tensor], inner: Sequence[Tensor], needs: PerInput
) -> None:
    """Refuse a function that assigned to `.data` of an input."""
    if current_layer() is not None:
        return
    for i in compress(range(len(inputs)), needs):
        if inputs[i] is inner[i]:  # the user's own leaves are watched
            continue
        there, now = addresses_of([inputs[i]]), addresses_of([inner[i]])
        if there is not None and now is not None and there != now:
            raise changed_inside(origin, i)


def refuse_leaks(
    reach: Reach,
    inner: Sequence[Tensor],
    hidden: Sequence[Hidden],
    *,
    is_new: bool = False,
) -> bool:
    """Refuse a function if something holds its graph, which should be gone by now.

    An attribute may hold it, of a tensor that was computed and that nobody else holds:
    a cycle that the garbage collector does not see. Such attributes are taken off, and
    so is what traced Functions save, which torch holds in the same way. Return whether
    these held it, and nothing else.
    Where nothing else can hold the graph, one is only looked for if the call `is_new`.
    """
    # A mode around this holds results for its call, which looks itself.
    if is_under_mode() or not is_graph_held(inner):
        return False
    if reach.is_contained and not is_new:
        return False
    torch.clear_autocast_cache()  # an autocast that is off by now may have made it
    gc.collect()
    if not is_graph_held(inner):
        return False
    _let_go_of_computed(inner)
    if is_graph_held(inner):
        gc.collect()  # what is left of traced Functions leads to it by their classes
    is_held = is_graph_held(inner)
    if is_held and not reach.is_contained:
        message = _LEAKED.format(label=reach.label)
        if hidden:
            message += hidden[0].told(_MAY_HIDE, reach.label)
        raise CaptureError(message)
    return not is_held


def _let_go_of_computed(leaves: Sequence[Tensor]) -> None:
    """Take off what may lead back to itself, of tensors and the nodes behind them."""
    # A mode of ours refuses to look at tensors of other levels.
    with no_torch_functions():
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        ends = {*map(edge_of, leaves)}
        others: set[Edge] = set()
        made = [t for t in tensors if t.grad_fn]
        computed = [t for t in made if leads_to(edge_of(t), ends, others)]
    for node in nodes_behind(t.grad_fn for t in computed):
        forget_saved_by_traced(node)
    for tensor in computed:
        if type(tensor) in TENSORS:  # those of other classes hold what they wrap
            vars(tensor).clear()


# --- What a recompute must do ---


def check_differentiable(origin: Reach, outs: Sequence[Any], then: PerResult) -> None:
    """Check that outputs require grad where those of the forward did."""
    now = [*map(_requires_grad, outs)]
    if now != then and now != then[: len(now)]:
        message = _GRADLESS.format(label=origin.label, now=now, then=then)
        raise RecomputeError(message)


def check_reached(
    origin: Reach,
    outs: Sequence[Any],
    inputs: Sequence[Tensor],
    missing: Sequence[InputIndex],
) -> None:
    """Check that the graph of outputs reaches the inputs that have no gradient."""
    reached = {*reached_inputs(outs, inputs).inputs}
    for i in missing:
        if i not in reached:
            name = origin.name_of(i)
            raise RecomputeError(_LOST.format(name=name, label=origin.label))


def refuse_needed(
    origin: Reach, needed: Collection[InputIndex], changed: Sequence[InputIndex]
) -> None:
    """Refuse to recompute on inputs that were changed and are needed for it."""
    for i in changed:
        if i in needed:
            name = f"`{origin.name_of(i)}`"
            raise MutationError(INPUT_CHANGED.format(name=name, label=origin.label))


def enter_refusing_reads(
    origin: Reach,
    inputs: Sequence[Tensor],
    changed: Sequence[InputIndex],
    state: AbstractContextManager[Any],
    casts_anew: bool = False,
) -> AbstractContextManager[Any]:
    """Enter `state`, and refuse reads of `changed` inputs; return what exits both.

    If it `casts_anew`, reads of casts of inputs in autocast's cache are refused, too:
    they may be of later values.
    """
    refused = RefuseReads()
    for i in changed:
        name: Callable[[], str] = lambda i=i: f"`{origin.name_of(i)}`"
        refused.refuse(inputs[i], name)
        if casts_anew and inputs[i].is_leaf and inputs[i].requires_grad:
            refused.may_be_cast = name
    with contextlib.ExitStack() as both:
        both.enter_context(state)
        both.enter_context(refused)
        return both.pop_all()


class RefuseReads(Observer):
    """Refuses any operation that reads the memory of some tensors.

    It is entered first: a mode of a replay, inside, leaves operations out.
    """

    unseen = frozenset({DETACH})  # a detached alias reads nothing

    # Names a leaf that autocast's cache may have, if that must be off.
    may_be_cast: Callable[[], str] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, Callable[[], str]] = {}  # by the number of a storage
        self._held: list[Tensor] = []  # so that no other has their numbers

    def refuse(self, tensor: Tensor, name: Callable[[], str]) -> None:
        """Refuse to read a tensor from now on, and what shares its memory."""
        self._held.append(tensor)
        with unseen():  # to ask a sparse one for its parts reads it
            for storage in _storages_of(base_tensor(tensor)):
                self._names.setdefault(storage, name)

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._refuse(tree_leaves((args, kwargs)), func)
        return call_kernel(func, *args, **kwargs)

    @override
    def note_unseen_reads(self, values: Sequence[Any]) -> None:
        self._refuse(values, "what torch compiles by itself")

    def _refuse(self, values: Iterable[Any], what: Any) -> None:
        if self.may_be_cast is not None and torch.is_autocast_cache_enabled():
            raise MutationError(_READ.format(name=self.may_be_cast(), what=_INSIDE))
        for value in values:
            found = _storages_of(value) if isinstance(value, Tensor) else ()
            for storage in self._names.keys() & found:
                name = self._names[storage]()
                raise MutationError(_READ.format(name=name, what=what))


def _storages_of(tensor: Tensor) -> list[int]:
    try:
        return [*map(storage_id, parts(tensor))]
    except CaptureError:
        # Opaque layouts cannot be told apart. Where one was changed, none is read.
        return [-1]


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
    "is kept in a list, an attribute or a global, say. A call under torch.func and a "
    "chain are one node of the graph, so its gradient would be lost. Return it instead."
)
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
_READ = (
    "remat: {name} was changed in place between the forward and the backward, and the "
    "recompute reads it (in {what}). Change a copy, or change it after the "
    "backward."
)
_INSIDE = "a region of autocast inside the function, which may find an earlier cast"


DECIDED = (
    " If it chooses by floating numbers, as a router does, which a device may compute "
    "a little differently each time, pass policy=remat.policies.decisions_saveable."
)
