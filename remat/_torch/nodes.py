"""Nodes of Dynamo's graphs: a function as the body of one, and what the body does.

Invariant: nothing here imports Dynamo, which takes seconds. It is asked for what it has
imported itself.
Rejected: torch's node for activation checkpoints. It is refused under torch.func, and
in one graph with forward and backward its recompute has no order.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.wrap import DynamoBypassingWrapper
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch.fx import GraphModule, Interpreter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch, _pytree
from typing_extensions import override

from remat._torch.levels import base_tensor


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
    with _stack_may_change(tracer), _modes_may_change([m.mutation_type for m in modes]):
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
def _modes_may_change(mutations: Sequence[Any]) -> Iterator[None]:
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


def is_body(fn: Any) -> bool:
    """Say whether a function is what Dynamo traced for a node."""
    return isinstance(fn, GraphModule)


def run_body(body: Any, *args: Any) -> Any:
    """Run what Dynamo traced for a node, and hold on to nothing of it."""
    return Interpreter(body).run(*args)


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
