"""Chooses what becomes of a call, by who differentiates it.

    base autograd, and vmap  saved handles: plain's own graph (`saved`)
    a level of torch.func    one Function whose backward is again a call (`function`)
    who makes a graph        the same, with a barrier before the recompute (`traced`)
    nobody, or an export     the function itself

`api` asks once for each call.

Invariant: nothing else decides this.
Rejected: one lowering for all. torch.func refuses hooks for saved tensors, and it
records its own backward: all that a recompute inside saves would be retained.
"""

from enum import Enum

import torch

from remat._base.context import here
from remat._partial.options import Options
from remat._torch import (
    are_all_vmaps,
    are_hooks_allowed,
    base_dual_level_active,
    current_layer,
    dual_level_active,
    makes_graph,
    must_inline,
)


class Lowering(Enum):
    """What becomes of a call."""

    SAVED = "saved handles"
    FUNCTION = "one recursive Function"
    PLAIN = "the function itself"
    TRACED = "one recursive Function, in a graph"
    INLINED = "the function itself, in a trace"


def lowering_of(options: Options) -> Lowering:
    """Return what becomes of a call that is made here."""
    if must_inline():
        return Lowering.TRACED if _is_traced(options) else Lowering.INLINED
    if not torch.is_grad_enabled() or (options.unless_followed and here().plans):
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
