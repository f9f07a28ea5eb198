"""What a forward keeps of a call within a rematerialized one, for its recomputes.

Each rematerialized call has a list of places, in the order in which calls with rules
run (`here().regions`). A forward notes a place in the lists of all calls around, and
the recompute of any of these finds it there, or there is an error.

Invariant: what is kept are values without a graph, or a graph with leaves of its own.
Rejected: to keep by position among what the graph saves. What a rule keeps, nobody
packs in a recompute.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from remat._ambient.streams import device_streams, global_streams, moved_since
from remat._base.context import here
from remat._base.errors import RecomputeError
from remat._base.op import Op
from remat._base.program import Evaluation
from remat._base.pytree import tensors_and_frame
from remat._base.source import user_line
from remat._graph.handles import Residual, unpack
from remat._torch.autograd import (
    base_dual_level_active,
    hooks_here,
    resume_hooks,
    suspend_hooks,
)
from remat._torch.batches import lowered, raised
from remat._torch.levels import JVP, requires_grad_at_any_level, transforms
from remat._torch.modes import LeanDispatchMode, dispatch_modes, outside_dispatch_mode
from remat._torch.process import is_of_checkpoint


class PlaceInCall:
    """What is kept of one call."""

    is_in_function = False  # whether a graph around is dropped when a forward has ended
    policy: Any = None  # of rematerialized calls within
    residuals: Sequence[Residual] | None = None  # None once they are not kept any more
    outs: Sequence[Tensor] = ()  # of a graph that is kept
    streams: Sequence[Any] = ()  # random, that it reaches besides those of the process
    _moved: Sequence[tuple[Any, Any]] = ()  # streams, and where the call left them

    def __init__(self, name: str) -> None:
        self.name, self.source = name, user_line()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what recomputes leave out, and note what it draws."""
        streams, own = global_streams(), (*device_streams(), *self.streams)
        before, others = streams.read(), [(each, each.read()) for each in own]
        with alone(self.policy):
            result = fn(*args, **kwargs)
        each = zip(streams.streams, before, streams.read(), strict=True)
        moved: list[Any] = [(s, now) for s, then, now in each if then != now]
        moved += [(each, each.read()) for each, _ in moved_since(others)]
        self._moved = moved
        return result

    def skip(self) -> None:
        """Leave the streams as the forward left them."""
        for stream, state in self._moved:
            stream.write(state)

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep tensors without a graph, as the user's hooks for saved tensors do."""
        hooks = next((pair for pair in hooks_here() if pair[1] is not unpack), None)
        op = Op(self.name, source=self.source)
        self.residuals = [Residual(t, op, hooks) for t in tensors]

    def values(self) -> list[Tensor]:
        """Return the tensors that are kept."""
        with outside(), alone():  # hooks may run functions of the user
            return [each.value() for each in self.residuals or ()]

    def stored(self) -> list[Tensor]:
        """Return the tensors that are kept; not those that hooks have."""
        return [t for each in self.residuals or () for t in each.stored()]

    def backward_done(self) -> None:
        """Let go of what a recompute left for a backward."""

    @staticmethod
    def in_node(
        places: Sequence["PlaceInCall"], results: Sequence[Any], evaluation: Evaluation
    ) -> tuple[Sequence[Any], Evaluation]:
        """Add what places keep to what the node of a call around saves."""
        places = [place for place in places if place.residuals]
        kept = [r.value() for place in places for r in place.residuals or ()]
        saved = SavedWithPlaces(places, evaluation.planned)
        if not here().regions:  # else the recompute of a call around reads it, too
            for place in places:
                place.residuals = None
        return [*results, *kept], evaluation._replace(
            differentiable=[*evaluation.differentiable, *[False] * len(kept)],
            residuals=evaluation.residuals + len(kept),
            planned=saved,
        )


