"""The forward of a call under torch.func: runs it once, and drops its graph.

`Primal.forward` calls `evaluate_forward`, below all levels and with grad mode off. It
returns the results, detached; the `Evaluation`, from which `function` makes a node; and
the `State`, which recomputes restore.

Invariant: when it returns, nothing holds the graph of the run. What would then have
lost its gradient is refused.
Rejected: no graph at all. Which inputs the outputs depend on could not be told.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, filterfalse
from typing import Any, TypeAlias

from torch import Tensor

from remat._base.absent import may_be_absent
from remat._base.context import here
from remat._base.errors import CaptureError
from remat._base.program import Evaluation, OutsideVmap, Program, Request, fresh_leaves
from remat._base.types import Fn
from remat._partial.cache import cache_of
from remat._partial.decide import (
    Situation,
    has_no_reason,
    warn_if_asked,
    why_no_record,
)
from remat._partial.options import reference
from remat._partial.recorder import Recorder
from remat._partial.stores import SavedInNode
from remat._torch import (
    hooks_of_trackers,
    is_below_tracer,
    remove_hooks_since,
    set_grad_enabled,
    without_hooks,
)
from remat._transform.buffers import copy_buffers, update, written_to
from remat._transform.call import Call
from remat._transform.changes import changes_of
from remat._transform.checks import (
    changed_inside,
    refuse_assigned_data,
    refuse_backward,
    refuse_changed_inputs,
    refuse_leaks,
)
from remat._transform.reached import (
    Reached,
    reached_inputs,
    reaches_only_inputs,
    sharing_memory,
)
from remat._transform.state import State, state_of


# Cheaper than comprehensions, on a path taken on every call.
_requires_grad = operator.attrgetter("requires_grad")

Evaluated: TypeAlias = tuple[Sequence[Any], Evaluation, State]


def evaluate_forward(
    call: Call, program: Program, inputs: Sequence[Tensor], request: Request
) -> Evaluated:
    """Run the forward of a call.

    Args:
        call: the call.
        program: what to run: the call as a program, or that under vmap or in forward
            mode.
        inputs: to run it on.
        request: what is asked.

    Returns:
        The results, what was found, and what the function ran in.

    Raises:
        MutationError: the function changed an input in place.
        CaptureError: a gradient would be lost.
    """
    snapshot, needs = call.snapshot, request.needs
    inner = fresh_leaves(inputs, needs)
    evaluated = _evaluate(call, program, inputs, inner, request)
    call.forward_done()
    # The graph is gone by now, unless the function let something of it escape.
    refuse_backward(snapshot, inner)
    refuse_assigned_data(snapshot, inputs, inner, needs)
    refuse_leaks(snapshot, inner, call.hidden)
    return evaluated


def _evaluate(
    call: Call,
    program: Program,
    inputs: Sequence[Tensor],
    inner: list[Tensor],
    request: Request,
) -> Evaluated:
    """Run the forward on `inner`, the fresh leaves for `inputs`; drop its graph."""
    snapshot, needs = call.snapshot, request.needs
    state = state_of(snapshot, inputs)
    has_inference = None in state.versions
    copies = copy_buffers(inner, needs, snapshot.buffers)
    plan = _plan(call, program, inputs, inner, request, state)
    outs = _run(call, program, inner, None if plan is None else plan.mode, state)
    before: Mapping[int, Tensor] = _NONE
    if copies:
        before = _update_buffers(call, program, inputs, inner, copies)
        state = state.updated(before)
    again = _runner(call, program)
    refuse_changed_inputs(snapshot, inputs, inner, state.versions, needs, before, again)
    used, asks_grad_mode, certain = _reached(call, outs, inner, request)
    differentiable = [*map(_requires_grad, outs), *[False] * len(before)]
    results = [*map(Tensor.detach, outs), *before.values()]
    outside, recomputation, residuals = program.outside, None, 0
    if plan is not None:
        # Under a second vmap the recompute may run other operations than the plan
        # holds. Then it does not follow the plan, and needs the inputs.
        may_drop = call.is_differentiated_once
        may_drop = may_drop and not (outside or request.in_forward_mode)
        tensors = _finish(plan, outs, may_drop=may_drop)
        if tensors is not None:
            recomputation, residuals = plan, len(tensors)
            results += tensors
            differentiable += [False] * residuals
    evaluation = Evaluation(
        request,
        used,
        differentiable,
        [*before],
        residuals,
        recomputation,
        sharing_memory(outs, inner, copies),
        asks_grad_mode,
        certain,
        has_inference,
    )
    if outside:
        evaluation = _joined(evaluation, outside)
    return results, evaluation, state


_NONE: Mapping[int, Tensor] = {}


def _joined(evaluation: Evaluation, outside: Sequence[OutsideVmap]) -> Evaluation:
    """Return an evaluation with what is differentiated only outside a vmap."""
    used, differentiable = {*evaluation.used}, [*evaluation.differentiable]
    for found in outside:
        used.update(found.used)
        for j in found.differentiable:
            differentiable[j] = True
    asks = evaluation.asks_grad_mode or any(f.asks_grad_mode for f in outside)
    return evaluation._replace(
        used=sorted(used),
        differentiable=differentiable,
        asks_grad_mode=asks,
        certain={*evaluation.certain}.union(*(f.certain for f in outside)),
    )


def _plan(
    call: Call,
    program: Program,
    inputs: Sequence[Tensor],
    inner: Sequence[Tensor],
    request: Request,
    state: State,
) -> SavedInNode | None:
    """Return what the forward does with the records of calls like it, if anything."""
    policy, prune, label = call.policy, call.prune, call.snapshot.label
    elements = sum(map(Tensor.numel, inputs))
    if has_no_reason(policy, prune, elements):
        return None
    others = filterfalse(may_be_absent, inputs if state.classes else ())
    situation = Situation(
        is_saved=False,
        is_compiled=call.snapshot.compiled,
        is_traced=is_below_tracer(),
        is_split=request.is_split,
        kind=next((type(t).__name__ for t in others), ""),
        elements=elements,
    )
    why = why_no_record(policy, prune, situation)
    warn_if_asked(policy, prune, situation, label, why)
    if why:
        return None
    options = reference(policy), prune, *request.needs, state.ambient.key
    cache = cache_of((*program.signature, *options), inputs).for_owner(call.owner)
    return SavedInNode(cache, policy, prune, inputs, label, inner)


def _run(
    call: Call, program: Program, inner: list[Tensor], mode: Any, state: State
) -> Sequence[Any]:
    """Run with grad mode on, under a mode if there is one."""
    tracked = hooks_of_trackers()
    set_grad_enabled(True)
    try:
        outs = without_hooks(_run_once, call, program, inner, mode)
    except BaseException:
        state.ambient.forget_casts()
        raise
    set_grad_enabled(False)
    remove_hooks_since(tracked)  # they are on the graph that is dropped, and hold it
    state.ambient.forward_done()
    return outs


def _run_once(
    call: Call, program: Program, inner: list[Tensor], mode: Any
) -> Sequence[Any]:
    run = program.run
    if mode is not None:
        run = functools.partial(run, mode=mode)
    try:
        return labelled(call, run, *inner) if call.wrapped else run(*inner)
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        changes = changes_of(call.snapshot, inner, _runner(call, program))
        index = next(iter(changes), None)
        raise changed_inside(call.snapshot, index, changes) from error


def labelled(call: Call, fn: Fn, *args: Any) -> Any:
    """Call a function, whose errors are to name the call.

    Args:
        call: the call.
        fn: the function.
        *args: its arguments.

    Raises:
        CaptureError: the function raises one.
    """
    try:
        return fn(*args)
    except CaptureError as error:
        if str(error).startswith("remat"):
            raise
        label = call.snapshot.label
        raise CaptureError(f"remat: in {label}, {error}") from None


def _runner(call: Call, program: Program) -> Callable[[Sequence[Tensor]], object]:
    """Return what runs the forward once more, on copies."""

    def run(copies: Sequence[Tensor]) -> None:
        call.structure = None
        try:
            program.run(*copies)
        finally:
            call.structure = None

    return run


def _update_buffers(
    call: Call,
    program: Program,
    inputs: Sequence[Tensor],
    inner: Sequence[Tensor],
    copies: dict[int, Tensor],
) -> dict[int, Tensor]:
    """Write to buffers what the forward made of copies; return their values before."""
    snapshot = call.snapshot
    before: dict[int, Tensor] = {}
    for i in written_to(inputs, copies, snapshot.buffers):
        if i not in snapshot.buffers:
            changes = changes_of(snapshot, inner, _runner(call, program))
            raise changed_inside(snapshot, i, changes)
        before[i] = update(inputs[i], copies[i])
    return before


def _reached(
    call: Call, outs: Sequence[Any], inner: list[Tensor], request: Request
) -> Reached:
    """Return what the graph of the outputs reaches."""
    if reaches_only_inputs(call.snapshot, request):
        nodes = [o.grad_fn for o in outs if o.requires_grad]
        if None not in nodes:
            # To look costs a tenth of a call. The backward finds out which they are.
            return Reached([*compress(itertools.count(), request.needs)])
    return labelled(call, reached_inputs, outs, inner)


def _finish(
    plan: SavedInNode, outs: Sequence[Any], *, may_drop: bool
) -> list[Tensor] | None:
    """Return the residuals; None if the call is recomputed in full."""
    if isinstance(plan.mode, Recorder):
        plan.mode.note_saved(outs)
    return plan.finish(outs, may_drop=may_drop and not here().only_our_hooks)
