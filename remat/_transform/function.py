"""The lowering to one recursive Function, whose backward is again a program.

    dispatch(program, inputs)      run the program, then make a node of the graph
    backward(ctx, *cotangents)  =  call(Vjp(program), *inputs, *cotangents)
    vmap(in_dims)               =  dispatch(Batch(program, in_dims), ...), a level down
    jvp(duals)                  =  dispatch(Dual(program), ...), a level down

`api` calls `evaluate_differentiably` with a user's call as a program (`primal`).

The forward runs first, a level down. The node is made once it is known which inputs
the outputs depend on. It has edges to those, and where there are none there is no node.
Only levels of `grad`, and the base, have nodes.

Invariant: a graph made here holds the inputs of a call and what its policy keeps, and
nothing else that was computed in it, at every level and order. So a backward is itself
a call: `torch.func.grad` keeps the graph of the backward, and would keep all that a
recompute inside saves.
Rejected: a Function made anew for each call (functorch's way, eight times the cost).
"""

import functools
import operator
from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.program import Evaluation, Program, Request
from remat._base.tensors import outside_inference_mode
from remat._base.tracebacks import hide_frames
from remat._torch import (
    GRAD,
    JVP,
    VMAP,
    SingleLevelFunction,
    alias,
    apply_at_level,
    base_dual_level_active,
    batched,
    call_below,
    counted_levels,
    current_layer,
    dual_level_active,
    eager_only,
    is_below_tracer,
    is_forward_ad_enabled,
    kind_of,
    lifted,
    requires_grad_at_any_level,
    saved_tensors,
    unwrap_dead,
    unwrap_for_grad,
    without_grad_mode,
    without_node,
    wrap_for_grad,
)
from remat._transform.batch import Batch
from remat._transform.dual import Duals, duals_at_level, duals_here, taken_apart
from remat._transform.vjp import is_recorded, replace, vjp_of


