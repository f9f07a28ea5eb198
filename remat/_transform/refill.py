"""Recomputes a call under base autograd, for a handle that is read.

`Saved.value_of` calls `value_of`, for the first handle that a backward reads. The
function runs again, in the state and on the inputs of the call, and fills all handles
that are alive. A call with a record follows its plan; where that does not fit, the
function runs as it is.

Invariant: the graph of a recompute is differentiated by nobody but the function itself,
and nothing that the recompute does stays.
Rejected: to fill only the handle that is read. Each one would run the function.
"""

import contextlib
import functools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from remat._ambient.ambient import NOTHING
from remat._base.context import Decisions, here, within
from remat._base.errors import MutationError, RecomputeError
from remat._base.tensors import outside_inference_mode
from remat._base.tracebacks import note
from remat._graph.handles import Handle, unpack
from remat._partial.planned_call import Replaying
from remat._torch import (
    Noted,
    batched_again,
    below_all_levels,
    current_task,
    eager_only,
    execution_group,
    keeps_graph,
    pop_hooks,
    push_hooks,
    reads_what_is_written_late,
    resume_hooks,
    set_grad_enabled,
    suspend_hooks,
    torch_functions,
    when_done,
)
from remat._transform.checks import changed_inside, reading_refused
from remat._transform.filling import Filling, Stop
from remat._transform.leaves import (
    NO_EFFECTS,
    PreserveGradients,
    PreserveMarks,
    PreserveMemory,
)
from remat._transform.saved_call import SavedCall


# The labels of calls whose backward recorded a graph, for `explain` to tell.
DIFFERENTIATED_AGAIN: set[str] = set()


@eager_only
def value_of(call: SavedCall, asked: Handle) -> Tensor:
    """Return the value of a handle; fill all others that the backward may read.

    Raises:
        RecomputeError: the function does something else than it did.
        MutationError: it reads what was changed in place since.
    """
    in_backward = current_task() >= 0
    if in_backward and torch.is_grad_enabled() and call.is_done:
        DIFFERENTIATED_AGAIN.add(call.label)
    handles = call.alive() if in_backward else [asked]
    if len(handles) > 1:
        _forget_later(call)
    try:
        with torch_functions():  # those of a loss may have called the backward
            outside_inference_mode(below_all_levels, _fill, call, handles)
    except Exception as error:
        note(error, f"remat: raised while recomputing {call.label}.")
        describe = call.options.describe
        if describe is not None and isinstance(error, RecomputeError):
            note(error, describe())
        for handle in handles:
            handle.value = None
        raise
    value = asked.value
    assert value is not None
    if keeps_graph():
        asked.value = None
    return value


def _forget_later(call: SavedCall) -> None:
    """Drop the values that nobody reads, at the end of the backward or its group."""
    forget, group = functools.partial(_forget, weakref.ref(call)), execution_group()
    if group is None:
        when_done(forget)
    else:
        weakref.finalize(group, forget)


def _forget(ref: weakref.ref[SavedCall]) -> None:
    """Drop the values that nobody read."""
    call = ref()
    if call is not None:
        for handle in call.alive():
            handle.value = None


# --- What is recomputed ---


def _fill(call: SavedCall, handles: Sequence[Handle]) -> None:
    """Recompute what handles stand for, along a plan if there is one that fits."""
    if not call.is_done:
        _fill_within_forward(call, handles)
        return
    following, check = call.following, None
    if following is not None:
        replaying = following.replay(handles)
        if replaying is not None and _fill_along_plan(call, handles, replaying):
            return
        check = following.check()
    _fill_fully(call, handles, check)


def _fill_within_forward(call: SavedCall, handles: Sequence[Handle]) -> None:
    """Recompute while the forward runs, unseen by the mode that records it."""
    following = call.following
    if following is None:
        _fill_fully(call, handles, None)
        return
    with following.outside():
        _fill_fully(call, handles, None)
    following.note_read(handles)


def _fill_fully(call: SavedCall, handles: Sequence[Handle], check: Any) -> None:
    """Run the function as it is, under a mode that checks it if there is one."""
    options, is_whole = call.options, call.is_done
    filling = Filling(
        handles,
        call.metas,
        call.label,
        # Of a forward that still runs, nobody knows yet where it ends.
        stops=_stops_early(call) or not is_whole,
        compares=options.compares,
    )
    recompute(call, filling, _tensors(call), check)
    filling.end()


def _stops_early(call: SavedCall) -> bool:
    """Say whether the recompute ends once all handles have their values."""
    return call.options.stops_early and not reads_what_is_written_late()


