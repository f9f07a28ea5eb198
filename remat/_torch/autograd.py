"""Autograd: its engine, its graph, its saved tensors, dual numbers.

Invariant: nothing here changes a value. Rejected: public functions, where there are
some. They check again what is known here, which is a third of the cost of a small call.
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks as pop_hooks,
    _push_saved_tensors_default_hooks as push_hooks,
    _top_saved_tensors_default_hooks as top_hooks,
)
from torch._functorch import eager_transforms
from torch.autograd import Function, forward_ad, graph
from torch.autograd.function import once_differentiable

from remat._torch.modes import outside_all_dispatch_modes
from remat._torch.tensors import use_count


MaybeTensors: TypeAlias = tuple[Tensor | None, ...]

Tensors: TypeAlias = tuple[Tensor, ...]

set_grad_enabled = torch._C._set_grad_enabled


# Deleted by: `torch.set_grad_enabled` without its decorator machinery, ten times this.
class grad_mode:  # noqa: N801
    __slots__ = ("_before", "_mode")

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(self._mode)

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self._before)


is_forward_ad_enabled = torch._C._is_fwd_grad_enabled
set_forward_ad = torch._C._set_fwd_grad_enabled


# Deleted by: a public `forward_ad.is_active()`.
def dual_level_active() -> bool:
    """Say whether a `forward_ad.dual_level` is open."""
    return forward_ad._current_level >= 0


def base_dual_level_active() -> bool:
    """Say whether the open dual level is the user's, in which torch.func.jvp raises."""
    return dual_level_active() and eager_transforms.JVP_NESTING == 0


# Deleted by: `torch.autograd.grad` not checking again what the engine checks, which is
# a third of its cost on small graphs.
def pull_back(
    outs: Tensors, cotangents: Tensors, inputs: Tensors, *, create_graph: bool
) -> MaybeTensors:
    """Run the engine from `outs` to `inputs`; free the graph or make another of it."""
    engine: Any = torch.autograd.Variable._execution_engine
    retain, unused = create_graph, True
    return engine.run_backward(
        outs, cotangents, retain, create_graph, inputs, unused, accumulate_grad=False
    )


# Deleted by: a public way to suspend saved-tensor hooks.
def suspend_hooks() -> list[Any]:
    """Take away the hooks for saved tensors, and return what `resume_hooks` takes."""
    suspended: list[Any] = []
    while (hooks := top_hooks(True)) is not None:
        suspended.append(hooks)
        pop_hooks()
    return suspended


def resume_hooks(suspended: list[Any]) -> None:
    """Put back what `suspend_hooks` took away."""
    for hooks in reversed(suspended):
        push_hooks(*hooks)


def hooks_here() -> list[Any]:
    """Return the hooks for saved tensors, innermost first."""
    hooks = suspend_hooks()
    resume_hooks(hooks)
    return hooks


