"""Runs the body of a node, as Dynamo traced it, at another depth of torch.func levels.

Dynamo writes the numbers of levels into a body as constants, and enters a dual level
where it thinks that there is none. `_transform` runs the body below the levels that it
was traced in, and within others that differentiate it.

Invariant: a level of the body is the one that it opened in this run. After a run, and
after an error, those that it opened are closed.
Rejected: to write other numbers into the graph. One body runs at several depths.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.autograd import forward_ad
from torch.fx import GraphModule, Interpreter
from typing_extensions import override

from remat._torch.autograd import (
    are_hooks_left_on,
    dual_level_active,
    is_forward_ad_enabled,
    set_forward_ad,
)
from remat._torch.levels import requires_grad_at_any_level


class UnknownLevelError(RuntimeError):
    """A body uses a level of torch.func that it did not open."""


def is_body(fn: Any) -> bool:
    """Say whether a function is what Dynamo traced for a node."""
    return isinstance(fn, GraphModule)


def inputs_of_body(body: Any) -> list[Any]:
    """Return the fake inputs that Dynamo traced a body with."""
    nodes = body.graph.find_nodes(op="placeholder")
    return [n.meta.get("example_value", n.meta.get("val")) for n in nodes]


def run_body(body: Any, *args: Any) -> Any:
    """Run what Dynamo traced for a node, and hold on to nothing of it.

    Raises:
        UnknownLevelError: it uses a level of torch.func that it did not open.
    """
    run = _Run(body)
    try:
        return run.run(*args)
    finally:
        run.close_all()


# Deleted by: Dynamo tracing levels of torch.func as values, and not as numbers.
class _Run(Interpreter):
    """One run of a body."""

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
_RUNS: dict[str, Callable[[_Run, Any, Any, Any], Any]] = {
    **dict.fromkeys((f"_{kind}_increment_nesting" for kind in _KINDS), _Run.open),
    **dict.fromkeys((f"_{kind}_decrement_nesting" for kind in _KINDS), _Run.close),
    **dict.fromkeys(_LEVEL_AT, _Run.use),
    "_enter_dual_level": _Run.skip,
    "_exit_dual_level": _Run.skip,
    "_saved_tensors_hooks_disable": _Run.allow_hooks,
    "_saved_tensors_hooks_enable": _Run.allow_hooks,
    "register_hook": _Run.hook,
    "invoke_subgraph": _Run.inline,
}


def _levels_outside(graph: Any) -> int:
    """Return how many levels Dynamo had entered before it traced a graph.

    The highest number that is used is that of the innermost level that is open there.
    """
    found, depth = list[int](), 0
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
