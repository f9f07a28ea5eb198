"""The lowering under base autograd: a call has the graph that plain code makes.

In: a user's call. `Saved` is what is known of it. The forward runs the function as it
is; its hook (`_Packing`) puts handles in place of what the graph saves. The first that
a backward reads has the function run again (`recompute`), whose hook (`Filling`) puts
the j-th saved tensor into the j-th handle, until each that is alive has its value.

Invariant: both runs save alike. The forward alone decides what is saved itself and what
becomes a handle. A recompute counts all that is saved, and to save something else is an
error. Nothing that a recompute does stays, and its graph is differentiated by nobody
but the function itself.
Rejected: one node for a call, whose backward is again a call (`function`). What leaves
the function other than by being returned would have no graph, hooks would fire at other
times, and gradients of all inputs would arrive together, whichever were asked for.
"""

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from remat._ambient.ambient import NOTHING, Ambient, put_back
from remat._ambient.draws import without_draws
from remat._ambient.modes import NO_MODES, ModesAround, modes_around
from remat._base.calls import in_reach
from remat._base.context import Context, EnteredAgain, NestedChoices, here, within
from remat._base.errors import MutationError, RecomputeError, note
from remat._base.source import user_line
from remat._base.tensors import outside_inference_mode, version_of
from remat._base.types import TENSORS, Fn
from remat._graph.handles import Handle, PackedOutside, VersionedTensor, unpack
from remat._offload.inputs import away_hooks
from remat._partial.decide import (
    CallKind,
    Situation,
    cache_of,
    metas_of,
    owner_of,
    warn_if_asked,
    warn_once,
)
from remat._partial.options import Options
from remat._partial.planned_call import SavedInHandles
from remat._partial.replay import Replay
from remat._reach.reach import Reach, reach_of
from remat._torch.autograd import (
    current_task,
    execution_group,
    keeps_graph,
    pop_hooks,
    push_hooks,
    reads_what_is_written_late,
    resume_hooks,
    set_grad_enabled,
    suspend_hooks,
    top_hooks,
    when_done,
)
from remat._torch.graphs import is_below_tracer
from remat._torch.levels import (
    batched_again,
    below_all_levels,
    current_layer,
    is_of_torch_func,
    unbatched,
    unwrap_dead,
    without_node,
)
from remat._torch.modes import dispatch_mode_count, torch_functions, unseen
from remat._torch.noted import Noted, Renorm
from remat._torch.tensors import is_fake, storage_id
from remat._torch.tracing import eager_only
from remat._transform.changes import (
    ENDED,
    HeldAtEnd,
    as_written,
    before_a_call,
    changes_of,
    first_bytes,
    is_plain,
    is_written,
    note_written,
    run_watched,
)
from remat._transform.checks import DECIDED, changed_inside, enter_refusing_reads
from remat._transform.inputs import SavedInputs
from remat._transform.leaves import (
    MOVED,
    NO_CHANGES,
    ONLY_MARKS,
    SMALL,
    PreserveGradients,
    WatchedLeaves,
    addresses_now,
    in_other_memory,
    preserved_marks,
    preserved_memory,
)


_requires_grad = operator.attrgetter("requires_grad")
# The labels of calls whose backward recorded a graph, for `explain` to tell.
DIFFERENTIATED_AGAIN: set[str] = set()


# --- The call ---


