"""The programs derived from a program: its vjp, its jvp, its batching.

Invariant: each is again a flat function of tensors that recomputes what it needs and
keeps nothing. At the base it uses plain autograd and dual numbers, which cost half of
`torch.func.vjp` and `jvp`; below a vmap those, in a level of their own.
"""

import functools
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import override

from remat._base.checks import reached_leaves
from remat._base.context import differentiated
from remat._base.program import Above, Program, has_derivatives
from remat._base.types import Outputs
from remat._torch import (
    base_dual_level_active,
    batch,
    call_below_vmap,
    current_layer,
    forward_ad_enabled,
    grad_level,
    grad_mode,
    is_batch_of_cotangents,
    is_for_transforms,
    leaf_at,
    once_differentiable_function,
    pull_back,
    pull_in_grad_mode,
    unwrap_for_grad,
    without_hooks,
)
from remat._transform.foreign import edge_of, edges_behind


class Vjp(Program):
    """`(*primals, *cotangents) -> gradients` of a program.

    Args:
        of: the program.
        arity: how many primals it has.
        wanted: the primals to give the gradients of.
        given: the outputs that have cotangents.
    """

    __slots__ = (
        "_arity",
        "_at_base",
        "_given",
        "_in_grad_mode",
        "_of",
        "_wanted",
        "once",
    )
    once: Mapping[int, Any]

    def __init__(
        self, of: Program, arity: int, wanted: Sequence[int], given: Sequence[int]
    ) -> None:
        self._of, self._arity, self._wanted, self._given = of, arity, wanted, given
        self._in_grad_mode = torch.is_grad_enabled()
        self._at_base = current_layer() is None
        self.once = _NONE

    @override
    def uses(self, count: int) -> Sequence[int]:
        """Return the leaves that the program uses, and the cotangents."""
        facts = self._of.facts
        used: Sequence[int] = facts.used
        if facts.recomputation is not None and facts.recomputation.dropped:
            kept = facts.recomputation.kept(range(len(facts.needs)))
            used = [k for k, i in enumerate(kept) if i in facts.used]
        return (*used, *range(self._arity, count))

    @override
    def run(self, *leaves: Tensor, mode: Any = None) -> Outputs:
        """Recompute the program and pull the cotangents back through it."""
        del mode
        saved, cts = leaves[: self._arity], leaves[self._arity :]
        recomputation = self._of.facts.recomputation
        with differentiated():
            if recomputation is None:
                return self._pull(cts, saved, None)
            pull = functools.partial(self._pull, cts)
            return recomputation.carry_out(self._given, saved, pull)

    def _pull(
        self, cts: tuple[Tensor, ...], primals: Sequence[Tensor], mode: Any
    ) -> Outputs:
        recorded, checked = records((*primals, *cts)), False
        if current_layer() is None:
            inner, outs = self._recompute(primals, recorded, mode)
            checked = self._of.is_as_recorded(outs)
        elif self._of.facts.batched or not is_batch_of_cotangents(primals):
            recorded = torch.is_grad_enabled()  # perhaps below this level
            inner, outs = self._recompute_at_level(primals, mode)
        else:
            # One recomputation, and one set of draws, serves a batch of cotangents.
            inner, outs = call_below_vmap(self._recompute, primals, recorded, mode)
            checked = self._of.is_as_recorded(outs)
        grads = self._pull_back(outs, cts, inner, recorded=recorded, checked=checked)
        if NoneType in map(type, grads):
            pairs = zip(self._wanted, grads, strict=True)
            self._of.check_reached(outs, inner, [i for i, g in pairs if g is None])
        if self._of.once:
            self._check_once(grads)
        return grads

    def _pull_back(
        self,
        outs: Outputs,
        cts: Sequence[Tensor],
        inner: Sequence[Tensor],
        *,
        recorded: bool,
        checked: bool,
    ) -> Outputs:
        ours: Any = tuple([outs[j] for j in self._given])
        if not (checked or all(map(requires_grad, ours))):
            pairs = zip(ours, cts, strict=True)
            pairs = [(o, ct) for o, ct in pairs if requires_grad(o)]
            if not pairs:
                return (None,) * len(self._wanted)
            ours, cts = zip(*pairs, strict=True)
        if self._in_grad_mode and self._of.facts.asks_grad_mode and not recorded:
            pull_in_grad_mode(ours)
        inputs = tuple([inner[i] for i in self._wanted])
        if recorded:
            self.once = _once_differentiable(ours, inputs, at_base=self._at_base)
        return pull_back(ours, tuple(cts), inputs, create_graph=recorded)

    def _check_once(self, grads: Outputs) -> None:
        """Refuse second derivatives that torch refuses, and would be lost here.

        Raises:
            RuntimeError: a Function that is to be differentiated once leads to them.
        """
        none_left = {*map(type, grads)} == {NoneType}
        for j in self._of.once.keys() & {*self._given}:
            function, is_dropped = self._of.once[j]
            if not is_dropped or (none_left and self._at_base):
                raise RuntimeError(_ONCE.format(name=function.__qualname__))

    def _recompute(
        self, primals: Sequence[Tensor], recorded: bool, mode: Any
    ) -> tuple[Sequence[Tensor], Outputs]:
        needs = self._of.facts.needs
        if recorded:
            # Those that are differentiated here, though not in what records this.
            pairs = zip(needs, primals, strict=True)
            needs = [need and not t.requires_grad for need, t in pairs]
        inner = self._of.stand_ins(primals, needs)
        run = self._of.run
        if mode is not None:
            run = functools.partial(run, mode=mode)
        with grad_mode(True):
            outs = run(*inner) if recorded else without_hooks(run, *inner)
        return inner, outs

    def _recompute_at_level(
        self, primals: Sequence[Tensor], mode: Any
    ) -> tuple[Sequence[Tensor], Outputs]:
        """Recompute under transforms: in a level of its own."""
        with grad_level() as level, grad_mode(True):
            ours = [
                leaf_at(level, primals[i], requires_grad=True) for i in self._wanted
            ]
            inner = replace(primals, self._wanted, ours)
            return inner, self._of.run(*inner, mode=mode)


