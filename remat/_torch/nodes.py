"""Nodes of Dynamo's graphs: a function as the body of one, and what the body does.

Invariant: nothing here imports Dynamo, which takes seconds. It is asked for what it has
imported itself.
Rejected: torch's node for activation checkpoints. It is refused under torch.func, and
in one graph with forward and backward its recompute has no order.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.wrap import DynamoBypassingWrapper
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch.utils import _python_dispatch
from typing_extensions import override


# Deleted by: a public higher-order operator whose body a library may differentiate.
class _Node(DynamoBypassingWrapper):
    """Calls `lower(fn)(*args, **kwargs)`, where Dynamo makes `fn` the body of a node.

    That runs when the graph runs, and when AOTAutograd traces it.
    """

    def __init__(self, name: str, *, cacheable: bool) -> None:
        HigherOrderOperator.__init__(self, name, cacheable=cacheable)


as_node: Any = _Node("remat", cacheable=True)
_uncached: Any = _Node("remat_uncached", cacheable=False)

OF_THIS_PROCESS = "of this process"  # is in the keys of nodes that no cache may hold


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
        result = variable._call_function(tracer, args, kwargs)
    _show_key(tracer.output, args[0].as_python_constant().args[0])
    return result


# Deleted by: Dynamo naming in the graph what lowers a node.
def _show_key(output: Any, key: str) -> None:
    """Write the key of the node that was made last into the graph.

    Dynamo names a place in the metadata of the body, which is the same for all nodes.
    """
    node = next(n for n in reversed(output.graph.nodes) if n.target is as_node)
    place, body, *rest = node.args
    graph = output.nn_modules[body.target]
    graph.meta[key] = graph.meta.pop(place)
    node.args = key, body, *rest
    if OF_THIS_PROCESS in key or not _is_cacheable(graph):
        node.target = _uncached


# Deleted by: the check of AOTAutograd's cache looking into bodies.
def _is_cacheable(body: Any) -> bool:
    """Say whether a graph holds nothing that AOTAutograd's cache cannot tell."""
    cache = importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
    graphs = [m for m in body.modules() if isinstance(m, torch.fx.GraphModule)]
    try:
        for graph in graphs:
            cache.check_cacheable(graph)
    except cache.BypassAOTAutogradCache:
        return False
    return True


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
        for each in (effects, tracer.output.side_effects):
            each.id_to_variable.pop(id(key), None)
            # `cond`, `scan` and `map` look each of these up when branches have ended.
            each.keepalive[:] = [value for value in each.keepalive if value is not key]


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


# Deleted by: a public context outside of a trace.
@contextmanager
def faking(examples: Sequence[Any]) -> Iterator[list[Any] | None]:
    """Run the body of the block outside of the trace, on fake copies of fake inputs.

    Gives the copies; None if no input is fake.
    """
    found = [maybe_get_fake_mode(e) for e in examples if isinstance(e, Tensor)]
    mode = next((m for m in found if m is not None), None)
    if mode is None:
        yield None
        return
    with (
        temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunctionSubclass(),
        _python_dispatch._disable_current_modes(),
        mode,
        torch.enable_grad(),  # a body may differentiate inside
    ):
        yield [_empty_like(e) if isinstance(e, Tensor) else e for e in examples]


def _empty_like(tensor: Tensor) -> Tensor:
    if _python_dispatch.is_traceable_wrapper_subclass(tensor):
        return torch.empty_like(tensor)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
