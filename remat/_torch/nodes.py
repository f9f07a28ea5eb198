"""Nodes of Dynamo's graphs: a function as the body of one, and runs of the body.

Invariant: nothing here imports Dynamo, which takes seconds. It is asked for what it has
imported itself. A level of torch.func in a body is the one that it opened in this run;
after a run, and after an error, those that it opened are closed.
Rejected: torch's node for activation checkpoints. It is refused under torch.func, and
in one graph with forward and backward its recompute has no order.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.wrap import DynamoBypassingWrapper
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch.autograd import forward_ad
from torch.fx import GraphModule, Interpreter
from torch.fx.traceback import get_current_meta
from torch.utils import _python_dispatch
from typing_extensions import override

from remat._torch.autograd import (
    are_hooks_left_on,
    dual_level_active,
    is_forward_ad_enabled,
    set_forward_ad,
)
from remat._torch.levels import requires_grad_at_any_level


# Deleted by: a public higher-order operator whose body a library may differentiate.
class _NodeOfBody(DynamoBypassingWrapper):
    """Calls `lower(fn)(*args, **kwargs)`, where Dynamo makes `fn` the body of a node.

    That runs when the graph runs, and when AOTAutograd traces it.
    """

    def __init__(self, name: str, *, cacheable: bool) -> None:
        HigherOrderOperator.__init__(self, name, cacheable=cacheable)


as_node: Any = _NodeOfBody("remat", cacheable=True)
_uncached: Any = _NodeOfBody("remat_uncached", cacheable=False)

OF_THIS_PROCESS = "of this process"  # is in the keys of nodes that no cache may hold


# Deleted by: Dynamo tracing operators of higher order that others define. It has a
# table of those that it knows.
def let_dynamo_see_nodes() -> None:
    """Have Dynamo trace what `as_node` is given. To be called while it traces."""
    operators = sys.modules["torch._dynamo.variables.higher_order_ops"]
    table = operators._hop_name_to_variable_class
    if "remat" not in table:
        base = operators.DynamoBypassingWrapperHigherOrderVariable
        methods = {"_HOP_NAME": _ADVICE, "call_function": _traced_under_modes}
        table["remat"] = type("RematVariable", (base,), methods)


def _traced_under_modes(variable: Any, tracer: Any, args: Any, kwargs: Any) -> Any:
    """Trace a body that TorchFunctionModes see."""
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


# --- What Dynamo traced for a node, run at another depth of levels of torch.func ---
#
# Dynamo writes the numbers of levels into a body as constants, and enters a dual level
# where it thinks that there is none. `_transform` runs the body below the levels that
# it was traced in, and within others that differentiate it. One body runs at several
# depths, so no other numbers are written into it.


class UnknownLevelError(RuntimeError):
    """A body uses a level of torch.func that it did not open."""


def is_body(fn: Any) -> bool:
    """Say whether a function is what Dynamo traced for a node."""
    return isinstance(fn, GraphModule)


def inputs_of_body(body: Any) -> list[Any]:
    """Return the fake inputs that Dynamo traced a body with."""
    nodes = body.graph.find_nodes(op="placeholder")
    return [n.meta.get("example_value", n.meta.get("val")) for n in nodes]


def modules_of_node(node: Any = None) -> Sequence[tuple[str, type]] | None:
    """Return the modules that a node is called in, outermost first: paths and classes.

    By default that is the node of Dynamo's graph that runs. None for one that runs
    nothing.
    """
    if node is not None and not node.op.startswith("call_"):
        return None
    meta = get_current_meta() if node is None else node.meta
    return [*meta.get("nn_module_stack", {}).values()]


def run_body(body: Any, *args: Any) -> Any:
    """Run what Dynamo traced for a node, and hold on to nothing of it."""
    run = _BodyRun(body)
    try:
        return run.run(*args)
    finally:
        run.close_all()


# Deleted by: Dynamo tracing levels of torch.func as values, and not as numbers.
class _BodyRun(Interpreter):
    def __init__(self, body: Any) -> None:
        super().__init__(body)
        # The levels that are open, innermost last: the number, and what closes it.
        self._open: list[tuple[int, Callable[[], object]]] = []
        self._outside = _levels_outside(body.graph)

    def close_all(self) -> None:
        """Close the levels that an error left open."""
        while self._open:
            self._open.pop()[1]()

    @override
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        run = _RUNS.get(_name(target))
        if run is not None:
            return run(self, target, args, kwargs)
        if isinstance(target, HigherOrderOperator):
            args = [_branch(a) if is_body(a) else a for a in args]
        return super().call_function(target, args, kwargs)

    def open(self, target: Any, args: Any, kwargs: Any) -> int:
        """Enter a level, and forward mode with the first that differentiates so."""
        before = is_forward_ad_enabled()
        name = target.__name__.replace("increment", "decrement")
        leave = getattr(torch._C._functorch, name)
        is_first = "jvp" in name and not dual_level_active()
        if is_first:
            forward_ad.enter_dual_level()
        level = target(*args, **kwargs)

        def close() -> None:
            if is_first:
                forward_ad.exit_dual_level()
            leave()
            set_forward_ad(before)  # to which a body sets what it was when traced

        self._open.append((level, close))
        return level

    def close(self, target: Any, args: Any, kwargs: Any) -> None:
        """Leave the innermost level."""
        del target, args, kwargs
        self._open.pop()[1]()

    def use(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call what takes the number of a level."""
        place, args = _LEVEL_AT[_name(target)], [*args]
        depth = args[place] - self._outside - 1
        if not 0 <= depth < len(self._open):
            raise UnknownLevelError
        args[place] = self._open[depth][0]
        return target(*args, **kwargs)

    def skip(self, target: Any, args: Any, kwargs: Any) -> int:
        """Do nothing: `open` and `close` enter and leave dual levels."""
        del target, args, kwargs
        return 0

    def allow_hooks(self, target: Any, args: Any, kwargs: Any) -> None:
        """Switch hooks for saved tensors off or on, unless they may stay on."""
        if not are_hooks_left_on():
            target(*args, **kwargs)

    def hook(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Register a hook, unless nothing differentiates the tensor in this run."""
        if requires_grad_at_any_level(args[0]):
            return target(*args, **kwargs)
        return args[0]

    def inline(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a region that is compiled once, whose backward belongs to one forward."""
        del target, kwargs
        region, _, *operands = args
        return run_body(region, *operands)


def _name(target: Any) -> str:
    """Return the name of a function; "" if it is no function of torch."""
    module = getattr(target, "__module__", None) or ""
    is_ours = module in _OF_LEVELS or isinstance(target, HigherOrderOperator)
    return target.__name__ if is_ours else ""


_OF_LEVELS = (
    "torch._functorch.predispatch",
    "torch._C._functorch",
    "torch._C._autograd",
)

# Where among the arguments of a function the number of a level is.
_LEVEL_AT = {
    "_add_batch_dim": 2,
    "_remove_batch_dim": 1,
    "_unwrap_for_grad": 1,
    "_wrap_for_grad": 1,
}
_KINDS = "grad", "jvp", "vmap"
_RUNS: dict[str, Callable[[_BodyRun, Any, Any, Any], Any]] = {
    **dict.fromkeys((f"_{kind}_increment_nesting" for kind in _KINDS), _BodyRun.open),
    **dict.fromkeys((f"_{kind}_decrement_nesting" for kind in _KINDS), _BodyRun.close),
    **dict.fromkeys(_LEVEL_AT, _BodyRun.use),
    "_enter_dual_level": _BodyRun.skip,
    "_exit_dual_level": _BodyRun.skip,
    "_saved_tensors_hooks_disable": _BodyRun.allow_hooks,
    "_saved_tensors_hooks_enable": _BodyRun.allow_hooks,
    "register_hook": _BodyRun.hook,
    "invoke_subgraph": _BodyRun.inline,
}


def _levels_outside(graph: Any) -> int:
    """Return how many levels Dynamo had entered before it traced a graph."""
    depth = 0
    found: list[int] = []
    for name, node in _of_levels(graph):
        depth += name.endswith("_increment_nesting")
        depth -= name.endswith("_decrement_nesting")
        if name in _LEVEL_AT:
            found.append(node.args[_LEVEL_AT[name]] - depth)
    return max(found, default=0)


def _of_levels(graph: Any) -> Iterator[tuple[str, Any]]:
    for node in graph.nodes:
        if node.op == "call_function" and (name := _name(node.target)):
            yield name, node


def _branch(body: Any) -> Any:
    """Return a branch, or the body of a loop, as a function that runs like a body."""
    if not _uses_levels(body):
        return body

    def run(*args: Any) -> Any:
        return run_body(body, *args)

    return run


def _uses_levels(body: Any) -> bool:
    return any(
        name in _LEVEL_AT
        for module in body.modules()
        if is_body(module)
        for name, _ in _of_levels(module.graph)
    )
