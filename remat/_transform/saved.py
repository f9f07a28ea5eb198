"""The lowering to saved handles: the graph of a call is the one that plain code makes.

The forward runs the function as it is, on the user's own tensors and objects, under a
hook that puts handles in place of what the graph saves. The first handle that a
backward reads has the function run again, under a hook that puts the j-th saved tensor
into the j-th handle, and that ends the run once each handle that is alive has its
value. A handle of a node that no backward can reach any more is not alive.

`api` calls `call_saved`. A handle that is read calls `Saved.value_of`.

Invariant: both runs save alike. The forward alone decides what is saved itself and what
becomes a handle. A recompute counts all that is saved, and to save something else is an
error.
Rejected: one node for a call, whose backward is again a call (`function`). What leaves
the function other than by being returned would have no graph, hooks would fire at other
times, and gradients of all inputs would arrive together, whichever were asked for.
"""

import functools
import operator
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._ambient.draws import without_draws
from remat._base.context import Context, Decisions, here, within
from remat._base.types import Fn
from remat._graph.handles import Handle, unpack
from remat._live.reach import Reach
from remat._partial.decide import warn_if_asked, why_no_record
from remat._partial.options import Options
from remat._partial.stores import SavedInHandles
from remat._torch import (
    Noted,
    Renorm,
    current_layer,
    eager_only,
    pop_hooks,
    push_hooks,
    unbatched,
    unwrap_dead,
)
from remat._transform import refill
from remat._transform.changes import changes_of
from remat._transform.checks import changed_inside
from remat._transform.leaves import Effects, Watched
from remat._transform.packing import Packing
from remat._transform.saved_call import SavedCall


_requires_grad = operator.attrgetter("requires_grad")


@eager_only
def call_saved(
    fn: Fn, label: str, args: Any, kwargs: dict[str, Any], options: Options
) -> Any:
    """Call a function so that a backward recomputes what its graph saves."""
    if options.rng == "error":
        fn = without_draws(fn, label)
    try:
        reach = Reach(fn, label, args, kwargs)
    except TypeError as error:
        if not str(error).startswith("unhashable type"):
            raise
        warnings.warn(_UNHASHABLE.format(label=label, error=error), stacklevel=3)
        return fn(*args, **kwargs)
    inputs = reach.take_tensors()
    inputs[: reach.first_parameter] = map(unwrap_dead, inputs[: reach.first_parameter])
    vmaps: Sequence[Any] = ()
    if current_layer() is not None:
        inputs, vmaps = unbatched(inputs)
    needs = [*map(_requires_grad, inputs)]
    if reach.is_lazy or True not in needs:
        return fn(*args, **kwargs)
    call = Saved(reach, options, inputs, needs, vmaps)
    call.follow(getattr(fn, "__self__", fn), inputs)
    return call.forward(fn, args, kwargs, inputs)


class Saved(SavedCall):
    """One call, which can be run."""

    __slots__ = ()

    def follow(self, owner: Any, inputs: Sequence[Tensor]) -> None:
        """Decide whether the call is recorded, or follows a record.

        Args:
            owner: the object that the function is a method of, or the function.
            inputs: of the call.
        """
        policy, prune = self.policy, self.options.prune
        if policy is None and prune is not True:
            return
        label, hooks = self.label, self.residual_hooks
        around = here().decisions
        if around is not None and around.again:
            decision = around.next()
            if decision is not None:
                self.following = SavedInHandles.of_decision(decision, inputs, hooks)
            return
        self.index = None if around is None else around.reserve()
        situation = self.situation(inputs)
        why = why_no_record(policy, prune, situation)
        warn_if_asked(policy, prune, situation, label, why)
        if not why:
            cache = self.kind(inputs).cache(policy, prune).for_owner(owner)
            self.following = SavedInHandles(
                cache, policy, prune, inputs, label, hooks, nested=self.is_nested
            )

    def forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        """Run the function as it is."""
        following, watched = self.following, Watched(self.inputs.leaves())
        packing = Packing(self, inputs, None if following is None else following.pack)
        self.handles, self.metas = packing.handles, packing.metas
        context, noted = here(), Noted()
        self.seeds = noted.seeds
        before = context.only_our_hooks, context.policy, context.decisions
        inside = context.inside
        context.only_our_hooks = self._only_ours(context)
        context.policy, context.decisions = self.policy, Decisions(self.inner)
        if context.examining is not None:
            context.inside = (*inside, self)
        noted.start()
        push_hooks(packing.pack, unpack)
        try:
            if following is None or following.mode is None:
                result = fn(*args, **kwargs)
            else:
                with within(self.policy, followed=True), following.mode:
                    result = fn(*args, **kwargs)
                following.mode.end()
        except BaseException:
            # Its mode holds what the policy may save, with the graph, which holds the
            # call: the garbage collector would not see that.
            self.following = None
            raise
        finally:
            pop_hooks()
            context.only_our_hooks, context.policy, context.decisions = before
            context.inside = inside
            noted.end()
            packing.done()
            self.reach.forward_done()
        handles = [None if ref is None else ref() for ref in self.handles]
        if handles.count(None) < len(handles):
            self._end(inputs, handles, watched.effects(inputs), noted.renorms)
        return result

    def _only_ours(self, context: Context) -> bool:
        """Say whether all hooks for saved tensors here are of calls of remat."""
        hooks = self.hooks
        if hooks is None or hooks[0] is context.scope_pack:
            return True
        return context.only_our_hooks and self.is_nested

    def _follow_nothing(self, inputs: Sequence[Tensor], why: str) -> None:
        """Recompute all, and warn if that is not what was asked for."""
        self.following = None
        policy, prune = self.policy, self.options.prune
        situation = self.situation(inputs)
        warn_if_asked(policy, prune, situation, self.label, why)

    def _end(
        self,
        inputs: Sequence[Tensor],
        handles: Sequence[Handle | None],
        effects: Effects,
        renorms: Sequence[Renorm],
    ) -> None:
        """Keep what a recompute needs, now that the forward has ended.

        Raises:
            MutationError: the function changed an input that is not copied.
        """
        self.effects = effects
        self.ambient.forward_done(keeps_casts=True)
        following = self.following
        if following is not None:
            why = following.gives_up(accumulates=effects.accumulates)
            if why:
                self._follow_nothing(inputs, why)
                following = None
            else:
                # Before the inputs: a recompute of the call around has residuals packed
                # while this call runs, and has to pack in the same order.
                following.finish(handles)
        changed = self.inputs.note_changes(inputs, renorms)
        if changed is not None:
            reach = self.reach
            run = functools.partial(refill.run_again, self)
            changes = changes_of(reach, inputs, run)
            raise changed_inside(reach, changed, changes)
        if following is not None:
            self.inputs.let_go(following.dropped)
            around = here().decisions
            if around is not None and self.index is not None:
                around.note(self.index, following.decision)
        self.is_done = True

    def value_of(self, handle: Handle) -> Tensor:
        """Return the value of a handle, by a recompute."""
        return refill.value_of(self, handle)


_UNHASHABLE = (
    "remat: {label} reaches an object of an {error}, whose metaclass has no "
    "`__hash__`. The function is called as it is, and no memory is saved. Give the "
    "metaclass `__hash__ = type.__hash__`."
)