def _once_differentiable(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], *, at_base: bool
) -> dict[int, tuple[Any, bool]]:
    """Return which inputs lead to a Function that is to be differentiated once.

    And whether torch drops its second derivative, as torch.func does, and raises no
    error.
    """
    found: dict[int, tuple[Any, bool]] = {}
    for node, number in edges_behind(map(edge_of, outs)):
        function = once_differentiable_function(node)
        if function is not None:
            behind = edges_behind([(node, number)])
            known = function, not at_base and is_for_transforms(function)
            found |= {j: known for j, t in enumerate(inputs) if edge_of(t) in behind}
    return found


_NONE: Mapping[int, Any] = {}
_ONCE = (
    "remat: trying to differentiate twice a function that was marked with "
    "@once_differentiable: {name}. Its second derivative would be lost."
)


class Jvp(Program):
    """`(*primals, *tangents) -> tangents` of a program.

    Args:
        of: the program.
        arity: how many primals it has.
        given: those that have tangents.
    """

    __slots__ = ("_arity", "_given", "_of")

    def __init__(self, of: Program, arity: int, given: Sequence[int]) -> None:
        self._of, self._arity, self._given = of, arity, given

    @override
    def run(self, *leaves: Tensor, mode: Any = None) -> Outputs:
        """Recompute the program and push the tangents forward through it."""
        del mode
        if not self._of.facts.differentiable:
            return ()  # its results are inputs as they are
        primals, tangents = leaves[: self._arity], leaves[self._arity :]
        if base_dual_level_active():
            return self._push_dual(primals, tangents)
        positions: list[int] = []
        count = 0

        def of_given(*given: Tensor) -> Outputs:
            nonlocal positions, count
            outs = self._of.run(*replace(primals, self._given, given))
            positions = [j for j, o in enumerate(outs) if has_derivatives(o)]
            count = len(outs)
            return tuple(outs[j] for j in positions)

        given = tuple(primals[i] for i in self._given)
        in_forward_mode = torch.func.jvp(of_given, given, tuple(tangents))[1]
        return tuple(replace([None] * count, positions, in_forward_mode))

    def _push_dual(
        self, primals: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Outputs:
        # torch.func.jvp would open a second dual level, which torch refuses.
        with forward_ad_enabled(True):
            pairs = zip(self._given, tangents, strict=True)
            duals = [forward_ad.make_dual(primals[i], t) for i, t in pairs]
            outs = self._of.run(*replace(primals, self._given, duals))
            return tuple(map(_tangent, outs))


def _tangent(output: Tensor | None) -> Tensor | None:
    if output is None or not has_derivatives(output):
        return None
    tangent = forward_ad.unpack_dual(output).tangent
    # Plain code has no tangent here; torch wants one of every differentiable output.
    return torch.zeros_like(output) if tangent is None else tangent


class Batch(Program):
    """A program under vmap: the same call, seen from below that level.

    Args:
        of: the program.
        above: which leaves are differentiated only above the vmap.
        how: in_dims, batch size and randomness.

    Attributes:
        out_dims: where its outputs are batched, once it has run.
    """

    __slots__ = ("_above", "_how", "_of", "once", "out_dims")
    once: Mapping[int, Any]

    def __init__(
        self, of: Program, above: Sequence[bool], how: tuple[Any, int, str]
    ) -> None:
        self.facts = of.facts
        self.out_dims: tuple[Any, ...] = ()
        self._of, self._above, self._how = of, above, how
        self.once = _NONE

    @override
    def run(self, *leaves: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the program on every element of the batch."""
        of = self._of
        run = self._run_forward if of.is_forward and True in self._above else of.run
        run = functools.partial(run, mode=mode)
        outs, self.out_dims = batch(run, *self._how)(*leaves)
        self.once = of.once
        return outs

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        """That of the program, and how it is batched."""
        return (*self._of.signature, *self._above, *self._how)

    def _run_forward(self, *leaves: Tensor, mode: Any) -> Outputs:
        # As plain code sees them: requiring grad above the vmap and not below it, where
        # other kernels would be chosen.
        with grad_level() as level:
            pairs = zip(leaves, self._above, strict=True)
            inner = [leaf_at(level, t, requires_grad=a) for t, a in pairs]
            outs = self._of.run(*inner, mode=mode)
            if mode is not None:
                mode.note_saved(outs)
            flags = [j for j, o in enumerate(outs) if requires_grad(o)]
            used, asks_grad_mode = reached_leaves(outs, inner)
            found = Above(used, flags)
            self.facts.asks_grad_mode = self.facts.asks_grad_mode or asks_grad_mode
            self.facts.above = (*self.facts.above, found)
            return tuple(o if o is None else unwrap_for_grad(o, level) for o in outs)

    @override
    def check_reached(
        self, outs: Sequence[Any], inner: Sequence[Tensor], missing: Sequence[int]
    ) -> None:
        """Check that the program reaches what it reached."""
        self._of.check_reached(outs, inner, missing)

    @property
    @override
    def is_forward(self) -> bool:
        """Whether the next run is the forward of a user's call."""
        return self._of.is_forward

    @override
    def forward(self, program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
        """Be the forward of the user's call."""
        return self._of.forward(program, leaves)


def requires_grad(tensor: Tensor | None) -> bool:
    """Say whether an output can be differentiated."""
    return tensor is not None and tensor.requires_grad


def records(leaves: Sequence[Tensor]) -> bool:
    """Say whether autograd records what is done with `leaves`."""
    return torch.is_grad_enabled() and True in [t.requires_grad for t in leaves]


def replace(
    values: Sequence[Any], where: Sequence[int], by: Sequence[Any]
) -> list[Any]:
    """Return `values` with those at `where` replaced."""
    replaced = list(values)
    for i, value in zip(where, by, strict=True):
        replaced[i] = value
    return replaced
