"""Graphs of dispatched operations, as AOTAutograd and make_fx make them.

Invariant: nothing here imports Dynamo or inductor, which takes seconds.
Rejected: torch's node for activation checkpoints. It is refused under torch.func, and
in one graph with forward and backward its recompute has no order.
"""

import importlib
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._higher_order_ops.wrap import DynamoBypassingWrapper
from torch._ops import HigherOrderOperator
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch, _pytree
from torch.utils.checkpoint import SAC_IGNORED_OPS
from typing_extensions import override

from remat._torch.levels import base_tensor, get_interpreter_stack


# Deleted by: a public higher-order operator whose body a library may differentiate.
class _Node(DynamoBypassingWrapper):
    """Calls `lower(fn)(*args, **kwargs)`, where Dynamo makes `fn` the body of a node.

    That runs when the graph runs, and when AOTAutograd traces it.
    """

    def __init__(self) -> None:
        HigherOrderOperator.__init__(self, "remat")


as_node: Any = _Node()


# Deleted by: the same. Dynamo has a table of the operators that it knows.
def let_dynamo_see_nodes() -> None:
    """Have Dynamo trace what `as_node` is given. To be called while it traces."""
    operators = sys.modules["torch._dynamo.variables.higher_order_ops"]
    table = operators._hop_name_to_variable_class
    if "remat" not in table:
        base = operators.DynamoBypassingWrapperHigherOrderVariable
        methods = {"_HOP_NAME": _ADVICE, "call_function": _traced_under_modes}
        table["remat"] = type("RematVariable", (base,), methods)


def _traced_under_modes(variable: Any, tracer: Any, args: Any, kwargs: Any) -> Any:
    """Trace a body that TorchFunctionModes see.

    Dynamo would show the node to a mode, and trace the body without it.
    """
    modes = tracer.symbolic_torch_function_state.mode_stack
    with _stack_may_change(tracer), _may_count([m.mutation_type for m in modes]):
        return variable._call_function(tracer, args, kwargs)


@contextmanager
def _stack_may_change(tracer: Any) -> Iterator[None]:
    """Have Dynamo let a body enter modes, which it leaves again."""
    variables = sys.modules["torch._dynamo.variables.torch_function"]
    stack = variables.TorchFunctionModeStackVariable
    key, effects = stack.stack_value_singleton, tracer.output.side_effects
    if key in effects:
        yield
        return
    modes = tracer.symbolic_torch_function_state.mode_stack
    source = sys.modules["torch._dynamo.source"].Source()
    effects.track_mutable(key, stack(source, modes))
    try:
        yield
    finally:
        tracer.output.side_effects.id_to_variable.pop(id(key), None)


@contextmanager
def _may_count(mutations: Sequence[Any]) -> Iterator[None]:
    """Have Dynamo let a body change the attributes of modes around it.

    A recompute is of the graph, and does not change them again.
    """
    before = [getattr(mutation, "scope", None) for mutation in mutations]
    for mutation in mutations:
        if mutation is not None:
            mutation.scope = _ANY_SCOPE
    try:
        yield
    finally:
        for mutation, scope in zip(mutations, before, strict=True):
            if mutation is not None:
                mutation.scope = scope


class _AnyScope:
    """Equals the scope of each body."""

    @override
    def __eq__(self, other: object) -> bool:
        return True

    @override
    def __hash__(self) -> int:
        return 0


_ANY_SCOPE = _AnyScope()


# Dynamo writes this before its explanation.
_ADVICE = (
    "remat. The trace of a rematerialized function must be whole, and have no side "
    "effects, since a recompute would repeat them: no print, no list that grows, no "
    "attribute that changes. Return the values instead. Without fullgraph=True the "
    "graph breaks at the call, which then runs uncompiled."
)


# Deleted by: a public way to ask what traces.
def is_graph_made() -> bool:
    """Say whether what is dispatched here becomes part of a graph."""
    return get_proxy_mode() is not None


