"""A user's call, split into its tensors and everything else that it reaches.

Invariant: each run is given tensors of its own. The first one is the forward, whose
effects on the user's objects stay; those of later runs are dropped.
Rejected: a program for each module. All tensors that a function reaches are one set of
inputs.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from itertools import compress, filterfalse
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from remat._ambient.draws import without_draws
from remat._base.absent import inputs_of, may_be_absent
from remat._base.calls import in_place
from remat._base.context import here
from remat._base.errors import CaptureError
from remat._base.program import Program, Request
from remat._base.tensors import describe
from remat._base.types import Fn, Outputs
from remat._base.warned import warn
from remat._graph.graph import NOT_LIFTED, edge_of, edges_behind
from remat._offload.inputs import Offloading
from remat._partial.decide import (
    CallKind,
    Situation,
    cache_of,
    has_no_reason,
    metas_of,
    owner_of,
)
from remat._partial.options import DEFAULT, Options
from remat._partial.planned_call import SavedInNode
from remat._reach.attributes import Lent
from remat._reach.copies import without_copies
from remat._reach.identities import ForwardCheck
from remat._reach.lifted import LiftedForward
from remat._reach.reach import Reach
from remat._reach.result_walk import Hidden, Own, Result
from remat._reach.results import Out, slots_of
from remat._torch.graphs import is_below_tracer
from remat._torch.levels import (
    current_layer,
    is_of_ended_vmap,
    is_of_level_above,
    is_of_torch_func,
    levels_requiring_grad,
    unwrap_dead,
    without_dead_levels,
)
from remat._transform.changes import FirstBytes, run_watched
from remat._transform.checks import refuse_leaks
from remat._transform.leaves import hand_over_hooks
from remat._transform.state import CallState, ForwardInputs
from remat.policies import Policy


_requires_grad = operator.attrgetter("requires_grad")
_attributes = operator.attrgetter("__dict__")


class Call:
    """One call of a user's function, taken apart."""

    __slots__ = (
        *("_fill", "_inputs", "_options", "_users", "_users_call"),
        *("hidden", "is_differentiated_once", "may_read_early", "watching"),
        *("offloading", "policy", "prune"),
        *("reach", "rewritten", "structure", "wrapped"),
    )
    instead: Any = None  # is called with the function and its arguments, if not that

    def __init__(
        self,
        reach: Reach,
        fn: Fn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options = DEFAULT,
        policy: Policy | None = None,
    ) -> None:
        self._users_call: Any = fn, args, kwargs
        self._options = options
        # The policy is joined with those of the calls around.
        self.policy, self.prune = policy, options.prune
        where = options.offload_inputs
        self.offloading = Offloading.of(reach, where) if where else None
        # Of the result. It is None until the forward has run: by that a `Primal` knows
        # whether its next run is the forward.
        self.structure: Out | None = None
        # What in the result may hold a tensor that cannot be seen.
        self.hidden: Sequence[Hidden] = ()
        self._fill: Callable[[Sequence[Any]], Any] | None = None
        # What inputs held, until the forward has ended, in the first calls.
        self.watching: FirstBytes | None = None
        # The inputs as they were passed, where the function runs below levels that they
        # are of; empty at the base, and once the forward has run.
        self.wrapped: Sequence[Tensor] = ()
        self.is_differentiated_once = True  # each input, by one level at most
        self.rewritten: Sequence[int] = ()  # inputs that the forward wrote to uncounted
        # Says of an input, in a graph, whether a recompute may read it before the
        # cotangents; None if none is.
        self.may_read_early: Callable[[Tensor], bool] | None = None
        self.reach: Any = reach  # what it reaches, without the tensors
        self._inputs = self.reach.take_tensors()
        self._users: Sequence[Tensor] | None = self._inputs

    @property
    def owner(self) -> Any:
        """The object that the function is a method of, or the function."""
        return owner_of(*self._users_call[:2])

    def take_inputs(self) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of the call, and which require grad, at any level."""
        passed, unwrap = without_copies(self._inputs), unwrap_dead
        if True in map(is_of_torch_func, passed):
            unwrap = without_dead_levels
        inputs = [*map(unwrap, passed)]
        # The user's objects may hold a tensor of a level that has ended. If that is a
        # vmap, no operation takes it, and so none of the recompute's.
        if unwrap is without_dead_levels and True in map(is_of_ended_vmap, inputs):
            instead = [
                torch.empty(t.shape, dtype=t.dtype, device="meta")
                if is_of_ended_vmap(below)
                else t
                for t, below in zip(passed, inputs, strict=True)
            ]
            if passed is self._inputs:
                self._users = instead
            passed, inputs = instead, [*map(unwrap, instead)]
        # The node holds them, not the call: there, hooks for saved tensors see them.
        self._inputs: list[Tensor] = []
        is_any_dead = True in map(operator.is_not, inputs, passed)
        if is_any_dead and holds_graph(passed, inputs):
            warn(_PULLBACK.format(label=self.reach.label))
            return inputs, [False] * len(inputs)
        if current_layer() is None:
            return inputs, [*map(_requires_grad, inputs)]
        self.wrapped = passed
        counts = [*map(levels_requiring_grad, inputs)]
        self.is_differentiated_once = max(counts, default=0) < 2
        return inputs, [count > 0 for count in counts]

    def run_forward(self, inputs: Sequence[Tensor]) -> Result:
        """Call the function on other tensors; what it does to objects stays."""
        reach, users = self.reach, self._users
        if users is None:  # a second run, which shows what it changes
            return reach.run(inputs, self.instead, take=Result)
        self._users = None
        lifted, lent = None if reach.is_bare else reach.lifted(users, inputs), None
        body = self._body(inputs, lifted)
        if self.wrapped:
            refused = RefuseOuterLevels(self.wrapped, inputs, reach.name_of)
            body = functools.partial(refused.around, body)
        if lifted is None:
            value = body()
        else:
            if reach.attributes:
                lent = Lent(users, inputs)
                body = functools.partial(lent.call, lifted, body)
            with lifted:
                value = reach.call_lifted(lifted, body)
        self.wrapped = ()
        if RemovableHandle.next_id != reach.next_hook:
            hand_over_hooks(users, inputs)
            if lifted is not None:
                lifted.lease_all()
                reach.lease_passed()
        reach.forward_done()
        if lent is not None or any(map(_attributes, inputs)):
            lifted = reach.lifted(users, inputs) if lifted is None else lifted
            lent = lent or Lent(users, inputs, were_set=False)
            reach.marks = lent.end(lifted) or reach.marks
        return self._result(value, users, lifted)

    def _body(self, inputs: Sequence[Tensor], lifted: LiftedForward | None) -> Fn:
        instead = self.instead
        if lifted is None:
            return functools.partial(self.reach.call_bare, inputs, instead)
        fn, args, kwargs = self._users_call
        fn = users_fn(lifted.of(fn), self.reach.label, self._options, self.policy)
        if instead is not None:
            return lambda: instead(lifted.of(fn), [*map(lifted.of, args)])
        return functools.partial(lifted.call, fn, args, kwargs)

    def _result(
        self, value: Any, users: Sequence[Tensor], lifted: LiftedForward | None
    ) -> Result:
        """Return what the forward returned and left, to be taken apart."""
        is_alone = type(value) is Tensor and not value.__dict__
        if is_alone and (lifted is None or lifted.leaves_alone(value)):
            return Result(value)
        own = Own({}, slots_of(users), ())
        if lifted is None:
            return Result(value, own)
        own = own._replace(originals=lifted.users, known=lifted.known)
        result = Result(value, own, lifted.left)
        if result.is_left:
            self.reach.left = [left.where for left in lifted.left]
        lifted.refuse_identities(
            [t for t in result.tensors if id(t) not in own.tensors]
        )
        return result

    def split(self, result: Result, inputs: Sequence[Tensor]) -> Outputs:
        """Return the tensors of a forward's result, and keep its structure."""
        self.hidden = result.hidden()
        for hidden in self.hidden:
            if hidden.why:
                raise CaptureError(hidden.told(_OPAQUE, self.reach.label))
        outs, self.structure = Out.split(result, inputs)
        # Only now: the tensors were found in what is emptied.
        self._fill = result.without_tensors()
        return outs

    def planned(
        self, program: Program, given: ForwardInputs, request: Request, state: CallState
    ) -> SavedInNode | None:
        """Return what the forward does with records of calls like it, if anything."""
        policy, prune, label = self.policy, self.prune, self.reach.label
        inputs = given.inputs
        elements = sum(map(Tensor.numel, inputs))
        if has_no_reason(policy, prune, elements):
            return None
        around, note = here().nested_choices, None
        if around is not None and around.again:
            if (choice := around.next()) is None:
                return None
            return SavedInNode(follows=choice, inputs=inputs, inner=given.inner)
        if around is not None:
            note = functools.partial(around.note, around.reserve())
        others = filterfalse(may_be_absent, inputs if state.classes else ())
        situation = Situation(
            is_saved=False,
            is_compiled=self.reach.compiled,
            is_traced=is_below_tracer(),
            is_split=request.is_split,
            kind=next((type(t).__name__ for t in others), ""),
            elements=elements,
            asks_for_views="_is_view" in self.reach.asks,
        )

        def kind() -> CallKind:
            signature = (*program.signature, *request.needs, state.ambient.key)
            return CallKind(signature, metas_of(inputs))

        cache = cache_of(situation, kind, policy, prune, self.owner, label)
        if cache is None:
            return None
        planned = SavedInNode(
            follows=cache,
            policy=policy,
            prune=prune,
            inputs=inputs,
            label=label,
            inner=given.inner,
        )
        planned.note = note
        return planned

    def forward_done(self) -> None:
        """Let go of what only the forward needs."""
        self._users_call = self._users = None

    def join(self, outs: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
        """Return the value that the function returned, around tensors of its level."""
        assert self.structure is not None
        assert self._fill is not None
        fill, self._fill = self._fill, None  # which holds what is the user's
        return fill(self.structure.put_in(outs, inputs))

    def run_again(self, inputs: Sequence[Tensor]) -> Result:
        """Call the function on other tensors; what it does to objects is dropped."""
        args = inputs, self.instead, here().runs
        if not self.rewritten:
            return self.reach.run(*args, take=Result)
        run = functools.partial(self.reach.run, *args, take=Result)
        return run_watched(self.reach, self.rewritten, inputs, run)

    def refuse_leaks(self, leaves: Sequence[Tensor]) -> None:
        """Refuse a forward if something still holds its graph."""
        noted, reach = self.watching, self.reach
        if noted is None and reach.is_bare:
            return
        found = refuse_leaks(reach, leaves, self.hidden, is_new=noted is not None)
        if found and noted is not None:
            noted.look_again()

    def labelled(self, fn: Fn, *args: Any) -> Any:
        """Call something, whose errors are to name the call."""
        try:
            return fn(*args)
        except CaptureError as error:
            if str(error).startswith("remat"):
                raise
            raise CaptureError(f"remat: in {self.reach.label}, {error}") from None

    def run_on_copies(self, program: Program, copies: Sequence[Tensor]) -> None:
        """Set the call back to before its forward; run that as `program` once more.

        This shows what the function changes, for the error that follows.
        """
        self.structure = None
        try:
            program.run(*copies)
        finally:
            self.structure = None


def users_fn(fn: Fn, label: str, options: Options, policy: Policy | None) -> Fn:
    """Return what is called: it refuses draws or tells which module runs, if asked."""
    if options.rng == "error":
        fn = without_draws(fn, label)
    return in_place(fn, policy)


# --- Tensors and graphs of outer levels ---


_GRAD, _REQUIRE_GRAD = torch.autograd.grad, Tensor.requires_grad_


class RefuseOuterLevels(ForwardCheck):
    """A mode that refuses tensors and graphs of levels that a function is run below.

    A tensor of such a level cannot be used there. And if one input was computed from
    another, code that differentiates the first with respect to the second would find no
    path, and return zeros.
    """

    def __init__(
        self,
        wrapped: Sequence[Tensor],
        inner: Sequence[Tensor],
        name_of: Callable[[int], str],
    ) -> None:
        super().__init__()
        self._wrapped, self._inner, self._name_of = wrapped, inner, name_of

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        tensors = inputs_of(args, kwargs)
        if True in map(is_of_torch_func, tensors):
            for tensor in filter(is_of_level_above, tensors):
                raise CaptureError(NOT_LIFTED.format(what=describe(tensor)))
        if func is _GRAD:
            self._check_graph(*args, **(kwargs or {}))
        elif func is _REQUIRE_GRAD and current_layer() is None:
            raise RuntimeError(_REQUIRES_GRAD)  # as torch does within a level
        return func(*args, **kwargs) if kwargs else func(*args)

    def _check_graph(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> None:
        """Refuse a gradient along a path that leads through an outer level."""
        single = (Tensor, GradientEdge)
        outputs = [outputs] if isinstance(outputs, single) else outputs
        inputs = [inputs] if isinstance(inputs, single) else inputs
        reached = edges_behind(map(edge_of, outputs))
        asked = {*map(edge_of, inputs)}
        inner, wrapped = map(edge_of, self._inner), map(edge_of, self._wrapped)
        edges = [*zip(inner, wrapped, itertools.count(), strict=False)]
        outside = {up for down, up, _ in edges if down in asked and down != up}
        for down, up, i in edges:
            behind = edges_behind([up]) - {up} if down in reached else set()
            if not behind.isdisjoint(outside | asked):
                raise CaptureError(_COMPUTED.format(name=f"`{self._name_of(i)}`"))
        if not reached.isdisjoint(outside):
            raise CaptureError(_COMPUTED.format(name="a GradientEdge"))


def holds_graph(passed: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Say whether an input was computed from another, in a level that is gone by now.

    Only the pullback of `torch.func.vjp` holds both. `inputs` are those passed, without
    wrappers of such levels.
    """
    dead = compress(passed, map(operator.is_not, passed, inputs))
    edges = {*map(edge_of, dead)}
    return any(len(edges & edges_behind([edge])) > 1 for edge in edges)


_PULLBACK = (
    "remat: {label} holds a pullback of torch.func.vjp. Its graph, recorded outside, "
    "can't be computed again: the function is called as it is, and no memory is saved. "
    "Call torch.func.vjp inside it."
)
_OPAQUE = "remat: {label} returned a {kind} (`result{where}`) that {why}."
_COMPUTED = (
    "{name} was computed outside of the function from what it is differentiated by "
    "in it. Between the two there is no graph where the function runs: compute it "
    "inside."
)
_REQUIRES_GRAD = (
    "remat: Tensor.requires_grad_() is called, perhaps by torch.autograd.functional, "
    "in a function that torch.func transforms. As without remat, that is refused: use "
    "the transforms of torch.func inside, or create_graph=True."
)