@eager_only
def call_saved(
    fn: Fn, label: str, args: Any, kwargs: dict[str, Any], options: Options
) -> Any:
    """Call a function so that a backward recomputes what its graph saves."""
    owner = owner_of(fn, args)  # before: what refuses draws is no method
    if options.rng == "error":
        fn = without_draws(fn, label)
    reach = reach_of(fn, label, args, kwargs)
    if reach is None:
        return fn(*args, **kwargs)
    # Parameters come last. What comes before may be of a level that has ended.
    inputs = reach.take_tensors()
    inputs[: reach.first_parameter] = map(unwrap_dead, inputs[: reach.first_parameter])
    vmaps: Sequence[Any] = ()
    if current_layer() is not None:
        inputs, vmaps = unbatched(inputs)
    needs = [*map(_requires_grad, inputs)]
    if reach.is_lazy or True not in needs:
        return fn(*args, **kwargs)
    call = Saved(reach, options, inputs, needs, vmaps)
    if call.policy is not None or options.prune is True:
        call.plan(owner, inputs)
        fn = in_reach(fn, reach, call.policy)
    if dispatch_mode_count():
        with modes_around().watched() as call.modes:
            return call.forward(fn, args, kwargs, inputs)
    if (noted := first_bytes(owner, inputs)) is None:
        return call.forward(fn, args, kwargs, inputs)
    copied, result = call.inputs.may_be_written, call.forward(fn, args, kwargs, inputs)
    call.rewritten = noted.changed(inputs, copied)
    return result


