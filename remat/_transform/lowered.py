"""Runs a call as `lowering` says, outside of graphs.

`rematerialized` calls it, `traced` for what runs after a graph broke, and
`remat.compat`.

Invariant: if there is nothing to differentiate, the function is just called.
Rejected: to do this in the class that `remat` returns. A checkpoint has no such object.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from remat._ambient.draws import without_draws
from remat._base.labels import Label
from remat._base.types import Fn
from remat._partial.options import Options
from remat._transform.call import Call
from remat._transform.function import Primal, evaluate_differentiably
from remat._transform.lowering import Lowering
from remat._transform.saved import call_saved


def call_lowered(
    lowering: Lowering,
    fn: Fn,
    label: Label,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """Call a function so that a backward recomputes it."""
    if lowering is Lowering.SAVED:
        return call_saved(fn, label, args, kwargs, options)
    plain = without_draws(fn, label) if options.rng == "error" else fn
    if lowering is Lowering.FUNCTION:
        return call_as_function(fn, label, args, kwargs, options, plain)
    return plain(*args, **kwargs)


def call_as_function(
    fn: Fn,
    label: Label,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    plain: Fn,
    *,
    may_read_early: Callable[[Tensor], bool] | None = None,
) -> Any:
    """Call a function as one Function; if nothing is differentiated, call `plain`.

    `may_read_early` says of an input whether a recompute in a graph may read it before
    the cotangents.
    """
    call = Call(fn, label, args, kwargs, options)
    call.may_read_early = may_read_early
    inputs, needs = call.take_inputs()
    outs = None
    if not call.is_lazy:
        outs = evaluate_differentiably(Primal(call), inputs, needs)
    return plain(*args, **kwargs) if outs is None else call.join(outs, inputs)
