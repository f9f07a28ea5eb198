"""The transform: one Function that evaluates programs, each of whose rules is again a program.

    forward(program, *leaves)      run the program, keep only its inputs
    backward(ctx, *cotangents)  =  call(Vjp(program), *inputs, *cotangents)
    jvp(ctx, *tangents)         =  call(Jvp(program), *inputs, *tangents)
    vmap(in_dims)               =  dispatch(Batch(program, in_dims), ...) one level down

Invariant: a graph made here retains the inputs of a call and nothing computed in it, at every level and every order. That is
why a backward is itself a call: `torch.func.grad` retains the graph of the backward, and with it whatever an inline
recomputation had saved (it would save nothing at all).
Rejected: one Function a level, made anew on each call (functorch's way, eight times the cost), and `jvp` as plain code (silent
zeros for jacfwd of jacfwd).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from remat._checks import reached_leaves
from remat._compat import (
    TransformType,
    apply_at_level,
    base_dual_level_active,
    batch,
    batched,
    call_below,
    dual_level_active,
    current_layer,
    forward_ad_enabled,
    grad_level,
    grad_mode,
    leaf_at,
    lifted,
    pull_back,
    requires_grad_at_any_level,
    saved_tensors,
    unwrap_dead,
    unwrap_for_grad,
    without_hooks,
    without_tangent,
    wrap_for_grad,
)
from remat._program import Above, Facts, Program, detached, has_derivatives
from remat._types import Outputs


def call(program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate `program`, differentiably at every level."""
    leaves = [*map(unwrap_dead, leaves)]
    outs = record(program, leaves) if torch.is_grad_enabled() else None
    return program.run(*leaves) if outs is None else outs


def record(program: Program, leaves: Sequence[Tensor]) -> Sequence[Any] | None:
    """Evaluate `program` if there is something to differentiate."""
    needs = [*map(requires_grad_at_any_level, leaves)]
    if True not in needs:
        return None
    exact = current_layer() is None
    program.facts = Facts(needs, program.uses(len(needs)), exact=exact)
    return dispatch(program, leaves)


def dispatch(program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate `program` by the innermost torch.func transform."""
    layer = current_layer()
    if layer is None:
        if program.facts.exact or base_dual_level_active() or _records(leaves):
            return Remat.apply(None, program, *leaves)
        # Only levels above differentiate: nothing is to be saved down here.
        with grad_mode(False):
            return program.evaluate(leaves)
    if layer.key() == TransformType.Vmap:
        return batched(leaves, functools.partial(_dispatch_batch, program))
    if dual_level_active():
        leaves = lifted(layer, leaves)
    return apply_at_level(Remat.apply, layer, program, *leaves)


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
    inner = Batch(program, above, in_dims, size, randomness)
    outs = dispatch(inner, leaves)
    kept = [in_dims[i] for i in facts.kept]
    return tuple(outs), (*inner.out_dims, *kept)


class Remat(Function):
    """Evaluates a program at one level: the base (`layer` None), or a grad or jvp level of torch.func."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Record past `Function.apply`, which inspects signatures on each call and sends torch.func's levels elsewhere."""
        return super(Function, cls).apply(*args)

    @staticmethod
    def forward(ctx: Any, layer: Any, program: Program, *leaves: Tensor) -> Any:
        """Evaluate here, or one level down, and save the inputs."""
        ctx.program = program
        ctx.set_materialize_grads(False)
        forward_mode = base_dual_level_active()
        if layer is None:
            outs = program.evaluate(leaves)
        else:
            forward_mode = forward_mode or layer.key() == TransformType.Jvp
            outs = _evaluate_below(layer, program, leaves)
        facts = program.facts
        if facts.kept:
            leaves = _replace(leaves, facts.kept, outs[-len(facts.kept) :])
        # Forward mode wants the tangent of a view to be a view, which ours is not.
        if facts.views and not (facts.batched or forward_mode):
            outs = _as_views(outs, leaves, facts.views)
        ctx.save_for_backward(*leaves)
        differentiable = facts.differentiable
        if forward_mode:
            ctx.save_for_forward(*leaves)
            differentiable = [has_derivatives(o) for o in outs]
        elif not facts.exact and True not in [leaves[i].requires_grad for i in facts.used]:
            # Some leaf of this level led here, but none that the outputs depend on.
            differentiable = [False] * len(outs)
        if False in differentiable:
            pairs = zip(outs, differentiable, strict=True)
            ctx.mark_non_differentiable(*[o for o, d in pairs if o is not None and not d])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Call the program's vjp for the gradients wanted here, given the cotangents that exist."""
        program: Program = ctx.program
        needs, facts = ctx.needs_input_grad, program.facts
        pairs = zip(cotangents, facts.differentiable, strict=True)
        given = [j for j, (ct, d) in enumerate(pairs) if d and ct is not None]
        wanted = [i for i in facts.used if needs[i + 2]]
        grads: list[Tensor | None] = [None] * len(needs)
        if wanted and given:
            primals = saved_tensors(ctx)
            rule = Vjp(program, len(primals), wanted, given)
            cts = [cotangents[j] for j in given]
            for i, grad in zip(wanted, call(rule, [*primals, *cts]), strict=True):
                grads[i + 2] = grad
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, _layer: Any, _program: Any, *tangents: Tensor | None) -> Any:
        """Call the program's jvp for the tangents that exist."""
        program: Program = ctx.program
        given = [i for i, t in enumerate(tangents) if t is not None]
        primals = [without_tangent(t) for t in ctx.saved_tensors]
        rule = Jvp(program, len(primals), given)
        return tuple(call(rule, [*primals, *(tangents[i] for i in given)]))