def _fill_along_plan(
    call: SavedCall, handles: Sequence[Handle], replaying: Replaying
) -> bool:
    """Recompute along a plan; say whether it fit."""
    stops = _stops_early(call)
    filling = Filling(handles, call.metas, call.label, stops=stops, is_replay=True)
    tensors = _tensors(call)
    try:
        # No name for the stand-ins: `escaped` counts who else holds them.
        recompute(call, filling, replaying.stand_ins(tensors), replaying.mode)
    except Exception as error:  # noqa: BLE001 - raised there, if it is the user's
        replaying.failed(error)
        return False
    if filling.left or replaying.escaped():
        replaying.failed(None)
        return False
    replaying.succeeded()
    return True


def _tensors(call: SavedCall) -> list[Tensor]:
    """Return what the function runs on."""
    effects = call.effects
    return call.inputs.to_run_on(
        leaves_themselves=not effects.accumulates, inputs_themselves=not any(effects)
    )


# --- The run ---


def recompute(
    call: SavedCall, filling: Filling, tensors: Sequence[Tensor], mode: Any
) -> None:
    """Run the function again, until all handles are filled.

    Args:
        call: the call.
        filling: the hook that fills its handles.
        tensors: to run on.
        mode: to run under, or None.
    """
    context = here()
    before = context.only_our_hooks, context.policy, context.decisions
    inside, recomputing = context.inside, context.recomputing
    context.only_our_hooks, context.policy = True, call.policy
    context.decisions = Decisions(call.inner, again=True)
    context.recomputing = (*recomputing, call)
    if context.examining is not None:
        context.inside = (*inside, call)
    # The hooks and the grad mode of the backward do not count.
    suspended, grad_mode = suspend_hooks(), torch.is_grad_enabled()
    set_grad_enabled(True)
    push_hooks(filling.pack, unpack)
    try:
        with _restored(call, tensors):
            _run_until_filled(call, filling, tensors, mode)
    finally:
        pop_hooks()
        context.only_our_hooks, context.policy, context.decisions = before
        context.inside, context.recomputing = inside, recomputing
        set_grad_enabled(grad_mode)
        resume_hooks(suspended)


def _run_until_filled(
    call: SavedCall, filling: Filling, tensors: Sequence[Tensor], mode: Any
) -> None:
    try:
        if mode is None:
            run_again(call, tensors)
        else:
            with within(call.policy, followed=True), mode:
                run_again(call, tensors)
                mode.end()
    except Stop:
        pass
    except Exception:
        # TorchScript's interpreter raises another error in place of `Stop`.
        if filling.left:
            raise


def run_again(call: SavedCall, tensors: Sequence[Tensor]) -> None:
    """Call the function of a call on other tensors, with its objects as they were."""
    run = functools.partial(_run, call)
    if call.vmaps:
        run = batched_again(run, call.vmaps)
    if not call.inputs.copied:
        run(*tensors)
        return
    with call.inputs.put_back(tensors):
        run(*tensors)


def _run(call: SavedCall, *tensors: Tensor) -> tuple[()]:
    exchanges = not call.inputs.has_parameters(tensors)
    noted = Noted(call.seeds)
    with call.reach.restored(tensors, exchanges=exchanges) as running:
        noted.start()
        try:
            call.run_again(running, tensors)
        finally:
            noted.end()
    return ()


def _restored(
    call: SavedCall, tensors: Sequence[Tensor]
) -> AbstractContextManager[Any]:
    """Restore the state of the call; leave nothing on the user's own leaves.

    What changed since, and is no longer known, is not to be read.
    """
    ambient, effects, saved = call.ambient, call.effects, call.inputs
    state = ambient.restored() if call.is_done else ambient.restored_within()
    changed, leaves = saved.changed(), saved.leaves()
    gradients = PreserveGradients(leaves)
    if state is NOTHING and effects is NO_EFFECTS and not (changed or saved.renorms):
        return gradients
    everything = contextlib.ExitStack()
    if changed:
        state = reading_refused(call.reach, tensors, changed, state)
    everything.enter_context(state)
    everything.enter_context(gradients)
    if effects.moves or effects.marks or saved.renorms:
        _preserve(call, leaves, everything)
    return everything


def _preserve(
    call: SavedCall, leaves: Sequence[Tensor], everything: contextlib.ExitStack
) -> None:
    """Leave no attributes, no hooks and no other memory on leaves."""
    saved = call.inputs
    everything.enter_context(saved.rows_put_back())
    attributes, hooks = saved.attributes_of_leaves(), call.reach.hooks
    everything.enter_context(PreserveMarks(leaves, attributes, hooks))
    if call.effects.moves:

        def moved(k: int) -> MutationError:
            return changed_inside(call.reach, saved.leaves_at[k])

        everything.enter_context(PreserveMemory(leaves, moved))
