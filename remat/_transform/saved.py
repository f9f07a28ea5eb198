"""A call under base autograd: its graph is the one that plain code makes.

The forward runs the function as it is, on the user's own tensors and objects, under
hooks that put handles (`handles`) in place of what the graph saves. The first handle
that a backward reads has the function run again as the call was, under hooks that put
the j-th saved tensor into the j-th handle, and that stop it as soon as each handle that
is still alive has its value. Which ones are alive the graph itself tells: the handles
of nodes that no backward can reach any more are gone.

Invariant: both runs save alike. What stays itself and what becomes a handle is decided
in the forward alone; a recompute counts all that is saved, and to save something else
is an error. The graph of a recompute is differentiated by nobody but the function.
Rejected: one node for a call, whose backward is again a call (`function`). What
leaves the function other than by being returned would have no graph, hooks would fire
at other times, and gradients of all inputs arrive together, whichever were asked for.
"""

import contextlib
import functools
import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from remat._ambient.ambient import Ambient
from remat._ambient.draws import without_draws
from remat._base.checks import Watch, places_of
from remat._base.context import here, within
from remat._base.errors import MutationError
from remat._base.tracebacks import note
from remat._base.types import Fn
from remat._capture.restore import Run
from remat._capture.search import Search
from remat._capture.snapshot import Snapshot
from remat._graph.handles import Handle, unpack
from remat._partial.cache import Kind, metas_of
from remat._partial.decide import Situation, warn_if_asked, why_no_record
from remat._partial.following import Following, Replaying
from remat._partial.forward_plan import ForwardPlan
from remat._partial.options import Options
from remat._torch import (
    batched_again,
    below_all_levels,
    current_layer,
    current_task,
    eager_only,
    keeps_graph,
    top_hooks,
    torch_functions,
    unbatched,
    unwrap_dead,
    when_done,
)
from remat._transform.filling import Filling, Saving, Stop
from remat._transform.held import Held, Unmoved
from remat._transform.leaves import (
    NotCleared,
    Untouched,
    are_marked,
    gradients_of,
    hooks_so_far,
)
from remat._transform.packing import Packing


_requires_grad = operator.attrgetter("requires_grad")
# The labels of calls whose backward recorded a graph, for `explain` to tell.
DIFFERENTIATED_AGAIN: set[str] = set()


@eager_only
def call_saved(
    fn: Fn, label: str, args: Any, kwargs: dict[str, Any], options: Options
) -> Any:
    """Call a function so that a backward recomputes what its graph saves."""
    if options.rng == "error":
        fn = without_draws(fn, label)
    search = Search(shallow=True)
    snapshot = Snapshot(fn, label, args, kwargs, search)
    leaves = [*map(unwrap_dead, search.tensors)]
    hows: Sequence[Any] = ()
    if current_layer() is not None:
        leaves, hows = unbatched(leaves)
    needs = [*map(_requires_grad, leaves)]
    if search.is_lazy or True not in needs:
        return fn(*args, **kwargs)
    call = Saved(snapshot, leaves, needs, hows, options)
    call.follow(getattr(fn, "__self__", fn), leaves)
    return call.forward(fn, args, kwargs, leaves)


