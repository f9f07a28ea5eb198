"""Chooses what becomes of a call, by who differentiates it, and runs it so.

    base autograd, also where all levels are vmap     `saved`: plain's own graph
    grad, jvp, a dual level, or hooks are refused     `function`: one node, a call again
    who makes a graph                                 `traced`: that, after a barrier
    nobody, or an export                              the function itself

Invariant: only a report overrides this. A lowering may still find nothing to do, and
call the function.
Rejected: one lowering for all. torch.func refuses hooks for saved tensors, and it
records its own backward: all that a recompute inside saves would be retained.
"""

from enum import Enum
from typing import Any

import torch

from remat._ambient.draws import without_draws
from remat._base.context import here
from remat._base.errors import Label
from remat._base.types import Fn
from remat._base.warned import watch_warnings
from remat._partial.options import Options
from remat._torch.autograd import (
    are_hooks_allowed,
    base_dual_level_active,
    dual_level_active,
)
from remat._torch.levels import are_all_vmaps, current_layer
from remat._torch.tracing import makes_graph, must_inline
from remat._transform.function import call_as_function
from remat._transform.saved import call_saved


class Lowering(Enum):
    """What becomes of a call."""

    SAVED = "saved handles"
    FUNCTION = "one recursive Function"
    PLAIN = "the function itself"
    TRACED = "one recursive Function, in a graph"
    INLINED = "the function itself, in a trace"


def lowering_of(options: Options) -> Lowering:
    if must_inline():
        return Lowering.TRACED if _is_traced(options) else Lowering.INLINED
    if not torch.is_grad_enabled() or (options.unless_followed and here().step_plans):
        return Lowering.PLAIN
    is_differentiated = current_layer() is not None and not are_all_vmaps()
    if options.higher_order or is_differentiated or dual_level_active():
        return Lowering.FUNCTION
    if not are_hooks_allowed():
        return Lowering.FUNCTION
    return Lowering.SAVED


def _is_traced(options: Options) -> bool:
    """Say whether a graph is made that a recompute, or a refusal, belongs to."""
    if not makes_graph():
        return False
    if options.rng == "error":
        return True
    # Forward mode alone stores nothing: it is so in `torch.func.linearize`.
    is_dynamo = torch.compiler.is_dynamo_compiling()
    return torch.is_grad_enabled() and (is_dynamo or not base_dual_level_active())


def call_lowered(
    lowering: Lowering,
    fn: Fn,
    label: Label,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """Call a function so that a backward recomputes it.

    What is made in a graph is not for here: callers ask `traced` first.
    """
    watch_warnings()
    if lowering is Lowering.SAVED:
        return call_saved(fn, label, args, kwargs, options)
    plain = without_draws(fn, label) if options.rng == "error" else fn
    if lowering is Lowering.FUNCTION:
        return call_as_function(fn, label, args, kwargs, options, plain)
    return plain(*args, **kwargs)