class Saved:
    """One call.

    It holds no tensor that the call computed, and not the user's module: the graph
    holds its handles, which hold the call.
    """

    __slots__ = (
        *("__weakref__", "addresses", "ambient", "handles", "hooks", "index", "inner"),
        *("inputs", "is_done", "is_nested", "kept", "label", "leaf_changes", "metas"),
        *("modes", "options", "planned", "policy", "reach", "rewritten", "seeds"),
        *("vmaps", "written"),
    )

    handles: Sequence[weakref.ref[Handle] | None]  # None for what was saved itself
    metas: Sequence[Any]  # of what the handles stand for
    seeds: Sequence[int]  # that the forward took from the machine

    def __init__(
        self,
        reach: Reach,
        options: Options,
        inputs: Sequence[Tensor],
        needs: list[bool],
        vmaps: Sequence[Any] = (),
    ) -> None:
        self.reach, self.label = reach, reach.label  # what it reaches, without tensors
        # How each level of vmap around the call batches its inputs.
        self.options, self.vmaps = options, vmaps
        # The hooks for saved tensors around the call, if any; whether they are of one.
        context, self.hooks = here(), top_hooks(True)
        hooks = self.hooks
        is_nested = hooks is not None and hooks[1] is unpack
        self.is_nested = is_nested and hooks[0] is not context.block_pack
        # Joined with those of the calls around.
        self.policy = options.policy if context.policy is None else options.joined()
        if options.offload_inputs:
            hooks = hooks or away_hooks(options.offload_inputs, reach.label)
        self.inputs = SavedInputs(inputs, needs, reach, hooks, nested=self.is_nested)
        self.ambient = Ambient(
            reach.streams, reach.uses_stream_states, shares_casts=True
        )
        # Of the user's leaves, by the forward; whether that has ended.
        self.leaf_changes, self.is_done = ONLY_MARKS, False
        # The inputs without a copy that it wrote to, and those that it did uncounted.
        self.written: dict[int, HeldAtEnd] = {}
        self.rewritten: Sequence[int] = ()
        self.addresses: list[int] | None = None  # of leaves as it ended, if known
        self.planned: SavedInHandles | None = None  # what it does with records or plans
        self.inner: list[Any] = []  # what the calls within chose, in order
        self.kept: list[Any] = []  # of those by their own rules, in order
        self.index: int | None = None  # among those within the call around
        self.modes: ModesAround | None = None  # the user's, around the call

    def plan(self, owner: Any, inputs: Sequence[Tensor]) -> None:
        """Decide whether the call is recorded, or follows a record."""
        counts = self.is_nested or self.options.hooks_residuals
        hooks = self.hooks if counts else None
        around = here().nested_choices
        if around is not None and around.again:
            choice = around.next()
            if choice is not None:
                how = {"hooks": hooks, "nested": True}
                self.planned = SavedInHandles(follows=choice, inputs=inputs, **how)
                self.inner = [*choice.inner]  # which calls within this one do again
            return
        self.index = None if around is None else around.reserve()
        policy, prune = self.policy, self.options.prune
        kind = functools.partial(self.kind, inputs)
        how = policy, prune, owner, self.label
        cache = cache_of(self.situation(inputs), kind, *how)
        if cache is not None:
            self.planned = SavedInHandles(
                follows=cache,
                policy=policy,
                prune=prune,
                inputs=inputs,
                label=self.label,
                hooks=hooks,
                nested=self.is_nested,
            )

    def situation(self, inputs: Sequence[Tensor]) -> Situation:
        return Situation(
            is_saved=True,
            is_compiled=self.reach.compiled,
            elements=sum(map(Tensor.numel, inputs)),
            given_up=_NESTED if any(t.is_nested for t in inputs) else "",
        )

    def kind(self, inputs: Sequence[Tensor]) -> CallKind:
        """Return what the call has in common with those that share its record."""
        signature = self.reach.signature, str(self.vmaps), self.ambient.key
        return CallKind((*signature, *self.inputs.needs), metas_of(inputs))

    def alive(self) -> list[Handle]:
        """Return the handles that a node still holds, but for residuals."""
        found: list[Handle] = []
        for ref in self.handles:
            handle = None if ref is None else ref()
            if handle is not None and handle.residual is None:
                found.append(handle)
        return found

    def handle_at(self, position: int) -> Handle | None:
        ref = self.handles[position]
        return None if ref is None else ref()

    def run_again(self, tensors: Sequence[Tensor]) -> Any:
        if not self.rewritten:
            return self.reach.run(tensors)
        return run_watched(self.reach, self.rewritten, tensors, self.reach.run, tensors)

    def value_of(self, handle: Handle) -> Tensor:
        return _value_of(self, handle)

    def _first_refused(
        self, written: Sequence[int], inputs: Sequence[Tensor]
    ) -> int | None:
        """Return the first input that the forward must not have written to.

        It may write to large constants. Of others an error is to name the line.
        """
        saved = self.inputs
        refused: list[int] = []
        for i in written:
            t, value = inputs[i], saved.values[i]
            is_counted = is_plain(t) and saved.versions[i] not in (None, t._version)
            is_ours = type(value) is Tensor or type(value) is PackedOutside
            is_constant = is_ours and not (saved.needs[i] or t.requires_grad)
            is_right = is_counted and is_constant and t.numel() > SMALL
            if self.vmaps or not is_right:
                refused.append(i)
        return min(refused, default=None)

    # --- The forward ---

    def forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        context, planned = here(), self.planned
        if ENDED and not context.recomputing:
            before_a_call(inputs[: self.reach.first_parameter])
        # Read before the function runs, which may change it.
        parameters = len(inputs) - self.reach.first_parameter
        leaves = self.inputs.originals
        watched = WatchedLeaves(leaves, len(leaves) - parameters)
        packing = _Packing(self, inputs, context)
        self.handles, self.metas = packing.handles, packing.metas
        noted = Noted()
        self.seeds = noted.seeds
        before = context.only_our_hooks, context.policy, context.nested_choices
        inside, regions = context.inside, context.regions
        hooks = self.hooks
        context.only_our_hooks = (
            hooks is None
            or hooks[0] is context.block_pack
            or (context.only_our_hooks and self.is_nested)
        )
        context.policy, around = self.policy, context.nested_choices
        again = around is not None and around.again  # also where this follows nothing
        context.nested_choices = NestedChoices(self.inner, again=again)
        context.regions = (*regions, [self.kept, False, 0, False])
        if context.reporter is not None:
            context.inside = (*inside, self)
        noted.start()
        # The hook comes last: the graphs of all of the above are not the call's.
        push_hooks(packing.pack, unpack)
        try:
            if planned is None or planned.mode is None:
                result = fn(*args, **kwargs)
            else:
                with within(self.policy, under_mode=True), planned.mode:
                    result = fn(*args, **kwargs)
                planned.mode.end()
        except BaseException:
            # Its mode holds what the policy may save, with the graph, which holds the
            # call: the garbage collector would not see that.
            self.planned = None
            raise
        finally:
            pop_hooks()
            context.only_our_hooks, context.policy, context.nested_choices = before
            context.inside, context.regions = inside, regions
            noted.end()
            # Also after an error, and in any order: the graph refers to the hook, and
            # the roots of the reach to the holders.
            packing.done()
            self.reach.forward_done()
        # If no handle is alive nobody will ask for a value. Then nothing is kept, and a
        # record of this forward is lost.
        for ref in self.handles:
            if ref is not None and ref() is not None:
                self._end(inputs, watched, noted.renorms)
                break
        return result

    def _end(
        self, inputs: Sequence[Tensor], watched: WatchedLeaves, renorms: list[Renorm]
    ) -> None:
        """Keep what a recompute needs, now that the forward has ended."""
        # First: what looks for changes below may run the function again.
        self.leaf_changes = watched.changes(inputs, self.reach.attributes)
        self.addresses = watched.addresses
        self.ambient.forward_done(keeps_casts=True)
        planned = self.planned
        if planned is not None:
            why = planned.gives_up(accumulates=self.leaf_changes.accumulates)
            if self.is_nested and not why and is_written(inputs, self.inputs):
                why = _WRITES  # now, as what is packed outside is counted
            if why:  # all is recomputed, with a warning if that is not what was asked
                self.planned = planned = None
                policy, prune = self.policy, self.options.prune
                warn_if_asked(policy, prune, self.situation(inputs), self.label, why)
            else:
                # Before the inputs: a recompute of the call around has residuals packed
                # while this call runs, and has to pack in the same order.
                refs = self.handles
                planned.finish([None if ref is None else ref() for ref in refs])
        written = self.inputs.note_changes(inputs, renorms)
        changed = self._first_refused(written, inputs) if written else None
        if changed is not None:
            changes = changes_of(
                self.reach,
                inputs,
                lambda copies: _run_batched_on_buffers(self, *copies),
            )
            raise changed_inside(self.reach, changed, changes)
        if written:
            self.written = note_written(inputs, self.inputs, written)
            self.planned = None
        elif planned is not None:
            # After their changes were noted: what is absent has none.
            self.inputs.let_go(planned.dropped)
            around = here().nested_choices
            if around is not None and self.index is not None:
                around.note(self.index, planned.chosen(self.inner))
        # Last: until now a handle that is read belongs to a forward that still runs.
        self.is_done = True


