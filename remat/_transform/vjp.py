"""The vjp of a program, as a program: it recomputes, and pulls cotangents back.

The backward of a node, in `function`, makes one and evaluates it like any program.

Invariant: it recomputes what it needs and keeps nothing.
Rejected: `torch.func.vjp` at the base. Plain autograd costs half of that there. Under
transforms a level of `grad` is used.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.context import differentiated
from remat._base.program import Evaluation, Program, fresh_leaves
from remat._base.types import Outputs
from remat._base.wrappers import taken_apart
from remat._graph.edges import edge_of, edges_behind, root_of
from remat._partial.barrier import behind, recomputing_after
from remat._torch import (
    CollectivesInGraph,
    call_below_vmap,
    current_layer,
    dual_level_active,
    grad_level,
    grad_mode,
    has_proxies,
    is_batch_of_cotangents,
    is_for_transforms,
    leaf_at,
    once_differentiable_function,
    pull_back,
    pull_in_grad_mode,
    requires_grad_at_any_level,
    without_hooks,
)


class Vjp(Program):
    """`(*primals, *cotangents) -> gradients` of a program.

    Args:
        program: to be differentiated.
        evaluation: of its forward.
        arity: how many primals the node saved: inputs and residuals.
        wanted: the inputs to give the gradients of.
        given: the outputs that have cotangents.
    """

    __slots__ = (
        *("_arity", "_at_base", "_evaluation", "_given", "_in_grad_mode", "_program"),
        *("_wanted", "once"),
    )
    once: Mapping[int, Any]

    def __init__(
        self,
        program: Program,
        evaluation: Evaluation,
        arity: int,
        wanted: Sequence[int],
        given: Sequence[int],
    ) -> None:
        self._program, self._evaluation = program, evaluation
        self._arity, self._wanted, self._given = arity, wanted, given
        self._in_grad_mode = torch.is_grad_enabled()
        self._at_base = current_layer() is None
        self.once = _NONE

    @override
    def uses(self, count: int) -> Sequence[int]:
        """Return the primals that the program uses, and the cotangents."""
        evaluation = self._evaluation
        used, recomputation = evaluation.used, evaluation.recomputation
        if recomputation is not None and recomputation.dropped:
            saved = recomputation.kept(range(len(evaluation.request.needs)))
            used = [k for k, i in enumerate(saved) if i in used]
        return (*used, *range(self._arity, count))

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Recompute the program and pull the cotangents back through it."""
        del mode
        saved, cts = inputs[: self._arity], inputs[self._arity :]
        if has_proxies():
            return self._run_in_graph(saved, cts)
        return self._recompute_and_pull(saved, cts)

    def _run_in_graph(
        self, saved: Sequence[Tensor], cts: tuple[Tensor, ...]
    ) -> Outputs:
        self._program.refuse_changed(saved)
        collectives = CollectivesInGraph()
        with recomputing_after(cts) as after:
            grads = self._recompute_and_pull(self._read_late(saved, after), cts)
        if current_layer() is None and not is_recorded((*saved, *cts)):
            # Nobody reads the recompute from here on.
            given = [taken_apart(g)[0] for g in grads if isinstance(g, Tensor)]
            collectives.drop_unread(given)
        return grads

    def _read_late(self, saved: Sequence[Tensor], after: Sequence[Tensor]) -> list[Any]:
        may_read_early = self._program.may_read_early
        return [t if may_read_early(t) else behind(t, after) for t in saved]

    @override
    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        """Refuse what the program refuses."""
        self._program.refuse_changed(inputs[: self._arity])

    def _recompute_and_pull(
        self, saved: Sequence[Tensor], cts: tuple[Tensor, ...]
    ) -> Outputs:
        recomputation = self._evaluation.recomputation
        with differentiated():
            if recomputation is None:
                return self._pull(cts, saved, None)
            pull = functools.partial(self._pull, cts)
            return recomputation.carry_out(self._given, saved, pull)

    def _pull(
        self, cts: tuple[Tensor, ...], primals: Sequence[Tensor], mode: Any
    ) -> Outputs:
        program = self._program
        create_graph, is_checked = is_recorded((*primals, *cts)), False
        if current_layer() is None:
            inner, outs = self._recompute(primals, create_graph, mode)
            is_checked = program.check_outputs(outs)
        elif self._evaluation.request.is_batched or not is_batch_of_cotangents(primals):
            create_graph = torch.is_grad_enabled()  # perhaps below this level
            if self._in_grad_mode and self._evaluation.asks_grad_mode:
                # Kernels for a backward without a graph lose tangents.
                create_graph = create_graph or dual_level_active()
            inner, outs = self._recompute_at_level(primals, mode)
        else:
            # One recompute, and one set of draws, serves a batch of cotangents. Below
            # their vmap they, or the primals, may be differentiated once more.
            tensors = (*primals, *cts)
            create_graph = create_graph or is_recorded_below(tensors)
            inner, outs = call_below_vmap(self._recompute, primals, create_graph, mode)
            is_checked = program.check_outputs(outs)
        outs = tuple(map(root_of, outs))  # the values may be freed
        grads = self._pull_back(
            outs, cts, inner, create_graph=create_graph, is_checked=is_checked
        )
        if NoneType in map(type, grads):
            pairs = zip(self._wanted, grads, strict=True)
            program.check_reached(outs, inner, [i for i, g in pairs if g is None])
        if program.once:
            self._check_once(grads)
        return grads

    def recorded(
        self, primals: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Run the program with its graph; return the inputs in it, and the outputs.

        For a backward that comes later, by `pulled_back`.
        """
        if current_layer() is None:
            return self._recompute(primals, False, None)
        return self._recompute_at_level(primals, None)

    def pulled_back(
        self, outs: Sequence[Any], cts: Sequence[Tensor], inner: Sequence[Tensor]
    ) -> Outputs:
        """Pull cotangents back through what `recorded` returned."""
        roots = tuple(map(root_of, outs))
        return self._pull_back(roots, cts, inner, create_graph=False, is_checked=False)

    def _pull_back(
        self,
        outs: Sequence[Any],
        cts: Sequence[Tensor],
        inner: Sequence[Tensor],
        *,
        create_graph: bool,
        is_checked: bool,
    ) -> Outputs:
        given: Any = tuple(map(outs.__getitem__, self._given))
        if not (is_checked or all(map(requires_grad, given))):
            pairs = zip(given, cts, strict=True)
            pairs = [(o, ct) for o, ct in pairs if requires_grad(o)]
            if not pairs:
                return (None,) * len(self._wanted)
            given, cts = zip(*pairs, strict=True)
        asks_grad_mode = self._evaluation.asks_grad_mode
        if self._in_grad_mode and asks_grad_mode and not create_graph:
            pull_in_grad_mode(given)
        inputs = tuple(map(inner.__getitem__, self._wanted))
        if create_graph:
            self.once = _once_differentiable(given, inputs, at_base=self._at_base)
        edges = tuple(o if isinstance(o, Tensor) else o.edge for o in given)
        return pull_back(edges, tuple(cts), inputs, create_graph=create_graph)

    def _check_once(self, grads: Outputs) -> None:
        """Refuse second derivatives that torch refuses, and would be lost here.

        Raises:
            RuntimeError: a Function that is to be differentiated once leads to them.
        """
        none_left, once = {*map(type, grads)} == {NoneType}, self._program.once
        for j in once.keys() & {*self._given}:
            function, is_dropped = once[j]
            if not is_dropped or (none_left and self._at_base):
                raise RuntimeError(_ONCE.format(name=function.__qualname__))

    def _recompute(
        self, primals: Sequence[Tensor], create_graph: bool, mode: Any
    ) -> tuple[Sequence[Tensor], Outputs]:
        needs = self._evaluation.request.needs
        if create_graph:
            # What requires grad here stays itself, for the new graph is to reach it.
            pairs = zip(needs, primals, strict=True)
            needs = [need and not t.requires_grad for need, t in pairs]
        inner = fresh_leaves(primals, needs)
        run = self._program.run
        if mode is not None:
            run = functools.partial(run, mode=mode)
        with grad_mode(True):
            outs = run(*inner) if create_graph else without_hooks(run, *inner)
        return inner, outs

    def _recompute_at_level(
        self, primals: Sequence[Tensor], mode: Any
    ) -> tuple[Sequence[Tensor], Outputs]:
        """Recompute under transforms: in a level of its own."""
        # Formulas of forward mode ask for the grad mode below, too.
        mode_below = torch.is_grad_enabled() or dual_level_active()
        with grad_mode(mode_below), grad_level() as level, grad_mode(True):
            leaves = [
                leaf_at(level, primals[i], requires_grad=True) for i in self._wanted
            ]
            inner = replace(primals, self._wanted, leaves)
            return inner, self._program.run(*inner, mode=mode)


def vjp_of(
    program: Program,
    evaluation: Evaluation,
    arity: int,
    wanted: Sequence[int],
    given: Sequence[int],
) -> Program:
    """Return the vjp of a program. The arguments are those of `Vjp`."""
    own = program.pulled(program, wanted, given)
    return own or Vjp(program, evaluation, arity, wanted, given)


def _once_differentiable(
    roots: Sequence[Any], inputs: Sequence[Tensor], *, at_base: bool
) -> dict[int, tuple[Any, bool]]:
    """Return which inputs lead to a Function that is marked `once_differentiable`.

    With it, and with whether torch drops its second derivative, as torch.func does,
    and raises no error.
    """
    found: dict[int, tuple[Any, bool]] = {}
    for node, number in edges_behind(map(edge_of, roots)):
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


def requires_grad(tensor: Tensor | None) -> bool:
    """Say whether an output can be differentiated."""
    return tensor is not None and tensor.requires_grad


def is_recorded(inputs: Sequence[Tensor]) -> bool:
    """Say whether autograd records what is done with `inputs`."""
    return torch.is_grad_enabled() and True in map(_requires_grad, inputs)


def is_recorded_below(inputs: Sequence[Tensor]) -> bool:
    """Say whether autograd records it at this level or below, the base included."""
    return torch.is_grad_enabled() and any(map(requires_grad_at_any_level, inputs))


_requires_grad = operator.attrgetter("requires_grad")


def replace(
    values: Sequence[Any], where: Sequence[int], by: Sequence[Any]
) -> list[Any]:
    """Return `values` with those at `where` replaced."""
    replaced = list(values)
    for i, value in zip(where, by, strict=True):
        replaced[i] = value
    return replaced
