"""The lowering to one recursive Function: the life of a call under torch.func.

In: a user's call, which `Primal` makes a program of its tensors. `dispatch` goes down:
a vmap makes `Batch` of a program, a jvp `Dual`. Below all levels the forward runs. On
the way up each level of grad, or the base, makes a node of the graph (`Remat`), with
edges to the inputs that the outputs may depend on. Its backward evaluates `Vjp`, which
recomputes the program and pulls cotangents back. Out: the results, behind that node.

Invariant: a graph made here holds the inputs of a call and what its policy keeps, at
every level and order. So a backward is itself a call: `torch.func.grad` keeps the graph
of the backward, and would keep all that a recompute inside saves.
Rejected: a Function made anew for each call (functorch's way, eight times the cost). A
forward without grad mode: composite operations decompose differently there. At the base
`torch.func.vjp` for a backward: plain autograd costs half of it.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import compress
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from remat._base.context import differentiated, here, within
from remat._base.errors import Label, hide_frames, note
from remat._base.program import (
    Evaluation,
    InputIndex,
    OutputIndex,
    PerInput,
    Program,
    Request,
    SavedIndex,
    leaves_for,
    replaced_at,
    requires_grad,
)
from remat._base.tensors import outside_inference_mode, taken_apart
from remat._base.types import Fn, Outputs
from remat._graph.graph import once_differentiable, reached_by, root_of, sharing_memory
from remat._partial.barrier import behind, recomputing_after
from remat._partial.options import Options
from remat._partial.recorder import Recorder
from remat._reach.reach import reach_of
from remat._torch.autograd import (
    base_dual_level_active,
    dual_level_active,
    grad_mode,
    is_forward_ad_enabled,
    pull_back,
    pull_in_grad_mode,
    saved_tensors,
    set_grad_enabled,
    tells_of,
    without_hooks,
)
from remat._torch.graphs import CollectivesInGraph, counted_levels, is_below_tracer
from remat._torch.levels import (
    GRAD,
    JVP,
    VMAP,
    SingleLevelFunction,
    apply_at_level,
    batched,
    call_below,
    current_layer,
    grad_level,
    is_batch_of_cotangents,
    kind_of,
    leaf_at,
    lifted,
    requires_grad_at_any_level,
    unwrap_dead,
    unwrap_for_grad,
    without_grad_mode,
    without_node,
    wrap_for_grad,
)
from remat._torch.modes import alias
from remat._torch.process import hooks_of_trackers, remove_hooks_since
from remat._torch.tracing import eager_only, has_proxies
from remat._transform import checks
from remat._transform.call import Call, users_fn
from remat._transform.changes import changes_of, first_bytes
from remat._transform.levels import Batch, Dual, Duals, as_duals, needs_above
from remat._transform.state import CallState, ForwardInputs, call_state


_requires_grad = operator.attrgetter("requires_grad")
Evaluated: TypeAlias = tuple[Sequence[Any], Evaluation]


def call_as_function(
    fn: Fn,
    label: Label,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    plain: Fn,
    *,
    may_read_early: Callable[[Tensor], bool] | None = None,
) -> Any:
    """Call a function as one Function; if nothing is differentiated, call `plain`."""
    policy = options.joined()
    reach = reach_of(users_fn(fn, label, options, policy), label, args, kwargs)
    if reach is None:
        return plain(*args, **kwargs)
    call = Call(reach, fn, args, kwargs, options, policy)
    call.may_read_early = may_read_early
    inputs, needs = call.take_inputs()
    lazy = reach.is_lazy  # some module that it reaches has no parameters yet
    outs = None if lazy else evaluate_differentiably(Primal(call), inputs, needs)
    return plain(*args, **kwargs) if outs is None else call.join(outs, inputs)


# --- A user's call as a program ---


class Primal(Program):
    """A user's call as a program: its first run is the forward, others recompute."""

    __slots__ = (
        *("__weakref__", "_counts", "call", "evaluation", "hooked", "kept"),
        *("offloading", "state"),
    )
    saves_kept = True  # in its node, what calls within keep by their own rules

    def __init__(self, call: Call) -> None:
        # How many inputs and outputs it has, without tangents; the forward sets it.
        self.call, self._counts, self.hooked = call, (0, 0), None
        self.offloading = call.offloading
        self.kept: list[Any] = []  # of calls within, by their own rules
        self.state: CallState | None = None
        self.evaluation: Evaluation | None = None

    @property
    def label(self) -> str:
        return self.call.reach.label

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return self.call.reach.signature

    @property
    @override
    def is_forward(self) -> bool:
        return self.call.structure is None  # the forward sets it at its end

    @property
    @override
    def passed(self) -> Sequence[Tensor]:
        return self.call.wrapped

    @property
    @override
    def own(self) -> Container[InputIndex]:
        return () if self.state is None else self.state.own

    @override
    def may_write(self, i: InputIndex, tensor: Tensor) -> bool:
        # Nobody may write to what requires grad at the base: it stays itself.
        return not tensor.requires_grad and self.call.reach.may_write(i, tensor)

    @override
    def may_read_early(self, tensor: Tensor) -> bool:
        says = self.call.may_read_early
        return says is not None and says(tensor)

    @override
    def evaluate_first(
        self, program: Program, inputs: Sequence[Tensor], request: Request
    ) -> Evaluated:
        found = _evaluate_below(self.call, program, inputs, request)
        results, evaluation, state = _, self.evaluation, self.state = found
        were_set = RemovableHandle.next_id != state.next_hook  # hooks, since the call
        self.hooked = self.call.reach if were_set else None
        if request.is_jvp:  # recomputes are given no tangents beside primals
            arity, count = self._counts  # which `run` has set by now
            differentiable = evaluation.differentiable[:count]
            self.evaluation = evaluation._replace(differentiable=differentiable)
            self.state = state.of_first(arity)
        if self.offloading is not None:
            self.state = self.state._replace(away=self.offloading.gone)
        if self.kept and self.saves_kept:
            return self.kept[0].in_node(self.kept, results, evaluation)
        return results, evaluation

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Recompute, in the state of the forward; the first time, be the forward."""
        if self.call.structure is None:
            outs = self.run_forward(inputs, mode)
            self._counts = len(inputs), len(outs)
            return outs
        context = here()
        before = context.recomputing, context.regions
        context.recomputing = (*before[0], self)
        context.regions = (*before[1], [self.kept, True, 0, True])
        try:
            if context.hooks_apart:
                return self._recompute_with_hooks_apart(inputs, mode)
            return self.recompute(inputs, mode)
        except Exception as error:
            note(error, f"remat: raised while recomputing {self.label}.")
            raise
        finally:
            context.recomputing, context.regions = before

    def run_forward(self, inputs: Sequence[Tensor], mode: Any) -> Outputs:
        """Run the function for the first time; return the tensors of its result."""
        context = here()
        if context.reporter is not None:
            context.reporter.entered(self, inputs)
        regions, context.functions = context.regions, context.functions + 1
        context.regions = (*regions, [self.kept, False, 0, True])
        try:
            result = self._under(mode, self.call.run_forward, inputs)
        except RecursionError as error:
            if not getattr(error, "__notes__", ()):
                note(error, _DEEP.format(depth=context.functions))
            raise
        finally:
            context.regions, context.functions = regions, context.functions - 1
        return self.call.split(result, inputs)

    def recompute(self, inputs: Sequence[Tensor], mode: Any) -> Outputs:
        """Run the function again; return the tensors of its result, in that order."""
        assert self.call.structure is not None
        result, inputs = self.again(self.call.run_again, inputs, mode, self.state)
        return self.call.structure.split_again(result, inputs)

    def _recompute_with_hooks_apart(
        self, inputs: Sequence[Tensor], mode: Any
    ) -> Outputs:
        """Recompute in one level more, whose graph nobody pulls: hooks are set there.

        The function's own are in the graph of the level that it was called in.
        """
        here().hooks_apart = False
        with grad_level() as level:
            flags = map(requires_grad_at_any_level, inputs)
            each = zip(inputs, flags, strict=True)
            leaves = [leaf_at(level, t, requires_grad=flag) for t, flag in each]
            outs = self.recompute(leaves, mode)
            return tuple(None if o is None else unwrap_for_grad(o, level) for o in outs)

    def again(
        self, run: Fn, inputs: Sequence[Tensor], mode: Any, state: CallState | None
    ) -> tuple[Any, Sequence[Tensor]]:
        """Run something on inputs, in a state. Also return the inputs it was given."""
        evaluation = self.evaluation
        assert state is not None
        assert evaluation is not None
        run = functools.partial(self._under, mode, state.under_modes(run))
        return state.run(run, self.call.reach, inputs, evaluation.updated, mode)

    def _under(self, mode: Any, run: Fn, inputs: Sequence[Tensor]) -> Any:
        """Run the function under the policy of the call, and a mode if there is one."""
        policy = self.call.policy
        if mode is None and policy is None:
            return run(inputs)
        around = within(policy, under_mode=mode is not None)
        with around, mode or contextlib.nullcontext():
            result = run(inputs)
        if mode is not None:
            mode.end()
        return result

    @override
    def refuse_leaks(self, leaves: Sequence[Tensor]) -> None:
        self.call.refuse_leaks(leaves)

    @override
    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        assert self.state is not None
        self.state.refuse_changed(self.call.reach, inputs)

    @override
    def check_outputs(self, outs: Sequence[Any]) -> bool:
        assert self.evaluation is not None
        then = self.evaluation.differentiable
        checks.check_differentiable(self.call.reach, outs, then)
        return True

    @override
    def check_reached(
        self,
        outs: Sequence[Any],
        inputs: Sequence[Tensor],
        missing: Sequence[InputIndex],
    ) -> None:
        evaluation, reach = self.evaluation, self.call.reach
        assert evaluation is not None
        # Nothing can be compared if the forward did not note what its outputs reached.
        is_known = not (reach.is_contained and evaluation.request.at_base)
        missing = [i for i in missing if i in evaluation.certain]
        if is_known and missing:
            checks.check_reached(reach, outs, inputs, missing)


# --- Evaluation, level by level ---


def evaluate(program: Program, inputs: Sequence[Tensor]) -> Sequence[Any]:
    """Evaluate a program that is no user's call: a vjp, or a segment of a chain.

    Differentiably at every level. Forwards start at `evaluate_differentiably`.
    """
    if torch.is_grad_enabled():
        needs = [*map(requires_grad_at_any_level, inputs)]
        outs = evaluate_differentiably(program, inputs, needs)
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
    return _wrapped(call_below(layer, GRAD, evaluate, program, below), level)


@eager_only
def evaluate_differentiably(
    program: Program, inputs: Sequence[Tensor], needs: PerInput
) -> Sequence[Any] | None:
    """Evaluate `program` if an input requires grad, at any level; else return None."""
    if True not in needs:
        return None
    return dispatch(program, inputs, Request(needs, current_layer() is None))[0]


def dispatch(
    program: Program,
    inputs: Sequence[Tensor],
    request: Request,
    saved: Sequence[Tensor] | None = None,
) -> Evaluated:
    """Evaluate `program` by the innermost torch.func transform.

    A node saves `saved` in place of inputs that are the user's dual numbers.
    """
    layer = current_layer()
    kind: Any = None if layer is None else kind_of(layer)
    if kind == VMAP:
        args = program, request, layer.level()
        return batched(inputs, functools.partial(_dispatch_below_vmap, *args))
    if kind == JVP:
        return _dispatch_at_jvp(layer, program, inputs, request)
    if layer is None or dual_level_active():
        if layer is not None:  # before they are taken apart, which is done at a level
            inputs = lifted(layer, kind, inputs)
        duals = Duals.here(inputs) if saved is None and _are_dual() else None
        if duals is not None and duals.with_tangents:
            return _dispatch_dual(program, inputs, duals, request)
    ends: Sequence[Tensor] = inputs
    if layer is None:
        outs, evaluation = without_grad_mode(program.evaluate, inputs, request)
        # If only levels above differentiate, nothing is to be saved down here.
        if not (request.at_base or is_recorded(inputs)):
            return outs, evaluation
    else:
        level = layer.level()
        below = [unwrap_for_grad(t, level) for t in inputs]
        asked = Request(*request[:-1], True)  # `_replace` costs five times as much
        results, evaluation = call_below(layer, kind, dispatch, program, below, asked)
        outs = _wrapped(results, level)
        if True in map(_requires_grad, below):
            ends = lifted(layer, kind, inputs)  # constants of a level: no graph below
            # A node saves constants of the level; torch saves no inference tensor.
            pairs = zip(inputs, ends, strict=True)
            inputs = [t if t.is_inference() else there for t, there in pairs]
    ends = evaluation.ends(ends)
    if ends:
        found = evaluation._replace(is_below=True) if request.is_below else evaluation
        evaluated = program, found, saved or inputs, outs
        outs = _with_node(evaluated, ends)
    return outs, evaluation


def _with_node(evaluated: Any, ends: Sequence[Tensor]) -> Sequence[Any]:
    """Return results behind a node at this level."""
    outs = apply_at_level(_apply, evaluated, *ends)
    if evaluated[0].offloading is not None:
        evaluated[0].offloading.send(evaluated[2], outs)
    return outs


def _wrapped(results: Sequence[Any], level: int) -> list[Any]:
    return [None if o is None else wrap_for_grad(o, level) for o in results]


def _dispatch_below_vmap(
    program: Program,
    request: Request,
    level: int,
    inputs: tuple[Any, ...],
    in_dims: tuple[Any, ...],
    size: int,
    randomness: str,
) -> tuple[Any, Any, Evaluation]:
    """Evaluate all examples at once, below the vmap."""
    needs = [*map(requires_grad_at_any_level, inputs)]
    needs_outside = needs_above(program, request, needs, level)
    request = request._replace(needs=needs, is_batched=True)
    batch = Batch(program, needs_outside, (in_dims, size, randomness))
    outs, evaluation = dispatch(batch, inputs, request)
    updated = [in_dims[i] for i in evaluation.updated]
    out_dims = (*batch.found, *updated, *[None] * evaluation.residuals)
    return tuple(outs), out_dims, evaluation


def _dispatch_at_jvp(
    layer: Any, program: Program, inputs: Sequence[Tensor], request: Request
) -> Evaluated:
    """Evaluate values and tangents below. There is no node at this level."""
    level, duals = layer.level(), Duals.at_level(layer, inputs)
    if not duals.with_tangents:
        below = duals.primals
        results, evaluation = call_below(layer, JVP, dispatch, program, below, request)
        return _wrapped(results, level), evaluation
    below = [*map(requires_grad_at_any_level, duals.primals)]
    needs = needs_above(program, request, below, level)
    dual = Dual(program, needs, duals.with_tangents)
    flat, request = [*duals.primals, *duals.tangents], duals.request(dual, request)
    results, evaluation = call_below(layer, JVP, dispatch, dual, flat, request)
    results = _wrapped(results, level)
    outs, tangents, evaluation = dual.taken_apart(results, evaluation)
    return as_duals(outs, tangents), evaluation


def _are_dual() -> bool:
    """Say whether tensors here may be dual numbers of a `dual_level` of the user's."""
    return base_dual_level_active() and is_forward_ad_enabled()