def is_below_tracer() -> bool:
    """Say whether tensors here are fake, functional, or stand for nodes of a graph."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


_keys: Any = torch._C._TorchDispatchModeKey
_TRACERS = _keys.PROXY, _keys.FUNCTIONAL, _keys.FAKE


def is_body(fn: Any) -> bool:
    """Say whether a function is what Dynamo traced for a node."""
    return isinstance(fn, GraphModule)


def run_body(body: Any, *args: Any) -> Any:
    """Run what Dynamo traced for a node, and hold on to nothing of it."""
    return Interpreter(body).run(*args)


# Deleted by: Dynamo entering levels of torch.func as torch.func itself does.
@contextmanager
def counted_levels() -> Iterator[None]:
    """Have torch.func and forward_ad count the levels of forward mode that there are.

    A graph of Dynamo enters them past these counts, so that a level inside would take
    itself for the outermost.
    """
    depth = sum(1 for layer in get_interpreter_stack() or () if layer.key() == _JVP)
    before = _transforms.JVP_NESTING, _dual._current_level
    if depth <= before[0]:
        yield
        return
    _transforms.JVP_NESTING, _dual._current_level = depth, 0
    try:
        yield
    finally:
        _transforms.JVP_NESTING, _dual._current_level = before


_transforms: Any = eager_transforms
_dual: Any = forward_ad


_JVP: Any = torch._C._functorch.TransformType.Jvp


def is_under_jvp() -> bool:
    """Say whether some level of torch.func differentiates forward."""
    return any(layer.key() == _JVP for layer in get_interpreter_stack() or ())


# Deleted by: a public context outside of all levels of torch.func.
def unlevelled() -> Any:
    """Return a context that is outside of all levels of torch.func."""
    return torch._C._DisableFuncTorch()


def bottoms(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors below all levels of torch.func, detached."""
    with unlevelled():
        return tuple(base_tensor(t).detach() for t in tensors)


# Deleted by: AOTAutograd counting the changes of a tensor that autograd saved. It makes
# functions of operations in place, and each detached tensor counts for itself.
class FunctionalValue:
    """The value that a tensor has in the graph of AOTAutograd, if it is in one.

    Args:
        tensor: the tensor, which is not held.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._value = _value_of(tensor)

    def has_changed(self) -> bool:
        """Say whether the tensor was changed in place since."""
        tensor = self._tensor()
        return tensor is not None and _value_of(tensor) is not self._value


def _value_of(tensor: Any) -> Any:
    if not isinstance(tensor, FunctionalTensor):
        return None
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


# Deleted by: a node that says which of its inputs it changes.
class Changes(NamedTuple):
    """What a traced body changes in place.

    Attributes:
        inputs: which of its inputs.
        is_shared: whether another input, or a result, shares memory with one of them.
    """

    inputs: tuple[int, ...] = ()
    is_shared: bool = False


def changed_by(body: Any) -> Changes:
    """Return what a traced body changes.

    It runs on fake copies, outside of the trace.
    """
    known = body.meta.get(_CHANGES)
    if known is None:
        known = body.meta[_CHANGES] = _found_changes(body)
    return known


_CHANGES = "remat_changes"


def _found_changes(body: Any) -> Changes:
    nodes = body.graph.find_nodes(op="placeholder")
    examples = [n.meta.get("example_value", n.meta.get("val")) for n in nodes]
    modes = [maybe_get_fake_mode(e) for e in examples if isinstance(e, Tensor)]
    fake_mode = next((m for m in modes if m is not None), None)
    if fake_mode is None:
        return Changes()
    writes = _Writes()
    with ExitStack() as stack:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        stack.enter_context(_python_dispatch._disable_current_modes())
        stack.enter_context(fake_mode)
        stack.enter_context(torch.no_grad())
        copies = [_empty_like(e) if isinstance(e, Tensor) else e for e in examples]
        with writes:
            outs = run_body(body, *copies)
    inputs = tuple(i for i, c in enumerate(copies) if _storage(c) in writes.storages)
    inside = {_storage(copies[i]) for i in inputs}
    outside = [_storage(examples[i]) for i in inputs]
    others = [_storage(e) for i, e in enumerate(examples) if i not in inputs]
    is_shared = not inside.isdisjoint(map(_storage, _pytree.tree_leaves(outs)))
    is_shared = is_shared or len({*outside}) < len(outside)
    return Changes(inputs, is_shared or not {*outside}.isdisjoint(others))


def _storage(value: Any) -> Any:
    """Return what identifies the storage of a tensor, inside of all wrappers."""
    if not isinstance(value, Tensor):
        return None
    value = base_tensor(value)
    while _python_dispatch.is_traceable_wrapper_subclass(value):
        value = getattr(value, value.__tensor_flatten__()[0][0])
    return StorageWeakRef(value.untyped_storage())


class _Writes(_python_dispatch.TorchDispatchMode):
    """Notes the storages that operations write to, by their schemas."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[Any] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        for k, argument in enumerate(schema.arguments if schema else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[k] if k < len(args) else kwargs.get(argument.name)
                self.storages.update(map(_storage, _pytree.tree_leaves(given)))
        return func(*args, **kwargs)


