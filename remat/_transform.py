"""The transform: one Function that evaluates programs, each rule again a program.

    forward(program, *leaves)      run the program, keep its inputs, what a policy keeps
    backward(ctx, *cotangents)  =  call(Vjp(program), *inputs, *cotangents)
    jvp(ctx, *tangents)         =  call(Jvp(program), *inputs, *tangents)
    vmap(in_dims)               =  dispatch(Batch(program, in_dims), ...), a level down

Invariant: a graph made here retains the inputs of a call, and nothing computed in it
but what its policy keeps, at every level and of every order. So a backward is itself a
call: `torch.func.grad` retains the graph of the backward, and with it whatever an
inline recomputation had saved; it would save nothing at all.
Rejected: a Function made anew for each call (functorch's way, eight times the cost),
and `jvp` as plain code (silent zeros for jacfwd of jacfwd).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._compat import (
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
    grad_mode,
    kind_of,
    lifted,
    requires_grad_at_any_level,
    saved_tensors,
    unwrap_dead,
    unwrap_for_grad,
    viewed,
    with_autograd,
    without_tangent,
    wrap_for_grad,
)
from remat._program import Facts, Program, has_derivatives
from remat._rules import Batch, Jvp, Vjp, records, replace


def call(program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate `program`, differentiably at every level."""
    if not torch.is_grad_enabled():
        return program.run(*leaves)
    outs = record(program, leaves, [*map(requires_grad_at_any_level, leaves)])
    return program.run(*leaves) if outs is None else outs


@eager_only
def record(
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
        if program.facts.exact or base_dual_level_active() or records(leaves):
            return _apply(None, program, *leaves)
        # Only levels above differentiate: nothing is to be saved down here.
        may_be_inference = not torch.is_grad_enabled()
        with grad_mode(False):
            if may_be_inference:
                return with_autograd(program.evaluate, leaves)
            return program.evaluate(leaves)
    kind = kind_of(layer)
    if kind == VMAP:
        return batched(leaves, functools.partial(_dispatch_batch, program))
    if dual_level_active():
        leaves = lifted(layer, kind, leaves)
    return apply_at_level(_apply, (layer, kind), program, *leaves)


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
    """Evaluates a program at one level.

    That is the base, where `layer` is None, or a grad or jvp level of torch.func, given
    as its interpreter and kind.
    """

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, layer: Any, program: Program, *leaves: Tensor
    ) -> Any:
        """Evaluate here, or one level down, and save the inputs."""
        ctx.program = program
        ctx.set_materialize_grads(False)
        facts = program.facts
        forward_mode = base_dual_level_active() or (layer or _BASE)[1] == JVP
        if forward_mode:
            facts.pushed = True
        if layer is None:
            outs = program.evaluate(leaves)
        else:
            outs = _evaluate_below(layer, program, leaves)
        saved: Sequence[Tensor] = leaves
        if facts.kept or facts.recipe is not None:
            saved = _saved(facts, leaves, outs)
            if facts.exact and facts.residuals:  # there is no level to hand them up to
                outs = outs[: -facts.residuals]
                facts.differentiable = facts.differentiable[: -facts.residuals]
        # Forward mode wants the tangent of a view to be a view, which ours is not.
        if facts.views and not (facts.batched or forward_mode):
            outs = _as_views(outs, leaves, facts.views)
        if facts.untracked:
            # Inference tensors cannot be saved, but copies of them can.
            saved = [t.clone() if t.is_inference() else t for t in saved]
        ctx.save_for_backward(*saved)
        if forward_mode:
            ctx.save_for_forward(*saved)
        differentiable = (
            [has_derivatives(o) for o in outs]
            if forward_mode
            else _differentiable(facts, leaves)
        )
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
        wanted = facts.used
        if needs.count(True) < len(needs) - 2:
            wanted = [i for i in wanted if needs[i + 2]]
        grads: list[Tensor | None] = [None] * len(needs)
        if wanted and given:
            primals: Sequence[Tensor] = saved_tensors(ctx)
            if not facts.exact:  # a level may be gone that they are of
                primals = [*map(unwrap_dead, primals)]
            rule = Vjp(program, len(primals), wanted, given)
            ours: list[Any] = [cotangents[j] for j in given]
            cts = [*map(unwrap_dead, ours)]
            found = call(rule, [*primals, *cts])
            if len(found) == len(needs) - 2:  # in their order, for none is left out
                return (None, None, *found)
            for i, grad in zip(wanted, found, strict=True):
                grads[i + 2] = grad
        return tuple(grads)

    @staticmethod
    @override
    @eager_only
    def jvp(ctx: Any, _layer: Any, _program: Any, *tangents: Tensor | None) -> Any:
        """Call the jvp, given the tangents there are."""
        program: Program = ctx.program
        given = [i for i, t in enumerate(tangents) if t is not None]
        primals = [without_tangent(t) for t in ctx.saved_tensors]
        rule = Jvp(program, len(primals), given)
        ours: list[Any] = [tangents[i] for i in given]
        return tuple(call(rule, [*map(unwrap_dead, (*primals, *ours))]))


_apply: Any = Remat.apply
_BASE = None, None


def _saved(
    facts: Facts, leaves: Sequence[Tensor], outs: Sequence[Any]
) -> Sequence[Tensor]:
    """Return what is saved: the leaves as they were before, and the residuals."""
    end = len(outs) - facts.residuals
    if facts.kept:
        leaves = replace(leaves, facts.kept, outs[end - len(facts.kept) : end])
    if facts.recipe is None:
        return leaves
    return [*facts.recipe.kept(leaves), *outs[end:]]


def _evaluate_below(
    layer: tuple[Any, int], program: Program, leaves: Sequence[Tensor]
) -> Sequence[Any]:
    level = layer[0].level()
    below = [unwrap_for_grad(t, level) for t in leaves]
    outs = call_below(*layer, dispatch, program, below)
    return [None if o is None else wrap_for_grad(o, level) for o in outs]


def _differentiable(facts: Facts, leaves: Sequence[Tensor]) -> Sequence[bool]:
    """Say which outputs are differentiable at this level."""
    if facts.exact or True in [leaves[i].requires_grad for i in facts.used]:
        return facts.differentiable
    # Some leaf of this level led here, but none that the outputs depend on.
    return [False] * len(facts.differentiable)


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