def call(program: Program, inputs: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate `program`, differentiably at every level."""
    if torch.is_grad_enabled():
        outs = evaluate_differentiably(
            program, inputs, [*map(requires_grad_at_any_level, inputs)]
        )
        if outs is not None:
            return outs
    layer = current_layer()
    if (layer is None or kind_of(layer) == GRAD) and _are_dual():
        return dispatch(program, inputs, Request([False] * len(inputs), False))[0]
    if layer is None or kind_of(layer) != GRAD:
        return program.run(*inputs)
    # In a level of its own it would run other operations than the forward did.
    level = layer.level()
    below = [unwrap_for_grad(t, level) for t in inputs]
    return _wrapped(call_below(layer, GRAD, call, program, below), level)


@eager_only
def evaluate_differentiably(
    program: Program, inputs: Sequence[Tensor], needs: Sequence[bool]
) -> Sequence[Any] | None:
    """Evaluate `program` if something is differentiated; else return None.

    Args:
        program: to evaluate.
        inputs: to evaluate it on.
        needs: which of them require grad, at any level.
    """
    if True not in needs:
        return None
    layer = current_layer()
    return _dispatch_at(layer, program, inputs, Request(needs, layer is None))[0]


Evaluated: TypeAlias = tuple[Sequence[Any], Evaluation]


def dispatch(program: Program, inputs: Sequence[Tensor], request: Request) -> Evaluated:
    """Evaluate `program` by the innermost torch.func transform."""
    return _dispatch_at(current_layer(), program, inputs, request)


def _dispatch_at(
    layer: Any,
    program: Program,
    inputs: Sequence[Tensor],
    request: Request,
    saved: Sequence[Tensor] | None = None,
) -> Evaluated:
    """Evaluate `program` at a level.

    Args:
        layer: the level; None for the base.
        program: to evaluate.
        inputs: to evaluate it on.
        request: what is asked.
        saved: what a node saves in place of the inputs.
    """
    if layer is None:
        return _dispatch_at_base(program, inputs, request)
    kind = kind_of(layer)
    if kind == VMAP:
        below_vmap = functools.partial(_dispatch_below_vmap, program, request)
        return batched(inputs, below_vmap)
    if kind == JVP:
        return _dispatch_at_jvp(layer, program, inputs, request)
    level = layer.level()
    if dual_level_active():
        inputs = lifted(layer, kind, inputs)
        if _are_dual():
            duals = duals_here(inputs)
            if duals.given:
                return _dispatch_dual(layer, program, inputs, duals, request)
    below = [unwrap_for_grad(t, level) for t in inputs]
    results, evaluation = call_below(layer, kind, dispatch, program, below, request)
    outs = _wrapped(results, level)
    ends = inputs
    if True in map(_requires_grad, below):
        # A constant of this level must have no edge to what is differentiated below.
        ends = lifted(layer, kind, inputs)
    ends = _ends(evaluation, ends)
    if ends:
        evaluated = program, evaluation, saved or inputs, outs
        outs = apply_at_level(_apply, evaluated, *ends)
    return outs, evaluation


def _dispatch_at_jvp(
    layer: Any, program: Program, inputs: Sequence[Tensor], request: Request
) -> Evaluated:
    """Evaluate values and tangents below. There is no node at this level."""
    level, duals = layer.level(), duals_at_level(layer, inputs)
    if not duals.given:
        below = duals.primals
        results, evaluation = call_below(layer, JVP, dispatch, program, below, request)
        return _wrapped(results, level), evaluation
    needs_below = map(requires_grad_at_any_level, duals.primals)
    pairs = zip(request.needs, needs_below, strict=True)
    dual = duals.of(program, [need and not below for need, below in pairs])
    flat, request = [*duals.primals, *duals.tangents], duals.request(dual, request)
    results, evaluation = call_below(layer, JVP, dispatch, dual, flat, request)
    found = taken_apart(dual, _wrapped(results, level), evaluation)
    return found.joined(found.outs), found.evaluation


def _wrapped(results: Sequence[Any], level: int) -> list[Any]:
    """Return results from below a level as tensors of that level."""
    return [None if o is None else wrap_for_grad(o, level) for o in results]


def _dispatch_at_base(
    program: Program, inputs: Sequence[Tensor], request: Request
) -> Evaluated:
    if _are_dual():
        duals = duals_here(inputs)
        if duals.given:
            return _dispatch_dual(None, program, inputs, duals, request)
    return _evaluate_at_base(program, inputs, request)


def _are_dual() -> bool:
    """Say whether tensors here may be dual numbers of a `dual_level` of the user's."""
    return base_dual_level_active() and is_forward_ad_enabled()


def _dispatch_dual(
    layer: Any,
    program: Program,
    inputs: Sequence[Tensor],
    duals: Duals,
    request: Request,
) -> Evaluated:
    """Evaluate a program on dual numbers that the user made, at this level.

    Values and tangents have a node in common, for gradients of the tangents. Values
    get another one, evaluated on dual numbers, so that their gradients have tangents.
    """
    dual = duals.of(program, [*map(_requires_grad, duals.primals)])
    flat, request = [*duals.primals, *duals.tangents], duals.request(dual, request)
    saved = [*inputs, *duals.tangents]  # so that gradients of tangents have tangents
    if layer is None:
        evaluated = _evaluate_at_base(dual, flat, request, saved)
    else:
        evaluated = _dispatch_at(layer, dual, flat, request, saved)
    found = taken_apart(dual, *evaluated)
    evaluation, outs = found.evaluation._replace(shared=()), found.outs
    is_needed = is_recorded(duals.primals)
    ends = _ends(evaluation, duals.primals) if is_needed else ()
    if ends:
        alone = Tensor.detach if layer is None else without_node
        outs = [None if o is None else alone(o) for o in outs]
        outs = apply_at_level(_apply, (program, evaluation, inputs, outs), *ends)
    return found.joined(outs), found.evaluation


def _evaluate_at_base(
    program: Program,
    inputs: Sequence[Tensor],
    request: Request,
    saved: Sequence[Tensor] | None = None,
) -> Evaluated:
    outs, evaluation = without_grad_mode(program.evaluate, inputs, request)
    # If only levels above differentiate, nothing is to be saved down here.
    if request.at_base or is_recorded(inputs):
        ends = _ends(evaluation, inputs)
        if ends:
            outs = _apply((program, evaluation, saved or inputs, outs), *ends)
    return outs, evaluation


def _ends(evaluation: Evaluation, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the inputs that a node has edges to; none if there is to be no node."""
    if len(evaluation.used) < len(inputs):
        inputs = [inputs[i] for i in evaluation.used]
    return inputs if True in map(_requires_grad, inputs) else ()


def _dispatch_below_vmap(
    program: Program,
    request: Request,
    inputs: tuple[Any, ...],
    in_dims: tuple[Any, ...],
    size: int,
    randomness: str,
) -> tuple[Any, Any, Evaluation]:
    needs = [*map(requires_grad_at_any_level, inputs)]
    pairs = zip(request.needs, needs, strict=True)
    needs_outside = [need and not below for need, below in pairs]
    request = request._replace(needs=needs, is_batched=True)
    batch = Batch(program, needs_outside, (in_dims, size, randomness))
    outs, evaluation = dispatch(batch, inputs, request)
    updated = [in_dims[i] for i in evaluation.updated]
    out_dims = (*batch.out_dims, *updated, *[None] * evaluation.residuals)
    return tuple(outs), out_dims, evaluation


class Remat(SingleLevelFunction):
    """The node of a program's evaluation, at a level of `grad` or at the base.

    Its inputs are those of the program that it has edges to. On its context it has

        program         the program
        evaluation      what its evaluation found
    """

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, evaluated: tuple[Any, ...], *_: Tensor
    ) -> Any:
        """Save the inputs of the program, and the residuals."""
        program, evaluation, inputs, outs = evaluated
        ctx.program, ctx.evaluation = program, evaluation
        ctx.set_materialize_grads(False)
        request, differentiable = evaluation.request, evaluation.differentiable
        saved: Sequence[Tensor] = inputs
        if evaluation.updated or evaluation.recomputation is not None:
            saved = _saved(evaluation, inputs, outs)
            if request.at_base and evaluation.residuals:
                # No level further up saves them.
                outs = outs[: -evaluation.residuals]
                differentiable = differentiable[: -evaluation.residuals]
        if evaluation.shared:
            # The levels below record the views: there this node does not replace them.
            with torch.set_grad_enabled(not request.at_base):
                outs = _as_views(outs, evaluation.shared)
        if evaluation.has_inference:
            # Inference tensors cannot be saved, but copies of them can.
            saved = [t.clone() if t.is_inference() else t for t in saved]
        ctx.save_for_backward(*saved)
        if False in differentiable:
            pairs = zip(outs, differentiable, strict=True)
            others = [o for o, d in pairs if o is not None and not d]
            ctx.mark_non_differentiable(*others)
        return tuple(outs)

    @staticmethod
    @override
    @eager_only
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Call the vjp for the gradients wanted, given the cotangents there are."""
        needs, evaluation = ctx.needs_input_grad, ctx.evaluation
        given = [j for j, ct in enumerate(cotangents) if ct is not None]
        if False in evaluation.differentiable:
            given = [j for j in given if evaluation.differentiable[j]]
        ends = wanted = evaluation.used
        if needs.count(True) < len(ends):
            needed = [*compress(ends, needs[1:])]
            wanted = [i for i in wanted if i in needed]
        if not (wanted and given):
            return (None,) * len(needs)
        primals: Sequence[Tensor] = saved_tensors(ctx)
        if not evaluation.request.at_base:  # their level may be gone
            primals = [*map(unwrap_dead, primals)]
        rule = vjp_of(ctx.program, evaluation, len(primals), wanted, given)
        there: list[Any] = [cotangents[j] for j in given]
        cts = [*map(unwrap_dead, there)]
        try:
            with counted_levels():
                found = outside_inference_mode(_pulled, rule, primals, cts)
        except Exception as error:
            hide_frames(error)
            raise
        if len(found) == len(ends):
            return (None, *found)
        grads = dict(zip(wanted, found, strict=True))
        return (None, *map(grads.get, ends))


def _pulled(rule: Program, primals: Sequence[Tensor], cts: Sequence[Any]) -> Any:
    """Evaluate a vjp. No node can save a cotangent that inference mode made."""
    cts = [ct.clone() if ct.is_inference() else ct for ct in cts]
    return call(rule, [*primals, *cts])


_apply: Any = Remat.apply
_requires_grad = operator.attrgetter("requires_grad")


def _saved(
    evaluation: Evaluation, inputs: Sequence[Tensor], outs: Sequence[Any]
) -> Sequence[Tensor]:
    """Return what a node saves: the inputs as they were before, and the residuals."""
    end = len(outs) - evaluation.residuals
    updated, recomputation = evaluation.updated, evaluation.recomputation
    if updated:
        inputs = replace(inputs, updated, outs[end - len(updated) : end])
    if recomputation is None:
        return inputs
    return [*recomputation.kept(inputs), *outs[end:]]


def _as_views(outs: Sequence[Any], shared: Collection[int]) -> list[Any]:
    """Make outputs that share memory views, so that torch refuses to change them."""
    # Past the modes of a tracer nobody would know what the alias is of.
    view = torch.ops.aten.alias.default if is_below_tracer() else alias
    return [view(o) if j in shared else o for j, o in enumerate(outs)]
