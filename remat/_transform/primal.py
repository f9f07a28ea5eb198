"""A user's call as a program: how it is the forward, how it is recomputed and checked.

Invariant: the first run is the forward. It fixes the structure of the result and the
state that later runs, the recomputations, restore and are checked against.
Rejected: running the forward without grad mode. Composite operations decompose
differently there, so a recomputation would be another function.
"""

import contextlib
import functools
import gc
import itertools
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._ambient.ambient import Ambient
from remat._base.absent import Absent, may_be_absent
from remat._base.checks import (
    Watch,
    data_moved,
    places_of,
    reached_leaves,
    version_of,
    versions_of,
    views_of,
)
from remat._base.context import here, is_followed, within
from remat._base.errors import CaptureError, MutationError, RecomputeError
from remat._base.program import Program
from remat._base.tracebacks import note
from remat._base.types import TENSORS, Fn, Outputs
from remat._capture.search import holds_tensors
from remat._capture.structure import Out
from remat._partial.cache import cache_of
from remat._partial.decide import Situation, warn_if_asked, why_no_record
from remat._partial.forward_plan import ForwardPlan
from remat._partial.options import DEFAULT, Options, reference
from remat._partial.recomputation import finish
from remat._partial.recorder import Recorder
from remat._partial.replay import Replay
from remat._torch import (
    base_tensor,
    current_layer,
    is_graph_held,
    set_grad_enabled,
    torch_functions,
    without_hooks,
)
from remat._transform.buffers import shield, update, written
from remat._transform.call import Call
from remat._transform.foreign import Foreign


# Cheaper than comprehensions, on a path taken on every call.
_requires_grad = operator.attrgetter("requires_grad")