def _dispatch_dual(
    program: Program, inputs: Sequence[Tensor], duals: Duals, request: Request
) -> Evaluated:
    """Evaluate a program on dual numbers that the user made, at this level.

    Values and tangents have a node in common, for gradients of the tangents. Values
    get another one, evaluated on dual numbers, so that their gradients have tangents.
    """
    dual = Dual(program, [*map(_requires_grad, duals.primals)], duals.with_tangents)
    flat, request = [*duals.primals, *duals.tangents], duals.request(dual, request)
    saved = [*inputs, *duals.tangents]  # so that gradients of tangents have tangents
    outs, tangents, found = dual.taken_apart(*dispatch(dual, flat, request, saved))
    evaluation = found._replace(shared=())
    ends = evaluation.ends(duals.primals) if is_recorded(duals.primals) else ()
    if ends:
        alone = Tensor.detach if current_layer() is None else without_node
        outs = [None if o is None else alone(o) for o in outs]
        outs = apply_at_level(_apply, (program, evaluation, inputs, outs), *ends)
    return as_duals(outs, tangents), found


# --- The forward, below all levels ---


def _evaluate_below(
    call: Call, program: Program, inputs: Sequence[Tensor], request: Request
) -> tuple[Sequence[Any], Evaluation, CallState]:
    """Run the forward of a call, as a program, and drop its graph."""
    reach = call.reach
    given = ForwardInputs(inputs, request, reach.buffers, call.wrapped)
    noted = call.watching = first_bytes(call.owner, inputs)
    # In a function of its own: nothing here may hold the graph.
    evaluated = evaluate_forward(call, program, given, request)
    call.forward_done()  # before leaks are looked for: it holds tensors
    if noted is not None:
        call.rewritten = noted.changed(inputs, evaluated[1].updated)
    # The graph is gone by now, unless something of it escaped.
    checks.refuse_backward(program, given.inner, inputs)
    checks.refuse_assigned_data(reach, inputs, given.inner, request.needs)
    program.refuse_leaks(given.fresh())
    call.watching = None
    return evaluated