class Saved:
    """One call.

    Args:
        snapshot: of it.
        leaves: the tensors found, held by the caller until the forward has ended.
        needs: which of them require grad.
        hows: how each level of vmap around the call batches them.
        options: of the call.

    Attributes:
        held: what is kept of the inputs.
        ambient: what it reads besides.
    """

    __slots__ = (
        *("__weakref__", "_accumulates", "_done", "_following", "_handles", "_hows"),
        *("_inner", "_marked", "_metas", "_moves", "_nested", "_outer", "_place"),
        *("_policy", "_prune", "_snapshot", "ambient", "held"),
    )

    def __init__(
        self,
        snapshot: Snapshot,
        leaves: Sequence[Tensor],
        needs: list[bool],
        hows: Sequence[Any],
        options: Options,
    ) -> None:
        self._snapshot, self._hows = snapshot, hows
        self._policy, self._prune = options.joined(), options.prune
        self._outer = outer = top_hooks(True)
        self._nested = nested = outer is not None and outer[1] is unpack
        self.held = Held(leaves, needs, snapshot.buffers, outer, nested=nested)
        self.ambient = Ambient(snapshot.streams, snapshot.always)
        self._handles: Sequence[weakref.ref[Handle] | None] = ()
        self._metas: Sequence[Any] = ()
        self._done = self._accumulates = self._moves = False
        self._marked = True
        self._following: Following | None = None
        self._inner: list[Any] = []  # what the calls within decide
        self._place: int | None = None  # among those of the call around

    # --- The forward ---

    def follow(self, owner: Any, leaves: Sequence[Tensor]) -> None:
        """Decide whether the call is recorded, or follows a record."""
        policy, prune = self._policy, self._prune
        if policy is None and prune is not True:
            return
        around = here().decisions
        if around is not None and around.again:
            decision = around.next()
            if decision is not None:
                self._following = Following.of_decision(decision, leaves, self._outer)
            return
        self._place = None if around is None else around.reserve()
        call, label = self.situation(leaves), self._snapshot.label
        why = why_no_record(policy, prune, call)
        warn_if_asked(policy, prune, call, label, why)
        if not why:
            cache = self.kind(leaves).cache(policy, prune).for_owner(owner)
            forward_plan = ForwardPlan(cache, policy, prune, leaves, label)
            self._following = Following(forward_plan, self._outer, nested=self._nested)

    def situation(self, leaves: Sequence[Tensor]) -> Situation:
        """Return what decides whether the call is recorded."""
        return Situation(
            is_saved=True,
            is_compiled=self._snapshot.compiled,
            elements=sum(map(Tensor.numel, leaves)),
        )

    def kind(self, leaves: Sequence[Tensor]) -> Kind:
        """Return what the call has in common with those that share its record."""
        signature = self._snapshot.signature, str(self._hows), self.ambient.key
        return Kind((*signature, *self.held.needs), metas_of(leaves))

    def forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], leaves: Sequence[Tensor]
    ) -> Any:
        """Run the function as it is."""
        held, following = self.held, self._following
        own = held.leaves()
        grads, hooks, places = gradients_of(own), hooks_so_far(), places_of(own, ())
        observe = None if following is None else following.pack
        packing = Packing(self, self._snapshot, leaves, held, observe)
        self._handles, self._metas = packing.handles, packing.metas
        try:
            with Saving(self, packing.pack, self._outer, self._policy, self._inner):
                if following is None or following.mode is None:
                    result = fn(*args, **kwargs)
                else:
                    with within(self._policy, followed=True), following.mode:
                        result = fn(*args, **kwargs)
                    following.mode.end()
        finally:
            packing.done()
        handles = [None if ref is None else ref() for ref in self._handles]
        if handles.count(None) < len(handles):
            self._accumulates = gradients_of(own) != grads
            self._moves = places_of(own, ()) != places
            self._marked = hooks_so_far() != hooks or are_marked(own)
            self.ambient.forward_done(keeps_casts=True)
            changed = held.note_changes(leaves)
            if changed is not None:
                raise self._changed_inside(changed)
            if following is not None:
                self._finish(following, handles)
            self._done = True
        return result

    def _finish(self, following: Following, handles: Sequence[Handle | None]) -> None:
        following.finish(handles)
        self.held.let_go(following.dropped)
        around = here().decisions
        if around is not None and self._place is not None:
            around.note(self._place, following.decision)

    def _changed_inside(self, i: int) -> MutationError:
        names = self._snapshot
        return MutationError(_IN_PLACE.format(name=names.name_of(i), label=names.label))

    def alive(self) -> Iterator[Handle]:
        """Yield the handles that some node still holds, of what is not kept."""
        for ref in self._handles:
            handle = None if ref is None else ref()
            if handle is not None and handle.residual is None:
                yield handle

    # --- The recompute ---

    @eager_only
    def value_of(self, asked: Handle) -> Tensor:
        """Return the value of a handle; fill all others that the backward may read.

        Raises:
            RecomputeError: the function does something else than it did.
            MutationError: it reads what was changed in place since.
        """
        in_backward = current_task() >= 0
        if in_backward and torch.is_grad_enabled():
            DIFFERENTIATED_AGAIN.add(self._snapshot.label)
        handles = [*self.alive()] if in_backward else [asked]
        if len(handles) > 1:
            when_done(functools.partial(_forget, weakref.ref(self)))
        try:
            with torch_functions():  # those of a loss may have called the backward
                below_all_levels(self._fill, handles)
        except Exception as error:
            note(error, f"remat: raised while recomputing {self._snapshot.label}.")
            for handle in handles:
                handle.value = None
            raise
        value = asked.value
        assert value is not None
        if keeps_graph():
            asked.value = None
        return value

    def _fill(self, handles: Sequence[Handle]) -> None:
        """Recompute what handles stand for, along a plan if there is one that fits."""
        if not self._done:
            self._fill_within(handles)
            return
        following, check = self._following, None
        if following is not None:
            replaying = following.replay(handles)
            if replaying is not None:
                if self._fills(handles, replaying):
                    return
                if following.dropped:
                    raise following.read_what_is_gone(replaying)
            check = following.check()
        self._fill_fully(handles, check)

    def _fill_within(self, handles: Sequence[Handle]) -> None:
        """Recompute for a derivative inside, which is no part of what is recorded."""
        following = self._following
        if following is None:
            self._fill_fully(handles, None)
            return
        with following.outside():
            self._fill_fully(handles, None)
        following.note_read(handles)

    def _fill_fully(self, handles: Sequence[Handle], check: Any) -> None:
        """Recompute as the call was."""
        filling = Filling(handles, self._metas, self._snapshot.label)
        self._recompute(filling, self._tensors(), check)
        if filling.left:
            raise filling.differs()

    def _tensors(self) -> list[Tensor]:
        """Return what a recompute is on."""
        return self.held.tensors(as_they_are=not self._accumulates)

    def _fills(self, handles: Sequence[Handle], replaying: Replaying) -> bool:
        """Recompute along a plan; say whether it fit."""
        label = self._snapshot.label
        filling = Filling(handles, self._metas, label, is_replay=True)
        tensors = self._tensors()
        try:
            # No name for the stand-ins: `escaped` counts who else holds them.
            self._recompute(filling, replaying.stand_ins(tensors), replaying.mode)
        except Exception as error:  # noqa: BLE001 - raised there, if it is the user's
            replaying.failed(error)
            return False
        if filling.left or replaying.escaped():
            replaying.failed(None)
            return False
        replaying.succeeded()
        return True

    def _recompute(
        self, filling: Filling, tensors: Sequence[Tensor], mode: Any
    ) -> None:
        run = batched_again(self._run, self._hows) if self._hows else self._run
        with (
            Saving(self, filling.pack, None, self._policy, self._inner, again=True),
            self._as_before(tensors),
            self._untouched(),
        ):
            try:
                if mode is None:
                    run(*tensors)
                else:
                    with within(self._policy, followed=True), mode:
                        run(*tensors)
                        mode.end()
            except Stop:
                pass
            except Exception:
                # TorchScript's interpreter raises another error in place of `Stop`.
                if filling.left:
                    raise

    def _run(self, *tensors: Tensor) -> tuple[()]:
        # Who uses the user's modules meanwhile must not see others in them.
        in_place = not self._hows and self.held.are_own(tensors)
        with Run(tensors, "none" if in_place else "all") as run:
            self._again(run)
        return ()

    def _again(self, run: Run) -> None:
        self._snapshot.call(run)

    def _untouched(self) -> AbstractContextManager[Any]:
        """Leave nothing on the user's own leaves."""
        own = self.held.leaves()
        not_cleared = NotCleared(own)
        if not (self._moves or self._marked):
            return not_cleared
        everything = contextlib.ExitStack()
        everything.enter_context(not_cleared)
        everything.enter_context(Untouched(own, self.held.own_attributes()))
        if self._moves:
            everything.enter_context(Unmoved(own, self._moved_inside))
        return everything

    def _moved_inside(self, k: int) -> MutationError:
        return self._changed_inside(self.held.own[k])

    def _as_before(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Restore the state of the call, and refuse to read what changed since."""
        ambient = self.ambient
        state = ambient.restored() if self._done else ambient.restored_within()
        changed = self.held.changed()
        if not changed:
            return state
        names = {
            tensors[i].untyped_storage()._cdata: self._snapshot.name_of(i)
            for i in changed
        }
        both = contextlib.ExitStack()
        both.enter_context(state)
        both.enter_context(Watch(names))
        return both

    # --- For reports ---

    @property
    def label(self) -> str:
        """What errors and reports call it."""
        return self._snapshot.label

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        return self._snapshot.name_of(index)

    def handle_at(self, place: int) -> Handle | None:
        """Return a handle by its number among all that was saved, if it is alive."""
        ref = self._handles[place]
        return None if ref is None else ref()

    @property
    def following(self) -> Following | None:
        """What it does with its record, if anything."""
        return self._following


def _forget(ref: weakref.ref[Saved]) -> None:
    """Drop the values that nobody read, at the end of a backward."""
    call = ref()
    if call is not None:
        for handle in call.alive():
            handle.value = None


_IN_PLACE = (
    "remat: `{name}` was changed in place inside {label}. A recomputation would start "
    "from the changed value: work on a copy (`{name}.clone()`) and return it."
)