class SavedWithPlaces:
    """What a node saves: the inputs of its call, residuals, and what places keep."""

    def __init__(self, places: Sequence[PlaceInCall], planned: Any) -> None:
        self._planned = planned
        self.plans = None if planned is None else planned.plans
        self.dropped = () if planned is None else planned.dropped
        # Without the tensors, which the node saves.
        self._of = [(p, [r.op for r in p.residuals or ()]) for p in places]
        self.ops = [op for _, ops in self._of for op in ops]

    def kept(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs that are kept."""
        return inputs if self._planned is None else self._planned.kept(inputs)

    def carry_out(
        self, targets: Sequence[int], saved: Sequence[Tensor], pull: Callable[..., Any]
    ) -> Any:
        """Return `pull(inputs, mode)`, while places hold what the node saved."""
        before = [place.residuals for place, _ in self._of]
        end = len(saved) - sum(len(ops) for _, ops in self._of)
        ours, saved = iter(saved[end:]), saved[:end]
        for place, ops in self._of:
            place.residuals = [Residual(next(ours), op) for op in ops]
        try:
            if self._planned is None:
                return pull(saved, None)
            return self._planned.carry_out(targets, saved, pull)
        finally:
            for (place, _), then in zip(self._of, before, strict=True):
                place.residuals = then


@contextmanager
def alone(policy: Any = None) -> Iterator[None]:
    """Run the body as if no call were around, for recomputes do not run it again."""
    context = here()
    before = context.regions, context.nested_choices, context.policy
    context.regions, context.nested_choices, context.policy = (), None, policy
    try:
        yield
    finally:
        context.regions, context.nested_choices, context.policy = before


@contextmanager
def outside() -> Iterator[None]:
    """Run the body outside of remat's hooks and modes, and within those of the user."""
    context, hooks = here(), suspend_hooks()
    resume_hooks([pair for pair in hooks if pair[1] is not unpack])
    before = context.only_our_hooks, context.modes
    context.only_our_hooks, context.modes = False, 0
    lean = (mode for mode in dispatch_modes() if isinstance(mode, LeanDispatchMode))
    mode = next((mode for mode in lean if mode.is_of_call), None)
    try:
        with nullcontext() if mode is None else outside_dispatch_mode(mode):
            yield
    finally:
        context.only_our_hooks, context.modes = before
        suspend_hooks()
        resume_hooks(hooks)


def has_jvp() -> bool:
    """Say whether a level of forward mode is open here."""
    return JVP in transforms() or base_dual_level_active()


def are_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Say whether what is computed from some tensors is differentiated in some mode."""
    # A tensor of a vmap does not say that it requires grad below.
    in_reverse = any(map(requires_grad_at_any_level, tensors))
    return (torch.is_grad_enabled() and in_reverse) or has_jvp()


def is_in_region() -> bool:
    """Say whether a rematerialized call runs here, and within it no torch's checkpoint.

    That one recomputes what is in it where no call of ours runs.
    """
    if not here().regions:
        return False
    for pack, other in hooks_here():
        if other is unpack or is_of_checkpoint(pack):
            return other is unpack
    return True


def is_noted(name: str) -> bool | None:
    """Say whether a forward noted a call that starts here; None in a forward."""
    for places, is_again, index, _ in reversed(here().regions):
        if is_again:
            return index < len(places) and places[index].name == name
    return None


def place_of(kind: Any, name: str) -> tuple[Any, bool]:
    """Return the place of a call that starts here, and whether a forward noted it.

    To be called within a rematerialized call. `kind` makes the place.
    """
    is_in_function = False
    noting: list[Any] = []
    for region in reversed(here().regions):
        places, is_again, index, is_function = region
        if is_again:
            region[2] = index + 1
            place = places[index] if index < len(places) else None
            if place is None or (type(place), place.name) != (kind, name):
                then = f"{place.name} at {place.source}" if place else "nothing"
                now = f"{name} at {user_line()}"
                raise RecomputeError(_DIFFERS.format(then=then, now=now))
            break
        noting.append(places)
        is_in_function |= is_function
    else:
        place, is_again = kind(name), False
        place.is_in_function = is_in_function
    for places in noting:
        places.append(place)
    return place, is_again


_DIFFERS = (
    "remat: a recompute calls {now}, where the forward called {then}. The function "
    "must do the same thing twice: if it depends on outside state that changed, pass "
    "that state as an argument."
)


class Lowered:
    """A pytree whose tensors are below all levels. `args` tell which levels those are.

    `tensors` are these, without their graph; None if they cannot be told.
    """

    __slots__ = ("_dims", "_frame", "tensors")

    def __init__(self, tree: Any, args: Sequence[Tensor]) -> None:
        tensors, self._frame = tensors_and_frame(tree)
        found, self._dims = lowered(tensors, args) or (None, ())
        self.tensors = None if found is None else [t.detach() for t in found]

    def take(self) -> list[Tensor]:
        """Return the tensors, which do not stay here."""
        tensors = self.tensors
        assert tensors is not None
        self.tensors = []
        return tensors

    def raised(self, args: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Return the pytree of these tensors, at the levels here."""
        return self._frame.filled(raised(tensors, self._dims, args))