def evaluate_forward(
    call: Call, program: Program, given: ForwardInputs, request: Request
) -> tuple[Sequence[Any], Evaluation, CallState]:
    reach, inputs, inner = call.reach, given.inputs, given.inner
    # Before the function draws or changes anything: recomputes start from here.
    state = call_state(reach, inputs)
    has_inference = None in state.versions
    planned = call.planned(program, given, request, state)
    outs = _run(call, program, inner, None if planned is None else planned.mode, state)
    again = functools.partial(call.run_on_copies, program)

    def changed_inside(index: InputIndex | None) -> Exception:
        changes = changes_of(reach, inner, again)
        return checks.changed_inside(reach, index, changes)

    # Before inputs are compared: an update of a buffer is no change that is refused.
    state, before = given.state_after(state, reach.buffers, changed_inside)
    checks.refuse_changed_inputs(
        reach, inputs, inner, state.versions, request.needs, before, again
    )
    # While the graph is there; the results have none.
    reached = call.labelled(reached_by, reach, request, outs, inner, program.outside)
    differentiable = [*map(_requires_grad, outs), *[False] * len(before)]
    for found in program.outside:
        for j in found.differentiable:
            differentiable[j] = True
    results = [*map(Tensor.detach, outs), *before.values()]
    residuals = None
    if planned is not None:
        if isinstance(planned.mode, Recorder):
            planned.mode.note_saved(outs)
        # Under a second vmap the recompute may run other operations than the plan
        # holds. Then it does not follow the plan, and needs the inputs.
        may_drop = call.is_differentiated_once and not here().only_our_hooks
        may_drop = may_drop and not (program.outside or request.is_jvp)
        residuals = planned.finish(outs, may_drop=may_drop)
    if residuals is not None:
        results += residuals
        differentiable += [False] * len(residuals)
    evaluation = Evaluation(
        request=request,
        used=reached.inputs,
        differentiable=differentiable,
        updated=[*before],
        residuals=len(residuals or ()),
        planned=None if residuals is None else planned,
        shared=sharing_memory(outs, inner, given.copies),
        asks_grad_mode=reached.asks_grad_mode,
        certain=reached.certain,
        has_inference=has_inference,
    )
    return results, evaluation, state


