"""A call by rules, as a program with a vjp of its own.

    outside of a region, or with `defvjp` alone
        the node saves the residuals
    with `defremat` in a region
        one operation for modes: `fwd` in the forward, whose residuals stay at the place
        of the call, and `rem` in the recompute, which leaves its own there for the vjp.
        The node saves the arguments alone. A vjp that finds none calls `rem`.

Invariant: residuals have no graph. Where the vjp is differentiated once more, rules
compute them again. Rejected: a Function of its own, which repeats what `dispatch` does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base import pytree
from remat._base.context import here
from remat._base.errors import CaptureError
from remat._base.operators import as_unit
from remat._base.program import (
    Evaluation,
    InputIndex,
    OutputIndex,
    Program,
    Request,
    has_derivatives,
    requires_grad,
)
from remat._base.pytree import Frame, tensors_and_frame
from remat._base.tensors import describe_meta
from remat._base.types import Outputs
from remat._torch.autograd import current_task, keeps_graph, set_grad_enabled
from remat._transform.levels import Batch, BatchVjp, levels_below, note_levels
from remat.rules._places import (
    Lowered,
    PlaceInCall,
    SavedWithPlaces,
    alone,
    are_differentiated,
    has_jvp,
)


class RulePlace(PlaceInCall):
    """What is kept of a call by rules: the residuals of `fwd`."""

    is_plain = False  # whether nothing was differentiated
    lowered: Lowered | None = None  # residuals without tensors; None: none can be kept
    then: Lowered | None = None  # what a recompute left for the vjp
    result: tuple[Frame, Sequence[Any]] | None = None  # structure, and of its tensors
    # What the levels below found, for a replay that leaves the call out.
    below: Sequence[Any] | None = None

    def raised(self, args: Sequence[Tensor]) -> Any:
        """Return the residuals at the levels here."""
        assert self.lowered is not None
        return self.lowered.raised(args, self.values())

    @override
    def backward_done(self) -> None:
        self.then = None


class Ruled(Program):
    """A call of a function with rules, as a program."""

    __slots__ = (
        *("_args", "_is_again", "_is_first", "_res", "_result", "_rule", "_rules"),
        *("arity", "place"),
    )

    def __init__(
        self,
        rule: Any,
        rules: tuple[Any, Any, Any],
        args: Frame,
        arity: int,
        place: RulePlace | None,
        *,
        is_again: bool,
    ) -> None:
        self._rule, self._rules, self._args, self.arity = rule, rules, args, arity
        self.place, self._is_again, self._is_first = place, is_again, True
        self._res: Lowered | None = None
        # A replay may leave the run out.
        self._result = place.result if place is not None else None

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return ("rule", id(self._rule))

    @property
    @override
    def is_forward(self) -> bool:
        return self._is_first

    @property
    def metas(self) -> Sequence[Any]:
        """What the tensors of the result are."""
        assert self._result is not None
        return self._result[1]

    def joined(self, outs: Sequence[Any]) -> Any:
        """Return the result, with these tensors in it."""
        assert self._result is not None
        return self._result[0].filled(outs)

    # --- The run ---

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Run the rules; in the graph of a derivative, as plain code."""
        del mode
        args, place, is_jvp = self._args.filled(inputs), self.place, has_jvp()
        if place is None:
            out, res = self._pair("fwd", *args)
            if self._rules[1] is not None:
                res = self._pair("rem", res, *args)[1]
            self._res = None if is_jvp else Lowered(res, inputs)
        elif not self._is_again:
            out, res = place.run(self._pair, "fwd", *args)
            if not is_jvp:
                self._keep(Lowered(res, inputs))
        elif place.residuals is None or is_jvp:
            with alone():
                out = self._pair("fwd", *args)[0]
        else:
            place.skip()
            with alone():
                out, res = self._pair("rem", place.raised(inputs), *args)
            place.then = Lowered(res, inputs)
        return self._flat(out)

    def _keep(self, lowered: Lowered) -> None:
        place = self.place
        if place is not None and lowered.tensors is not None:
            place.keep(lowered.take())
            place.lowered = lowered

    def _pair(self, which: str, *args: Any) -> Any:
        """Call a rule that returns a pair."""
        context = here()
        around = context.rules
        if has_jvp():
            context.rules = (*around, self._rule)
        try:
            result = self._rules[which == "rem"](*args)
        finally:
            context.rules = around
        if type(result) in (tuple, list) and len(result) == 2:
            return result
        kind = type(result).__name__
        raise _wrong(self._rule, which, f"a {kind}, and no pair of (out, residuals)")

    def _flat(self, out: Any) -> Outputs:
        outs, frame = tensors_and_frame(out)
        now = frame, [(t.shape, t.dtype, t.device) for t in outs]
        place, then = self.place, None if self.place is None else self.place.result
        if then is not None and (then[0].treedef, then[1]) != (frame.treedef, now[1]):
            a, b = [f"{f.treedef} of {_listed(metas)}" for f, metas in (then, now)]
            what = f"{b}, where fwd returned {a}. Both must return the same `out`"
            raise _wrong(self._rule, "rem", what)
        self._result = now
        if place is not None:
            place.result = now
        return (*outs,)

    @override
    def evaluate_first(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> tuple[Sequence[Any], Evaluation]:
        """Evaluate at the base. A graph there would be of what is no argument."""
        self._is_first = False
        given = [t.detach() if t.requires_grad else t for t in inputs]
        set_grad_enabled(True)
        outs = self._run(program, given)
        set_grad_enabled(False)
        if True in map(requires_grad, outs):
            raise CaptureError(_REACHED.format(label=self._rule.label))
        res, self._res = self._res, None
        kept: list[Tensor] = []
        if res is not None and res.tensors is not None:
            self._res, kept = res, res.take()
        return [*(o if o is None else o.detach() for o in outs), *kept], Evaluation(
            request,
            used=[i for i, t in enumerate(inputs) if has_derivatives(t)],
            differentiable=[*map(has_derivatives, outs), *[False] * len(kept)],
            asks_grad_mode=True,
            residuals=len(kept),
            planned=SavedWithPlaces((), None) if kept else None,
        )

    def _run(self, program: Program, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Run the program, as one operation where a replay may leave it out."""
        place = self.place
        if place is None:
            return program.run(*inputs)
        below = levels_below(program)
        if place.below is not None and len(place.below) == len(below):
            note_levels(program, place.below, len(self.metas))
        outs = as_unit(program.run, inputs, place.name)
        if place.below is None:
            place.below = [level.found for level in below]
        return outs

    # --- The vjp ---

    @override
    def own_vjp(
        self,
        seen_as: Program,
        evaluation: Evaluation,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> Program | None:
        if seen_as is self:
            return RuledVjp(self, wanted, given)
        if not isinstance(seen_as, Batch):
            return None
        below = self.own_vjp(seen_as.program, evaluation, wanted, given)
        return None if below is None else BatchVjp(below, seen_as, wanted, given)

    def gradients(
        self, primals: Sequence[Tensor], kept: Sequence[Tensor], cts: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the gradients of all arguments that are tensors."""
        args, rule = self._args.filled(primals), self._rule
        with alone():
            res = self._residuals(primals, kept, args)
            static = [args[i] for i in rule.nondiff_argnums]
            found = self._rules[2](*static, res, self.joined(cts))
        return self._checked(found, args)

    def _residuals(
        self, primals: Sequence[Tensor], kept: Sequence[Tensor], args: Any
    ) -> Any:
        """Return what `bwd` is given."""
        place = self.place
        if not are_differentiated(primals):
            if self._res is not None:
                return self._res.raised(primals, kept)
            if place is not None and place.then is not None:
                then, place.then = place.then, None
                if then.tensors is not None:
                    return then.raised(primals, then.take())
            if place is not None and place.residuals is not None:
                return self._pair("rem", place.raised(primals), *args)[1]
        res = self._pair("fwd", *args)[1]
        return res if self._rules[1] is None else self._pair("rem", res, *args)[1]

    def _checked(self, found: Any, args: Sequence[Any]) -> list[Any]:
        """Return the cotangents of all tensors, as they are in the arguments."""
        rule, count = self._rule, len(args)
        static = {i % count for i in rule.nondiff_argnums}
        numbers = [k for k in range(count) if k not in static]
        is_tuple = type(found) in (tuple, list)
        if not is_tuple or len(found) != len(numbers):
            given = f"{len(found)} cotangents" if is_tuple else f"a {_kind(found)}"
            many = f"a tuple of {len(numbers)}: a cotangent for each argument that is"
            what = f"{given}, and not {many} differentiated, None where it is zero"
            raise _wrong(rule, "bwd", what)
        cotangents = dict(zip(numbers, found, strict=True))
        flat: list[Any] = []
        for k, arg in enumerate(args):
            leaves, treedef = pytree.flatten(arg)
            ct, each = cotangents.get(k), [None] * len(leaves)
            try:
                each = each if ct is None else pytree.parts(treedef, ct)
            except ValueError as error:
                than = f"another structure than {rule.name_of(k)} has: {error}"
                raise _wrong(rule, "bwd", f"a cotangent of {than}") from None
            for n, (leaf, g) in enumerate(zip(leaves, each, strict=True)):
                if isinstance(leaf, Tensor):
                    if not (g is None or _is_like(g, leaf)):
                        name = rule.name_of(k, pytree.paths(treedef)[n])
                        raise _wrong(rule, "bwd", _unlike(g, leaf, name))
                    flat.append(g if has_derivatives(leaf) else None)
        return flat


def _kind(value: Any) -> str:
    return type(value).__name__


def _is_like(ct: Any, leaf: Tensor) -> bool:
    return isinstance(ct, Tensor) and (ct.shape, ct.dtype) == (leaf.shape, leaf.dtype)


def _unlike(ct: Any, leaf: Tensor, name: str) -> str:
    is_tensor = isinstance(ct, Tensor)
    given = describe_meta(ct.dtype, ct.shape) if is_tensor else _kind(ct)
    wanted = describe_meta(leaf.dtype, leaf.shape)
    both = "It must have the same shape and dtype"
    return f"a cotangent of {given} for {name}, which is {wanted}. {both}"


class RuledVjp(Program):
    """`(*arguments, *residuals, *cotangents) -> gradients`, by the rule."""

    __slots__ = ("_given", "_of", "_wanted")

    def __init__(
        self, of: Ruled, wanted: Sequence[InputIndex], given: Sequence[OutputIndex]
    ) -> None:
        self._of, self._wanted, self._given = of, wanted, given

    @override
    def uses(self, count: int) -> Sequence[InputIndex]:
        return (*range(self._of.arity), *range(count - len(self._given), count))

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Compute the gradients."""
        del mode
        of, given, place = self._of, self._given, self._of.place
        end = len(inputs) - len(given)
        there = dict(zip(given, inputs[end:], strict=True))
        cts = [
            there[j] if j in there else torch.zeros(m[0], dtype=m[1], device=m[2])
            for j, m in enumerate(of.metas)
        ]
        grads = of.gradients(inputs[: of.arity], inputs[of.arity : end], cts)
        is_held = place is None or place.is_in_function or keeps_graph()
        if place is not None and current_task() >= 0 and not is_held:
            place.residuals = None  # as a node lets go of what it saved
        return tuple(grads[i] for i in self._wanted)


def _listed(metas: Sequence[Any]) -> str:
    return ", ".join(describe_meta(dtype, shape) for shape, dtype, _ in metas)


def _wrong(rule: Any, which: str, returned: str) -> TypeError:
    """Return the error that a rule returned something else than it has to."""
    return TypeError(f"remat: {which} of {rule.label} returned {returned}.")


_REACHED = (
    "remat: fwd of {label} computes with a tensor that requires grad and is no "
    "argument, so its gradient would be lost. Pass it as an argument."
)
