"""The transform: one Function that evaluates programs, each rule again a program.

    dispatch(program, leaves)      run the program, then make a node of the graph
    backward(ctx, *cotangents)  =  call(Vjp(program), *inputs, *cotangents)
    jvp(ctx, *tangents)         =  call(Jvp(program), *inputs, *tangents)
    vmap(in_dims)               =  dispatch(Batch(program, in_dims), ...), a level down

The forward runs first, a level down. The node is made when it is known which leaves
the results depend on: it has edges to those, and where there are none there is no node.

Invariant: a graph made here retains the inputs of a call, and nothing computed in it
but what its policy keeps, at every level and of every order. So a backward is itself a
call: `torch.func.grad` retains the graph of the backward, and with it whatever an
inline recomputation had saved; it would save nothing at all.
Rejected: a Function made anew for each call (functorch's way, eight times the cost),
and `jvp` as plain code (silent zeros for jacfwd of jacfwd).
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.program import Facts, Program, has_derivatives
from remat._base.tracebacks import hide_frames
from remat._torch import (
    GRAD,
    JVP,
    VMAP,
    SingleLevelFunction,
    apply_at_level,
    base_dual_level_active,
    batched,
    call_below,
    current_layer,
    dual_level_active,
    eager_only,
    forward_ad_enabled,
    kind_of,
    lifted,
    requires_grad_at_any_level,
    saved_tensors,
    unwrap_dead,
    unwrap_for_grad,
    viewed,
    without_grad_mode,
    without_tangent,
    wrap_for_grad,
)
from remat._transform.rules import Batch, Jvp, Vjp, records, replace


def call(program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate `program`, differentiably at every level."""
    if torch.is_grad_enabled():
        outs = evaluate_differentiably(
            program, leaves, [*map(requires_grad_at_any_level, leaves)]
        )
        if outs is not None:
            return outs
    layer = current_layer()
    if layer is None or kind_of(layer) != GRAD:
        return program.run(*leaves)
    # In a level of its own it would do other operations than the forward did.
    level = layer.level()
    below = [unwrap_for_grad(t, level) for t in leaves]
    outs = call_below(layer, GRAD, call, program, below)
    return [None if o is None else wrap_for_grad(o, level) for o in outs]


@eager_only
def evaluate_differentiably(
    program: Program, leaves: Sequence[Tensor], needs: list[bool]
) -> Sequence[Any] | None:
    """Evaluate `program` if there is something to differentiate."""
    if True not in needs:
        return None
    layer = current_layer()
    program.facts = Facts(needs, program.uses(len(needs)), exact=layer is None)
    return _dispatch_at(layer, program, leaves)