def _evaluate_below(
    layer: Any, program: Program, leaves: Sequence[Tensor]
) -> list[Any]:
    level = layer.level()
    below = [unwrap_for_grad(t, level) for t in leaves]
    outs = call_below(layer, dispatch, program, below)
    return [None if o is None else wrap_for_grad(o, level) for o in outs]


# --- Derived programs ---


class Vjp(Program):
    """`(*primals, *cotangents) -> gradients` of a program, for the primals wanted and the outputs given cotangents."""

    __slots__ = ("_arity", "_given", "_of", "_wanted")

    def __init__(
        self, of: Program, arity: int, wanted: Sequence[int], given: Sequence[int]
    ) -> None:
        self._of, self._arity, self._wanted, self._given = of, arity, wanted, given

    def uses(self, count: int) -> Sequence[int]:
        """Return the leaves that the program uses, and the cotangents."""
        return (*self._of.facts.used, *range(self._arity, count))

    def run(self, *leaves: Tensor) -> Outputs:
        """Recompute the program and pull the cotangents back through it."""
        primals, cts = leaves[: self._arity], leaves[self._arity :]
        if current_layer() is not None:
            return self._run_under_transforms(primals, cts)
        # Plain autograd: torch.func.vjp costs twice as much.
        recorded = _records(leaves)
        needs = self._of.facts.needs
        if recorded:
            # Those that are differentiated here, though not in what records this.
            needs = [n and not t.requires_grad for n, t in zip(needs, primals, strict=True)]
        primals = detached(primals, needs)
        run = self._of.run
        with grad_mode(True):
            outs = run(*primals) if recorded else without_hooks(run, *primals)
        checked = self._of.is_as_recorded(outs)
        outs = tuple([outs[j] for j in self._given])
        if not (checked or all(map(_requires_grad, outs))):
            pairs = zip(outs, cts, strict=True)
            pairs = [(o, ct) for o, ct in pairs if _requires_grad(o)]
            if not pairs:
                return (None,) * len(self._wanted)
            outs, cts = zip(*pairs, strict=True)
        inputs = tuple([primals[i] for i in self._wanted])
        return pull_back(outs, cts, inputs, recorded)

    def _run_under_transforms(
        self, primals: Sequence[Tensor], cts: Sequence[Tensor]
    ) -> Outputs:
        def of_wanted(*wanted: Tensor) -> Outputs:
            outs = self._of.run(*_replace(primals, self._wanted, wanted))
            return tuple(outs[j] for j in self._given)

        _, pull = torch.func.vjp(of_wanted, *(primals[i] for i in self._wanted))
        return pull(cts)