class Primal(Call):
    """One call of a user's function, as the program that is differentiated."""

    __slots__ = ("_ambient", "_classes", "_policy", "_prune", "_versions")

    def __init__(
        self,
        fn: Fn,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options = DEFAULT,
    ) -> None:
        super().__init__(fn, label, args, kwargs, options.rng)
        self._prune = options.prune
        self._policy = options.joined()

    @override
    def run(self, *leaves: Tensor, mode: Any = None) -> Outputs:
        """Recompute, in the state of the forward; the first time, be the forward."""
        if self._out is None:
            if self.above:
                with Foreign(self.above, leaves, self.name_of):
                    result = self._followed(leaves, mode, first=True)
                self.above = ()
            else:
                result = self._followed(leaves, mode, first=True)
            outs, self._out = Out.split(result, leaves)
            for value in self._out.statics.values():
                if holds_tensors(value):
                    kind = type(value).__qualname__
                    raise CaptureError(_OPAQUE.format(label=self._label, kind=kind))
            return outs
        try:
            return self._recompute(self._out, leaves, mode)
        except Exception as error:
            note(error, f"remat: raised while recomputing {self._label}.")
            raise

    def _recompute(self, out: Out, leaves: Sequence[Tensor], mode: Any) -> Outputs:
        context = here()
        context.recomputing += 1
        try:
            return self._run_again(out, leaves, mode)
        finally:
            context.recomputing -= 1

    def _run_again(self, out: Out, leaves: Sequence[Tensor], mode: Any) -> Outputs:
        with self._as_before(leaves, mode):
            fresh = self._fresh_buffers(leaves)
            if self._classes and current_layer() is None:
                # Saved tensors come back as plain ones.
                fresh = [*map(_as_class, fresh, self._classes)]
                with torch_functions():
                    result = self._followed(fresh, mode, first=False)
            else:
                result = self._followed(fresh, mode, first=False)
        return out.split_again(result, fresh)

    def _followed(self, leaves: Sequence[Tensor], mode: Any, *, first: bool) -> Any:
        """Run the function, followed by a mode, if there is one."""
        if mode is None and self._policy is None:
            return self.run_around(leaves, first=first)
        around = within(self._policy, followed=mode is not None)
        with around, mode or contextlib.nullcontext():
            result = self.run_around(leaves, first=first)
        if mode is not None:
            mode.end()
        return result

    def _forward_plan(
        self, program: Program, leaves: Sequence[Tensor], inner: Sequence[Tensor]
    ) -> ForwardPlan | None:
        """Return how the forward is traced, if it is."""
        policy, prune = self._policy, self._prune
        situation = self.situation(leaves)
        why = why_no_record(policy, prune, situation)
        warn_if_asked(policy, prune, situation, self._label, why)
        if why:
            return None
        options = reference(policy), prune, *self.facts.needs, self._ambient.key
        cache = cache_of((*program.signature, *options), leaves)
        cache = cache.for_owner(getattr(self._fn, "__self__", self._fn))
        return ForwardPlan(cache, policy, prune, leaves, self._label, inner)

    def situation(self, leaves: Sequence[Tensor]) -> Situation:
        """Return what decides whether the call is recorded."""
        kinds = leaves if self._classes else ()
        others = (type(t).__name__ for t in kinds if not may_be_absent(t))
        return Situation(
            is_saved=False,
            is_compiled=self._snapshot.compiled,
            in_forward_mode=self.facts.in_forward_mode,
            kind=next(others, ""),
            elements=sum(map(Tensor.numel, leaves)),
        )

    # --- The forward ---

    @override
    def forward(self, program: Program, leaves: Sequence[Tensor]) -> Sequence[Any]:
        """Evaluate for the first time, as `program`: this, or this under vmap."""
        facts = self.facts
        snapshot = self._snapshot
        self._ambient = Ambient(snapshot.streams, snapshot.always)
        inner = self.stand_ins(leaves, facts.needs)
        self._versions = versions_of(leaves)
        plain = TENSORS.issuperset(map(type, leaves))
        self._classes = () if plain else [*map(type, leaves)]
        facts.untracked = None in self._versions
        copies = shield(inner, facts.needs, snapshot.buffers)
        forward_plan = self._forward_plan(program, leaves, inner)
        mode = None if forward_plan is None else forward_plan.mode
        outs = self._run_watched(program, inner, mode)
        self._ambient.forward_done()
        kept = self._update_buffers(leaves, copies) if copies else ()
        self._check_inputs(leaves, inner)
        facts.used, asks_grad_mode = self._reached(outs, inner)
        facts.asks_grad_mode = facts.asks_grad_mode or asks_grad_mode
        facts.views = views_of(outs, inner, copies)
        facts.differentiable = [*map(_requires_grad, outs), *[False] * len(kept)]
        results = [*map(Tensor.detach, outs), *kept]
        if forward_plan is not None:
            results += self._finish_plan(forward_plan, outs)
        del outs, mode, forward_plan  # which hold what the graph does
        self._fn: Any = None
        self._search = None
        self._check_leaks(leaves, inner)
        for above in facts.above:
            facts.used = sorted({*facts.used, *above.used})
            for j in above.differentiable:
                facts.differentiable[j] = True
        return results

    def _run_watched(
        self, program: Program, inner: list[Tensor], mode: Any
    ) -> Sequence[Any]:
        """Run with grad mode on."""
        set_grad_enabled(True)
        try:
            outs = without_hooks(self._first_run, program, inner, mode)
        except BaseException:
            self._ambient.forget_casts()
            raise
        set_grad_enabled(False)
        return outs

    def _finish_plan(
        self, forward_plan: ForwardPlan, outs: Sequence[Any]
    ) -> list[Tensor]:
        """Note how the call is recomputed; return the tensors kept for it."""
        facts = self.facts
        if isinstance(forward_plan.mode, Recorder):
            forward_plan.mode.note_saved(outs)
        may_drop = not facts.above and not here().saves
        facts.recomputation, residuals = finish(forward_plan, outs, may_drop=may_drop)
        facts.residuals = len(residuals)
        facts.differentiable = [*facts.differentiable, *[False] * len(residuals)]
        return residuals

    def _first_run(self, program: Program, inner: list[Tensor], mode: Any) -> Outputs:
        run = program.run
        if mode is not None:
            run = functools.partial(run, mode=mode)
        try:
            return self._labelled(run, *inner) if self.above else run(*inner)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            self._out = None
            name = self._find_changed(program, inner)
            message = _IN_PLACE.format(name=name, label=self._label)
            raise MutationError(message) from error

    def _reached(
        self, outs: Sequence[Any], inner: list[Tensor]
    ) -> tuple[Sequence[int], bool]:
        needs = self.facts.needs
        if self._snapshot.is_contained and self.facts.exact:
            made = [o.grad_fn for o in outs if o.requires_grad]
            if None not in made:
                # Nothing else can be reached, and it costs a tenth of a call to look.
                # The backward finds out which of them are.
                return [*compress(itertools.count(), needs)], True
        return self._labelled(reached_leaves, outs, inner)

    def _labelled(self, check: Fn, *args: Any) -> Any:
        try:
            return check(*args)
        except CaptureError as error:
            if str(error).startswith("remat"):
                raise
            raise CaptureError(f"remat: in {self._label}, {error}") from None

    def _find_changed(self, program: Program, inner: list[Tensor]) -> str:
        """Name the input that torch refused to change, by letting copies be changed."""
        copies = [t.detach().clone() for t in inner]
        ambient = Ambient(self._snapshot.streams, True)
        ambient.forward_done()
        with contextlib.suppress(Exception), torch.no_grad(), ambient.restored():
            program.run(*copies)
        self._out = None
        names = [self.name_of(i) for i, t in enumerate(copies) if t._version]
        return names[0] if names else "an input"

    def _check_inputs(self, leaves: Sequence[Tensor], inner: Sequence[Tensor]) -> None:
        needs, kept = self.facts.needs, self.facts.kept
        now = [*map(_requires_grad, inner)]
        if self._versions == versions_of(leaves) and needs == now:
            return
        for i, t in enumerate(leaves):
            if version_of(t) != self._versions[i] and i not in kept:
                raise self._error(_IN_PLACE, i)
            if not needs[i] and inner[i].requires_grad:
                raise self._error(_REQUIRES_GRAD, i)

    def _check_leaks(self, leaves: Sequence[Tensor], inner: Sequence[Tensor]) -> None:
        """Refuse, now that its graph should be gone, what would lose a gradient."""
        needs = self.facts.needs
        for t in inner:
            if t.requires_grad and t.grad is not None:
                raise CaptureError(_BACKWARD.format(label=self._label))
        places = places_of(leaves, needs)
        if places is None or places != places_of(inner, needs):
            for i, need in enumerate(needs):
                if need and data_moved(leaves[i], inner[i]):
                    raise self._error(_IN_PLACE, i)
        # A mode around this holds results for its call, which looks itself.
        if self._snapshot.is_contained or is_followed():
            return
        if not is_graph_held(inner):
            return
        torch.clear_autocast_cache()  # it may be of an autocast that is off by now
        gc.collect()
        if is_graph_held(inner):
            raise CaptureError(_LEAKED.format(label=self._label))

    def _error(self, message: str, index: int) -> MutationError:
        name = self.name_of(index)
        return MutationError(message.format(name=name, label=self._label))

    def _update_buffers(
        self, leaves: Sequence[Tensor], copies: dict[int, Tensor]
    ) -> list[Tensor]:
        """Write back what the forward made of them; return their values from before."""
        before = {}
        for i in written(leaves, copies, self._snapshot.buffers):
            if i not in self._snapshot.buffers:
                raise self._error(_IN_PLACE, i)
            before[i] = update(leaves[i], copies[i])
            self._versions[i] = before[i]._version
        self.facts.kept = list(before)
        return list(before.values())

    def _fresh_buffers(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy what a recomputation will update, for it to be updated in vain."""
        if not self.facts.kept:
            return leaves
        fresh = list(leaves)
        for i in self.facts.kept:
            if type(leaves[i]) is not Absent:
                fresh[i] = leaves[i].clone()
        return fresh

    # --- Recomputation ---

    def _as_before(
        self, leaves: Sequence[Tensor], mode: Any
    ) -> AbstractContextManager[Any]:
        """Restore the ambient state, and refuse to read leaves that changed since."""
        state = self._ambient.restored()
        bases = leaves if current_layer() is None else [*map(base_tensor, leaves)]
        if versions_of(bases) == self._versions:
            return state
        pairs = enumerate(zip(bases, self._versions, strict=True))
        changed = [
            i
            for i, (t, v) in pairs
            if v is not None and type(t) is not Absent and version_of(t) != v
        ]
        if not changed:
            return state
        if isinstance(mode, Replay):
            # An operation that reads it may be left out, and its graph may not.
            for i in mode.schedule.plan.needed.intersection(changed):
                raise self._error(_CHANGED, i)
        names = {bases[i].untyped_storage()._cdata: self.name_of(i) for i in changed}
        both = contextlib.ExitStack()
        both.enter_context(state)
        both.enter_context(Watch(names))
        return both

    @override
    def is_as_recorded(self, outs: Sequence[Any]) -> bool:
        """Check that a recomputation is differentiable where the forward was.

        Raises:
            RecomputeError: it is not.
        """
        now, then = [*map(_requires_grad, outs)], self.facts.differentiable
        if now != then and now != then[: len(now)]:
            message = _GRADLESS.format(label=self._label, now=now, then=then)
            raise RecomputeError(message)
        return True

    @override
    def check_reached(
        self, outs: Sequence[Any], inner: Sequence[Tensor], missing: Sequence[int]
    ) -> None:
        """Check that a recomputation reaches the leaves that the forward reached.

        Raises:
            RecomputeError: it does not reach one, whose gradient would be lost.
        """
        if self._snapshot.is_contained and self.facts.exact:
            return  # where nobody has looked what the forward reaches
        reached = {*reached_leaves(outs, inner)[0]}
        for i in missing:
            if i not in reached:
                name = self.name_of(i)
                raise RecomputeError(_LOST.format(name=name, label=self._label))


def _as_class(tensor: Tensor, kind: type) -> Tensor:
    if type(tensor) is not Tensor or not issubclass(kind, Tensor):
        return tensor
    return tensor if kind is Absent else tensor.as_subclass(kind)


_OPAQUE = (
    "remat: {label} returned a {kind} that holds or makes tensors, which remat cannot "
    "see. Return a pytree of tensors, or register the class as a pytree node."
)
_BACKWARD = (
    "remat: {label} calls backward(), whose gradients of its inputs would be lost. "
    "Use torch.autograd.grad with inputs=, and return what is needed."
)
_LEAKED = (
    "remat: a tensor computed inside {label} left it other than by being returned "
    "(kept in a list, an attribute or a global, say). Under torch.func its gradient "
    "would be lost. Return it instead."
)
_GRADLESS = (
    "remat: recomputing {label} gave outputs that require grad: {now}, where in the "
    "forward: {then}. The function must compute the same thing twice."
)
_LOST = (
    "remat: recomputing {label} gave results that do not depend on `{name}`, where in "
    "the forward they did. The function must compute the same thing twice: if it "
    "depends on outside state that changed, pass that state as an argument."
)
_IN_PLACE = (
    "remat: `{name}` was changed in place inside {label}. A recomputation would start "
    "from the changed value: work on a copy (`{name}.clone()`) and return it."
)
_CHANGED = (
    "remat: `{name}` was changed in place between the forward and the backward of "
    "{label}, which reads it. Change a copy, or change it after the backward."
)
_REQUIRES_GRAD = (
    "remat: `{name}` was made to require grad inside {label}, where its gradient would "
    "be lost. Call requires_grad_() before the call, or on a detached copy inside."
)