# --- Packing: the hook of the forward ---


class _Packing:
    """The hook of one forward, and what it has packed.

    An input as it was at the call is saved itself, and so is a leaf that requires grad:
    to give one back by a handle, the function would have to run.
    """

    __slots__ = (
        *("_call", "_frozen", "_index", "_is_traced", "_observe", "_saved"),
        *("_versions", "handles", "metas"),
    )

    def __init__(self, call: Saved, inputs: Sequence[Tensor], context: Context) -> None:
        saved, first = call.inputs, call.reach.first_parameter
        self._call, self._saved, self._versions = call, saved.values, saved.versions
        self._index = dict(zip(map(id, inputs[:first]), range(first), strict=True))
        # Parameters have no index: those that are frozen are known by these.
        self._frozen: set[int] = set()
        if False in saved.needs[first:]:
            pairs = zip(inputs[first:], saved.needs[first:], strict=True)
            self._frozen = {id(t) for t, need in pairs if not need}
        self._is_traced = is_below_tracer()
        self.handles: list[weakref.ref[Handle] | None] = []
        self.metas: list[Any] = []
        # Is told what is saved at each position, None for what stays itself.
        self._observe: Callable[[int, Tensor | None], None] | None = None
        if call.planned is not None:
            self._observe = call.planned.pack
        if context.reporter is not None:
            self._observe = context.reporter.observe(call, self._observe)

    def pack(self, t: Tensor) -> Any:  # noqa: C901 - one call, and no others
        if type(t) not in TENSORS and _is_of_trace(t, self._is_traced):
            return t
        handles, version = self.handles, None
        i = self._index.get(id(t))
        if i is not None:
            version = self._versions[i]
            if version is not None and t._version != version:
                i = None  # it holds another value by now
        if i is None:
            if is_of_torch_func(t):
                t = unwrap_dead(t)
                if is_of_torch_func(t):  # of a level that was opened inside
                    handles.append(None)
                    self.metas.append(None)
                    if self._observe is not None:
                        self._observe(len(handles) - 1, None)
                    return without_node(t)
            node = t.grad_fn
            if node is not None or not (t.requires_grad or id(t) in self._frozen):
                position = len(handles)
                handle = Handle(self._call, position)
                handles.append(weakref.ref(handle))
                try:
                    self.metas.append((t.shape, t.dtype, type(node)))
                except RuntimeError:  # a nested tensor has no shape
                    self.metas.append((None, t.dtype, type(node)))
                if self._observe is not None:
                    self._observe(position, t)
                return handle
            version = version_of(t)
        handles.append(None)
        self.metas.append(None)
        if self._observe is not None:
            self._observe(len(handles) - 1, None)
        if i is not None and type(self._saved[i]) is PackedOutside:
            return self._saved[i]
        return VersionedTensor(t, version, self._call.reach)

    def done(self) -> None:
        """Drop the references to the call: the graph refers to the hook."""
        del self._call, self._saved, self._observe, self.handles, self.metas


