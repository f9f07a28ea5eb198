"""A call under base autograd: its graph is the one that plain code makes.

The forward runs the function as it is, on the user's own tensors and objects, under
hooks that put handles (`_handles`) in place of what the graph saves. The first handle
that a backward reads has the function run again as the call was, under hooks that put
the j-th saved tensor into the j-th handle, and that stop it as soon as each handle that
is still alive has its value. Which ones are alive the graph itself tells: the handles
of nodes that no backward can reach any more are gone.

Invariant: both runs save alike. What stays itself and what becomes a handle is decided
in the forward alone; a recompute counts all that is saved, and to save something else
is an error. The graph of a recompute is differentiated by nobody but the function.
Rejected: one node for a call, whose backward is again a call (`_transform`). What
leaves the function other than by being returned would have no graph, hooks would fire
at other times, and gradients of all inputs arrive together, whichever were asked for.
"""

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from remat._absent import Absent
from remat._ambient import Ambient
from remat._buffers import is_same as has_same_bytes
from remat._capture import Search
from remat._checks import Watch, version_of, versions_of
from remat._compat import (
    batched_again,
    below_all_levels,
    current_layer,
    current_task,
    is_of_torch_func,
    keeps_graph,
    top_hooks,
    unbatched,
    unseen,
    unwrap_dead,
    when_done,
    without_node,
)
from remat._context import CONTEXT, within
from remat._decide import Situation, warn_if_asked, why_as_it_is
from remat._draws import without_draws
from remat._errors import MutationError
from remat._filling import Filling, Saving, Stop
from remat._following import Following, Replaying
from remat._handles import Handle, Kept, Outer, unpack
from remat._leaves import Untouched, attributes_of, gradients_of
from remat._options import Options
from remat._plan import Fate
from remat._residual import Offloaded, Residual
from remat._restore import Run
from remat._snapshot import Snapshot
from remat._traces import Kind, metas_of
from remat._tracing import Tracing
from remat._types import TENSORS, Fn


_requires_grad = operator.attrgetter("requires_grad")