def _run(
    call: Call, program: Program, inner: list[Tensor], mode: Any, state: CallState
) -> Sequence[Any]:
    """Run with grad mode on, under a mode if there is one."""
    run = program.run if mode is None else functools.partial(program.run, mode=mode)
    if call.wrapped:
        run = functools.partial(call.labelled, run)
    if state.modes is not None:  # notes whether the user's modes change the forward
        run = state.modes.watched()(run)
    tracked = hooks_of_trackers()
    set_grad_enabled(True)
    try:
        outs = without_hooks(run, *inner)
    except BaseException as error:
        state.ambient.forget_casts()
        if not tells_of("a write to a leaf", error):
            raise
        again = functools.partial(call.run_on_copies, program)
        changes = changes_of(call.reach, inner, again)
        index = next(iter(changes), None)
        raise checks.changed_inside(call.reach, index, changes) from error
    set_grad_enabled(False)
    remove_hooks_since(tracked)  # they are on the graph that is dropped, and hold it
    state.ambient.forward_done()
    return outs


# --- The node ---


class Remat(SingleLevelFunction):
    """The node of a program's evaluation, at a level of `grad` or at the base.

    Its inputs are those of the program that it has edges to. On its context it has the
    `program`, and what its `evaluation` found.
    """

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, evaluated: tuple[Any, ...], *_: Tensor
    ) -> Any:
        """Save the inputs of the program as they were before, and the residuals."""
        program, evaluation, saved, outs = evaluated
        ctx.program, ctx.evaluation = program, evaluation
        ctx.set_materialize_grads(False)
        request, differentiable = evaluation.request, evaluation.differentiable
        updated, residuals = evaluation.updated, evaluation.residuals
        end = len(outs) - residuals
        if updated:
            saved = replaced_at(saved, updated, outs[end - len(updated) : end])
        if evaluation.planned is not None:
            saved = [*evaluation.planned.kept(saved), *outs[end:]]
            if request.at_base and residuals:  # no level further up saves them
                outs, differentiable = outs[:end], differentiable[:end]
        if evaluation.shared:
            # Views, so that torch refuses to change them. The levels below record the
            # views: there this node does not replace them. Past the modes of a tracer
            # nobody would know what the alias is of.
            view = torch.ops.aten.alias.default if is_below_tracer() else alias
            shared = evaluation.shared
            with torch.set_grad_enabled(not request.at_base):
                outs = [view(o) if j in shared else o for j, o in enumerate(outs)]
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
        program = ctx.program
        primals: Sequence[Tensor] = saved_tensors(ctx)
        if program.offloading is not None:
            primals = program.offloading.read(ctx, primals)
        if not evaluation.request.at_base:  # their level may be gone
            primals = [*map(unwrap_dead, primals)]
        arity = len(primals)
        rule = program.own_vjp(program, evaluation, wanted, given)
        rule = rule or Vjp(program, evaluation, arity, wanted, given)
        there: Any = map(cotangents.__getitem__, given)
        cts = [*map(unwrap_dead, there)]
        try:
            with counted_levels():
                found = outside_inference_mode(_evaluate_vjp, rule, primals, cts)
        except Exception as error:
            hide_frames(error)
            raise
        if len(found) < len(ends):
            found = map(dict(zip(wanted, found, strict=True)).get, ends)
        return (None, *found)