def _is_of_trace(t: Tensor, is_traced: bool) -> bool:
    """Say whether torch traces a part of the function, as the body of its `scan`.

    What the graph of that trace saves is none of what the graph of the call saves.
    """
    return is_fake(t) and not is_traced and is_below_tracer()


# --- The recompute ---


@eager_only
def _value_of(call: Saved, asked: Handle) -> Tensor:
    """Return the value of a handle; fill all others that the backward may read."""
    in_backward = current_task() >= 0
    if in_backward and torch.is_grad_enabled() and call.is_done:
        DIFFERENTIATED_AGAIN.add(call.label)
    handles = call.alive() if in_backward else [asked]
    if len(handles) > 1 or call.kept:
        _forget_later(call)  # before the run, which may fail
    try:
        _fill(call, handles)
    except Exception as error:
        note(error, f"remat: raised while recomputing {call.label}.")
        describe = call.options.describe
        if describe is not None and isinstance(error, RecomputeError):
            note(error, describe())
        for handle in handles:
            handle.value = None
        raise
    value = asked.value
    if value is None or value._version > asked.version:
        value = _value_alone(call, asked)
    if keeps_graph():
        asked.value = None
    return value


def _value_alone(call: Saved, asked: Handle) -> Tensor:
    """Return a value that was changed in place: a run for it alone stops before."""
    for _ in range(100):  # a backward of another thread that ends takes all values
        _fill(call, [asked])
        if (value := asked.value) is not None:
            if value._version <= asked.version:
                return value
            break
    raise MutationError(_CHANGED.format(label=call.label))


def _forget_later(call: Saved) -> None:
    """Have values that nobody reads dropped, as the backward or its group ends."""
    forget, group = functools.partial(_forget, weakref.ref(call)), execution_group()
    if group is None:
        when_done(forget)
    else:
        weakref.finalize(group, forget)


def _forget(ref: weakref.ref[Saved]) -> None:
    call = ref()
    if call is None:
        return
    for handle in call.alive():
        handle.value = None
    for kept in call.kept:
        kept.backward_done()


def _fill(call: Saved, handles: Sequence[Handle]) -> None:
    """Recompute what handles stand for, below all levels and under the call's modes."""
    fill: Fn = _fill_fully if call.planned is None else _fill_planned
    modes = call.modes or (NO_MODES if dispatch_mode_count() else None)
    fill = fill if modes is None else functools.partial(modes.call, fill)
    if torch.is_inference_mode_enabled():
        fill = functools.partial(outside_inference_mode, fill)
    while True:
        try:
            with torch_functions():  # those of a loss may have called the backward
                return below_all_levels(fill, call, handles)
        except EnteredAgain:
            if not call.kept:  # else a call that was kept has to be entered after all
                raise