def call_saved(
    fn: Fn, label: str, args: Any, kwargs: dict[str, Any], options: Options
) -> Any:
    """Call a function so that a backward recomputes what its graph saves."""
    if options.rng == "error":
        fn = without_draws(fn, label)
    search = Search(shallow=True)
    snapshot = Snapshot(fn, label, args, kwargs, search)
    leaves, hows = [*map(unwrap_dead, search.found.tensors)], []
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
    """

    __slots__ = (
        *("__weakref__", "_accumulates", "_ambient", "_attributes", "_copied"),
        *("_done", "_following", "_handles", "_held", "_hows", "_inner", "_is_inside"),
        *("_kinds", "_metas", "_needs", "_outer", "_own", "_policy", "_prune"),
        *("_place", "_snapshot", "_versions"),
    )

    def __init__(
        self,
        snapshot: Snapshot,
        leaves: Sequence[Tensor],
        needs: list[bool],
        hows: Sequence[Any],
        options: Options,
    ) -> None:
        self._snapshot, self._needs, self._hows = snapshot, needs, hows
        self._policy, self._prune = options.joined(), options.prune
        self._inner: list[Any] = []
        self._outer = outer = top_hooks(True)
        self._is_inside = outer is not None and outer[1] is unpack
        self._handles: list[weakref.ref[Handle] | None] = []
        self._metas: list[Any] = []
        self._versions = versions_of(leaves)
        self._copied = _to_copy(leaves, needs, snapshot.buffers)
        plain = TENSORS.issuperset(map(type, leaves))
        self._kinds = None if plain else [*map(type, leaves)]
        self._own = [i for i, t in enumerate(leaves) if _is_own(t)]
        self._attributes = attributes_of(leaves)
        self._held = [self._hold(i, t) for i, t in enumerate(leaves)]
        self._ambient = Ambient(snapshot.streams, snapshot.always)
        self._done = self._accumulates = False
        self._following: Following | None = None
        self._place: int | None = None

    def _hold(self, i: int, t: Tensor) -> Any:
        """Return what is held of an input: never the graph that it has."""
        if i in self._copied:
            with unseen():
                return t.clone()
        if _is_own(t):
            if self._is_inside:
                # To be counted: in a recompute of the call around it may be no leaf.
                self._outer[0](t)
            return t
        return self._hold_itself(t)

    def _hold_itself(self, t: Tensor) -> Any:
        return t.detach() if self._outer is None else Outer(t, self._outer)

    # --- The forward ---

    def follow(self, owner: Any, leaves: Sequence[Tensor]) -> None:
        """Decide whether the call is recorded, or follows a record."""
        policy, prune, around = self._policy, self._prune, CONTEXT.decisions
        if policy is None and prune is not True:
            return
        if around is not None and around.again:
            decision = around.next()
            if decision is not None:
                self._following = Following.again(decision, leaves, self._outer)
            return
        self._place = around and around.reserve()
        call, label = self.situation(leaves), self._snapshot.label
        why = why_as_it_is(policy, prune, call)
        warn_if_asked(policy, prune, call, label, why)
        if not why:
            trace = self.kind(leaves).trace(policy, prune).of(owner)
            tracing = Tracing(trace, policy, prune, leaves)
            self._following = Following(tracing, self._outer, nested=self._is_inside)

    def situation(self, leaves: Sequence[Tensor]) -> Situation:
        """Return what decides whether the call is recorded."""
        return Situation(
            is_saved=True,
            is_compiled=self._snapshot.compiled,
            elements=sum(map(Tensor.numel, leaves)),
        )

    def kind(self, leaves: Sequence[Tensor]) -> Kind:
        """Return what the call has in common with those that share its record."""
        signature = self._snapshot.signature, str(self._hows), self._ambient.key
        return Kind((*signature, *self._needs), metas_of(leaves))

    def forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], leaves: Sequence[Tensor]
    ) -> Any:
        """Run the function as it is."""
        own = [leaves[i] for i in self._own]
        grads = gradients_of(own)
        following = self._following
        pack, empty = self._packer(leaves)
        try:
            with Saving(self, pack, self._outer, self._policy, self._inner):
                if following is None or following.mode is None:
                    result = fn(*args, **kwargs)
                else:
                    with within(self._policy, followed=True), following.mode:
                        result = fn(*args, **kwargs)
                    following.mode.end()
        finally:
            empty()
        handles = [None if ref is None else ref() for ref in self._handles]
        if handles.count(None) < len(handles):
            self._accumulates = gradients_of(own) != grads
            self._ambient.forward_done(keeps_casts=True)
            self._note_changes(leaves)
            if following is not None:
                self._finish(following, handles)
            self._done = True
        return result

    def _finish(self, following: Following, handles: Sequence[Handle | None]) -> None:
        following.finish(handles)
        for i, absent in following.dropped.items():
            self._held[i] = absent
        if self._place is not None:
            CONTEXT.decisions.note(self._place, following.decision)

    def _packer(
        self, leaves: Sequence[Tensor]
    ) -> tuple[Callable[[Tensor], Any], Callable[[], None]]:
        """Return the hook that saves a tensor in the forward, and what empties it.

        What a hook saved holds the hook, also where it does not need the call.
        """
        call: Saved | None = self
        index = dict(zip(map(id, leaves), itertools.count(), strict=False))
        versions, held, snapshot = self._versions, self._held, self._snapshot
        handles, metas = self._handles, self._metas
        observe = None if self._following is None else self._following.pack
        if CONTEXT.examining is not None:
            observe = CONTEXT.examining(self, observe)

        def itself(t: Tensor, i: int | None) -> Any:
            handles.append(None)
            metas.append(None)
            if observe is not None:
                observe(len(handles) - 1, None)
            if i is not None and type(held[i]) is Outer:
                return held[i]
            return Kept(t, snapshot, i)

        def pack(t: Tensor) -> Any:
            i = index.get(id(t))
            if i is not None and version_of(t) == versions[i]:
                return itself(t, i)
            if is_of_torch_func(t):
                t = unwrap_dead(t)
                if is_of_torch_func(t):  # of a level that was opened inside
                    itself(t, None)
                    return without_node(t)
            if t.requires_grad and t.is_leaf:
                return itself(t, None)
            handle = Handle(call, len(handles))
            handles.append(weakref.ref(handle))
            metas.append((t.shape, t.dtype, type(t.grad_fn)))
            if observe is not None:
                observe(handle.place, t)
            return handle

        def empty() -> None:
            nonlocal call, index, versions, held, snapshot, handles, metas, observe
            del call, index, versions, held, snapshot, handles, metas, observe

        return pack, empty

    def _note_changes(self, leaves: Sequence[Tensor]) -> None:
        """Drop copies of what is as it was, and refuse what changed and has none."""
        now = versions_of(leaves)
        for i in self._copied:
            # On a device, to compare is to wait for it.
            if leaves[i].is_cpu and now[i] == self._versions[i]:
                with unseen():
                    same = has_same_bytes(self._held[i], leaves[i])
                if same:
                    self._held[i] = self._hold_itself(leaves[i])
                    self._copied -= {i}
        if now == self._versions:
            return
        for i, (old, new) in enumerate(zip(self._versions, now, strict=True)):
            if old != new and i not in self._copied:
                names = self._snapshot
                message = _IN_PLACE.format(name=names.name_of(i), label=names.label)
                raise MutationError(message)

    def alive(self) -> Iterator[Handle]:
        """Yield the handles that some node still holds, of what is not kept."""
        for ref in self._handles:
            handle = None if ref is None else ref()
            if handle is not None and handle.residual is None:
                yield handle

    # --- For reports ---

    @property
    def label(self) -> str:
        """What errors and reports call it."""
        return self._snapshot.label

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        return self._snapshot.name_of(index)

    def inputs_held(self) -> list[tuple[int, Tensor]]:
        """Return the inputs that are kept for a recompute, each with its index."""
        held = enumerate(self._held)
        return [(i, t) for i, t in held if isinstance(t, Tensor) and type(t) is not Absent]

    def is_copied(self, index: int) -> bool:
        """Say whether an input is kept as a copy."""
        return index in self._copied

    def residuals_held(self) -> Sequence[Residual | Offloaded]:
        """Return what a policy keeps for a recompute."""
        return () if self._following is None else self._following.residuals_held()

    @property
    def streams(self) -> Sequence[tuple[Any, Any]]:
        """The random streams to be set back, and their states."""
        return self._ambient.moved

    def handle_at(self, place: int) -> Handle | None:
        """Return a handle by its number among all that was saved, if it is alive."""
        ref = self._handles[place]
        return None if ref is None else ref()

    def fates(self, count: int) -> Sequence[Fate]:
        """Return what becomes of its operations in a recompute, so many as there are."""
        decision = self._following and self._following.decision
        if decision:
            fates = decision[1].full.plan.fates
            if len(fates) == count:
                return fates
        return [Fate.RUN] * count

    # --- The recompute ---

    def value_of(self, asked: Handle) -> Tensor:
        """Return the value of a handle; fill all others that the backward may read.

        Raises:
            RecomputeError: the function does something else than it did.
            MutationError: it reads what was changed in place since.
        """
        in_backward = current_task() >= 0
        handles = [*self.alive()] if in_backward else [asked]
        if len(handles) > 1:
            when_done(functools.partial(_forget, weakref.ref(self)))
        try:
            self._fill(handles)
        except Exception as error:
            error.add_note(f"remat: raised while recomputing {self._snapshot.label}.")
            raise
        value = asked.value
        assert value is not None
        if keeps_graph():
            asked.value = None
        return value

    def _fill(self, handles: Sequence[Handle]) -> None:
        """Recompute what handles stand for, along a plan if there is one that fits."""
        following, check = self._following, None
        if following is not None:
            replaying = following.replay(handles)
            if replaying is not None:
                if self._fills(handles, replaying):
                    return
                if following.dropped:
                    raise following.read_what_is_gone(replaying)
            check = following.check()
        filling = Filling(handles, self._metas, self._snapshot.label)
        below_all_levels(self._recompute, filling, self._tensors(), check)
        if filling.left:
            raise filling.differs()

    def _fills(self, handles: Sequence[Handle], replaying: Replaying) -> bool:
        """Recompute along a plan; say whether it fit."""
        label = self._snapshot.label
        filling = Filling(handles, self._metas, label, is_replay=True)
        tensors = replaying.stand_ins(self._tensors())
        try:
            below_all_levels(self._recompute, filling, tensors, replaying.mode)
        except Exception as error:  # noqa: BLE001 - raised there, if it is the user's
            replaying.failed(error)
            return False
        if filling.left or replaying.mode.trouble:
            replaying.failed(None)
            return False
        replaying.succeeded()
        return True

    def _recompute(
        self, filling: Filling, tensors: Sequence[Tensor], mode: Any
    ) -> None:
        held = self._held
        own = [held[i] for i in self._own]
        attributes = self._attributes and [self._attributes[i] for i in self._own]
        with (
            Saving(self, filling.pack, None, self._policy, self._inner, again=True),
            self._as_before(tensors),
            Untouched(own, attributes),
            contextlib.suppress(Stop),
            within(self._policy, followed=mode is not None),
            mode or contextlib.nullcontext(),
        ):
            if self._hows:
                batched_again(self._run_on, self._hows)(*tensors)
            else:
                self._run_on(*tensors)
            if mode is not None:
                mode.end()

    def _run_on(self, *tensors: Tensor) -> tuple[()]:
        held = self._held
        are_own = all(tensors[i] is held[i] for i in self._own)
        # Who uses the user's modules meanwhile must not see others in them.
        with Run(tensors, "none" if are_own and not self._hows else "all") as run:
            self._snapshot.call(run)
        return ()

    def _tensors(self) -> list[Tensor]:
        """Return what a run is on: the user's own leaves, and stand-ins for others."""
        tensors = []
        own, copied = {*self._own}, self._copied
        for i, (held, need) in enumerate(zip(self._held, self._needs, strict=True)):
            if i in copied:
                tensors.append(held.clone())
            elif i in own and held.requires_grad == need and not self._accumulates:
                tensors.append(held)
            else:
                t = held.unpacked() if type(held) is Outer else held
                tensors.append(self._stand_in(i, t, need))
        return tensors

    def _stand_in(self, i: int, t: Tensor, need: bool) -> Tensor:
        """Return a leaf that is what an input was, but for its graph and its hooks."""
        if self._kinds and type(t) is Tensor and self._kinds[i] is not Tensor:
            t = t.as_subclass(self._kinds[i])  # as a plain one it came back from hooks
        if type(t) is nn.Parameter:
            new = Tensor._make_subclass(nn.Parameter, t, need)
        else:
            new = t.detach()
            if need:
                new.requires_grad_()
        if self._attributes and self._attributes[i]:
            new.__dict__.update(self._attributes[i])
        return new

    def _as_before(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Restore the state of the call, and refuse to read what changed since."""
        ambient = self._ambient
        state = ambient.restored() if self._done else ambient.restored_within()
        changed = self._changed()
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

    def _changed(self) -> list[int]:
        """Return the inputs that were changed in place since."""
        held = [None if type(t) in (Absent, Outer) else t for t in self._held]
        return [
            i
            for i, (t, then) in enumerate(zip(held, self._versions, strict=True))
            if t is not None and i not in self._copied and version_of(t) != then
        ]


def _is_own(tensor: Tensor) -> bool:
    """Say whether a recompute runs on a tensor itself."""
    return (tensor.requires_grad and tensor.is_leaf) or type(tensor) is nn.Parameter


_SMALL = 2**14  # elements


def _to_copy(
    leaves: Sequence[Tensor], needs: Sequence[bool], buffers: Mapping[int, bool]
) -> frozenset[int]:
    """Return which inputs are copied, for they may be updated without a sign.

    Batch norm does so with its running statistics: no version tells.
    """
    if False not in needs:
        return frozenset()
    return frozenset(
        i
        for i, t in enumerate(leaves)
        if not needs[i]
        and (i in buffers or t.dim() == 1)
        and type(t) is Tensor
        and t.numel() <= _SMALL
        # FSDP frees the memory of what it gathers.
        and t.untyped_storage().nbytes() >= t.nbytes
    )


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