def _empty_like(tensor: Tensor) -> Tensor:
    if _python_dispatch.is_traceable_wrapper_subclass(tensor):
        return torch.empty_like(tensor)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


# --- Draws: the state of the stream is a value of the graph ---

draw_and_keep_state: Any = run_and_save_rng_state
draw_again: Any = run_with_rng_state

# Operations that a dispatch mode must leave alone.
IGNORED: frozenset[Any] = frozenset(SAC_IGNORED_OPS)


# Deleted by: torch giving `run_and_save_rng_state` these rules. That for fake tensors
# returns a real state, which make_fx keeps as a constant: each call draws one mask. And
# two draws of the same arguments are taken for one.
def let_graphs_draw() -> None:
    """Have graphs hold the state of a stream as a value that each run reads."""
    rand_ops = importlib.import_module("torch._functorch.compile_utils").rand_ops
    if draw_and_keep_state in rand_ops:
        return
    rand_ops.append(draw_and_keep_state)
    before: Any = registered_hop_fake_fns[draw_and_keep_state]
    rest = before[1:] if isinstance(before, tuple) else ()
    rules: Any = registered_hop_fake_fns
    rules[draw_and_keep_state] = (_draw_of_fakes, *rest) if rest else _draw_of_fakes
    draw_and_keep_state.python_key_table[ProxyTorchDispatchMode] = _draw_of_proxies
    if torch._C.DispatchKey.Functionalize not in draw_and_keep_state.py_kernels:
        draw_and_keep_state.py_functionalize_impl(_draw_of_functionals)


def _draw_of_functionals(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = ctx.unwrap_tensors(args), ctx.unwrap_tensors(kwargs)
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(draw_and_keep_state(op, *args, **kwargs))


def _draw_of_fakes(op: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = _pytree.tree_leaves((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device", "cpu"))
    size = torch.get_rng_state().numel() if device.type == "cpu" else _GPU_STATE
    return torch.empty(size, dtype=torch.uint8), op(*args, **kwargs)


_GPU_STATE = 16


def _draw_of_proxies(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    with disable_proxy_modes_tracing():
        out = draw_and_keep_state(op, *args, **kwargs)
    unwrap = mode.tracer.unwrap_proxy
    args, kwargs = _pytree.tree_map(unwrap, ((op, *args), kwargs))
    node = mode.tracer.create_proxy("call_function", draw_and_keep_state, args, kwargs)
    return track_tensor_tree(out, node, constant=None, tracer=mode.tracer)


# --- Modes ---


# Deleted by: a public dispatch mode that a tracer runs under.
class TracedMode(_python_dispatch.TorchDispatchMode):
    """A dispatch mode below functorch, and above what makes a graph."""

    supports_higher_order_operators = True

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True


# --- Inductor ---


# Deleted by: a public way to lower an operator to an alias of its input.
def lower_to_alias(operator: Any, aliasing: Any) -> None:
    """Have inductor run `aliasing` for `operator`, if inductor is there.

    The schema of `aliasing` says that its result shares the memory of its input. So
    the scheduler keeps the order and the storage, and copies nothing. What leaves the
    graph is copied: a result must not be an input's alias.
    """
    if "torch._inductor.compile_fx" not in sys.modules or operator in _lowered():
        return
    ir = sys.modules["torch._inductor.ir"]
    virtualized = sys.modules["torch._inductor.virtualized"]

    def lower(x: Any, after: Any) -> Any:
        leaves = _leaves_graph(virtualized.V.graph.current_node)
        chosen = operator if leaves else aliasing
        made = ir.FallbackKernel.create(chosen, x, after)
        return _pytree.tree_map(ir.TensorBox.create, made)

    register = sys.modules["torch._inductor.lowering"].register_lowering
    register(operator, type_promotion_kind=None)(lower)


def _lowered() -> Mapping[Any, Any]:
    return sys.modules["torch._inductor.lowering"].lowerings


def _leaves_graph(node: Any) -> bool:
    return any(_is_end(user) for user in node.users)


def _is_end(user: Any) -> bool:
    if user.op != "call_function":
        return bool(user.op == "output")
    is_view = getattr(user.target, "is_view", False)
    is_view = is_view or user.target is torch.ops.aten.detach.default
    return is_view and _leaves_graph(user)