_apply: Any = Remat.apply
_NOTHING: Any = contextlib.nullcontext()


def _evaluate_vjp(rule: Program, primals: Sequence[Tensor], cts: Sequence[Any]) -> Any:
    """Evaluate a vjp. No node can save a cotangent that inference mode made."""
    if True in map(Tensor.is_inference, cts):
        cts = [ct.clone() if ct.is_inference() else ct for ct in cts]
    return evaluate(rule, [*primals, *cts])


# --- The vjp of a program ---


class Vjp(Program):
    """`(*primals, *cotangents) -> gradients` of a program."""

    __slots__ = (
        *("_arity", "_at_base", "_evaluation", "_has_run", "_in_grad_mode", "_program"),
        *("_wanted", "_with_cotangents", "hooked", "offloading", "once"),
    )
    once: Mapping[int, Any]

    def __init__(
        self,
        program: Program,
        evaluation: Evaluation,
        arity: int,  # primals that the node saved: inputs and residuals
        wanted: Sequence[InputIndex],
        with_cotangents: Sequence[OutputIndex],
    ) -> None:
        self._program, self._evaluation = program, evaluation
        self._arity, self._wanted = arity, wanted
        self._with_cotangents = with_cotangents
        self._in_grad_mode = torch.is_grad_enabled()
        self._at_base, self._has_run = current_layer() is None, False
        self.once = {}
        self.hooked, offloading = program.hooked, program.offloading
        self.offloading = offloading and offloading.again()

    @override
    def uses(self, count: int) -> Sequence[InputIndex]:
        """Return the primals that the program uses, and the cotangents."""
        evaluation = self._evaluation
        planned = evaluation.planned
        used: Sequence[SavedIndex] = evaluation.used  # unless some were dropped
        if planned is not None and planned.dropped:
            saved = planned.kept(range(len(evaluation.request.needs)))
            used = [k for k, i in enumerate(saved) if i in used]
        return (*used, *range(self._arity, count))

    @property
    @override
    def own(self) -> Container[InputIndex]:
        planned = self._evaluation.planned
        # Where inputs were dropped, others have their numbers.
        return () if planned is not None and planned.dropped else self._program.own

    @override
    def refuse_changed(self, inputs: Sequence[Tensor]) -> None:
        self._program.refuse_changed(inputs[: self._arity])

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Recompute the program and pull the cotangents back through it."""
        del mode
        saved, cts = inputs[: self._arity], inputs[self._arity :]
        if not has_proxies():
            return self._gradients(saved, cts)
        # In a graph. Changes are refused first: behind the barrier none would show.
        self._program.refuse_changed(saved)
        collectives = CollectivesInGraph()
        may_read_early = self._program.may_read_early
        with recomputing_after(cts) as after:
            read = [t if may_read_early(t) else behind(t, after) for t in saved]
            grads = self._gradients(read, cts)
        if current_layer() is None and not is_recorded(inputs):
            # Nobody reads the recompute from here on.
            tensors = [taken_apart(g)[0] for g in grads if isinstance(g, Tensor)]
            collectives.drop_unread(tensors)
        return grads

    def _gradients(self, saved: Sequence[Tensor], cts: tuple[Tensor, ...]) -> Outputs:
        """Recompute along the plan of the forward, if it has one, and pull back."""
        planned, has_run, self._has_run = self._evaluation.planned, self._has_run, True
        # If the plan has run, hooks have seen these gradients already.
        undone = self.hooked.undone() if has_run and self.hooked else _NOTHING
        run = self._recompute_and_pull_back  # what a replay left is looked for after it
        pull = functools.partial(differentiated.call, run, cts)
        with undone:
            if planned is None:
                return pull(saved, None)
            return planned.carry_out(self._with_cotangents, saved, pull)

    def _recompute_and_pull_back(
        self, cts: tuple[Tensor, ...], primals: Sequence[Tensor], mode: Any
    ) -> Outputs:
        program, evaluation = self._program, self._evaluation
        create_graph, is_checked = is_recorded((*primals, *cts)), False
        acts_alone = create_graph and not evaluation.request.at_base
        if self.hooked and (acts_alone or evaluation.is_below):
            # In a level of their own they see its gradients, and no second derivatives.
            inner, outs = self._recompute_at_level(primals, mode)
        elif current_layer() is None:
            inner, outs = self._recompute(primals, create_graph, mode)
            is_checked = program.check_outputs(outs)
        elif evaluation.request.is_batched or not is_batch_of_cotangents(primals):
            create_graph = torch.is_grad_enabled()  # perhaps below this level
            if self._in_grad_mode and evaluation.asks_grad_mode:
                # Kernels for a backward without a graph lose tangents.
                create_graph = create_graph or dual_level_active()
            inner, outs = self._recompute_at_level(primals, mode)
        else:
            # One recompute, and one set of draws, serves a batch of cotangents. Below
            # their vmap they, or the primals, may be differentiated once more.
            tensors = (*primals, *cts)
            is_below = any(map(requires_grad_at_any_level, tensors))
            create_graph = create_graph or (torch.is_grad_enabled() and is_below)
            args = self._recompute, primals, create_graph, mode
            inner, outs = call_below(None, VMAP, *args)
            is_checked = program.check_outputs(outs)
        outs = tuple(map(root_of, outs))  # the values may be freed
        grads = self._pull_back(
            outs, cts, inner, create_graph=create_graph, is_checked=is_checked
        )
        if NoneType in map(type, grads):
            pairs = zip(self._wanted, grads, strict=True)
            program.check_reached(outs, inner, [i for i, g in pairs if g is None])
        checks.refuse_backward(program, inner, primals)
        if program.once:
            self._check_once(grads)
        return grads

    def _recompute(
        self, primals: Sequence[Tensor], create_graph: bool, mode: Any
    ) -> tuple[Sequence[Tensor], Outputs]:
        """Recompute at the base; return the inputs in the graph, and the outputs."""
        needs = self._evaluation.request.needs
        if create_graph:
            # What requires grad here stays itself, for the new graph is to reach it.
            pairs = zip(needs, primals, strict=True)
            needs = [need and not t.requires_grad for need, t in pairs]
        inner = leaves_for(primals, needs, self.own)
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
            ends = self._wanted
            if self.hooked:  # hooks are set on what any level differentiates
                flags = map(requires_grad_at_any_level, primals)
                ends = [i for i, flag in enumerate(flags) if flag or i in ends]
            leaves = [leaf_at(level, primals[i], requires_grad=True) for i in ends]
            inner = replaced_at(primals, ends, leaves)
            context = here()
            context.hooks_apart = bool(self.hooked) and self._evaluation.is_below
            try:
                return inner, self._program.run(*inner, mode=mode)
            finally:
                context.hooks_apart = False

    def _pull_back(
        self,
        outs: Sequence[Any],
        cts: Sequence[Tensor],
        inner: Sequence[Tensor],
        *,
        create_graph: bool,
        is_checked: bool,
    ) -> Outputs:
        ends: Any = tuple(map(outs.__getitem__, self._with_cotangents))
        if not (is_checked or all(map(requires_grad, ends))):
            pairs = zip(ends, cts, strict=True)
            pairs = [(o, ct) for o, ct in pairs if requires_grad(o)]
            if not pairs:
                return (None,) * len(self._wanted)
            ends, cts = zip(*pairs, strict=True)
        if self._in_grad_mode and self._evaluation.asks_grad_mode and not create_graph:
            pull_in_grad_mode(ends)
        inputs = tuple(map(inner.__getitem__, self._wanted))
        if create_graph:
            self.once = once_differentiable(ends, inputs, at_base=self._at_base)
        edges = [o if isinstance(o, Tensor) else o.edge for o in ends]
        return pull_back(tuple(edges), tuple(cts), inputs, create_graph=create_graph)

    def _check_once(self, grads: Outputs) -> None:
        """Refuse second derivatives that torch refuses: here they would be lost."""
        none_left, once = {*map(type, grads)} == {NoneType}, self._program.once
        for j in once.keys() & {*self._with_cotangents}:
            function, is_dropped = once[j]
            if not is_dropped or (none_left and self._at_base):
                raise RuntimeError(_ONCE.format(name=function.__qualname__))


def is_recorded(inputs: Sequence[Tensor]) -> bool:
    """Say whether autograd records what is done with `inputs`."""
    return torch.is_grad_enabled() and True in map(_requires_grad, inputs)


_DEEP = (
    "remat: {depth} calls of remat are in one another here. Each takes about 20 frames "
    "under torch.func: call sys.setrecursionlimit, or wrap fewer functions."
)
_ONCE = (
    "remat: trying to differentiate twice a function that was marked with "
    "@once_differentiable: {name}. Its second derivative would be lost."
)