def without_hooks(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn`, whose graph is dropped at once, without hooks for saved tensors."""
    if top_hooks(True) is None:
        return fn(*args)
    suspended = suspend_hooks()
    try:
        return fn(*args)
    finally:
        resume_hooks(suspended)


# Deleted by: public names for these.
are_hooks_allowed: Callable[[], bool] = vars(torch._C._autograd)[
    "_saved_tensors_hooks_is_enabled"
]
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
current_task: Callable[[], int] = torch._C._current_graph_task_id
current_node: Callable[[], Any] = torch._C._current_autograd_node
nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr


# Deleted by: `rrelu` filling its noise before autograd saves it (pytorch issue 193671).
def reads_what_is_written_late() -> bool:
    """Say whether the node that runs saved a tensor that its operation wrote later."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith("RreluWithNoise")


# Deleted by: `GraphExecGroup._get_current_group` being public.
def execution_group() -> Any:
    """Return the `GraphExecGroup` that this thread's backwards are in, or None."""
    return torch._C._get_graph_exec_group()


def when_done(callback: Callable[[], None]) -> None:
    """Have the backward that runs call `callback` when it has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# Deleted by: torch.func refusing only hooks that touch tensors of its levels. Dynamo
# knows the context manager by its identity, so the function inside of it is exchanged.
def leave_hooks_on(is_harmless: Callable[[], bool]) -> None:
    """Let torch.func run under hooks for saved tensors where they are harmless."""
    manager: Any = graph.disable_saved_tensors_hooks
    disabled = manager.__wrapped__

    @functools.wraps(disabled)
    def unless_harmless(error_message: str) -> Iterator[None]:
        if is_harmless():
            yield
        else:
            yield from disabled(error_message)

    for cell in manager.__closure__:
        if cell.cell_contents is disabled:
            cell.cell_contents = unless_harmless
    _HARMLESS[:] = [is_harmless]


_HARMLESS: list[Callable[[], bool]] = []


def are_hooks_left_on() -> bool:
    """Say whether hooks for saved tensors are on that torch.func may run under."""
    return any(is_harmless() for is_harmless in _HARMLESS)


# Deleted by: saved tensors that tell which of them changed.
def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """Return what was saved, changed in place or not: the caller checks that."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if not tells_of("a saved tensor that changed", error):
            raise
        raw = ctx._raw_saved_tensors
        if not all(hasattr(s, "data") for s in raw):
            raise
        return tuple(s.data for s in raw)


# Deleted by: classes of their own for these errors.
def tells_of(what: str, error: BaseException) -> bool:
    """Say whether an error of torch is about this, a key of the table."""
    text = str(error) if isinstance(error, Exception) else ""
    return any(words in text for words in _TEXTS[what])


_TEXTS = {
    "a write to a leaf": ("a leaf Variable that requires grad",),
    "a saved tensor that changed": ("modified by an inplace operation",),
    "a graph that is gone": ("a second time",),
    "a level that has ended": ("escaped from inside a function being vmapped",),
    "a tensor without memory": (
        *("Absent", "data is not allocated yet", "data pointer", "tensor subclass"),
        *("dispatch_on_subclass", "non-wrapper subclass"),
    ),
}


# Deleted by: hooks for single tensors of `ctx.save_for_backward`.
def pack_saved(node: Any, pack: Callable[[Any], Any]) -> bool:
    """Have a node hold what `pack` gives in place of tensors that it saved, if any.

    A call of that brings the tensor back, and the node has its edge.
    """
    each = [(saved, pack(saved.data)) for saved in node._raw_saved_tensors]
    packed = [(saved, new) for saved, new in each if new is not None]
    for saved, new in packed:
        saved.register_hooks(functools.partial(_instead, new), operator.call)
    return bool(packed)


def _instead(new: Any, _: Tensor) -> Any:
    return new


def held_by(node: Any) -> list[Any]:
    """Return what a node holds of what it saved: tensors, or what was packed."""
    return [saved.data for saved in node._raw_saved_tensors]


# Deleted by: nodes that tell when they were made: AccumulateGrad has no sequence
# number.
@functools.cache
def _references_to_unheld() -> int:
    # Modes of a call would take this for what its function does.
    with outside_all_dispatch_modes(), torch.enable_grad():
        root = torch.zeros((), requires_grad=True) * 2.0
    node: Any = graph.get_gradient_edge(root).node
    return sys.getrefcount(node.next_functions[0][0].variable)


def is_held(leaf_node: Any) -> bool:
    """Say whether anything but the graph refers to the leaf of `leaf_node`."""
    return sys.getrefcount(leaf_node.variable) > _references_to_unheld()


# Deleted by: backward formulas that do not ask whether grad mode is on. These ask, and
# then use other kernels, whose results differ in the last bits.
NODES_ASKING_GRAD_MODE = frozenset(
    {
        *("FusedRmsNormBackward0", "LogitBackward0", "MishBackward0"),
        *("MkldnnRnnLayerBackward0", "NativeDropoutBackward0"),
        *("NativeGroupNormBackward0", "SiluBackward0", "ThnnFusedGruCellBackward0"),
        *("ThnnFusedLstmCellBackward0", "WeightNormInterfaceBackward0"),
        # These ask in C++.
        *("CumprodBackward0", "LinalgDetBackward0", "LinalgSlogdetBackward0"),
        *("LinalgHouseholderProductBackward0", "LinalgSolveExBackward0"),
        "OrmqrBackward0",
    }
)


def pull_in_grad_mode(outs: Iterable[Tensor]) -> None:
    """Have nodes that ask for grad mode run as with it on, but make no graph."""
    for node in nodes_behind(o.grad_fn for o in outs if o.requires_grad):
        if type(node).__name__ in NODES_ASKING_GRAD_MODE:
            node.register_prehook(_enter_grad_mode)
            node.register_hook(_leave_grad_mode)


def nodes_behind(roots: Iterable[Any]) -> list[Any]:
    """Return the nodes that some nodes of a graph lead to, those first."""
    seen = {*roots, None}
    nodes: list[Any] = [node for node in seen if node is not None]
    for node in nodes:  # which grow
        for parent, _ in node.next_functions:
            if parent not in seen:
                seen.add(parent)
                nodes.append(parent)
    return nodes


def _enter_grad_mode(_cotangents: Tensors) -> None:
    set_grad_enabled(True)


def _leave_grad_mode(grads: MaybeTensors, _cotangents: Tensors) -> MaybeTensors:
    set_grad_enabled(False)
    return tuple(None if g is None else g.detach() for g in grads)


# Deleted by: a public count of a tensor's references.
def is_graph_held(leaves: Sequence[Tensor]) -> bool:
    """Say whether some graph still refers to one of the autograd `leaves`."""
    return any(use_count(t) > 1 for t in leaves if t.requires_grad)


# Deleted by: a public name for the node that accumulates into a leaf.
with torch.enable_grad():
    _leaf = torch.zeros((), requires_grad=True)
    AccumulateGrad: type = type(graph.get_gradient_edge(_leaf).node)


# Deleted by: nodes that list what they saved.
def saved_by(node: Any) -> list[Any]:
    """Return what a node of a graph saved, as pytrees: as hooks packed it, if any did.

    CopySlices and Functions written in C++ do not tell, and give an empty list.
    """
    return [
        value for name, raws in _raw_of(node) for value in _unpacked(node, name, raws)
    ]


def _raw_of(node: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    if isinstance(node, torch._C._FunctionBase):
        yield "saved_tensors", node._raw_saved_tensors or ()
        return
    for name in _names_of_raw(type(node)):
        raw = getattr(node, name)
        raws = raw if isinstance(raw, (list, tuple)) else [raw]
        yield name.removeprefix("_raw"), raws


@functools.cache
def _names_of_raw(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _unpacked(node: Any, name: str, raws: Sequence[Any]) -> list[Any]:
    if all(hasattr(s, "data") for s in raws):
        return [s.data for s in raws]
    if top_hooks(True) is not None:  # they would run, for a report
        return []
    try:
        return [getattr(node, name)]
    except RuntimeError:  # changed in place since
        return []


# Deleted by: nodes that say whether they can be differentiated twice.
def once_differentiable_function(node: Any) -> Any:
    """Return the Function of a node if its backward is marked `once_differentiable`.

    Under torch.func a node is of a Function made around that of the user.
    """
    kind = getattr(type(node), "_forward_cls", None)
    while kind is not None:
        backward = kind.backward
        if not isinstance(backward, FunctionType):
            return None
        if backward.__code__ is _ONCE:
            return kind
        # By name: the Function that torch makes for a vmap refers to itself, too.
        names, cells = backward.__code__.co_freevars, backward.__closure__ or ()
        around = dict(zip(names, cells, strict=True)).get("autograd_function")
        kind = None if around is None else around.cell_contents
    return None


def _nothing(_ctx: Any) -> None:
    pass


_ONCE = once_differentiable(_nothing).__code__


# Deleted by: a public way to ask whether torch.func takes a Function.
def is_for_transforms(function: Any) -> bool:
    """Say whether a Function can be used under torch.func."""
    return function.setup_context is not Function.setup_context


def unpack_hooks_of(node: Any) -> list[Any]:
    """Return the hooks that unpack what a node saved, which may hold more."""
    raws = [s for _, raws in _raw_of(node) for s in raws]
    hooks = [getattr(s, "unpack_hook", None) for s in raws]
    return [hook for hook in hooks if hook is not None]


# Deleted by: a public way to mark what a profiler sees without calling operators.
marked: Callable[[str], Any] = vars(torch._C._profiler)["_RecordFunctionFast"]


# Deleted by: public sequence numbers of nodes.
def sequence_number(node: Any) -> int:
    """Return a number that is larger for nodes made later, on one thread."""
    return node._sequence_nr()
