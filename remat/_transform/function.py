"""The lowering to one recursive Function, whose rules are again programs.

    dispatch(program, inputs)      run the program, then make a node of the graph
    backward(ctx, *cotangents)  =  call(Vjp(program), *inputs, *cotangents)
    jvp(ctx, *tangents)         =  call(Jvp(program), *inputs, *tangents)
    vmap(in_dims)               =  dispatch(Batch(program, in_dims), ...), a level down

`api` calls `evaluate_differentiably` with a user's call as a program (`primal`).

The forward runs first, a level down. The node is made once it is known which inputs
the outputs depend on. It has edges to those, and where there are none there is no node.

Invariant: a graph made here holds the inputs of a call and what its policy keeps, and
nothing else that was computed in it, at every level and order. So a backward is itself
a call: `torch.func.grad` keeps the graph of the backward, and would keep all that a
recompute inside saves.
Rejected: a Function made anew for each call (functorch's way, eight times the cost),
and `jvp` as plain code (silent zeros for jacfwd of jacfwd).
"""

import functools
import itertools
import operator
from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.context import here
from remat._base.program import Evaluation, Program, Request, has_derivatives
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
    current_layer,
    dual_level_active,
    eager_only,
    forward_ad_enabled,
    is_below_tracer,
    kind_of,
    levels_here,
    lifted,
    requires_grad_at_any_level,
    saved_tensors,
    unwrap_dead,
    unwrap_for_grad,
    without_grad_mode,
    without_tangent,
    wrap_for_grad,
)
from remat._transform.rules import Batch, Jvp, is_recorded, replace, vjp_of


