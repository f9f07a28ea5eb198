"""A kept call under torch.func: a nested call whose graph stays.

Its forward runs at the base, below all levels, on leaves of its own. A recompute
returns the values, and the vjp of its node pulls cotangents back through that graph.

Invariant: where that cannot be, the call is recomputed, as a nested call is: for second
derivatives, in forward mode over reverse mode, under other levels than in the forward,
and for the gradients of examples that share what they are differentiated by.
Rejected: to make the graph in the levels. It would be gone with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.errors import CaptureError
from remat._base.operators import as_unit
from remat._base.program import Evaluation, InputIndex, OutputIndex, Program, Request
from remat._base.tensors import versions_of
from remat._base.types import Outputs
from remat._torch.batches import lowered, raised
from remat._torch.levels import below_all_levels, current_layer, is_batch_of_cotangents
from remat._transform.call import Call
from remat._transform.function import Evaluated, Primal, Vjp, evaluate_forward
from remat._transform.levels import (
    Batch,
    Below,
    at_dim,
    levels_below,
    note_levels,
    total_needs,
)
from remat._transform.state import ForwardInputs
from remat.rules._places import are_differentiated, outside


class KeptCall(Primal):
    """A kept call as a program.

    Attributes:
        graph: of its forward: the leaves and the outputs; None while it is entered.
        below: the levels below which that was, the outermost first.
        versions: of the outputs then: results may be changed in place later on.
    """

    __slots__ = ("below", "graph", "versions")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.graph: tuple[Sequence[Tensor], Sequence[Any]] | None = None
        self.below: Sequence[Any] = ()
        self.versions: Sequence[int | None] = ()

    @property
    @override
    def is_forward(self) -> bool:
        return self.graph is not None or super().is_forward

    @override
    def evaluate_first(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> Evaluated:
        if self.graph is not None:
            return self._again(program, inputs, request)
        noting = _Noting(program)
        total = request._replace(needs=total_needs(program, request.needs))
        users: Any = [None] * len(inputs)  # no leaf is the user's own
        given = ForwardInputs(inputs, total, self.call.reach.buffers, users)
        self.below = levels_below(program)
        with outside():
            found = evaluate_forward(self.call, noting, given, total)
        self.call.forward_done()
        if any(leaf.is_leaf and leaf.grad is not None for leaf in given.inner):
            raise CaptureError(_BACKWARD.format(label=self.label))
        results, evaluation, self.state = found
        self.evaluation = evaluation = evaluation._replace(request=request)
        self.graph = noting.graph
        self.versions = self._versions()
        for leaf in given.inner:
            leaf.__dict__.pop("retain_grad", None)  # of what it stands for
        as_unit(lambda: [t.detach() for t in results if t is not None], (), self.label)
        return results, evaluation

    def is_changed(self) -> bool:
        """Say whether what the forward returned was changed in place since."""
        return self._versions() != self.versions

    def _versions(self) -> list[int | None]:
        outs = self.graph[1] if self.graph is not None else ()
        return versions_of([t for t in outs if t is not None])

    def _again(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> Evaluated:
        """Give what the forward computed, if that is as it was, and the levels are."""
        assert self.graph is not None
        assert self.evaluation is not None
        outs = self.graph[1]
        below = levels_below(program)
        if self.is_changed() or [*map(type, below)] != [*map(type, self.below)]:
            with self.entered(), outside():
                return program.evaluate(inputs, request)
        found = [level.found for level in self.below]
        note_levels(program, found, self._counts[1])
        values = as_unit(lambda: [o.detach() for o in outs], (), self.label)
        return [*values], self.evaluation._replace(request=request)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Recompute in the body, as a nested call does."""
        graph, self.graph = self.graph, None
        try:
            yield
        finally:
            self.graph = graph

    @override
    def own_vjp(
        self,
        seen_as: Program,
        evaluation: Evaluation,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> Program | None:
        if self.graph is None:
            return None
        arity = len(evaluation.request.needs)
        vjp = Vjp(seen_as, evaluation, arity, wanted, given)
        return KeptVjp(self, seen_as, vjp, wanted, given)


_BACKWARD = (
    "remat: {label} computes gradients inside, as by .backward(), which would be lost "
    "under torch.func and with higher_order=True. Leave keep out, or use autograd.grad."
)


class _Noting(Below):
    """A program, of which is noted what it ran on and what it returned."""

    __slots__ = ("graph",)

    def __init__(self, program: Program) -> None:
        super().__init__(program, ())
        self.graph: Any = None

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        outs = self.program.run(*inputs, mode=mode)
        self.graph = inputs, outs
        return outs

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return self.program.signature


class KeptVjp(Program):
    """`(*inputs, *cotangents) -> gradients`, through the graph of the forward."""

    __slots__ = ("_given", "_of", "_seen_as", "_vjp", "_wanted")

    def __init__(
        self,
        of: KeptCall,
        seen_as: Program,
        vjp: Vjp,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> None:
        self._of, self._seen_as = of, seen_as
        self._wanted, self._given, self._vjp = wanted, given, vjp

    @property
    @override
    def once(self) -> Mapping[int, Any]:  # pyrefly: ignore[bad-override]
        return self._vjp.once

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Compute the gradients; by a recompute where the graph does not do."""
        grads = self._through_graph(inputs)
        if grads is None:
            with self._of.entered():
                return self._vjp.run(*inputs, mode=mode)
        return grads

    def _through_graph(self, inputs: Sequence[Tensor]) -> Outputs | None:
        end = len(inputs) - len(self._given)
        primals, cts = inputs[:end], inputs[end:]
        if self._of.graph is None or are_differentiated(inputs):
            return None
        if current_layer() is None or is_batch_of_cotangents(primals):
            return self._pull(cts)
        return self._pull_of_all(primals, cts)

    def _pull(self, cts: Sequence[Tensor]) -> Outputs:
        assert self._of.graph is not None
        leaves, outs = self._of.graph
        ends, wanted = [outs[j] for j in self._given], [leaves[i] for i in self._wanted]
        how = {"retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(ends, wanted, cts, **how)

    def _pull_of_all(
        self, primals: Sequence[Tensor], cts: Sequence[Tensor]
    ) -> Outputs | None:
        """Pull back below the one vmap around, where examples have their own inputs.

        Else None: the graph adds up the gradients of an input that examples share.
        """
        below, inner = self._of.below, levels_below(self._seen_as)
        found, there = lowered(cts, primals), lowered(primals, primals)
        if found is None or there is None or len(below) != len(inner) + 1:
            return None
        outer, each = below[0], found[1]
        if (
            len(each) != 1
            or not isinstance(outer, Batch)
            or there[1] != [outer.vmap[0]]
        ):
            return None
        in_dims, size, _ = outer.vmap
        dims = tuple(in_dims[i] for i in self._wanted)
        to = [outer.found[j] for j in self._given]
        if None in (*dims, *to):
            return None
        physical = [*map(at_dim, found[0], each[0], to, [size] * len(to))]
        grads = below_all_levels(self._pull, physical)
        return tuple(raised(grads, [dims], primals))