class Jvp(Program):
    """`(*primals, *tangents) -> tangents` of a program, for the primals that are given tangents."""

    __slots__ = ("_arity", "_given", "_of")

    def __init__(self, of: Program, arity: int, given: Sequence[int]) -> None:
        self._of, self._arity, self._given = of, arity, given

    def run(self, *leaves: Tensor) -> Outputs:
        """Recompute the program and push the tangents forward through it."""
        primals, tangents = leaves[: self._arity], leaves[self._arity :]
        if base_dual_level_active():
            return self._push_dual(primals, tangents)
        positions: list[int] = []
        count = 0

        def of_given(*given: Tensor) -> Outputs:
            nonlocal positions, count
            outs = self._of.run(*_replace(primals, self._given, given))
            positions = [j for j, o in enumerate(outs) if has_derivatives(o)]
            count = len(outs)
            return tuple(outs[j] for j in positions)

        given = tuple(primals[i] for i in self._given)
        _, pushed = torch.func.jvp(of_given, given, tuple(tangents))
        return tuple(_replace([None] * count, positions, pushed))

    def _push_dual(
        self, primals: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Outputs:
        # torch.func.jvp would open a second dual level, which torch refuses.
        with forward_ad_enabled(True):
            duals = [
                forward_ad.make_dual(primals[i], t)
                for i, t in zip(self._given, tangents, strict=True)
            ]
            outs = self._of.run(*_replace(primals, self._given, duals))
            return tuple(_tangent(o) if has_derivatives(o) else None for o in outs)


class Batch(Program):
    """A program under vmap: the same call, seen from below that level.

    `above` says which leaves are differentiated only above the vmap.
    """

    __slots__ = ("_above", "_how", "_of", "out_dims")

    def __init__(
        self,
        of: Program,
        above: list[bool],
        in_dims: tuple[Any, ...],
        size: int,
        randomness: str,
    ) -> None:
        self.facts = of.facts
        self.out_dims: tuple[Any, ...] = ()
        self._of, self._above = of, above
        self._how = in_dims, size, randomness

    def run(self, *leaves: Tensor) -> Outputs:
        """Evaluate the program on every element of the batch."""
        of = self._of
        run = self._run_forward if of.is_forward and True in self._above else of.run
        outs, self.out_dims = batch(run, *self._how)(*leaves)
        return outs

    def _run_forward(self, *leaves: Tensor) -> Outputs:
        # As plain code sees them: requiring grad above the vmap and not below it, where
        # other kernels would be chosen.
        with grad_level() as level:
            pairs = zip(leaves, self._above, strict=True)
            inner = [leaf_at(level, t, requires_grad=a) for t, a in pairs]
            outs = self._of.run(*inner)
            flags = [j for j, o in enumerate(outs) if _requires_grad(o)]
            found = Above(reached_leaves(outs, inner), flags)
            self.facts.above = (*self.facts.above, found)
            return tuple(None if o is None else unwrap_for_grad(o, level) for o in outs)

    @property
    def is_forward(self) -> bool:
        """Whether the next run is the forward of a user's call."""
        return self._of.is_forward

    @property
    def forward(self) -> Any:
        """The forward of the user's call."""
        return self._of.forward

    def evaluate(self, leaves: Sequence[Tensor]) -> Sequence[Any]:
        """Evaluate at the base."""
        return (
            self.forward(self, leaves) if self.is_forward else super().evaluate(leaves)
        )


def _as_views(
    outs: Sequence[Any], leaves: Sequence[Tensor], views: Mapping[int, int]
) -> list[Any]:
    """Make outputs that share an input's memory views of it.

    So that torch refuses to change them in place.
    """
    outs = list(outs)
    for j, i in views.items():
        o = outs[j]
        if o.dtype == leaves[i].dtype:
            outs[j] = leaves[i].as_strided(o.size(), o.stride(), o.storage_offset())
    return outs


def _records(leaves: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and True in [t.requires_grad for t in leaves]


def _replace(values: Sequence[Any], where: Sequence[int], by: Sequence[Any]) -> list[Any]:
    replaced = list(values)
    for i, value in zip(where, by, strict=True):
        replaced[i] = value
    return replaced


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _tangent(tensor: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(tensor).tangent
    # Plain code has no tangent here; torch wants one of every differentiable output.
    return torch.zeros_like(tensor) if tangent is None else tangent