def _fill_planned(call: Saved, handles: Sequence[Handle]) -> None:
    """Recompute along a plan if one fits."""
    planned = call.planned
    assert planned is not None
    if not call.is_done:
        # Unseen by the mode that records the forward.
        with planned.outside():
            _fill_fully(call, handles)
        planned.note_read(handles)
        return
    replaying = planned.replay(handles := [*handles])
    if replaying and (not handles or _fill_along_plan(call, handles, replaying)):
        if current_task() >= 0 and not keeps_graph():
            planned.let_go()
        return
    _fill_fully(call, handles, planned.check())


def _fill_fully(call: Saved, handles: Sequence[Handle], check: Any = None) -> None:
    """Run the function as it is, under a mode that checks it if there is one."""
    stops = call.options.stops_early and not reads_what_is_written_late()
    # Of a forward that still runs, nobody knows yet where it ends.
    stops = (stops and not call.written) or not call.is_done
    filling = Filling(handles, call, stops=stops, compares=call.options.compares)
    recompute(call, filling, call.inputs.to_run_on(call.leaf_changes), check)
    if filling.left or not stops:
        filling.end()


def _fill_along_plan(call: Saved, handles: Sequence[Handle], replaying: Replay) -> bool:
    """Recompute along a plan; say whether it fit."""
    stops = call.options.stops_early and not reads_what_is_written_late()
    filling = Filling(handles, call, stops=stops)
    tensors = call.inputs.to_run_on(call.leaf_changes)
    try:
        # No name for the stand-ins: `escaped` counts who else holds them.
        is_users = call.inputs.is_itself
        recompute(
            call, filling, replaying.stand_ins(tensors, is_users=is_users), replaying
        )
    except Exception as error:  # noqa: BLE001 - raised there, if it is the user's
        # The hook raises it where the replay saves something else than the forward.
        replaying.failed(error, is_ours=isinstance(error, RecomputeError))
        return False
    if filling.left or replaying.escaped():
        replaying.failed(None)
        return False
    replaying.succeeded()
    return True


def recompute(
    call: Saved, filling: "Filling", tensors: Sequence[Tensor], mode: Any
) -> None:
    """Run the function again, until all handles are filled."""
    context = here()
    before = context.only_our_hooks, context.policy, context.nested_choices
    inside, recomputing = context.inside, context.recomputing
    regions = context.regions
    context.only_our_hooks, context.policy = True, call.policy
    context.nested_choices = NestedChoices(call.inner, again=True)
    context.regions = (*regions, [call.kept, True, 0, False])
    context.recomputing = (*recomputing, call)
    if context.reporter is not None:
        context.inside = (*inside, call)
    # The hooks and the grad mode of the backward do not count.
    suspended, grad_mode = suspend_hooks(), torch.is_grad_enabled()
    run, copied = _run_on_objects, call.inputs.may_be_written
    if copied or call.vmaps:
        run = _run_batched_on_buffers
    if copied or call.written:
        filling.put_back = {storage_id(tensors[i]) for i in (*copied, *call.written)}
    set_grad_enabled(True)
    push_hooks(filling.pack, unpack)
    streams = call.ambient.streams_now(call.reach.streams)
    try:
        # Outside of the mode, which is to see what the function does and nothing else.
        with _state_restored(call, tensors):
            try:
                if mode is None:
                    run(call, *tensors)
                else:
                    with within(call.policy, under_mode=True), mode:
                        run(call, *tensors)
                        mode.end()
            except Stop:
                pass
            except Exception as error:
                # TorchScript's interpreter raises another error in place of `Stop`.
                if filling.left or isinstance(error, MutationError):
                    raise
    finally:
        # Ours is on top of those that were there: it goes first.
        pop_hooks()
        for handle in filling.handles.values() if call.inner else ():
            handle.let_go_of_graph()
        put_back(streams)
        context.only_our_hooks, context.policy, context.nested_choices = before
        context.inside, context.recomputing = inside, recomputing
        context.regions = regions
        set_grad_enabled(grad_mode)
        if suspended:
            resume_hooks(suspended)