def dispatch(program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate `program` by the innermost torch.func transform."""
    return _dispatch_at(current_layer(), program, leaves)


def _dispatch_at(
    layer: Any, program: Program, leaves: Sequence[Tensor]
) -> Sequence[Any]:
    if layer is None:
        return _dispatch_at_base(program, leaves)
    kind = kind_of(layer)
    if kind == VMAP:
        return batched(leaves, functools.partial(_dispatch_batch, program))
    forward_mode, level = kind == JVP, layer.level()
    if dual_level_active():
        leaves = lifted(layer, kind, leaves)
        forward_mode = forward_mode or base_dual_level_active()
    if forward_mode:
        program.facts.in_forward_mode = True
    below = [unwrap_for_grad(t, level) for t in leaves]
    results = call_below(layer, kind, dispatch, program, below)
    outs = [None if o is None else wrap_for_grad(o, level) for o in results]
    ends = leaves
    if True in map(_requires_grad, below):
        # What is a constant of this level is to have no edge to what is below.
        ends = lifted(layer, kind, leaves)
    ends = _ends(program.facts, ends, forward_mode)
    if not ends:
        return outs
    return apply_at_level(_apply, (program, leaves, outs, forward_mode), *ends)


def _dispatch_at_base(program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
    facts, forward_mode = program.facts, base_dual_level_active()
    if forward_mode:
        facts.in_forward_mode = True
        with forward_ad_enabled(False):
            outs = without_grad_mode(program.evaluate, leaves)
    else:
        outs = without_grad_mode(program.evaluate, leaves)
    # If only levels above differentiate, nothing is to be saved down here.
    if not (facts.exact or forward_mode or records(leaves)):
        return outs
    ends = _ends(facts, leaves, forward_mode)
    return _apply((program, leaves, outs, forward_mode), *ends) if ends else outs


def _ends(
    facts: Facts, leaves: Sequence[Tensor], forward_mode: bool
) -> Sequence[Tensor]:
    """Return the leaves that a node has edges to; none if there is to be no node.

    In forward mode any leaf may have a tangent.
    """
    if forward_mode:
        return leaves
    if len(facts.used) < len(leaves):
        leaves = [leaves[i] for i in facts.used]
    return leaves if True in map(_requires_grad, leaves) else ()


def _dispatch_batch(
    program: Program,
    leaves: tuple[Any, ...],
    in_dims: tuple[Any, ...],
    size: int,
    randomness: str,
) -> tuple[Any, Any]:
    facts = program.facts
    below = [*map(requires_grad_at_any_level, leaves)]
    above = [n and not b for n, b in zip(facts.needs, below, strict=True)]
    facts.batched, facts.needs = True, below
    inner = Batch(program, above, (in_dims, size, randomness))
    outs = dispatch(inner, leaves)
    kept = [in_dims[i] for i in facts.kept]
    return tuple(outs), (*inner.out_dims, *kept, *[None] * facts.residuals)


class Remat(SingleLevelFunction):
    """The node of a program's evaluation, at one level: a grad or jvp one, or the base.

    Its inputs are the leaves that it has edges to.
    """

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, evaluated: tuple[Any, ...], *_: Tensor
    ) -> Any:
        """Save the inputs of the program, and what it hands up to be kept."""
        program, leaves, outs, forward_mode = evaluated
        ctx.program = program
        ctx.set_materialize_grads(False)
        facts: Facts = program.facts
        saved: Sequence[Tensor] = leaves
        if facts.kept or facts.recomputation is not None:
            saved = _saved(facts, leaves, outs)
            if facts.exact and facts.residuals:  # there is no level to hand them up to
                outs = outs[: -facts.residuals]
                facts.differentiable = facts.differentiable[: -facts.residuals]
        # Forward mode wants the tangent of a view to be a view, which ours is not.
        if facts.views and not (facts.batched or forward_mode):
            # On record, for the levels below: at its own, the node takes their place.
            with torch.set_grad_enabled(not facts.exact):
                outs = _as_views(outs, leaves, facts.views)
        if facts.untracked:
            # Inference tensors cannot be saved, but copies of them can.
            saved = [t.clone() if t.is_inference() else t for t in saved]
        ctx.save_for_backward(*saved)
        if forward_mode:
            ctx.save_for_forward(*saved)
        differentiable = facts.differentiable
        if forward_mode:
            differentiable = [has_derivatives(o) for o in outs]
        if False in differentiable:
            pairs = zip(outs, differentiable, strict=True)
            constant = [o for o, d in pairs if o is not None and not d]
            ctx.mark_non_differentiable(*constant)
        return tuple(outs)

    @staticmethod
    @override
    @eager_only
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Call the vjp for the gradients wanted, given the cotangents there are."""
        program: Program = ctx.program
        needs, facts = ctx.needs_input_grad, program.facts
        given = [j for j, ct in enumerate(cotangents) if ct is not None]
        if False in facts.differentiable:
            given = [j for j in given if facts.differentiable[j]]
        # A node of forward mode has an edge to each leaf.
        ends = wanted = facts.used
        if len(ends) < len(needs) - 1:
            ends = range(len(needs) - 1)
        if needs.count(True) < len(ends):
            needed = [*compress(ends, needs[1:])]
            wanted = [i for i in wanted if i in needed]
        if wanted and given:
            primals: Sequence[Tensor] = saved_tensors(ctx)
            if not facts.exact:  # a level may be gone that they are of
                primals = [*map(unwrap_dead, primals)]
            rule = Vjp(program, len(primals), wanted, given)
            ours: list[Any] = [cotangents[j] for j in given]
            cts = [*map(unwrap_dead, ours)]
            try:
                found = call(rule, [*primals, *cts])
            except Exception as error:
                hide_frames(error)
                raise
            if len(found) == len(ends):
                return (None, *found)
            grads = dict(zip(wanted, found, strict=True))
            return (None, *map(grads.get, ends))
        return (None,) * len(needs)

    @staticmethod
    @override
    @eager_only
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        """Call the jvp, given the tangents there are."""
        program: Program = ctx.program
        given = [i for i, t in enumerate(tangents) if t is not None]
        primals = [without_tangent(t) for t in ctx.saved_tensors]
        rule = Jvp(program, len(primals), given)
        ours: list[Any] = [tangents[i] for i in given]
        return tuple(call(rule, [*map(unwrap_dead, (*primals, *ours))]))


_apply: Any = Remat.apply
_requires_grad = operator.attrgetter("requires_grad")


def _saved(
    facts: Facts, leaves: Sequence[Tensor], outs: Sequence[Any]
) -> Sequence[Tensor]:
    """Return what is saved: the leaves as they were before, and the residuals."""
    end = len(outs) - facts.residuals
    if facts.kept:
        leaves = replace(leaves, facts.kept, outs[end - len(facts.kept) : end])
    if facts.recomputation is None:
        return leaves
    return [*facts.recomputation.kept(leaves), *outs[end:]]


def _as_views(
    outs: Sequence[Any], leaves: Sequence[Tensor], views: Mapping[int, int]
) -> list[Any]:
    """Make outputs that share memory views, so that torch refuses to change them."""
    new = list(outs)
    for j, i in views.items():
        o = outs[j]
        source = _as_kind(leaves[i] if i >= 0 else outs[~i], o)
        if source is None:
            new[j] = o.clone()  # shares no memory any more, and so loses no gradient
        else:
            # Past the modes that record, for it is none of the function's operations.
            new[j] = viewed(source, o.size(), o.stride(), o.storage_offset())
    return new


def _as_kind(tensor: Tensor, like: Tensor) -> Tensor | None:
    """Return a view of `tensor` of the dtype and bits of `like`, if there is one."""
    if tensor.layout is not torch.strided or like.layout is not torch.strided:
        return None
    if tensor.is_complex() and not like.is_complex() and not tensor.is_conj():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype != like.dtype:
        return None
    if tensor.is_conj() != like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() != like.is_neg() else tensor