def call(program: Program, inputs: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate `program`, differentiably at every level."""
    if torch.is_grad_enabled():
        outs = evaluate_differentiably(
            program, inputs, [*map(requires_grad_at_any_level, inputs)]
        )
        if outs is not None:
            return outs
    layer = current_layer()
    if layer is None or kind_of(layer) != GRAD:
        return program.run(*inputs)
    # In a level of its own it would run other operations than the forward did.
    level = layer.level()
    below = [unwrap_for_grad(t, level) for t in inputs]
    outs = call_below(layer, GRAD, call, program, below)
    return [None if o is None else wrap_for_grad(o, level) for o in outs]


@eager_only
def evaluate_differentiably(
    program: Program, inputs: Sequence[Tensor], needs: Sequence[bool]
) -> Sequence[Any] | None:
    """Evaluate `program` if something is differentiated; else return None.

    Args:
        program: to evaluate.
        inputs: to evaluate it on.
        needs: which of them require grad, at any level.

    Raises:
        NotImplementedError: two levels of forward mode, one in the other, are around
            a level of `grad`.
    """
    if True not in needs:
        return None
    layer = current_layer()
    if layer is not None and layer.level() > 2 and _is_forward_twice_around_reverse():
        raise NotImplementedError(_TWICE_FORWARD)
    return _dispatch_at(layer, program, inputs, Request(needs, layer is None))[0]


def _is_forward_twice_around_reverse() -> bool:
    """Say whether two levels of forward mode, one in the other, are around `grad`.

    That is a level of the user's. A level of `grad` between the two parts them. What is
    around the first level of a rule is what the rule is for.
    """
    of_rules = here().rule_levels
    first = of_rules[0] if of_rules else 0
    levels = [(k, n) for k, n in levels_here() if n >= first and k != VMAP]
    users = [i for i, (k, n) in enumerate(levels) if k == GRAD and n not in of_rules]
    around = [k for k, _ in levels[: users[-1]]] if users else []
    return (JVP, JVP) in itertools.pairwise(around)


Evaluated: TypeAlias = tuple[Sequence[Any], Evaluation]


def dispatch(program: Program, inputs: Sequence[Tensor], request: Request) -> Evaluated:
    """Evaluate `program` by the innermost torch.func transform."""
    return _dispatch_at(current_layer(), program, inputs, request)


def _dispatch_at(
    layer: Any, program: Program, inputs: Sequence[Tensor], request: Request
) -> Evaluated:
    if layer is None:
        return _dispatch_at_base(program, inputs, request)
    kind = kind_of(layer)
    if kind == VMAP:
        below_vmap = functools.partial(_dispatch_below_vmap, program, request)
        return batched(inputs, below_vmap)
    in_forward_mode, level = kind == JVP, layer.level()
    if dual_level_active():
        inputs = lifted(layer, kind, inputs)
        in_forward_mode = in_forward_mode or base_dual_level_active()
    if in_forward_mode:
        request = _in_forward_mode(request)
    below = [unwrap_for_grad(t, level) for t in inputs]
    results, evaluation = call_below(layer, kind, dispatch, program, below, request)
    outs = [None if o is None else wrap_for_grad(o, level) for o in results]
    ends = inputs
    if True in map(_requires_grad, below):
        # A constant of this level must have no edge to what is differentiated below.
        ends = lifted(layer, kind, inputs)
    ends = _ends(evaluation, ends, in_forward_mode)
    if ends:
        if in_forward_mode:
            outs = _dense(outs)
        evaluated = program, evaluation, inputs, outs, in_forward_mode
        outs = apply_at_level(_apply, evaluated, *ends)
    return outs, evaluation


def _dispatch_at_base(
    program: Program, inputs: Sequence[Tensor], request: Request
) -> Evaluated:
    in_forward_mode = base_dual_level_active()
    if in_forward_mode:
        request = _in_forward_mode(request)
        with forward_ad_enabled(False):
            outs, evaluation = without_grad_mode(program.evaluate, inputs, request)
    else:
        outs, evaluation = without_grad_mode(program.evaluate, inputs, request)
    # If only levels above differentiate, nothing is to be saved down here.
    if request.at_base or in_forward_mode or is_recorded(inputs):
        ends = _ends(evaluation, inputs, in_forward_mode)
        if ends:
            if in_forward_mode:
                outs = _dense(outs)
            evaluated = program, evaluation, inputs, outs, in_forward_mode
            outs = _apply(evaluated, *ends)
    return outs, evaluation


def _in_forward_mode(request: Request) -> Request:
    return request._replace(in_forward_mode=True)


def _ends(
    evaluation: Evaluation, inputs: Sequence[Tensor], in_forward_mode: bool
) -> Sequence[Tensor]:
    """Return the inputs that a node has edges to; none if there is to be no node.

    In forward mode any input may have a tangent.
    """
    if in_forward_mode:
        return inputs
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
    """The node of a program's evaluation, at one level: a grad or jvp one, or the base.

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
        program, evaluation, inputs, outs, in_forward_mode = evaluated
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
        # Forward mode wants the tangent of a view to be a view, and a rule gives none.
        if evaluation.shared and not in_forward_mode:
            # The levels below record the views: there this node does not replace them.
            with torch.set_grad_enabled(not request.at_base):
                outs = _as_views(outs, evaluation.shared)
        if evaluation.has_inference:
            # Inference tensors cannot be saved, but copies of them can.
            saved = [t.clone() if t.is_inference() else t for t in saved]
        ctx.save_for_backward(*saved)
        if in_forward_mode:
            ctx.save_for_forward(*saved)
            differentiable = [has_derivatives(o) for o in outs]
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
        # A node of forward mode has an edge to each input.
        ends = wanted = evaluation.used
        if len(ends) < len(needs) - 1:
            ends = range(len(needs) - 1)
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
            found = outside_inference_mode(_pulled, rule, primals, cts)
        except Exception as error:
            hide_frames(error)
            raise
        if len(found) == len(ends):
            return (None, *found)
        grads = dict(zip(wanted, found, strict=True))
        return (None, *map(grads.get, ends))

    @staticmethod
    @override
    @eager_only
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        """Call the jvp, given the tangents there are."""
        given = [i for i, t in enumerate(tangents) if t is not None]
        primals = [without_tangent(t) for t in ctx.saved_tensors]
        rule = Jvp(ctx.program, ctx.evaluation, len(primals), given)
        there: list[Any] = [tangents[i] for i in given]
        return tuple(call(rule, [*map(unwrap_dead, (*primals, *there))]))


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


def _dense(outs: Sequence[Any]) -> list[Any]:
    """Copy outputs that are expanded.

    torch copies a tangent into memory that is laid out like the output. Not to be
    called in the forward of a Function, where levels below would record no copy.
    """
    return [o.contiguous() if _is_expanded(o) else o for o in outs]


def _is_expanded(tensor: Tensor | None) -> bool:
    """Say whether several elements of a tensor are one in memory, by `expand`."""
    if tensor is None or tensor.layout != torch.strided or tensor.is_nested:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def _as_views(outs: Sequence[Any], shared: Collection[int]) -> list[Any]:
    """Make outputs that share memory views, so that torch refuses to change them."""
    # Past the modes of a tracer nobody would know what the alias is of.
    view = torch.ops.aten.alias.default if is_below_tracer() else alias
    return [view(o) if j in shared else o for j, o in enumerate(outs)]


_TWICE_FORWARD = (
    "remat: forward mode is used twice around reverse mode, as in jvp(jvp(grad(f))), "
    "jacfwd(hessian(f)) or jacfwd(jacfwd(grad(f))): a rematerialized function has no "
    "third derivatives in that order. Use reverse mode once more, as in "
    "jvp(grad(grad(f))) or jacrev(hessian(f)), or call f without remat."
)