def _run_batched_on_buffers(call: Saved, *tensors: Tensor) -> None:
    """Call the function again, under the levels of vmap and on buffers of the call."""
    run = functools.partial(_run_on_objects, call)
    if call.vmaps:
        run = batched_again(run, call.vmaps)
    with call.inputs.put_back(tensors):
        run(*tensors)


def _run_on_objects(call: Saved, *tensors: Tensor) -> tuple[()]:
    """Call the function again on tensors, with its objects as they were."""
    noted = Noted(call.seeds)
    noted.start()
    try:
        call.run_again(tensors)
    finally:
        noted.end()
    return ()


def _state_restored(
    call: Saved, tensors: Sequence[Tensor]
) -> AbstractContextManager[Any]:
    """Restore the state of the call; leave nothing on the user's own leaves."""
    ambient, leaf_changes, saved = call.ambient, call.leaf_changes, call.inputs
    state, changed, originals = ambient.restored(), saved.changed(), saved.originals
    if call.addresses is not None:
        for k in in_other_memory(call.addresses, addresses_now(originals)):
            name = call.reach.name_of(saved.originals_at[k])
            warn_once(MOVED.format(name=name, label=call.label))
    gradients = PreserveGradients(originals)
    is_as_it_was = state is NOTHING and leaf_changes is NO_CHANGES
    if is_as_it_was and not (changed or saved.renorms or call.written):
        return gradients
    with contextlib.ExitStack() as everything:
        if call.written:
            names = call.reach.name_of
            everything.enter_context(as_written(call.written, tensors, names, changed))
            changed = [i for i in changed if i not in call.written]
        if changed:
            # Which enters it at once: to enter what is returned does nothing.
            anew = ambient.casts_anew()
            state = enter_refusing_reads(call.reach, tensors, changed, state, anew)
        everything.enter_context(state)
        everything.enter_context(gradients)
        if leaf_changes.moves or leaf_changes.marks or saved.renorms:
            everything.enter_context(saved.rows_put_back())
            own, then = saved.own(tensors), call.reach.next_hook
            everything.enter_context(preserved_marks(own, then))
        if leaf_changes.moves:

            def moved(k: int) -> MutationError:
                return changed_inside(call.reach, saved.originals_at[k])

            # Innermost: leaves are in their memory again before rows are put back.
            everything.enter_context(preserved_memory(originals, moved))
        return everything.pop_all()


# --- Filling: the hook of the recompute ---


class Stop(BaseException):
    """Ends a recompute: every handle that is alive has its value."""


class Filling:
    """The hook of one recompute.

    The j-th tensor saved goes into the j-th handle, if that is alive, and only if its
    shape, dtype and node are those of the tensor that the forward saved there. What is
    returned to the graph of the recompute has no node: it would be a cycle that Python
    does not see.
    """

    __slots__ = (
        *("_compares", "_is_traced", "_label", "_metas"),
        *("_saved", "_stops", "handles", "left", "put_back"),
    )

    def __init__(
        self,
        handles: Iterable[Handle],
        call: Saved,
        *,
        stops: bool = True,
        compares: bool = True,
    ) -> None:
        self._stops, self._compares = stops, compares
        self._is_traced = is_below_tracer()
        self.handles: dict[int, Handle] = {}
        for handle in handles:
            self.handles[handle.position] = handle
        # Of all that the forward saved, None for what was saved itself.
        self._metas, self._label = call.metas, call.label
        self._saved: list[Any] = []
        self.left = len(self.handles)
        # The storages of what holds something else after the run.
        self.put_back: Collection[int] = ()

    def pack(self, t: Tensor) -> Any:  # noqa: C901 - one call, and no others
        if type(t) not in TENSORS and _is_of_trace(t, self._is_traced):
            return t
        if not self.left and self._stops:  # again, as somebody caught the first one
            raise Stop
        saved, metas = self._saved, self._metas
        position = len(saved)
        if is_of_torch_func(t):
            t = unwrap_dead(t)
            if is_of_torch_func(t):
                saved.append(None)
                return without_node(t)
        node = t.grad_fn
        value = t if node is None else t.detach()
        if self.put_back and storage_id(t) in self.put_back:
            with unseen():
                value = t.detach().clone()
        handle = self.handles.get(position)
        if handle is None:
            saved.append(None)
            if position >= len(metas):
                raise self.differs()
            return value
        try:
            meta = t.shape, t.dtype, type(node)
        except RuntimeError:  # a nested tensor has no shape
            meta = None, t.dtype, type(node)
        saved.append(meta)
        if meta != metas[position] and self._is_other(meta, metas[position]):
            raise self.differs()
        handle.value, handle.version = value, value._version
        self.left -= 1
        if not self.left and self._stops:
            raise Stop
        return value

    def end(self) -> None:
        """Check that the recompute, which has ended, has saved all."""
        if self.left or not (self._stops or len(self._saved) == len(self._metas)):
            raise self.differs()

    def _is_other(self, meta: Any, then: Any) -> bool:
        """Say whether what is saved differs from what the forward saved."""
        if not self._compares:
            return False
        if then is None or meta[:2] != then[:2]:
            return True
        nodes = meta[2], then[2]
        names = [*map(_name_of, nodes)]
        if any(issubclass(node, FunctionCtx) for node in nodes):
            # Hooks may put Functions in between that change nothing, as FSDP's do. But
            # what a call within made is no residual of it, nor the other way round.
            return {*names} == {"RematBackward", "NoneType"}
        # TorchScript fuses operations into such a node once it has run them.
        return names[0] != names[1] and "CppFunction" not in names

    def differs(self) -> RecomputeError:
        """Return the error that the recompute and the forward save different things."""
        then, now = self._metas, self._saved
        # What is saved itself is not compared, nor what nobody reads.
        pairs = enumerate(zip(then, now, strict=False))
        first = next((k for k, (a, b) in pairs if a and b and a != b), len(now))
        listed = {"then": _listed(then, first), "now": _listed(now, first)}
        text = _DIFFERS.format(label=self._label, where=user_line(), **listed)
        # Integers that are saved decide shapes.
        decides = any(m and not m[1].is_floating_point for m in then[: first + 1])
        return RecomputeError(text + (DECIDED if decides else ""))


def _name_of(node: type) -> str:
    """Return the name of a node, the same for both that `reshape` may make."""
    name = node.__name__
    # Which one it makes depends on whether a mode is active.
    return "ViewBackward0" if name == "ReshapeAliasBackward0" else name


def _listed(metas: Sequence[Any], first: int) -> str:
    """Write what was saved around the first difference."""
    start = max(0, first - 2)
    lines = [_line(k, meta) for k, meta in enumerate(metas[start : first + 2], start)]
    return "\n".join(lines if len(metas) > first else [*lines, "    nothing more"])


def _line(k: int, meta: Any) -> str:
    if meta is None:
        return f"    {k}: an input, a leaf, or what is not read"
    shape, dtype, node = meta
    name = "no graph" if node is type(None) else node.__name__
    return f"    {k}: {str(dtype).removeprefix('torch.')}{[*shape]} of {name}"


_DIFFERS = (
    "remat: recomputing {label} saves something else for the backward than the forward "
    "did, at {where}.\n  forward:\n{then}\n  recompute:\n{now}\nThe function must "
    "compute the same thing twice: if it depends on outside state that changed, pass "
    "that state as an argument. remat.testing.check_replay shows where the two part."
)
# Libraries move parameters, and their values with them.
_CHANGED = (
    "remat: a value that {label} computes was changed in place inside it after an "
    "operation saved it, and a backward reads it as it was: change a copy."
)
# Its sizes are asked for by operations, in some runs and not in others.
_NESTED = "an input is a nested tensor"
_WRITES = "it writes to a large tensor in place"
